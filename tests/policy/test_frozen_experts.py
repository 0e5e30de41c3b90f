"""Mixtures whose base is frozen in FP8 under LoRA on attention: the numbers of a policy in 16 bits, held in codes."""

import copy
import warnings

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from slow_routing import blocks_of, mixture_of
from tiny import MIXTURES, tiny_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from trl_quant.formats import quantize
from trl_quant.layers import FrozenExperts, FrozenLinear, UnheldExperts
from trl_quant.models.linears import sampled_linears
from trl_quant.policy.adapters import with_frozen_layers
from trl_quant.policy.frozen import FrozenBaseConfig, freeze, packed_while_loading
from trl_quant.policy.unified import unify
from trl_quant.rollout import SharedEngine
from trl_quant.rollout.faults import fault_of
from trl_quant.rollout.verify.self_check import computing_as_the_engine
from trl_quant.rollout.weights import PolicyWeights
from trl_quant.storage.layout import quantize_checkpoint


pytestmark = pytest.mark.isa
IDS = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(0))
ATTENTION = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def adapted(model):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(model, with_frozen_layers(LoraConfig(**ATTENTION)))


def gradients(model):
    model.zero_grad()
    logits = model(IDS).logits
    logits.float().log_softmax(-1)[..., 7].sum().backward()
    found = {name.rpartition("layers.")[2]: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), found


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=FrozenBaseConfig("fp8"))


@pytest.mark.parametrize("family", MIXTURES)
def test_it_computes_what_weights_in_16_bits_do(family):
    """Logits, and gradients of what is not quantized, bit for bit, in less memory; `.to` changes no codes."""
    plain = mixture_of(family, dtype=torch.bfloat16)
    unified, frozen = copy.deepcopy(plain), copy.deepcopy(plain)
    unify(unified, "fp8")
    freeze(frozen, "fp8")
    unify(frozen, "fp8")  # as a trainer does, for layers that share their input
    (ours, own), (theirs, others) = gradients(frozen), gradients(unified)
    assert torch.equal(ours, theirs) and own.keys() < others.keys() and "embed_tokens.weight" in str(own.keys())
    for name, gradient in own.items():
        assert torch.equal(gradient, others[name]), name
    layers = [module for module in frozen.modules() if isinstance(module, FrozenExperts)]
    weights = [block.experts for block in blocks_of(plain).values()]
    assert len(layers) == len(weights)
    for layer, experts in zip(layers, weights, strict=True):
        size = sum(tensor.nbytes for tensor in layer.packed())
        assert size < 0.55 * sum(p.nbytes for p in experts.parameters())
        for leaf in layer.leaves:
            assert torch.equal(layer.dequantize(leaf), quantize(getattr(experts, leaf), "fp8").dequantize())
    before = [tensor.clone() for tensor in layers[0].packed()]
    frozen.to(torch.float32)
    for tensor, kept in zip(layers[0].packed(), before, strict=True):
        assert tensor.dtype == kept.dtype and torch.equal(tensor.float(), kept.float())


@pytest.mark.parametrize("family", MIXTURES)
def test_a_checkpoint_is_packed_while_it_is_read(family, tmp_path):
    mixture_of(family, dtype=torch.bfloat16).save_pretrained(tmp_path)
    found, expected = load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    freeze(expected, "fp8")
    own, others = dict(found.named_parameters()), dict(expected.named_parameters())
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name].float(), tensor.float()) for name, tensor in others.items())
    assert not any(param.requires_grad for param in own.values() if param.element_size() == 1)
    layers = sampled_linears(expected)
    assert {type(expected.get_submodule(place)) for place, layer in layers.items() if not layer.holds_experts} == {
        FrozenLinear
    }
    assert torch.equal(found(IDS).logits, expected(IDS).logits)


def test_a_prepared_checkpoint_is_refused(tmp_path):
    mixture_of("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    path = quantize_checkpoint(tmp_path / "model", tmp_path / "fp8", "fp8")
    with pytest.raises(ValueError, match="Start from the 16-bit checkpoint, which is packed while it is read"):
        config, further = packed_while_loading(str(path), "fp8", "train_precision", False, None)
        AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **further)


def test_what_an_engine_reads():
    """The stream has the values of the codes under the names of the weights; nothing looks like a fault."""
    model = mixture_of("qwen2_moe", dtype=torch.bfloat16)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    freeze(model, "fp8")
    model = adapted(model)
    weights = PolicyWeights(model, Accelerator(cpu=True))
    assert fault_of(weights) is None
    streamed = dict(weights)
    assert streamed.keys() == expected.keys()
    for name, tensor in streamed.items():
        if ".experts." in name:
            assert torch.equal(tensor, quantize(expected[name], "fp8").dequantize())
    packed = {id(t) for _, layer in weights.frozen() for t in layer.packed()}
    assert not packed & {id(t) for _, t in weights.outside_base()} and len(packed) > 20
    assert not any(".experts." in name for name, _ in weights.outside_base())
    ignored = model.get_base_model()._ddp_params_and_buffers_to_ignore
    own = dict(model.named_parameters())
    assert {id(own[name]) for name in ignored if name in own} == packed
    assert not [name for name in weights.trained() if ".experts." in name]


def test_the_embedded_engine_and_a_check_use_the_codes():
    model = mixture_of("glm4_moe", dtype=torch.bfloat16)
    freeze(model, "fp8")
    model = adapted(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = SharedEngine(
            model=model, accelerator=Accelerator(cpu=True), processing_class=tiny_tokenizer(), precision="fp8"
        )
    sampler.sync()
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(sampler.copy(IDS).logits, expected)
        stand_ins, base = {}, model.get_base_model()
        for place, layer in sampled_linears(base).items():
            if layer.holds_experts:
                path, _, leaf = place.rpartition(".")
                owner = base.get_submodule(path)
                stand_ins[place] = owner.as_engine(leaf, torch.bfloat16)
        with computing_as_the_engine(sampler.weights, stand_ins, {}, None):
            near = model(IDS).logits
        assert 0 < (near - expected).float().norm() < 0.1 * expected.float().norm()
        assert torch.equal(model(IDS).logits, expected)
        with computing_as_the_engine(sampler.weights, {n: zeroed(s) for n, s in stand_ins.items()}, {}, None):
            assert (model(IDS).logits - expected).float().norm() > 0.3 * expected.float().norm()


def zeroed(stand_in: nn.Module) -> nn.Module:
    shape = stand_in.shape
    return UnheldExperts(lambda: torch.zeros(shape, dtype=torch.bfloat16), shape, "fp8", torch.bfloat16)
