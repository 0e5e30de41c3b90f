"""QuRL: PPO on GSM8K with an INT8 sampler and the clipping range adapted to its ratios (ACR).

The setting is that of section 5 and table 1: Qwen2.5-0.5B-Instruct, batches of 256 prompts, 512 tokens, 15 epochs. The
weights are not scaled (UAQ), because the learning rate is large. On one GPU, or on eight:

    python examples/qurl_ppo.py
    accelerate launch --config_file configs/accelerate/ddp.yaml examples/qurl_ppo.py --gradient_accumulation_steps 1 \\
        --steps_per_generation 4

On a laptop, with a small stored model and the embedded engine:

    python examples/qurl_ppo.py --config examples/laptop.yaml --num_generations 1 --steps_per_generation 4

The command line or a YAML file, `--config`, can change every option of the recipe; `--help` lists them all, and
`--dry_run` says what the run would do. For the paper's greedy score: `trl-quant eval runs/qurl-ppo --task gsm8k`.
"""

from trl_quant.cli.train import main


RECIPE = {
    "trainer": "ppo",
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dtype": "float32",  # of the master weights: at this learning rate BF16 would round most updates away
    "output_dir": "runs/qurl-ppo",
    "dataset_name": "openai/gsm8k",
    "reward_funcs": ["gsm8k"],
    # The sampler
    "rollout_precision": "int8",
    "use_vllm": True,
    "vllm_mode": "colocate",
    "max_completion_length": 512,
    # Adaptive clipping range. The paper does not say its cap; FlashRL's is 2.
    "is_correction": "acr",
    "is_cap": 2.0,
    # The paper does not give what follows; the values are those of verl's quickstart, whose setting is the same: 256
    # prompts with one completion each, in four updates of 64
    "num_generations": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "steps_per_generation": 32,
    "learning_rate": 1e-6,
    "value_learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "loss_type": "dapo",  # a mean over tokens
    "epsilon": 0.2,
    "gamma": 1.0,
    "lam": 1.0,
    "cliprange_value": 0.5,
    "beta": 1e-3,  # in the loss, as in QuRL's equation 1
    "use_bias_correction_kl": False,  # the plain k3 estimator
    "num_train_epochs": 15,  # 435 generations
    "logging_steps": 1,
}


if __name__ == "__main__":
    main(recipe=RECIPE)
