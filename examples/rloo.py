"""RLOO with INT8 samples, on a CPU, in a minute or two.

    python examples/rloo.py

A small model that is right on a third of its sums (arithmetic_model) is trained with `QuantRLOOTrainer`. It samples
from an INT8 copy of itself; the default correction, `tis`, weighs each token's gradient. Change `SETTINGS`, or name
another correction, to see what becomes of `reward` and `mismatch/kl_k3`.
"""

from pathlib import Path

from trl_quant import QuantRLOOConfig, QuantRLOOTrainer
from trl_quant.tasks import arithmetic_reward, load_prompts


MODEL = Path(__file__).parent / "arithmetic_model"
SETTINGS = {
    "output_dir": "runs/rloo",
    "rollout_precision": "int8",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": 48,
    "learning_rate": 1e-4,
    "max_steps": 60,
    "logging_steps": 5,
    "report_to": "none",
}


def main(**overrides) -> QuantRLOOTrainer:
    """Trains with `SETTINGS` and these overrides, and returns the trainer."""
    trainer = QuantRLOOTrainer(
        model=str(MODEL),
        reward_funcs=arithmetic_reward,
        args=QuantRLOOConfig(**SETTINGS | overrides),
        train_dataset=load_prompts(str(MODEL / "train.jsonl")),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
