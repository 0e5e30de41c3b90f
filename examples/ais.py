"""AIS: GRPO with an FP8 sampler, corrected as far as the batch's weights are reliable and its mismatch calls for it.

The hyperparameters are the paper's for full-parameter training of Qwen (appendix C, table 3), here on GSM8K. On eight
GPUs:

    accelerate launch --config_file configs/accelerate/fsdp2.yaml examples/ais.py --output_dir runs/ais

With LoRA, as in the paper's runs of Qwen3.5-9B: `--use_peft --lora_r 64 --lora_target_modules q_proj k_proj v_proj
o_proj gate_proj up_proj down_proj`. On a laptop, with a small stored model and the embedded engine:

    python examples/ais.py --config examples/laptop.yaml

The command line or a YAML file, `--config`, can change every option of the recipe; `--help` lists them all. Not as in
the paper: the sampler shares the trainer's GPUs.
"""

from trl_quant.cli.train import main


RECIPE = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "dtype": "float32",  # of the master weights: at this learning rate BF16 would round most updates away
    "output_dir": "runs/ais",
    "dataset_name": "openai/gsm8k",
    "reward_funcs": ["gsm8k", "format"],  # correctness and format; the paper does not say their weights
    # The sampler: a scale per tensor
    "rollout_precision": "fp8_tensor",
    "use_vllm": True,
    "vllm_mode": "colocate",
    "temperature": 0.9,
    "max_completion_length": 1024,  # of Qwen's experiments (C.3); table 3 has 256 to 512
    "chat_template_kwargs": {"enable_thinking": False},  # for which that is too short; the paper is silent
    # Adaptive importance sampling
    "is_correction": "ais",
    "is_cap": 5.0,
    "ais_delta": 0.02,
    "ais_gamma": 1.2,
    "ais_beta_var": 1.0,  # the paper has no value
    "scale_rewards": "none",  # advantages are not divided by their standard deviation
    "loss_type": "grpo",  # a mean over the tokens of each sequence first (eq. 19)
    "epsilon": 0.2,
    # The paper has a KL term and no coefficient for it; `--beta` switches it on, as eq. 19 writes it: no ratio in it
    "beta": 0.0,
    "use_bias_correction_kl": False,
    # 128 completions an update, on eight GPUs 8 x 16
    "num_generations": 8,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-6,  # to 1e-5; 1e-7 to 1e-6 with LoRA
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,  # of all
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "max_grad_norm": 0.2,
    # Checkpoints are compared every 100 steps from 600 on; where Qwen's runs end is not said.
    "max_steps": 1000,
    "save_steps": 100,
    "logging_steps": 1,
}


if __name__ == "__main__":
    main(recipe=RECIPE)
