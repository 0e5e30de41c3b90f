"""Reports where the engine's activations begin to differ from the trainer's, and how that changes log-probabilities.

    trl-quant report --mismatch runs/int8-acr --output mismatch.png
    trl-quant report --mismatch Qwen/Qwen2.5-0.5B-Instruct --rollout_precision fp8 --engine vllm --output mismatch.json

The engine samples a few completions of a model, or of a run's newest whole checkpoint. The trainer scores their tokens.
Then both compute each sequence in one pass, and their activations are compared operator by operator
(`trl_quant.rollout.verify.activations`). Options that are not given are taken from the run's settings, prompts from its
data (`trl_quant.report.run_settings`).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, groupby, islice
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..corrections import CorrectionInputs
from ..corrections.diagnostics import diagnose, rollout_ratio
from ..rollout import RolloutEngine
from ..rollout.engine import requests_for
from ..rollout.verify.activations import Comparison, Point
from ..rollout.verify.rows import check_sequences
from ..storage.whole import write_whole
from ..tasks import load_prompts
from ..tasks.data import check_prompts, token_ids
from .findings import POSITION
from .output import check_output, write_figure
from .run_settings import BF16, not_repeated, take
from .terminal import plain
from .trained import EngineOptions, Trained, build_engine, check_sampling, resolve_engine


PROMPT_LENGTH = 32  # tokens of each prompt, if neither `--prompts` nor the data of a run are known
# What a run's record does not say, or what a model that is no run gets
OTHERWISE = {"rollout_precision": BF16, "train_precision": BF16, "engine": "embedded", "vllm_engine_kwargs": "{}"}
OTHERWISE |= {"dtype": "mixed", "max_completion_length": 128, "temperature": 1.0, "generation_kwargs": "{}"}
OTHERWISE |= dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"))
LOCATED = 0.9  # the summary names the layers that add this share of the error


@dataclass
class MismatchOptions(EngineOptions):
    """
    The options of `trl-quant report --mismatch`.

    Attributes:
        mismatch (`str`): Hub id, directory or run.
        prompts (`str` or `None`): File with a column 'prompt' or 'question'; `None` for the run's data or a few texts.
        num_completions (`int`): Number of completions to sample.
        output (`str`): File for the chart, or for all figures if it ends in `.json`.
    """

    mismatch: str
    prompts: str | None
    num_completions: int
    output: str


def report_mismatch(options: MismatchOptions) -> Iterator[Table | str]:
    """Compares trainer and engine, yields the table and the lines to print, and writes the chart or the figures."""
    check_output(options.output, "json")
    trained = Trained.find(options.mismatch, trust=options.trust_remote_code)
    if trained.denoises:
        raise ValueError(
            f"`--mismatch`={options.mismatch!r} is a masked diffusion model, whose tokens have no probability of their "
            "own to compare. Its runs log `mismatch/*` of the one-step estimate."
        )
    check_sampling(options)
    yield from take(options, trained.settings, OTHERWISE)
    yield from not_repeated(trained.settings)
    kwargs = resolve_engine(options, trained) | {"enforce_eager": True}  # modules inside CUDA graphs cannot be observed
    for name in ("num_completions", "max_completion_length"):
        if getattr(options, name) < 1:
            raise ValueError(f"`--{name}`={getattr(options, name)} is out of range. It must be >= 1.")
    tokenizer = trained.tokenizer()
    yield where_prompts_come_from(options, trained.settings)
    prompts = _prompts(options, tokenizer, trained)

    torch.manual_seed(0)
    longest = max(map(len, prompts))
    engine = build_engine(options, trained, tokenizer, longest, options.num_completions, kwargs)
    result = measure(engine, prompts, options.temperature)
    fields = ("mismatch", "engine", "rollout_precision", "train_precision", "dtype", "temperature")
    result = {"arguments": {name: getattr(options, name) for name in fields}} | result
    yield table(result)
    yield from result["summary"]
    as_json = Path(options.output).suffix == ".json"
    if as_json:
        write_whole(options.output, json.dumps(result, indent=1))
    else:
        write_figure(options.output, chart(result))
    yield f"{'numbers' if as_json else 'chart'}: {options.output}"


def where_prompts_come_from(options: MismatchOptions, settings: dict) -> str:
    """Says in a line whose prompts are compared."""
    if options.prompts is not None:
        return f"prompts: {options.prompts}"
    if settings.get("dataset_name"):
        return f"prompts: {settings['dataset_name']}, split {settings['dataset_train_split']}, as in the run"
    why = ", since the run did not record its data, which only `trl-quant train` does" if settings else ""
    return f"prompts: a few texts of this package{why}"


def _prompts(options: MismatchOptions, tokenizer: PreTrainedTokenizerBase, trained: Trained) -> list[list[int]]:
    """Returns the token ids of a prompt for each completion."""
    settings = trained.settings
    if options.prompts is None and not settings.get("dataset_name"):
        found = check_sequences(tokenizer, PROMPT_LENGTH)
    else:
        source = (options.prompts,)
        if options.prompts is None:
            source = settings["dataset_name"], settings["dataset_train_split"], settings["dataset_config"]
        rows = load_prompts(*source, tokenizer=tokenizer, instruction=settings.get("instruction"))
        check_prompts("--prompts", rows)
        found = token_ids(rows[: options.num_completions]["prompt"], tokenizer, **trained.template_arguments)
    return list(islice(cycle(found), options.num_completions))


def measure(engine: RolloutEngine, prompts: list[list[int]], temperature: float) -> dict:
    """Samples completions of the prompts, compares engine and policy on them, and returns the figures for JSON."""
    comparison, scored = Comparison(engine), []
    samples = engine.draw(requests_for(prompts))
    for prompt, completion, logps in zip(prompts, samples.token_ids, samples.logps, strict=True):
        ids = torch.tensor(completion)
        logits = [rows[len(prompt) - 1 : -1].cpu().float() for rows in comparison.add([*prompt, *completion])]
        trainer, whole = (_log_probs(rows, ids, temperature) for rows in logits)
        own = torch.tensor([float("nan") if logp is None else logp for logp in logps])
        scored.append((own, whole, trainer))
    own, whole, trainer = zip(*scored, strict=True)
    result = {"sampled": token_metrics(own, trainer), "one_pass": token_metrics(whole, trainer)}
    result |= described(comparison)
    return result | {"summary": [*about_tokens(result), *about_operators(result)]}


def _log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Returns the log-probability of the token that follows each row of float32 logits."""
    tempered = logits / temperature
    return tempered.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - tempered.logsumexp(-1)


def described(comparison: Comparison) -> dict:
    """Returns a comparison's figures by point and by layer, and the operators that could not be compared."""
    points, layers = list(comparison.points.values()), []
    for layer, group in groupby(points, key=lambda point: point.layer):
        name = f"layers.{layer}"
        if layer is None:
            name = "head" if layers else "embedding"
        layers.append({"layer": name} | row(list(group), layers[-1]["error"] if layers else 0.0))
    listed = [
        {"name": p.name, "layer": p.layer, "error": p.total.error, "same": p.total.same}
        | {"added": p.added.error, "added_same": p.added.same}
        for p in points
    ]
    return {"points": listed, "missing": comparison.missing, "layers": layers}


def token_metrics(rollout_logps: tuple[Tensor, ...], trainer_logps: tuple[Tensor, ...]) -> dict[str, float]:
    """Returns the mismatch metrics of the completions' tokens, and the share of tokens with the same bits."""
    rollout_logps, old = (pad_sequence(rows, batch_first=True) for rows in (rollout_logps, trainer_logps))
    mask = pad_sequence([torch.ones(len(row)) for row in trainer_logps], batch_first=True)
    inputs = CorrectionInputs(rollout_logps, old, torch.zeros(len(old)), mask)
    same = (rollout_logps == old)[mask.bool()]
    metrics, _ = diagnose(inputs, rollout_ratio(inputs))
    return {"tokens": len(same), "same_tokens": same.double().mean().item()} | metrics


def row(group: list[Point], inherited: float) -> dict:
    """Returns a layer's row of the table. The errors that its operators add are summed in squares."""
    worst = max(group, key=lambda point: point.added.error)
    return {
        "inherited": inherited,
        "added": sum(point.added.error**2 for point in group) ** 0.5,
        "worst": _kind(worst.name),
        "worst_added": worst.added.error,
        "error": group[-1].total.error,
        "same": group[-1].total.same,
    }


def _kind(name: str) -> str:
    """Returns the name of an operator within its layer."""
    if re.fullmatch(r"layers\.\d+|.*norm\.input", name):
        return "residual sum"
    *_, parent, leaf = "", *name.split(".")
    return f"{parent}'s input" if leaf == "input" else leaf


def about_tokens(result: dict) -> list[str]:
    """Describes in words how the log-probabilities of the tokens differ."""
    lines = []
    for name, how in (("sampled", "as it sampled"), ("one_pass", "in one pass over each sequence")):
        found = result[name]
        lines.append(
            f"The engine {how}: KL {found['mismatch/kl_k3']:.2e} nats a token (k3; k1 {found['mismatch/kl_k1']:.2e}), "
            f"and {found['same_tokens']:.1%} of {found['tokens']} tokens have the trainer's log-probability to the bit."
        )
    return lines


def about_operators(result: dict) -> list[str]:
    """Describes in words where the activations differ."""
    points = result["points"]
    differing = [re.sub(r"\.input$", "'s input", point["name"]) for point in points if point["same"] < 1]
    if not differing:
        lines = ["No operator differs: in one pass all activations have the same bits."]
    elif len(differing) == len(points):
        lines = [f"The first operator differs already, {differing[0]}."]
    else:
        lines = [f"The first operator that differs is {differing[0]}; until then all bits are the same."]
    total = sum(point["added"] ** 2 for point in points)
    if total:
        lines.append(_located(result, total))
    if result["missing"]:
        names = ", ".join(dict.fromkeys(_kind(name) for name in result["missing"]))
        lines.append(f"The engine has no module for {names}: what they add counts for the next operator.")
    return lines


def _located(result: dict, total: float) -> str:
    """Names the layers that add most of the error. `total` is the sum of the squares of all added errors."""
    chosen, found = [], 0.0
    for layer in sorted(result["layers"], key=lambda layer: -layer["added"]):
        if found < LOCATED * total:
            chosen.append(layer["layer"])
            found += layer["added"] ** 2
    kinds: dict[str, float] = {}
    for point in result["points"]:
        kinds[_kind(point["name"])] = kinds.get(_kind(point["name"]), 0.0) + point["added"] ** 2
    kind = max(kinds, key=kinds.get)
    return (
        f"{found / total:.0%} of what operators add (squares of relative errors) enters in {_ranges(chosen)}; "
        f"of all of it {kinds[kind] / total:.0%} in {kind}."
    )


def _ranges(names: list[str]) -> str:
    """Lists layers briefly, such as `layers 0-3, 7 and the head`."""
    indices = sorted(int(name.rpartition(".")[2]) for name in names if name.startswith("layers."))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])]
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    layers = [f"layer{'s' * (len(indices) > 1)} {spans}"] if indices else []
    return " and ".join(layers + [f"the {name}" for name in names if not name.startswith("layers.")])


def table(result: dict) -> Table:
    """Makes the table: for each layer its inherited, added and final error, and the operator that adds most."""
    found = Table("layer", "inherited", "added", "worst operator", "its part", "error", "same bits")
    found.box, found.padding, found.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False
    for column in (1, 2, 4, 5, 6):
        found.columns[column].justify = "right"
    found.columns[3].overflow = "fold"
    for layer in result["layers"]:
        errors = {name: f"{layer[name]:.1e}" for name in ("inherited", "added", "worst_added", "error")}
        worst = (layer["worst"], errors["worst_added"]) if layer["worst_added"] else ("-", "-")
        cells = errors["inherited"], errors["added"], *worst, errors["error"], f"{layer['same']:.1%}"
        found.add_row(*map(plain, (layer["layer"], *cells)))
    return found


def chart(result: dict) -> Figure:
    """Draws the error along the depth, and the mismatch by position in the completion."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    depth, position = figure.subplots(1, 2)
    layers = result["layers"]
    for name, label in (("error", "error of the output"), ("added", "added by its operators")):
        depth.plot([layer[name] for layer in layers], marker=".", label=label)
    depth.set_xticks(range(len(layers)), [layer["layer"] for layer in layers], rotation=90, fontsize="x-small")
    depth.set(ylabel="relative error", ylim=(0, None))
    depth.legend(fontsize="small")
    buckets = {n.removeprefix(POSITION): kl for n, kl in result["sampled"].items() if n.startswith(POSITION)}
    position.bar(buckets.keys(), buckets.values())
    position.set(xlabel="position in the completion", ylabel="mismatch KL (nats per token, k3)")
    for axis in (depth, position):
        axis.grid(alpha=0.3)
    return figure
