"""
Mixtures of experts in vLLM, in BF16: a synced engine equals a fresh one, and the self-check finds each expert and each
router that is not the policy's, whether a text reaches it or not.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from embedded import engine as embedded
from long_tests import rest_is_long
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from slow_routing import blocks_of
from tampering import of_expert, sync_changed
from tiny import MIXTURES
from training import config, make


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform
from vllm_engines import COLOCATED, engine, fresh, greedy, keep, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout.verify.rows import rows_to_check
from trl_quant.rollout.verify.self_check import Reference, mean_difference
from trl_quant.rollout.vllm import support, worker


pytestmark = pytest.mark.vllm
UNREACHED = 2  # GLM-4's expert that no token reaches
ATTENTION = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])  # "all-linear" takes experts too


@pytest.fixture(scope="module", params=rest_is_long(MIXTURES, "qwen2_moe", "glm4_moe"))
def sampler(request, tmp_path_factory):
    """The engine of one family's policy, shared by the tests of this file."""
    path = tmp_path_factory.mktemp(request.param)
    dtype = torch.float32 if request.param == "mixtral" else torch.bfloat16
    model = policy(path, family=request.param, tied=False, dtype=dtype)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
            bias[UNREACHED] = -10.0  # a token's scores lie between 0 and 1
    model.save_pretrained(path)
    built = engine(model, "bf16")
    built.sync()
    return built


@pytest.fixture
def tampered(sampler):
    """Syncs the engine with changed tensors; it is right again after the test."""
    yield partial(sync_changed, sampler)
    sync_changed(sampler, dict)
    sampler.check_sync()


def fault_of(sampler) -> str:
    with pytest.raises(RuntimeError) as error:
        sampler.check_sync()
    return str(error.value)


@pytest.mark.parametrize("sampler", rest_is_long(MIXTURES, "glm4_moe"), indirect=True)
def test_three_syncs_leave_the_bits_of_a_fresh_engine(sampler, tmp_path):
    seen = []
    for seed in range(3):
        update(sampler.model, seed=seed)
        sampler.sync()
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(sampler.model, "bf16", tmp_path / f"checkpoint-{seed}"))
    assert len({str(samples) for samples in seen}) == 3
    metrics = sampler.check_sync()
    assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"]


def test_the_stream_is_the_checkpoint_expert_by_expert_and_copies_none(sampler, tmp_path):
    sampler.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    held = {param.untyped_storage().data_ptr() for param in sampler.model.parameters()}
    streamed = list(sampler.stream(measured=False))
    assert {name for name, _ in streamed} == set(saved) and len(streamed) == len(saved)
    for name, tensor in streamed:
        assert torch.equal(tensor, saved[name])
        assert tensor.untyped_storage().data_ptr() in held or name.endswith("e_score_correction_bias")
    experts = [name.split(".experts.")[1].split(".")[0] for name, _ in streamed if ".experts." in name]
    assert len(experts) >= 12


def test_an_expert_that_is_zeroed_is_found(sampler, tampered):
    tampered(lambda tensors: tensors | {name: tensors[name] * 0 for name in of_expert(tensors, UNREACHED)})
    unreached = sampler.weights.model_type == "glm4_moe"
    fault = fault_of(sampler)
    assert "corrupted" in fault
    if unreached:  # the text says nothing, and the stored weights do
        assert f"another `model.layers.1.mlp.experts.gate_up_proj[{UNREACHED}]`" in fault


def test_two_experts_that_are_exchanged_are_found(sampler, tampered):
    def exchange(tensors):
        first, second = (of_expert(tensors, expert) for expert in (0, 1))
        return tensors | {a: tensors[b] for pair in zip(first, second, strict=True) for a, b in (pair, pair[::-1])}

    tampered(exchange)
    assert sampler.differing_weight() == "model.layers.1.mlp.experts.gate_up_proj[0]"
    assert "corrupted" in fault_of(sampler)


def test_one_stale_matrix_of_an_expert_is_found(sampler, tampered):
    before = {name: tensor.clone() for name, tensor in sampler.stream(measured=False)}
    update(sampler.model, seed=7, size=1e-3)  # less than the text check sees in one expert
    stale = of_expert(before, 3)[-1]
    tampered(lambda tensors: tensors | {stale: before[stale]})
    assert sampler.differing_weight().startswith("model.layers.1.mlp.experts.")
    assert sampler.differing_weight().endswith("[3]")
    assert "another `model.layers.1.mlp.experts" in fault_of(sampler)


@pytest.mark.parametrize("gate", ["gate", "shared_expert_gate", "e_score_correction_bias"])
def test_a_router_of_other_bits_is_found(sampler, tampered, gate):
    names = [name for name in dict(sampler.stream(measured=False)) if name.removesuffix(".weight").endswith(f".{gate}")]
    if not names:
        pytest.skip(f"{sampler.weights.model_type} has no {gate}")

    def quantized(tensors):
        return tensors | {names[-1]: tensors[names[-1]].to(torch.float8_e4m3fn).to(tensors[names[-1]])}

    tampered(quantized)
    assert gate in sampler.differing_weight()


@pytest.mark.parametrize("sampler", rest_is_long(MIXTURES, "glm4_moe"), indirect=True)
def test_exchanged_experts_are_far_outside_of_the_bound(sampler, tampered):
    def turned(tensors):
        changed = dict(tensors)
        for layer in {int(name.split(".layers.")[1].split(".")[0]) for name in tensors if ".experts." in name}:
            names = [of_expert(tensors, expert, layer) for expert in range(4)]
            for here, there in zip(names, names[1:] + names[:1], strict=True):
                changed |= {a: tensors[b] for a, b in zip(here, there, strict=True)}
        return changed

    def differences() -> tuple[float, float]:
        sequences, sampled = sampler.logps(rows_to_check(sampler, 300, 600), 4)
        reference = Reference(sampler)
        expected = reference.logps(sequences)
        return mean_difference(sampled, expected), mean_difference(reference.logps(sequences, jitter=True), expected)

    right, explained = differences()
    assert right < 4 * explained
    tampered(turned)
    wrong, _ = differences()
    assert wrong > 16 * explained


def test_vllm_and_the_embedded_engine_agree(sampler):
    """Within the bound of the self-check, outside of which is a policy whose experts are others."""
    bound = sampler.check_sync()["sync_check/bound"]
    sequences, sampled = sampler.logps(rows_to_check(sampler, 300, 600), 4)
    other = embedded(sampler.model, "bf16")

    def difference() -> float:
        other.sync()
        rows = zip(other.score(sequences), sampled, strict=True)
        return mean_difference(sampled, [torch.tensor(row[-len(own) :]) for row, own in rows])

    assert difference() < bound
    tensors = [tensor for block in blocks_of(sampler.model).values() for tensor in block.experts.parameters()]
    with torch.no_grad():
        for places in (1, -1):
            for tensor in tensors:
                tensor.copy_(tensor.roll(places, 0))
            assert (difference() > 2 * bound) == (places == 1)


@pytest.mark.parametrize("family", rest_is_long(MIXTURES, "mixtral", "glm4_moe"))
def test_an_adapter_beside_its_base(family, tmp_path):
    """On attention: as a new engine after each sync, and the base's experts are still compared."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = policy(tmp_path / "model", family=family, tied=False)
        model = get_peft_model(model, replace(ATTENTION, init_lora_weights=False))
    sampler, seen = engine(model, "bf16", lora_sync="adapter"), []
    for seed in range(3):
        update(model, seed=seed)
        sampler.sync()
        seen.append(greedy(sampler.llm))
        started = engine(model, "bf16", lora_sync="adapter")
        started.sync()
        assert seen[-1] == greedy(started.llm)
        metrics = sampler.check_sync()
        assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"]
    base = greedy(fresh(model.get_base_model(), "bf16", tmp_path / "base"))
    assert len({str(samples) for samples in [*seen, base]}) == 4 and sampler.differing_weight() is None
    blocks_of(model)[1].experts.down_proj.data[UNREACHED] *= 1.25
    assert sampler.differing_weight() == f"model.layers.1.mlp.experts.down_proj[{UNREACHED}]"


def test_a_reload_packs_experts_again(sampler, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU packs nothing")
    right = greedy(sampler.llm)
    with monkeypatch.context() as patched:
        patched.setattr(worker, "repack_experts", lambda model, reloaded: None)
        sampler.is_current = False
        sampler.sync()
        assert greedy(sampler.llm) != right
        assert "mlp.experts" in sampler.differing_weight()
    sampler.is_current = False
    sampler.sync()
    assert greedy(sampler.llm) == right
    sampler.check_sync()


def test_experts_by_the_names_that_later_versions_report(sampler, monkeypatch):
    """vLLM 0.33 names the module that holds them; whether none were sent is found all the same."""
    load = MoERunner.load_weights

    def load_weights(self, weights):
        names = load(self, weights)
        return {name if name.startswith("routed_experts.") else f"routed_experts.{name}" for name in names}

    monkeypatch.setattr(MoERunner, "load_weights", load_weights)
    sampler.is_current = False
    sampler.sync()
    sampler.check_sync()
    dense = {name: tensor for name, tensor in sampler.stream() if ".experts." not in name}
    with pytest.raises(RuntimeError, match=r"streamed no weights for .*\.experts"):
        sampler.llm.collective_rpc(worker.reload, kwargs={"stream": iter(dense.items())})
    sampler.is_current = False
    sampler.sync()
    sampler.check_sync()


def test_versions_that_were_not_shown_on_a_cpu_are_refused(monkeypatch):
    """0.27 has no kernel object for experts there, and its first sync failed."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    monkeypatch.setattr(support, "vllm_version", lambda: Version("0.30.2"))
    with pytest.raises(ValueError, match=r"'bf16' in vLLM 0\.30\.2, but .* on a CPU from 0\.31 on. Install that"):
        support.check_experts_here("bf16")
    monkeypatch.setattr(support, "vllm_version", lambda: Version("0.31"))
    support.check_experts_here("bf16")


def test_versions_that_leave_the_inputs_of_int8_experts_in_bf16_are_refused(monkeypatch):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(support, "vllm_version", lambda: Version("0.27.1"))
    with pytest.raises(ValueError, match=r"'int8' in vLLM 0\.27\.1, but .* quantizes in this precision from 0\.28 on"):
        support.check_experts_here("int8")
    support.check_experts_here("fp8")
    monkeypatch.setattr(support, "vllm_version", lambda: Version("0.28"))
    support.check_experts_here("int8")


def test_experts_that_vllm_pads_are_refused(tmp_path):
    with pytest.raises(ValueError, match="vLLM pads experts 48 wide to 64"):
        engine(policy(tmp_path, family="qwen3_moe", moe_intermediate_size=48), "bf16")


@pytest.mark.parametrize("peft_config", rest_is_long([ATTENTION, None]), ids=["lora", "full"])
def test_grpo_trains_a_mixture(tmp_path, peft_config):
    args = config(
        QuantGRPOConfig,
        tmp_path / "out",
        **COLOCATED,
        rollout_precision="bf16",
        max_steps=3,
        max_completion_length=16,
        learning_rate=1e-3,
        sync_check_steps=1,
    )
    path = policy(tmp_path / "model", family="qwen3_moe").name_or_path
    trainer = make(QuantGRPOTrainer, args, model=path, peft_config=peft_config)
    keep(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "sync_check/logp_difference" in entry]
    assert len(logged) == 3
    assert all(entry["sync_check/logp_difference"] < entry["sync_check/bound"] for entry in logged)
    trainer.vllm_generation.sync_weights()
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert greedy(trainer.vllm_generation.llm) == greedy(fresh(model, "bf16", tmp_path / "trained"))
