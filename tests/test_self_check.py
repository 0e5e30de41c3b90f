"""The self-check passes correct engines and names the fault of each broken one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from vllm_engines import engine, fp8_block_anywhere, policy, update

from trl_quant.layers import quantized
from trl_quant.rollout import self_check
from trl_quant.rollout.weights import PolicyWeights


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """Engines synced with an updated policy since their last check. Whatever a test breaks, a sync repairs."""
    built = {}

    def get(precision="int8", lora_sync=None, dtype=torch.bfloat16):
        key = precision, lora_sync, dtype
        if key not in built:
            model = policy(tmp_path_factory.mktemp("policy"), with_lora=lora_sync is not None, dtype=dtype)
            built[key] = engine(model, precision, lora_sync=lora_sync or "merge", sync_check_steps=50)
        sampler = built[key]
        sampler.sync_weights()
        sampler.check_sync()
        update(sampler.model, seed=1, size=0.005)
        sampler.sync_weights()
        return sampler

    return get


@pytest.mark.parametrize(
    ("lora_sync", "dtype"),
    [(None, torch.bfloat16), (None, torch.float32), ("merge", torch.float32), ("adapter", torch.bfloat16)],
)
@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8_block"])
def test_a_right_engine_passes(synced, precision, dtype, lora_sync, monkeypatch):
    if precision == "fp8_block":
        fp8_block_anywhere(monkeypatch)
    found = synced(precision, lora_sync, dtype).check_sync()
    assert 0 < found["sync_check/logp_difference"] < 0.75 * found["sync_check/bound"]
    # In these models a zeroed layer or a missing adapter makes a difference of about 1 nat.
    assert found["sync_check/bound"] < {"bf16": 0.1, "fp8_block": 0.1, "int8": 0.7}[precision]


@pytest.mark.parametrize(("lora_sync", "dtype"), [("merge", torch.float32), ("adapter", torch.bfloat16)])
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


def test_skipped_sync(synced):
    sampler = synced()
    update(sampler.model, seed=2, size=1e-3)  # far below the format's resolution
    with pytest.raises(RuntimeError, match="stale: the policy has moved"):
        sampler.check_sync()
    sampler.sync_weights()
    sampler.check_sync()


def test_skipped_adapter(synced):
    sampler = synced(lora_sync="adapter")
    update(sampler.model, seed=2, size=1e-3)
    with pytest.raises(RuntimeError, match="stale: the policy has moved"):
        sampler.check_sync()
    sampler.sync_weights()
    sampler.check_sync()


def test_weights_of_the_last_step(synced, monkeypatch):
    sampler = synced()
    old = [(name, tensor.clone()) for name, tensor in sampler._iter_named_params()]
    update(sampler.model, seed=2, size=1e-3)
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "_iter_named_params", lambda: iter(old))
        sampler.sync_weights()
    with pytest.raises(RuntimeError, match="stale: the policy has moved"):
        sampler.check_sync()


def test_reload_that_changes_nothing(synced, monkeypatch):
    sampler = synced()
    sampler.check_sync()
    update(sampler.model, seed=2, size=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(sampler.llm, "collective_rpc", lambda function, kwargs: list(kwargs["stream"]))
        sampler.sync_weights()
    with pytest.raises(RuntimeError, match="stale: the engine computes what it computed before"):
        sampler.check_sync()


@pytest.mark.parametrize(
    ("precision", "layer"),
    [("bf16", "mlp.gate_up_proj"), ("int8", "self_attn.o_proj"), ("int8", "post_attention_layernorm")],
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
    with pytest.raises((RuntimeError, ValueError)):
        sampler.check_sync()


def test_adapter_not_applied(synced, monkeypatch):
    sampler = synced(lora_sync="adapter")
    monkeypatch.setattr(sampler.llm, "generate", sampler.llm.generate.func)
    sampler.llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="base-only"):
        sampler.check_sync()


def test_adapter_not_merged(synced, monkeypatch):
    sampler = synced(lora_sync="merge")
    with monkeypatch.context() as patched:
        patched.setattr(sampler.weights, "merged", lambda layer: dict(layer.get_base_layer().named_parameters()))
        sampler.sync_weights()
        sampler.drift.forget()  # its bookkeeping would also notice
    with pytest.raises(RuntimeError, match="base-only"):
        sampler.check_sync()


def test_wrong_adapter(synced, monkeypatch):
    sampler = synced(lora_sync="adapter")
    right = sampler.weights.adapter
    with monkeypatch.context() as patched:
        patched.setattr(sampler.weights, "adapter", lambda: {name: t.flip(0) for name, t in right().items()})
        sampler.sync_weights()
    sampler.pushed = right()
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()


def test_prefix_cache_not_reset(synced, monkeypatch):
    sampler = synced()
    sampler.check_sync()
    update(sampler.model, seed=2, size=1e-3)
    with monkeypatch.context() as patched:
        patched.setattr(sampler.llm, "reset_prefix_cache", lambda: True)
        sampler.sync_weights()
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
        sampler.sync_weights()
        for _ in range(2):
            sampler.generate([[1, 2, 3]], None, 1)
        seen.append(len(quick_or_not))
    assert seen == [1, 1, 1, 2, 2, 2, 3]
    sampler.sync_check_steps = 0
    sampler.sync_weights()
    sampler.generate([[1, 2, 3]], None, 1)
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
    prompts = self_check.check_sequences(sampler.tokenizer, 160)
    expected = self_check.Reference(sampler).logps(prompts)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (1,))
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=mixed)
    monkeypatch.setattr(sampler.weights.sharding, "fsdp_version", 2)
    assert all(map(torch.equal, self_check.Reference(sampler).logps(prompts), expected))
    monkeypatch.setattr(PolicyWeights, "is_sharded", False)
    assert not any(map(torch.equal, self_check.Reference(sampler).logps(prompts), expected))
