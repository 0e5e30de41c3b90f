r"""
A frozen linear layer held in four bits: the base of QeRL (arXiv:2510.11696, section 3.1) and QLoRA (arXiv:2305.14314).

    Y  = X Q(W)^T + b
    dX = dY Q(W)

| symbol | here | shape |
|---|---|---|
| `Q(W)` | codes and scales, as a checkpoint stores them | (out, in) |
| `X`, `dX` | | (..., in) |
| `Y`, `dY` | | (..., out) |
| `b` | | (out,) |

Both products are computed from the codes and scales, so the backward pass saves no other weight. On a GPU, few tokens
are multiplied by a kernel that decodes the weight while it reads it. For many tokens, the weight is decoded into a
buffer, part by part, and cuBLAS multiplies the parts; the multiplication then takes most of the time.

A weight that is shared with a vLLM engine in the same process is in the layout of vLLM's kernels; see [`marlin`].
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..formats import DTYPES, FORMATS, QuantizedTensor, quantize
from ..formats.common import Parts
from ..formats.nf4 import BLOCK as NF4_BLOCK
from ..precisions import PRECISIONS
from . import marlin
from .operators import operator, shapes_of


# Bounds within which the kernel that decodes while it reads is faster, on an H200 (`benchmarks/linear.py`)
FUSED_TOKENS = 64  # at most
FUSED_OUTPUTS = 16384  # at least: fewer do not fill the card
BUFFER_BYTES = 144 << 20  # for the dequantized part of a weight; the largest layers of 7B and 14B fit whole in 16 bits
ALIGNMENT = 128  # weights are cut at multiples of it, which are whole groups in every format


# Products


def _quantized(values, scale, global_scale, format, rows, cols, dtype) -> QuantizedTensor:
    return QuantizedTensor(format, values.view(torch.uint8), scale, torch.Size((rows, cols)), dtype, global_scale)


def _in_rows(q: QuantizedTensor) -> QuantizedTensor | None:
    """Returns the weight with one row of codes and scales per output; `None` if NF4's blocks cross rows."""
    if q.values.ndim == 2:
        return q
    if q.shape[1] % NF4_BLOCK:
        return None
    return replace(q, values=q.values.view(q.shape[0], -1), scale=q.scale.view(q.shape[0], -1))


def _part_length(across: int, itemsize: int) -> int:
    """
    Returns the length, a multiple of `ALIGNMENT`, of the parts of a matrix that fill `BUFFER_BYTES`. `across` is the
    size of the other dimension.
    """
    return max(BUFFER_BYTES // (across * itemsize) // ALIGNMENT, 1) * ALIGNMENT


def _parts(q: QuantizedTensor, dim: int, itemsize: int) -> Iterator[tuple[slice, QuantizedTensor]]:
    """Cuts a weight along `dim` into parts of at most `BUFFER_BYTES` when dequantized; yields place and part."""
    length, across = q.shape[dim], q.shape[1 - dim]
    size = _part_length(across, itemsize)
    width = q.values.shape[1] // q.scale.shape[1]  # bytes of a group
    for start in range(0, length, size):
        place = slice(start, min(start + size, length))
        shape = torch.Size((place.stop - start, across) if dim == 0 else (across, place.stop - start))
        if dim == 0:
            values, scale = q.values[place], q.scale[place]
        else:
            groups = slice(start // (2 * width), -(-place.stop // (2 * width)))
            values, scale = q.values[:, groups.start * width : groups.stop * width], q.scale[:, groups]
        yield place, replace(q, values=values, scale=scale, shape=shape)


def _dequantized(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `q.dequantize(dtype)`, with a kernel if there is one."""
    if q.values.is_cuda and q.values.ndim == 2:
        from ..kernels import dequantize as kernels

        return kernels.dequantize(q, dtype)
    return q.dequantize(dtype)


def _add_product(bias: Tensor, x: Tensor, weight: Tensor, y: Tensor, factor: float = 1.0) -> None:
    """
    Writes `bias + factor x weight` into `y`, rounded once.

    cuBLAS adds the bias before it rounds only if `y` is contiguous. If `y` is some columns of a larger matrix,
    `torch.addmm` writes the rounded product, adds the bias and rounds again, which makes the error 1.4 times as large.
    """
    if y.is_contiguous():
        torch.addmm(bias, x, weight, alpha=factor, out=y)
    else:
        y.copy_(torch.addmm(bias, x, weight, alpha=factor))


def _multiply(x: Tensor, q: QuantizedTensor, bias: Tensor | None, forward: bool, y: Tensor) -> None:
    """Writes `x Q(W)^T + bias` into `y` if `forward`, else `x Q(W)`, for matrices."""
    weight = _in_rows(q)
    if weight is None:
        parts = [(slice(None), q)]
    else:
        if x.is_cuda and len(x) <= FUSED_TOKENS and y.shape[1] >= FUSED_OUTPUTS:
            from ..kernels import dequantize as kernels

            if x.dtype in kernels.INPUTS:
                return kernels.matmul(x, weight, bias, forward, out=y)
        # Each part computes whole outputs, so that rounded sums are never added
        parts = _parts(weight, 0 if forward else 1, x.itemsize)
    for place, part in parts:
        dequantized = _dequantized(part).to(x.dtype)
        if not forward:
            torch.mm(x, dequantized, out=y[:, place])
        elif bias is None:
            torch.mm(x, dequantized.t(), out=y[:, place])
        else:
            _add_product(bias[place], x, dequantized.t(), y[:, place])
        del dequantized  # frees its memory before the next part


def _multiply_tiles(
    x: Tensor, values: Tensor, scale: Tensor, factor: float, bias: Tensor | None, forward: bool, y: Tensor
) -> None:
    """As [`_multiply`], for a weight in Marlin's layout, whose values are `factor` times code times scale."""
    inputs, outputs = marlin.TILE_IN * len(values), scale.shape[1]
    length, across = (outputs, inputs) if forward else (inputs, outputs)
    size = _part_length(across, x.itemsize)
    for start in range(0, length, size):
        end = min(start + size, length)
        if forward:
            dequantized = marlin.dequantized(values[:, 2 * start : 2 * end], scale[:, start:end], x.dtype)
        else:
            groups = slice(start * len(scale) // inputs, end * len(scale) // inputs)
            dequantized = marlin.dequantized(
                values[start // marlin.TILE_IN : end // marlin.TILE_IN], scale[groups], x.dtype
            ).t()
        part = y[:, start:end]
        if bias is None:
            part.addmm_(x, dequantized, beta=0, alpha=factor)
        else:
            _add_product(bias[start:end], x, dequantized, part, factor)
        del dequantized  # frees its memory before the next part


def _product(
    x: Tensor,
    bias: Tensor | None,
    values: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    format: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    factor: float | None,
    forward: bool,
) -> Tensor:
    """
    Computes `x Q(W)^T + bias` if `forward`, else `x Q(W)`, without a gradient of its own.

    Args:
        x (`torch.Tensor`): (..., cols), or (..., rows) if not `forward`.
        bias (`torch.Tensor` or `None`): (rows,), of the type of `x`.
        values, scale, global_scale, format, rows, cols, dtype, factor: From [`FrozenLinear.packed`].
        forward (`bool`): Whether to multiply with the weight's transpose.

    Returns:
        `torch.Tensor`: (..., rows), or (..., cols) if not `forward`, in the type of `x`. The weight's values are
        rounded to `dtype`, then to the type of `x`. In Marlin's layout they are not rounded to `dtype`.
    """
    y = x.new_empty(*x.shape[:-1], rows if forward else cols)
    flat, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    if factor is not None:
        _multiply_tiles(flat, values, scale, factor, bias, forward, out)
    else:
        _multiply(flat, _quantized(values, scale, global_scale, format, rows, cols, dtype), bias, forward, out)
    return y


_operator = operator("frozen_product")(_product)


@shapes_of(_operator)
def _(x, bias, values, scale, global_scale, format, rows, cols, dtype, factor, forward):
    return x.new_empty(*x.shape[:-1], rows if forward else cols)


def frozen_product(*args) -> Tensor:
    """
    Computes [`_product`]. Under torch.compile it is an opaque operator: otherwise the compiler would see that both
    passes dequantize the same weight, and would keep the values between them. Without torch.compile it is the plain
    function, because the call of an operator would cost the host more time than everything else.
    """
    return (_operator if torch.compiler.is_compiling() else _product)(*args)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, *packed):
        ctx.save_for_backward(*packed[:3])
        ctx.constants = packed[3:]
        return frozen_product(x, bias, *packed, True)

    @staticmethod
    def backward(ctx, dy):
        dx = dbias = None
        saved = ctx.saved_tensors  # read once: under activation checkpointing they can be read only once
        if ctx.needs_input_grad[0]:
            dx = frozen_product(dy, None, *saved, *ctx.constants, False)
        if ctx.needs_input_grad[1]:
            dbias = dy.reshape(-1, dy.shape[-1]).sum(0)
        return dx, dbias, *[None] * (len(saved) + len(ctx.constants))


def _stored(q: QuantizedTensor) -> dict[str, Tensor]:
    """Returns the parameters that hold a quantized weight, by name."""
    stored = FORMATS[q.format].stored(Parts(q.values, q.scale, q.global_scale), q.shape)
    return {f"weight{suffix or '_packed'}": tensor for suffix, tensor in stored.items()}


def autocast_dtype(x: Tensor, in_features: int) -> torch.dtype:
    """
    Returns the type in which `F.linear` would compute: autocast's, or that of `x`. Raises `ValueError` unless `x` has
    `in_features` features.
    """
    if x.shape[-1] != in_features:
        raise ValueError(f"x: shape {tuple(x.shape)}, but the layer has {in_features} inputs.")
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


class FrozenLinear(nn.Linear):
    """
    A linear layer whose weight is held in four bits and gets no gradient; its inputs get theirs.

    Its parameters are those that compressed-tensors stores: `weight_packed`, `weight_scale` and, for NVFP4,
    `weight_global_scale`. NF4 has no layout there, and uses the same names. [`~FrozenLinear.hold_tiles`] replaces them
    by another layout. The layer has no `weight`, so that code which would write to one fails.

    The products are computed in the type of the inputs, or in autocast's.

    Parameters:
        in_features, out_features (`int`): Inputs and outputs.
        bias (`bool`): Whether the layer has one.
        precision (`str`): Key of `PRECISIONS`, one of [`~FrozenLinear.precisions`].
        dtype (`torch.dtype`): Type of the bias and of the original weight, to which dequantized values are rounded.
        device (`torch.device`, *optional*): Where the parameters are created; they are filled later, by their names.

    Raises:
        ValueError: Another precision or type.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        precision: str,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ):
        nn.Module.__init__(self)  # `nn.Linear` would allocate a weight
        allowed = self.precisions()
        if precision not in allowed:
            raise ValueError(f"precision: {precision!r} cannot be a frozen layer's; allowed: {', '.join(allowed)}.")
        if dtype not in DTYPES:
            raise ValueError(f"dtype: {dtype} cannot be a frozen layer's; allowed: {', '.join(map(str, DTYPES))}.")
        self.in_features, self.out_features = in_features, out_features
        self.precision, self.format, self.dtype = precision, PRECISIONS[precision].format, dtype
        self.factor: float | None = None  # in Marlin's layout, a value is this factor times code times scale
        self._is_hf_initialized = True  # or transformers would initialize a weight for it
        like = quantize(torch.empty(out_features, in_features, dtype=dtype, device="meta"), self.format, check=False)
        tensors = {"weight_global_scale": None, **_stored(like)}
        tensors["bias"] = torch.empty(out_features, dtype=dtype, device="meta") if bias else None
        device = torch.get_default_device() if device is None else device
        for name, tensor in tensors.items():
            self._hold(name, None if tensor is None else torch.empty_like(tensor, device=device))

    @staticmethod
    def precisions() -> list[str]:
        """Returns the precisions of such layers: those with four-bit weights and 16-bit inputs."""
        formats = {name: FORMATS[entry.format] for name, entry in PRECISIONS.items() if entry.format is not None}
        return [name for name, format in formats.items() if format.activations is None and format.nibbles]

    @classmethod
    def from_linear(cls, linear: nn.Linear, precision: str, global_scale: Tensor | None = None) -> "FrozenLinear":
        """
        Quantizes a layer's weight. The bias stays as it is, and both stay on their device.

        Args:
            linear (`nn.Linear`): The layer, with a weight of BF16, FP16 or FP32.
            precision (`str`): As in the class.
            global_scale (`torch.Tensor`, *optional*): As in [`trl_quant.formats.quantize`].

        Raises:
            ValueError: Another precision, or as in [`trl_quant.formats.quantize`].
        """
        bias, dtype = linear.bias is not None, linear.weight.dtype
        layer = cls(linear.in_features, linear.out_features, bias, precision, dtype, device="meta")
        layer.fill(quantize(linear.weight, layer.format, global_scale), linear.bias)
        return layer

    def fill(self, q: QuantizedTensor, bias: Tensor | None = None) -> None:
        """
        Takes a quantized weight and a bias, without a copy.

        Raises:
            ValueError: Another format, shape or type than the layer's, or a missing or surplus bias.
        """
        given = q.format, tuple(q.shape), q.dtype
        own = self.format, (self.out_features, self.in_features), self.dtype
        if given != own:
            raise ValueError(f"q: a weight of {given}, but the layer is one of {own}.")
        if (bias is None) != (self.bias is None):
            raise ValueError(f"bias: the layer has {'none' if self.bias is None else 'one'}.")
        for name, tensor in {**_stored(q), "bias": bias}.items():
            self._hold(name, tensor)

    def hold_tiles(self, values: Tensor, scale: Tensor, factor: float) -> None:
        """
        Makes the layer read its weight from another owner's memory, in Marlin's layout; see [`marlin`].

        Args:
            values (`torch.Tensor`): Codes (in / 16, 2 out) int32.
            scale (`torch.Tensor`): Scales (in / group, out), E5M3 of NVFP4 or E8M0 of MXFP4.
            factor (`float`): Factor of code times scale.
        """
        if self.weight_global_scale is not None:  # the scales may differ from the format's by a power of two
            global_scale = self.weight_global_scale
            self._hold("weight_global_scale", global_scale * (1 / (global_scale * factor)).log2().round().exp2())
        self._hold("weight_packed", values)
        self._hold("weight_scale", scale)
        self.factor = factor

    def _hold(self, name: str, tensor: Tensor | None) -> None:
        """Registers a tensor as a parameter, because DDP would broadcast a buffer before each forward pass."""
        parameter = None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
        self.register_parameter(name, parameter)

    def packed(self) -> tuple:
        """Returns the weight as arguments of [`frozen_product`]: codes, scales and global scale, then the rest."""
        tensors = (self.weight_packed, self.weight_scale, self.weight_global_scale)
        return *tensors, self.format, self.out_features, self.in_features, self.dtype, self.factor

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """
        Dequantizes the weight into a new tensor (out, in).

        Args:
            dtype (`torch.dtype`, *optional*): Type of the result, by default that of the weight that was quantized.
        """
        if self.factor is not None:
            scale = marlin.scales(self.weight_scale)
            scale = scale if self.weight_global_scale is None else scale / self.weight_global_scale
            return marlin.product(self.weight_packed, scale).t().to(dtype or self.dtype).contiguous()
        q = _quantized(*self.packed()[:-1])
        return _dequantized(_in_rows(q) or q, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in) to (..., out), in the type of `x` or autocast's."""
        x = self.inputs(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _FrozenLinear.apply(x, bias, *self.packed())

    def inputs(self, x: Tensor) -> Tensor:
        """Converts inputs (..., in) to the type of the products. Raises `ValueError` for another number of features."""
        return x.to(autocast_dtype(x, self.in_features))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision!r}"

    def __getattr__(self, name: str):
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} has no `weight`, but codes and scales: `dequantize()` returns the values in a "
                "new tensor. PEFT takes the layer with "
                "`trl_quant.policy.adapters.with_frozen_layers(peft_config)`."
            )
        return super().__getattr__(name)

    def _apply(self, fn, recurse=True):
        """Moves the weight like any other, but `.to(dtype)` does not convert it: that would change its values."""

        packed = [id(tensor) for tensor in self.packed()[:3]]

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return tensor.to(new.device) if id(tensor) in packed and new.dtype != tensor.dtype else new

        return super()._apply(moved, recurse)
