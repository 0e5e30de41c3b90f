"""What a trainer computes with, without what it samples with: a trainer that builds no `VLLMGeneration`."""

from collections import defaultdict

import pytest
import torch
from tiny import tiny_model
from torch import nn
from training import config, make, metrics, parameters
from transformers import Trainer
from trl import GRPOTrainer

from trl_quant import QuantGRPOConfig
from trl_quant.layers import UnifiedLinear
from trl_quant.trainers.precision import QuantPrecision
from trl_quant.trainers.sampling import QuantSampling


class FromElsewhere(Trainer):
    """A trainer whose rows come sampled: it learns the tokens of each row. It knows nothing of this package."""

    def __init__(self, model, args, train_dataset, processing_class, **unused):
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        given = {"args": args, "train_dataset": train_dataset, "processing_class": processing_class}
        super().__init__(model, data_collator=self.collate, **given)

    def collate(self, rows: list[dict]) -> dict:
        texts = [row["prompt"] for row in rows]
        batch = self.processing_class(texts, return_tensors="pt", padding=True, padding_side="right")
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


class InLowPrecision(QuantPrecision, FromElsewhere):
    config_class = QuantGRPOConfig


def built(path, kind=InLowPrecision, model=None, **settings):
    settings = {"remove_unused_columns": False, "optim": "sgd", "learning_rate": 0.05, "max_steps": 3} | settings
    return make(kind, config(QuantGRPOConfig, path, **settings), model)


def losses(trainer) -> torch.Tensor:
    trainer.train()
    return torch.tensor([entry["loss"] for entry in metrics(trainer) if "loss" in entry])


def rounded(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Rounds each row to 256 steps, of which its largest value is `largest`."""
    step = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return (values / step).clamp(-128, 127).round() * step


class ByHand(nn.Module):
    """A layer whose forward pass multiplies rounded values in FP32. It knows nothing of this package."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return nn.functional.linear(rounded(x, 127.0), rounded(self.weight, 127.5), self.bias)


def swapped(make_layer):
    """A model each of whose decoder's linear layers is replaced, by a loop that asks nobody which they are."""
    model = tiny_model(seed=3)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, make_layer(module))
    return model


def test_it_has_no_sampler(tmp_path):
    trainer = built(tmp_path, train_precision="int8")
    assert not isinstance(trainer, QuantSampling | GRPOTrainer) and not hasattr(trainer, "vllm_generation")
    assert trainer.spec.training.kind == "unified" and trainer.sampling_state() == {}


def test_it_learns_as_layers_that_are_swapped_by_hand(tmp_path):
    """The two differ in last bits: layers that share an input add up its gradient in one product."""
    ours = built(tmp_path / "ours", train_precision="int8")
    layers = [module for module in ours.model.modules() if isinstance(module, UnifiedLinear)]
    assert len(layers) == 7 * ours.model.config.num_hidden_layers
    assert {layer.precision for layer in layers} == {"int8"}
    by_hand = swapped(lambda linear: UnifiedLinear.from_linear(linear, "int8"))
    theirs, plain = built(tmp_path / "theirs", FromElsewhere, by_hand), built(tmp_path / "plain", FromElsewhere)
    found, expected, unquantized = map(losses, (ours, theirs, plain))
    assert len(found) == 3 and found[-1] < found[0] - 0.3
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert ((found - unquantized).abs() > 1e-3).all()
    mine, hand, other = map(parameters, (ours, theirs, plain))
    assert mine.keys() == hand.keys() == other.keys()
    for name, value in mine.items():
        assert (value - hand[name]).norm() < 0.01 * (value - other[name]).norm(), name


def test_its_loss_is_that_of_rounded_values(tmp_path):
    """The reference is three lines of this file. What is left between the two are sums in another order."""
    once = {"max_steps": 1}
    found = losses(built(tmp_path / "ours", train_precision="int8", **once))
    expected = losses(built(tmp_path / "reference", FromElsewhere, swapped(ByHand), **once))
    unquantized = losses(built(tmp_path / "plain", FromElsewhere, **once))
    assert abs(found - expected) < 0.02 * abs(found - unquantized)


def test_it_resumes_and_stops_at_what_is_not_finite(tmp_path):
    saves = {"train_precision": "int8", "save_strategy": "steps", "save_steps": 2}
    unbroken = built(tmp_path / "run", **saves)
    unbroken.train()
    resumed = built(tmp_path / "run", **saves)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    mine, expected = parameters(resumed), parameters(unbroken)
    assert all(torch.equal(mine[name], value) for name, value in expected.items())
    broken = built(tmp_path / "broken", train_precision="int8")
    with torch.no_grad():
        broken.model.model.norm.weight[0] = torch.inf
    with pytest.raises(RuntimeError, match="Step 1 is not finite"):
        broken.train()
