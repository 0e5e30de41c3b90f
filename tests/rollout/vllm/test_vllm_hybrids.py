"""
Hybrids in vLLM: a synced engine has the bits of a fresh one, gates and convolutions keep their type, adapters act on
the projections of linear attention, and the self-check finds a state's parameters that are stale.
"""

import sys
from itertools import product

import pytest
import torch
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from tampering import assert_stale_is_found
from tiny import save_tiny, tiny_model, tiny_tokenizer
from training import config, make
from transformers import AutoModelForCausalLM


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm import LLM
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm_engines import COLOCATED, MEMORY, SMALL, engine, fresh, greedy, keep, policy, require_kernels, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main as command
from trl_quant.config.checks.rule import refusal
from trl_quant.models.linears import linears
from trl_quant.models.names import clean_name
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.vllm import adapter, kernel_checks
from trl_quant.rollout.vllm.attention import check_cpu_kernels
from trl_quant.rollout.vllm.server import serve_command
from trl_quant.rollout.vllm.support import check_architecture, outside_decoder


pytestmark = pytest.mark.vllm
GATE = "model.layers.0.linear_attn.in_proj_ba"
LINEAR = LoraConfig(
    r=4, lora_alpha=16, target_modules=r".*\.(in_proj\w*|out_proj|q_proj|gate_proj)", init_lora_weights=False
)
PROJECTIONS = LoraConfig(r=4, lora_alpha=16, target_modules=["in_proj", "q_proj", "down_proj"], init_lora_weights=False)
# The CPU kernel of vLLM 0.32 gives no states to its prefix cache, and vLLM fails
UNCACHED = {"falcon_h1": {"enable_prefix_caching": False}}
ADAPTERS = {"falcon_h1": PROJECTIONS}  # PEFT adapts none of its `out_proj`


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    """An INT8 engine of Qwen3.5's text, shared by the tests of this file."""
    built = engine(policy(tmp_path_factory.mktemp("qwen3_5"), family="qwen3_5_text", tied=False), "int8")
    built.sync()
    return built


def assert_live_is_fresh(built, model, precision, path, syncs: int, **options) -> None:
    """After each sync the engine has the bits of one that starts on the policy's weights, and it passes its check."""
    seen = []
    for seed in range(syncs):
        update(model, seed=seed)
        built.sync()
        seen.append(greedy(built.llm))
        assert seen[-1] == greedy(fresh(model, precision, path / f"checkpoint-{seed}", **options))
    assert len({str(samples) for samples in seen}) == syncs
    metrics = built.check_sync()
    assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"] / 2
    assert built.differing_weight() is None


def test_three_syncs_leave_the_bits_of_a_fresh_engine(sampler, tmp_path):
    assert_live_is_fresh(sampler, sampler.model, "int8", tmp_path, 3)


def test_vllm_reads_what_prepare_writes(sampler, tmp_path):
    """It starts with the bits of the synced engine: the file names the layers that keep their type."""
    sampler.sync()
    sampler.model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    command(["prepare", "--model", str(tmp_path / "model"), "--format", "int8", "--output", str(tmp_path / "int8")])
    options = {"max_model_len": 512, "max_num_seqs": 8, "logprobs_mode": "processed_logprobs"}
    started = LLM(str(tmp_path / "int8"), dtype="bfloat16", gpu_memory_utilization=MEMORY, **SMALL, **options)
    keep(started)
    assert greedy(started) == greedy(sampler.llm)


@pytest.mark.parametrize(("family", "precision"), rest_is_long([("falcon_h1", "int8"), ("qwen3_next", "bf16")]))
def test_other_hybrids(family, precision, tmp_path):
    model = policy(tmp_path / "model", family=family, tied=False)
    options = UNCACHED.get(family, {})
    sampler = engine(model, precision, engine_kwargs=SMALL | options)
    assert_live_is_fresh(sampler, model, precision, tmp_path, 2, **options)


@pytest.mark.long
def test_a_merged_adapter(tmp_path):
    torch.manual_seed(1)
    model = get_peft_model(policy(tmp_path / "model", family="qwen3_5_text", tied=False), LINEAR)
    assert_live_is_fresh(engine(model, "bf16", lora_sync="merge"), model, "bf16", tmp_path, 3)


@pytest.mark.parametrize("family", rest_is_long(["qwen3_5_text", "falcon_h1"]))
def test_an_adapter_beside_its_base(family, tmp_path):
    """The buffers of vLLM's joined layers hold the adapter of each part, and the engine computes with them."""
    torch.manual_seed(1)
    model = get_peft_model(policy(tmp_path / "model", family=family, tied=False), ADAPTERS.get(family, LINEAR))
    built = engine(model, "bf16", lora_sync="adapter", engine_kwargs=SMALL | UNCACHED.get(family, {}))
    for seed in range(2):
        update(model, seed=seed, size=0.1)
        built.sync()
    metrics = built.check_sync()
    assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"] / 2
    adapted = {clean_name(name): layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    assert len(adapted) == (8 if family == "qwen3_5_text" else 6)
    (held,) = built.llm.apply_model(lambda model: adapter.places(model, adapted))
    for name, layer in adapted.items():
        theirs, parts = held[name]
        sizes = theirs.output_partition_sizes
        product = (theirs.lora_b.float() @ theirs.lora_a.float())[sum(sizes[: parts.start]) : sum(sizes[: parts.stop])]
        expected = layer.get_delta_weight("default").float()
        assert (product - expected).norm() < 1e-2 * expected.norm(), name


@pytest.mark.parametrize("part", ["A_log", "dt_bias", "conv1d.weight", "in_proj_b.weight", "linear_attn.norm.weight"])
def test_a_stale_part_of_linear_attention_is_found(sampler, part):
    """INT8 on some CPUs is so coarse that a text says nothing of one of them. Its bits do."""
    assert_stale_is_found(sampler, part)


def test_a_stale_part_of_mamba_is_found(tmp_path):
    """Of Falcon-H1. A CPU may pack the convolution's weights, and vLLM holds A, not the policy's logarithm of -A."""
    built = engine(
        policy(tmp_path, family="falcon_h1", tied=False), "int8", engine_kwargs=SMALL | UNCACHED["falcon_h1"]
    )
    built.sync()
    for part in ("conv1d.weight", "A_log", "D", "dt_bias"):
        assert_stale_is_found(built, f"layers.0.mamba.{part}")


def test_gates_and_convolutions_keep_their_type(sampler, monkeypatch):
    (layers,) = sampler.llm.apply_model(adapter.linear_layers)
    kept = {name for name, layer in layers.items() if type(layer.quant_method).__name__ == "UnquantizedLinearMethod"}
    assert kept == {GATE, "model.layers.0.linear_attn.conv1d"}
    names = list(linears(sampler.model))

    def check(precision):
        return sampler.llm.apply_model(lambda model: kernel_checks.check_kernels(model, precision, names))

    check("int8")
    qkvz = layers["model.layers.0.linear_attn.in_proj_qkvz"]
    with monkeypatch.context() as patch:
        patch.setattr(layers[GATE], "quant_method", qkvz.quant_method)
        patch.setattr(layers[GATE], "scheme", qkvz.scheme, raising=False)
        with pytest.raises(RuntimeError, match=r"without its routers and gates.* 1 linear layers.*in_proj_ba"):
            check("int8")
    with monkeypatch.context() as patch:
        patch.setattr(qkvz, "quant_method", layers[GATE].quant_method)
        patch.delattr(qkvz, "scheme")
        with pytest.raises(RuntimeError, match=r"1 linear layers run otherwise.*in_proj_qkvz"):
            check("int8")


def test_vllm_is_told_which_layers_to_leave(sampler):
    """vLLM's own reading of the patterns, by its names, for precisions in which it quantizes by itself."""
    patterns = outside_decoder(sampler.model, ["Qwen3_5ForCausalLM"], "auto")
    fused = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"], "in_proj_ba": ["in_proj_b", "in_proj_a"]}
    for name, is_left in ((GATE, True), (GATE.replace("ba", "qkvz"), False), ("lm_head", True)):
        assert should_ignore_layer(name, patterns, fused) == is_left
    assert not should_ignore_layer("model.layers.1.mlp.gate_up_proj", patterns)
    command = serve_command("model", "fp8", outside=patterns)
    assert "in_proj_(a|b|ba)" in command and "--quantization-config" in command
    assert outside_decoder(tiny_model("qwen3"), ["Qwen3ForCausalLM"], "auto") == []


def test_parts_of_the_joined_projection(sampler):
    """q, k and v of linear attention are one layer in the policy, and three parts of vLLM's."""
    (model,) = sampler.llm.apply_model(lambda model: model)
    prefix = "model.layers.0.linear_attn"
    found = adapter.places(
        model, [f"{prefix}.{leaf}" for leaf in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")]
    )
    assert [(layer.prefix.rpartition(".")[2], parts) for layer, parts in found.values()] == [
        ("in_proj_qkvz", range(3)),
        ("in_proj_qkvz", range(3, 4)),
        ("in_proj_ba", range(1)),
        ("in_proj_ba", range(1, 2)),
    ]


def test_noise_on_a_hybrid(sampler):
    clean = greedy(sampler.llm)
    sampler.lay_noise(RolloutNoise(0.1, 3, 7))
    noisy = greedy(sampler.llm)
    sampler.lay_noise(RolloutNoise())
    assert noisy != clean and greedy(sampler.llm) == clean


def test_grpo_trains_a_hybrid(tmp_path):
    args = config(
        QuantGRPOConfig,
        tmp_path / "out",
        **COLOCATED,
        rollout_precision="bf16",
        max_steps=2,
        max_completion_length=16,
        learning_rate=1e-3,
    )
    given = policy(tmp_path / "model", family="qwen3_5_text")
    require_kernels(given)
    trainer = make(QuantGRPOTrainer, args, model=given.name_or_path)
    keep(trainer)
    trainer.train()
    logged = [entry["mismatch/abs_logp_diff"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2 and 0 < max(logged) < 0.05  # the trainer computes in FP32
    trainer.vllm_generation.sync_weights()
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert greedy(trainer.vllm_generation.llm) == greedy(fresh(model, "bf16", tmp_path / "trained"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    name = "vllm.model_executor.models.falcon_h1"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path, "falcon_h1")).config
    assert refusal(check_architecture, found, "auto") is None
    monkeypatch.setitem(sys.modules, name, None)
    assert "vLLM cannot load its FalconH1ForCausalLM: " in refusal(check_architecture, found, "auto")
    assert refusal(check_architecture, found, "transformers") is None


@pytest.mark.parametrize(("sizes", "wrong"), [((64, 64), None), ((128, 128), None), ((32, 32), 32), ((64, 96), 96)])
def test_heads_that_vllms_cpu_kernel_lacks_are_refused(sizes, wrong, monkeypatch):
    """Before the start: the kernel says so at the first sample."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    model = tiny_model("qwen3_5_text", linear_key_head_dim=sizes[0], linear_value_head_dim=sizes[1])
    said = refusal(check_cpu_kernels, model.config)
    assert (said is None) == (wrong is None)
    if wrong is not None:
        assert f"heads of linear attention have {wrong} dimensions; on a CPU vLLM has kernels for 64, 128" in said


def test_a_cpu_whose_kernels_of_linear_attention_fail_is_refused(monkeypatch, tmp_path):
    """vLLM's kernels for products of BF16 in AVX-512 take AMX's tiles there, too, and crash without them."""
    for packs, tiles in product((True, False), repeat=2):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda packs=packs: packs)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        for family in ("qwen3_5_text", "qwen3_next", "falcon_h1", "qwen3"):
            said = refusal(check_cpu_kernels, tiny_model(family).config)
            fails = family in ("qwen3_5_text", "qwen3_next") and packs and not tiles
            assert (said is not None) == fails, (family, packs, tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    args = config(QuantGRPOConfig, tmp_path / "out", **COLOCATED, rollout_precision="bf16")
    with pytest.raises(ValueError, match="no AMX, where vLLM cannot compute the policy's linear attention"):
        make(QuantGRPOTrainer, args, model=policy(tmp_path / "model", family="qwen3_5_text").name_or_path)
