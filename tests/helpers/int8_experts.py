"""
INT8 experts in vLLM on a CPU, which has no kernel for them: a loop over tokens and experts stands in for it. Names,
loaders and the held tensors are vLLM's own.
"""

import torch
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as of_vllm,
)

from trl_quant.formats import quantize
from trl_quant.rollout.vllm import base


def loop(self, layer, x, topk_weights, topk_ids, *args, **kwargs):
    """Experts of stored codes on inputs rounded per token, one after the other."""

    def rounded(rows):
        return quantize(rows.float(), "int8").dequantize(torch.float32)

    w13, w2 = (getattr(layer, name).float() * getattr(layer, f"{name}_scale") for name in ("w13_weight", "w2_weight"))
    out = torch.zeros(x.shape)
    for choice in range(topk_ids.shape[1]):
        for expert in topk_ids[:, choice].unique().tolist():
            rows = topk_ids[:, choice] == expert
            gate, up = (rounded(x[rows]) @ w13[expert].t()).chunk(2, -1)
            hidden = rounded(torch.nn.functional.silu(gate) * up)
            out[rows] += topk_weights[rows, choice, None].float() * (hidden @ w2[expert].t())
    return out.to(x.dtype)


def int8_experts_on_cpu(monkeypatch) -> None:
    """Has vLLM run INT8 experts on a CPU."""
    method = of_vllm.CompressedTensorsW8A8Int8MoEMethod
    monkeypatch.setattr(of_vllm, "select_int8_moe_backend", lambda **_: (Int8MoeBackend.TRITON, None))
    monkeypatch.setattr(method, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(method, "is_monolithic", False)
    monkeypatch.setattr(method, "apply", loop)
    monkeypatch.setattr(base, "check_experts_here", lambda precision: None)
