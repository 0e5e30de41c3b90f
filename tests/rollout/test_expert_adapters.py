"""LoRA on experts and routers (`target_parameters`): a sync merges it as PEFT does, and leaves the policy alone."""

import copy

import pytest
import torch
from embedded import engine
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from tiny import MIXTURES, save_tiny, tiny_model
from training import lora, trainer_for
from transformers import BitsAndBytesConfig

from trl_quant.models.families import ROUTER
from trl_quant.rollout.fingerprint import fingerprint
from trl_quant.storage.experts import NamesOnDisk


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
ADAPTERS = {
    "experts": {"target_modules": [], "target_parameters": EXPERTS},
    "down and attention": {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]},
    "all": {"target_modules": "all-linear"},
    "rslora": {"target_modules": [], "target_parameters": EXPERTS, "use_rslora": True},
}


def adapted(family: str, dtype=torch.float32, seed: int = 0, **given):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_model(family, dtype=dtype, tied=False)
        return get_peft_model(model, LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, **given))


def synced(model, precision: str):
    made = engine(model, precision)
    made.sync()
    return made


def moved(policy, seed: int) -> None:
    """As an optimizer's step moves an adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in policy.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator).to(param), alpha=0.02)


@pytest.mark.parametrize("dtype", rest_is_long([torch.float32, torch.bfloat16], torch.bfloat16))
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", MIXTURES)
def test_the_stream_is_the_model_that_peft_merges(family, kind, dtype):
    """Bit for bit: the product of B and A, rounded to the weight's type, is added to the weight."""
    policy = adapted(family, dtype, **ADAPTERS[kind])
    before, base = fingerprint(policy), dict(tiny_model(family, dtype=dtype, tied=False).named_parameters())
    streamed = dict(synced(policy, "bf16").weights.stream())
    assert fingerprint(policy) == before
    merged = dict(copy.deepcopy(policy).merge_and_unload().named_parameters())
    assert streamed.keys() == merged.keys()
    assert all(torch.equal(streamed[name], merged[name]) for name in merged)
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    experts = {name for name in merged if ".experts." in name}
    routers = {name for name in merged if ROUTER.fullmatch(name)}
    if kind == "down and attention":
        experts = {name for name in experts if name.endswith("down_proj")}
    if not (kind == "all" and family == "qwen2_moe"):  # whose experts PEFT leaves out of "all-linear"
        assert experts <= changed and bool(routers & changed) == (kind == "all")


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_moe", "down and attention"), *((family, "all") for family in MIXTURES)]
)
def test_live_equals_fresh_after_each_of_three_syncs(family, kind):
    policy = adapted(family, **ADAPTERS[kind])
    live = synced(policy, "int8")
    for seed in range(3):
        before = live.copy(IDS).logits
        moved(policy, seed)
        assert live.is_stale()
        live.sync()
        fresh = synced(copy.deepcopy(policy).merge_and_unload(), "int8")
        assert torch.equal(live.copy(IDS).logits, fresh.copy(IDS).logits)
        assert not torch.equal(live.copy(IDS).logits, before) and not live.is_stale()
    base = synced(tiny_model(family, tied=False), "int8")
    assert not torch.equal(live.copy(IDS).logits, base.copy(IDS).logits)


@pytest.mark.parametrize(("kind", "dtype"), [("experts", torch.bfloat16), ("all", torch.float32)])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_copy_is_compared_with_the_adapted_policy(family, kind, dtype):
    policy = adapted(family, dtype, **ADAPTERS[kind])
    live = synced(policy, "int8")
    before = fingerprint(policy)
    live.prepare()  # compares, since nothing was compared yet
    assert fingerprint(policy) == before
    experts = next(m for n, m in policy.named_modules() if n.endswith("experts") or n.endswith("experts.base_layer"))
    experts = experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts
    experts.act_fn = torch.nn.GELU()
    with pytest.raises(RuntimeError, match=r"does not sample from the policy"):
        live.prepare()


def test_disabled_and_second_adapters():
    """A sync merges what the forward pass adds."""
    policy = adapted("mixtral", **ADAPTERS["experts"])
    base = synced(tiny_model("mixtral", tied=False), "int4").copy(IDS).logits
    with policy.disable_adapter():
        assert torch.equal(synced(policy, "int4").copy(IDS).logits, base)
    first = synced(policy, "int4").copy(IDS).logits
    second = LoraConfig(r=2, init_lora_weights=False, **ADAPTERS["experts"])
    policy.add_adapter("other", second)
    assert torch.equal(synced(policy, "int4").copy(IDS).logits, first)
    policy.set_adapter("other")
    merged = copy.deepcopy(policy).merge_and_unload(adapter_names=["other"])
    other = synced(policy, "int4").copy(IDS).logits
    assert torch.equal(other, synced(merged, "int4").copy(IDS).logits) and not torch.equal(other, first)


def test_a_routers_bias_is_streamed_behind_its_adapter():
    policy = adapted("glm4_moe", **ADAPTERS["all"])
    names = [name for name, _ in NamesOnDisk(policy.get_base_model()).stream(synced(policy, "bf16").weights.stream())]
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names and len(names) == len(set(names))


def test_a_tensor_that_belongs_to_no_mixture_is_refused(tmp_path):
    config = lora(target_modules=["v_proj"], target_parameters=["self_attn.q_proj.weight"])
    with pytest.raises(ValueError, match=r"`target_parameters` has `weight` of `model\.layers\.0\.self_attn\.q_proj`"):
        trainer_for(tmp_path, tiny_model(), rollout_precision="int8", peft_config=config)


@pytest.mark.parametrize(
    "given",
    [{"lora_dropout": 0.1}, {"lora_bias": True}, {"use_dora": True}, {"init_lora_weights": "pissa"}, {"base": 4}],
    ids=lambda given: next(iter(given)),
)
def test_what_peft_does_not_do_with_tensors_is_refused_before_loading(given, tmp_path, monkeypatch):
    path, others = save_tiny(tmp_path / "model", "mixtral"), {}
    if given.pop("base", None):
        others["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True)
    told = "|".join([*given, "quantization_config"])
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    for targets in ({"target_modules": "all-linear"}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}):
        with pytest.raises(ValueError, match=rf"`peft_config`: .*({told}).* with an adapter of experts or routers"):
            trainer_for(tmp_path, path, rollout_precision="int8", peft_config=LoraConfig(**targets, **given), **others)


def test_grpo_trains_adapters_of_experts(tmp_path):
    """They learn, all of their policy is frozen, and the sampler is nearly the policy."""
    settings = {"is_correction": "tis", "max_steps": 3, "learning_rate": 1e-3}
    mismatch = {}
    for precision in ("bf16", "int4"):
        config, policy = lora(target_modules=["q_proj"], target_parameters=EXPERTS), tiny_model("qwen3_moe")
        start = {name: param.detach().clone() for name, param in policy.named_parameters()}
        trainer = trainer_for(tmp_path / precision, policy, rollout_precision=precision, peft_config=config, **settings)
        adapters = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".lora_B." in n}
        trainer.train()
        logs = [log for log in trainer.state.log_history if "mismatch/kl_k3" in log]
        mismatch[precision] = sum(log["mismatch/kl_k3"] for log in logs) / len(logs)
        assert all(0 < log["weights/normalized_update"] < 0.1 for log in logs[1:]) and len(logs) == 3
        now = dict(trainer.model.named_parameters())
        assert all(not torch.equal(now[name], before) for name, before in adapters.items())
        held = trainer.model.get_base_model().state_dict()
        kept = [name for name in start if name in held]
        assert kept and all(torch.equal(held[name], start[name]) for name in kept)
    assert 3 * mismatch["bf16"] < mismatch["int4"] and mismatch["bf16"] < 1e-3
