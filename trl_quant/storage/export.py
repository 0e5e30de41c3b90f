"""Writes a trained policy as one checkpoint to serve (`trl-quant export`).

    trl-quant export --adapter runs/qerl --output policy
    trl-quant export --adapter runs/qerl --model base-nvfp4 --format nvfp4 --output policy-nvfp4
    trl-quant export --model runs/qurl --output policy

Merges an adapter into its base and undoes UAQ, one layer at a time. The result has 16 bits, or is quantized. Four bits
bury a small adapter: the result tells how much of BA is left in Q(W + BA) - Q(W).
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
from ..models.linears import fused_layer
from ..rollout.vllm.support import quantizers_on
from ..scaling import scalings
from ..trainers.checkpoints import last_complete_checkpoint, read_rollout_state
from .adapter import CONFIG, Adapter, load_adapter, read_adapter_config
from .card import describe, write_card
from .files import (
    TOKENIZER,
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
from .layout import (
    check_target,
    dense,
    quantization_config,
    quantized,
    rewrite_checkpoint,
    rounded,
    stored_format,
)
from .progress import progress_bar
from .source import Source, find_source


logger = logging.getLogger(__name__)

BURIED = 0.5  # cosine below which most of what the checkpoint changed is not the adapter


@dataclass(frozen=True)
class ExportOptions:
    """
    What to export.

    Attributes:
        adapter (`str` or `None`): Directory of a run or a checkpoint, with a LoRA adapter or a whole model.
        model (`str` or `None`): Hub id or directory of the base, 16-bit or prepared; `None` for the adapter's.
        output (`str`): Directory to write, which must not exist.
        format (`str`): One of [`~layout.storable`], or `"none"` for 16 bits.
        base_format (`str` or `None`): What a 16-bit base was rounded to when the adapter was trained.
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
    How much of an adapter is left in the checkpoint, over all adapted layers.

    Attributes:
        size (`float`): |BA| / |W|; 0 for an adapter that changes no layer.
        cosine (`float`): Between BA and the checkpoint's change; 1 if all of BA is left, `nan` if nothing changed.
    """

    size: float
    cosine: float

    def __str__(self):
        if self.size == 0:
            return "nothing, since BA is 0 in every layer"
        if math.isnan(self.cosine):
            return f"|BA|/|W| = {self.size:.2e}; rounding left nothing of BA in the checkpoint"
        return f"|BA|/|W| = {self.size:.2e}; cosine of what changed in the checkpoint with BA = {self.cosine:.3f}"


def export(options: ExportOptions) -> list[str]:
    """Exports a policy and returns the lines that say what was done. Warns where its adapter was buried."""
    if options.adapter is None and options.model is None:
        raise ValueError("`--adapter`: give the directory of a run, or a trained model with `--model`.")
    check_target(options.output)
    path, model, revision = _adapter_and_base(options)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = find_source(model, revision, options.trust_remote_code)
    config, heads, skeleton = read_config(source.path), source.heads, source.skeleton()
    ignore, scale, stored = source.ignored(), config.get("uaq_scale"), stored_format(config)
    if path is None and scale is None and stored is None:
        raise ValueError(f"`--model` {model} needs no export: it has neither `uaq_scale` nor quantized weights.")
    if options.base_format is not None and (path is None or stored is not None):
        raise ValueError(
            f"`--base_format` {options.base_format} is for an adapter whose base has 16 bits; leave it out here."
        )
    if options.base_format is None and path is not None and stored is None:
        trained_in = read_rollout_state(path).get("settings", {}).get("train_precision")
        options = replace(options, base_format=trained_in)
    if stored is None and (options.format != "none" or options.base_format is not None):
        source.layers()  # refuses what cannot be quantized
    adapter = None if path is None else load_adapter(path, skeleton)
    if adapter is not None:
        adapter.check(heads, stored is not None)

    on = quantizers_on(device)
    base, fold, store = [], [], []
    if stored is not None:
        base.append(dense(stored, _dtype(config)))
    elif options.base_format is not None:
        base.append(rounded(options.base_format, ignore, **on))
    if scale is not None:
        fold.append(_unscaled(skeleton.config.get_text_config().model_type, _dense_names(heads), scale))
    merge = [] if adapter is None else [adapter.merged]
    if options.format != "none":
        store.append(quantized(options.format, ignore, **on))
    new = {key: value for key, value in config.items() if key not in ("quantization_config", "uaq_scale")}
    if options.format != "none":
        new["quantization_config"] = quantization_config(options.format, ignore)

    target, rows = Path(options.output), _rows(options, source, path, scale, stored)
    settings = {
        "source": fingerprint(source.path, *filter(None, [path])),
        "format": options.format,
        "base_format": options.base_format,
        "code": options.trust_remote_code,
    }
    with unfinished(target, settings) as result:
        with progress_bar("exporting", source.nbytes) as progress:
            steps = _after_one_another([*base, *merge, *fold, *store])
            rewrite_checkpoint(source.path, result, steps, new, device, None, options.trust_remote_code, progress)
        if path is not None:
            for file in path.iterdir():
                if any(fnmatchcase(file.name, pattern) for pattern in TOKENIZER):
                    shutil.copyfile(file, result / file.name)
            numbers = [*base, *fold, *([rounded(options.format, ignore, **on)] if store else [])]
            back = dense(options.format, _dtype(config)) if store else None
            change = measure(adapter, heads, numbers, fold, result, back, device)
            rows.append(("merged", str(change)))
        write_card(result, target.name, source, _summary(options, source, path, scale), rows)
    if path is not None and change.size == 0:
        logger.warning("%s changes no layer: BA is 0 in all of them, as it is before training.", path)
    elif path is not None and not change.cosine >= BURIED:
        logger.warning(
            "Most of what the adapter changed was lost in rounding, or drowned in it (%s). Serve the base "
            "with the adapter beside it (`vllm serve BASE --enable-lora --lora-modules policy=%s`).",
            change,
            path,
        )
    elif path is not None and store and FORMATS[options.format].bits < 8:
        logger.warning("Merging into %s buries a small adapter; see the cosine above.", options.format)
    kind = "16 bits" if options.format == "none" else options.format
    return [*(f"{key}: {value}" for key, value in rows), f"{target}: {kind}"]


def measure(
    adapter: Adapter,
    heads: dict,
    numbers: list[Transform],
    fold: list[Transform],
    result: Path,
    back: Transform | None,
    device: str,
) -> Change:
    """
    Reads an exported checkpoint and compares its change with the adapter.

    Args:
        adapter ([`~storage.adapter.Adapter`]): What was merged.
        heads (`dict[str, Stored]`): The base's tensors.
        numbers (`list[Transform]`): From them to the values of the checkpoint without the adapter: Q(W).
        fold (`list[Transform]`): Those of `numbers` that scale weights, and so the adapter.
        result (`Path`): The exported checkpoint, Q(W + BA).
        back (`Transform` or `None`): From the exported checkpoint's tensors to their values.
        device (`str`): Where to compute.
    """
    written = read_heads(weight_files(result))
    whole = changed = product = ours = 0.0
    for names, after in _units(heads, written):
        layers = [name for name in _dense_names(after) if name in adapter.layers]
        if not layers:
            continue
        before = _after_one_another(numbers)(read_tensors(heads, names, device))
        tensors = read_tensors(written, after, device)
        tensors = tensors if back is None else back(tensors)
        for name in layers:
            delta = _after_one_another(fold)({name: adapter.delta(name).float().to(device)})[name]
            difference = tensors[name].float() - before[name].float()
            whole += before[name].float().square().sum().item()
            ours += delta.square().sum().item()
            changed += difference.square().sum().item()
            product += (difference * delta).sum().item()
    cosine = product / math.sqrt(changed * ours) if changed and ours else math.nan
    return Change(math.sqrt(ours / whole) if whole else math.inf if ours else 0.0, cosine)


def _units(heads: dict, written: dict) -> Iterable[tuple[list[str], list[str]]]:
    """Names of the tensors of each fused layer, in the base and in the result."""
    units: dict[str, tuple[list[str], list[str]]] = {}
    for i, names in enumerate((heads, written)):
        for name in names:
            units.setdefault(fused_layer(name), ([], []))[i].append(name)
    return units.values()


def _after_one_another(transforms: Iterable[Transform]) -> Transform:
    transforms = list(transforms)

    def all_of_them(tensors: Tensors) -> Tensors:
        for transform in transforms:
            tensors = transform(tensors)
        return tensors

    return all_of_them


def _dense_names(names: Iterable[str]) -> list[str]:
    """Names of the tensors once quantized weights are dequantized."""
    return list(dict.fromkeys(name.removesuffix("_packed") for name in names))


def _unscaled(model_type: str, names: list[str], scale: float) -> Transform:
    """Undoes UAQ."""
    undo: dict[str, Callable] = scalings(model_type, names, 1 / scale)
    return lambda tensors: {name: undo[name](tensor) if name in undo else tensor for name, tensor in tensors.items()}


def _dtype(config: dict):
    """The type of a checkpoint's weights before they were quantized."""
    text = config.get("text_config") or config
    name = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return getattr(torch, str(name).removeprefix("torch."))


def _adapter_and_base(options: ExportOptions) -> tuple[Path | None, str, str | None]:
    """The adapter's directory, or `None` without an adapter; then the name and the revision of the base."""
    if options.adapter is None:
        return None, options.model, options.revision
    path = Path(options.adapter)
    if not path.is_dir():
        raise ValueError(f"`--adapter`: {path} is no directory.")
    if not (path / CONFIG).is_file() and not (path / "config.json").is_file():
        path = Path(last_complete_checkpoint(options.adapter) or path)
    if not (path / CONFIG).is_file() and (path / "config.json").is_file():
        if options.model is not None:
            raise ValueError(f"`--model` {options.model}: {path} holds a whole model, which has no other base.")
        return None, str(path), options.revision
    check_links(path)
    config = read_adapter_config(path)
    base = options.model or config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"`--adapter`: {path} does not name its base; give it with `--model`.")
    own = options.model is None and not Path(base).is_dir()
    return path, base, options.revision or (config.get("revision") if own else None)


def _rows(options: ExportOptions, source: Source, path: Path | None, scale: float | None, stored: str | None) -> list:
    """The card's table."""
    rows = [("base" if path is not None else "source", describe(source) + (f", in {stored}" if stored else ""))]
    if path is not None:
        rows.append(("adapter", f"`{path.resolve().name}`"))
    if options.base_format is not None:
        rows.append(("the adapter's base", f"rounded to {options.base_format}, as in training"))
    if scale is not None:
        rows.append(("UAQ", f"scale {scale}, undone"))
    return [*rows, ("format", "16 bits" if options.format == "none" else f"`{options.format}`")]


def _summary(options: ExportOptions, source: Source, path: Path | None, scale: float | None) -> str:
    """The card's first sentence."""
    done = ["a LoRA adapter merged into it"] if path is not None else []
    done += [f"UAQ's scale {scale} undone"] if scale is not None else []
    done += (
        [f"the linear layers of its decoder in {options.format}"]
        if options.format != "none"
        else ["weights in 16 bits"]
    )
    return f"{describe(source)} with {', '.join(done)}; by `trl-quant export`."
