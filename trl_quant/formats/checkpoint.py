"""
compressed-tensors' checkpoint layout: which tensors stand for a quantized weight, under which names, and the
`quantization_config` that tells transformers and vLLM so.

| format     | `x.weight` becomes                                                                      |
|------------|-----------------------------------------------------------------------------------------|
| fp8        | `x.weight` E4M3 (out, in), `x.weight_scale` (out, 1)                                    |
| fp8_tensor | `x.weight` E4M3 (out, in), `x.weight_scale` (1,)                                        |
| fp8_block  | `x.weight` E4M3 (out, in), `x.weight_scale` (ceil(out / 128), ceil(in / 128))           |
| int8       | `x.weight` int8 (out, in), `x.weight_scale` (out, 1)                                    |
| int4       | `x.weight_packed` int32 (out, in / 8), `x.weight_scale` (out, in / 128), `x.weight_shape` |
| nvfp4      | `x.weight_packed` uint8 (out, in / 2), `x.weight_scale` E4M3 (out, in / 16), `x.weight_global_scale`
(1,) |
| mxfp4      | `x.weight_packed` uint8 (out, in / 2), `x.weight_scale` uint8 (out, in / 32)            |

Scales without a dtype here have that of the weight. nf4 has no such layout: bitsandbytes quantizes when it loads.

Everything works on a stream of `(name, tensor)`, one tensor at a time, so the same code feeds a running engine and
writes a checkpoint to disk. NVFP4 alone looks ahead: layers that an engine fuses into one share a global scale, so
they are held until the last of them has come.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from . import FORMATS, Format, QuantizedTensor, quantize
from .common import Parts
from .nvfp4 import global_scale


LAYOUT_VERSION = "0.19.0"  # of compressed-tensors, whose names and bytes these are
HEAD = ("lm_head",)
EMBEDDINGS = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)$")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# Layers of one parent module that engines fuse into one
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def storable() -> list[str]:
    """Names of the formats that have a layout in compressed-tensors."""
    return [name for name, format in FORMATS.items() if format.scheme is not None]


def _arguments(given: dict, dynamic: bool = False) -> dict:
    """compressed-tensors' `QuantizationArgs`, every field written out as it does."""
    return {
        "symmetric": True,
        "group_size": None,
        "block_structure": None,
        "dynamic": dynamic,
        "actorder": None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": None if dynamic else "memoryless_minmax",
        "observer_kwargs": {},
        **given,
    }


def quantization_config(format: str, ignore: Iterable[str] = HEAD) -> dict:
    """
    The entry `quantization_config` of config.json.

    Args:
        format (`str`): Format, any but nf4.
        ignore (`Iterable[str]`, *optional*): Linear layers that are not quantized, as in [`is_quantizable`].

    Raises:
        ValueError: The format has no layout in compressed-tensors.
    """
    compressor, weights, inputs = _layout(format).scheme
    group = {
        "targets": ["Linear"],
        "weights": _arguments(weights),
        "input_activations": None if inputs is None else _arguments(inputs, dynamic=True),
        "output_activations": None,
        "format": compressor,
    }
    config = {
        "quant_method": "compressed-tensors",
        "version": LAYOUT_VERSION,
        "format": compressor,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }
    return json.loads(json.dumps(config))  # a copy: nobody's edit reaches the format's scheme


def is_quantizable(name: str, tensor: Tensor, ignore: Iterable[str] = HEAD) -> bool:
    """
    Whether the tensor called `name` is the weight of a linear layer to be quantized: a floating-point matrix
    `*.weight`, not an embedding, and its module not in `ignore`, whose entries are module names, or regular
    expressions after `re:`.
    """
    module, _, kind = name.rpartition(".")
    if kind != "weight" or tensor.ndim != 2 or not tensor.is_floating_point() or EMBEDDINGS.match(module):
        return False
    return not any(re.match(i[3:], module) if i.startswith("re:") else i == module for i in ignore)


def checkpoint_tensors(name: str, q: QuantizedTensor) -> dict[str, Tensor]:
    """
    The tensors that stand for one quantized weight.

    Args:
        name (`str`): Name of the weight, `*.weight`.
        q ([`QuantizedTensor`]): The weight, a matrix.

    Raises:
        ValueError: Not a matrix called `*.weight`, a format without layout, or rows that do not fill the format's
        groups.
    """
    layout = _layout(q.format)
    if not name.endswith(".weight") or len(q.shape) != 2:
        raise ValueError(
            f"name: {name!r} with shape {tuple(q.shape)}; only a matrix called '*.weight' has this layout."
        )
    if q.shape[-1] % layout.group:
        raise ValueError(
            f"{name}: {q.shape[-1]} inputs, but {q.format!r} is stored for multiples of {layout.group} only."
        )
    stored = layout.stored(Parts(q.values, q.scale, q.global_scale), q.shape)
    return {f"{name}{suffix}": tensor for suffix, tensor in stored.items()}


def checkpoint_stream(
    tensors: Iterable[tuple[str, Tensor]],
    format: str,
    ignore: Iterable[str] = HEAD,
    quantizer: Callable[..., QuantizedTensor] = quantize,
    shared_scale: Callable[..., Tensor] = global_scale,
) -> Iterator[tuple[str, Tensor]]:
    """
    Quantizes a stream of `(name, tensor)` in its own order, one weight at a time; what is not quantized passes
    unchanged.

    For nvfp4 the weights of a fused layer are held until all have come (at the latest until the stream ends), so the
    source must not change a tensor after giving it away.

    Args:
        tensors (`Iterable`): Name and tensor, in any order.
        format (`str`): Format, any but nf4.
        ignore (`Iterable[str]`, *optional*): As in [`is_quantizable`].
        quantizer (`Callable`, *optional*): [`quantize`] or a function with its signature.
        shared_scale (`Callable`, *optional*): [`global_scale`] or a function with its signature, for nvfp4.

    Raises:
        ValueError: As [`quantize`] and [`checkpoint_tensors`], with the name of the tensor.
    """
    shares_scale = _layout(format).shares_scale
    ignore = tuple(ignore)
    waiting: dict[tuple[str, tuple[str, ...]], dict[str, Tensor]] = {}

    def emit(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        shared = {"global_scale": shared_scale(*weights.values())} if shares_scale else {}
        for name, weight in weights.items():
            try:
                q = quantizer(weight, format, **shared)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            yield from checkpoint_tensors(name, q).items()

    for name, tensor in tensors:
        if not is_quantizable(name, tensor, ignore):
            yield name, tensor
            continue
        parent, _, layer = name.removesuffix(".weight").rpartition(".")
        fused = next((group for group in FUSED if layer in group), None)
        if not shares_scale or fused is None:
            yield from emit({name: tensor})
            continue
        group = waiting.setdefault((parent, fused), {})
        group[name] = tensor
        if len(group) == len(fused):
            yield from emit(waiting.pop((parent, fused)))
    for group in waiting.values():
        yield from emit(group)


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    format: str,
    ignore: Iterable[str] = HEAD,
    quantizer: Callable[..., QuantizedTensor] = quantize,
    shared_scale: Callable[..., Tensor] = global_scale,
    device: torch.device | str = "cpu",
    max_shard_bytes: int = 4 << 30,
) -> Path:
    """
    Writes a quantized copy of a local safetensors checkpoint, tensor by tensor: memory holds one shard of the
    result and one weight (a fused layer in nvfp4). The target appears whole or not at all.

    Args:
        source (`str` or `Path`): Directory with config.json and safetensors files, one or sharded with their index.
        target (`str` or `Path`): Directory to create; must not exist.
        format (`str`): Format, any but nf4.
        ignore (`Iterable[str]`, *optional*): As in [`is_quantizable`].
        quantizer, shared_scale (`Callable`, *optional*): As in [`checkpoint_stream`].
        device (`torch.device` or `str`, *optional*): Where weights are quantized.
        max_shard_bytes (`int`, *optional*): Size at which a file of the result is closed.

    Returns:
        `Path`: The target.

    Raises:
        ValueError: No such checkpoint, already quantized, target exists, or as [`checkpoint_stream`].
    """
    source, target, ignore = Path(source), Path(target), tuple(ignore)
    _layout(format)
    config, files = _read(source)
    if target.exists():
        raise ValueError(f"target: {target} exists; give a directory that does not.")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        for item in source.iterdir():
            if item.is_file() and not item.name.endswith(WEIGHT_FILES):
                shutil.copyfile(item, work / item.name)
        stream = checkpoint_stream(_tensors(files, device), format, ignore, quantizer, shared_scale)
        _write(stream, work, max_shard_bytes)
        config["quantization_config"] = quantization_config(format, ignore)
        (work / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _layout(format: str) -> type[Format]:
    """The format called so, which must have a layout."""
    if format not in storable():
        known = "has no layout in compressed-tensors" if format in FORMATS else "is not a format"
        raise ValueError(f"format: {format!r} {known}; allowed: {', '.join(storable())}.")
    return FORMATS[format]


def _read(source: Path) -> tuple[dict, list[Path]]:
    """config.json and the safetensors files of a checkpoint that is not quantized."""
    if not (source / "config.json").is_file():
        raise ValueError(f"source: {source} has no config.json; give the directory of a checkpoint.")
    config = json.loads((source / "config.json").read_text())
    if (old := config.get("quantization_config")) is not None:
        raise ValueError(
            f"source: {source} is already quantized ({old.get('quant_method')}); give the 16-bit checkpoint."
        )
    index = source / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    if missing := [n for n in names if not (source / n).is_file()]:
        raise ValueError(f"source: {source} lacks {', '.join(missing)}; only safetensors checkpoints can be quantized.")
    return config, [source / n for n in names]


def _tensors(files: list[Path], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as shard:
            for name in shard.keys():  # noqa: SIM118
                if name.endswith((".weight_packed", ".weight_scale")):
                    raise ValueError(f"source: {file.name} holds {name}, so it is already quantized.")
                yield name, shard.get_tensor(name)


def _write(tensors: Iterable[tuple[str, Tensor]], directory: Path, max_shard_bytes: int) -> None:
    """safetensors files of at most `max_shard_bytes` (or one tensor), with an index if there are several."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def close():
        save_file(shard, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            close()
            size = 0
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    close()

    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{i}.safetensors").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
