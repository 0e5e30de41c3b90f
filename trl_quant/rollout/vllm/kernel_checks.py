"""Checks what vLLM built: the kernels of its linear layers, their biases, and the error of its INT8 products."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase

from ...formats import FORMATS, quantize
from ...models.linears import keeps_type
from ...precisions import PRECISIONS
from .adapter import decoder_in_vllm, linear_layers, places


CONVOLUTION = ".conv1d"  # of a hybrid, which vLLM holds in a linear layer
UNPACKED = "_cpu_unpacked_conv_weight"  # its weights (channels, width), where a CPU packs them for products of BF16


def check_kernels(model: nn.Module, precision: str, layers: Iterable[str]) -> str:
    """
    Describes the kernels of linear layers, such as `112 x CompressedTensorsW8A8Int8 (CutlassInt8...)`.

    Args:
        model (`nn.Module`): vLLM's model.
        precision (`str`): Key of [`~precisions.PRECISIONS`].
        layers (`Iterable[str]`): The policy's names of its decoder's linear layers.

    Raises:
        `RuntimeError`: A linear layer of the decoder does not run in `precision`, or one that [`keeps_type`] or is
            outside of it is quantized.
    """
    linears, decoder = linear_layers(model), decoder_in_vllm(model, layers)
    inside = {name: layer for name, layer in linears.items() if name.startswith(decoder)}
    if not inside:
        raise RuntimeError(
            f"`rollout_precision`={precision!r}: vLLM's {type(model).__name__} has no linear layers in {decoder!r}, "
            "where its decoder should be. Use another model, or leave `rollout_precision` unset."
        )
    others = quantized_outside(model, layers)
    if others:
        raise RuntimeError(
            f"`rollout_precision`={precision!r} quantizes only the language model, without its routers and gates, and "
            f"vLLM quantized {len(others)} linear layers outside of it, such as {'; '.join(others[:3])}. Set "
            "`use_vllm=False` to sample from the embedded engine, or leave `rollout_precision` unset."
        )
    kept = {name for name in inside if keeps_type(f"{name}.weight") or name.endswith(CONVOLUTION)}
    wrong = [
        f"{name}: {_describe(layer)}"
        for name, layer in inside.items()
        if not _runs_in("bf16" if name in kept else precision, *method_of(layer))
    ]
    if wrong:
        expected = " or ".join(PRECISIONS[precision].vllm.methods)
        raise RuntimeError(
            f"vLLM did not build the engine that `rollout_precision`={precision!r} asks for: {len(wrong)} linear "
            f"layers run otherwise, such as {'; '.join(wrong[:3])}. Expected: {expected}."
        )
    counts = Counter(map(_describe, linears.values()))
    return ", ".join(f"{count} x {description}" for description, count in counts.items())


def quantized_outside(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """
    Describes the quantized linear layers outside of the decoder, and those in it that should keep their type. `layers`
    are the policy's names of the decoder's linear layers.
    """
    decoder = decoder_in_vllm(model, layers)
    found = linear_layers(model).items()
    outside = {name: x for name, x in found if not name.startswith(decoder) or keeps_type(f"{name}.weight")}
    return [f"{name}: {_describe(layer)}" for name, layer in outside.items() if not _runs_in("bf16", *method_of(layer))]


def check_biases(model: nn.Module, layers: Iterable[str]) -> None:
    """Raises `ValueError` if vLLM's model lacks the bias of one of `layers`, the policy's layers with a bias."""
    lacking = [name for name, place in places(model, layers).items() if place and place[0].bias is None]
    if lacking:
        raise ValueError(
            f"vLLM's {type(model).__name__} has no bias in {len(lacking)} layers where the policy has one, such as "
            f"`{lacking[0]}`, and would sample without it. Set `use_vllm=False` to sample from the embedded engine."
        )


def kernel_name(layer: LinearBase) -> str:
    """Returns the name of a layer's kernel; "NoneType" for a method without one."""
    return type(method_of(layer)[1]).__name__


def method_of(layer: LinearBase) -> tuple[object, object]:
    """Returns a layer's quantization method and its kernel; `None` for a method without one."""
    method = getattr(layer, "scheme", None) or layer.quant_method
    for name in ("kernel", "fp8_linear"):
        if hasattr(method, name):
            return method, getattr(method, name)
    return method, None


def _describe(layer: LinearBase) -> str:
    method, kernel = method_of(layer)
    return f"{type(method).__name__} ({type(kernel).__name__})" if kernel else type(method).__name__


def _runs_in(precision: str, method: object, kernel: object) -> bool:
    """Whether a layer with this quantization method and kernel, from [`method_of`], runs in `precision`."""
    entry, kernel_name = PRECISIONS[precision], type(kernel).__name__
    if type(method).__name__ not in entry.vllm.methods or kernel_name.startswith(entry.vllm.wrong_kernels):
        return False
    if entry.vllm.kernels and not kernel_name.startswith(entry.vllm.kernels):
        return False
    # A method of compressed-tensors may run several formats, which differ in the strategy of their weights
    strategy = getattr(method, "strategy", None)
    return strategy is None or strategy == FORMATS[entry.format].scheme.weights["strategy"]


@torch.no_grad()
def int8_errors(model: nn.Module) -> dict[int, float]:
    """
    Measures the relative error of the device's INT8 product, on normally distributed weights and inputs. It is zero on
    a GPU, and on CPUs with VNNI or AMX. On other CPUs oneDNN adds pairs of products in 16 bits, which saturate.

    Returns:
        `dict[int, float]`: number of a layer's inputs -> error; empty on a GPU.
    """
    if not any(hasattr(method_of(layer)[1], "dnnl_handler") for layer in linear_layers(model).values()):
        return {}
    generator, errors = torch.Generator().manual_seed(0), {}
    for inputs in {layer.input_size for layer in linear_layers(model).values()}:
        draws = [torch.randn(64, inputs, generator=generator) for _ in range(2)]
        x, w = (quantize(draw, "int8") for draw in draws)
        out = torch.empty(64, 64, dtype=torch.bfloat16)
        handle = ops.create_onednn_scaled_mm(w.values.t(), w.scale, torch.bfloat16, True, False, 32)
        ops.onednn_scaled_mm(handle, x.values, out, x.scale, None, None, None)
        exact = x.dequantize() @ w.dequantize().t()
        errors[inputs] = ((out - exact).norm() / exact.norm()).item()
    return errors
