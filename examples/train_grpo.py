"""GRPO with quantized rollouts. Copy this file, add rewards of your own, and set the rest on the command line.

It is `trl-quant train` with a place for reward functions: `trl_quant/cli/train.py` parses the dataset's,
`QuantGRPOConfig`'s and the model's options, and `trl_quant/trainers/launch.py` runs `QuantGRPOTrainer` with them.

On a laptop, with a small stored model and the embedded engine:

    python examples/train_grpo.py --config examples/laptop.yaml --rollout_precision int4 --is_correction ais \\
        --output_dir runs/int4-ais

On a GPU, GSM8K, FP8 sampling in vLLM, LoRA:

    python examples/train_grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --use_peft --lora_r 32 \\
        --use_vllm --vllm_mode colocate --rollout_precision fp8 --output_dir runs/gsm8k-fp8

On several GPUs: `accelerate launch --config_file configs/accelerate/fsdp2.yaml examples/train_grpo.py ...`.
`--resume_from_checkpoint true` continues an interrupted run from its last checkpoint. `--help` lists all options; they
may also come from a YAML file, `--config recipe.yaml`.
"""

from trl_quant.cli.train import main


# Rewards of your own, in TRL's signature, in addition to those named by --reward_funcs. For example:
#
#     def brevity(completions, **kwargs):
#         return [-len(completion) / 1000 for completion in completions]
OWN_REWARDS = []


if __name__ == "__main__":
    main(reward_funcs=OWN_REWARDS)
