"""
The low-precision number formats, each defined once in pure torch. They are bit-exact with compressed-tensors, and NF4
with bitsandbytes.

    q = quantize(weight, "nvfp4")           # codes and scales, stored in low precision
    w = q.dequantize()                      # the values they stand for, in the weight's shape and dtype

    x = fake_quantize_activation(x, "fp8")  # what a layer input becomes; unchanged in weight-only formats
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .common import Format, Parts, Scheme
from .fp8 import FP8, FP8Block, FP8Tensor
from .int4 import INT4
from .int8 import INT8
from .mxfp4 import MXFP4
from .nf4 import NF4
from .nvfp4 import NVFP4, global_scale


__all__ = [
    "FORMATS",
    "Format",
    "QuantizedTensor",
    "Scheme",
    "fake_quantize_activation",
    "global_scale",
    "quantize",
    "quantize_activation",
]

FORMATS: dict[str, type[Format]] = {
    "fp8": FP8,
    "fp8_tensor": FP8Tensor,
    "fp8_block": FP8Block,
    "int8": INT8,
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
    "nf4": NF4,
    "int4": INT4,
}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """
    A tensor stored in a low-precision format.

    Attributes:
        format (`str`): Key of [`FORMATS`].
        values (`torch.Tensor`):
            Codes: float8_e4m3fn, int8, or uint8 with two 4-bit codes per byte; the format's file gives the layout.
        scale (`torch.Tensor`): Scales; shape and dtype as in the format's file.
        shape (`torch.Size`): Shape of the original tensor.
        dtype (`torch.dtype`): Its dtype.
        global_scale (`torch.Tensor` or `None`):
            NVFP4's scale of the whole matrix, float32 `(1,)`; `(experts, 1)` for a weight `(experts, out, in)`.
    """

    format: str
    values: Tensor
    scale: Tensor
    shape: torch.Size
    dtype: torch.dtype
    global_scale: Tensor | None = None

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """
        Returns the values that the codes stand for, in the original shape.

        Args:
            dtype (`torch.dtype`, *optional*):
                By default the original dtype. Code times scale is rounded once to this dtype; in `torch.float32` the
                product is exact for 16-bit and power-of-two scales, and rounded for float32 scales.
        """
        parts = Parts(self.values, self.scale, self.global_scale)
        return FORMATS[self.format].dequantize(parts, self.shape, dtype or self.dtype)

    @cached_property
    def wide_scale(self) -> Tensor:
        """The scales in FP32. They are converted once, so `scale` must not be written to."""
        return self.scale.float()

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales."""
        return sum(t.nbytes for t in (self.values, self.scale, self.global_scale) if t is not None)

    @property
    def device(self) -> torch.device:
        return self.values.device

    def expert(self, expert: int) -> "QuantizedTensor":
        """Returns one matrix of a weight (experts, out, in), as views."""
        g = self.global_scale
        g = None if g is None else g[expert]
        values, scale = self.values[expert], self.scale[expert]
        return replace(self, values=values, scale=scale, shape=self.shape[1:], global_scale=g)

    def rows(self, rows: slice) -> "QuantizedTensor":
        """Returns some rows of a matrix whose scales belong to its rows, as views."""
        values = self.values[rows]
        return replace(self, values=values, scale=self.scale[rows], shape=values.shape)

    def to(self, device: torch.device | str) -> "QuantizedTensor":
        """Copies this tensor to another device."""
        g = self.global_scale
        g = None if g is None else g.to(device)
        return replace(self, values=self.values.to(device), scale=self.scale.to(device), global_scale=g)


def quantize(x: Tensor, name: str, global_scale: Tensor | None = None, check: bool = True) -> QuantizedTensor:
    """
    Quantizes a weight.

    Args:
        x (`torch.Tensor`):
            Weight of shape `(out, in)`, bfloat16, float16 or float32. A weight `(experts, out, in)` is quantized as if
            each expert were alone; NF4's blocks, though, may run across experts.
        name (`str`): Key of [`FORMATS`].
        global_scale (`torch.Tensor`, *optional*):
            NVFP4 only: a scale shared with other layers, from [`global_scale`], of shape `(1,)` or `(experts, 1)`. By
            default computed from `x` alone.
        check (`bool`, *optional*, defaults to `True`): Whether to reject NaN and infinity, which costs one read of
            `x`.

    Raises:
        ValueError:
            Unknown name, unsupported dtype, an empty tensor, NaN or infinity, a global scale for a format without one,
            or one of another shape.
    """
    fmt = checked(x, name, check)
    x = x.detach()
    if global_scale is None:
        parts = fmt.quantize(x)
    else:
        check_global_scale(global_scale, x, name)
        parts = fmt.quantize(x, global_scale)
    return QuantizedTensor(name, parts.values, parts.scale, x.shape, x.dtype, parts.global_scale)


def quantize_activation(x: Tensor, name: str, check: bool = True) -> QuantizedTensor | None:
    """
    Quantizes a layer input, with scales computed from it. Returns `None` for weight-only formats, whose inputs stay in
    16 bits.

    Args:
        x (`torch.Tensor`): Layer input of shape `(..., in)`, bfloat16, float16 or float32.
        name (`str`): Key of [`FORMATS`].
        check (`bool`, *optional*, defaults to `True`): Whether to reject NaN and infinity; `False` in hot paths.

    Raises:
        ValueError: Same as [`quantize`].
    """
    fmt = checked(x, name, check)
    if fmt.activations is None:
        return None
    parts = fmt.quantize_activation(x.detach())
    return QuantizedTensor(name, parts.values, parts.scale, x.shape, x.dtype)


def fake_quantize_activation(x: Tensor, name: str, check: bool = True) -> Tensor:
    """Returns `quantize_activation(x, name).dequantize()`, or `x` itself for a weight-only format."""
    q = quantize_activation(x, name, check)
    return x if q is None else q.dequantize()


def check_global_scale(global_scale: Tensor, x: Tensor, name: str) -> None:
    """Raises `ValueError` unless `x` can be quantized to the format called `name` with `global_scale`."""
    if not FORMATS[name].shares_scale:
        shared = ", ".join(repr(key) for key, value in FORMATS.items() if value.shares_scale)
        raise ValueError(f"global_scale: given for {name!r}, but only {shared} has one.")
    needed = (*x.shape[:-2], 1)
    if global_scale.shape != needed:
        raise ValueError(
            f"global_scale: shape {tuple(global_scale.shape)}, but x of shape {tuple(x.shape)} needs {needed}."
        )


def not_finite(x: Tensor) -> ValueError:
    return ValueError(f"x: holds NaN or infinity (shape {tuple(x.shape)}); only finite values can be quantized.")


def checked(x: Tensor, name: str, check: bool) -> type[Format]:
    """Returns the format called `name` if `x` can be quantized to it. `check` also refuses NaN and infinity."""
    if name not in FORMATS:
        raise ValueError(f"name: {name!r} is not a format; allowed: {', '.join(FORMATS)}.")
    if x.dtype not in DTYPES:
        raise ValueError(f"x: dtype {x.dtype} cannot be quantized; allowed: {', '.join(map(str, DTYPES))}.")
    if x.numel() == 0 or x.ndim == 0:
        raise ValueError(f"x: shape {tuple(x.shape)} cannot be quantized; at least one value is needed.")
    if check and not torch.stack(torch.aminmax(x.detach())).isfinite().all():
        raise not_finite(x)
    return FORMATS[name]
