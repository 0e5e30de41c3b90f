"""QeRL: a frozen 4-bit base trained through LoRA, sampled in the same 4 bits with adaptive noise, by DAPO's objective.

The hyperparameters are the paper's for GSM8K (tables 1 and 6, algorithm 1). On one GPU:

    python examples/qerl.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --output_dir runs/qerl

On several, with as many completions an optimizer step (8 x 2 x 8 = 128), for GSM8K and for BigMath:

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/qerl.py --gradient_accumulation_steps 2
    accelerate launch --config_file configs/accelerate/ddp.yaml examples/qerl.py --gradient_accumulation_steps 2 \\
        --output_dir runs/qerl-bigmath --dataset_name bigmath --reward_funcs strict_math think_answer \\
        --num_generations 16 --num_iterations 1 --max_completion_length 8192

BigMath's questions are of levels 3 to 5; the paper's 32B model gets 4 and 5, `--dataset_config level_4_5`.

On a laptop, with a small stored model and the embedded engine:

    python examples/qerl.py --config examples/laptop.yaml

The command line or a YAML file, `--config`, can change every option of the recipe; `--help` lists them all, and
`--resume_from_checkpoint true` continues an interrupted run. Unlike in the paper, the base is rounded to nearest, as in
the public release, unless `--model_name_or_path` is a checkpoint that `trl-quant prepare` calibrated. Table 1 uses
GRPO: add `--loss_type grpo --dynamic_sampling_rounds 0 --overlong_punishment 0`.

README forbids `coupled` with 4-bit samples of a 16-bit policy, whose numbers are far from the policy's. Here it may be
used: sampler and policy have the same 4-bit base, so they differ mainly by the noise, which is small and deliberate.

Paper and release differ in the old policy of the ratio. In the paper it is the sampler with its noise (algorithm 1,
line 9), which is `coupled`, the recipe's default. In the release it is the trainer without noise, so the noise only
adds exploration, and the gradient ignores it: `--is_correction none`. The release also trains the norms, and
its scripts set

    --loss_type bnpo --num_iterations 1 --lora_r 16 --lora_alpha 16 --noise_sigma_end 1e-4 --adam_beta2 0.99
    --weight_decay 0.1 --lr_scheduler_type cosine --warmup_steps 0.1 --max_grad_norm 0.2
    --mask_truncated_completions true
"""

from trl_quant.cli.train import main


RECIPE = {
    "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
    "dtype": "bfloat16",  # of the adapter, and of what is not quantized
    "output_dir": "runs/qerl",
    "dataset_name": "openai/gsm8k",
    "instruction": (
        "Solve the following math problem step by step. The reasoning process and direct answer are enclosed within "
        "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
        "<answer> answer here </answer>: <think> ... </think> <answer> ... </answer>."
    ),
    "reward_funcs": ["gsm8k", "think_answer"],  # correctness and format
    # The policy, Q(W) + BA. It is sampled in the base's format, and only A and B travel to vLLM.
    "train_precision": "nvfp4",
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 64,  # the paper is silent
    "lora_dropout": 0.0,  # vLLM drops nothing
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "use_vllm": True,
    "vllm_mode": "colocate",
    # Adaptive quantization noise: none in the first of ten stages, then 1e-2 down to 5e-4
    "noise_schedule": "exponential",
    "noise_sigma_start": 1e-2,
    "noise_sigma_end": 5e-4,
    "noise_stages": 10,
    "is_correction": "coupled",  # the paper's, on a base that sampler and policy share; the public release has "none"
    # DAPO: clip-higher, a loss over tokens, no KL, groups that teach nothing sampled anew, overlong completions shaped
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
    "dynamic_sampling_rounds": 3,
    "overlong_punishment": 0.2,  # of `max_completion_length`, as in DAPO
    # 128 completions a step, each used in 4 updates
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 16,
    "num_iterations": 4,
    "num_generations": 8,
    "temperature": 1.0,
    "max_completion_length": 4096,
    "learning_rate": 1e-5,
    "optim": "paged_adamw_8bit",
    "lr_scheduler_type": "constant",  # silent
    "max_steps": 1000,
    "logging_steps": 1,
}


if __name__ == "__main__":
    main(recipe=RECIPE)
