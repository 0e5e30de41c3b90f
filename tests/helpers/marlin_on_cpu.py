"""vLLM's own Marlin layers on a CPU: all of it but two kernels, for which there are slow stand-ins here."""

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.mxfp4 import marlin as mxfp4
from vllm.model_executor.kernels.linear.nvfp4 import marlin as nvfp4
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_mxfp4 as w4a4_mxfp4,
)
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

from trl_quant.layers import FrozenLinear


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def repack(b_q_weight: Tensor, *args, size_k: int, size_n: int, num_bits: int = 4, **kwargs) -> Tensor:
    """For `gptq_marlin_repack`: words (in / 8, out) of eight inputs each, by vLLM's reference of the layout."""
    shifts = 4 * torch.arange(8)[None, :, None]
    codes = ((b_q_weight.unsqueeze(1) >> shifts) & 0xF).reshape(size_k, size_n)
    return marlin_weights(codes.int(), size_k, size_n, num_bits, get_weight_perm(num_bits))


def unpack(weight: Tensor) -> Tensor:
    """Codes (in, out) of repacked words: the inverse of vLLM's permutation."""
    size_k, size_n = 16 * weight.shape[0], weight.shape[1] // 2
    order = get_weight_perm(4)
    flat = ((weight.unsqueeze(-1) >> (4 * torch.arange(8))) & 0xF).reshape(-1, len(order))
    tiles = torch.empty_like(flat)
    tiles[:, order] = flat
    return tiles.view(size_k // 16, size_n // 16, 16, 16).permute(0, 2, 1, 3).reshape(size_k, size_n)


def unscale(scale: Tensor) -> Tensor:
    """Scales (groups, out) as numbers, in the order of the outputs."""
    swapped = scale.view(torch.uint8).view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, 64)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    plain = torch.empty_like(swapped)
    plain[:, order] = swapped
    plain = plain.view(scale.shape)
    if scale.dtype == torch.float8_e8m0fnu:
        return plain.view(torch.float8_e8m0fnu).float()
    exponent, mantissa = (plain >> 3).int(), (plain & 7).float()
    return torch.where(plain == 0, 0.0, 2.0 ** (exponent - 15) * (1 + mantissa / 8)) / 128


def numbers(weight: Tensor, scale: Tensor, global_scale: Tensor | None) -> Tensor:
    """(in, out) in FP32, by nothing of ours."""
    codes, scales = unpack(weight), unscale(scale)
    values = E2M1[codes.long()] * scales.repeat_interleave(len(codes) // len(scales), 0)
    return values if global_scale is None else values * (global_scale * 2.0**-119)


def apply(input, weight, weight_scale, weight_global_scale, workspace, size_n, size_k, bias=None, **kwargs):
    """For the kernel: products of BF16 summed in FP32."""
    matrix = numbers(weight, weight_scale, weight_global_scale)  # padded to whole tiles, as vLLM does it
    y = torch.nn.functional.pad(input.float(), (0, len(matrix) - size_k)) @ matrix
    if bias is not None:  # which vLLM has reordered too
        order = [2 * i + j for i in range(4) for j in [0, 1, 8, 9, 16, 17, 24, 25]]
        plain = torch.empty_like(bias).view(-1, 32)
        plain[:, order] = bias.view(-1, 32)
        y = y + plain.view(-1).float()
    return y[..., :size_n].to(input.dtype)


def tiles(layer: FrozenLinear) -> tuple[Tensor, Tensor, float]:
    """Codes, scales and factor of a layer by itself, as vLLM prepares them."""
    bare = torch.nn.Module()
    bare.output_size_per_partition, bare.input_size_per_partition = layer.out_features, layer.in_features
    bare.params_dtype = torch.bfloat16
    # Copies: from 0.33 on vLLM writes to the parameters that it is given
    bare.weight, bare.weight_scale = (
        torch.nn.Parameter(param.data.clone(), False) for param in (layer.weight_packed, layer.weight_scale)
    )
    if layer.weight_global_scale is not None:
        bare.weight_global_scale = 1 / layer.weight_global_scale
    marlin_utils_fp4.prepare_fp4_layer_for_marlin(bare)
    factor = 1.0 if layer.weight_global_scale is None else bare.weight_global_scale.item() * 2.0**-119
    return bare.weight.data, bare.weight_scale.data, factor


def marlin_on_cpu(monkeypatch) -> None:
    """Has vLLM run NVFP4 and MXFP4 on a CPU, and us allow it."""
    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)
    monkeypatch.setattr(marlin_utils_fp4, "is_fp4_marlin_supported", lambda: True)
    for module, name in ((nvfp4, "MarlinNvFp4LinearKernel"), (mxfp4, "MarlinMxFp4LinearKernel")):
        monkeypatch.setattr(
            getattr(module, name), "is_supported", classmethod(lambda cls, capability=None: (True, None))
        )
    marlin = lambda **kwargs: mxfp4.MarlinMxFp4LinearKernel(mxfp4.MxFp4LinearLayerConfig(**kwargs))  # noqa: E731
    monkeypatch.setattr(w4a4_mxfp4, "init_mxfp4_linear_kernel", marlin)
    monkeypatch.setattr(nvfp4, "apply_fp4_marlin_linear", apply)
    monkeypatch.setattr(marlin_utils_fp4, "apply_fp4_marlin_linear", apply)
    if hasattr(marlin_utils_fp4, "marlin_make_workspace_new"):
        monkeypatch.setattr(marlin_utils_fp4, "marlin_make_workspace_new", lambda *args, **kwargs: torch.empty(0))
    supported = dict.fromkeys(("bf16", "nvfp4", "mxfp4"))
    monkeypatch.setattr("trl_quant.rollout.vllm.support.supported_precisions", lambda: supported)
