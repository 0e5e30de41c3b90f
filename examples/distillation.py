"""Distillation from INT8 samples of the student, on a CPU, in a minute or two.

    python examples/distillation.py

A small model that is right on a third of its sums (arithmetic_model) teaches a copy of itself whose weights were
disturbed. The student samples from an INT8 copy of itself with `QuantDistillationTrainer`, and learns the teacher's
distribution at each token. Change `SETTINGS`, or set `is_correction="tis"`, to see what becomes of `loss` and
`mismatch/kl_k3`.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trl_quant import QuantDistillationConfig, QuantDistillationTrainer
from trl_quant.tasks import load_prompts


MODEL = Path(__file__).parent / "arithmetic_model"
SETTINGS = {
    "output_dir": "runs/distillation",
    "rollout_precision": "int8",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 64,
    "max_completion_length": 48,
    "learning_rate": 3e-4,
    "max_steps": 60,
    "logging_steps": 5,
    "report_to": "none",
}


def disturbed(path: Path, share: float = 0.6) -> torch.nn.Module:
    """Returns a stored model with noise on its matrices, whose standard deviation is a `share` of each matrix's own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=share * weight.std().item())
    return model


def main(**overrides) -> QuantDistillationTrainer:
    """Trains with `SETTINGS` and these overrides, and returns the trainer."""
    trainer = QuantDistillationTrainer(
        model=disturbed(MODEL),
        teacher_model=str(MODEL),
        args=QuantDistillationConfig(**SETTINGS | overrides),
        train_dataset=load_prompts(str(MODEL / "train.jsonl")),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
