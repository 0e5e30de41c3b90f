"""
Quantizers of what a linear layer multiplies besides its weight: its inputs, as the sampler quantizes them, and its
gradients.

Statements about vLLM describe its CUDA operators. The `torch` path of its `QuantFP8`, which torch.compile uses if the
operator is switched off, differs: it multiplies a token by `1 / scale`, and a group's scale is at least 1 / (448 x
512). Where DeepGEMM multiplies, vLLM may round scales, including those of weights, up to powers of two
(`VLLM_USE_DEEP_GEMM_E8M0`, on by default in 0.31, also on Hopper); the scales here are not rounded.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import FORMATS, QuantizedTensor, quantize_activation
from ..formats.common import group, quotient, ungroup
from ..formats.fp8 import BLOCK, E4M3_MAX, FP8, FP8Block
from ..precisions import with_products


INT8_MAX = 127.0
LEAST_GRADIENT = 2.0**-60  # smallest maximum of a group of gradients, all of which may be small


def quantize_input(x: Tensor, format: str) -> QuantizedTensor:
    """
    Quantizes a layer's input as vLLM does, with scales in FP32 whatever the type of the input.

        int8       s = amax / 127                code = round(x (127 / amax)), on a CPU round(x (1 / s))
        fp8        s = max(amax / 448, 2^-9 / 448)       code = E4M3(x / s)
        fp8_block  s = max(amax, 1e-10) / 448            code = E4M3(x / s), or E4M3(x (1 / s)) after [`follow_groups`]

    In "fp8_tensor" vLLM has a scale for each token too. AIS has one scale for all tokens, and so has this function:
    that of [`trl_quant.formats.quantize`], in the type of the input.

    Args:
        x (`torch.Tensor`): (T, K), BF16 or FP32, finite.
        format (`str`):
            "fp8_block" with a scale for each 128 values of a token, "fp8" or "int8" with one for a token, "fp8_tensor"
            with one for all.

    Returns:
        [`trl_quant.formats.QuantizedTensor`]: (T, K), with scales (T, ceil(K / 128)), (T, 1) or (1,). On a GPU the
        scales of "fp8_block" are stored column by column, as its kernels read them.

    Raises:
        ValueError: Another format.
    """
    allowed = with_products()
    if format not in allowed:
        raise ValueError(f"format: {format!r} has no products; allowed: {', '.join(allowed)}.")
    x = x.detach()
    if FORMATS[format].grouped:
        return grouped(x, FORMATS[format].least_amax)
    if FORMATS[format].activations == "tensor":
        return _with_one_scale(x, format)
    if has_kernels(x, format):
        from ..kernels import unified as kernels

        return kernels.quantize_rows(x, format, x.is_cuda)
    return quantize_int8(x, x.is_cuda) if FORMATS[format].integers else quantize_fp8(x)


def quantize_fp8(x: Tensor, least: float = FP8.least_amax) -> QuantizedTensor:
    """Quantizes x (T, K) to "fp8" in torch, as [`quantize_input`]; `least` is the smallest maximum of a token."""
    scale = quotient(_amax(x).clamp(min=least), E4M3_MAX)
    return QuantizedTensor("fp8", _e4m3(x, scale), scale, x.shape, x.dtype)


def quantize_int8(x: Tensor, on_cuda: bool) -> QuantizedTensor:
    """Quantizes x (T, K) to "int8" in torch, as vLLM does on a GPU or, if not `on_cuda`, on a CPU."""
    amax = _amax(x)
    scale = quotient(amax, INT8_MAX)
    # torch would take `127 / amax` for `127 * (1 / amax)`
    inverse = torch.full_like(amax, INT8_MAX) / amax if on_cuda else scale.reciprocal()
    inverse = inverse.masked_fill(amax == 0, 0)
    codes = (x.float() * inverse).round().clamp(-128, 127).to(torch.int8)
    return QuantizedTensor("int8", codes, scale, x.shape, x.dtype)


def quantize_groups(x: Tensor, least: float, inverts: bool = False) -> QuantizedTensor:
    """
    Quantizes x (T, K) to "fp8_block" in torch, as [`quantize_input`]; `least` is the smallest maximum of a group. If it
    `inverts`, values are multiplied by the rounded 1 / s: five in ten thousand get a neighbouring code.
    """
    groups = group(x, BLOCK)
    scale = quotient(_amax(groups).clamp(min=least), E4M3_MAX)
    codes = _e4m3(groups.float() * scale.reciprocal(), torch.ones_like(scale)) if inverts else _e4m3(groups, scale)
    return QuantizedTensor("fp8_block", ungroup(codes, x.shape[1]), scale.squeeze(-1), x.shape, x.dtype)


def quantize_groups_for_both(x: Tensor, least: float, inverts: bool = False) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Computes [`quantize_for_both`] of x (T, K) in torch."""
    columns = F.pad(x, (0, 0, 0, -len(x) % BLOCK)).t().contiguous()
    return quantize_groups(x, least, inverts), quantize_groups(columns, least, inverts)


_engine_inverts = False  # set by `follow_groups`


def inverts() -> bool:
    """Whether inputs are quantized to "fp8_block" by a multiplication; see [`follow_groups`]."""
    return _engine_inverts


def follow_groups(quantizer: Callable[[Tensor], tuple[Tensor, Tensor]], device: torch.device) -> None:
    """
    Makes this process quantize inputs to "fp8_block" as an engine's `quantizer` on `device` does, which maps BF16
    values (T, K) to codes (T, K) and scales (T, K / 128). vLLM 0.26 divides values by their scale, and vLLM 0.33
    multiplies them by its rounded inverse. Raises `ValueError` if the quantizer follows neither rule.
    """
    global _engine_inverts
    mantissas = 1 + torch.arange(128) / 128  # each over each: among the quotients are some between two codes
    x = F.pad(mantissas.repeat(128, 1), (1, 127)).to(torch.bfloat16)
    x[:, 0] = 2 * mantissas
    codes, scale = (found.cpu() for found in quantizer(x.to(device)))
    for rule in (False, True):
        own = quantize_groups(x, FP8Block.least_amax, rule)
        if torch.equal(codes.float(), own.values.float()) and torch.equal(scale, own.scale):
            _engine_inverts = rule
            return
    raise ValueError(
        "`train_precision`='fp8_block' trains in the sampler's numbers, and this version of vLLM quantizes inputs by "
        "a rule that is not known here. Use another `train_precision`, or a version of vLLM that the README names."
    )


def quantize_for_both(x: Tensor, least: float = FP8Block.least_amax) -> tuple[QuantizedTensor, QuantizedTensor]:
    """
    Quantizes a matrix twice to "fp8_block": for a product over its features and for one over its tokens. On a GPU the
    matrix is read once.

    Both are computed from x itself, so each is rounded once. Jet-RL computes the second from the FP8 codes of the
    first, because its operators exchange activations in FP8, and so rounds it twice.

    Args:
        x (`torch.Tensor`): (T, K), BF16 or FP32, finite.
        least (`float`, *optional*): The smallest maximum of a group; `LEAST_GRADIENT` for gradients.

    Returns:
        `tuple`: x (T, K) with scales along K, and its transpose (K, T') with scales along T', which is T padded with
        zeros to a multiple of 128.
    """
    x = x.detach()
    if has_kernels(x, "fp8_block"):
        from ..kernels import unified as kernels

        return kernels.quantize_groups_for_both(x, least, inverts())
    return quantize_groups_for_both(x, least, inverts())


def quantize_gradient(dy: Tensor, scale: Tensor, owner: Tensor | None = None) -> QuantizedTensor:
    """
    Quantizes `dy diag(scale)` to "fp8", with one scale a token: the gradient of a layer's outputs, with the scales of
    the weight's rows folded in, because they vary along the sum of dX.

    Args:
        dy (`torch.Tensor`): (T, N), BF16 or FP32, finite.
        scale (`torch.Tensor`): (N, 1); (E, N, 1) for the weights of E experts.
        owner (`torch.Tensor`, *optional*): The number of each token's expert, (T,).
    """
    dy, factor = dy.detach(), scale.float().squeeze(-1)
    if has_kernels(dy, "fp8"):
        from ..kernels import unified as kernels

        return kernels.quantize_gradient(dy, factor, LEAST_GRADIENT, owner)
    factor = factor if owner is None else factor[owner]
    return replace(quantize_fp8(dy.float() * factor, LEAST_GRADIENT), dtype=dy.dtype)


# Parts


def _amax(x: Tensor) -> Tensor:
    """Returns the largest absolute value along the last dimension, which becomes 1, in FP32."""
    return x.abs().amax(-1, keepdim=True).float()


def _e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Returns the E4M3 codes of `x / scale`."""
    return (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _with_one_scale(x: Tensor, format: str) -> QuantizedTensor:
    """Computes [`quantize_input`] to a format with one scale for all tokens."""
    if not x.numel():
        return QuantizedTensor(format, x.to(torch.float8_e4m3fn), x.new_ones(1), x.shape, x.dtype)
    if not x.is_cuda:
        return quantize_activation(x, format, check=False)
    from ..kernels.quantize import quantize as kernel

    return kernel(x.contiguous(), format, check=False)


def grouped(x: Tensor, least: float) -> QuantizedTensor:
    """Computes [`quantize_groups`], with a kernel if there is one."""
    if has_kernels(x, "fp8_block"):
        from ..kernels import unified as kernels

        return kernels.quantize_groups(x, least, inverts())
    return quantize_groups(x, least, inverts())


def has_kernels(x: Tensor, format: str) -> bool:
    """Whether quantizers run in our kernels, which have a scale for each token or for parts of it."""
    fmt = FORMATS[format]
    return x.is_cuda and x.numel() > 0 and fmt.activations != "tensor" and (fmt.integers or multiplies_fp8(x))


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def multiplies_fp8(x: Tensor) -> bool:
    """Whether the device of `x` multiplies FP8 codes."""
    return x.is_cuda and capability_of(x.device) >= (8, 9) and hasattr(F, "scaled_mm")
