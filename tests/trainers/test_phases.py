"""Where the time of a step goes: TRL's phases as metrics, told on a clock that counts its readings."""

from itertools import count

import pytest
import training
import trl.extras.profiling as profiling
from trl.extras.profiling import ProfilingContext

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant import trl_seams as seams


@pytest.fixture
def ticking(monkeypatch):
    """A reading is a second: a phase takes one, and two for each phase within it."""
    clock = count()
    monkeypatch.setattr(seams, "perf_counter", lambda: next(clock))


def entries(tmp_path, **settings) -> list[dict]:
    """What two steps log, with an evaluation after each."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    args = training.config(QuantGRPOConfig, tmp_path, max_steps=2, **evaluated | settings)
    trainer = training.make(QuantGRPOTrainer, args, eval_dataset=training.dataset(1))
    callbacks = [*trainer.callback_handler.callbacks]
    trainer.train()
    assert profiling.ProfilingContext is ProfilingContext and trainer.callback_handler.callbacks == callbacks
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def test_the_phases_of_a_step_are_added_up(tmp_path, ticking):
    """
    Two micro-batches of a generation: one sampling, and two losses with a forward each. The first evaluation has
    brought the weights of the second step already; its own phases are in neither.
    """
    quantized = {"rollout_precision": "int8", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    first, second = entries(tmp_path, **quantized)
    for entry in (first, second):
        assert entry["profiling/transformers.generate"] == 1 and "profiling/vLLM.generate" not in entry
        assert entry["profiling/_get_per_token_logps_and_entropies"] == 2
        assert entry["profiling/compute_loss"] == 2 * (1 + 2)
    assert [entry["profiling/sync_weights"] for entry in (first, second)] == [1, 0]
    # Two calls, of which the first holds the sync, the sampling, the rewards, and in these the reward
    assert [entry["profiling/_prepare_inputs"] for entry in (first, second)] == [2 + 2 * 4, 2 + 2 * 3]


def test_without_an_engine_of_ours_nothing_is_added(tmp_path):
    assert not [name for entry in entries(tmp_path) for name in entry if name.startswith("profiling")]


def test_a_failure_leaves_trls_profiler(ticking):
    told = {}
    phase = seams.phases_timed(told.__setitem__)
    with pytest.raises(RuntimeError), phase, profiling.ProfilingContext("Trainer.a.b", report_to=[]):
        raise RuntimeError
    assert told == {"a.b": 1} and profiling.ProfilingContext is ProfilingContext
