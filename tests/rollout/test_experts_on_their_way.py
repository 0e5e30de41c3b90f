"""
Experts in tensors (experts, out, in) on their way to an engine: from the policy's stream through the formats to what a
sync measures, against loops over single experts.
"""

import pytest
import torch
from accelerate import Accelerator
from made_up_experts import MadeUpMixture, experts_of_many_sizes
from torch import Tensor

from trl_quant.formats import FORMATS, quantize
from trl_quant.rollout.drift import WeightDrift
from trl_quant.rollout.faults import fault_of
from trl_quant.rollout.fingerprint import fingerprint
from trl_quant.rollout.weights import PolicyWeights


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def policy(**sizes: int) -> tuple[MadeUpMixture, PolicyWeights]:
    model = MadeUpMixture(**sizes).float()
    return model, PolicyWeights(model, Accelerator(cpu=True))


def test_the_stream_brings_experts_whole():
    """In the model's order and names, with the values of now, however they were written."""
    model, weights = policy()
    first = {name: tensor.clone() for name, tensor in weights}
    assert list(first) == [name for name, _ in model.named_parameters()] and GATE_UP in first
    with torch.no_grad():
        model.mlp["experts"].gate_up_proj.data[1] *= 3
    second = dict(weights)
    same = [torch.equal(a, b) for a, b in zip(first[GATE_UP], second[GATE_UP], strict=True)]
    assert same == [True, False, True] and torch.equal(second[GATE_UP][1], 3 * first[GATE_UP][1])
    assert all(torch.equal(first[name], second[name]) for name in first if name != GATE_UP)


def test_faults_of_experts_are_named():
    model, weights = policy()
    assert fault_of(weights) is None
    model.mlp["experts"].down_proj.data[2, 5, 7] = float("nan")
    assert f"`{DOWN}` holds NaN" in fault_of(weights)
    model, weights = policy()
    model.config.experts = 4
    assert f"`{GATE_UP}` has the shape (3, 40, 192), but its config describes (4, 40, 192)" in fault_of(weights)


def single_experts(weights: dict[str, Tensor]) -> list[Tensor]:
    return [expert for weight in weights.values() for expert in weight]


def expected_metrics(first: list[Tensor], second: list[Tensor], precision: str) -> dict[str, float]:
    """Drift's definitions, summed over matrices that are quantized one by one."""
    sums = dict.fromkeys(("w", "error", "dw", "dq", "product", "changed", "codes"), 0.0)
    for before, after in zip(first, second, strict=True):
        q = [quantize(matrix, precision) for matrix in (before, after)]
        codes = [FORMATS[precision].codes(x.values) for x in q]
        dw = after.double() - before.double()
        dq = q[1].dequantize().double() - q[0].dequantize().double()
        sums["w"] += after.double().square().sum().item()
        sums["error"] += (q[1].dequantize().double() - after.double()).square().sum().item()
        sums["dw"] += dw.square().sum().item()
        sums["dq"] += dq.square().sum().item()
        sums["product"] += (dw * dq).sum().item()
        sums["changed"] += (codes[0] != codes[1]).sum().item()
        sums["codes"] += codes[0].numel()
    return {
        "weights/normalized_update": (sums["dw"] / sums["w"]) ** 0.5,
        "weights/normalized_quantization_error": (sums["error"] / sums["w"]) ** 0.5,
        "weights/codes_changed": sums["changed"] / sums["codes"],
        "weights/update_cosine": sums["product"] / (sums["dw"] * sums["dq"]) ** 0.5,
    }


def synced(drift: WeightDrift, weights: PolicyWeights) -> dict[str, float]:
    for name, tensor in weights:
        if drift.measures(name):
            drift.add(name, tensor)
    return drift.metrics()


@pytest.mark.parametrize("precision", FORMATS)
def test_a_step_that_moves_one_expert(precision):
    """The smallest one, which a scale for all experts would round most."""
    model, weights = policy(hidden=256, intermediate=128)
    drift = WeightDrift([GATE_UP, DOWN], precision)
    synced(drift, weights)
    first, held = {name: dict(weights)[name].clone() for name in (GATE_UP, DOWN)}, fingerprint(model)
    assert drift.since_sync(weights)["normalized_update"] == 0
    with torch.no_grad():
        for seed, param in enumerate(model.mlp["experts"].parameters()):
            param.data[0] += 0.1 * experts_of_many_sizes(1, *param.shape[1:], dtype=param.dtype, seed=7 + seed)[0]
    assert fingerprint(model) != held
    update = drift.since_sync(weights)
    found = synced(drift, weights)
    second = {name: dict(weights)[name] for name in first}
    expected = expected_metrics(single_experts(first), single_experts(second), precision)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert len(update) == 3 and all(found[f"weights/{name}"] == value for name, value in update.items())
    assert 0 < expected["weights/codes_changed"] < 1 / 3 and expected["weights/update_cosine"] > 0.5
    together = [[weight.flatten(0, 1) for weight in step.values()] for step in (first, second)]
    shortcut = expected_metrics(*together, precision)["weights/update_cosine"]
    assert (shortcut == pytest.approx(expected["weights/update_cosine"], rel=1e-4)) == (
        precision not in ("fp8_tensor", "nvfp4")
    )


def test_large_experts_are_sampled(monkeypatch):
    """Whole leading experts where one fits, else leading rows of the first: never more values than allowed."""
    model, weights = policy(hidden=256, intermediate=128)
    weight = model.mlp["experts"].gate_up_proj.data
    start = weight.clone()
    limits = {2 * start[0].numel(): start[:2], start[0].numel() - 1: start[0, :128]}
    for limit, sample in limits.items():
        monkeypatch.setattr(WeightDrift, "MAX_ELEMENTS", limit)
        drift = WeightDrift([GATE_UP], "int8")
        synced(drift, weights)
        assert torch.equal(drift.initial[GATE_UP], sample) and sample.numel() <= limit
        held = fingerprint(model)
        weight[2] *= 1.5
        assert drift.since_sync(weights)["normalized_update"] == 0 and fingerprint(model) != held
        weight[0, :128] *= 1.5
        moved, rest = 1.5 * start[0, :128].double(), sample.double().flatten()[start[0, :128].numel() :]
        expected = ((moved / 3).norm() / torch.cat((moved.flatten(), rest)).norm()).item()
        assert synced(drift, weights)["weights/normalized_update"] == pytest.approx(expected, rel=1e-4) and expected > 0
        weight.copy_(start)
