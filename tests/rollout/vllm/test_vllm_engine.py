"""Our vLLM engine against vLLM's own engines, started on checkpoints of the same weights."""

import copy
import json

import pytest
import torch
from accelerate import Accelerator
from drawing import generated
from long_tests import rest_is_long
from tiny import tiny_tokenizer


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm import _custom_ops as ops
from vllm_engines import SMALL, engine, fp8_block_anywhere, fresh, greedy, policy, update

from trl_quant.models.linears import linears
from trl_quant.noise import norm_noise
from trl_quant.rollout import RolloutNoise, TransformersEngine, VLLMEngine
from trl_quant.rollout.vllm.adapter import linear_layers
from trl_quant.rollout.vllm.kernel_checks import check_kernels
from trl_quant.rollout.vllm.support import VLLM_VERSIONS
from trl_quant.storage.layout import quantize_checkpoint


NORMS = ("input_layernorm", "post_attention_layernorm")
pytestmark = pytest.mark.vllm


# Each pair of a precision, tied or untied embeddings, and with or without an adapter to merge
@pytest.mark.parametrize(
    ("precision", "tied", "with_lora"),
    rest_is_long(
        [
            *(("bf16", True, False), ("bf16", False, True)),
            *(("int8", True, True), ("int8", False, False)),
            *(("fp8_block", True, False), ("fp8_block", False, True)),
        ],
        *(("bf16", False, True), ("int8", True, True), ("fp8_block", True, False)),
    ),
)
def test_every_sync_equals_a_fresh_engine(tmp_path, precision, tied, with_lora, monkeypatch):
    if precision == "fp8_block":
        fp8_block_anywhere(monkeypatch)
    model = policy(tmp_path / "policy", with_lora, tied=tied)
    sampler = engine(model, precision)
    seen = []
    for step in range(3):
        update(model, seed=step)
        sampler.sync()
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(model, precision, tmp_path / f"step-{step}"))
    assert seen[0] != seen[1] != seen[2]


def test_noise_equals_the_embedded_engines_and_comes_off(tmp_path):
    model = policy(tmp_path / "policy", tied=False)
    sampler = engine(model, "bf16")
    sampler.sync()
    clean = greedy(sampler.llm)

    noise = RolloutNoise(sigma=0.05, seed=3, step=7)
    noised = copy.deepcopy(model)
    for name, param in noised.named_parameters():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            param.data = norm_noise(param.data, 0.05, 3, 7, name)
    expected = greedy(fresh(noised, "bf16", tmp_path / "noised"))
    for _ in range(2):  # noise does not accumulate
        sampler.noise = noise
        generated(sampler, [[1, 2, 3]])
        assert greedy(sampler.llm) == expected != clean
    sampler.noise = RolloutNoise(sigma=0.05, seed=3, step=8)
    generated(sampler, [[1, 2, 3]])
    assert greedy(sampler.llm) != expected
    sampler.noise = RolloutNoise()
    generated(sampler, [[1, 2, 3]])
    assert greedy(sampler.llm) == clean
    sampler.noise = noise
    generated(sampler, [[1, 2, 3]])
    sampler.sync()  # a sync brings clean weights; noise returns before the next samples
    assert greedy(sampler.llm) == clean
    generated(sampler, [[1, 2, 3]])
    assert greedy(sampler.llm) == expected


def test_noise_counts_its_norms(tmp_path, monkeypatch):
    sampler = engine(policy(tmp_path / "policy"), "bf16")
    sampler.noise = RolloutNoise(sigma=0.05)
    few = [f"model.layers.0.{n}.weight" for n in NORMS]
    monkeypatch.setattr("trl_quant.rollout.base.noised_norms", lambda model_type, names: few)
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        generated(sampler, [[1, 2, 3]])


def test_onednn_keeps_the_scales_it_points_to(tmp_path, monkeypatch):
    """Without AMX, oneDNN reads the scale at its original address: that tensor must survive the reload."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    given = []
    create = ops.create_onednn_scaled_mm
    monkeypatch.setattr(ops, "create_onednn_scaled_mm", lambda w, s, *a: given.append(s.data_ptr()) or create(w, s, *a))
    model = policy(tmp_path / "policy")
    sampler = engine(model, "int8")
    for step in range(2):
        update(model, seed=step)
        given.clear()
        sampler.sync()
        kept = sampler.llm.apply_model(
            lambda m: [x.scheme.kernel.kept_scale.data_ptr() for x in linear_layers(m).values()]
        )
        assert sorted(given) == sorted(kept[0])
        assert greedy(sampler.llm) == greedy(fresh(model, "int8", tmp_path / str(step)))


def test_tensors_beside_the_parameters_stay_where_they_are(tmp_path, monkeypatch):
    """Like the locks of Marlin's kernels, which CUDA graphs read and vLLM makes anew at every reload."""
    sampler = engine(policy(tmp_path / "policy"), "bf16")
    layers = sampler.llm.apply_model(lambda model: list(linear_layers(model).values()))[0]
    method = layers[0].quant_method
    process = type(method).process_weights_after_loading

    def with_locks(self, layer):
        process(self, layer)
        layer.locks = torch.zeros(4)

    monkeypatch.setattr(type(method), "process_weights_after_loading", with_locks)
    for layer in layers:
        layer.locks = torch.ones(4)
    locks = [layer.locks for layer in layers]
    sampler.sync()
    assert all(layer.locks is lock for layer, lock in zip(layers, locks, strict=True))
    assert not torch.stack(locks).any()


def test_metrics_equal_the_embedded_engines(tmp_path):
    model = policy(tmp_path / "policy")
    engines = [
        engine(model, "int8"),
        TransformersEngine(model, Accelerator(cpu=True), tiny_tokenizer(), precision="int8", max_completion_length=4),
    ]
    for step in range(2):
        update(model, seed=step)
        for sampler in engines:
            sampler.sync()
        ours, theirs = (sampler.sync_metrics for sampler in engines)
        assert ours == pytest.approx(theirs) and len(ours) == (1, 5)[step]
        assert 0.003 < ours["weights/normalized_quantization_error"] < 0.02


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_failed_reload_names_the_tensor_and_ends_the_engine(tmp_path, precision, monkeypatch):
    model = policy(tmp_path / "policy")
    sampler = engine(model, precision)
    sampler.sync()
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data[3, 4] = float("nan")
    if precision == "bf16":  # BF16 accepts any number
        monkeypatch.setattr(sampler, "policy_stream", lambda *_: broken(model))
    with pytest.raises(RuntimeError, match=r"failed at `model.layers.1.mlp.up_proj.weight`.*cannot be used any more"):
        sampler.sync()
    weight.data[3, 4] = 0.0
    monkeypatch.undo()
    for use in (sampler.sync, sampler.check_sync, lambda: generated(sampler, [[1, 2, 3]])):
        with pytest.raises(RuntimeError, match="cannot be used any more"):
            use()


def test_nonfinite_weights_are_reported_after_the_reload(tmp_path, monkeypatch):
    """As on a GPU, where the next layer does not wait for a layer's check."""
    monkeypatch.setattr(VLLMEngine, "on_cpu", False)
    model = policy(tmp_path / "policy")
    sampler = engine(model, "int8")
    sampler.sync()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("inf")
    with pytest.raises(RuntimeError, match=r"failed at `model.layers.1.mlp.up_proj.weight`: it holds NaN or infinity"):
        sampler.sync()
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        generated(sampler, [[1, 2, 3]])


def broken(model):
    for name, param in model.named_parameters():
        if name == "model.layers.1.mlp.up_proj.weight":
            raise OSError("the network went away")
        yield name, param.data
        if name == "model.layers.1.mlp.gate_proj.weight":
            yield "model.layers.1.mlp.up_proj.weight", torch.zeros(3, 3)


def test_incomplete_stream(tmp_path, monkeypatch):
    model = policy(tmp_path / "policy")
    sampler = engine(model, "int8")
    names = [(n, p.data) for n, p in model.named_parameters() if "layers.1.post_attention_layernorm" not in n]
    monkeypatch.setattr(sampler, "policy_stream", lambda *_: iter(names))
    with pytest.raises(RuntimeError, match=r"no weights for model.layers.1.post_attention_layernorm"):
        sampler.sync()


def test_prepared_checkpoint_is_used_as_it_is(tmp_path):
    model = policy(tmp_path / "policy")
    prepared = quantize_checkpoint(tmp_path / "policy", tmp_path / "prepared", "int8")
    expected = greedy(fresh(model, "int8", tmp_path / "fresh"))
    model.name_or_path = str(prepared)
    sampler = engine(model, "int8")
    assert greedy(sampler.llm) == expected  # before any sync
    update(model, seed=0)
    sampler.sync()
    assert greedy(sampler.llm) == greedy(fresh(model, "int8", tmp_path / "updated"))
    with pytest.raises(ValueError, match=r"rollout_precision.*'bf16'.*quantized to 'int8'"):
        engine(model, "bf16")


def test_starts_with_the_checkpoints_weights(tmp_path):
    model = policy(tmp_path / "policy")
    assert greedy(engine(model, "int8").llm) == greedy(fresh(model, "int8", tmp_path / "fresh"))


def test_wrong_kernels_are_refused(tmp_path):
    sampler = engine(policy(tmp_path / "policy"), "bf16")
    layers = list(linears(sampler.model))
    with pytest.raises(RuntimeError, match=r"'int8'.*8 linear layers.*qkv_proj: UnquantizedLinearMethod.*W8A8Int8"):
        sampler.llm.apply_model(lambda model: check_kernels(model, "int8", layers))
    kernels = sampler.llm.apply_model(lambda model: check_kernels(model, "bf16", layers))
    assert kernels == ["8 x UnquantizedLinearMethod"]
    # vLLM accepts this as a quantization, but it leaves dense models alone
    quiet = fresh(policy(tmp_path / "quiet"), "bf16", tmp_path / "q", quantization="int8_per_channel_weight_only")
    with pytest.raises(RuntimeError, match="8 linear layers"):
        quiet.apply_model(lambda model: check_kernels(model, "int8", layers))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "nvfp4"}, ["nvfp4", "CPU", "'int8'", "use_vllm=False"]),
        ({"precision": "fp8"}, ["fp8", "CPU", "'bf16'", "use_vllm=False"]),
        ({"enable_sleep_mode": True}, ["vllm_enable_sleep_mode", "CPU", "kv_cache_memory_bytes"]),
        ({"lora_sync": "adapter"}, ["lora_sync", "peft_config", "merge"]),
        (
            {"max_model_length": 2048, "engine_kwargs": {**SMALL, "kv_cache_memory_bytes": 1 << 19}},
            ["memory", "vllm_max"],
        ),
    ],
)
def test_refusals(tmp_path, options, words):
    with pytest.raises(ValueError) as refusal:
        engine(policy(tmp_path / "policy"), **{"precision": "bf16"} | options)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_other_versions_are_refused(tmp_path, monkeypatch):
    model = policy(tmp_path / "policy")
    lowest, above = VLLM_VERSIONS
    major, minor = map(int, lowest.split("."))
    for version in (f"{major}.{minor - 1}.1", f"{above}.0"):
        monkeypatch.setattr("vllm.__version__", version)
        with pytest.raises(ImportError, match=rf"vLLM {version} is installed.*>= {lowest}, < {above}"):
            engine(model, "bf16")


def test_unknown_architecture_is_refused(tmp_path):
    model = policy(tmp_path / "policy")
    config = json.loads((tmp_path / "policy/config.json").read_text())
    (tmp_path / "policy/config.json").write_text(json.dumps(config | {"architectures": ["NobodysForCausalLM"]}))
    with pytest.raises(ValueError, match=r"NobodysForCausalLM.*use_vllm=False"):
        engine(model, "bf16")
