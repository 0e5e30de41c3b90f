"""vLLM is never stale: `test_stale.py`'s changes of a policy, and after each vLLM samples from it."""

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
import torch.nn.utils.prune as prune
from changes import BEST, FOLLOWED, STEPS, Double, after_the_best, changes, move, replace, worse_each_step
from long_tests import rest_is_long
from peft import get_peft_model
from torch import nn
from training import dataset, lora, trainer_for


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import COLOCATED, fresh, greedy, keep, policy

from trl_quant import QuantGRPOTrainer
from trl_quant.formats import quantize
from trl_quant.policy.unified import unified_layers
from trl_quant.rollout import VLLMEngine
from trl_quant.rollout.verify.rows import check_sequences
from trl_quant.rollout.verify.self_check import FLOOR, SLACK, Reference, mean_difference


pytestmark = pytest.mark.vllm


def trainer_of(path, model, **settings) -> QuantGRPOTrainer:
    options = {
        "rollout_precision": "int8",
        **COLOCATED,
        "sync_check_steps": 0,
        "max_steps": 1,
    }
    trainer = trainer_for(path / "out", model, **options | settings)
    keep(trainer)
    return trainer


def adapted(path, seed: int = 1, dtype: torch.dtype = torch.float32):
    """A policy with two adapters that do something."""
    model = policy(path, dtype=dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(model, lora())
        model.add_adapter("other", lora())
    return model


def sampled_from(trainer) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Sequences and their log-probabilities in the engine that a generation would sample from."""
    with trainer.generation():
        return trainer.vllm_generation.engine.logps(check_sequences(trainer.vllm_generation.engine.tokenizer, 160), 4)


def apart(trainer, sequences, sampled) -> tuple[float, float]:
    """How far log-probabilities are from those of the policy in the engine's format, and the check's bound on that."""
    reference = Reference(trainer.vllm_generation.engine)
    expected = reference.logps(sequences)
    jittered = reference.logps(sequences, jitter=True)
    return mean_difference(sampled, expected), SLACK * mean_difference(jittered, expected) + FLOOR


@pytest.mark.long
def test_an_adapter_follows_and_its_base_is_refused(tmp_path):
    """With `lora_sync="adapter"` A and B alone travel."""
    model = get_peft_model(policy(tmp_path / "model", dtype=torch.float32), lora())
    trainer = trainer_of(tmp_path, model, lora_sync="adapter")
    trainer.train()
    before = sampled_from(trainer)
    for name in ("default", "other"):
        if name == "other":
            model.add_adapter("other", lora())
            model.set_adapter("other")
        with torch.no_grad():
            for path, param in model.named_parameters():
                if f"lora_B.{name}" in path:
                    param.data.add_(0.1)
        now = sampled_from(trainer)
        difference, bound = apart(trainer, *now)
        assert difference <= bound < apart(trainer, *before)[0]
        before = now
    own = dict(trainer.vllm_generation.engine.weights.outside_base())
    for name in ("layers.1.mlp.down_proj", "layers.0.self_attn.q_proj", "layers.1.input_layernorm", "embed_tokens"):
        name = f"model.{name}.weight"
        kept = own[name].clone()
        own[name].view(-1)[3] += 0.1
        with pytest.raises(ValueError, match=f"the policy's `{name}` changed since .*lora_sync='merge'"):
            sampled_from(trainer)
        own[name].copy_(kept)
        assert apart(trainer, *sampled_from(trainer))[0] <= bound
    trainer.model.get_base_model().to(torch.bfloat16)  # the type that the engine holds: nothing changes there
    sampled_from(trainer)


def test_an_adapter_that_does_not_fit_is_refused_and_the_engine_goes_on(tmp_path):
    """With `lora_sync="adapter"` the engine holds one adapter of the form that it was started for."""
    model = get_peft_model(policy(tmp_path / "model", dtype=torch.float32), lora())
    trainer = trainer_of(tmp_path, model, lora_sync="adapter")
    first = sampled_from(trainer)
    refused = {
        "active adapter 'ranked' has the rank 8 at .* started for 4": {"r": 8},
        "active adapter 'partial' has the rank 0 at .* started for 4": {"target_modules": ["q_proj"]},
        "does not run an adapter's `use_dora`": {"use_dora": True},
        r"takes one active adapter, not \['default', 'second'\]": {},
    }
    names = ("ranked", "partial", "scaled", "second")
    for name, (message, settings) in zip(names, refused.items(), strict=True):
        model.add_adapter(name, lora(**settings))
        model.base_model.set_adapter(["default", name] if name == "second" else name)
        with pytest.raises(ValueError, match=f"`lora_sync`='adapter'.*{message}"):
            sampled_from(trainer)
        model.set_adapter("default")
        tokens, logps = sampled_from(trainer)
        assert tokens == first[0] and all(map(torch.equal, logps, first[1]))
    model.delete_adapter("default")
    model.add_adapter("default", lora(r=8))
    model.set_adapter("default")
    with pytest.raises(ValueError, match="active adapter 'default' has the rank 8"):
        sampled_from(trainer)


@pytest.mark.long
def test_any_order_of_changes(tmp_path):
    """Within the check's bound of the policy of that moment, which what was sampled before the change often is not."""
    trainer = trainer_of(tmp_path, adapted(tmp_path / "model", seed=1), save_strategy="steps", save_steps=1)
    before, left = sampled_from(trainer), 0
    for name in changes(trainer, seed=1):
        now = sampled_from(trainer)
        difference, bound = apart(trainer, *now)
        stale, bound_before = apart(trainer, *before)
        print(f"{name:10} {difference:.4f} < {bound:.4f}, before the change {stale:.4f}")
        assert difference <= bound, name
        left += stale > bound_before
        before = now
    assert left > STEPS / 4


@pytest.mark.long
@pytest.mark.parametrize("peft", [True, False], ids=["lora", "full"])
def test_the_best_weights_are_sampled_from(tmp_path, monkeypatch, peft):
    """They come back after the last step, and with no step of their own."""
    found = {}
    for name in ("follows", "by step"):
        path = tmp_path / name
        model = adapted(path / "model") if peft else policy(path / "model", dtype=torch.float32)
        rewarded = {"reward_funcs": worse_each_step, "eval_dataset": dataset(2)}
        trainer = trainer_of(path, model, **BEST, **rewarded)
        with monkeypatch.context() as patched:
            if name == "by step":
                patched.setattr(VLLMEngine, "is_stale", lambda self: False)
            found[name] = after_the_best(trainer)
        if name == "follows":
            difference, bound = apart(trainer, *sampled_from(trainer))
            assert difference <= bound
    print(found)
    assert found["follows"] < 0.3 * found["by step"]


@pytest.mark.parametrize("tuning", rest_is_long(["full", "merge", "adapter"], "merge"))
@pytest.mark.parametrize("data", rest_is_long([True, False]), ids=["data", "counted"])
def test_a_policy_trained_as_sampled(tmp_path, data, tuning):
    """Its layers' codes are new after an edit, and vLLM's: bit for bit those of an engine started on the weights."""
    model = policy(tmp_path / "model")
    if tuning != "full":
        model = adapted(tmp_path / "model", dtype=torch.bfloat16)
    lora_sync = "adapter" if tuning == "adapter" else "merge"
    trainer = trainer_of(tmp_path, model, train_precision="int8", lora_sync=lora_sync)
    engine, seen = trainer.vllm_generation.engine, []
    for seed in range(2):
        adapter_alone = [param for name, param in model.named_parameters() if "lora_" in name]
        move(nn.ParameterList(adapter_alone) if tuning == "adapter" else model, 0.05, seed, data, keep=0.7)
        sequences, sampled = sampled_from(trainer)
        difference, bound = apart(trainer, sequences, sampled)
        assert difference <= bound
        if tuning != "adapter":
            assert greedy(engine.llm) == greedy(fresh(model, "int8", tmp_path / f"checkpoint-{seed}"))
        for layer in unified_layers(model):
            made = quantize(engine.weights.of_linear(layer) if tuning == "full" else layer.weight, "int8")
            assert tuning == "merge" or torch.equal(layer.codes().values, made.values)
        seen.append(sampled)
    moved = mean_difference(*seen)
    print(f"{difference:.4f} < {bound:.4f}, moved by {moved:.4f}")
    assert moved > 2 * bound


def test_what_users_do(tmp_path):
    """
    vLLM is within the check's bound of the policy after each, and was far outside it before. All start from the same
    weights, since the bound grows with the weights.
    """
    trainer = trainer_of(tmp_path, policy(tmp_path / "model", dtype=torch.float32, tied=False))
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    before = sampled_from(trainer)
    for name, change in FOLLOWED.items():
        trainer.model.load_state_dict(start)
        change(trainer.model)
        now = sampled_from(trainer)
        difference, bound = apart(trainer, *now)
        stale, _ = apart(trainer, *before)
        print(f"{name:24} {difference:.4f} < {bound:.4f}, before the change {stale:.4f}")
        assert difference <= bound and stale > 2 * bound, name


OTHER = {
    "an untied head": (lambda model: replace(model.lm_head), "gained lm_head.weight, and lost nothing"),
    "a larger vocabulary": (lambda model: model.resize_token_embeddings(384), "gained a vocabulary of 384"),
    "a new bias": (
        lambda model: setattr(model.model.layers[0].mlp.down_proj, "bias", nn.Parameter(torch.ones(128))),
        "gained model.layers.0.mlp.down_proj.bias, and lost nothing",
    ),
    "fewer layers": (
        lambda model: setattr(model.model, "layers", model.model.layers[:1]),
        "gained nothing, and lost model.layers.1",
    ),
    "parametrized": (
        lambda model: parametrize.register_parametrization(model.model.layers[0].mlp.down_proj, "weight", Double()),
        "gained model.layers.0.mlp.down_proj.parametrizations.weight.original, and lost",
    ),
    "pruned for now": (
        lambda model: prune.l1_unstructured(model.model.layers[0].mlp.down_proj, "weight", 0.5),
        "gained model.layers.0.mlp.down_proj.weight_orig, and lost model.layers.0.mlp.down_proj.weight",
    ),
}


@pytest.mark.parametrize("change", rest_is_long(OTHER, "a new bias", "an untied head"))
def test_another_model_than_vllm_was_started_for(tmp_path, change):
    trainer = trainer_of(tmp_path, policy(tmp_path / "model", dtype=torch.float32))
    sampled_from(trainer)
    made, message = OTHER[change]
    made(trainer.model)
    with pytest.raises(ValueError, match=f"The policy is another model than vLLM was started for: it {message}"):
        sampled_from(trainer)
    if change == "parametrized":  # nothing was sent
        parametrize.remove_parametrizations(trainer.model.model.layers[0].mlp.down_proj, "weight", False)
        difference, bound = apart(trainer, *sampled_from(trainer))
        assert difference <= bound
