"""
A run with rollouts in flight is resumed as another run: with groups of another size, or on other ranks.

As a script, one of two ranks.
"""

import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from long_tests import rest_is_long
from remembering import assert_goes_on, in_flight, partial_run, returned
from tiny import tiny_model
from training import Killed, dataset, killing, metrics

from trl_quant import QuantGRPOTrainer


def built(path, kill_at=None, **given):
    """A run of five generations of two groups, and the list of what it will train on."""
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "rollouts_in_flight": 3.0}
    settings |= {"max_completion_length": 24, "resume_with_changes": True, "reward_funcs": killing(kill_at)}
    settings |= {"train_dataset": dataset(12), "model": tiny_model(seed=3)}
    trainer = partial_run(path, QuantGRPOTrainer, **settings | given)
    return trainer, returned(trainer)


def killed(path) -> list[tuple]:
    """What two generations have trained on; the third killed the run."""
    trainer, rows = built(path, kill_at=3)
    with pytest.raises(Killed):
        trainer.train()
    return rows


def in_order(trainer) -> list[tuple]:
    """The prompts of the five generations, in TRL's order."""
    order = trainer.pool.order
    prompts = [trainer.train_dataset[order[place]]["prompt"] for place in range(10)]
    return list(map(tuple, trainer._tokenize_prompts(prompts)[0]))


def prompts_of(rows: list[tuple]) -> Counter:
    return Counter(tuple(prompt) for prompt, *_ in rows)


def logs_of(trainer) -> list[dict]:
    return [log for log in metrics(trainer) if "loss" in log]


@pytest.mark.parametrize("size", rest_is_long([2, 3]))
def test_groups_of_another_size_start_again(tmp_path, caplog, size):
    """They keep their places in TRL's order and lose their tokens; groups of the same size lose none."""
    before = killed(tmp_path)
    left = in_flight(tmp_path / "checkpoint-2")
    resumed, rows = built(tmp_path, num_generations=size, per_device_train_batch_size=2 * size)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    told = [f"The group of prompt {group['place']} starts again: it has 2 completions" for group in left]
    found = [sum(start in record.getMessage() for record in caplog.records) for start in told]
    assert len(left) > 2 and found == [int(size == 3)] * len(left)
    assert len(logs_of(resumed)) == 5 and not resumed.pool.groups
    again = dict.fromkeys(in_order(resumed), size)
    assert prompts_of(before) + prompts_of(rows) == Counter(again | prompts_of(before))
    starts = Counter(resumed.memory.starts)
    if size == 2:
        assert_goes_on(left, rows)
        assert sum(starts.values()) < len(rows)
    else:
        assert starts == prompts_of(rows)
        assert min(version for *_, versions in rows for version in versions) == 2


@pytest.mark.long
@pytest.mark.slow
def test_another_number_of_ranks_goes_on(tmp_path):
    """From one rank to two, and back: no token in flight is lost, and each prompt is trained on once."""
    from ranks import on_two_ranks, results

    before = {"one": killed(tmp_path / "one")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ranks.__file__", __file__)
        printed = on_two_ranks("cpu", tmp_path, "two", "one")
    of_ranks = {name: results(tmp_path, name, printed) for name in ("two", "one")}
    before["two"], after = ([row for rank in of_ranks[name] for row in rank["rows"]] for name in ("two", "one"))
    back, rows = built(tmp_path / "two")
    back.train(resume_from_checkpoint=True)
    after = {"one": after, "two": rows}
    for name in ("one", "two"):
        assert_goes_on(in_flight(tmp_path / name / "checkpoint-2"), after[name])
        assert prompts_of(before[name]) + prompts_of(after[name]) == Counter(dict.fromkeys(in_order(back), 2))
    logs = [logs_of(back), *(rank["log"] for rank in of_ranks["one"])]
    assert all([log["step"] for log in run] == [1, 2, 3, 4, 5] for run in logs) and logs[1] == logs[2]


def run_rank(path: Path, case: str) -> None:
    """One of two ranks. They train a run of their own until it is killed, and resume that of one rank."""
    torch.manual_seed(int(os.environ["RANK"]))
    trainer, rows = built(path / case, kill_at=3 if case == "two" else None, per_device_train_batch_size=2)
    try:
        trainer.train(resume_from_checkpoint=case == "one")
    except Killed:
        assert case == "two"
    found = {"rows": rows, "log": logs_of(trainer)}
    (path / case / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        run_rank(Path(sys.argv[1]), name)
