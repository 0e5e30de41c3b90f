"""Metrics that are means of micro-batches' means: docs/metrics.md names each of them."""

import re

import pytest
from places import ROOT
from tiny import save_tiny
from training import UnevenLengths, trainer_for

from trl_quant import QuantDistillationTrainer, QuantGRPOTrainer, QuantPPOTrainer, QuantRLOOTrainer


PAGE = ROOT / "docs/metrics.md"
PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
RUNS = {
    "grpo": (QuantGRPOTrainer, {"is_correction": "acr", "beta": 0.1}),
    "cispo": (QuantGRPOTrainer, {"is_correction": "tis", "loss_type": "cispo", "epsilon_high": 5.0}),
    "vespo": (QuantGRPOTrainer, {"is_correction": "tis", "loss_type": "vespo"}),
    "every update": (QuantGRPOTrainer, {"is_correction": "trm"}),
    "ppo": (QuantPPOTrainer, {"is_correction": "acr", "vf_share_layers": True}),
    "rloo": (QuantRLOOTrainer, {"beta": 0.1}),
    "distillation": (QuantDistillationTrainer, {"is_correction": "tis"}),
}


def named() -> str:
    """The sentences of the page that name them."""
    (text,) = re.findall(r"computed in each micro-batch, and their mean.*?(?=\n\n)", PAGE.read_text(), re.DOTALL)
    return text


def is_named(name: str, text: str) -> bool:
    patterns = [re.escape(found).replace(r"\*", ".*") for found in re.findall(r"`([^`]+)`", text)]
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@pytest.mark.parametrize("run", RUNS)
def test_the_page_names_what_is_logged_more_than_once_a_generation(tmp_path, run):
    kind, settings = RUNS[run]

    class Counting(UnevenLengths, kind):
        counts: dict[str, int] = {}

        def log(self, logs, *args, **kwargs):
            self.counts = {name: len(values) for name, values in self._metrics["train"].items()} | self.counts
            super().log(logs, *args, **kwargs)

    model = save_tiny(tmp_path / "model", seed=3)
    trainer = trainer_for(tmp_path, model, Counting, rollout_precision="int8", **PARTS, **settings)
    trainer.train()
    counts = {name: count for name, count in trainer.counts.items() if not name.startswith("profiling/")}
    averaged = {name for name, count in counts.items() if count == 2}
    assert averaged and set(counts.values()) == {1, 2}
    text = named()
    assert not [name for name in averaged if not is_named(name, text)]
    assert not [
        name for name in counts.keys() - averaged if is_named(name, text) and name != "kl"
    ]  # RLOO's kl is its own
    assert not is_named("mismatch/kl_k3", text)
