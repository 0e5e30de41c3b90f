"""QuRL: GRPO with an INT8 sampler, the clipping range adapted to its ratios (ACR) and its weights scaled (UAQ).

The hyperparameters are the paper's for DeepScaleR (section 5.1), in three stages of longer and longer completions;
`qurl_dapo.py` has its other setting. On eight GPUs:

    accelerate launch --config_file configs/accelerate/fsdp2.yaml examples/qurl.py --output_dir runs/qurl-8k
    accelerate launch --config_file configs/accelerate/fsdp2.yaml examples/qurl.py --output_dir runs/qurl-16k \\
        --model_name_or_path runs/qurl-8k --max_completion_length 16384 --num_generations 16 \\
        --gradient_accumulation_steps 128 --steps_per_generation 512 --max_steps 1600
    accelerate launch --config_file configs/accelerate/fsdp2.yaml examples/qurl.py --output_dir runs/qurl-24k \\
        --model_name_or_path runs/qurl-16k --max_completion_length 24576 --num_generations 16 \\
        --gradient_accumulation_steps 128 --steps_per_generation 512 --max_steps 1600

On a laptop, with a small stored model and the embedded engine:

    python examples/qurl.py --config examples/laptop.yaml --steps_per_generation 4

The command line or a YAML file, `--config`, can change every option of the recipe; `--help` lists them all. The
scaling is done once: a stage that starts from a scaled model leaves it as it is.
"""

from trl_quant.cli.train import main


RECIPE = {
    "model_name_or_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "dtype": "float32",  # of the master weights: at this learning rate BF16 would round most updates away
    "output_dir": "runs/qurl",
    "dataset_name": "agentica-org/DeepScaleR-Preview-Dataset",
    "instruction": r"Let's think step by step and output the final answer within \boxed{}.",  # DeepScaleR's
    "reward_funcs": ["strict_math"],  # many answers are expressions
    # The sampler
    "rollout_precision": "int8",
    "uaq_scale": 1.5,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "temperature": 0.6,
    "max_completion_length": 8192,
    # Adaptive clipping range. The paper does not say its cap; FlashRL's is 2.
    "is_correction": "acr",
    "is_cap": 2.0,
    "loss_type": "dapo",  # a mean over tokens, as in DeepScaleR's framework
    "epsilon": 0.2,
    "beta": 1e-3,
    "use_bias_correction_kl": False,  # the plain k3 estimator
    # 256 prompts with 8 completions each, 800 times. Updates take 64 prompts, as DeepScaleR's do (the paper is silent);
    # with a single update a generation, ACR would be TIS.
    "num_generations": 8,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 64,
    "steps_per_generation": 256,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",  # silent, as are the optimizer's other settings
    "max_steps": 3200,
    "logging_steps": 1,
}


if __name__ == "__main__":
    main(recipe=RECIPE)
