r"""
The products of a linear layer that trains in the precision of its sampler (Jet-RL), and their quantizers.

    Y  = Q(X) Q(W)^T + b
    dX = dY Q(W)             fp8_block: Q(dY) Q(W), with dY per 1 x 128 along its features
                             fp8: Q(dY S) C, with Q(W) = S C and dY S per token
    dW = dY^T Q(X)           fp8_block: Q(dY^T) Q(X^T)^T, both per 1 x 128 along tokens

| symbol | here | shape |
|---|---|---|
| `Q(X)` | [`quantize_input`] | (T, K) |
| `Q(X^T)`, `Q(dY^T)` | the second of [`quantize_for_both`] | (K, T'), (N, T'), T' the next multiple of 128 from T on |
| `Q(W)` | `trl_quant.formats.quantize` | (N, K) |
| `Y`, `dY` | [`product`] | (T, N) |
| `S`, `C` | the scales of the weight's rows on a diagonal, and its codes | (N, N), (N, K) |
| `Q(dY S)` | [`quantize_gradient`] | (T, N) |
| `dX`, `dW` | [`input_gradient`], [`weight_gradient`] | (T, K), (N, K) |

What runs in low precision, on a GPU:

| | Y | dX | dW | where |
|---|---|---|---|---|
| fp8_block | FP8 | FP8 | FP8 | Hopper; N and K multiples of 128 |
| fp8 | FP8 | FP8 | the caller's | from Ada on; N and K multiples of 16 |
| fp8_tensor | FP8 | only in sampling | | from Ada on; N and K multiples of 16 |
| int8 | INT8, by vLLM's product where it is loaded | BF16, of dequantized W | the caller's | N and K multiples of 8 |

Other shapes and FP32 are multiplied in FP32; in `fp8` and `int8` the codes are converted to BF16 and summed in FP32. On
a GPU that cannot multiply groups, `fp8_block` dequantizes to BF16 first. On a CPU the sums of `fp8` and `int8` are
exact, so that a token's outputs do not depend on the other tokens.

Statements about vLLM describe its CUDA operators. The `torch` path of its `QuantFP8`, which torch.compile uses if the
operator is switched off, differs: it multiplies a token by `1 / scale`, and a group's scale is at least 1 / (448 x
512). Where DeepGEMM multiplies, vLLM may round scales, including those of weights, up to powers of two
(`VLLM_USE_DEEP_GEMM_E8M0`, on by default in 0.31, also on Hopper); the scales here are not rounded.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import FORMATS, QuantizedTensor, quantize_activation
from ..formats.common import group, quotient, ungroup
from ..formats.fp8 import BLOCK, E4M3_MAX, FP8, FP8Block, decode_e4m3
from ..precisions import PRECISIONS, with_products


INT8_MAX = 127.0
LEAST_GRADIENT = 2.0**-60  # smallest maximum of a group of gradients, all of which may be small
# Tensor cores sum FP8 products with 14 bits. vLLM's kernel for `fp8` keeps such sums, and so does this one, to get the
# sampler's values; the kernels for `fp8_block` add every 128 products to a sum in FP32.
FAST_ACCUMULATION = True
TOKENS = 64  # tokens are padded with zeros to a multiple of this; with fewer, cuBLAS sums in another order


# Quantizers


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
        return _grouped(x, FORMATS[format].least_amax)
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


def quantize_gradient(dy: Tensor, scale: Tensor) -> QuantizedTensor:
    """
    Quantizes `dy diag(scale)` to "fp8", with one scale a token: the gradient of a layer's outputs, with the scales of
    the weight's rows folded in, because they vary along the sum of dX.

    Args:
        dy (`torch.Tensor`): (T, N), BF16 or FP32, finite.
        scale (`torch.Tensor`): (N, 1).
    """
    dy, factor = dy.detach(), scale.float().flatten()
    if has_kernels(dy, "fp8"):
        from ..kernels import unified as kernels

        return kernels.quantize_gradient(dy, factor, LEAST_GRADIENT)
    return replace(quantize_fp8(dy.float() * factor, LEAST_GRADIENT), dtype=dy.dtype)


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `q.dequantize(dtype)`, with a kernel where there is one: "fp8" and "int8" on a GPU."""
    if q.values.is_cuda and q.values.ndim == 2 and FORMATS[q.format].per_row:
        from ..kernels import unified as kernels

        return kernels.dequantize_rows(q, dtype or q.dtype)
    return q.dequantize(dtype)


def transposed(w: QuantizedTensor) -> QuantizedTensor:
    """
    Transposes a weight (N, K) to (K, N). The blocks of "fp8_block" are square, so no value changes. In "fp8" the result
    has scales of 1, because [`quantize_gradient`] applies the scales of the rows.
    """
    if w.values.is_cuda:
        from ..kernels import unified as kernels

        values = kernels.transpose(w.values)
    else:
        values = w.values.t().contiguous()
    per_row = FORMATS[w.format].per_row
    scale = _ones(len(values), values.device) if per_row else w.scale.t().contiguous()
    return QuantizedTensor(w.format, values, scale, torch.Size(reversed(w.shape)), w.dtype)


@cache
def _ones(rows: int, device: torch.device) -> Tensor:
    """Returns scales of 1 in FP32, (rows, 1). They are shared, so they must not be written to."""
    return torch.ones(rows, 1, dtype=torch.float32, device=device)


# Products


def product(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """
    Computes `x w^T + bias`. Codes are multiplied first where scales are constant along the sum.

        fp8, int8    round(fma(s_x, s_w sum(codes), b))      as the epilogue of vLLM's kernels; fp8_tensor too
        fp8_block    round(round(sum) + b)                   as vLLM, which adds the bias in the type of the output

    Args:
        x ([`trl_quant.formats.QuantizedTensor`]): (T, K), from [`quantize_input`].
        w ([`trl_quant.formats.QuantizedTensor`]): (N, K), of the same format, from [`trl_quant.formats.quantize`].
        bias (`torch.Tensor`, *optional*): (N,).
        dtype (`torch.dtype`): Type of the result, BF16 or FP32.

    Returns:
        `torch.Tensor`: (T, N).

    Raises:
        ValueError: The formats or the numbers of features differ.
    """
    if x.format != w.format or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"x: {x.format!r} of shape {tuple(x.shape)}, but the weight is {w.format!r} of shape {tuple(w.shape)}; "
            "both must have the same format and the same number of columns."
        )
    fmt = FORMATS[x.format]
    if fmt.grouped:
        y = _product_of_groups(x, w, dtype)
        return y if bias is None else y + bias.to(dtype)
    (tokens, inputs), outputs = x.shape, w.shape[0]
    fits = tokens > 0 and inputs % 16 == outputs % 16 == 0
    if not fmt.integers and dtype == torch.bfloat16 and fits and multiplies_fp8(x.values):
        if fmt.activations == "tensor":
            scales = x.wide_scale, F.ScalingType.TensorWise, w.wide_scale, F.ScalingType.TensorWise
        else:
            scales = filled(x.scale), F.ScalingType.RowWise, w.wide_scale.view(1, -1), F.ScalingType.RowWise
        return F.scaled_mm(
            filled(x.values), w.values.t(), *scales,
            bias=None if bias is None else bias.to(dtype), output_dtype=dtype, use_fast_accum=FAST_ACCUMULATION,
        )[:tokens]  # fmt: skip
    if fmt.integers and dtype == torch.bfloat16 and fits and has_engines_product(x.values, x.format):
        y = x.values.new_empty(tokens, outputs, dtype=dtype)
        bias = None if bias is None else bias.to(dtype)
        torch.ops._C.cutlass_scaled_mm(y, x.values, w.values.t(), x.scale, w.wide_scale, bias)
        return y
    if not x.values.is_cuda or not tokens:
        return scale_sums(_exact_sums(x.values, w.values), x.scale, w.scale, bias, dtype)
    if fmt.integers and inputs % 8 == outputs % 8 == 0:
        from ..kernels import unified as kernels

        sums = torch._int_mm(filled(x.values), w.values.t())[:tokens]
        return kernels.scale_sums(sums, x.scale, w.wide_scale, bias, dtype)
    codes, w_codes = (q.values.to(torch.bfloat16) for q in (x, w))  # exactly
    return scale_sums(torch.mm(codes, w_codes.t(), out_dtype=torch.float32), x.scale, w.scale, bias, dtype)


def input_gradient(dy: Tensor, w: QuantizedTensor) -> Tensor:
    """
    Computes `dy w`. For a weight in "fp8_block" or "fp8", dy is quantized. In "int8", the weight is dequantized.

    Args:
        dy (`torch.Tensor`): (T, N), BF16 or FP32.
        w ([`trl_quant.formats.QuantizedTensor`]): (N, K).

    Returns:
        `torch.Tensor`: (T, K), of the type of dy.
    """
    fmt = FORMATS[w.format]
    if fmt.grouped:
        return _product_of_groups(_grouped(dy.detach(), LEAST_GRADIENT), transposed(w), dy.dtype)
    if fmt.integers:
        return _multiply(dy.detach(), dequantize(w, dy.dtype))
    return product(quantize_gradient(dy, w.wide_scale), transposed(w), None, dy.dtype)


def weight_gradient(dy_t: QuantizedTensor, x_t: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """
    Computes `dy^T x` in "fp8_block".

    Args:
        dy_t, x_t ([`trl_quant.formats.QuantizedTensor`]): (N, T'), (K, T'), from [`quantize_for_both`].
        dtype (`torch.dtype`): Type of the result, BF16 or FP32.

    Returns:
        `torch.Tensor`: (N, K).
    """
    return _product_of_groups(dy_t, x_t, dtype)


def input_and_weight_gradient(
    dy: Tensor,
    w: QuantizedTensor,
    x_t: QuantizedTensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Computes [`input_gradient`] and [`weight_gradient`] in "fp8_block", with one read of dy.

    Args:
        dy (`torch.Tensor`): (T, N), BF16 or FP32.
        w ([`trl_quant.formats.QuantizedTensor`]): (N, K).
        x_t ([`trl_quant.formats.QuantizedTensor`]): (K, T'), from [`quantize_for_both`].
        dtype (`torch.dtype`, *optional*): Type of dW.

    Returns:
        `tuple`: dX (T, K) of the type of dy, and dW (N, K) of `dtype`, by default the same.
    """
    rows, columns = quantize_for_both(dy, LEAST_GRADIENT)
    dx = _product_of_groups(rows, transposed(w), dy.dtype)
    return dx, weight_gradient(columns, x_t, dtype or dy.dtype)


def scale_sums(sums: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """
    Scales the sums of a product of codes, in torch: `fma(s_x, s_w sum, b)` in FP32, rounded.

    Args:
        sums (`torch.Tensor`): (T, N), rounded to FP32 first.
        x_scale, w_scale (`torch.Tensor`): (T, 1), (N, 1); each may be (1,).
        bias (`torch.Tensor`, *optional*): (N,).
        dtype (`torch.dtype`): Type of the result.
    """
    y = sums.float() * w_scale.float().view(1, -1)
    if bias is None:
        return (y * x_scale).to(dtype)
    return (y.double() * x_scale.double() + bias.double()).float().to(dtype)  # one rounding to FP32, as an FMA


def joint_bias(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Returns the concatenated biases, with zeros for a layer without one; `None` if no layer has one."""
    given = [bias for bias in biases if bias is not None]
    if len(biases) == 1 or not given:
        return biases[0]
    filled = (given[0].new_zeros(n) if bias is None else bias for bias, n in zip(biases, sizes, strict=True))
    return torch.cat(list(filled))


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


def _grouped(x: Tensor, least: float) -> QuantizedTensor:
    """Computes [`quantize_groups`], with a kernel if there is one."""
    if has_kernels(x, "fp8_block"):
        from ..kernels import unified as kernels

        return kernels.quantize_groups(x, least, inverts())
    return quantize_groups(x, least, inverts())


def _exact_sums(x: Tensor, w: Tensor) -> Tensor:
    """Sums of products of codes: E4M3's are multiples of 2^-18 below 2^18, so 2^17 of them have less than 53 bits."""
    x, w = ((decode_e4m3(codes) if codes.dtype == torch.float8_e4m3fn else codes).double() for codes in (x, w))
    return x @ w.t()


def _product_of_groups(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Computes `a b^T` (M, N) of a (M, K) in groups along K and b (N, K) in such groups or in blocks."""
    (rows, inner), outs = a.shape, b.shape[0]
    if multiplies_groups(a.values) and rows and inner and inner % BLOCK == outs % BLOCK == 0:
        groups, blocks = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        in_blocks = b.scale.shape[0] != outs
        return F.scaled_mm(
            filled(a.values), b.values.t(), filled(a.scale, by_column=True), groups,
            block_scales(b.scale) if in_blocks else filled(b.scale, by_column=True), blocks if in_blocks else groups,
            output_dtype=dtype,
        )[:rows]  # fmt: skip
    # Odd shapes stay exact; a GPU that never multiplies groups would be far slower in FP32
    rounds = a.values.is_cuda and dtype == torch.bfloat16 and not multiplies_groups(a.values)
    wide = torch.bfloat16 if rounds else torch.float32
    return _multiply(a.dequantize(wide), b.dequantize(wide).t()).to(dtype)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Computes `a b`, summed in FP32 and rounded once. CPUs multiply in FP32: many have no fast product in BF16."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b if a.is_cuda else (a.float() @ b.float()).to(a.dtype)


def filled(x: Tensor, by_column: bool = False) -> Tensor:
    """Pads with zero rows to a multiple of `TOKENS`. `by_column` stores the matrix column by column."""
    missing = -len(x) % TOKENS
    if by_column:
        x = x.float().t()
        return (F.pad(x, (0, missing)) if missing else x).contiguous().t()
    if not missing:
        return x
    if x.dtype == torch.float8_e4m3fn:
        return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
    return F.pad(x, (0, 0, 0, missing))


def block_scales(scale: Tensor) -> Tensor:
    """Returns scales (N / 128, K / 128) as (K / 128, N / 128), padded to a multiple of 4 along K, K first in memory."""
    missing = -scale.shape[1] % 4
    return (F.pad(scale.float(), (0, missing)) if missing else scale.float()).contiguous().t()


def has_engines_product(x: Tensor, format: str) -> bool:
    """
    Whether vLLM has loaded its product of INT8 codes and runs it on this GPU. It gives the same bits as the product and
    the kernel here, but does not write INT32 sums to memory.
    """
    if not x.is_cuda or "vllm" not in sys.modules:
        return False
    vllm, capability = PRECISIONS[format].vllm, _capability(x.device)
    is_run = vllm.capability <= capability and (vllm.below is None or capability < vllm.below)
    return is_run and hasattr(torch.ops._C, "cutlass_scaled_mm")


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def multiplies(format: str, device: torch.device) -> bool:
    """Whether a GPU multiplies in this format."""
    x, fmt = torch.empty(0, device=device), FORMATS[format]
    if fmt.grouped:
        return multiplies_groups(x)
    return x.is_cuda if fmt.integers else multiplies_fp8(x)


def multiplies_fp8(x: Tensor) -> bool:
    """Whether the device of `x` multiplies FP8 codes."""
    return x.is_cuda and _capability(x.device) >= (8, 9) and hasattr(F, "scaled_mm")


def multiplies_groups(x: Tensor) -> bool:
    """Whether the device of `x` multiplies FP8 codes with scales for groups and blocks."""
    return multiplies_fp8(x) and _capability(x.device)[0] == 9


def has_kernels(x: Tensor, format: str) -> bool:
    """Whether quantizers run in our kernels, which have a scale for each token or for parts of it."""
    fmt = FORMATS[format]
    return x.is_cuda and x.numel() > 0 and fmt.activations != "tensor" and (fmt.integers or multiplies_fp8(x))
