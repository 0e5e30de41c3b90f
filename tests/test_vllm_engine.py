"""The vLLM engine against engines that vLLM itself starts on checkpoints of the same weights."""

import pytest
import torch
from vllm_engines import engine, fresh, greedy, policy, update


pytestmark = pytest.mark.vllm
AMX = torch.cpu._is_amx_tile_supported()


@pytest.fixture
def fp8_block(monkeypatch):
    """Where the CPU has no AMX, vLLM's own FP8 block layer around a stand-in for the multiplication that needs it."""
    if AMX:
        return
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel as Kernel

    from trl_quant.rollout import vllm_support

    def apply_weights(self, layer, x, bias=None):
        scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = layer.weight.float() * scale[: layer.weight.shape[0], : layer.weight.shape[1]]
        return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)

    monkeypatch.setattr(Kernel, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    monkeypatch.setattr(Kernel, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(Kernel, "apply_weights", apply_weights)
    supported = dict.fromkeys(("bf16", "int8", "fp8_block"))
    monkeypatch.setattr(vllm_support, "supported_precisions", lambda: supported)


@pytest.mark.parametrize("with_lora", [False, True], ids=["full", "merged"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8_block"])
def test_every_sync_equals_a_fresh_engine(tmp_path, precision, tied, with_lora, request):
    if precision == "fp8_block":
        request.getfixturevalue("fp8_block")
    model = policy(tmp_path / "policy", with_lora, tied=tied)
    sampler = engine(model, precision)
    seen = []
    for step in range(3):
        update(model, seed=step)
        sampler.sync_weights()
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(model, precision, tmp_path / f"step-{step}"))
    assert seen[0] != seen[1] != seen[2]
