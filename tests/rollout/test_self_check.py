"""The self-check passes correct engines and names the fault of each broken one."""

import json
from functools import partial

import pytest
import torch
from drawing import generated
from long_tests import rest_is_long
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from vllm_engines import FP8_CACHE, SMALL, engine, fp8_block_anywhere, policy, set_scale, unrounded, update

from trl_quant.layers import quantized
from trl_quant.rollout.verify import kv_cache, rows, self_check
from trl_quant.rollout.vllm import worker
from trl_quant.rollout.vllm.adapter import linear_layers
from trl_quant.rollout.weights import PolicyWeights
from trl_quant.storage.layout import quantize_checkpoint


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """Engines synced with an updated policy since their last check. Whatever a test breaks, a sync repairs."""
    built = {}

    def get(precision="int8", lora_sync=None, dtype=torch.bfloat16, cache="auto", family="qwen3"):
        if cache != "auto" and not FP8_CACHE:
            pytest.skip("vLLM keeps no FP8 KV cache on a CPU without AVX-512")
        key = precision, lora_sync, dtype, cache, family
        if key not in built:
            path, with_lora = tmp_path_factory.mktemp("policy"), lora_sync is not None
            model = policy(path, with_lora=with_lora, dtype=dtype, family=family)
            options = {"engine_kwargs": SMALL | {"kv_cache_dtype": cache}, "sync_check_steps": 50}
            built[key] = engine(model, precision, lora_sync=lora_sync or "merge", **options)
        sampler = built[key]
        sampler.sync()
        sampler.check_sync()
        update(sampler.model, seed=1, size=0.005)
        sampler.sync()
        return sampler

    return get


@pytest.mark.parametrize(
    ("lora_sync", "dtype"),
    rest_is_long(
        [(None, torch.bfloat16), (None, torch.float32), ("merge", torch.float32), ("adapter", torch.bfloat16)],
    ),
)
@pytest.mark.parametrize("precision", rest_is_long(["bf16", "int8", "fp8_block"], "bf16", "int8"))
def test_a_right_engine_passes(synced, precision, dtype, lora_sync, monkeypatch):
    if precision == "fp8_block":
        fp8_block_anywhere(monkeypatch)
    found = synced(precision, lora_sync, dtype).check_sync()
    assert 0 < found["sync_check/logp_difference"] < 0.75 * found["sync_check/bound"]
    # In these models a zeroed layer or a missing adapter makes a difference of about 1 nat.
    assert found["sync_check/bound"] < {"bf16": 0.1, "fp8_block": 0.1, "int8": 0.7}[precision]


@pytest.mark.parametrize(("lora_sync", "dtype"), rest_is_long([("adapter", torch.bfloat16), ("merge", torch.float32)]))
def test_the_reference_quantizes_what_the_engine_quantized(synced, monkeypatch, lora_sync, dtype):
    """An FP32 policy as it is; with an adapter, the BF16 checkpoint. Without autocast, which changes bits on CUDA."""
    sampler = synced("int8", lora_sync, torch.float32)
    seen, quantize = set(), quantized.quantize

    def remember(weight, precision):
        seen.add((weight.dtype, torch.is_autocast_enabled("cpu")))
        return quantize(weight, precision)

    monkeypatch.setattr(quantized, "quantize", remember)
    sampler.check_sync()
    assert seen == {(dtype, False)}


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_a_quantized_cache(synced, cache, precision, family):
    """As near to the policy as with a cache in BF16, over several syncs; a reference that forgets the cache is not."""
    sampler = synced(precision, cache=cache, family=family)
    assert sorted(sampler.caches) == [0, 1] and sampler.caches[1].format == cache
    for step in range(3):
        update(sampler.model, seed=step, size=0.005)
        sampler.sync()
        found = sampler.check_sync()
        assert found["sync_check/logp_difference"] < (0.2 if precision == "bf16" else 0.7) * found["sync_check/bound"]
    if precision == "bf16":
        assert unrounded(sampler) > 3 * found["sync_check/logp_difference"]


def test_an_ordinary_cache_is_left_alone(synced, monkeypatch):
    sampler = synced("bf16")
    assert sampler.caches == {}
    monkeypatch.setattr(kv_cache, "ALL_ATTENTION_FUNCTIONS", None)
    monkeypatch.setattr(sampler, "read_caches", None)
    sampler.check_sync()


@pytest.mark.parametrize("name", ["_q_scale", "_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float"])
@pytest.mark.parametrize(("precision", "lora_sync"), [("bf16", None), ("int8", None), ("int8", "adapter")])
def test_a_scale_of_the_cache_that_is_stale(synced, precision, lora_sync, name):
    """A reload makes those of a BF16 engine anew, and leaves those of one in compressed-tensors' layout."""
    sampler = synced(precision, lora_sync, cache="fp8")
    set_scale(sampler, name, 4.0)
    stale = f"stale: in layer 1 the KV cache's `{name}` is 4, a fresh engine's 1"
    with pytest.raises(RuntimeError, match=stale):
        sampler.check_sync()
    sampler.sync()
    if precision == "int8":
        with pytest.raises(RuntimeError, match=stale):
            sampler.check_sync()
        set_scale(sampler, name, 1.0)
    sampler.check_sync()


def test_a_cache_that_cannot_be_computed(synced):
    sampler = synced("bf16", cache="fp8")

    def set_format(format):
        sampler.llm.apply_model(lambda model: setattr(model.model.layers[1].self_attn.attn, "kv_cache_dtype", format))

    set_format("fp8_per_token_head")
    try:
        with pytest.raises(
            ValueError, match=r"model.layers.1.self_attn.attn \(Attention, 'kv_cache_dtype'='fp8_per_tok"
        ):
            sampler.read_caches()
    finally:
        set_format("fp8")
    sampler.check_sync()


def test_stale_weights_under_a_quantized_cache(synced):
    sampler = synced("bf16", cache="fp8")
    update(sampler.model, seed=2, size=1e-3)
    with pytest.raises(RuntimeError, match="stale: the policy has moved"):
        sampler.check_sync()
    sampler.sync()
    sampler.llm.apply_model(lambda model: model.model.layers[1].post_attention_layernorm.weight.data.zero_())
    sampler.llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()


@pytest.mark.skipif(not FP8_CACHE, reason="vLLM keeps no FP8 KV cache on a CPU without AVX-512")
def test_scales_of_the_checkpoint(tmp_path):
    """
    They stay through syncs, and the reference computes with them. Divided by 100 keys and values are so small that FP8
    rounds them more coarsely: more than INT8 products are off on CPUs without VNNI.
    """
    model = policy(tmp_path / "policy")
    prepared = quantize_checkpoint(tmp_path / "policy", tmp_path / "prepared", "int8")
    (file,) = prepared.glob("*.safetensors")
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([100.0 + i]) for i in range(2) for x in "kv"}
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    config = json.loads((prepared / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (prepared / "config.json").write_text(json.dumps(config))
    sampler = engine(model, "int8", engine_kwargs=SMALL | {"model": str(prepared)})
    for step in range(2):
        update(model, seed=step, size=0.005)
        sampler.sync()
        found = sampler.check_sync()
    held = [sampler.caches[i].scales["_v_scale_float"] for i in (0, 1)]
    assert held == pytest.approx([100, 101])
    set_scale(sampler, "_v_scale_float", 1.0)
    with pytest.raises(RuntimeError, match=r"layer 1 the KV cache's `_v_scale_float` is 1, a fresh engine's 101"):
        sampler.check_sync()
    set_scale(sampler, "_v_scale_float", held[1])
    sequences, sampled = sampler.logps(rows.check_sequences(sampler.tokenizer, 288), 4)
    for cache in sampler.caches.values():
        cache.scales.update(dict.fromkeys(cache.scales, 1.0))
    reference = self_check.Reference(sampler).logps(sequences)
    assert self_check.mean_difference(sampled, reference) > 1.2 * found["sync_check/logp_difference"]


def test_skipped_sync(synced):
    sampler = synced()
    update(sampler.model, seed=2, size=1e-3)  # far below the format's resolution
    with pytest.raises(RuntimeError, match="stale: the policy has moved"):
        sampler.check_sync()
    sampler.sync()
    sampler.check_sync()


def test_skipped_adapter(synced):
    sampler = synced(lora_sync="adapter")
    update(sampler.model, seed=2, size=1e-3)
    with pytest.raises(RuntimeError, match="stale: the policy has moved"):
        sampler.check_sync()
    sampler.sync()
    sampler.check_sync()


# What is not quantized: embeddings, norms, the head, biases


@pytest.fixture(scope="module")
def noised(tmp_path_factory):
    """An engine that holds its norms in FP32, so that it can hold a small edit of one; its policy in FP32."""
    return engine(policy(tmp_path_factory.mktemp("policy"), dtype=torch.float32), "int8", wide_norms=True)


NORM, EMBEDDINGS = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"


def nudged(weight: torch.Tensor) -> torch.Tensor:
    """A norm in FP32 1e-4 of itself larger; else one number of a norm, or of one row of embeddings, one step larger."""
    if weight.ndim == 1 and weight.dtype == torch.float32:
        return weight * (1 + 1e-4)
    other = weight.clone()
    row = other if weight.ndim == 1 else other[7]
    row[3] *= 1 + (2**-7 if weight.dtype == torch.bfloat16 else 1e-4)
    assert 0 < (other - weight).norm() < 3e-3 * weight.norm()
    return other


def passes_without(sampler, monkeypatch) -> bool:
    """Whether the check finds nothing where it looks at linear layers and log-probabilities alone."""
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "is_stale", lambda: False)
        patched.setattr(sampler, "differing_weight", lambda: None)
        return sampler.check_sync()["sync_check/logp_difference"] > 0


@pytest.mark.parametrize("name", rest_is_long([EMBEDDINGS, NORM]))
def test_a_small_edit_in_the_engine(noised, monkeypatch, name):
    noised.sync()
    noised.check_sync()
    (held,) = noised.llm.apply_model(partial(worker.parameters, names=[name]))
    noised.llm.apply_model(partial(worker.write_parameters, values={name: nudged(held[name])}))
    noised.llm.reset_prefix_cache()
    assert passes_without(noised, monkeypatch)
    with pytest.raises(RuntimeError, match=f"corrupted: the engine holds another `{name}` than the policy"):
        noised.check_sync()
    noised.sync()
    noised.check_sync()


@pytest.mark.parametrize("name", rest_is_long([NORM, EMBEDDINGS]))
@pytest.mark.parametrize("data", rest_is_long([False, True], True), ids=["counted", "data"])
def test_a_small_edit_in_the_policy(noised, monkeypatch, name, data):
    noised.sync()
    param = noised.model.get_parameter(name)
    before = param.detach().clone()
    with torch.no_grad():
        (param.data if data else param).copy_(nudged(param))
    assert passes_without(noised, monkeypatch)
    with pytest.raises(RuntimeError, match="stale: the policy's weights or adapters have changed since the last sync"):
        noised.check_sync()
    with torch.no_grad():
        param.copy_(before)
    noised.check_sync()


@pytest.mark.parametrize("name", [NORM, EMBEDDINGS])
def test_a_stream_that_brings_an_old_weight(noised, monkeypatch, name):
    old = noised.model.get_parameter(name).detach().clone()
    update(noised.model, seed=4, size=1e-3)
    stream = noised.policy_stream
    with monkeypatch.context() as patched:
        patched.setattr(noised, "policy_stream", lambda *_: ((n, old if n == name else t) for n, t in stream()))
        noised.sync()
    assert passes_without(noised, monkeypatch)
    with pytest.raises(RuntimeError, match=f"corrupted: the engine holds another `{name}` than the policy"):
        noised.check_sync()
    noised.sync()
    noised.check_sync()


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen2", False), ("gemma3", True), ("phi3", False)])
def test_all_that_is_not_quantized_is_compared(tmp_path, family, tied):
    """Each such weight of vLLM's model, by the policy's name of it: one number of it one step off."""
    model = policy(tmp_path, family=family, tied=tied, dtype=torch.float32)
    sampler = engine(model, "int8")
    update(model, seed=1)
    sampler.sync()
    assert sampler.differing_weight() is None
    own = dict(model.named_parameters())
    (names,) = sampler.llm.apply_model(worker.parameter_names)
    fused = [name for name in names if name.endswith("qkv_proj.bias")]
    plain = [name for name in names if name in own and (own[name].ndim == 1 or "proj" not in name)]
    assert len(plain) == len([n for n in own if "proj" not in n]) and len(fused) == 2 * (family == "qwen2")
    for name in plain + fused:
        (held,) = sampler.llm.apply_model(partial(worker.parameters, names=[name]))
        other = held[name].clone()
        other.view(-1)[5] *= 1 + 2**-7
        sampler.llm.apply_model(partial(worker.write_parameters, values={name: other}))
        assert sampler.differing_weight() == name.replace("qkv_proj", "q_proj")
        sampler.llm.apply_model(partial(worker.write_parameters, values=held))
    assert sampler.differing_weight() is None


@pytest.mark.parametrize("name", rest_is_long([NORM, EMBEDDINGS]))
def test_a_small_edit_beside_an_adapter(synced, name):
    """The base does not travel; the check compares it nevertheless."""
    sampler = synced("int8", "adapter")
    param = sampler.weights.base_model.get_parameter(name)
    before = param.detach().clone()
    (held,) = sampler.llm.apply_model(partial(worker.parameters, names=[name]))
    sampler.llm.apply_model(partial(worker.write_parameters, values={name: nudged(held[name])}))
    with pytest.raises(RuntimeError, match=f"corrupted: the engine holds another `{name}` than the policy"):
        sampler.check_sync()
    sampler.llm.apply_model(partial(worker.write_parameters, values=held))
    sampler.check_sync()
    param.data.copy_(nudged(before))
    with pytest.raises(RuntimeError, match="stale: the policy's weights or adapters have changed"):
        sampler.check_sync()
    with pytest.raises(ValueError, match=f"`lora_sync`='adapter' sends only the adapter, but the policy's `{name}`"):
        sampler.sync()
    param.data.copy_(before)
    sampler.sync()
    sampler.check_sync()


# Faults of a sync


def test_weights_of_the_last_step(synced, monkeypatch):
    sampler = synced()
    old = [(name, tensor.clone()) for name, tensor in sampler.policy_stream()]
    update(sampler.model, seed=2, size=1e-3)
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "policy_stream", lambda *_: iter(old))
        sampler.sync()
    with pytest.raises(RuntimeError, match="stale: the policy has moved"):
        sampler.check_sync()


def test_reload_that_changes_nothing(synced, monkeypatch):
    sampler = synced()
    sampler.check_sync()
    update(sampler.model, seed=2, size=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(sampler.llm, "collective_rpc", lambda function, kwargs: list(kwargs["stream"]))
        sampler.sync()
    with pytest.raises(RuntimeError, match="stale: the engine computes the same as before"):
        sampler.check_sync()


@pytest.mark.parametrize(
    ("precision", "layer"),
    rest_is_long(
        [("bf16", "mlp.gate_up_proj"), ("int8", "self_attn.o_proj"), ("int8", "post_attention_layernorm")],
        *(("bf16", "mlp.gate_up_proj"), ("int8", "self_attn.o_proj")),
    ),
)
def test_zeroed_layer(synced, precision, layer):
    sampler, handles = synced(precision), []

    def zero(model):
        module = model.get_submodule(f"model.layers.1.{layer}")
        if hasattr(module, "quant_method"):  # vLLM may pack weights anywhere: zero the output
            handles.append(module.register_forward_hook(lambda module, args, output: (output[0] * 0, output[1])))
        else:
            module.weight.zero_()

    sampler.llm.apply_model(torch.no_grad()(zero))
    sampler.llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()
    for handle in handles:
        handle.remove()


def test_not_a_number(synced):
    sampler = synced()
    sampler.llm.apply_model(lambda model: model.model.norm.weight.data.fill_(float("nan")))
    with pytest.raises((RuntimeError, ValueError)) as error:
        sampler.check_sync()
    assert "policy itself" not in str(error.value)


@pytest.mark.parametrize("jitter", [False, True])
def test_a_reference_that_is_no_number_bounds_nothing(synced, monkeypatch, jitter):
    """One of its log-probabilities, with finite weights: the bound would be infinite too."""
    sampler, logps = synced(), self_check.Reference.logps

    def overflowing(self, *args, **given):
        rows = logps(self, *args, **given)
        if given.get("jitter", False) == jitter:
            rows[0][3] = torch.nan
        return rows

    sampler.check_sync()
    monkeypatch.setattr(self_check.Reference, "logps", overflowing)
    with pytest.raises(RuntimeError, match="a log-probability of the engine, or of the policy in its format, is not f"):
        sampler.check_sync()


def test_a_policy_that_is_no_number_is_not_the_engines_fault(synced):
    sampler = synced("bf16")
    weight = sampler.model.get_parameter("model.layers.1.post_attention_layernorm.weight")
    clean = weight.data.clone()
    try:
        weight.data[2] = float("nan")
        sampler.sync()
        with pytest.raises(
            RuntimeError, match=r"The policy itself is broken, not the engine: its `model\.layers\.1\.post_a"
        ):
            sampler.check_sync()
    finally:
        weight.data.copy_(clean)
    sampler.sync()
    sampler.check_sync()


@pytest.mark.long
def test_adapter_not_applied(synced):
    sampler = synced(lora_sync="adapter")

    def forget(model):
        for layer in linear_layers(model).values():
            layer.lora_b.zero_()

    sampler.llm.apply_model(torch.no_grad()(forget))
    sampler.llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="base-only"):
        sampler.check_sync()


@pytest.mark.long
def test_adapter_not_merged(synced, monkeypatch):
    sampler = synced(lora_sync="merge")
    with monkeypatch.context() as patched:
        patched.setattr(sampler.weights, "merged", lambda layer: dict(layer.get_base_layer().named_parameters()))
        sampler.sync()
        sampler.drift.forget()  # its bookkeeping would also notice
    with pytest.raises(RuntimeError, match="base-only"):
        sampler.check_sync()


def test_wrong_adapter(synced, monkeypatch):
    sampler = synced(lora_sync="adapter")
    right = sampler.weights.adapter
    with monkeypatch.context() as patched:
        patched.setattr(sampler.weights, "adapter", lambda: {name: t.flip(0) for name, t in right().items()})
        sampler.sync()
    sampler.pushed = right()
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()


def test_prefix_cache_not_reset(synced, monkeypatch):
    sampler = synced()
    sampler.check_sync()
    update(sampler.model, seed=2, size=1e-3)
    with monkeypatch.context() as patched:
        patched.setattr(sampler.llm, "reset_prefix_cache", lambda: True)
        sampler.sync()
    with pytest.raises(RuntimeError, match="stale: the prefix cache"):
        sampler.check_sync()


def test_when_it_runs(tmp_path, monkeypatch):
    """After the first sync, then every `sync_check_steps` syncs, regardless of sampling; never with 0."""
    sampler = engine(policy(tmp_path), "bf16", sync_check_steps=3)
    quick_or_not = []
    check = sampler.check_sync
    monkeypatch.setattr(sampler, "check_sync", lambda quick=False: quick_or_not.append(quick) or check(quick))
    seen = []
    for _ in range(7):
        sampler.sync()
        for _ in range(2):
            generated(sampler, [[1, 2, 3]])
        seen.append(len(quick_or_not))
    assert seen == [1, 1, 1, 2, 2, 2, 3]
    sampler.sync_check_steps = 0
    sampler.sync()
    generated(sampler, [[1, 2, 3]])
    assert len(quick_or_not) == 3 and not any(quick_or_not)


def test_it_leaves_the_policy_as_it_was(synced):
    sampler = synced(lora_sync="merge")
    sampler.model.train()
    before = {name: p.clone() for name, p in sampler.model.named_parameters()}
    state = torch.get_rng_state()
    output = sampler.model(torch.tensor([[1, 2, 3]])).logits
    sampler.check_sync()
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in sampler.model.modules())
    assert all(torch.equal(before[name], p) for name, p in sampler.model.named_parameters())
    assert torch.equal(output, sampler.model(torch.tensor([[1, 2, 3]])).logits)


def test_sharded_weights_are_quantized_as_they_are(tmp_path, monkeypatch):
    """FSDP2 would round them to BF16 in its forward, before the reference quantizes them."""
    model = policy(tmp_path / "model", family="qwen2", dtype=torch.float32)
    update(model, seed=0)  # to weights that BF16 cannot represent
    sampler = engine(model, "int8")
    prompts = rows.check_sequences(sampler.tokenizer, 160)
    expected = self_check.Reference(sampler).logps(prompts)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (1,))
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=mixed)
    monkeypatch.setattr(sampler.weights, "fsdp_version", 2)
    assert all(map(torch.equal, self_check.Reference(sampler).logps(prompts), expected))
    monkeypatch.setattr(PolicyWeights, "is_sharded", False)
    assert not any(map(torch.equal, self_check.Reference(sampler).logps(prompts), expected))
