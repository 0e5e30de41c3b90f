"""Mixtures of experts in the embedded engine, against loops over tokens and experts; their routers keep their bits."""

import pytest
import torch
import torch.nn.functional as F
from distilling import distil
from drawing import generated
from embedded import PROMPTS, engine, reference
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from ppo_runs import ppo
from tiny import MIXTURES, tiny_model
from training import trainer_for

from trl_quant import QuantRLOOTrainer
from trl_quant.formats import FORMATS, fake_quantize_activation, quantize
from trl_quant.layers import EngineExperts, EngineLinear
from trl_quant.models.families import ROUTER
from trl_quant.noise import norm_noise
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.fingerprint import fingerprint


pytestmark = pytest.mark.isa

PRECISIONS = ["bf16", *FORMATS]
IDS = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
# Widths that are no multiples of 16 (an expert's 40, of its input to `down_proj`) and of 128
ODD = {"hidden_size": 200, "intermediate_size": 40}


INT8 = {"rollout_precision": "int8", "is_correction": "tis"}
RATE = {"learning_rate": 1e-4}


def mixture(family="qwen3_moe", seed=1, **settings):
    """A mixture whose experts differ in size: each has twice the weights of the one before."""
    if "intermediate_size" in settings and family != "mixtral":
        settings["moe_intermediate_size"] = settings["intermediate_size"]
    model = tiny_model(family, seed=seed, **settings)
    for module in experts_of(model):
        sizes = 2.0 ** torch.arange(-2, 2)[:, None, None]
        module.gate_up_proj.data *= sizes
        module.down_proj.data *= sizes.flip(0)
    return model


def experts_of(model):
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def on_grid(weight, precision):
    """The matrix of one expert, rounded by itself."""
    return weight.bfloat16().float() if precision == "bf16" else quantize(weight, precision).dequantize(torch.float32)


def slow_experts(module, precision, hidden, index, gates):
    """Outputs (T, H) of a policy's experts, expert by expert and token by token, on a format's grid."""

    def inputs(x):
        return x if precision == "bf16" else fake_quantize_activation(x, precision)

    y = torch.zeros_like(hidden)
    for expert in range(len(module.gate_up_proj)):
        gate_up, down = (on_grid(x.data[expert], precision) for x in (module.gate_up_proj, module.down_proj))
        tokens, places = torch.where(index == expert)
        if not len(tokens):
            continue
        middle = []
        for x in inputs(hidden[tokens]):  # together, as `fp8_tensor` has one scale for all of them
            gate, up = (gate_up @ x).chunk(2)
            middle.append(F.silu(gate) * up)
        for token, place, x in zip(tokens, places, inputs(torch.stack(middle)), strict=True):
            y[token] += gates[token, place] * (down @ x)
    return y


def seen_by_experts(copy, ids=IDS):
    """What each layer's experts of an engine's copy got and gave: hidden states, indices and weights, and the sums."""
    seen, hooks = [], []
    for module in experts_of(copy.copy):
        hooks.append(module.register_forward_hook(lambda _, args, output: seen.append((*args, output))))
    with torch.no_grad():
        copy.copy(ids)
    for hook in hooks:
        hook.remove()
    return seen


def apart(x, y):
    return ((x - y).norm() / y.norm()).item()


def bound(precision):
    """Largest relative distance that the order of sums makes. It may move a code of an input by one step."""
    return 3e-3 if precision != "bf16" and FORMATS[precision].activations else 1e-5


def distances(copy, policy, precision):
    """Relative distances of each layer's experts from the slow ones of a policy."""
    found = zip(experts_of(policy), seen_by_experts(copy), strict=True)
    return [apart(got, slow_experts(module, precision, *args)) for module, (*args, got) in found]


def synced(model, precision, **kwargs):
    made = engine(model, precision, **kwargs)
    made.sync()
    return made


@pytest.mark.parametrize("sizes", rest_is_long([ODD, {}]), ids=["odd", "even"])
@pytest.mark.parametrize("family", rest_is_long(MIXTURES, "qwen2_moe", "glm4_moe"))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_experts_compute_as_loops_over_tokens_and_experts_do(precision, family, sizes):
    policy = mixture(family, **sizes)
    copy = synced(policy, precision)
    assert max(distances(copy, policy, precision)) < bound(precision)
    clean = [apart(got, slow(*args)) for slow, (*args, got) in unquantized(policy, copy)]
    assert min(clean) > (2e-4 if precision == "bf16" else 2 * bound(precision))

    layers = dict(copy.copy.named_modules())
    for name, param in policy.named_parameters():
        if ROUTER.fullmatch(name):
            assert torch.equal(copy.copy.get_parameter(name), param)
        elif ".experts." in name:
            assert isinstance(layers[name], EngineExperts)
        elif name.startswith("model.layers") and param.ndim == 2:
            assert isinstance(layers[name.removesuffix(".weight")], EngineLinear)


def unquantized(policy, copy):
    """The policy's experts as they are trained, with what the copy's got and gave."""
    policy.set_experts_implementation("eager")
    return zip(experts_of(policy), seen_by_experts(copy), strict=True)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_the_whole_model_is_the_quantized_policy(precision, family):
    """Its other layers too, shared experts among them. Inputs stay as they are, so no rounding moves a code."""
    copy, expected = synced(mixture(family), precision), reference(mixture(family), precision)
    for name, module in expected.named_modules():
        if name.endswith("shared_expert_gate"):
            module.weight.data = mixture(family).get_parameter(f"{name}.weight").data
    for module in experts_of(expected):
        for weight in (module.gate_up_proj, module.down_proj):
            weight.data = torch.stack([on_grid(one, precision) for one in weight.data])
    with torch.no_grad():
        logps, clean = (model(IDS).logits.log_softmax(-1) for model in (expected, mixture(family)))
        got = copy.copy(IDS).logits.log_softmax(-1)
    assert (got - logps).abs().max() < 1e-3 < 0.3 * (got - clean).abs().max()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_expert_that_is_zero_or_another_shows(precision):
    for leaf in ("gate_up_proj", "down_proj"):
        for fault in ("zeroed", "exchanged"):
            policy = mixture()
            copy = synced(policy, precision)
            weight = getattr(experts_of(policy)[1], leaf).data
            order = [1, 0, 2, 3]
            weight.copy_(weight[order] if fault == "exchanged" else weight * torch.tensor([0, 1, 1, 1])[:, None, None])
            right, wrong = distances(copy, policy, precision)
            assert right < bound(precision) and wrong > 10 * bound(precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_expert_without_tokens_is_not_multiplied(precision):
    """One token reaches two of four experts. The others are made NaN in the copy, and nothing changes."""
    policy = mixture()
    copy = synced(policy, precision)
    ids = IDS[:, :1]
    before = seen_by_experts(copy, ids)
    for module, (_, index, _, _) in zip(experts_of(copy.copy), before, strict=True):
        empty = sorted({0, 1, 2, 3} - set(index.flatten().tolist()))
        assert len(empty) == 2
        for layer in (module.gate_up_proj, module.down_proj):
            layer.weight.values[empty] = torch.nan
    after = seen_by_experts(copy, ids)
    assert all(torch.equal(one[-1], other[-1]) and one[-1].isfinite().all() for one, other in zip(before, after))
    with torch.no_grad():
        assert not copy.copy(IDS).logits.isfinite().all()  # other tokens reach them


@pytest.mark.parametrize("precision", ["int8", "nvfp4"])
def test_each_expert_has_its_own_scale(precision):
    """One scale for all experts, or one for gate and one for up in NVFP4, would give other numbers."""
    policy = mixture()
    copy = synced(policy, precision)
    module = experts_of(policy)[0]
    held = experts_of(copy.copy)[0].gate_up_proj.weight
    gate, up = module.gate_up_proj.data.chunk(2, dim=1)
    joint = torch.stack([on_grid(one, precision) for one in module.gate_up_proj.data])
    together = on_grid(module.gate_up_proj.data.flatten(0, 1), precision).view_as(joint)
    apart_from_up = torch.stack([torch.cat([on_grid(a, precision), on_grid(b, precision)]) for a, b in zip(gate, up)])
    values = held.values if held.scale is None else held.values * held.scale[..., None]
    assert apart(values, joint) < 1e-6
    if precision == "nvfp4":
        assert apart(values, together) > 1e-4 and apart(values, apart_from_up) > 1e-4


@pytest.mark.parametrize("family", MIXTURES)
def test_in_bf16_it_is_the_policy(family):
    policy = mixture(family).bfloat16()
    for name, param in policy.named_parameters():
        if name.endswith("_proj.bias"):  # `Linear` adds it before it rounds, and the engine, as vLLM does, after that
            param.data.zero_()
    copy = synced(policy, "bf16")
    with torch.no_grad():
        grouped = policy(IDS).logits.float().log_softmax(-1)  # as transformers multiplies by itself
        policy.set_experts_implementation("eager")
        assert torch.equal(copy.copy(IDS).logits, policy(IDS).logits)
        got = copy.copy(IDS).logits.float().log_softmax(-1)
        coarse = synced(policy, "int4").copy(IDS).logits.float().log_softmax(-1)
    assert (got - grouped).abs().mean() < 0.05 and (coarse - grouped).abs().mean() > 0.1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_live_equals_fresh_after_each_of_three_syncs(precision):
    policy = mixture()
    copy = synced(policy, precision)
    assert not copy.is_stale()
    for step in range(3):
        before = copy.copy(IDS).logits
        with torch.no_grad():
            for name, param in policy.named_parameters():
                if step or ".experts." in name:  # the first time only experts move
                    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
                    param.data.add_(noise, alpha=0.02)
        assert copy.is_stale() and torch.equal(copy.copy(IDS).logits, before)
        copy.sync()
        fresh = synced(policy, precision)
        assert torch.equal(copy.copy(IDS).logits, fresh.copy(IDS).logits)
        assert not torch.equal(copy.copy(IDS).logits, before) and not copy.is_stale()


def test_sync_metrics_count_experts():
    policy = mixture()
    for name, param in policy.named_parameters():
        param.requires_grad_(".experts." in name)
    copy = synced(policy, "int4")
    old = {name: param.detach().clone() for name, param in policy.named_parameters() if param.requires_grad}
    for name in old:
        policy.get_parameter(name).data += 1e-3 * torch.randn_like(old[name])
    copy.sync()
    new = {name: policy.get_parameter(name).detach() for name in old}
    norm = sum(w.square().sum() for w in new.values()).sqrt()
    update = sum((new[name] - old[name]).square().sum() for name in old).sqrt() / norm
    error = sum((quantize(one, "int4").dequantize() - one).square().sum() for w in new.values() for one in w).sqrt()
    assert copy.sync_metrics["weights/normalized_update"] == pytest.approx(update.item(), rel=1e-4)
    assert copy.sync_metrics["weights/normalized_quantization_error"] == pytest.approx((error / norm).item(), rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "nvfp4", "nf4"])
def test_logps_of_samples_are_those_of_one_forward_pass(precision):
    copy = synced(mixture(), precision)
    torch.manual_seed(0)
    _, completions, logps, _ = generated(copy, PROMPTS)
    scored = copy.score([prompt + ids for prompt, ids in zip(PROMPTS, completions, strict=True)])
    for prompt, row, expected in zip(PROMPTS, logps, scored, strict=True):
        got = torch.tensor([x[0] for x in row])
        torch.testing.assert_close(got, torch.tensor(expected[len(prompt) - 1 :]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
def test_noise_goes_on_the_norms_that_feed_routers_and_experts(family):
    """
    A policy whose norms hold the noise gives the same outputs, since noise reaches a router as it reaches its experts.
    """
    noisy, policy = mixture(family), mixture(family)
    for name, param in noisy.named_parameters():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            param.data.copy_(norm_noise(param.data, 0.05, 3, 7, name))
    copy, expected = synced(policy, "nvfp4"), synced(noisy, "nvfp4")
    clean = copy.copy(IDS).logits
    for _ in range(2):  # the second time like the first: noise does not accumulate
        copy.lay_noise(RolloutNoise(0.05, seed=3, step=7))
        assert torch.equal(copy.copy(IDS).logits, expected.copy(IDS).logits)
    assert not torch.equal(copy.copy(IDS).logits, clean)
    copy.lay_noise(RolloutNoise())
    assert torch.equal(copy.copy(IDS).logits, clean)


def test_adapters_of_attention_are_merged():
    attention = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    policy = get_peft_model(mixture(), attention)
    copy = synced(policy, "int8")
    base = synced(mixture(), "int8")
    assert sorted(copy.weights.trained()) == sorted(
        f"model.layers.{layer}.self_attn.{leaf}.weight" for layer in (0, 1) for leaf in ("q_proj", "v_proj", "o_proj")
    )
    merged = synced(policy.merge_and_unload(), "int8")
    assert torch.equal(copy.copy(IDS).logits, merged.copy(IDS).logits)
    assert not torch.equal(copy.copy(IDS).logits, base.copy(IDS).logits)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_copy_is_compared_with_the_policy_and_leaves_it_alone(family):
    policy = mixture(family)
    copy = synced(policy, "int8")
    before, implementations = fingerprint(policy), policy.get_experts_implementation()
    copy.prepare()  # compares, since nothing was compared yet
    assert fingerprint(policy) == before and policy.get_experts_implementation() == implementations
    experts_of(policy)[-1].act_fn = torch.nn.GELU()
    with pytest.raises(RuntimeError, match=r"Look at `model\.layers\.1\.mlp\.experts"):
        copy.prepare()
    assert fingerprint(policy) == before and policy.get_experts_implementation() == implementations


def test_grpo_samples_from_quantized_experts(tmp_path):
    """The farther the precision, the larger the mismatch; experts and routers learn."""
    mismatch = {}
    for precision in ("bf16", "int8", "int4"):
        settings = {"rollout_precision": precision, "is_correction": "tis", "max_steps": 3, "learning_rate": 1e-4}
        policy = mixture()
        start = {name: param.detach().clone() for name, param in policy.named_parameters()}
        trainer = trainer_for(tmp_path / precision, policy, **settings)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        mismatch[precision] = sum(log["mismatch/kl_k3"] for log in logs) / len(logs)
        moved = {name for name, param in policy.named_parameters() if not torch.equal(param, start[name])}
        assert {name for name in start if ".experts." in name or ROUTER.fullmatch(name)} <= moved
        assert len(logs) == 3 and all(0 < log["weights/normalized_update"] < 1e-2 for log in logs[1:])
    assert mismatch["bf16"] < 1e-3 and 3 * mismatch["bf16"] < mismatch["int8"] < mismatch["int4"] < 0.5


OTHERS = {
    "rloo": lambda path, policy: trainer_for(path, policy, QuantRLOOTrainer, max_steps=2, **INT8, **RATE, beta=0.0),
    "ppo": lambda path, policy: ppo(path, policy, max_steps=4, save_steps=4, vf_share_layers=True, **INT8, **RATE),
    "distillation": lambda path, policy: distil(path, policy, teacher_model=tiny_model(seed=4), **INT8, **RATE),
    "in flight": lambda path, policy: trainer_for(path, policy, max_steps=4, rollouts_in_flight=2.0, **INT8, **RATE),
}


@pytest.mark.parametrize("run", OTHERS)
def test_other_trainers_sample_from_quantized_experts(tmp_path, run):
    """In INT8 they are closer to the policy than INT4 is with GRPO, above, and experts and routers learn."""
    policy = mixture()
    start = {name: param.detach().clone() for name, param in policy.named_parameters()}
    trainer = OTHERS[run](tmp_path, policy)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "mismatch/kl_k3" in log]
    found = [log["mismatch/kl_k3"] for log in logs if log.get("rollouts/age", 0) == 0]
    assert found and all(1e-5 < value < 0.01 for value in found)
    moved = {name for name, param in trainer.model.named_parameters() if not torch.equal(param, start[name])}
    assert {name for name in start if ".experts." in name or ROUTER.fullmatch(name)} <= moved
