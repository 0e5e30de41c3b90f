"""Jet-RL: GRPO whose training forward pass is the sampler's, in FP8 by blocks, so that nothing is left to correct.

The hyperparameters are the paper's for DeepMATH (section 5.1) and, in the second command, for its mixture of GSM8K and
MATH. On eight H200s:

    accelerate launch --config_file configs/accelerate/zero2.yaml examples/jet_rl.py --output_dir runs/jet-rl
    accelerate launch --config_file configs/accelerate/zero2.yaml examples/jet_rl.py --output_dir runs/jet-rl-8k \\
        --dataset_name gsm8k_math --max_completion_length 8192 --num_generations 4 --gradient_accumulation_steps 128

On a laptop, with a small stored model and the embedded engine:

    python examples/jet_rl.py --config examples/laptop.yaml

The command line or a YAML file, `--config`, can change every option of the recipe; `--help` lists them all. Beyond the
paper, on Hopper GPUs `exact_rollouts` makes trainer and sampler use the same kernels between the linear layers too.
"""

import torch

from trl_quant.cli.train import main


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

RECIPE = {
    "model_name_or_path": "Qwen/Qwen3-8B-Base",
    "dtype": "bfloat16",  # beside which ZeRO-2 keeps master weights in FP32; use float32 without it
    "output_dir": "runs/jet-rl",
    "dataset_name": "trl-lib/DeepMath-103K",
    "reward_funcs": ["strict_math"],
    # The policy and its sampler, one flow; the reference policy of the KL term too
    "train_precision": "fp8_block",
    "exact_rollouts": HOPPER,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "max_completion_length": 16384,
    "is_correction": "none",
    # The copy of the paper that we read lacks both numbers; these are QuRL's.
    "learning_rate": 1e-6,
    "beta": 1e-3,
    "use_bias_correction_kl": False,  # the framework of the paper, VeRL, has no ratio in its KL loss
    # 256 prompts with 16 completions each, on eight GPUs 8 x 512, used in one update: the method is to be on-policy
    "num_generations": 16,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 512,
    "lr_scheduler_type": "constant",  # the paper is silent, as it is on temperature, clipping and length of the run
    "num_train_epochs": 1,
    "logging_steps": 1,
}


if __name__ == "__main__":
    main(recipe=RECIPE)
