"""A frozen base of experts in the memory of vLLM's, with a made-up model in vLLM's place: a CPU's runs none in FP8."""

import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from slow_routing import blocks_of, mixture_of
from torch import nn


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

from trl_quant.formats import quantize
from trl_quant.policy.frozen import freeze
from trl_quant.rollout.vllm import one_copy
from trl_quant.rollout.vllm.experts import ExpertsCheck
from trl_quant.rollout.weights import PolicyWeights


pytestmark = pytest.mark.vllm
IDS = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))


class MadeUpExperts(nn.Module):
    """Of one layer: what vLLM's CUTLASS and Triton hold, after it has allocated and not loaded them."""

    def __init__(self, experts: int, hidden: int, width: int, backend):
        super().__init__()
        for name, shape in {"w13": (experts, 2 * width, hidden), "w2": (experts, hidden, width)}.items():
            codes, scale = torch.zeros(shape).to(torch.float8_e4m3fn), torch.ones(*shape[:2], 1)
            self.register_parameter(f"{name}_weight", nn.Parameter(codes, requires_grad=False))
            self.register_parameter(f"{name}_weight_scale", nn.Parameter(scale, requires_grad=False))
        self.prepared = []
        self.quant_method = SimpleNamespace(
            fp8_backend=backend,
            process_weights_after_loading=self.prepared.append,
            moe=SimpleNamespace(tp_size=1, tp_rank=0),
        )


class MadeUpModel(nn.Module):
    """Layers of such experts, at vLLM's places."""

    def __init__(self, policy, backend, width: int | None = None):
        super().__init__()
        self.layers, self.loaded = nn.ModuleList(), {}
        for index, _ in enumerate(policy.get_decoder().layers):
            block = blocks_of(policy).get(index)
            layer = nn.ModuleDict({"mlp": nn.ModuleDict()})
            if block is not None:
                experts, hidden, own = block.experts.down_proj.shape
                layer["mlp"]["experts"] = MadeUpExperts(experts, hidden, width or own, backend)
            self.layers.append(layer)

    def load_weights(self, weights):
        self.loaded = dict(weights)


def shared(family, backend, monkeypatch, **options):
    policy = mixture_of(family, dtype=torch.bfloat16)
    before = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    freeze(policy, "fp8")
    model, logits = MadeUpModel(policy, backend, **options), policy(IDS).logits
    monkeypatch.setattr(one_copy, "places", lambda model, base: {})
    monkeypatch.setattr(one_copy, "names_in_vllm", lambda model, names: [])
    done = one_copy.share(model, PolicyWeights(policy, Accelerator(cpu=True)), torch.device("cpu"))
    assert torch.equal(policy(IDS).logits, logits)
    return done, policy, model, before


@pytest.mark.parametrize("backend", [Fp8MoeBackend.TRITON, Fp8MoeBackend.VLLM_CUTLASS])
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_one_memory(family, backend, monkeypatch):
    """vLLM gets the policy's codes and scales, and the policy reads vLLM's memory; routers have their names on disk."""
    done, policy, model, before = shared(family, backend, monkeypatch)
    router = "block_sparse_moe.gate.weight" if family == "mixtral" else "mlp.gate.weight"
    assert done and f"model.layers.1.{router}" in model.loaded
    assert ("model.layers.1.mlp.gate.e_score_correction_bias" in model.loaded) == (family == "glm4_moe")
    assert not any("experts" in name and "shared" not in name for name in model.loaded)
    for index, block in blocks_of(policy).items():
        held, own = model.layers[index]["mlp"]["experts"], block.experts
        for leaf, name in (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight")):
            codes = quantize(before[f"model.layers.{index}.mlp.experts.{leaf}"], "fp8")
            tensor, scale = getattr(held, name), getattr(held, f"{name}_scale")
            assert torch.equal(tensor.float(), codes.values.float()) and torch.equal(scale, codes.scale.float())
            assert tensor.data_ptr() == getattr(own, leaf).data_ptr() == own.codes(leaf).values.data_ptr()
        assert held.prepared == [held]
        held.quant_method.process_weights_after_loading(held)
        assert held.prepared == [held]
    written = model.layers[1]["mlp"]["experts"].w2_weight.view(torch.uint8)
    before_writing = policy(IDS).logits
    written.bitwise_xor_(0x80)  # the signs
    assert not torch.equal(policy(IDS).logits, before_writing)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": Fp8MoeBackend.MARLIN}, "in the order of MARLIN, which the trainer cannot read"),
        ({"backend": Fp8MoeBackend.TRITON, "width": 64}, "a part of each layer's experts"),
    ],
)
def test_what_cannot_be_shared_is_held_twice(options, reason, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "trl_quant"):
        done, policy, model, _ = shared("qwen3_moe", monkeypatch=monkeypatch, **options)
    assert not done and reason in caplog.text and not model.loaded
    for block in blocks_of(policy).values():
        own = block.experts.gate_up_proj.data_ptr()
        assert own not in {tensor.data_ptr() for tensor in model.parameters()}


def test_the_check_compares_the_values_of_frozen_codes(monkeypatch):
    """Codes that are quantized from their values again may be others. A value that differs is found."""
    _, policy, model, _ = shared("qwen3_moe", Fp8MoeBackend.TRITON, monkeypatch)
    check = ExpertsCheck(model, None, "fp8", quantize)
    streamed = [item for item in PolicyWeights(policy, Accelerator(cpu=True)) if ".experts." in item[0]]
    assert not any(check.differing(*item) for item in streamed)
    for name in ("w13_weight", "w2_weight"):
        codes = getattr(model.layers[1]["mlp"]["experts"], name).view(torch.uint8)
        codes[2, 5, 7] ^= 1
        found = [check.differing(*item) for item in streamed]
        assert [place for place in found if place] == [f"{streamed[2 if name == 'w13_weight' else 3][0]}[2]"]
        codes[2, 5, 7] ^= 1
