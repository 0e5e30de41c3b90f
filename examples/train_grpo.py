"""GRPO with quantized rollouts. Copy this file, add rewards of your own, and set the rest on the command line.

It runs `trl_quant/cli/train.py`: TRL's parser for the dataset's, `QuantGRPOConfig`'s and the model's options, then
`QuantGRPOTrainer`. That file uses only public names, so copy it too if flags are not enough.

On a laptop, with the model of build_arithmetic_model.py and the embedded engine:

    python examples/train_grpo.py --model_name_or_path runs/arithmetic --dataset_name runs/arithmetic/train.jsonl \\
        --reward_funcs arithmetic --rollout_precision int4 --is_correction ais --output_dir runs/int4-ais \\
        --max_steps 60 --learning_rate 3e-4 --per_device_train_batch_size 128 --max_completion_length 48 \\
        --use_cpu --bf16 false --gradient_checkpointing false

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
