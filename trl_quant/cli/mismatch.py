"""`trl-quant report --mismatch`: where the trainer's and the engine's activations part, and what that does to tokens.

    trl-quant report --mismatch runs/int8-acr --output mismatch.png
    trl-quant report --mismatch Qwen/Qwen2.5-0.5B-Instruct --rollout_precision fp8 --engine vllm --output mismatch.json

The engine samples a few completions of a model, or of a run's newest whole checkpoint, whose settings are the defaults
here; the trainer scores their tokens; and both compute each sequence in one pass, in which their activations are
compared operator by operator (`trl_quant.rollout.verify.activations`).
"""

import argparse
import json
import re
from dataclasses import dataclass
from itertools import cycle, groupby, islice
from pathlib import Path

import torch
from accelerate import Accelerator
from matplotlib.figure import Figure
from peft import PeftConfig, PeftModel
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl.trainer.utils import selective_log_softmax

from .. import rollout
from ..corrections import CorrectionInputs
from ..corrections.diagnostics import diagnose, rollout_ratio
from ..policy.adapters import with_frozen_layers
from ..policy.frozen import BITSANDBYTES, freeze
from ..policy.unified import checkpoint_dtype, unify
from ..precisions import PRECISIONS, frozen_bases, in_vllm, train_precisions
from ..rollout.spec import EngineSpec, default_lora_sync, engine_kind
from ..rollout.verify.activations import Comparison, Point
from ..rollout.verify.self_check import check_sequences
from ..rollout.vllm.support import check_device, check_engine_kwargs
from ..tasks import load_prompts
from ..tasks.data import check_prompts, token_ids
from ..trainers.checkpoints import how_to_go_on, last_complete_checkpoint, read_rollout_state
from . import plain
from .report import check_output, write_figure, write_whole


BF16 = "bf16"
DTYPES = {"mixed": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}
MODES = {"embedded": "embedded", "vllm": "colocate"}  # `--engine` -> what samples, as in `rollout.spec.engine_kind`
PROMPT_LENGTH = 32  # of the prompts that are used without `--prompts`
POSITION = "mismatch/by_position/"
MOST = 0.9  # of what operators add, to be located


@dataclass(frozen=True)
class Trained:
    """
    What is compared.

    Attributes:
        path (`str`): Its directory, or its id on the hub.
        base (`str`): Where its model's weights are: the same, or an adapter's base.
        adapter (`bool`): Whether it is an adapter.
        settings (`dict`): What a checkpoint says of the run.
        trust (`bool`): Whether its own Python may run.
    """

    path: str
    base: str
    adapter: bool
    settings: dict
    trust: bool

    @classmethod
    def find(cls, name: str, option: str = "`--mismatch`", trust: bool = False) -> "Trained":
        """
        The model or the newest whole checkpoint called `name`, which `option` gave.

        Raises:
            ValueError: A directory without either, or a quantized checkpoint.
        """
        path, base, adapter, settings = name, name, False, {}
        if Path(name).is_dir():
            path = base = last_complete_checkpoint(name) or name
            settings = read_rollout_state(path).get("settings", {})
            adapter = (Path(path) / "adapter_config.json").is_file()
            if adapter:
                base = PeftConfig.from_pretrained(path).base_model_name_or_path
            elif not (Path(path) / "config.json").is_file():
                raise ValueError(f"{option}={name!r} holds no model and no adapter. {how_to_go_on(name)}")
        if getattr(AutoConfig.from_pretrained(base, trust_remote_code=trust), "quantization_config", None) is not None:
            raise ValueError(f"{option}={name!r} is quantized already: {base}. Name a checkpoint of 16 or 32 bits.")
        return cls(path, base, adapter, settings, trust)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        own = (Path(self.path) / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(self.path if own else self.base, trust_remote_code=self.trust)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def policy(self, precision: str, dtype: torch.dtype, merged: bool):
        """The model as a run trains it in `precision`; `merged` where its engine quantizes an adapter with the base."""
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype, trust_remote_code=self.trust)
        if frozen := precision in frozen_bases():
            freeze(model, precision, checkpoint_dtype(self.base, self.trust))
        if self.adapter:
            config = PeftConfig.from_pretrained(self.path)
            model = PeftModel.from_pretrained(model, self.path, config=with_frozen_layers(config) if frozen else config)
        if precision != BF16 and not frozen:
            unify(model, precision, merged, None if merged else checkpoint_dtype(self.base, self.trust))
        return model.eval()


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="trl-quant report", description=__doc__.partition("\n")[0])
    options.add_argument("--mismatch", required=True, metavar="MODEL_OR_RUN", help="hub id, directory or run")
    add_engine_options(options)
    options.add_argument("--prompts", metavar="FILE.jsonl", help="column 'prompt' or 'question' (default: a few texts)")
    options.add_argument("--num_completions", type=int, default=8, help="how many (default: %(default)s)")
    options.add_argument("--max_completion_length", type=int, default=128, help="tokens (default: %(default)s)")
    options.add_argument("--temperature", type=float, default=1.0, help="of sampling (default: %(default)s)")
    options.add_argument("--output", default="report.png", help="chart, or all numbers as .json (default: %(default)s)")
    return options


def add_engine_options(options: argparse.ArgumentParser) -> None:
    """What samples, and of what policy."""
    kinds = "(default: the run's, else bf16)"
    options.add_argument("--rollout_precision", choices=PRECISIONS, help=f"what the engine samples in {kinds}")
    options.add_argument("--train_precision", choices=[BF16, *train_precisions()], help=f"what is trained {kinds}")
    options.add_argument("--engine", choices=MODES, default="embedded", help="what samples (default: %(default)s)")
    options.add_argument("--vllm_engine_kwargs", default="{}", help="further arguments of vLLM's `LLM`, a JSON object")
    options.add_argument("--vllm_gpu_memory_utilization", type=float, default=0.3, help="share (default: %(default)s)")
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        default="mixed",
        help="types of the trainer's forward: 'mixed' is 32-bit weights under BF16 autocast (default: %(default)s)",
    )
    options.add_argument("--trust_remote_code", action="store_true", help="run the model's own Python")


def main(argv: list[str] | None = None) -> None:
    """Prints the table and the summary, and writes the chart or the numbers."""
    args = parser().parse_args(argv)
    check_output(args.output, "json")
    trained = Trained.find(args.mismatch, trust=args.trust_remote_code)
    kwargs = resolve_engine(args, trained) | {"enforce_eager": True}  # or there are no modules to look at
    for name in ("num_completions", "max_completion_length"):
        if getattr(args, name) < 1:
            raise ValueError(f"`--{name}`={getattr(args, name)} is out of range. It must be >= 1.")
    if not args.temperature > 0:
        raise ValueError(f"`--temperature`={args.temperature:g} is out of range. It must be > 0.")
    tokenizer = trained.tokenizer()
    prompts = _prompts(args, tokenizer)

    torch.manual_seed(0)
    engine = build_engine(args, trained, tokenizer, max(map(len, prompts)), kwargs)
    result = measure(engine, prompts, args.temperature)
    fields = ("mismatch", "engine", "rollout_precision", "train_precision", "dtype", "temperature")
    result = {"arguments": {name: getattr(args, name) for name in fields}} | result
    console = Console()
    console.print(table(result))
    for line in result["summary"]:
        console.print(plain(line))
    if Path(args.output).suffix == ".json":
        write_whole(args.output, json.dumps(result, indent=1).encode())
    else:
        write_figure(args.output, chart(result))
    console.print(plain(f"{'numbers' if args.output.endswith('.json') else 'chart'}: {args.output}"))


def resolve_engine(args: argparse.Namespace, trained: Trained) -> dict:
    """Fills in what a run recorded, and checks what goes together; returns vLLM's arguments."""
    for name in ("rollout_precision", "train_precision"):
        if getattr(args, name) is None:
            setattr(args, name, trained.settings.get(name) or BF16)
    if not 0 < args.vllm_gpu_memory_utilization <= 1:
        share = args.vllm_gpu_memory_utilization
        raise ValueError(f"`--vllm_gpu_memory_utilization`={share:g} is out of range. It must be > 0 and <= 1.")
    if args.train_precision == BITSANDBYTES:
        held = [name for name in train_precisions() if name != BITSANDBYTES]
        raise ValueError(
            f"`--train_precision`={BITSANDBYTES!r} is bitsandbytes', which is not read here yet. Allowed: "
            f"{', '.join(map(repr, [BF16, *held]))}."
        )
    try:
        kwargs = dict(json.loads(args.vllm_engine_kwargs))
    except (ValueError, TypeError) as error:
        raise ValueError(f"`--vllm_engine_kwargs`={args.vllm_engine_kwargs!r} is no JSON object: {error}.") from error
    if args.engine == "vllm":
        if args.rollout_precision not in (allowed := in_vllm()):
            raise ValueError(
                f"`--rollout_precision`={args.rollout_precision!r} does not run in vLLM. Allowed: "
                f"{', '.join(map(repr, allowed))}; or `--engine embedded`."
            )
        check_device(args.rollout_precision)
        check_engine_kwargs(kwargs)
    elif kwargs:
        raise ValueError("`--vllm_engine_kwargs` acts with `--engine vllm` alone. Give both, or leave it out.")
    return kwargs


def _prompts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of as many prompts as there are to be completions."""
    if args.prompts is None:
        found = check_sequences(tokenizer, PROMPT_LENGTH)
    else:
        rows = load_prompts(args.prompts, tokenizer=tokenizer)
        check_prompts("--prompts", rows)
        found = token_ids(rows[: args.num_completions]["prompt"], tokenizer)
    return list(islice(cycle(found), args.num_completions))


def build_engine(
    args: argparse.Namespace,
    trained: Trained,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    kwargs: dict,
    **sampling,
) -> rollout.RolloutEngine:
    """The engine with the policy's weights, as a run with these settings has it; `sampling` adds to TRL's options."""
    train_precision = None if args.train_precision == BF16 else args.train_precision
    mode = MODES[args.engine]
    lora_sync = trained.settings.get("lora_sync") or default_lora_sync(mode, args.rollout_precision, train_precision)
    policy = trained.policy(args.train_precision, DTYPES[args.dtype], lora_sync == "merge")
    mixed = BF16 if args.dtype == "mixed" else "no"
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=mixed)
    options = {"temperature": args.temperature, "max_completion_length": args.max_completion_length} | sampling
    options["trust_remote_code"] = trained.trust
    if args.engine == "vllm":
        options |= {
            "max_model_length": longest + args.max_completion_length + 1,
            "max_num_seqs": args.num_completions,
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        }
    spec = EngineSpec(
        kind=engine_kind(mode, args.rollout_precision, train_precision),
        precision=args.rollout_precision,
        engine_kwargs=kwargs,
        lora_sync=lora_sync if trained.adapter else "merge",
    )
    engine = rollout.build_engine(spec, policy.to(accelerator.device), accelerator, tokenizer, **options)
    engine.sync_weights()
    return engine


def measure(engine: rollout.RolloutEngine, prompts: list[list[int]], temperature: float) -> dict:
    """Has the engine complete the prompts, and compares it with its policy; the result can be written as JSON."""
    comparison, scored = Comparison(engine), []
    _, completions, sampled, _ = engine.generate(prompts, None, 1)
    for prompt, completion, logps in zip(prompts, completions, sampled, strict=True):
        ids = torch.tensor(completion)
        logits = [rows[len(prompt) - 1 : -1].cpu().float() for rows in comparison.add([*prompt, *completion])]
        trainer, whole = (selective_log_softmax(rows, ids, temperature) for rows in logits)
        own = torch.tensor([float("nan") if logp is None else logp for (logp, *_) in logps])
        scored.append((own, whole, trainer))
    own, whole, trainer = zip(*scored, strict=True)
    result = {"sampled": token_metrics(own, trainer), "one_pass": token_metrics(whole, trainer)}
    result |= described(comparison)
    return result | {"summary": [*about_tokens(result), *about_operators(result)]}


def described(comparison: Comparison) -> dict:
    """All numbers of a comparison: its points, the layers that they are in, and what could not be compared."""
    points, layers = list(comparison.points.values()), []
    for layer, group in groupby(points, key=lambda point: point.layer):
        name = ("head" if layers else "embedding") if layer is None else f"layers.{layer}"
        layers.append({"layer": name} | row(list(group), layers[-1]["error"] if layers else 0.0))
    listed = [
        {"name": p.name, "layer": p.layer, "error": p.total.error, "same": p.total.same}
        | {"added": p.added.error, "added_same": p.added.same}
        for p in points
    ]
    return {"points": listed, "missing": comparison.missing, "layers": layers}


def token_metrics(rollout_logps: tuple[Tensor, ...], trainer_logps: tuple[Tensor, ...]) -> dict[str, float]:
    """Diagnostics of tokens of several completions (`corrections.diagnostics`), and how many have the same bits."""
    rollout_logps, old = (pad_sequence(rows, batch_first=True) for rows in (rollout_logps, trainer_logps))
    mask = pad_sequence([torch.ones(len(row)) for row in trainer_logps], batch_first=True)
    inputs = CorrectionInputs(rollout_logps, old, torch.zeros(len(old)), mask)
    same = (rollout_logps == old)[mask.bool()]
    metrics, _ = diagnose(inputs, rollout_ratio(inputs))
    return {"tokens": len(same), "same_tokens": same.double().mean().item()} | metrics


def row(group: list[Point], inherited: float) -> dict:
    """A row of the table; what operators add is summed in squares."""
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
    """What an operator is called in its layer."""
    if re.fullmatch(r"layers\.\d+|.*norm\.input", name):
        return "residual sum"
    *_, parent, leaf = "", *name.split(".")
    return f"{parent}'s input" if leaf == "input" else leaf


def about_tokens(result: dict) -> list[str]:
    """What the numbers of tokens say."""
    lines = []
    for name, how in (("sampled", "as it sampled"), ("one_pass", "in one pass over each sequence")):
        found = result[name]
        lines.append(
            f"The engine {how}: KL {found['mismatch/kl_k3']:.2e} nats a token (k3; k1 {found['mismatch/kl_k1']:.2e}), "
            f"and {found['same_tokens']:.1%} of {found['tokens']} tokens have the trainer's log-probability to the bit."
        )
    return lines


def about_operators(result: dict) -> list[str]:
    """What the numbers of points say."""
    points = result["points"]
    differing = [re.sub(r"\.input$", "'s input", point["name"]) for point in points if point["same"] < 1]
    if not differing:
        lines = ["No operator differs: in one pass all activations have the same bits."]
    elif len(differing) == len(points):
        lines = [f"The first operator differs already, {differing[0]}."]
    else:
        lines = [f"The first operator that differs is {differing[0]}; until then all bits are the same."]
    if total := sum(point["added"] ** 2 for point in points):
        lines.append(_located(result, total))
    if result["missing"]:
        names = ", ".join(dict.fromkeys(_kind(name) for name in result["missing"]))
        lines.append(f"The engine has no module for {names}: what they add counts for the next operator.")
    return lines


def _located(result: dict, total: float) -> str:
    """Where most of what operators add enters; `total` is the sum of its squares."""
    chosen, found = [], 0.0
    for layer in sorted(result["layers"], key=lambda layer: -layer["added"]):
        if found < MOST * total:
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
    """`layers 0-3, 7 and the head`"""
    numbers = sorted(int(name.rpartition(".")[2]) for name in names if name.startswith("layers."))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    layers = [f"layer{'s' * (len(numbers) > 1)} {spans}"] if numbers else []
    return " and ".join(layers + [f"the {name}" for name in names if not name.startswith("layers.")])


def table(result: dict) -> Table:
    """A row for each layer: the error that it inherits, what its operators add, the worst of them, what leaves it."""
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
    """The error along the depth, and the mismatch by position in the completion."""
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
