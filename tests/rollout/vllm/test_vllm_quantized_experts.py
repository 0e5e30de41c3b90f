"""
Quantized experts in vLLM: the stream of codes, vLLM's loading of them, and the self-check, in INT8.

A CPU's vLLM has no INT8 kernel for experts, so a loop over tokens and experts stands in for it; names, loaders and the
held tensors are vLLM's own. `tests/gpu/test_experts_gpu.py` runs its kernels, in every precision.
"""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from tampering import of_expert, sync_changed
from tiny import MIXTURES


pytest.importorskip("vllm", reason="vLLM is not installed")
from int8_experts import int8_experts_on_cpu
from vllm.model_executor.layers.fused_moe import config as vllm_experts
from vllm_engines import engine, fresh, greedy, policy, update

from trl_quant.formats import quantize
from trl_quant.models.linears import sampled_linears
from trl_quant.rollout.fingerprint import fingerprint
from trl_quant.rollout.verify import self_check
from trl_quant.rollout.verify.rows import rows_to_check
from trl_quant.rollout.verify.self_check import Reference, mean_difference, policy_logps
from trl_quant.rollout.vllm import kernel_checks
from trl_quant.rollout.vllm.experts import check_experts, expert_layers, held_experts
from trl_quant.rollout.vllm.repairs import constants, kernel_state, restore_kernel_state
from trl_quant.rollout.weights import PolicyWeights
from trl_quant.storage.experts import NamesOnDisk


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def int8_anywhere():
    with pytest.MonkeyPatch.context() as patch:
        int8_experts_on_cpu(patch)
        yield


@pytest.fixture(scope="module", params=rest_is_long(MIXTURES, "qwen3_moe", "glm4_moe"))
def sampler(request, tmp_path_factory, int8_anywhere):
    """The engine of one family's policy, shared by the tests of this file."""
    dtype = torch.float32 if request.param == "mixtral" else torch.bfloat16
    model = policy(tmp_path_factory.mktemp(request.param), family=request.param, tied=False, dtype=dtype)
    built = engine(model, "int8")
    built.sync()
    return built


@pytest.fixture
def tampered(sampler):
    """Syncs the engine with changed tensors; it is right again after the test."""
    yield partial(sync_changed, sampler)
    sync_changed(sampler, dict)
    sampler.check_sync()


def test_the_check_leaves_parameters_in_their_order(sampler, monkeypatch):
    """In which ranks gather them, and a server was told that they come. In another one, a sync would send them all."""
    names, computing = list(sampler.weights.parameters()), self_check.computing_as_the_engine

    def backwards(weights, stand_ins, *others):
        return computing(weights, dict(reversed(stand_ins.items())), *others)

    monkeypatch.setattr(self_check, "computing_as_the_engine", backwards)
    sampler.check_sync()
    assert list(sampler.weights.parameters()) == names
    assert sampler.changed_groups(fingerprint(sampler.model)) is not None


@pytest.mark.parametrize("sampler", rest_is_long(MIXTURES, "qwen3_moe"), indirect=True)
def test_two_syncs_leave_the_bits_of_a_fresh_engine(sampler, tmp_path):
    seen = []
    for seed in range(2):
        update(sampler.model, seed=seed)
        sampler.sync()
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(sampler.model, "int8", tmp_path / f"checkpoint-{seed}"))
    assert seen[0] != seen[1]
    metrics = sampler.check_sync()
    assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"]


def test_the_reference_quantizes_experts(sampler, monkeypatch):
    """In MXFP4, whose inputs are not quantized, it is the policy with dequantized weights, experts included."""
    monkeypatch.setattr(sampler, "precision", "mxfp4")
    sequences = rows_to_check(sampler, 100, 200)
    found = Reference(sampler).logps(sequences)
    policy = copy.deepcopy(sampler.model).to(torch.bfloat16)
    policy.set_experts_implementation("eager")
    expected = []
    for experts in (False, True):
        for layer in sampled_linears(policy).values():
            if layer.holds_experts == experts:
                weight = policy.get_parameter(layer.weight)
                weight.data = quantize(dict(sampler.model.named_parameters())[layer.weight].data, "mxfp4").dequantize(
                    torch.bfloat16
                )
        expected.append(policy_logps(policy, sequences, torch.device("cpu")))
    bf16_experts, all_quantized = expected
    assert mean_difference(found, all_quantized) < 0.2 * mean_difference(found, bf16_experts)


def test_vllm_holds_experts_as_a_sync_sends_them_whole(sampler):
    streamed = {name: t for name, t in sampler.stream(measured=False, whole=True) if ".experts." in name}
    (layers,) = sampler.llm.apply_model(expert_layers)
    held = {name: held_experts(layers, name) for name in streamed}
    assert len(held) == 4 * len(layers)
    assert all(torch.equal(held[name], streamed[name].to(held[name])) for name in held)
    codes = held["model.layers.1.mlp.experts.down_proj"]
    codes[1] ^= 1
    assert sampler.differing_weight().endswith("experts.down_proj[1]")
    codes[1] ^= 1
    assert sampler.differing_weight() is None


def test_routers_keep_the_policys_bits(sampler):
    streamed = dict(sampler.stream(measured=False))
    routers = [name for name in streamed if name.endswith(("gate.weight", "shared_expert_gate.weight"))]
    held = dict(NamesOnDisk(sampler.model).stream((n, p.data) for n, p in sampler.model.named_parameters()))
    assert routers and all(torch.equal(streamed[name], held[name]) for name in routers)
    coded = [name for name, tensor in streamed.items() if tensor.dtype == torch.int8]
    assert sum(".experts." in name for name in coded) % 12 == 0 and not set(routers) & set(coded)


def test_a_zeroed_expert_is_found(sampler, tampered):
    tampered(lambda tensors: tensors | {name: tensors[name] * 0 for name in of_expert(tensors, 2)})
    assert sampler.differing_weight() == "model.layers.1.mlp.experts.gate_up_proj[2]"
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()


def test_exchanged_experts_are_found(sampler, tampered):
    def exchange(tensors):
        first, second = (of_expert(tensors, expert) for expert in (1, 3))
        return tensors | {a: tensors[b] for pair in zip(first, second, strict=True) for a, b in (pair, pair[::-1])}

    tampered(exchange)
    assert sampler.differing_weight() == "model.layers.1.mlp.experts.gate_up_proj[1]"


def test_one_stale_matrix_is_found(sampler, tampered):
    before = {name: tensor.clone() for name, tensor in sampler.stream(measured=False)}
    update(sampler.model, seed=7, size=1e-3)
    stale = of_expert(before, 3)[-2:]
    tampered(lambda tensors: tensors | {name: before[name] for name in stale})
    assert sampler.differing_weight().startswith("model.layers.1.mlp.experts.")
    assert sampler.differing_weight().endswith("[3]")


def test_a_changed_scale_is_found(sampler):
    (layer,) = sampler.llm.apply_model(lambda model: expert_layers(model)[1])
    layer.w2_weight_scale.data[1, 5] *= 1.01
    assert sampler.differing_weight() == "model.layers.1.mlp.experts.down_proj[1]"
    sampler.is_current = False
    sampler.sync()
    assert sampler.differing_weight() is None


def test_a_router_of_other_bits_is_found(sampler, tampered):
    (name,) = (n for n, _ in sampler.stream(measured=False) if ".layers.1." in n and n.endswith(".gate.weight"))
    tampered(lambda tensors: tensors | {name: tensors[name].to(torch.float8_e4m3fn).to(tensors[name])})
    assert sampler.differing_weight() == "model.layers.1.mlp.gate.weight"


def test_other_experts_than_the_precisions_are_refused(sampler):
    for precision in ("fp8", "nvfp4", "bf16"):
        with pytest.raises(ValueError, match=r"runs the experts of layer 1 with CompressedTensorsW8A8Int8MoEMethod"):
            sampler.llm.apply_model(lambda model, precision=precision: drop_first(model, precision))


def test_experts_with_inputs_in_16_bits_are_refused(sampler):
    """As vLLM below 0.28 multiplies INT8 experts whose checkpoint has no scales of inputs."""
    scales = {"w1_scale": torch.ones(4, 8, 1), "w2_scale": torch.ones(4, 8, 1)}
    weight_only = vllm_experts.int8_w8a16_moe_quant_config(**scales, w1_zp=None, w2_zp=None)
    both = vllm_experts.int8_w8a8_moe_quant_config(**scales, a1_scale=None, a2_scale=None, per_act_token_quant=True)

    def check(model, found) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for layer in expert_layers(model).values():
                patch.setattr(layer.quant_method, "moe_quant_config", found)
            check_experts(model, "int8")

    sampler.llm.apply_model(partial(check, found=both))
    with pytest.raises(ValueError, match=r"'int8': vLLM multiplies the experts of layer [01] with inputs in 16 bits"):
        sampler.llm.apply_model(partial(check, found=weight_only))


def drop_first(model, precision: str) -> None:
    """Checks a model whose first layer's experts, which GLM-4 lacks, are left out."""
    layers = expert_layers(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl_quant.rollout.vllm.experts.expert_layers", lambda model: {1: layers[1]})
        check_experts(model, precision)


def test_a_quantized_router_is_refused(sampler):
    def with_quantized_router(model):
        gates = [name for name in dict(model.named_modules()) if name.endswith("layers.1.mlp.gate")]
        linears = kernel_checks.linear_layers(model)
        attention = linears["model.layers.1.self_attn.o_proj"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linears[gates[0]], "quant_method", attention.quant_method)
            patch.setattr(linears[gates[0]], "scheme", attention.scheme, raising=False)
            kernel_checks.check_kernels(model, "int8", [f"model.layers.{n}.self_attn.o_proj" for n in range(2)])

    if sampler.weights.model_type == "mixtral":
        pytest.skip("its router has another name in vLLM")
    with pytest.raises(RuntimeError, match=r"linear layers outside of it, such as model.layers.1.mlp.gate"):
        sampler.llm.apply_model(with_quantized_router)


# what a reference reads of its engine, besides the policy
OF_ENGINE = (
    "accelerator",
    "caches",
    "product_errors",
    "travels_quantized",
    "precision",
    "checkpoint_dtype",
    "lora_sync",
)
EXPERTS = LoraConfig(
    r=4, target_modules=["o_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
)


def test_adapters_of_experts_are_merged_in_the_engine_and_in_its_reference(int8_anywhere, tmp_path):
    model = get_peft_model(policy(tmp_path, family="qwen3_moe", tied=False), EXPERTS)
    sampler = engine(model, "int8")
    update(model, seed=0, size=0.1)
    sampler.sync()
    assert sampler.differing_weight() is None
    sequences = rows_to_check(sampler, 100, 200)
    found = Reference(sampler).logps(sequences)
    base = Reference(sampler).logps(sequences, adapted=False)
    merged = copy.deepcopy(model).merge_and_unload()
    plain = SimpleNamespace(**{name: getattr(sampler, name) for name in OF_ENGINE})
    plain.model, plain.weights = merged, PolicyWeights(merged, sampler.accelerator)
    expected = Reference(plain).logps(sequences)
    assert mean_difference(found, expected) < 0.2 * mean_difference(base, expected)


class Kernel:
    """An object of vLLM's that holds tensors, as those that multiply experts do."""

    __module__ = "vllm.model_executor.layers.fused_moe"

    def __init__(self, **held):
        vars(self).update(held)


def with_kernel(scale: torch.nn.Parameter, strides: list[int]) -> Kernel:
    experts = Kernel(strides=torch.tensor(strides), config=Kernel(scale=scale.data), order=None)
    return Kernel(moe_kernel=Kernel(experts=experts, again=experts))


def test_what_graphs_read_of_a_kernel_outlives_a_reload_and_a_sleep():
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = with_kernel(layer.weight, [3, 4])
    order = layer.quant_method.moe_kernel.experts.order = Kernel(rows=torch.tensor([1, 2]))  # at the first use
    before = kernel_state(layer)
    strides, scale = layer.quant_method.moe_kernel.experts.strides, layer.quant_method.moe_kernel.experts.config.scale
    kept = constants(layer)
    assert {id(tensor) for tensor, _ in kept} == {id(strides), id(order.rows)}  # the scale is the layer's parameter
    strides.zero_(), order.rows.zero_()  # a sleep
    for tensor, copy_ in kept:
        tensor.copy_(copy_)
    assert strides.tolist() == [3, 4] and order.rows.tolist() == [1, 2]
    layer.quant_method = with_kernel(torch.nn.Parameter(torch.full((2, 2), 7.0)), [5, 6])  # a reload
    restore_kernel_state(before)
    held = layer.quant_method.moe_kernel.experts
    assert held.strides is strides and strides.tolist() == [5, 6]
    assert held.config.scale is scale and (scale == 7).all() and (layer.weight == 7).all()
    assert held.order is order
    held.order = made_again = Kernel(rows=torch.tensor([8, 9]))
    restore_kernel_state(before)
    assert held.order is made_again and held.order.rows is order.rows and order.rows.tolist() == [8, 9]
    layer.quant_method = Kernel()
    restore_kernel_state(before)  # nothing to restore
