"""What a sync measures of the weights: against definitions written out on whole matrices."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from long_tests import rest_is_long
from tiny import tiny_model
from torch import Tensor
from training import config, dataset, make, metrics

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import FORMATS, quantize
from trl_quant.rollout.drift import WeightDrift


def weights(layers: int = 3, shape: tuple[int, int] = (128, 256)) -> dict[str, Tensor]:
    return {f"layers.{i}.weight": torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(layers)}


def moved(before: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: w + size * torch.randn(w.shape, generator=generator) for name, w in before.items()}


def after_two_syncs(precision: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, float]:
    drift = WeightDrift(first, precision)
    for step in (first, second):
        for name, weight in step.items():
            drift.add(name, weight)
        found = drift.metrics()
    return found


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors.values()]).double()


def codes(weight: Tensor, precision: str) -> list[list[int]]:
    """The bits of each code, unpacked without a table of formats: as many as there are to a weight."""
    stored = quantize(weight, precision).values.view(torch.uint8).flatten().numpy()
    width = 8 * len(stored) // weight.numel()
    return np.unpackbits(stored, bitorder="little").reshape(-1, width).tolist()


@pytest.mark.parametrize("precision", FORMATS)
def test_metrics(precision):
    first = weights()
    second = moved(first, 0.01)
    found = after_two_syncs(precision, first, second)
    q = [flat({n: quantize(w, precision).dequantize() for n, w in step.items()}) for step in (first, second)]
    dw, dq = flat(second) - flat(first), q[1] - q[0]
    pairs = [(a, b) for n in first for a, b in zip(codes(first[n], precision), codes(second[n], precision))]
    expected = {
        "weights/normalized_update": dw.norm() / flat(second).norm(),
        "weights/normalized_total_update": dw.norm() / flat(first).norm(),
        "weights/normalized_quantization_error": (q[1] - flat(second)).norm() / flat(second).norm(),
        "weights/codes_changed": sum(a != b for a, b in pairs) / len(pairs),
        "weights/update_cosine": dq @ dw / (dq.norm() * dw.norm()),
    }
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)
    assert 0 < found["weights/codes_changed"] < 1 and 0 < found["weights/update_cosine"] < 1


def test_an_update_below_the_step_of_the_format_arrives_in_fewer_codes():
    """QuRL's argument: a small update, or a coarse format, and the sampler lags."""
    first = weights()
    fine, coarse = (after_two_syncs(name, first, moved(first, 1e-3)) for name in ("int8", "mxfp4"))
    assert coarse["weights/codes_changed"] < fine["weights/codes_changed"] / 3
    assert coarse["weights/update_cosine"] < fine["weights/update_cosine"]
    large = after_two_syncs("mxfp4", first, moved(first, 0.3))
    assert large["weights/codes_changed"] > 0.3 and large["weights/update_cosine"] > 0.8
    still = after_two_syncs("mxfp4", first, first)
    assert still["weights/codes_changed"] == still["weights/normalized_update"] == 0
    assert still["weights/normalized_total_update"] == 0


def test_a_ratio_to_nothing_is_left_out():
    """The cosine of an update that is none, and norms relative to weights that are all zero."""
    start = weights()
    zero = {name: torch.zeros_like(w) for name, w in start.items()}
    assert "weights/update_cosine" not in after_two_syncs("int8", start, start)
    assert after_two_syncs("int8", zero, zero) == {"weights/codes_changed": 0.0}
    into_zero, from_zero = after_two_syncs("int8", start, zero), after_two_syncs("int8", zero, start)
    assert into_zero.keys() == {"weights/codes_changed", "weights/update_cosine", "weights/normalized_total_update"}
    assert "weights/normalized_total_update" not in from_zero and from_zero["weights/normalized_update"] == 1
    lagging = after_two_syncs("int8", start, moved(start, 1e-9))  # changes weights, and no code
    assert (
        lagging["weights/codes_changed"] == lagging["weights/update_cosine"] == 0 < lagging["weights/normalized_update"]
    )


def syncs(drift: WeightDrift, *steps: dict[str, Tensor]) -> list[dict[str, float]]:
    """What each sync finds of the updates."""
    found = []
    for step in steps:
        for name, weight in step.items():
            drift.add(name, weight)
        found.append({name: value for name, value in drift.metrics().items() if name.endswith("update")})
    return found


def test_the_total_update_is_since_the_first_sync():
    """Not since the last one, nor the sum of what the syncs moved: there and back again is 0."""
    start = weights()
    one, two = moved(start, 0.01), {name: 1.1 * w for name, w in start.items()}
    first, *rest = syncs(WeightDrift(start, "int8"), start, one, two, start)
    assert first == {}
    totals = [found["weights/normalized_total_update"] for found in rest]
    expected = [float((flat(step) - flat(start)).norm() / flat(start).norm()) for step in (one, two, start)]
    assert totals == pytest.approx(expected, rel=1e-5) and expected[1] == pytest.approx(0.1) and expected[2] == 0
    assert rest[2]["weights/normalized_update"] == pytest.approx(0.1, rel=1e-3)  # of the last sync, against W_t
    assert rest[1]["weights/normalized_update"] != pytest.approx(totals[1], rel=1e-2)


def test_a_stream_that_is_no_sync_is_not_the_start():
    """A server is told the names first, by the same stream; later ones forget the sync before and not the start."""
    start, drift = weights(), WeightDrift(weights(), "int8")
    for name, weight in start.items():
        drift.add(name, weight)
    drift.forget()
    assert syncs(drift, start) == [{}]
    drift.forget()
    (found,) = syncs(drift, {name: 1.1 * w for name, w in start.items()})
    assert found == {"weights/normalized_total_update": pytest.approx(0.1, rel=1e-5)}


def test_an_evaluation_moves_no_start():
    """
    A sync of an evaluation is measured, and the next sync against the same weights as it; unless the training then
    samples from the evaluation's weights.
    """
    start = weights()
    one, two = moved(start, 0.01), moved(start, 0.03)
    (expected,) = syncs(WeightDrift(start, "int8"), start, two)[1:]
    for takes in (False, True):
        drift = WeightDrift(start, "int8")
        syncs(drift, start)
        drift.evaluates = True
        found = syncs(drift, one, one)
        assert found[0] == found[1] and found[0]["weights/normalized_update"] > 0
        held = drift.since_sync(two.items())["normalized_update"]  # against what the engine holds
        drift.evaluates = False
        if takes:
            drift.take()
        (last,) = syncs(drift, two)
        assert (last == expected) == (not takes)
        assert (last["weights/normalized_update"] == held) == takes


class Watched(QuantGRPOTrainer):
    """Notes the policy's weights at each generation of the training. Evaluates other weights than it trains."""

    def _generate(self, prompts):
        if self.model.training:
            measured = sorted(self.vllm_generation.engine.drift.names)
            params = {name: param.detach().clone() for name, param in self.model.named_parameters()}
            vars(self).setdefault("sampled_from", []).append({name: params[name] for name in measured})
        return super()._generate(prompts)

    def evaluate(self, *args, **kwargs):
        weight = self.model.model.layers[0].mlp.up_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(1.5)
        metrics = super().evaluate(*args, **kwargs)
        with torch.no_grad():
            weight.copy_(kept)
        return metrics


@pytest.mark.parametrize(
    ("shares", "averages"), rest_is_long([(1, True), (2, False)], (2, False)), ids=["averaged", "between"]
)
def test_a_training_that_evaluates_logs_its_own_updates(tmp_path, monkeypatch, shares, averages):
    """
    Since its last generation, whether an evaluation synced between two generations, before the second of them, or
    with other weights; also after a resume from a checkpoint that was saved behind an evaluation.
    """
    if not averages:
        monkeypatch.delattr(Watched, "evaluate")
    settings = {"rollout_precision": "int8", "max_steps": 6, "per_device_train_batch_size": 4, "eval_steps": 1}
    settings |= {"eval_strategy": "steps", "steps_per_generation": shares, "generation_batch_size": None}
    settings |= {"save_strategy": "steps", "save_steps": 2, "per_device_eval_batch_size": 4}
    settings |= {"gradient_accumulation_steps": 1, "num_generations": 4}

    def run(**given):
        args = config(QuantGRPOConfig, tmp_path, **settings)
        trainer = make(Watched, args, eval_dataset=dataset(2), **given)
        return trainer

    trainer = run()
    trainer.train()
    snapshots = [flat(snapshot) for snapshot in trainer.sampled_from]
    logs = [entry for entry in metrics(trainer) if "weights/normalized_quantization_error" in entry]
    assert len(snapshots) == len(logs) == 6 // shares
    found = [log.get("weights/normalized_update") for log in logs]
    updates = [float((now - last).norm() / now.norm()) for last, now in pairwise(snapshots)]
    assert found[0] is None and found[1:] == pytest.approx(updates, rel=1e-3) and min(updates) > 1e-5
    totals = [float((now - snapshots[0]).norm() / snapshots[0].norm()) for now in snapshots[1:]]
    assert [log["weights/normalized_total_update"] for log in logs[1:]] == pytest.approx(totals, rel=1e-3)

    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    again = [entry for entry in metrics(resumed) if "weights/normalized_quantization_error" in entry]
    assert [values_of(log) for log in again] == [values_of(log) for log in logs]


def values_of(log: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in log.items() if name.startswith("weights/")}


def test_what_is_kept_of_the_start_is_the_sample(monkeypatch):
    """One copy of the rows that are measured, and no second one of the same values before anything moved."""
    monkeypatch.setattr(WeightDrift, "MAX_ELEMENTS", 128 * 256)
    start = weights(2, (512, 256))
    drift = WeightDrift(start, "int8")
    syncs(drift, start)
    assert {name: w.shape for name, w in drift.initial.items()} == dict.fromkeys(start, (128, 256))
    assert all(w.data_ptr() == drift.previous[name][0].data_ptr() for name, w in drift.initial.items())
    syncs(drift, moved(start, 0.01))
    assert all(torch.equal(w, start[name][:128]) for name, w in drift.initial.items())


def test_a_sample_of_many_layers_stands_for_all(monkeypatch):
    """About a quarter of 128 layers."""
    first, found = weights(128, (64, 64)), {}
    for limit in (128, WeightDrift.MAX_LAYERS):
        monkeypatch.setattr(WeightDrift, "MAX_LAYERS", limit)
        drift = WeightDrift(first, "int8")
        for scale in (1.0, 1.01):
            for name, weight in first.items():
                if drift.measures(name):
                    drift.add(name, scale * weight)
            metrics = drift.metrics()
        found[limit] = len(drift.previous), metrics
    assert found[128][0] == 128 and 16 <= found[32][0] <= 48
    for name in ("weights/normalized_quantization_error", "weights/normalized_update"):
        assert found[32][1][name] == pytest.approx(found[128][1][name], rel=0.05)
    assert found[32][1]["weights/normalized_update"] == pytest.approx(0.01 / 1.01, rel=1e-3)


def test_large_layers_are_sampled_by_rows(monkeypatch):
    monkeypatch.setattr(WeightDrift, "MAX_ELEMENTS", 128 * 256)
    first = weights(1, (512, 256))
    second = {name: torch.cat((w[:128] * 1.5, w[128:])) for name, w in first.items()}
    leading = {name: w[:128] for name, w in second.items()}
    found = after_two_syncs("fp8_block", first, second)
    assert found["weights/normalized_update"] == pytest.approx(float((flat(leading) / 3).norm() / flat(leading).norm()))


def test_the_next_sync_of_a_resumed_run_finds_what_an_unbroken_one_finds():
    first = dict(tiny_model().named_parameters())
    names = [name for name, w in first.items() if "proj" in name]
    second = {name: w.detach() * 1.01 for name, w in first.items()}
    drift = WeightDrift(names, "int4")
    assert drift.since_sync(first.items()) == {}
    for name in names:
        drift.add(name, first[name])
    drift.metrics()
    update = drift.since_sync(second.items())
    resumed = WeightDrift(names, "int4")
    resumed.resumed, resumed.initial = dict(drift.synced), drift.initial
    assert resumed.synced.keys() == drift.synced.keys() == set(names)  # of a checkpoint before the next sync
    for sampler in (drift, resumed):
        for name in names:
            sampler.add(name, second[name])
    found = drift.metrics()
    assert found == resumed.metrics() and not resumed.resumed
    assert len(update) == 3 and update["normalized_update"] > 0
    assert all(found[f"weights/{name}"] == value for name, value in update.items())
