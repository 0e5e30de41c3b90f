"""
compressed-tensors' checkpoint layout: the tensors that store a quantized weight, their names, and the
`quantization_config` that describes them to transformers and vLLM.

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

Scales listed without a dtype have the weight's dtype. nf4 has no such layout: bitsandbytes quantizes at load time.

Everything works on a stream of `(name, tensor)`, one tensor at a time, so the same code feeds a running engine and
writes a checkpoint to disk. Only NVFP4 looks ahead: layers that an engine fuses share a global scale, so they are held
until the last one arrives.
"""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from . import FORMATS, Format, QuantizedTensor, quantize
from .common import Parts
from .nvfp4 import global_scale


LAYOUT_VERSION = "0.19.0"  # the compressed-tensors version that defines these names and bytes
HEAD = ("lm_head",)
EMBEDDINGS = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)$")
# Routers and experts of a mixture of experts. A quantized router sends tokens to other experts.
MIXTURE = re.compile(r"(.*\.)?(gate|shared_expert_gate|\w*router(\.\w+)?|experts(\.\w+)+)\.weight$")
# What a copy of a checkpoint takes over beside the weights: no data, no pickles, and code only where it is trusted
FILES = ("*.json", "*.jinja", "*.md", "*.model", "*.tiktoken", "*.txt", "LICENSE", "NOTICE")
INDEX = "model.safetensors.index.json"
CODE = "*.py"
# Layers of one parent module that engines fuse
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def storable() -> list[str]:
    """Names of the formats that have a layout in compressed-tensors."""
    return [name for name, format in FORMATS.items() if format.scheme is not None]


def _arguments(given: dict, dynamic: bool = False) -> dict:
    """compressed-tensors' `QuantizationArgs`; like it, writes out every field."""
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
    The `quantization_config` entry of config.json.

    Args:
        format (`str`): Any format but nf4.
        ignore (`Iterable[str]`, *optional*): Linear layers to leave unquantized, as in [`is_quantizable`].

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
    return json.loads(json.dumps(config))  # a copy, so that edits never reach the format's scheme


def is_quantizable(name: str, tensor: Tensor, ignore: Iterable[str] = HEAD) -> bool:
    """
    Whether the tensor `name` is a linear layer's weight to quantize: a floating-point matrix called `*.weight`, not an
    embedding, with its module not in `ignore`. Entries of `ignore` are module names, or regular expressions after
    `re:`.
    """
    module, _, kind = name.rpartition(".")
    if kind != "weight" or tensor.ndim != 2 or not tensor.is_floating_point() or EMBEDDINGS.match(module):
        return False
    return not any(re.match(i[3:], module) if i.startswith("re:") else i == module for i in ignore)


def checkpoint_tensors(name: str, q: QuantizedTensor) -> dict[str, Tensor]:
    """
    The tensors that store one quantized weight.

    Args:
        name (`str`): Name of the weight, `*.weight`.
        q ([`QuantizedTensor`]): The quantized weight, a matrix.

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
    Quantizes a stream of `(name, tensor)` in its own order, one weight at a time; other tensors pass through
    unchanged.

    For nvfp4, the weights of a fused layer are held until all have arrived or the stream ends, so the source must not
    modify a tensor after yielding it.

    Args:
        tensors (`Iterable`): Names and tensors, in any order.
        format (`str`): Any format but nf4.
        ignore (`Iterable[str]`, *optional*): As in [`is_quantizable`].
        quantizer (`Callable`, *optional*): [`quantize`] or a function with its signature.
        shared_scale (`Callable`, *optional*): [`global_scale`] or a function with its signature, for nvfp4.

    Raises:
        ValueError: Same as [`quantize`] and [`checkpoint_tensors`], with the tensor's name; for a mixture of experts.
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
        _refuse_mixture(name)
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
    with_code: bool = False,
) -> Path:
    """
    Writes a quantized copy of a local safetensors checkpoint, tensor by tensor: memory holds one shard of the
    result and one weight (for nvfp4, one fused layer). The target appears whole or not at all.

    Args:
        source (`str` or `Path`): Directory with config.json and safetensors, one file or shards with an index.
        target (`str` or `Path`): Directory to create; must not exist.
        format (`str`): Any format but nf4.
        ignore (`Iterable[str]`, *optional*): As in [`is_quantizable`].
        quantizer, shared_scale (`Callable`, *optional*): As in [`checkpoint_stream`].
        device (`torch.device` or `str`, *optional*): Where to quantize.
        max_shard_bytes (`int`, *optional*): Maximum size of a weight file, unless one tensor is larger.
        with_code (`bool`, *optional*): Whether to copy the checkpoint's Python files.

    Returns:
        `Path`: The target.

    Raises:
        ValueError: `target` exists, or as in [`linear_layers`] and [`checkpoint_stream`].
    """
    source, target, ignore = Path(source), Path(target), tuple(ignore)
    _layout(format)
    check_target(target)
    config, files = _read(source)
    linear_layers(source, ignore)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    work.mkdir()
    try:
        patterns = (*FILES, CODE) if with_code else FILES
        for item in source.iterdir():
            named = any(fnmatchcase(item.name, pattern) for pattern in patterns)
            if named and item.is_file() and not item.name.endswith(".index.json"):
                shutil.copyfile(item, work / item.name)
        stream = checkpoint_stream(_tensors(files, device), format, ignore, quantizer, shared_scale)
        _write(stream, work, max_shard_bytes)
        config["quantization_config"] = quantization_config(format, ignore)
        (work / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def check_target(target: str | Path) -> None:
    """Raises `ValueError` for a target that exists."""
    if Path(target).exists():
        raise ValueError(f"target: {target} exists; give a directory that does not.")


def linear_layers(source: str | Path, ignore: Iterable[str] = HEAD) -> tuple[list[str], list[str]]:
    """
    Names of the linear layers of a checkpoint: those that [`quantize_checkpoint`] quantizes, and those in `ignore`.
    Reads no more than the heads of the files, which tell whether a file is whole.

    Raises:
        ValueError: No such checkpoint, already quantized, a file that is not whole, a mixture of experts, or nothing to
        quantize.
    """
    source, ignore = Path(source), tuple(ignore)
    quantized, left = [], []
    for file in _read(source)[1]:
        for name, like in _head(file):
            if name.endswith((".weight_packed", ".weight_scale")):
                raise ValueError(f"source: {file.name} holds {name}, so it is already quantized.")
            if is_quantizable(name, like, ignore):
                _refuse_mixture(name)
                quantized.append(name.removesuffix(".weight"))
            elif is_quantizable(name, like, ()):
                left.append(name.removesuffix(".weight"))
    if not quantized:
        raise ValueError(f"source: {source} has no linear layers to quantize (left as they are: {left or 'none'}).")
    return quantized, left


def check_files(source: str | Path) -> None:
    """Raises `ValueError` for a safetensors file of a checkpoint, quantized or not, that is not whole."""
    for file in _files(Path(source)):
        if file.is_file():
            _head(file)


def _refuse_mixture(name: str) -> None:
    if MIXTURE.match(name):
        raise ValueError(f"{name}: a router or an expert; mixture-of-experts models cannot be quantized yet.")


def _layout(format: str) -> type[Format]:
    """The format called `format`; `ValueError` if it has no layout."""
    if format not in storable():
        known = "has no layout in compressed-tensors" if format in FORMATS else "is not a format"
        raise ValueError(f"format: {format!r} {known}; allowed: {', '.join(storable())}.")
    return FORMATS[format]


def _read(source: Path) -> tuple[dict, list[Path]]:
    """config.json and the safetensors files of an unquantized checkpoint."""
    if not (source / "config.json").is_file():
        raise ValueError(f"source: {source} has no config.json; give the directory of a checkpoint.")
    config = json.loads((source / "config.json").read_text())
    if (old := config.get("quantization_config")) is not None:
        raise ValueError(
            f"source: {source} is already quantized ({old.get('quant_method')}); give the 16-bit checkpoint."
        )
    files = _files(source)
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"source: {source} lacks {', '.join(missing)}; only safetensors checkpoints can be quantized.")
    return config, files


def _files(source: Path) -> list[Path]:
    """The safetensors files that a checkpoint should have."""
    if not (source / INDEX).is_file():
        return [source / "model.safetensors"]
    return [source / name for name in sorted(set(json.loads((source / INDEX).read_text())["weight_map"].values()))]


def _head(file: Path) -> list[tuple[str, Tensor]]:
    """Name and, without memory, shape and type of each tensor in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
            return [(name, _like(piece.get_shape(), piece.get_dtype())) for name, piece in slices.items()]
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete: {error}. Download or save it again.") from error


def _like(shape: list[int], dtype: str) -> Tensor:
    """A tensor without memory; floating-point if safetensors' name of its type (BF16, F8_E4M3, I32) is."""
    return torch.empty(shape, dtype=torch.float if dtype.startswith(("F", "BF")) else torch.int, device="meta")


def _tensors(files: list[Path], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as shard:
            for name in shard.keys():  # noqa: SIM118
                yield name, shard.get_tensor(name)


def _write(tensors: Iterable[tuple[str, Tensor]], directory: Path, max_shard_bytes: int) -> None:
    """Writes safetensors files of at most `max_shard_bytes` (or one tensor), with an index if there are several."""
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
