"""The study's asynchronous cells: every token has the cell's age, and a run repeats bit for bit."""

import json
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from asynchronous import asynchronous
from places import ROOT
from training import parameters
from transformers import TrainerCallback

from trl_quant.report.runs import read_run


STUDY = ROOT / "benchmarks" / "study"
sys.path[:0] = [str(STUDY), str(ROOT / "examples")]

import build_arithmetic_model as building  # noqa: E402
import trial  # noqa: E402
from cell import Cell  # noqa: E402
from cells import QUESTIONS  # noqa: E402
from pace import Pace  # noqa: E402
from replicated import AGES  # noqa: E402


STEPS = 6


class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(0.1)


def paced(path, age: int, slow: str):
    """A run at a pace, in which the trainer or the thread is the slower one."""
    pace, callbacks = Pace(age), [Slow()] * (slow == "trainer")
    given = {"max_staleness": age, "max_inflight_tasks": 8, "per_device_train_batch_size": 8, "num_generations": 4}
    trainer = asynchronous(path, callbacks=[pace, *callbacks], max_steps=STEPS, is_correction="tis", seed=5, **given)
    pace.set(trainer)
    if slow == "thread":
        engine = trainer.sampling_thread.engine
        sample = engine.sample
        engine.sample = lambda *given, **named: (time.sleep(0.1), sample(*given, **named))[1]
    trainer.train()
    return trainer


def ages_of(trainer) -> list[tuple[float, float]]:
    found = [(entry["rollouts/age"], entry["rollouts/age_max"]) for entry in trainer.state.log_history[:STEPS]]
    assert not any("rollouts/dropped_total" in entry for entry in trainer.state.log_history)
    return found


@pytest.mark.long
def test_a_token_has_its_runs_age_whether_the_trainer_or_the_thread_is_slower(tmp_path):
    """And the two runs are one, to the bit. A run of another age is another one."""
    runs = {(age, slow): paced(tmp_path, age, slow) for age, slow in ((3, "trainer"), (3, "thread"), (1, "trainer"))}
    for (age, _), run in runs.items():
        assert ages_of(run) == [(min(age, step),) * 2 for step in range(STEPS)]
    one, again, other = (parameters(run) for run in runs.values())
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_a_pace_waits_no_longer_than_the_thread_lives():
    pace = Pace(1)

    def ended(stale_after_s):
        raise RuntimeError(f"ended after {stale_after_s}")

    thread = SimpleNamespace(version=0, started=0, check_health=ended)
    args = SimpleNamespace(generation_batch_size=8, num_generations=4, heartbeat_stale_after_s=7)
    pace.set(SimpleNamespace(sampling_thread=thread, args=args))
    pace.wait()  # nothing is sampled before the first sync
    assert thread.rollout_buffer.qsize() == 8
    thread.version = 1
    assert thread.rollout_buffer.qsize() == 0
    with pytest.raises(RuntimeError, match="ended after 7"):
        pace.wait()
    thread.started = 2  # in flight
    assert pace.qsize() == 8
    pace.delivered = 8
    assert pace.qsize() == 0  # the second generation of version 1
    thread.started, pace.delivered = 4, 16
    assert pace.qsize() == 8
    pace.wait()


def test_cells_that_are_one_run_are_left_out():
    cells = {cell.name: cell for cell in QUESTIONS["asynchronous"].cells}
    aged = {(cell.rollout_precision, cell.is_correction, cell.age) for cell in cells.values() if cell.age is not None}
    names = ("tis", "none", "coupled", "ais")
    every = {(precision, name, age) for precision in ("bf16", "int8", "int4") for name in names for age in AGES}
    assert every - aged == {("bf16", "none", 0), ("bf16", "coupled", 0)} and aged < every
    assert len(cells) == len(aged) + 1 and {cell.max_steps for cell in cells.values()} == {300}


@pytest.mark.slow
def test_an_asynchronous_cell_is_trained_and_judged_while_nothing_is_sampled(tmp_path, monkeypatch):
    tokenizer, model = building.build_tokenizer(), tmp_path / "model"
    building.build_model(tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    for split in ("train", "eval"):
        problems = building.prompts(building.BuildArguments(), 0, 16, held_out=split == "eval")
        problems.to_json(model / f"{split}.jsonl")
    waited, take, judge = [], Pace.set, trial.mean_reward

    def taken(pace, trainer):
        take(pace, trainer)
        monkeypatch.setattr(trial, "mean_reward", partial(noted, pace))

    def noted(pace, *given, **named):
        waited.append((pace.trainer.sampling_thread.started, pace.delivered, pace.ordered))
        return judge(*given, **named)

    monkeypatch.setattr(Pace, "set", taken)
    cell = Cell("a", "int4", None, "coupled", age=1, digits=1, max_steps=2, evaluations=2, draws=1)
    assert trial.trainer_of(cell.settings()).__name__ == "QuantAsyncGRPOTrainer"
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "settings.json").write_text(json.dumps(cell.settings() | {"per_device_train_batch_size": 8}))
    trial.train(directory, model)
    run = read_run(directory)
    assert run.status == "done" and run.values("rollouts/age") == run.values("rollouts/age_max") == [0.0, 1.0]
    assert run.values("mismatch/by_age/1")[0] > 0 and len(run.values("final_accuracy")) == 1
    # Before the training, after each update, and at the end: one group of 8 for each version so far, and one ahead
    assert waited == [(0, 0, 0), (3, 24, 24), (4, 32, 32), (4, 32, 32)]
