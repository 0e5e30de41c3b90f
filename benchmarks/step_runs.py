"""
Keeps the runs that `step.py` measured in a JSON file, and prints their table.

    {
        "machine", "commit", "versions", "arguments",    # the same for all runs of a file
        "lengths": {shape: [[...] for each step]},       # of the completions, drawn before any trainer started; a
                                                     # run may have taken only the first of these steps
        "runs": [{"trainer", "round", "size", "micro", "load", "cores", "results": {shape: {...}}}],
    }

A shape is named "64x4096 lognormal": completions of a step, most tokens of each, and how lengths are drawn. Its result
has `warm_up` and `steps`, seconds by phase, the peak of memory, and `alloc_retries`: how often its process has emptied
torch's cache for want of memory, which is slow.
"""

import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from engines import BANDWIDTH, in_own_process, machine, model_title, versions
from limits import sampling_limit, update_limit
from raw_results import read_results, write_results


PHASES = ("sampling", "sync", "scoring", "update", "rest")
# Trainers that the others of their method are divided by: TRL as it comes, TRL with the switches that help it, ours in
# BF16
BASELINES = ("trl", "trl-control", "bf16")

# Trainers of `unsloth_step.py`, and the precision of sampling and update
UNSLOTH = {"unsloth": "bf16", "unsloth-fp8": "fp8"}

FULL = 16  # steps whose mean is printed: as many as a pool of rollouts in flight is full


def parts_of(trainer: str) -> tuple[str, str]:
    """Returns the method of a trainer, GRPO where its name has none, and the name without it."""
    method, colon, name = trainer.rpartition(":")
    return (method if colon else "grpo"), name


def start(args: Namespace, shared: Sequence[str], lengths: dict[str, list[list[int]]]) -> dict:
    """
    Returns the runs that `--output` has so far, or none.

    Args:
        args (`argparse.Namespace`): The benchmark's arguments, with `commit` and `output`.
        shared (`Sequence[str]`): Names of the arguments that all runs of a file share.
        lengths (`dict[str, list[list[int]]]`): Tokens of the completions of each step, by shape.

    Raises:
        `ValueError`: The file has runs that cannot stand in one table with the new ones.
    """
    new = {
        "machine": machine(),
        "commit": args.commit,
        "versions": versions(),
        "arguments": {name: getattr(args, name) for name in shared},
        "lengths": lengths,
        "runs": [],
    }
    return merged(read(args.output), new) if args.output is not None and args.output.exists() else new


def run_all(
    args: Namespace, trainers: Sequence[str], size: str, found: dict, *options: str, **constants: object
) -> list[str]:
    """
    Runs each trainer in a process of its own, adds its run to `found` and writes that to `--output`.

    Args:
        args (`argparse.Namespace`): The benchmark's arguments, with `rounds`, `micro`, `timeout` and `output`.
        trainers (`Sequence[str]`): Names of the trainers. Each second round takes them in reverse.
        size (`str`): Of the policy.
        found (`dict`): The file's runs so far.
        options: Further words of the process's command line.
        constants: What else is kept of each run.

    Returns:
        `list[str]`: Names of the trainers that failed.
    """
    failed = []
    for number in range(1, args.rounds + 1):
        for trainer in trainers if number % 2 else reversed(trainers):
            run = {"trainer": trainer, "round": number, "size": size, "micro": args.micro} | constants
            run |= {"load": os.getloadavg(), "cores": len(os.sched_getaffinity(0))}
            words = [*sys.argv[1:], "--one", trainer, *options]
            results = in_own_process(words, args.timeout, **process_of(trainer, args))
            if "error" in results:
                failed.append(trainer)
                print(f"{trainer}: {results['error'][:300]}", flush=True)
                continue
            found["runs"].append(run | {"results": results})
            write(found, args.output)
            for shape, result in results.items():
                seconds = " ".join(f"{step['step']:.2f}" for step in result["steps"])
                print(f"{size}, {trainer}, {shape}, round {number}: {seconds} s", flush=True)
    return failed


def process_of(trainer: str, args: Namespace) -> dict[str, str]:
    """Returns the script and the variables of a trainer's process where they are not those of the benchmark."""
    if trainer not in UNSLOTH:
        return {}
    places = (str(args.unsloth_site or ""), os.environ.get("PYTHONPATH", ""))
    script = str(Path(__file__).with_name("unsloth_step.py"))
    return {"script": script, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def merged(found: dict, more: dict) -> dict:
    """Returns the runs of both. Raises `ValueError` if they cannot stand in one table."""
    for name in ("machine", "commit", "versions", "arguments"):
        if found[name] != more[name]:
            raise ValueError(f"The runs differ in their {name}: {found[name]} and {more[name]}.")
    lengths = found["lengths"] | more["lengths"]
    for shape in found["lengths"].keys() & more["lengths"].keys():
        fewer, all_steps = sorted((found["lengths"][shape], more["lengths"][shape]), key=len)
        if all_steps[: len(fewer)] != fewer:
            raise ValueError(f"The completions of {shape} have other lengths in some of the runs.")
        lengths[shape] = all_steps
    return found | {"lengths": lengths, "runs": [*found["runs"], *more["runs"]]}


def read(*paths: Path) -> dict:
    """Returns the runs of these files together."""
    first, *others = map(read_results, paths)
    for other in others:
        first = merged(first, other)
    return first


def write(found: dict, path: Path | None) -> None:
    if path is not None:
        write_results(path, found)


def print_tables(found: dict) -> None:
    """Prints a table for each size of the policy and each shape of a step."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    print(f"\n{found['machine']}, commit {found['commit']}, {versions}")
    sizes = dict.fromkeys(run["size"] for run in found["runs"])
    for size in sizes:
        for shape, lengths in found["lengths"].items():
            runs = [run for run in found["runs"] if run["size"] == size and shape in run["results"]]
            if runs:
                title = f"{model_title(size)}, {shape}"
                print_table(title, lengths[1:], runs, shape, found["machine"], found["arguments"])


def limits_of(run: dict, machine: str, arguments: dict, lengths: list[list[int]]) -> tuple[float, float]:
    """
    Returns the least seconds of a run's sampling and of its policy's update: medians over the steps. A critic is left
    out. See `limits.py`.
    """
    trainer = UNSLOTH.get(run["trainer"], run["trainer"])
    rollout, _, train = parts_of(trainer)[1].partition("@")[0].partition("+")[0].partition("/")
    rollout = "bf16" if rollout.startswith("trl") else rollout
    train = rollout if run["trainer"] in UNSLOTH else train.partition("/")[0] or "bf16"
    step = (arguments["prompt"], arguments["generations"])
    return (
        statistics.median(sampling_limit(run["size"], machine, rollout, *step, each) for each in lengths),
        statistics.median(
            update_limit(run["size"], machine, train, *step, each, bool(arguments["lora"])) for each in lengths
        ),
    )


def print_table(
    title: str, lengths: list[list[int]], runs: list[dict], shape: str, machine: str, arguments: dict
) -> None:
    """
    Prints medians of the measured steps, and the mean of the last 16: with rollouts in flight, the first steps return
    the short completions. A trainer has one row for each size of its micro-batches; its rounds count together. A phase
    that no step had is "0", a ratio to a baseline that its method lacks "-". The limits of two phases are known for the
    cards of `BANDWIDTH`.
    """
    tokens = [sum(each) for each in lengths]
    mean = sum(tokens) / sum(map(len, lengths))
    print(f"\n{title}: steps of {min(tokens)} to {max(tokens)} tokens, {mean:.0f} a completion")

    rows: dict[tuple[str, int], list[dict]] = {}
    for run in runs:
        rows.setdefault((run["trainer"], run["micro"]), []).append(run)
    medians = {row: statistics.median(seconds_of(found, shape, "step")) for row, found in rows.items()}
    # A baseline with several sizes of micro-batches counts with the fastest, and for the trainers of its method
    baselines: dict[tuple[str, str], float] = {}
    for (trainer, _), median in medians.items():
        method, name = parts_of(trainer)
        if name in BASELINES:
            baselines[method, name] = min(median, baselines.get((method, name), median))
    names = [name for name in BASELINES if any(name == found for _, found in baselines)]

    headings = ["trainer", "micro", "steps", "step s", "min", "max", "mean", *(f"x {name}" for name in names)]
    headings += [*PHASES, "tok/s", "peak GiB", "load"]
    cards = any(card in machine for card in BANDWIDTH)
    headings += ["sampling limit", "update limit"] if cards else []
    lines = [headings]
    for (trainer, micro), found in rows.items():
        steps, median = seconds_of(found, shape, "step"), medians[trainer, micro]
        line = [trainer, str(micro), str(len(steps)), f"{median:.2f}", f"{min(steps):.2f}", f"{max(steps):.2f}"]
        last = [seconds for run in found for seconds in seconds_of([run], shape, "step")[-FULL:]]
        line.append(f"{statistics.mean(last):.2f}")
        found_baselines = [baselines.get((parts_of(trainer)[0], name)) for name in names]
        line += ["-" if baseline is None else f"{baseline / median:.2f}" for baseline in found_baselines]
        for phase in PHASES:
            seconds = seconds_of(found, shape, phase)
            line.append(f"{statistics.median(seconds):.2f}" if any(seconds) else "0")
        sampled = []
        for run in found:  # which may have fewer steps than another
            seconds = seconds_of([run], shape, "sampling")
            if "in_flight" in run["results"][shape]:  # a step returns other completions than it samples
                _, *entries = run["results"][shape]["in_flight"]
                returned = sum(entry["completions/mean_length"] for entry in entries) * len(lengths[0])
                sampled.append(returned / sum(seconds))
            else:
                sampled += [count / each for count, each in zip(tokens, seconds)]
        line.append(f"{statistics.median(sampled):.0f}")
        line.append(f"{max(run['results'][shape]['peak_bytes'] for run in found) / 2**30:.1f}")
        line.append(f"{max(run['load'][0] for run in found):.1f}")
        if cards:
            line += [f"{seconds:.2f}" for seconds in limits_of(found[0], machine, arguments, lengths)]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    for name, *cells in lines:
        print("  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:]))]))


def seconds_of(runs: list[dict], shape: str, phase: str) -> list[float]:
    """Returns the seconds of a phase in each measured step of these runs."""
    return [step[phase] for run in runs for step in run["results"][shape]["steps"]]
