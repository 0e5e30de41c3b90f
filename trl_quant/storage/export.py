"""Writes a trained policy as one checkpoint to serve (`trl-quant export`).

    trl-quant export --adapter runs/qerl --output policy
    trl-quant export --adapter runs/qerl --model base-nvfp4 --format nvfp4 --output policy-nvfp4
    trl-quant export --model runs/qurl --output policy

Merges an adapter into its base and undoes UAQ, one layer at a time. The result has 16 bits or is quantized. Rounding to
four bits can lose a small adapter, so the command reports how much of BA remains in Q(W + BA) - Q(W).
"""

import logging
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ..formats import FORMATS
from ..models.linears import fused_layer, is_mixtures
from ..precisions import frozen_bases
from ..scaling import scalings
from .adapter import CONFIG, Adapter, load_adapter, read_adapter_config
from .card import describe, write_card
from .experts import NamesOnDisk
from .files import (
    TOKENIZER,
    Stored,
    Tensors,
    Transform,
    check_links,
    fingerprint,
    read_config,
    read_heads,
    read_tensors,
    unfinished,
    weight_files,
)
from .identity import POLICY, tell_changed
from .layout import (
    check_target,
    dense,
    quantization_config,
    quantized,
    quantizers_on,
    rewrite_checkpoint,
    rounded,
    rounded_first,
    stored_format,
)
from .progress import progress_bar
from .run_checkpoints import last_complete_checkpoint, read_rollout_state
from .source import Source, find_source


logger = logging.getLogger(__name__)

BURIED = 0.5  # cosine; below it, most of the checkpoint's change is rounding and not the adapter


@dataclass(frozen=True)
class ExportOptions:
    """
    The options of `trl-quant export`.

    Attributes:
        adapter (`str` or `None`): Directory of a run or a checkpoint, with a LoRA adapter or a whole model.
        model (`str` or `None`): Hub id or directory of the base, 16-bit or prepared; `None` for the adapter's.
        output (`str`): Directory to write, which must not exist.
        format (`str`): One of [`~layout.storable`], or `"none"` for 16 bits.
        base_format (`str` or `None`): Format to which training rounded a 16-bit base; `None` for the run's own record.
        revision (`str` or `None`): Branch, tag or commit of the base on the hub.
        trust_remote_code (`bool`): Whether to run the base's own Python, and copy it.
    """

    adapter: str | None
    model: str | None
    output: str
    format: str
    base_format: str | None
    revision: str | None
    trust_remote_code: bool


@dataclass(frozen=True)
class Change:
    """
    How much of an adapter remains in the checkpoint, over all adapted layers.

    Attributes:
        size (`float`): |BA| / |W|; 0 for an adapter that changes no layer.
        cosine (`float`): Cosine of BA with the checkpoint's change; 1 if all of BA remains, `nan` if nothing changed.
    """

    size: float
    cosine: float

    def __str__(self):
        if self.size == 0:
            return "nothing, since BA is 0 in every layer"
        if math.isnan(self.cosine):
            return f"|BA|/|W| = {self.size:.2e}; rounding left nothing of BA in the checkpoint"
        return f"|BA|/|W| = {self.size:.2e}; cosine of what changed in the checkpoint with BA = {self.cosine:.3f}"


@dataclass(frozen=True)
class Policy:
    """
    The policy to export, as it was found on disk.

    Attributes:
        source ([`~storage.source.Source`]): The base, or the whole model if there is no adapter.
        config (`dict`): The source's config.json.
        heads (`dict[str, Stored]`): The source's tensors.
        model_type (`str`): `model_type` of its text model's config.
        ignore (`list[str]`): The source's linear layers that are never quantized.
        stored (`str` or `None`): Format in which the source is quantized; `None` if it has 16 bits.
        uaq_scale (`float` or `None`): UAQ's scale, to be undone.
        adapter_path (`Path` or `None`): The adapter's directory.
        adapter ([`~storage.adapter.Adapter`] or `None`): The adapter.
        dtype (`torch.dtype`):
            Type of the sum of base and adapter before it is quantized: the type in which the run loaded the policy, as
            it has recorded, else 32 bits.
    """

    source: Source
    config: dict
    heads: dict[str, Stored]
    model_type: str
    ignore: list[str]
    stored: str | None
    uaq_scale: float | None
    adapter_path: Path | None
    adapter: Adapter | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Steps:
    """
    The transforms that an export applies to a layer's tensors, in this order, with the adapter's merge after `base`.

    Attributes:
        base (`list[Transform]`): Map the base's tensors to the values on which the adapter was trained.
        unscale (`list[Transform]`): Undo UAQ.
        store (`list[Transform]`): Quantize to the result's format.
    """

    base: list[Transform]
    unscale: list[Transform]
    store: list[Transform]


def export(options: ExportOptions) -> list[str]:
    """Exports a policy and returns lines of text that report it. Warns if rounding lost most of its adapter."""
    if options.adapter is None and options.model is None:
        raise ValueError("`--adapter`: give the directory of a run, or a trained model with `--model`.")
    check_target(options.output)
    options, policy = _find_policy(options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = _steps(options, policy, device)
    merge = [] if policy.adapter is None else [policy.adapter.merged]
    transform = _chained([*steps.base, *merge, *steps.unscale, *steps.store])
    source, path, code = policy.source, policy.adapter_path, options.trust_remote_code
    settings = {
        "source": fingerprint(source.path, *filter(None, [path])),
        "format": options.format,
        "base_format": options.base_format,
        "code": code,
    }
    target, rows, change = Path(options.output), _rows(options, policy), None
    with unfinished(target, settings) as result:
        with progress_bar("exporting", source.nbytes) as progress:
            rewrite_checkpoint(
                source.path, result, transform, _exported_config(options, policy), device, None, code, progress
            )
        if path is not None:
            for file in path.iterdir():
                if any(fnmatchcase(file.name, pattern) for pattern in TOKENIZER):
                    shutil.copyfile(file, result / file.name)
            change = _measure(options, policy, steps, result, device)
            rows.append(("merged", str(change)))
        write_card(result, target.name, source, _summary(options, policy), rows)
    if change is not None:
        _warn_of_losses(options, path, change)
    kind = _bits(policy) if options.format == "none" else options.format
    return [*(f"{key}: {value}" for key, value in rows), f"{target}: {kind}"]


def _find_policy(options: ExportOptions) -> tuple[ExportOptions, Policy]:
    """
    Finds the policy that the options name, and checks that it can be exported as they ask.

    Returns:
        `(ExportOptions, Policy)`: The options, with the run's recorded `base_format` if none is given, and the policy.

    Raises:
        ValueError: There is nothing to export, or the options do not fit the policy.
    """
    path, model, revision = _adapter_and_base(options)
    tell_changed(path or model, but=(POLICY,) if options.adapter is not None and options.model is not None else ())
    source = find_source(model, revision, options.trust_remote_code)
    config, heads, skeleton = read_config(source.path), source.heads, source.skeleton()
    ignore, scale, stored = source.ignored(), config.get("uaq_scale"), stored_format(config)
    if path is None and scale is None and stored is None:
        named = "--model" if options.adapter is None else "--adapter"
        prepare = f" `trl-quant prepare --model {model} --format {options.format}` quantizes it."
        raise ValueError(
            f"`{named}` {model} needs no export: it has neither `uaq_scale` nor quantized weights."
            f"{'' if options.format == 'none' else prepare}"
        )
    if options.base_format is not None and (path is None or stored is not None):
        raise ValueError(
            f"`--base_format` {options.base_format} is for an adapter whose base has 16 bits; leave it out here."
        )
    state = {} if path is None else read_rollout_state(path)
    if options.base_format is None and path is not None and stored is None:
        options = replace(options, base_format=_base_format(state.get("settings", {})))
    if stored is None and (options.format != "none" or options.base_format is not None):
        source.layers(None if options.format == "none" else options.format)  # raises if one cannot be quantized
    adapter = None if path is None else load_adapter(path, skeleton, heads)
    if adapter is not None:
        adapter.check(heads, stored is not None)
    model_type = skeleton.config.get_text_config().model_type
    dtype = getattr(torch, state.get("dtype", "float32"))
    policy = Policy(source, config, heads, model_type, ignore, stored, scale, path, adapter, dtype)
    return options, policy


def _base_format(settings: dict) -> str | None:
    """Returns the format to which a run with these settings rounded its base alone, not its sum with the adapter."""
    precision = settings.get("train_precision")
    return precision if precision in frozen_bases() or settings.get("lora_sync") == "adapter" else None


def _steps(options: ExportOptions, policy: Policy, device: str) -> Steps:
    """Returns the transforms of an export, apart from the adapter's merge."""
    base, unscale, store = [], [], []
    quantizers = quantizers_on(device)
    if policy.stored is not None:
        base.append(dense(policy.stored, _dtype(policy.config)))
    elif options.base_format is not None:
        base.append(rounded(options.base_format, policy.ignore, **quantizers))
    if policy.adapter is not None and options.format != "none":
        base.append(rounded_first(dict, policy.dtype, policy.ignore))  # merging keeps this type
    if policy.uaq_scale is not None:
        unscale.append(_unscaled(policy, _dense_names(policy.heads), policy.uaq_scale))
    if options.format != "none":
        store.append(quantized(options.format, policy.ignore, **quantizers))
    return Steps(base, unscale, store)


def _exported_config(options: ExportOptions, policy: Policy) -> dict:
    """Returns the config.json of the result."""
    config = {key: value for key, value in policy.config.items() if key not in ("quantization_config", "uaq_scale")}
    if options.format != "none":
        config["quantization_config"] = quantization_config(options.format, policy.ignore)
    return config


def _warn_of_losses(options: ExportOptions, path: Path, change: Change) -> None:
    """Warns if the adapter in `path` changes nothing, or if rounding lost it or could have."""
    if change.size == 0:
        logger.warning("%s changes no layer: BA is 0 in all of them, as it is before training.", path)
    elif not change.cosine >= BURIED:
        logger.warning(
            "Rounding erased most of the adapter, or changed weights more than the adapter did (%s). Serve the base "
            "with the adapter beside it (`vllm serve BASE --enable-lora --lora-modules policy=%s`).",
            change,
            path,
        )
    elif options.format != "none" and FORMATS[options.format].bits < 8:
        logger.warning("Merging into %s can erase a small adapter; see the cosine above.", options.format)


def _measure(options: ExportOptions, policy: Policy, steps: Steps, result: Path, device: str) -> Change:
    """
    Reads the exported checkpoint and compares its change with the adapter.

    Without the adapter the checkpoint would hold Q(W): the base after all steps, rounded to the result's format. With
    the adapter it holds Q(W + BA). Their difference is compared with BA, whose UAQ scaling is undone too.

    Args:
        options ([`ExportOptions`]): The options.
        policy ([`Policy`]): The policy that was exported.
        steps ([`Steps`]): The transforms that were applied.
        result (`Path`): The exported checkpoint.
        device (`str`): Where to compute.
    """
    without_adapter, read_back = [*steps.base, *steps.unscale], []
    if options.format != "none":
        without_adapter.append(rounded(options.format, policy.ignore, **quantizers_on(device)))
        read_back.append(dense(options.format, torch.float32))
    adapter, written = policy.adapter, read_heads(weight_files(result))
    weight_squares = change_squares = product = adapter_squares = 0.0
    for names, written_names in _units(policy.heads, written):
        layers = [name for name in _dense_names(written_names) if name in adapter.layers]
        if not layers:
            continue
        before = _chained(without_adapter)(read_tensors(policy.heads, names, device))
        after = _chained(read_back)(read_tensors(written, written_names, device))
        for name in layers:
            delta = _chained(steps.unscale)({name: adapter.delta(name).float().to(device)})[name]
            change = after[name].float() - before[name].float()
            weight_squares += before[name].float().square().sum().item()
            adapter_squares += delta.square().sum().item()
            change_squares += change.square().sum().item()
            product += (change * delta).sum().item()
    size = 0.0
    if adapter_squares:
        size = math.sqrt(adapter_squares / weight_squares) if weight_squares else math.inf
    cosine = math.nan
    if adapter_squares and change_squares:
        cosine = product / math.sqrt(change_squares * adapter_squares)
    return Change(size, cosine)


def _units(heads: dict[str, Stored], written: dict[str, Stored]) -> Iterable[tuple[list[str], list[str]]]:
    """Returns the names of the tensors of each fused layer, in the base and in the result."""
    units: dict[str, tuple[list[str], list[str]]] = {}
    for i, names in enumerate((heads, written)):
        for name in names:
            units.setdefault(fused_layer(name), ([], []))[i].append(name)
    return units.values()


def _chained(transforms: list[Transform]) -> Transform:
    """Returns a transform that applies all of these, one after another."""

    def chained(tensors: Tensors) -> Tensors:
        for transform in transforms:
            tensors = transform(tensors)
        return tensors

    return chained


def _dense_names(names: Iterable[str]) -> list[str]:
    """Returns the names that the tensors have once quantized weights are dequantized."""
    return list(dict.fromkeys(name.removesuffix("_packed") for name in names))


def _unscaled(policy: Policy, names: list[str], scale: float) -> Transform:
    """Returns a transform that undoes UAQ. Routers and experts have names of their own in memory, unlike `names`."""
    skeleton = policy.source.skeleton()
    routed = {name: param for name, param in skeleton.named_parameters() if is_mixtures(name)}
    undo: dict[str, Callable] = scalings(policy.model_type, [*names, *routed], 1 / scale)
    for name in routed.keys() & undo.keys():
        unscale = undo.pop(name)
        undo |= {on_disk: unscale for on_disk, _ in NamesOnDisk(skeleton).stream([(name, routed[name])])}
    return lambda tensors: {name: undo[name](tensor) if name in undo else tensor for name, tensor in tensors.items()}


def _dtype(config: dict) -> torch.dtype:
    """Returns the type that a checkpoint's weights had before they were quantized."""
    text = config.get("text_config") or config
    name = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return getattr(torch, str(name).removeprefix("torch."))


def _adapter_and_base(options: ExportOptions) -> tuple[Path | None, str, str | None]:
    """Returns the adapter's directory, or `None` for a whole model; then the name and the revision of the base."""
    if options.adapter is None:
        return None, options.model, options.revision
    path = Path(options.adapter)
    if not path.is_dir():
        raise ValueError(f"`--adapter`: {path} is not a directory.")
    if not (path / CONFIG).is_file() and not (path / "config.json").is_file():
        path = Path(last_complete_checkpoint(options.adapter) or path)
    if not (path / CONFIG).is_file() and (path / "config.json").is_file():
        if options.model is not None:
            raise ValueError(f"`--model` {options.model}: {path} holds a whole model, which has no base. Leave it out.")
        return None, str(path), options.revision
    check_links(path)
    config = read_adapter_config(path)
    base = options.model or config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"`--adapter`: {path} does not name its base; give it with `--model`.")
    own = options.model is None and not Path(base).is_dir()
    return path, base, options.revision or (config.get("revision") if own else None)


def _bits(policy: Policy) -> str:
    """Returns the size of the result's weights if they are not quantized, `16 bits` or `32 bits`: as in the source."""
    if policy.stored is not None:
        return f"{8 * _dtype(policy.config).itemsize} bits"
    largest = max((stored for stored in policy.heads.values() if stored.floating), key=lambda stored: stored.nbytes)
    return f"{8 * largest.nbytes // math.prod(largest.shape)} bits"


def _rows(options: ExportOptions, policy: Policy) -> list[tuple[str, str]]:
    """Returns the rows of the card's table."""
    role = "source" if policy.adapter_path is None else "base"
    held = f", in {policy.stored}" if policy.stored else ""
    rows = [(role, describe(policy.source) + held)]
    if policy.adapter_path is not None:
        rows.append(("adapter", f"`{policy.adapter_path.resolve().name}`"))
    if options.base_format is not None:
        rows.append(("the adapter's base", f"rounded to {options.base_format}, as in training"))
    if policy.uaq_scale is not None:
        rows.append(("UAQ", f"scale {policy.uaq_scale}, undone"))
    return [*rows, ("format", _bits(policy) if options.format == "none" else f"`{options.format}`")]


def _summary(options: ExportOptions, policy: Policy) -> str:
    """Returns the card's first sentence."""
    done = []
    if policy.adapter_path is not None:
        done.append("a LoRA adapter merged into it")
    if policy.uaq_scale is not None:
        done.append(f"UAQ's scale {policy.uaq_scale} undone")
    if options.format == "none":
        done.append(f"weights in {_bits(policy)}")
    else:
        done.append(f"the linear layers of its decoder in {options.format}")
    return f"{describe(policy.source)} with {', '.join(done)}; by `trl-quant export`."
