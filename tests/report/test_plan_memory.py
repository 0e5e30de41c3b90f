"""The parts of a plan's memory that a CPU can show, against the bytes that the tensors of a run take."""

from collections.abc import Iterable

import pytest
import torch
from tiny import tiny_model
from torch import Tensor
from training import config, lora, make
from transformers import TrainerCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import FORMATS
from trl_quant.layers import UnifiedLinear, weight_only
from trl_quant.report import memory
from trl_quant.report.memory import Shape, estimate


def taken(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind some tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.bytes = taken(p.grad for p in model.parameters() if p.grad is not None)


RUNS = {  # settings, rank of an adapter, the policy's type
    "weights": ({}, 0, torch.float32),
    "weights in 16 bits": ({}, 0, torch.bfloat16),
    "codes of weights": ({"train_precision": "int8"}, 0, torch.bfloat16),
    "adapter": ({}, 8, torch.bfloat16),
    "frozen base": ({"train_precision": "nvfp4"}, 8, torch.bfloat16),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple]:
    """Of each run: arguments, shape, the policy's type, and the bytes of its parts after a step."""
    found = {}
    for name, (settings, rank, dtype) in RUNS.items():
        adapter, gradients = lora(r=rank) if rank else None, Gradients()
        model = tiny_model(dtype=dtype, hidden_size=256, intermediate_size=512)
        shape = Shape.of(model.config, adapter)
        args = config(QuantGRPOConfig, tmp_path_factory.mktemp("run"), max_steps=1, **settings)
        trainer = make(QuantGRPOTrainer, args, model=model, peft_config=adapter, callbacks=[gradients])
        trainer.train()
        adapters = {id(p) for p in trainer.model.parameters() if p.requires_grad} if rank else set()
        own = [*trainer.model.parameters(), *trainer.model.buffers()]
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        codes = [layer.codes() for layer in trainer.model.modules() if isinstance(layer, UnifiedLinear)]
        parts = {
            "policy": taken(tensor for tensor in own if id(tensor) not in adapters),
            "gradients": gradients.bytes,
            "optimizer": taken(state for state in states if isinstance(state, Tensor)),
        }
        if adapters:
            parts["adapter"] = taken(tensor for tensor in own if id(tensor) in adapters)
        if codes:
            parts["codes"] = taken(tensor for code in codes for tensor in (code.values, code.scale))
        found[name] = (args, shape, dtype, parts)
    return found


def off(run: tuple) -> set[str]:
    """The parts of a run whose estimate is not that of its tensors, within 3%."""
    args, shape, dtype, parts = run
    found = estimate(args, shape, dtype, prompt=8, card=10**9)
    estimated = found.held | found.training
    return {part for part, size in parts.items() if abs(estimated[part] / size - 1) > 0.03}


@pytest.mark.slow
def test_each_part_is_what_its_tensors_take(runs, monkeypatch):
    """And a wrong number anywhere in the formula is found."""
    assert {name: off(run) for name, run in runs.items()} == {name: set() for name in RUNS}
    planted = (
        (memory, "FP32_BYTES", 2, {"adapter": {"adapter", "gradients", "optimizer"}}),
        (memory, "OPTIMIZERS", {"adamw": lambda size: size}, {name: {"optimizer"} for name in RUNS}),
        (FORMATS["nvfp4"], "bits", 4.0, {"frozen base": {"policy"}}),
        (FORMATS["int8"], "bits", 16.0, {"codes of weights": {"codes"}}),
    )
    for owner, name, wrong, expected in planted:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            found = {run: off(runs[run]) for run in expected}
        assert found == expected, name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_layer_states_what_it_decodes_at_a_time(tmp_path, monkeypatch, checkpointing):
    """One weight's, however many layers there are."""
    adapter, settings = lora(), {"train_precision": "nvfp4", "gradient_checkpointing": checkpointing}
    args = config(QuantGRPOConfig, tmp_path, **settings)
    args.resolve_for(adapted=True)
    shape = Shape.of(tiny_model().config, adapter)

    def peak() -> int:
        return estimate(args, shape, torch.bfloat16, prompt=8, card=10**9).peak

    assert memory.BUFFER_BYTES == weight_only.BUFFER_BYTES
    before = peak()
    monkeypatch.setattr(memory, "BUFFER_BYTES", 2 * weight_only.BUFFER_BYTES)
    assert peak() - before == weight_only.BUFFER_BYTES
