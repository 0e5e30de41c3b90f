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
| nvfp4      | `x.weight_packed` uint8 (out, in / 2), `x.weight_scale` E4M3 (out, in / 16),            |
|            | `x.weight_global_scale` (1,)                                                            |
| mxfp4      | `x.weight_packed` uint8 (out, in / 2), `x.weight_scale` uint8 (out, in / 32)            |

Scales listed without a dtype have the weight's dtype. nf4 has no such layout: bitsandbytes quantizes at load time.
Experts are stored like linear layers, each under its name on disk; [`check_stored`] says in which formats.

[`checkpoint_stream`] feeds a running engine one tensor at a time. NVFP4 is the exception: layers that an engine fuses
share a global scale, so the stream holds them back until the last one arrives. [`rewrite_checkpoint`] changes a
checkpoint on disk. It reads layers that an engine fuses as one unit, and maps their tensors to those of the copy with
[`quantized`], [`dense`] or [`rounded`].
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..formats import FORMATS, Format, QuantizedTensor, quantize
from ..formats.common import Parts
from ..formats.nvfp4 import global_scale
from ..models.families import EXPERT, EXPERT_PARTS, HEAD, families_with, number_of_experts
from ..models.linears import (
    FusedGroups,
    fused_layer,
    fused_with,
    holds_experts,
    is_mixtures,
    is_quantizable,
    keeps_type,
)
from .files import (
    CODE,
    FILES,
    INDEX,
    Tensors,
    Transform,
    check_files,
    check_target,
    copy_files,
    fingerprint,
    read_config,
    read_heads,
    rewrite_weights,
    unfinished,
    weight_files,
)


__all__ = [
    "CODE",
    "FILES",
    "INDEX",
    "LAYOUT_VERSION",
    "check_files",
    "check_groups",
    "check_stored",
    "check_target",
    "checkpoint_stream",
    "checkpoint_tensors",
    "dense",
    "linear_layers",
    "quantization_config",
    "quantize_checkpoint",
    "quantized",
    "read_quantized",
    "rewrite_checkpoint",
    "rounded",
    "rounded_first",
    "storable",
    "stored_format",
]


LAYOUT_VERSION = "0.19.0"  # the compressed-tensors version that defines these names and bytes
SUFFIXES = ("", "_packed", "_scale", "_global_scale", "_shape")  # suffixes of a quantized weight's name


def storable() -> list[str]:
    """Returns the names of the formats that have a layout in compressed-tensors."""
    return [name for name, format in FORMATS.items() if format.scheme is not None]


def _arguments(given: dict, dynamic: bool = False) -> dict:
    """Returns compressed-tensors' `QuantizationArgs` with every field written out, as that library writes them."""
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
    Returns the `quantization_config` entry of config.json.

    Args:
        format (`str`): Any format except nf4.
        ignore (`Iterable[str]`, *optional*): Linear layers that stay unquantized, as in [`is_quantizable`].

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
    return json.loads(json.dumps(config))  # a copy, so that edits do not reach the format's scheme


def check_groups(name: str, inputs: int, format: str) -> None:
    """Raises `ValueError` if the weight `name`, with so many inputs, does not fill the groups that `format` stores."""
    group = _layout(format).group
    if inputs % group:
        raise ValueError(f"{name}: {inputs} inputs, but {format!r} is stored for multiples of {group} only.")


def check_stored(name: str, shape: tuple[int, ...], format: str) -> None:
    """
    Raises `ValueError` if the weight `name` of `shape` (out, in), or (experts, out, in), cannot be stored in `format`,
    or if it is an expert's and no loader multiplies with it as the format says.
    """
    check_groups(name, shape[-1], format)
    if EXPERT.fullmatch(name) is None:
        return
    layout = _layout(format)
    if layout.activations == "tensor":
        others = [other for other in storable() if FORMATS[other].activations != "tensor"]
        raise ValueError(
            f"{name}: {format!r} stores no experts, because vLLM has no kernel that multiplies them with inputs of one "
            f"scale. Allowed: {', '.join(others)}."
        )
    block = layout.scheme.weights.get("block_structure", (1,))[0]
    joined = EXPERT_PARTS.get(name.rpartition(".")[2], 1)  # parts of an expert in one matrix, in memory
    rows = shape[-2] // joined
    if rows % block and (joined > 1 or len(fused_with(name.removesuffix(".weight"))) > 1):
        raise ValueError(
            f"{name}: an expert's gate and up of {rows} rows each are one matrix in an engine, and {format!r} "
            f"stores that in blocks of {block} rows, one of which would have rows of both."
        )


def checkpoint_tensors(name: str, q: QuantizedTensor) -> dict[str, Tensor]:
    """
    Returns the tensors that store one quantized weight, by name.

    Args:
        name (`str`): Name of the weight: `*.weight`, or the policy's name of a layer's experts.
        q ([`QuantizedTensor`]): The quantized weight: a matrix, or the experts (experts, out, in).

    Raises:
        ValueError: The weight is neither a matrix called `*.weight` nor a layer's experts, its rows do not fill the
        format's groups, or the format has no layout.
    """
    layout = _layout(q.format)
    is_matrix = name.endswith(".weight") and len(q.shape) == 2
    if not is_matrix and not (len(q.shape) == 3 and name.rpartition(".")[2] in EXPERT_PARTS):
        raise ValueError(
            f"name: {name!r} with shape {tuple(q.shape)}; only a matrix called '*.weight' has this layout."
        )
    check_stored(name, q.shape, q.format)
    stored = layout.stored(Parts(q.values, q.scale, q.global_scale), q.shape)
    return {f"{name}{suffix}": tensor for suffix, tensor in stored.items()}


def checkpoint_stream(
    tensors: Iterable[tuple[str, Tensor]],
    format: str,
    ignore: Iterable[str] = HEAD,
    quantizer: Callable[..., QuantizedTensor] = quantize,
    shared_scale: Callable[..., Tensor] = global_scale,
    siblings: Callable[[str], tuple[str, ...]] = fused_with,
) -> Iterator[tuple[str, Tensor]]:
    """
    Quantizes the weights of linear layers in a stream of `(name, tensor)`, one at a time and in the stream's order.
    Other tensors pass through unchanged. Tensors (experts, out, in) are quantized whole, and each matrix gets the codes
    and scales that it would get alone: an expert's gate and up, one below the other, share nvfp4's global scale.

    With nvfp4, weights that an engine fuses are held back until all of them have arrived or the stream ends, so the
    source must not modify a tensor after yielding it.

    Args:
        tensors (`Iterable`): Names and tensors, in any order.
        format (`str`): Any format except nf4.
        ignore (`Iterable[str]`, *optional*): As in [`is_quantizable`].
        quantizer (`Callable`, *optional*): [`quantize`] or a function with its signature.
        shared_scale (`Callable`, *optional*): [`global_scale`] or a function with its signature, for nvfp4.
        siblings (`Callable`, *optional*): As in [`FusedGroups`].

    Raises:
        ValueError: As in [`quantize`] and [`checkpoint_tensors`], with the tensor's name.
    """
    shares_scale = _layout(format).shares_scale
    ignore, groups = tuple(ignore), FusedGroups(siblings)

    def stored(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        shared = {"global_scale": shared_scale(*weights.values())} if shares_scale and weights else {}
        for layer, weight in weights.items():
            name = layer if weight.ndim == 3 else f"{layer}.weight"
            try:
                q = quantizer(weight, format, **shared)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            yield from checkpoint_tensors(name, q).items()

    for name, tensor in tensors:
        if holds_experts(name, tensor):
            yield from stored({name: tensor})
        elif is_quantizable(name, tensor, ignore):
            layer = name.removesuffix(".weight")
            yield from stored(groups.add(layer, tensor) if shares_scale else {layer: tensor})
        else:
            yield name, tensor
    for group in groups.rest():
        yield from stored(group)


def quantized(format: str, ignore: Iterable[str] = HEAD, **quantizers: Callable) -> Transform:
    """Returns a function that quantizes a fused layer's tensors; arguments as in [`checkpoint_stream`]."""
    ignore = tuple(ignore)
    return lambda tensors: dict(checkpoint_stream(tensors.items(), format, ignore, **quantizers))


def rounded_first(transform: Transform, dtype: torch.dtype, ignore: Iterable[str] = HEAD) -> Transform:
    """Returns a function that rounds the weights of linear layers, except `ignore`, to `dtype` before `transform`."""
    ignore = tuple(ignore)

    def of_rounded(tensors: Tensors) -> Tensors:
        return transform({n: t.to(dtype) if is_quantizable(n, t, ignore) else t for n, t in tensors.items()})

    return of_rounded


def rounded(
    format: str,
    ignore: Iterable[str] = HEAD,
    quantizer: Callable[..., QuantizedTensor] = quantize,
    shared_scale: Callable[..., Tensor] = global_scale,
) -> Transform:
    """Returns a function that rounds a fused layer's weights to `format`, which may be nf4, and dequantizes them."""
    ignore = tuple(ignore)

    def transform(tensors: Tensors) -> Tensors:
        weights = {name: tensor for name, tensor in tensors.items() if is_quantizable(name, tensor, ignore)}
        shared = {}
        if weights and FORMATS[format].shares_scale:
            shared = {"global_scale": shared_scale(*weights.values())}
        return tensors | {name: quantizer(w, format, **shared).dequantize() for name, w in weights.items()}

    return transform


def dense(format: str, dtype: torch.dtype) -> Transform:
    """Returns a function that dequantizes a fused layer's weights, stored in `format`, to `dtype`."""

    def transform(tensors: Tensors) -> Tensors:
        weights = {f"{n}.weight": q.dequantize(dtype) for n, q in read_quantized(tensors, format, dtype).items()}
        stored = tuple(f"{name}{suffix}" for name in weights for suffix in SUFFIXES)
        return {name: tensor for name, tensor in tensors.items() if name not in stored} | weights

    return transform


def read_quantized(tensors: Tensors, format: str, dtype: torch.dtype) -> dict[str, QuantizedTensor]:
    """
    Reads the quantized weights among the tensors of a checkpoint: the inverse of [`checkpoint_tensors`].

    Args:
        tensors (`dict[str, torch.Tensor]`): Tensors by name. A layer's tensors come together.
        format (`str`): The checkpoint's format, from [`stored_format`].
        dtype (`torch.dtype`): The type of the weights before they were quantized, which not every layout stores.

    Returns:
        `dict[str, QuantizedTensor]`: name of the layer -> its weight.
    """
    _layout(format)
    found = {}
    for name, scale in tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        weight = name.removesuffix("_scale")
        parts = {suffix: tensors.get(f"{weight}{suffix}") for suffix in SUFFIXES}
        packed = parts["_packed"]
        values = parts[""] if packed is None else packed.view(torch.uint8)
        shape = (len(values), values.shape[1] * (1 if packed is None else 2))
        if parts["_shape"] is not None:
            shape = parts["_shape"].tolist()
        q = QuantizedTensor(format, values, scale, torch.Size(shape), dtype, parts["_global_scale"])
        found[weight.removesuffix(".weight")] = q
    return found


def stored_format(config: dict) -> str | None:
    """
    Returns the format of the checkpoint that a config.json describes; `None` if the checkpoint is not quantized.

    Raises:
        ValueError: The checkpoint is quantized in a way that [`quantize_checkpoint`] does not write.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    groups = list((found.get("config_groups") or {}).values())
    for name in storable():
        (expected,) = quantization_config(name)["config_groups"].values()
        keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "actorder")
        if groups and all(
            group.get("format") == expected["format"]
            and (group.get("input_activations") is None) == (expected["input_activations"] is None)
            and all((group.get("weights") or {}).get(key) == expected["weights"][key] for key in keys)
            for group in groups
        ):
            return name
    raise ValueError(
        f"source: `trl-quant prepare` does not write its quantization_config ({found.get('quant_method')}, "
        f"{found.get('format')}); allowed: {', '.join(storable())}."
    )


def misread_experts(config: dict) -> str | None:
    """
    Returns the format of the mixture of experts that a config.json describes, if transformers reads the experts without
    their global scales and computes with wrong ones; else `None`.
    """
    if number_of_experts(config) < 2:
        return None
    try:
        found = stored_format(config)
    except ValueError:  # written by another tool
        return None
    return found if found is not None and FORMATS[found].shares_scale else None


def rewrite_checkpoint(
    source: str | Path,
    result: Path,
    transform: Transform,
    config: dict,
    device: torch.device | str = "cpu",
    max_shard_bytes: int | None = None,
    with_code: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """
    Writes a changed copy of a checkpoint, one fused layer at a time. Needs memory for one file of the result. Files
    that an earlier call finished are kept (see [`~files.unfinished`]).

    Args:
        source (`str` or `Path`): Directory with config.json and safetensors, one file or shards with an index.
        result (`Path`): Directory to write in.
        transform (`Callable`): [`quantized`], [`dense`], [`rounded`], or a chain of them.
        config (`dict`): The copy's config.json.
        device (`torch.device` or `str`, *optional*): Where to compute.
        max_shard_bytes (`int`, *optional*):
            Largest size of a weight file, counted in 16 bits. A single layer may exceed it.
        with_code (`bool`, *optional*): Whether to copy the checkpoint's Python files.
        progress (`Callable`, *optional*): Called with the bytes of each finished layer.
    """
    copy_files(Path(source), result, with_code)
    heads = read_heads(weight_files(Path(source)))
    rewrite_weights(heads, result, transform, fused_layer, device, max_shard_bytes, progress)
    (result / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    format: str,
    ignore: Iterable[str] = HEAD,
    quantizer: Callable[..., QuantizedTensor] = quantize,
    shared_scale: Callable[..., Tensor] = global_scale,
    device: torch.device | str = "cpu",
    max_shard_bytes: int | None = None,
    with_code: bool = False,
) -> Path:
    """
    Writes a quantized copy of a local safetensors checkpoint. The target appears complete or not at all. A call with
    the same source and arguments reuses the files that a killed call had finished.

    Args:
        source (`str` or `Path`): Directory with config.json and safetensors, one file or shards with an index.
        target (`str` or `Path`): Directory to create, which must not exist.
        format (`str`): Any format except nf4.
        ignore (`Iterable[str]`, *optional*): As in [`is_quantizable`].
        quantizer, shared_scale (`Callable`, *optional*): As in [`checkpoint_stream`].
        device (`torch.device` or `str`, *optional*): Where to quantize.
        max_shard_bytes, with_code (*optional*): As in [`rewrite_checkpoint`].

    Returns:
        `Path`: The target.

    Raises:
        ValueError: `target` exists, or as in [`linear_layers`], [`checkpoint_stream`] and [`~files.unfinished`].
    """
    ignore = tuple(ignore)
    scheme = quantization_config(format, ignore)
    check_target(target)
    linear_layers(source, ignore, format)
    config = read_config(Path(source)) | {"quantization_config": scheme}
    settings = {"source": fingerprint(source), "scheme": scheme, "max_shard_bytes": max_shard_bytes, "code": with_code}
    transform = quantized(format, ignore, quantizer=quantizer, shared_scale=shared_scale)
    with unfinished(target, settings) as result:
        rewrite_checkpoint(source, result, transform, config, device, max_shard_bytes, with_code)
    return Path(target)


def linear_layers(
    source: str | Path, ignore: Iterable[str] = HEAD, format: str | None = None
) -> tuple[list[str], list[str]]:
    """
    Returns the names of a checkpoint's linear layers: those that [`quantize_checkpoint`] quantizes, and those in
    `ignore`, routers and gates. Reads only the headers of the files, which show whether a file is complete.

    Raises:
        ValueError: There is no such checkpoint, it is quantized already, a file is incomplete, it is a mixture of
        experts of an unknown family or layout, it has nothing to quantize, or as in [`check_stored`] for `format`.
    """
    source, ignore = Path(source), tuple(ignore)
    config = read_config(source)
    old = config.get("quantization_config")
    if old is not None:
        raise ValueError(
            f"source: {source} is already quantized ({old.get('quant_method')}); give the 16-bit checkpoint."
        )
    known, layers, left = families_with("mixture"), [], []
    is_known = (config.get("text_config") or config).get("model_type") in known
    for name, stored in read_heads(weight_files(source)).items():
        if name.endswith((".weight_packed", ".weight_scale")):
            raise ValueError(f"source: {stored.file.name} holds {name}, so it is already quantized.")
        is_matrix = name.endswith(".weight") and len(stored.shape) == 2
        if is_mixtures(name) and not (is_known and (is_matrix or len(stored.shape) < 2)):
            raise ValueError(
                f"source: {name} belongs to a mixture of experts, and only those of {', '.join(known)} can be "
                "quantized, with each expert's matrices by themselves, as `save_pretrained` writes them."
            )
        if is_quantizable(name, stored.like, ignore):
            if format is not None:
                check_stored(name, stored.shape, format)
            layers.append(name.removesuffix(".weight"))
        elif is_matrix and (keeps_type(name) or is_quantizable(name, stored.like, ())):
            left.append(name.removesuffix(".weight"))
    if not layers:
        raise ValueError(f"source: {source} has no linear layers to quantize (left as they are: {left or 'none'}).")
    return layers, left


def _layout(format: str) -> type[Format]:
    """Returns the format called `format`; `ValueError` if it has no layout."""
    if format not in storable():
        known = "has no layout in compressed-tensors" if format in FORMATS else "is not a format"
        raise ValueError(f"format: {format!r} {known}; allowed: {', '.join(storable())}.")
    return FORMATS[format]


def quantizers_on(device: torch.device | str) -> dict[str, Callable]:
    """
    Returns the quantizers for `checkpoint_stream` as keyword arguments: those of `formats`, or on a GPU their Triton
    twins. A format without a kernel is quantized by `formats` on a GPU too.
    """
    if torch.device(device).type != "cuda":
        return {"quantizer": quantize, "shared_scale": global_scale}
    from ..kernels import quantize as kernels

    return {"quantizer": kernels.quantize_any, "shared_scale": kernels.global_scale}
