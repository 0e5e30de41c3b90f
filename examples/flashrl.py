"""FlashRL: DAPO with an INT8 sampler, each token weighted by its capped ratio between trainer and sampler.

The hyperparameters are those of the authors' script for DAPO (recipe/flash_rl/dapo_qwen32b_int8.sh in their branch of
verl), whose Qwen2.5-32B takes 32 GPUs. On eight, with a smaller model:

    accelerate launch --config_file configs/accelerate/fsdp2.yaml examples/flashrl.py \\
        --model_name_or_path Qwen/Qwen2.5-7B --output_dir runs/flashrl

On a laptop, with a small stored model and the embedded engine:

    python examples/flashrl.py --config examples/laptop.yaml --steps_per_generation 4

The command line or a YAML file, `--config`, can change every option of the recipe; `--help` lists them all. Not as in
the script: groups that teach nothing are replaced, not sampled three times over, and `strict_math_reward` reads the
answers.
"""

from trl_quant.cli.train import main


RECIPE = {
    "model_name_or_path": "Qwen/Qwen2.5-7B",
    "dtype": "float32",  # of the master weights: at this learning rate BF16 would round most updates away
    "output_dir": "runs/flashrl",
    "dataset_name": "open-r1/DAPO-Math-17k-Processed",
    "dataset_config": "all",
    "reward_funcs": ["strict_math"],
    # The sampler
    "rollout_precision": "int8",
    "use_vllm": True,
    "vllm_mode": "colocate",
    "temperature": 1.0,
    "max_completion_length": 20480,
    # Truncated importance sampling. The cap is the script's argument: 2 in the authors' runs on GSM8K, 5 and 8 in those
    # of DAPO in INT8.
    "is_correction": "tis",
    "is_cap": 2.0,
    # DAPO: clip-higher, a loss over tokens, no KL, groups that teach nothing replaced, overlong completions shaped
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "delta": 10.0,  # dual clip, of ratios with a negative advantage
    "beta": 0.0,
    "dynamic_sampling_rounds": 9,  # ten generations at most
    "overlong_punishment": 0.2,  # the last 4096 tokens
    # 512 prompts with 16 completions each, used in 16 updates; on eight GPUs 8 x 64 completions an update
    "num_generations": 16,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 64,
    "steps_per_generation": 1024,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 160,  # 10 generations
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "max_steps": 3200,  # 200 generations, as in QuRL's comparison (the script: one epoch of DAPO's repeated data)
    "logging_steps": 1,
}


if __name__ == "__main__":
    main(recipe=RECIPE)
