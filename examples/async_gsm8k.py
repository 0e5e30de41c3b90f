"""GSM8K, sampled by an FP8 server on one GPU while another GPU trains.

    python examples/async_gsm8k.py

If no server answers at `vllm_server_base_url`, the error has the command that starts the right one. Start it with
CUDA_VISIBLE_DEVICES=1 in another terminal, and this script with CUDA_VISIBLE_DEVICES=0.

On a laptop, with a small stored model that adds and subtracts, sampled by an INT8 copy in a thread of this process:

    python examples/async_gsm8k.py laptop

`rollouts/age` says how old the trained tokens are, `perf/rollout_wait_s` how long an update waits for samples, and
`rollouts/dropped_total` how many were sampled for nothing: docs/async.md explains them.
"""

import sys
from pathlib import Path

from trl_quant import QuantAsyncGRPOConfig, QuantAsyncGRPOTrainer
from trl_quant.tasks import arithmetic_reward, gsm8k_reward, load_prompts


STORED = Path(__file__).parent / "arithmetic_model"
GSM8K = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "data": "openai/gsm8k",
    "reward": gsm8k_reward,
    "output_dir": "runs/async-gsm8k",
    "rollout_precision": "fp8",
    "vllm_server_timeout": 5.0,  # the command is shown after so many seconds
    "dtype": "bfloat16",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_completion_length": 512,
    "token_budget": 0,  # a micro-batch is 16 samples
    "max_staleness": 2,
    "learning_rate": 2e-6,
    "max_steps": 200,
    "report_to": "none",
}
LAPTOP = {
    "model": str(STORED),
    "data": str(STORED / "train.jsonl"),
    "reward": arithmetic_reward,
    "output_dir": "runs/async",
    "use_vllm": False,
    "rollout_precision": "int8",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": 48,
    "max_staleness": 2,
    "learning_rate": 1e-4,
    "max_steps": 60,
    "logging_steps": 5,
    "report_to": "none",
}


def main(settings: dict, **overrides) -> QuantAsyncGRPOTrainer:
    """Trains with these settings and overrides, and returns the trainer."""
    settings = settings | overrides
    model, data, reward = (settings.pop(name) for name in ("model", "data", "reward"))
    trainer = QuantAsyncGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=QuantAsyncGRPOConfig(**settings),
        train_dataset=load_prompts(data),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(LAPTOP if "laptop" in sys.argv[1:] else GSM8K)
