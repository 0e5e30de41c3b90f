"""Mixtures that train in FP8: the policy as a whole against one whose experts are made of dense layers."""

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from slow_experts import DenseExperts
from slow_routing import blocks_of, made_up_choices, mixture_of
from tiny import MIXTURES, tiny_tokenizer
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from trl_quant.formats import quantize
from trl_quant.layers import SampledExperts, UnifiedExperts, UnifiedLinear
from trl_quant.models.families import ROUTER
from trl_quant.models.linears import unquantized_linears
from trl_quant.policy.routing import ROUTED, Routed, accept_routing
from trl_quant.policy.unified import flow, restore, unify
from trl_quant.rollout import SharedEngine, TransformersEngine
from trl_quant.rollout.drift import WeightDrift
from trl_quant.rollout.verify.copy_check import copy_check


pytestmark = pytest.mark.isa
IDS = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(0))


def trained(family: str, dtype=torch.float32, **settings):
    """A mixture whose experts differ in size, which trains in FP8."""
    model = mixture_of(family, dtype=dtype, **settings)
    with torch.no_grad():
        for block in blocks_of(model).values():
            block.experts.gate_up_proj.mul_(2.0 ** torch.arange(-2, 2)[:, None, None])
            block.experts.down_proj.mul_(2.0 ** torch.arange(1, -3, -1)[:, None, None])
    unify(model, "fp8")
    return model


def of_dense_layers(model):
    """A copy of a policy, whose experts are made of dense layers."""
    dense = copy.deepcopy(model)
    for block in blocks_of(dense).values():
        block.experts = DenseExperts(block.experts)
    return dense


def outputs_and_gradients(model, **given):
    model.zero_grad()
    logits = model(IDS, **given).logits
    logits.float().log_softmax(-1)[..., 7].sum().backward()
    found = {"logits": logits.detach()}
    for name, param in model.named_parameters():
        if ".experts." not in name:
            found[name] = param.grad.clone()
    for number, block in blocks_of(model).items():
        experts = block.experts
        is_dense = isinstance(experts, DenseExperts)
        found[number] = experts.gradients() if is_dense else (experts.gate_up_proj.grad, experts.down_proj.grad)
    return found


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        for one, other in zip(tensor, theirs[name], strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_policy_computes_as_one_of_dense_layers(family, dtype):
    """Logits and all gradients, bit for bit; with given experts, of which one gets no token, and checkpointing too."""
    model = trained(family, dtype)
    dense = of_dense_layers(model)
    own = outputs_and_gradients(model)
    assert_same(own, outputs_and_gradients(dense))
    chosen = made_up_choices(IDS, torch.ones_like(IDS), layers=2, experts=3)
    for one in (model, dense):
        accept_routing(one)
    given = outputs_and_gradients(model, **{ROUTED: Routed(chosen)})
    assert_same(given, outputs_and_gradients(dense, **{ROUTED: Routed(chosen)}))
    assert not torch.equal(given["logits"], own["logits"])
    model.train().gradient_checkpointing_enable()
    assert_same(outputs_and_gradients(model, **{ROUTED: Routed(chosen)}), given)


@pytest.mark.parametrize("family", MIXTURES)
def test_what_is_quantized_and_what_is_not(family):
    plain = mixture_of(family)
    model = copy.deepcopy(plain)
    unify(model, "fp8")
    assert [(name, id(p)) for name, p in model.named_parameters()] == [*map_ids(model)]
    layers = {name: type(module) for name, module in model.named_modules()}
    for name, module in plain.named_modules():
        if name.endswith(".experts"):
            assert layers[name] is UnifiedExperts
        elif isinstance(module, nn.Linear):
            assert layers[name] is (nn.Linear if name in unquantized_linears(plain) else UnifiedLinear)
        elif ROUTER.fullmatch(f"{name}.weight"):
            assert layers[name] is type(module)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert flow(model) == {("layer", "fp8", None)}
    restore(model)
    assert not flow(model) and {n: type(m) for n, m in model.named_modules()} == {
        n: type(m) for n, m in plain.named_modules()
    }
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


def map_ids(model):
    return ((name, id(param)) for name, param in model.named_parameters())


def test_refused():
    for precision in ("int8", "fp8_block", "nvfp4"):
        with pytest.raises(ValueError, match=f"'{precision}' cannot be that of experts"):
            unify(mixture_of("qwen3_moe"), precision)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts` has an adapter"):
        unify(get_peft_model(mixture_of("mixtral"), adapter), "fp8", merged=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "n_routed_experts": 2, "first_k_dense_replace": 0}
    sizes |= {"moe_intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "n_group": 1}
    other = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=64, topk_group=1, num_experts_per_tok=1, **sizes))
    with pytest.raises(ValueError, match="these experts cannot be quantized"):
        unify(other, "fp8")


# The sampler


def shared(model, kind=SharedEngine):
    return kind(model=model, accelerator=Accelerator(cpu=True), processing_class=tiny_tokenizer(), precision="fp8")


def trained_in_fp8(family: str, adapted: bool):
    model = mixture_of(family)
    if adapted:
        adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, adapter)
    unify(model, "fp8", merged=adapted)
    return model


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_embedded_engine_computes_with_the_trainers_codes(family, adapted):
    """Bit for bit, after each write; and what it is given to load elsewhere are these codes."""
    model = trained_in_fp8(family, adapted)
    sampler, seen = shared(model), []
    for _ in range(2):
        sampler.sync()
        assert sampler.copy is not model and all(
            isinstance(block.experts, UnifiedExperts) for block in blocks_of(sampler.copy).values()
        )
        with torch.no_grad():
            seen.append(sampler.copy(IDS).logits)
            assert torch.equal(seen[-1], model(IDS).logits)
            for param in model.parameters():
                param.data.mul_(1.25)
    assert not torch.equal(*seen)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_copy_with_the_trainers_codes_is_checked(family, adapted):
    """As an asynchronous trainer samples. The policy's own experts compute, so that what differs in them is found."""
    model = trained_in_fp8(family, adapted)
    sampler = shared(model, TransformersEngine)
    sampler.sync()
    policy = sampler.weights.base_model
    experts, own = blocks_of(sampler.copy)[1].experts, blocks_of(policy)[1].experts
    assert isinstance(experts, SampledExperts) and isinstance(own, UnifiedExperts) and experts is not own
    found = copy_check(sampler)
    assert found["logp_difference"] < 1e-5 < found["bound"]
    sampler.prepare()

    def refused(place: str) -> None:
        with pytest.raises(RuntimeError, match=f"does not sample from the policy.*{place}"):
            copy_check(sampler)

    hook = own.register_forward_hook(lambda module, args, output: 16 * output)
    refused(r"Look at `model\.layers\.1\.mlp\.experts`")
    hook.remove()
    (first, codes), *_ = experts.held.items()
    exchanged = codes.values.view(torch.uint8).flip(0).view(codes.values.dtype)
    experts.held[first] = replace(codes, values=exchanged)
    refused("explained")
    experts.held[first] = codes
    own.is_silu, own.act_fn = False, nn.LeakyReLU(16.0)
    refused("explained")


@pytest.mark.parametrize("family", MIXTURES)
def test_an_engine_is_given_the_codes_of_the_trainer(family, monkeypatch):
    """Of linear layers and of whole tensors of experts, which have the scales that each expert has alone."""
    model = trained(family)
    sampler, dense = shared(model), {name: param.detach() for name, param in model.named_parameters()}
    monkeypatch.setattr(WeightDrift, "measures", lambda self, name: False)
    placeholders = sampler.quantized_in_training()
    found = dict(sampler.quantized_as_trained(sampler.policy_stream(placeholders)))
    assert found.keys() == dense.keys()
    unquantized = [f"{name}.weight" for name in unquantized_linears(model)]
    for name, tensor in found.items():
        is_quantized = dense[name].ndim > 1 and name not in unquantized and not ROUTER.fullmatch(name)
        if not is_quantized or "embed" in name:
            assert torch.equal(tensor, dense[name]) and name not in placeholders
            continue
        assert name in placeholders
        matrices = dense[name] if tensor.values.ndim > 2 else [dense[name]]
        for matrix, own in zip(matrices, of_experts(tensor), strict=True):
            alone = quantize(matrix, "fp8")
            assert torch.equal(own.values.float(), alone.values.float()) and torch.equal(own.scale, alone.scale)
    (experts, *_) = (block.experts for block in blocks_of(model).values())
    assert any(tensor is experts.codes(experts.leaves[0]) for tensor in found.values())  # not quantized again


def of_experts(q):
    return [q.expert(number) for number in range(q.shape[0])] if q.values.ndim > 2 else [q]
