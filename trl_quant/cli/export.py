"""`trl-quant export`: a trained policy as one checkpoint to serve.

    trl-quant export --adapter runs/qerl --output policy
    trl-quant export --adapter runs/qerl --model base-nvfp4 --format nvfp4 --output policy-nvfp4
    trl-quant export --model runs/qurl --output policy

An adapter is merged into its base, and UAQ is undone, one layer at a time. The result has 16 bits, or is quantized.
Four bits bury a small adapter: Q(W + BA) - Q(W) is compared with BA, and the result printed.
"""

import argparse
import logging
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ..formats import FORMATS
from ..models.linears import fused_layer
from ..storage.files import (
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
from ..storage.layout import (
    check_target,
    dense,
    quantization_config,
    quantized,
    rewrite_checkpoint,
    rounded,
    storable,
    stored_format,
)


logger = logging.getLogger(__name__)

BURIED = 0.5  # cosine below which most of what the checkpoint changed is not the adapter


@dataclass(frozen=True)
class Change:
    """
    How much of an adapter arrived, over all adapted layers.

    Attributes:
        size (`float`): |BA| / |W|; 0 for an adapter that changes no layer.
        cosine (`float`): Between BA and what the checkpoint changed; 1 if it arrived whole, `nan` if nothing changed.
    """

    size: float
    cosine: float

    def __str__(self):
        if self.size == 0:
            return "nothing, since BA is 0 in every layer"
        if math.isnan(self.cosine):
            return f"|BA|/|W| = {self.size:.2e}; rounding left nothing of BA in the checkpoint"
        return f"|BA|/|W| = {self.size:.2e}; cosine of what changed in the checkpoint with BA = {self.cosine:.3f}"


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        prog="trl-quant export",
        usage="%(prog)s --adapter RUN --output DIR [options]",
        description=__doc__.partition("\n")[0],
    )
    options.add_argument("--adapter", help="directory of a run or a checkpoint, with a LoRA adapter or a whole model")
    options.add_argument("--model", help="hub id or directory of the base, 16-bit or prepared (default: the adapter's)")
    options.add_argument("--output", required=True, help="directory to write, which must not exist")
    options.add_argument(
        "--format", default="none", choices=["none", *storable()], help="to quantize to (default: none, 16 bits)"
    )
    options.add_argument(
        "--base_format",
        choices=list(FORMATS),
        help="what a 16-bit base was rounded to when the adapter was trained, its `train_precision`",
    )
    options.add_argument("--revision", help="branch, tag or commit of the base on the hub")
    options.add_argument("--trust_remote_code", action="store_true", help="run the base's own Python, and copy it")
    return options


def main(argv: list[str] | None = None) -> None:
    """Exports the policy named on the command line."""
    args = parser().parse_args(argv)
    if args.adapter is None and args.model is None:
        raise ValueError("`--adapter`: give the directory of a run, or a trained model with `--model`.")
    check_target(args.output)
    path, model, revision = _adapter_and_base(args)

    import torch

    from ..rollout.vllm.support import quantizers_on
    from ..storage.adapter import load_adapter
    from ..storage.card import write_card
    from ..storage.source import find_source
    from ..trainers.checkpoints import read_rollout_state
    from . import progress_bar

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = find_source(model, revision, args.trust_remote_code)
    config, heads, skeleton = read_config(source.path), source.heads, source.skeleton()
    ignore, scale, stored = source.ignored(), config.get("uaq_scale"), stored_format(config)
    if path is None and scale is None and stored is None:
        raise ValueError(f"`--model` {model} needs no export: it has neither `uaq_scale` nor quantized weights.")
    if args.base_format is not None and (path is None or stored is not None):
        raise ValueError(
            f"`--base_format` {args.base_format} is for an adapter whose base has 16 bits; leave it out here."
        )
    if args.base_format is None and path is not None and stored is None:
        args.base_format = read_rollout_state(path).get("settings", {}).get("train_precision")
    if stored is None and (args.format != "none" or args.base_format is not None):
        source.layers()  # refuses what cannot be quantized
    adapter = None if path is None else load_adapter(path, skeleton)
    if adapter is not None:
        adapter.check(heads, stored is not None)

    on = quantizers_on(device)
    base, fold, store = [], [], []
    if stored is not None:
        base.append(dense(stored, _dtype(config)))
    elif args.base_format is not None:
        base.append(rounded(args.base_format, ignore, **on))
    if scale is not None:
        fold.append(_unscaled(skeleton.config.get_text_config().model_type, _dense_names(heads), scale))
    merge = [] if adapter is None else [adapter.merged]
    if args.format != "none":
        store.append(quantized(args.format, ignore, **on))
    new = {key: value for key, value in config.items() if key not in ("quantization_config", "uaq_scale")}
    if args.format != "none":
        new["quantization_config"] = quantization_config(args.format, ignore)

    target, rows = Path(args.output), _rows(args, source, path, scale, stored)
    settings = {
        "source": fingerprint(source.path, *filter(None, [path])),
        "format": args.format,
        "base_format": args.base_format,
        "code": args.trust_remote_code,
    }
    with unfinished(target, settings) as result:
        with progress_bar("exporting", source.nbytes) as progress:
            steps = _after_one_another([*base, *merge, *fold, *store])
            rewrite_checkpoint(source.path, result, steps, new, device, None, args.trust_remote_code, progress)
        if path is not None:
            for file in path.iterdir():
                if any(fnmatchcase(file.name, pattern) for pattern in TOKENIZER):
                    shutil.copyfile(file, result / file.name)
            numbers = [*base, *fold, *([rounded(args.format, ignore, **on)] if store else [])]
            back = dense(args.format, _dtype(config)) if store else None
            change = measure(adapter, heads, numbers, fold, result, back, device)
            rows.append(("merged", str(change)))
        write_card(result, target.name, source, _summary(args, source, path, scale), rows)
    for key, value in rows:
        print(f"{key}: {value}")
    print(f"{target}: {'16 bits' if args.format == 'none' else args.format}")
    if path is not None and change.size == 0:
        logger.warning("%s changes no layer: BA is 0 in all of them, as it is before training.", path)
    elif path is not None and not change.cosine >= BURIED:
        logger.warning(
            "Most of what the adapter changed was lost in rounding, or drowned in it (%s). Serve the base "
            "with the adapter beside it (`vllm serve BASE --enable-lora --lora-modules policy=%s`).",
            change,
            path,
        )
    elif path is not None and store and FORMATS[args.format].bits < 8:
        logger.warning("Merging into %s buries a small adapter; see the cosine above.", args.format)


def measure(
    adapter,
    heads: dict,
    numbers: list[Transform],
    fold: list[Transform],
    result: Path,
    back: Transform | None,
    device: str,
) -> Change:
    """
    Reads an exported checkpoint again and compares what changed with the adapter.

    Args:
        adapter ([`~storage.adapter.Adapter`]): What was merged.
        heads (`dict[str, Stored]`): The base's tensors.
        numbers (`list[Transform]`): From them to the numbers of the checkpoint that has no adapter: Q(W).
        fold (`list[Transform]`): Of these, the ones that scale weights, and so the adapter.
        result (`Path`): The exported checkpoint, Q(W + BA).
        back (`Transform` or `None`): From its tensors to its numbers.
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
    from ..scaling import scalings

    undo: dict[str, Callable] = scalings(model_type, names, 1 / scale)
    return lambda tensors: {name: undo[name](tensor) if name in undo else tensor for name, tensor in tensors.items()}


def _dtype(config: dict):
    """The type of a checkpoint's weights before they were quantized."""
    import torch

    text = config.get("text_config") or config
    name = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return getattr(torch, str(name).removeprefix("torch."))


def _adapter_and_base(args: argparse.Namespace) -> tuple[Path | None, str, str | None]:
    """The adapter's directory, if there is one; name and revision of the base."""
    from ..storage.adapter import CONFIG, read_adapter_config
    from ..trainers.checkpoints import last_complete_checkpoint

    if args.adapter is None:
        return None, args.model, args.revision
    path = Path(args.adapter)
    if not path.is_dir():
        raise ValueError(f"`--adapter`: {path} is no directory.")
    if not (path / CONFIG).is_file() and not (path / "config.json").is_file():
        path = Path(last_complete_checkpoint(args.adapter) or path)
    if not (path / CONFIG).is_file() and (path / "config.json").is_file():
        if args.model is not None:
            raise ValueError(f"`--model` {args.model}: {path} holds a whole model, which has no other base.")
        return None, str(path), args.revision
    check_links(path)
    config = read_adapter_config(path)
    base = args.model or config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"`--adapter`: {path} does not name its base; give it with `--model`.")
    own = args.model is None and not Path(base).is_dir()
    return path, base, args.revision or (config.get("revision") if own else None)


def _rows(args: argparse.Namespace, source, path: Path | None, scale: float | None, stored: str | None) -> list:
    """The card's table."""
    from ..storage.card import describe

    rows = [("base" if path is not None else "source", describe(source) + (f", in {stored}" if stored else ""))]
    if path is not None:
        rows.append(("adapter", f"`{path.resolve().name}`"))
    if args.base_format is not None:
        rows.append(("the adapter's base", f"rounded to {args.base_format}, as in training"))
    if scale is not None:
        rows.append(("UAQ", f"scale {scale}, undone"))
    return [*rows, ("format", "16 bits" if args.format == "none" else f"`{args.format}`")]


def _summary(args: argparse.Namespace, source, path: Path | None, scale: float | None) -> str:
    """The card's first sentence."""
    from ..storage.card import describe

    done = ["a LoRA adapter merged into it"] if path is not None else []
    done += [f"UAQ's scale {scale} undone"] if scale is not None else []
    done += [f"the linear layers of its decoder in {args.format}"] if args.format != "none" else ["weights in 16 bits"]
    return f"{describe(source)} with {', '.join(done)}; by `trl-quant export`."
