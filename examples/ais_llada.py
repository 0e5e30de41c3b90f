"""AIS on LLaDA: GRPO for a masked diffusion model whose FP8 copy samples, corrected as far as the batch calls for it.

The hyperparameters are the paper's for LoRA on LLaDA-8B-Instruct (section 4.3, appendix C, table 3), here on GSM8K.
First convert the checkpoint, then train on eight GPUs:

    python -m trl_quant.storage.llada GSAI-ML/LLaDA-8B-Instruct runs/llada-8b
    accelerate launch --config_file configs/accelerate/ddp.yaml examples/ais_llada.py --output_dir runs/ais-llada

On a laptop, teach a small model first, which takes a minute or two:

    python examples/build_masked_model.py --output_dir runs/masked
    python examples/ais_llada.py --config examples/laptop_diffusion.yaml

The command line or a YAML file, `--config`, can change every option; `--help` lists them all, and `--dry_run true`
plans the run. The paper follows d1 and is silent on the KL term and the updates for each generation: these are d1's,
0.04 and 12, each under another mask.
"""

from trl_quant.cli.train import main


RECIPE = {
    "trainer": "diffusion",
    "model_name_or_path": "runs/llada-8b",
    "dtype": "bfloat16",
    "output_dir": "runs/ais-llada",
    "dataset_name": "openai/gsm8k",
    "reward_funcs": ["gsm8k", "format"],  # correctness and format; the paper does not say their weights
    # The sampler: a scale per tensor; blocks of 32 from left to right, two tokens a step
    "rollout_precision": "fp8_tensor",
    "block_length": 32,
    "tokens_per_step": 2,
    "max_completion_length": 256,  # to 1024
    "temperature": 0.9,  # of Qwen's experiments; the paper has none for LLaDA
    "prompt_mask_probability": 0.15,
    # Adaptive importance sampling
    "is_correction": "ais",
    "is_cap": 5.0,
    "ais_delta": 0.02,
    "ais_gamma": 1.2,
    "ais_beta_var": 1.0,  # the paper has no value
    "scale_rewards": "none",
    "loss_type": "grpo",
    "epsilon": 0.2,
    "beta": 0.04,
    "use_bias_correction_kl": False,  # eq. 19 has no ratio in the KL term
    # LoRA on all linear layers
    "use_peft": True,
    "lora_r": 128,
    "lora_alpha": 64,  # the paper has no value
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    # 96 completions an update, on eight GPUs 8 x 12
    "num_generations": 8,
    "num_iterations": 12,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-6,  # from 1e-6
    "lr_scheduler_type": "constant",  # the paper has a cosine for Qwen alone
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "max_grad_norm": 0.2,
    "max_steps": 7700,  # GSM8K; 6600 for MATH
    "save_steps": 100,  # from 600 on the checkpoints are compared
    "logging_steps": 1,
}


if __name__ == "__main__":
    main(recipe=RECIPE)
