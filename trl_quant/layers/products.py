r"""
The products of a linear layer that trains in the precision of its sampler (Jet-RL). [`quantizers`] quantizes what they
multiply.

    Y  = Q(X) Q(W)^T + b
    dX = dY Q(W)             fp8_block: Q(dY) Q(W), with dY per 1 x 128 along its features
                             fp8: Q(dY S) C, with Q(W) = S C and dY S per token
    dW = dY^T Q(X)           fp8_block: Q(dY^T) Q(X^T)^T, both per 1 x 128 along tokens

| symbol | here | shape |
|---|---|---|
| `Q(X)` | [`quantizers.quantize_input`] | (T, K) |
| `Q(X^T)`, `Q(dY^T)` | second of [`quantizers.quantize_for_both`] | (K, T'), (N, T'); T' is T up to a multiple of 128 |
| `Q(W)` | `trl_quant.formats.quantize` | (N, K) |
| `Y`, `dY` | [`product`] | (T, N) |
| `S`, `C` | the scales of the weight's rows on a diagonal, and its codes | (N, N), (N, K) |
| `Q(dY S)` | [`quantizers.quantize_gradient`] | (T, N) |
| `dX`, `dW` | [`input_gradient`], [`weight_gradient`] | (T, K), (N, K) |

What runs in low precision, on a GPU:

| | Y | dX | dW | where |
|---|---|---|---|---|
| fp8_block | FP8 | FP8 | FP8 | Hopper; N and K multiples of 128 |
| fp8 | FP8 | FP8 | the caller's | from Ada on; N and K multiples of 16 |
| fp8_tensor | FP8 | only in sampling | | from Ada on; N and K multiples of 16 |
| int8 | INT8; see [`follow_int8`] | BF16, of dequantized W | the caller's | N and K multiples of 8 |

Other shapes and FP32 are multiplied in FP32; in `fp8` and `int8` the codes are converted to BF16 and summed in FP32. On
a GPU that cannot multiply groups, `fp8_block` dequantizes to BF16 first. On a CPU the sums of `fp8` and `int8` are
exact, so that a token's outputs do not depend on the other tokens.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import FORMATS, QuantizedTensor
from ..formats.fp8 import BLOCK, decode_e4m3
from .quantizers import LEAST_GRADIENT, capability_of, grouped, multiplies_fp8, quantize_for_both, quantize_gradient


# Tensor cores sum FP8 products with 14 bits. vLLM's kernel for `fp8` keeps such sums, and so does this one, to get the
# sampler's values; the kernels for `fp8_block` add every 128 products to a sum in FP32.
FAST_ACCUMULATION = True
TOKENS = 64  # tokens are padded with zeros to a multiple of this; with fewer, cuBLAS sums in another order


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `q.dequantize(dtype)`, with a kernel where there is one: "fp8" and "int8" on a GPU."""
    if q.values.is_cuda and q.values.ndim == 2 and FORMATS[q.format].activations == "token":
        from ..kernels import unified as kernels

        return kernels.dequantize_rows(q, dtype or q.dtype)
    return q.dequantize(dtype)


def transposed(w: QuantizedTensor) -> QuantizedTensor:
    """
    Transposes a weight (N, K) to (K, N), or (E, N, K) to (E, K, N). The blocks of "fp8_block" are square, so no value
    changes. In "fp8" the result has scales of 1, because [`quantizers.quantize_gradient`] applies the scales of the
    rows.
    """
    if w.values.is_cuda:
        from ..kernels import unified as kernels

        values = kernels.transpose(w.values)
    else:
        values = w.values.mT.contiguous()
    per_row = FORMATS[w.format].per_row
    scale = _ones(values.shape[:-1], values.device) if per_row else w.scale.mT.contiguous()
    return QuantizedTensor(w.format, values, scale, values.shape, w.dtype)


@cache
def _ones(rows: torch.Size, device: torch.device) -> Tensor:
    """Returns scales of 1 in FP32, (*rows, 1). They are shared, so they must not be written to."""
    return torch.ones(*rows, 1, dtype=torch.float32, device=device)


# Products


def product(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """
    Computes `x w^T + bias`. Codes are multiplied first where scales are constant along the sum.

        fp8, int8    round(fma(s_x, s_w sum(codes), b))      as the epilogue of vLLM's kernels; fp8_tensor too
        fp8_block    round(round(sum) + b)                   as vLLM, which adds the bias in the type of the output

    Args:
        x ([`trl_quant.formats.QuantizedTensor`]): (T, K), from [`quantizers.quantize_input`].
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
    return _function(x, w, dtype)(x, w, bias, dtype)


def _function(x: QuantizedTensor, w: QuantizedTensor, dtype: torch.dtype) -> Callable:
    """Returns the function that computes [`product`] of these formats and shapes on this device."""
    fmt, (tokens, inputs), outputs, on_cuda = FORMATS[x.format], x.shape, w.shape[0], x.values.is_cuda
    is_fast = dtype == torch.bfloat16 and tokens > 0 and inputs % 16 == outputs % 16 == 0
    functions = (
        (_multiply_groups, fmt.grouped),
        (_multiply_fp8, not fmt.integers and is_fast and multiplies_fp8(x.values)),
        (_multiply_int8_as_engine, fmt.integers and is_fast and on_cuda and _engines_int8 is not None),
        (_multiply_exactly, not on_cuda or not tokens),
        (_multiply_int8, fmt.integers and inputs % 8 == outputs % 8 == 0),
        (_multiply_in_bf16, True),
    )
    return next(function for function, runs in functions if runs)


def _multiply_groups(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = _product_of_groups(x, w, dtype)
    return y if bias is None else y + bias.to(dtype)


def _multiply_fp8(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if FORMATS[x.format].activations == "tensor":
        scales = x.wide_scale, F.ScalingType.TensorWise, w.wide_scale, F.ScalingType.TensorWise
    else:
        scales = filled(x.scale), F.ScalingType.RowWise, w.wide_scale.view(1, -1), F.ScalingType.RowWise
    return F.scaled_mm(
        filled(x.values), w.values.t(), *scales,
        bias=None if bias is None else bias.to(dtype), output_dtype=dtype, use_fast_accum=FAST_ACCUMULATION,
    )[:len(x.values)]  # fmt: skip


def _multiply_int8_as_engine(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = x.values.new_empty(len(x.values), len(w.values), dtype=dtype)
    _engines_int8(y, x.values, w.values.t(), x.scale, w.wide_scale, None if bias is None else bias.to(dtype))
    return y


def _multiply_exactly(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return scale_sums(_exact_sums(x.values, w.values), x.scale, w.scale, bias, dtype)


def _multiply_int8(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    from ..kernels import unified as kernels

    sums = torch._int_mm(filled(x.values), w.values.t())[: len(x.values)]
    return kernels.scale_sums(sums, x.scale, w.wide_scale, bias, dtype)


def _multiply_in_bf16(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    codes, w_codes = (q.values.to(torch.bfloat16) for q in (x, w))  # exactly
    return scale_sums(torch.mm(codes, w_codes.t(), out_dtype=torch.float32), x.scale, w.scale, bias, dtype)


_engines_int8: Callable | None = None  # set by `follow_int8`


def follow_int8(multiply: Callable | None) -> None:
    """
    Makes this process multiply INT8 codes on a GPU with an engine's function; `None` ends it. vLLM's gives the same
    bits as the product and the kernel here, but does not write INT32 sums to memory.

    Args:
        multiply (`Callable`, *optional*):
            Writes `s_x x w s_w + bias` to its first argument (T, N). The others are the codes x (T, K) and w (K, N),
            their scales (T, 1) and (N, 1), and the bias (N,) or `None`.
    """
    global _engines_int8
    _engines_int8 = multiply


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
        return _product_of_groups(grouped(dy.detach(), LEAST_GRADIENT), transposed(w), dy.dtype)
    if fmt.integers:
        return _multiply(dy.detach(), dequantize(w, dy.dtype))
    return product(quantize_gradient(dy, w.wide_scale), transposed(w), None, dy.dtype)


def weight_gradient(dy_t: QuantizedTensor, x_t: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """
    Computes `dy^T x` in "fp8_block".

    Args:
        dy_t, x_t ([`trl_quant.formats.QuantizedTensor`]): (N, T'), (K, T'), from [`quantizers.quantize_for_both`].
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
        x_t ([`trl_quant.formats.QuantizedTensor`]): (K, T'), from [`quantizers.quantize_for_both`].
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


def multiplies(format: str, device: torch.device) -> bool:
    """Whether a GPU multiplies in this format."""
    x, fmt = torch.empty(0, device=device), FORMATS[format]
    if fmt.grouped:
        return multiplies_groups(x)
    return x.is_cuda if fmt.integers else multiplies_fp8(x)


def multiplies_groups(x: Tensor) -> bool:
    """Whether the device of `x` multiplies FP8 codes with scales for groups and blocks."""
    return multiplies_fp8(x) and capability_of(x.device)[0] == 9
