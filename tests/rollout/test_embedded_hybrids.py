"""Hybrids in the embedded engine: it samples from the policy on a format's grid, with gates and states as they are."""

import pytest
import torch
from drawing import generated
from embedded import PROMPTS, engine
from peft import LoraConfig, get_peft_model
from readers import save_reader
from tiny import HYBRIDS, save_tiny, tiny_model
from training import config, make, metrics

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import fake_quantize_activation, quantize
from trl_quant.layers import EngineLinear
from trl_quant.noise import norm_noise
from trl_quant.rollout import RolloutNoise


pytestmark = pytest.mark.isa
every_hybrid = pytest.mark.parametrize("family", HYBRIDS)
GATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
ROUTERS = ("gate", "shared_expert_gate")


def on_grid(family, precision, gates=False):
    """An independent quantized policy, in FP32. With `gates`, those of linear attention are quantized too."""
    model = tiny_model(family, seed=1)
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or leaf in ROUTERS:
            continue
        if gates or leaf not in GATES:
            module.weight.data = quantize(module.weight.data, precision).dequantize(torch.float32)
            module.register_forward_pre_hook(lambda _, args: (fake_quantize_activation(args[0], precision),))
    return model


@torch.no_grad()
def logps(model, prompt, ids):
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(ids)), ids]


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_samples_come_from_the_policy_on_the_grid(family):
    """Prompts of three lengths, padded on the left; INT4 has a scale for each group, and none for inputs."""
    sampler = engine(tiny_model(family, seed=1), "int4")
    torch.manual_seed(0)
    _, completions, rows, _ = generated(sampler, PROMPTS)
    found = [torch.tensor([x[0] for x in row]) for row in rows]

    def apart(model):
        expected = [logps(model, prompt, ids) for prompt, ids in zip(PROMPTS, completions, strict=True)]
        return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))

    assert apart(on_grid(family, "int4")) < 1e-4
    assert apart(tiny_model(family, seed=1)) > 0.05  # the policy itself
    if family == "qwen3_5_text":
        assert apart(on_grid(family, "int4", gates=True)) > 1e-2


@every_hybrid
def test_a_sync_brings_every_tensor(family):
    """Gates, convolutions, decays and norms have the policy's bits, those that an adapter changes included."""
    targets = {"falcon_h1": ["in_proj", "q_proj"]}.get(family, r".*\.(in_proj_\w+|q_proj)")
    base = tiny_model(family, seed=1)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    sampler = engine(model, "int8")
    with torch.no_grad():
        for param in base.parameters():
            param.add_(torch.randn_like(param), alpha=0.05)
    sampler.sync()
    merged = model.merge_and_unload().state_dict()
    held = dict(sampler.copy.named_parameters())
    quantized = {f"{name}.weight" for name, layer in sampler.copy.named_modules() if isinstance(layer, EngineLinear)}
    kept = [name for name in merged if name in held and name not in quantized and ".experts." not in name]
    assert not [name for name in kept if not torch.allclose(held[name], merged[name], atol=1e-6)]
    assert {name.rpartition(".")[2] for name in kept} >= {"A_log", "dt_bias"}
    assert any("conv1d" in name for name in kept) and not any("conv1d" in name for name in quantized)
    assert any("in_proj_b" in name for name in kept) == (family != "falcon_h1")


@every_hybrid
def test_noise_on_the_norms_that_feed(family):
    """A norm's weight is its gain in Falcon-H1, and its gain minus one in Qwen's. Noise is added to either."""
    sampler = engine(tiny_model(family, seed=1), "bf16")
    sampler.sync()
    clean = {name: value.clone() for name, value in sampler.read_norms().items()}
    assert len(clean) == 4
    sampler.lay_noise(RolloutNoise(0.05, 3, 7))
    for name, value in sampler.read_norms().items():
        torch.testing.assert_close(value, norm_noise(clean[name], 0.05, 3, 7, name))
        assert (value - clean[name]).std() == pytest.approx(0.05, rel=0.3)
    sampler.lay_noise(RolloutNoise())
    assert all(torch.equal(value, clean[name]) for name, value in sampler.read_norms().items())


def run(path, family, **settings):
    settings = {"max_steps": 2, "max_completion_length": 12, "learning_rate": 1e-3} | settings
    trainer = make(
        QuantGRPOTrainer, config(QuantGRPOConfig, path / "out", **settings), model=save_tiny(path / "model", family)
    )
    start = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, param in trainer.model.named_parameters() if not torch.equal(param, start[name])}
    return [entry for entry in metrics(trainer) if "mismatch/abs_logp_diff" in entry], moved, start


@pytest.mark.parametrize(
    ("family", "settings", "least", "most"),
    [
        ("qwen3_5_text", {"rollout_precision": "bf16"}, 1e-5, 2e-2),  # rounds weights alone
        ("qwen3_5_text", {"train_precision": "int8"}, 0, 2e-3),  # sampler and trainer compute the same
        ("qwen3_5_text", {"rollout_precision": "int8"}, 2e-2, 0.2),
        ("qwen3_next", {"train_precision": "fp8"}, 0, 2e-3),
        ("falcon_h1", {"rollout_precision": "int8"}, 1e-2, 0.2),
    ],
)
def test_grpo_trains_each_tensor(family, settings, least, most, tmp_path):
    entries, moved, start = run(tmp_path, family, **settings)
    assert len(entries) == 2 and all(least <= entry["mismatch/abs_logp_diff"] < most for entry in entries)
    assert {name for name in start if "expert" not in name} <= moved


def test_the_published_qwen3_5_trains_on_text(tmp_path):
    """TRL loads it with its tower, which stays as it is; the text's layers are sampled from in INT8."""
    args = config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int8", max_steps=1, max_completion_length=8)
    trainer = make(QuantGRPOTrainer, args, model=save_reader(tmp_path / "model", "qwen3_5", torch.float32))
    assert type(trainer.model).__name__ == "Qwen3_5ForConditionalGeneration"
    start = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    (entry,) = [entry for entry in metrics(trainer) if "mismatch/abs_logp_diff" in entry]
    assert 1e-4 < entry["mismatch/abs_logp_diff"] < 0.2
    layers = {
        name for name, layer in trainer.vllm_generation.engine.copy.named_modules() if isinstance(layer, EngineLinear)
    }
    assert len(layers) == 13 and all(name.startswith("model.language_model.layers.") for name in layers)
    moved = {name for name, param in trainer.model.named_parameters() if not torch.equal(param, start[name])}
    assert moved == {name for name in start if ".visual." not in name}
