"""What training runs left behind: their logs, their settings, and which of them differ in nothing but the seed.

| file in a run's directory | written by | holds |
|---|---|---|
| `metrics.jsonl` | a callback, during the run | one log entry per line |
| `trainer_state.json`, also in `checkpoint-*` | [`~transformers.Trainer`] | the log up to there |
| `settings.json` | who started the run | its settings, one JSON object |
| `rollout_state.json` in `checkpoint-*` | `QuantGRPOTrainer` | the same, where there is no `settings.json` |
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import fmean


REWARD, KL = "reward", "mismatch/kl_k3"
ENDS = 5  # logged steps that the first and last values are averaged over
TOKENS_PER_SECOND = "tokens_per_second"  # computed from what TRL logs, see `Run.series`
# Settings that tell a run from its repetitions, and say nothing of what it does
REPETITION = ("seed", "data_seed", "output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "hub_model_id")


@dataclass(frozen=True)
class Run:
    """A run's name, its log entries in order, a note on how it ended, and its settings as far as it recorded them."""

    name: str
    history: list[dict]
    note: str = ""
    finished: bool = False  # whether all its steps were made
    total: int = 0  # steps that it was to make; 0 where it did not say
    settings: dict = field(default_factory=dict)

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of the entries that have `metric` as a finite number."""
        if metric == TOKENS_PER_SECOND:
            return self._tokens_per_second()
        entries = [entry for entry in self.history if is_number(entry.get(metric))]
        return [entry["step"] for entry in entries], [entry[metric] for entry in entries]

    def values(self, metric: str) -> list[float]:
        return self.series(metric)[1]

    def names(self, prefix: str) -> list[str]:
        """Metrics that begin so, in the order in which they were logged first."""
        return list(dict.fromkeys(name for entry in self.history for name in entry if name.startswith(prefix)))

    def first(self, metric: str) -> float | None:
        """Mean over the first logged steps, `None` without any."""
        values = self.values(metric)[:ENDS]
        return fmean(values) if values else None

    def last(self, metric: str) -> float | None:
        """Mean over the last logged steps, `None` without any."""
        values = self.values(metric)[-ENDS:]
        return fmean(values) if values else None

    def _tokens_per_second(self) -> tuple[list[int], list[float]]:
        """
        Prompts and completions over the time of whole steps. `step_time` is a mean over the steps of an entry,
        `num_tokens` a total, logged where there was a generation.
        """
        steps, rates, step, tokens, seconds = [], [], 0, 0.0, 0.0
        for entry in self.history:
            if is_number(time := entry.get("step_time")):
                seconds += time * (entry["step"] - step)
                step = entry["step"]
            if is_number(total := entry.get("num_tokens")) and seconds > 0:
                steps.append(entry["step"])
                rates.append((total - tokens) / seconds)
                tokens, seconds = total, 0.0
        return steps, rates

    @property
    def steps(self) -> int:
        return max((entry.get("step", 0) for entry in self.history), default=0)

    @property
    def status(self) -> str:
        """How far it came; a log does not tell a run that goes on from one that was stopped."""
        if self.note:
            return self.note
        if self.finished or self.values("train_runtime"):
            return "done"
        return f"at step {self.steps}" + (f" of {self.total}" if self.total else "")


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def moving_average(values: Sequence[float], window: int | None = None) -> list[float]:
    """Mean of each value and up to `window - 1` values before it; by default a fiftieth of all, at least 10."""
    window = window or max(2 * ENDS, len(values) // 50)
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


# Reading


def read_run(directory: str | Path, name: str | None = None) -> Run:
    """Reads one output directory.

    Raises:
        ValueError: when it holds neither `metrics.jsonl` nor a `trainer_state.json`, or one that cannot be read.
    """
    directory = Path(directory)
    name = name or directory.resolve().name
    checkpoints = [path for path in directory.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    checkpoints.sort(key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    newest = next(filter(None, (_state(path) for path in checkpoints)), None)
    # A run that went on after its end has newer checkpoints than the state that it saved there.
    state = max(filter(None, (_state(directory), newest)), key=_reached, default={})
    total = state.get("max_steps", 0)
    finished = 0 < total <= state.get("global_step", 0)
    settings = _settings(directory, *checkpoints)
    if (directory / "metrics.jsonl").is_file():
        return Run(name, _entries(directory / "metrics.jsonl"), "", finished, total, settings)
    if state:
        return Run(name, state["log_history"], "", finished, total, settings)
    logs = (path for name in ("metrics.jsonl", "trainer_state.json") for path in directory.glob(f"*/{name}"))
    below = sorted({path.parent.name for path in logs})
    hint = f" Runs below it: {', '.join(below[:9])}." if below else ""
    raise ValueError(
        f"`runs`={str(directory)!r} holds no run: it has neither metrics.jsonl nor trainer_state.json.{hint}"
    )


def _state(directory: Path) -> dict | None:
    """A trainer's state, `None` where it is missing or was not written to its end."""
    state = _json(directory / "trainer_state.json")
    return state if "log_history" in state else None


def _reached(state: dict) -> int:
    return max((entry.get("step", 0) for entry in state["log_history"]), default=0)


def _settings(directory: Path, *checkpoints: Path) -> dict:
    if own := _json(directory / "settings.json"):
        return own
    states = (_json(path / "rollout_state.json") for path in (directory, *checkpoints))
    state = next(filter(None, states), {})
    return state.get("arguments", {})


def _json(path: Path) -> dict:
    """A JSON file's object, empty where it is missing, half written or something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _entries(path: Path) -> list[dict]:
    """
    The lines of a log; the last one may be half written. A resumed run logs again what came after its checkpoint: a
    training step takes the place of all that was logged from it on.
    """
    lines, entries, latest = path.read_text().splitlines(), [], -1
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and "step" in entry:
            if REWARD in entry and entry["step"] <= latest:
                entries = [before for before in entries if before["step"] < entry["step"]]
            entries.append(entry)
            latest = entry["step"] if REWARD in entry else max(latest, entry["step"])
        elif number < len(lines):
            raise ValueError(f"{path}, line {number}: {line[:80]!r} is no log entry, a JSON object with a 'step'.")
    return entries


# Repetitions


@dataclass(frozen=True)
class Group:
    """Runs whose recorded settings differ in the seed alone; a run without recorded settings is alone."""

    name: str
    runs: list[Run]

    @property
    def settings(self) -> dict:
        return _without_seed(self.runs[0])

    def band(
        self, metric: str, smooth: bool = True, size: bool = False
    ) -> tuple[list[int], list[float], list[float], list[float]]:
        """
        Steps, and mean, smallest and largest of the runs' values there, over the runs that came so far; `smooth`: of
        their moving averages, `size`: of the values without their signs.
        """
        found: dict[int, list[float]] = {}
        for run in self.runs:
            steps, values = run.series(metric)
            values = [abs(value) for value in values] if size else values
            for step, value in zip(steps, moving_average(values) if smooth else values, strict=True):
                found.setdefault(step, []).append(value)
        steps = sorted(found)
        return steps, *([reduce(found[step]) for step in steps] for reduce in (fmean, min, max))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """The runs by their settings, in the order of the first of each."""
    found: dict[str, list[Run]] = {}
    for i, run in enumerate(runs):
        key = json.dumps(_without_seed(run), sort_keys=True, default=str) if run.settings else f"run {i}"
        found.setdefault(key, []).append(run)
    return [Group(_stem([run.name for run in group]), group) for group in found.values()]


def differences(groups: Sequence[Group]) -> dict[str, list]:
    """Settings in which the groups differ -> the value of each, `None` where it is not recorded."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    values = {name: [group.settings.get(name) for group in groups] for name in names}
    return {name: row for name, row in sorted(values.items()) if any(value != row[0] for value in row)}


def _without_seed(run: Run) -> dict:
    return {name: value for name, value in run.settings.items() if name not in REPETITION}


def _stem(names: list[str]) -> str:
    """What the names of repetitions share: `int4-ais` of `int4-ais-seed0` and `int4-ais-seed1`."""
    if len(names) == 1:
        return names[0]
    shared = "".join(letters[0] for letters in takewhile(lambda x: len(set(x)) == 1, zip(*names, strict=False)))
    return re.sub(r"([-_. ]+(seed|s|run))?[-_. =]*\d*$", "", shared) or " + ".join(names)
