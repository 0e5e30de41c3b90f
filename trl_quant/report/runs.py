"""Reads the logs and settings that training runs leave behind, and groups runs that differ only in the seed.

| file in a run's directory | written by | holds |
|---|---|---|
| `metrics.jsonl` | a callback, during the run | one log entry per line |
| `trainer_state.json`, also in `checkpoint-*` | [`~transformers.Trainer`] | the log up to there |
| `settings.json` | a script that started the run | its settings, one JSON object |
| `rollout_state.json` in `checkpoint-*` | `QuantGRPOTrainer` | the same; read if there is no `settings.json` |
"""

import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from statistics import fmean

from ..reading import reading
from ..storage.manifest import damage
from .held_out import dataset_of, of_dataset


TRAINER_STATE = "trainer_state.json"  # `transformers.trainer`, which names it, takes seconds to import
REWARD, LOSS, KL = "reward", "loss", "mismatch/kl_k3"
ENDS = 5  # a run's first or last value is the mean over at most so many logged steps
TOKENS_PER_SECOND = "tokens_per_second"  # not logged by TRL; `Run.series` computes it
STEP_TIME, ASYNCHRONOUS_STEP_TIME = "step_time", "perf/step_s"  # names of TRL's trainers
LARGEST = 1e100  # largest value that is used: squares of larger ones overflow, and axes cannot show them
MOST_STEPS = 2**53
SMALLEST_FLOATS_IN_1 = 2**1074
DEEPEST = 50  # largest number of nested lists and objects in a setting
# Settings in which repetitions of a run may differ
REPETITION = ("seed", "data_seed", "output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "hub_model_id")


@dataclass(frozen=True)
class Run:
    """A run's name, its log entries in order, a note on how it ended, and the settings that it recorded."""

    name: str
    history: list[dict]
    note: str = ""
    finished: bool = False  # whether the run made all of its steps
    total: int = 0  # planned steps; 0 if unknown
    settings: dict = field(default_factory=dict)

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Returns the steps and values of the entries in which `metric` is a number."""
        if metric == TOKENS_PER_SECOND:
            return self._tokens_per_second()
        return self._columns.get(metric, ([], []))

    @cached_property
    def _columns(self) -> dict[str, tuple[list[int], list[float]]]:
        """Metric -> steps and values. Those of an evaluation are called as [`of_dataset`] says."""
        columns: dict[str, tuple[list[int], list[float]]] = {}
        several = len(self.datasets) > 1
        for entry in self.history:
            dataset = dataset_of(entry) if several else ""
            for name, value in (entry | {STEP_TIME: step_seconds(entry)}).items():
                if is_number(value):
                    steps, values = columns.setdefault(of_dataset(name, dataset), ([], []))
                    steps.append(entry["step"])
                    values.append(value)
        return columns

    @cached_property
    def datasets(self) -> list[str]:
        """The datasets that tell apart the run's evaluations: `""`, which stands for the only one, and any others."""
        named = dict.fromkeys(filter(None, map(dataset_of, self.history)))
        return ["", *named] if len(named) > 1 else [""]

    def averages(self, metric: str, size: bool = False) -> list[float]:
        """Returns moving averages of a metric's values; with `size`, of their absolute values."""
        if (metric, size) not in self._averages:
            values = self.values(metric)
            self._averages[metric, size] = moving_average([abs(value) for value in values] if size else values)
        return self._averages[metric, size]

    @cached_property
    def _averages(self) -> dict[tuple[str, bool], list[float]]:
        """Cache of moving averages, because findings, charts and descriptions ask for the same ones."""
        return {}

    def values(self, metric: str) -> list[float]:
        return self.series(metric)[1]

    def names(self, prefix: str) -> list[str]:
        """Returns the metrics with this prefix, in the order in which they were first logged."""
        return [name for name in self._columns if name.startswith(prefix)]

    def first(self, metric: str, parts: int = 4) -> float | None:
        """
        Returns the mean over the first logged steps: `ENDS`, or one of `parts` equal parts of the run where that is
        less, so that both ends of a short run are its ends. `None` if there are none.
        """
        values = self.values(metric)
        return fmean(values[: _end(values, parts)]) if values else None

    def last(self, metric: str, parts: int = 4) -> float | None:
        """Returns the mean over the last logged steps, as many as [`first`] takes; `None` if there are none."""
        values = self.values(metric)
        return fmean(values[-_end(values, parts) :]) if values else None

    def _tokens_per_second(self) -> tuple[list[int], list[float]]:
        """
        Divides the tokens of prompts and completions by the time of whole steps. TRL logs the time of a step as a mean
        over the steps of an entry. It logs `num_tokens`, a total, in entries with a generation.
        """
        steps, rates, step, tokens, seconds = [], [], 0, 0.0, 0.0
        for entry in self.history:
            step_time, total = step_seconds(entry), entry.get("num_tokens")
            if step_time is not None:
                seconds += step_time * (entry["step"] - step)
                step = entry["step"]
            if is_number(total) and seconds > 0:
                steps.append(entry["step"])
                rates.append((total - tokens) / seconds)
                tokens, seconds = total, 0.0
        return steps, rates

    @property
    def steps(self) -> int:
        return max((entry.get("step", 0) for entry in self.history), default=0)

    @property
    def status(self) -> str:
        """Says how far the run came. A log does not show whether the run continues or was stopped."""
        if self.note:
            return self.note
        ends, _ = self.series("train_runtime")
        if self.finished or self.steps in ends:  # an end before the last step is one after which the run went on
            return "done"
        return f"at step {self.steps}" + (f" of {self.total}" if self.total else "")


def _end(values: Sequence[float], parts: int) -> int:
    return max(1, min(ENDS, len(values) // parts))


def is_number(value) -> bool:
    """Whether a logged value is a finite number no larger than `LARGEST`, so that sums of squares stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def step_seconds(entry: dict) -> float | None:
    """Returns the seconds of a step in a log entry, under the name of either kind of trainer; `None` if not logged."""
    return next(filter(is_number, map(entry.get, (STEP_TIME, ASYNCHRONOUS_STEP_TIME))), None)


def moving_average(values: Sequence[float], window: int | None = None) -> list[float]:
    """
    Returns the mean of each value and the up to `window - 1` values before it. The default window is a fiftieth of all
    values, at least 10.

    Each sum is the previous one plus the value that enters the window minus the value that leaves it, so the time does
    not grow with the window. Sums are exact integers, so the means have the same bits as `statistics.fmean`.
    """
    window = window or max(2 * ENDS, len(values) // 50)
    parts = [_in_smallest_floats(value) for value in values]
    means, total = [], 0
    for i, part in enumerate(parts):
        total += part - (parts[i - window] if i >= window else 0)
        means.append(total / SMALLEST_FLOATS_IN_1 / min(i + 1, window))
    return means


def _in_smallest_floats(value: float) -> int:
    """Returns a float as a multiple of the smallest float, 2**-1074. The multiple is an integer for every float."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * (SMALLEST_FLOATS_IN_1 // denominator)


# Reading


class NotWhole(ValueError):
    """Raised for a file whose JSON is incomplete, because it is being written or its run was killed."""


def read_run(directory: str | Path, name: str | None = None) -> Run:
    """
    Reads a run's output directory. An incomplete `trainer_state.json` or settings file counts as missing.

    Raises:
        ValueError: The directory holds neither `metrics.jsonl` nor a whole `trainer_state.json`, or one of its files
            cannot be read or has other contents. The message names the file.
    """
    directory = Path(directory)
    name = name or directory_name(directory)
    by_step = {path.name.removeprefix("checkpoint-"): path for path in directory.glob("checkpoint-*")}
    checkpoints = [by_step[step] for step in sorted(filter(str.isdecimal, by_step), key=int, reverse=True)]
    broken: list[str] = []
    newest = next(filter(None, (_state(path, broken) for path in checkpoints)), None)
    # A run that was continued after its end has checkpoints that are newer than its final state
    state = max(filter(None, (_state(directory, broken), newest)), key=_reached, default=None)
    total, reached = (state["max_steps"], state["global_step"]) if state else (0, 0)
    history = _logged(directory / "metrics.jsonl")
    if not history and state:
        history = state["log_history"]
    if history is not None:
        if 0 < total < max(map(_step_of_entry, history), default=0):  # the run goes on after the end in this state
            total = 0
        return Run(name, history, "", 0 < total <= reached, total, _settings(directory, *checkpoints))
    logs = (path for name in ("metrics.jsonl", TRAINER_STATE) for path in directory.glob(f"*/{name}"))
    below = sorted({path.parent.name for path in logs})
    hints = [*broken[:1], *([f"Runs below it: {', '.join(below[:9])}."] if below else [])]
    if directory.is_file():
        hints.append("It is a file. Name its directory.")
    raise ValueError(
        f"`runs`={str(directory)!r} holds no run: it has neither metrics.jsonl nor a whole trainer_state.json."
        + "".join(f" {hint}" for hint in hints)
    )


def find_runs(directories: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """
    Returns the runs among `directories` and below those that are not runs, then the directories without any run. The
    search leaves out the directories inside a run, behind a link, or with a hidden name.
    """
    runs, without = [], []
    for directory in map(Path, directories):
        found, empty = _search(directory)
        runs += found or [directory]  # `read_run` then says what is wrong with the directory
        without += empty if found else []
    once: dict[Path, Path] = {}
    for run in runs:
        once.setdefault(Path(os.path.realpath(run)), run)
    return list(once.values()), list(dict.fromkeys(without))


def _search(directory: Path) -> tuple[list[Path], list[Path]]:
    """Returns the runs in a directory, itself included, and the topmost directories without any."""
    if _is_run(directory):
        return [directory], []
    if not directory.is_dir():
        return [], []
    runs, without = [], []
    for path in sorted(directory.iterdir()):
        if not path.is_dir() or path.name.startswith("."):
            continue
        if path.is_symlink():  # it may lead back up
            runs += [path] if _is_run(path) else []
            continue
        found, empty = _search(path)
        runs += found
        without += empty
    return runs, without if runs else [directory]


def _is_run(directory: Path) -> bool:
    """Whether a directory holds a run's log, readable or not."""
    names = ("metrics.jsonl", TRAINER_STATE, f"checkpoint-*/{TRAINER_STATE}")
    return any(any(directory.glob(name)) for name in names)


def named(directories: Sequence[str | Path]) -> list[str]:
    """Names the runs by their directories, or by their whole paths where two directories have the same name."""
    names = [directory_name(directory) for directory in directories]
    count = Counter(names)
    return [name if count[name] == 1 else str(path) for name, path in zip(names, directories, strict=True)]


def directory_name(directory: str | Path) -> str:
    """Returns the name of a run's directory, resolving `.` and links."""
    return os.path.basename(os.path.realpath(directory)) or str(directory)


def _state(directory: Path, broken: list[str]) -> dict | None:
    """Reads a trainer's state; `None` if it is missing or incomplete. Adds the error to `broken` if incomplete."""
    path = directory / TRAINER_STATE
    try:
        state = _object(path)
    except NotWhole as error:
        broken.append(str(error))
        return None
    if state is None:
        return None
    rows = state.get("log_history")
    if not isinstance(rows, list):
        raise ValueError(f"{path}: `log_history`={reprlib.repr(rows)} is not a list of log entries.")
    entries = [_entry(row, f"{path}, `log_history`[{i}]") for i, row in enumerate(rows)]
    counts = {name: state.get(name, 0) for name in ("max_steps", "global_step")}
    for name, value in counts.items():
        if not _is_count(value):
            raise ValueError(f"{path}: `{name}`={reprlib.repr(value)} is not a number of steps.")
    return counts | {"log_history": sorted(entries, key=_step_of_entry)}


def _reached(state: dict) -> int:
    return max(map(_step_of_entry, state["log_history"]), default=0)


def _settings(directory: Path, *checkpoints: Path) -> dict:
    settings = _whole_object(directory / "settings.json")
    if settings:
        return settings
    for path in (place / "rollout_state.json" for place in (directory, *checkpoints)):
        state = _whole_object(path)
        if state:
            arguments = state.get("arguments", {})
            if not isinstance(arguments, dict):
                raise ValueError(f"{path}: `arguments`={reprlib.repr(arguments)} is not a JSON object.")
            return arguments
    return {}


def _whole_object(path: Path) -> dict:
    """Reads a JSON file's object; an empty one if the file is missing or incomplete. Refuses one nested too deeply."""
    try:
        found = _object(path) or {}
    except NotWhole:
        return {}
    if _is_deep(found):
        raise ValueError(f"{path} is nested more than {DEEPEST} levels deep.")
    return found


def _is_deep(value, levels: int = DEEPEST) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list) or not value:
        return False
    return levels == 0 or any(_is_deep(part, levels - 1) for part in value)


def _object(path: Path) -> dict | None:
    """Reads a JSON file's object; `None` if the file is missing."""
    text = _text(path)
    if text is None:
        return None
    found = _parsed(text, str(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {reprlib.repr(found)}, not a JSON object.")
    return found


def _parsed(text: str, place: str):
    """Parses a JSON text; error messages name its `place`."""
    with reading(place):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise NotWhole(f"{place} is not whole: {error}.") from error


def _text(path: Path) -> str | None:
    """Reads a file's text; `None` if the file is missing. All files of a run are read here."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO or a device may never end
            raise ValueError(f"{path} is not a regular file.")
        with reading(path):
            text = path.read_text("utf-8-sig")
        fault = damage(path.parent, [path.name])
        if fault is not None:
            raise ValueError(fault)
        return text
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error


def _logged(path: Path) -> list[dict] | None:
    """
    Reads the entries of a log; `None` if it is missing. An incomplete last line is left out. A resumed run logs the
    steps after its checkpoint again, so a training step replaces whatever earlier lines logged from that step on.
    """
    text = _text(path)
    if text is None:
        return None
    lines, entries = text.rstrip().split("\n") if text.strip() else [], []
    for number, line in enumerate(lines, 1):
        place = f"{path}, line {number}"
        try:
            entries.append(_entry(_parsed(line, f"{place}: {line[:80]!r}"), place))
        except NotWhole:
            if number < len(lines):
                raise
    kept, replaced_from = [], math.inf
    for entry in reversed(entries):
        if entry["step"] < replaced_from:
            kept.append(entry)
        if LOSS in entry or REWARD in entry:  # distillation has no rewards
            replaced_from = min(replaced_from, entry["step"])
    kept.reverse()
    return sorted(kept, key=_step_of_entry)


def _entry(value, place: str) -> dict:
    """Checks a log entry, and returns it with its step as an integer."""
    if not isinstance(value, dict) or not _is_count(value.get("step")):
        raise ValueError(
            f"{place}: {reprlib.repr(value)} is not a log entry, a JSON object whose 'step' is a whole number."
        )
    return value | {"step": int(value["step"])}


def _is_count(value) -> bool:
    """Whether a value is a number of steps. Charts draw steps as floats, which are exact up to `MOST_STEPS`."""
    return is_number(value) and 0 <= value <= MOST_STEPS and value == int(value)


def _step_of_entry(entry: dict) -> int:
    return entry["step"]


# Repetitions


@dataclass(frozen=True)
class Group:
    """Runs whose recorded settings differ only in the seed. A run without recorded settings is a group of its own."""

    name: str
    runs: list[Run]

    @property
    def settings(self) -> dict:
        return _without_seed(self.runs[0])

    def band(
        self, metric: str, smooth: bool = True, size: bool = False
    ) -> tuple[list[int], list[float], list[float], list[float]]:
        """
        Returns the steps, and for each step the mean, the smallest and the largest value over the runs that reached it.
        `smooth` takes moving averages in place of values, `size` absolute values.
        """
        found: dict[int, list[float]] = {}
        for run in self.runs:
            steps, values = run.series(metric)
            if smooth:
                values = run.averages(metric, size)
            elif size:
                values = [abs(value) for value in values]
            for step, value in zip(steps, values, strict=True):
                found.setdefault(step, []).append(value)
        steps = sorted(found)
        return steps, *([reduce(found[step]) for step in steps] for reduce in (fmean, min, max))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Groups runs with the same settings, in the order of the first run of each group."""
    found: dict[str, list[Run]] = {}
    for i, run in enumerate(runs):
        key = _key(_without_seed(run)) if run.settings else f"run {i}"
        found.setdefault(key, []).append(run)
    names = [[run.name for run in group] for group in found.values()]
    count = Counter(map(_stem, names))
    stems = [_stem(own) if count[_stem(own)] == 1 else " + ".join(own) for own in names]  # each group's name differs
    return [Group(stem, group) for stem, group in zip(stems, found.values(), strict=True)]


def differences(groups: Sequence[Group]) -> dict[str, list]:
    """Returns setting -> value of each group (`None` if not recorded), for the settings in which groups differ."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    values = {name: [group.settings.get(name) for group in groups] for name in names}
    return {name: row for name, row in sorted(values.items()) if len(set(map(_key, row))) > 1}


def _key(value) -> str:
    """Returns a string that is the same for equal settings. Unlike `==`, it treats NaN as equal to NaN."""
    return json.dumps(value, sort_keys=True, default=str)


def _without_seed(run: Run) -> dict:
    return {name: value for name, value in run.settings.items() if name not in REPETITION}


def _stem(names: list[str]) -> str:
    """Returns what the names of repetitions share: `int4-ais` for `int4-ais-seed0` and `int4-ais-seed1`."""
    if len(names) == 1:
        return names[0]
    shared = "".join(letters[0] for letters in takewhile(lambda x: len(set(x)) == 1, zip(*names, strict=False)))
    if not any(name[len(shared) :][:1].isdecimal() for name in names) and shared[-1:].isdecimal():
        return shared  # its number is whole: `int4` for `int4` and `int4-seed1`
    return re.sub(r"([-_. ([{]+(seed|s|run))?[-_. =([{]*\d*$", "", shared) or " + ".join(names)
