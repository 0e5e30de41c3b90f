"""vLLM's own CUTLASS layer for INT8 on a CPU: all of it but two kernels, for which there are slow stand-ins here."""

import pytest
import torch
from torch import Tensor


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm import _custom_ops as ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassInt8ScaledMMLinearKernel
from vllm.platforms import PlatformEnum


def quantize(input: Tensor, scale=None, azp=None, symmetric: bool = True) -> tuple[Tensor, Tensor, None]:
    """For `scaled_int8_quant`: one dynamic scale a token."""
    assert scale is None and azp is None and symmetric
    scale = input.float().abs().amax(-1, keepdim=True) / 127
    return (input.float() / scale).round().to(torch.int8), scale, None


def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
):
    """For `cutlass_scaled_mm`, with `b` (in, out) by columns."""
    assert b.stride() == (1, len(b))
    y = (a.double() @ b.double()) * scale_a.double() * scale_b.double().view(1, -1)
    return (y if bias is None else y + bias.double()).to(out_dtype)


def keep_weight(layer, remove_weight: bool) -> None:
    """For `dispatch_cpu_unquantized_gemm`, which packs the weight where oneDNN has products of BF16."""
    layer.cpu_linear = torch.nn.functional.linear


def cutlass_on_cpu(monkeypatch) -> None:
    """Has vLLM run INT8 with CUTLASS's layers on a CPU, and hold the other linear layers as on a GPU."""
    monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", keep_weight)
    monkeypatch.setattr(ops, "scaled_int8_quant", quantize)
    monkeypatch.setattr(ops, "cutlass_scaled_mm", multiply)
    supported = classmethod(lambda cls, capability=None: (True, None))
    monkeypatch.setattr(CutlassInt8ScaledMMLinearKernel, "is_supported", supported)
    monkeypatch.setitem(linear._POSSIBLE_INT8_KERNELS, PlatformEnum.CPU, [CutlassInt8ScaledMMLinearKernel])
