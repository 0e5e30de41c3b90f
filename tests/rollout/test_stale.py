"""The sampler is never stale: whoever changes the policy's weights, the next generation samples from the new ones."""

import copy

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
import torch.nn.utils.prune as prune
from changes import (
    BEST,
    FOLLOWED,
    STEPS,
    Double,
    after_the_best,
    changes,
    move,
    replace,
    scale,
    worse_each_step,
)
from long_tests import rest_is_long
from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model
from stale import COPY, IDS, OWN, adapted, both_engines, policy_of, sampled_from, trainer_of
from tiny import tiny_model
from training import config, dataset, make
from transformers import TrainerCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout import TransformersEngine
from trl_quant.rollout.fingerprint import fingerprint
from trl_quant.rollout.weights import PolicyWeights


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()


def of_fresh_engine(trainer) -> torch.Tensor:
    """Those of an engine of its own that is synced with the policy for the first time."""
    engine = trainer.vllm_generation.engine
    fresh = copy.copy(engine)
    fresh.copy = fresh.build_copy(engine.weights.base_model)
    fresh.drift = copy.deepcopy(engine.drift)
    fresh.sync()
    with torch.no_grad():
        return fresh.copy(IDS).logits.log_softmax(-1)


# Whoever changes them


def averaged_weights(trainer):
    """As exponential moving averages are swapped in: through `.data`, which PyTorch does not count."""
    move(trainer.model, data=True)


def one_element(trainer):
    next(trainer.model.parameters()).data[3, 5] += 1.0


def constant(trainer):
    """Of a weight that was constant before: its exclusive or over an even number of words is 0 for any constant."""
    norm = trainer.model.get_decoder().norm if not hasattr(trainer.model, "peft_config") else None
    (norm or trainer.model.get_base_model().model.norm).weight.data.fill_(0.5)


def loaded(trainer):
    state = {name: value + 0.05 * torch.randn_like(value) for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(state)


def replaced(trainer):
    layer = trainer.model.get_decoder().layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(2 * layer.weight.detach())


CHANGES = [averaged_weights, one_element, constant, loaded]


@pytest.mark.parametrize("change", [*CHANGES, replaced])
def test_between_two_steps(tmp_path, change):
    trainer = trainer_of(tmp_path, tiny_model(seed=3))
    before = sampled_from(trainer)
    assert torch.equal(before, of_fresh_engine(trainer))
    change(trainer)
    after = sampled_from(trainer)
    assert torch.equal(after, of_fresh_engine(trainer)) and not torch.equal(after, before)


def test_nothing_is_sent_where_nothing_changed(tmp_path, monkeypatch):
    trainer, syncs = trainer_of(tmp_path, tiny_model(seed=3)), []
    sync = TransformersEngine.sync
    monkeypatch.setattr(TransformersEngine, "sync", lambda self: (syncs.append(1), sync(self)))
    for _ in range(3):
        sampled_from(trainer)
    trainer.model.train().eval()
    trainer.model.zero_grad()
    sampled_from(trainer)
    assert len(syncs) == 1
    move(trainer.model)
    sampled_from(trainer)
    assert len(syncs) == 2


ADAPTERS = {
    "switched": lambda model: model.set_adapter("other"),
    "both": lambda model: model.base_model.set_adapter(["default", "other"]),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "merged and unmerged": lambda model: (model.merge_adapter(), model.unmerge_adapter(), move(model, 0.01)),
    "scaled": lambda model: scale(model, 3.0),
}


@pytest.mark.parametrize("variant", rest_is_long([{"use_dora": True}, {}]), ids=["dora", "lora"])
@pytest.mark.parametrize("change", ADAPTERS)
def test_adapters(tmp_path, change, variant):
    """The engine is as near to the policy as before the change, which an engine that missed it is not."""
    trainer = trainer_of(tmp_path, adapted(**variant))
    before = sampled_from(trainer)
    rounding = apart(before, policy_of(trainer))
    ADAPTERS[change](trainer.model)
    values, settings = {n: p.clone() for n, p in trainer.model.named_parameters()}, fingerprint(trainer.model)
    after = sampled_from(trainer)
    assert fingerprint(trainer.model) == settings  # and reading the weights changed nothing
    assert all(torch.equal(values[name], param) for name, param in trainer.model.named_parameters())
    policy = policy_of(trainer)
    assert torch.equal(after, of_fresh_engine(trainer)) and apart(after, policy) < 2 * rounding
    assert change == "merged" or apart(before, policy) > 4 * rounding


@pytest.mark.parametrize("change", [name for name in ADAPTERS if name != "both"])
@pytest.mark.parametrize("lora_sync", ["merge", "adapter"])
def test_adapters_of_a_policy_trained_as_sampled(tmp_path, change, lora_sync):
    """The sampler is the policy, whatever is done to its adapters."""
    if lora_sync == "adapter" and "merged" in change:
        pytest.skip("a merged adapter is not beside its base")
    trainer = trainer_of(tmp_path, adapted(), rollout_precision=None, train_precision="int8")
    before = sampled_from(trainer)
    ADAPTERS[change](trainer.model)
    after = sampled_from(trainer)
    assert torch.equal(after, policy_of(trainer))
    assert change == "merged" or not torch.equal(after, before)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("by_hand", [False, True], ids=["trainer", "engine"])
def test_a_policy_trained_as_sampled(tmp_path, change, by_hand):
    """Trainer and engine quantize weights anew that were written past PyTorch's counters."""
    trainer = trainer_of(tmp_path, tiny_model(seed=3), rollout_precision=None, train_precision="int8")
    before = sampled_from(trainer)
    change(trainer)
    if by_hand:
        trainer.vllm_generation.sync_weights()
    after = sampled_from(trainer)
    assert torch.equal(after, policy_of(trainer)) and not torch.equal(after, before)


def test_merged_and_disabled_adapters_are_refused(tmp_path):
    trainer = trainer_of(tmp_path, adapted())
    trainer.model.merge_adapter()
    trainer.model.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match="merged and disabled"):
        sampled_from(trainer)


def test_an_interrupted_sync_is_made_again(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, tiny_model(seed=3))
    sampled_from(trainer)
    move(trainer.model)
    stream = PolicyWeights.stream

    def interrupted(self, *names):
        for count, item in enumerate(stream(self, *names)):
            if count == 3:
                raise KeyboardInterrupt
            yield item

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PolicyWeights, "stream", interrupted)
        sampled_from(trainer)
    assert torch.equal(sampled_from(trainer), of_fresh_engine(trainer))


def test_trained_twice(tmp_path):
    """The second training starts at step 0, where the last sync of a run without updates was."""
    trainer = trainer_of(tmp_path, tiny_model(seed=3), max_steps=1)
    trainer.train()
    (healthy,) = [entry["mismatch/kl_k3"] for entry in trainer.state.log_history if "mismatch/kl_k3" in entry]
    move(trainer.model, size=0.5)
    trainer.train()
    (second,) = [entry["mismatch/kl_k3"] for entry in trainer.state.log_history if "mismatch/kl_k3" in entry]
    assert 0 < second < 30 * healthy


UNTIED = {
    "the head trained whole": {"modules_to_save": ["lm_head"]},
    "the embeddings trained whole": {"modules_to_save": ["embed_tokens"]},
    "an adapter on the embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.parametrize("case", UNTIED)
def test_a_head_that_the_policy_unties(tmp_path, case):
    """The config still says that it is tied; the embedded engine's copy is what the policy is."""
    torch.manual_seed(1)
    lora = LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | UNTIED[case])
    trainer = trainer_of(tmp_path, get_peft_model(tiny_model(seed=3), lora))
    before, rounding = sampled_from(trainer), apart(sampled_from(trainer), policy_of(trainer))
    move(trainer.model)
    assert apart(sampled_from(trainer), policy_of(trainer)) < 3 * rounding < 0.3 * apart(before, policy_of(trainer))


def test_a_head_that_was_untied_in_memory(tmp_path):
    model = tiny_model(seed=3)
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    trainer = trainer_of(tmp_path, model)
    other = trainer_of(tmp_path, tiny_model(seed=3))
    rounding = apart(sampled_from(other), policy_of(other))
    assert apart(sampled_from(trainer), policy_of(trainer)) < 3 * rounding
    assert apart(sampled_from(other), policy_of(trainer)) > 10 * rounding


def test_the_active_adapters_own_head(tmp_path):
    """Of two adapters with a head each, the head of the active one; none where adapters are disabled."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = get_peft_model(tiny_model(seed=3, tied=False), lora)
    model.add_adapter("other", lora)
    move(model.get_submodule("base_model.model.lm_head.modules_to_save.other"), size=0.5)
    trainer = trainer_of(tmp_path, model)
    for name in ("other", "default"):
        before = sampled_from(trainer)
        model.set_adapter(name)
        assert apart(sampled_from(trainer), policy_of(trainer)) < 0.1 * apart(before, policy_of(trainer))
    with model.disable_adapter(), pytest.raises(ValueError, match="`lm_head` is trained whole"):
        sampled_from(trainer)


BESIDE_THE_BASE = {
    "a head each": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "norms each": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]),
    "tokens each": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6, 7]),
}


@pytest.mark.parametrize("case", BESIDE_THE_BASE)
def test_an_engine_of_the_policys_own_layers_follows_what_is_no_lora(tmp_path, case):
    """It samples from the active adapter's own head, norms and tokens, and from an adapter that is added later."""
    model = get_peft_model(tiny_model(seed=3, tied=False), BESIDE_THE_BASE[case])
    trainer = trainer_of(tmp_path, model, rollout_precision=None, train_precision="nvfp4")
    sampled = [sampled_from(trainer)]
    model.add_adapter("other", BESIDE_THE_BASE[case])
    with torch.no_grad():
        for _, param in filter(lambda named: ".other" in named[0], model.named_parameters()):
            param.add_(0.3 * torch.randn_like(param))
    for name in ("other", "default", "other"):
        model.set_adapter(name)
        sampled.append(sampled_from(trainer))
        assert torch.equal(sampled[-1], policy_of(trainer))
    with model.disable_adapter():
        assert torch.equal(sampled_from(trainer), policy_of(trainer))
    assert torch.equal(sampled[0], sampled[2]) and not torch.equal(sampled[1], sampled[2])


@pytest.mark.parametrize("case", BESIDE_THE_BASE)
def test_a_policy_with_more_than_lora_beside_its_base_trains(tmp_path, case):
    model = get_peft_model(tiny_model(seed=3, tied=False), BESIDE_THE_BASE[case])
    trainer = trainer_of(tmp_path, model, rollout_precision=None, train_precision="nvfp4")
    trainer.train()
    assert torch.equal(sampled_from(trainer), policy_of(trainer))


NOT_PLAIN = {
    "LoHaConfig cannot adapt": LoHaConfig(r=4, target_modules=["q_proj"]),
    "IA3Config cannot adapt": IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "use_dora=True cannot adapt": LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
}


@pytest.mark.parametrize("message", NOT_PLAIN)
def test_an_adapted_model_is_refused_before_its_base_is_frozen(tmp_path, message):
    model = get_peft_model(tiny_model(seed=3), NOT_PLAIN[message])
    with pytest.raises(ValueError, match=f"{message} a frozen base"):
        trainer_of(tmp_path, model, rollout_precision=None, train_precision="nvfp4")
    assert isinstance(model.get_base_model().model.layers[0].self_attn.k_proj, torch.nn.Linear)


# What users do to a model beside training it


@both_engines
@pytest.mark.parametrize("peft", rest_is_long([True, False]), ids=["lora", "full"])
def test_the_best_weights_are_sampled_from(tmp_path, monkeypatch, peft, settings):
    """They come back after the last step, and with no step of their own."""
    trainers = []
    for name in ("follows", "by step"):
        model = adapted() if peft else tiny_model(seed=3)
        options = {"reward_funcs": worse_each_step, "eval_dataset": dataset(2)}
        args = config(QuantGRPOConfig, tmp_path / name, **BEST | settings)
        trainers.append(make(QuantGRPOTrainer, args, model, **options))
    mismatch = after_the_best(trainers[0])
    if settings == OWN:  # the policy's own weights, which no sync brings
        assert torch.equal(sampled_from(trainers[0]), policy_of(trainers[0]))
        return
    assert torch.equal(sampled_from(trainers[0]), of_fresh_engine(trainers[0]))
    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "is_stale", lambda self: False)
        by_step = after_the_best(trainers[1])
    print(f"{mismatch:.2e}, by step {by_step:.2e}")
    assert mismatch < 0.3 * by_step


def untie(model) -> None:
    replace(model.lm_head)


def widen(model) -> None:
    model.resize_token_embeddings(384)


def keep_one_layer(model) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers, model.config.layer_types = 1, model.config.layer_types[:1]


def slower_rotation(model) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


REBUILT = {
    "an untied head": untie,
    "a larger vocabulary": widen,
    "fewer layers": keep_one_layer,
    "rotary frequencies": slower_rotation,
    "rounded": lambda model: model.to(torch.bfloat16),
}


@both_engines
@pytest.mark.parametrize(
    "change",
    rest_is_long(
        [*FOLLOWED, *REBUILT],
        *("a new linear layer", "loaded by assignment", "pruned", "through numpy", "layers in another order"),
        *("an untied head", "rotary frequencies"),
    ),
)
def test_what_users_do(tmp_path, change, settings):
    """The engine is the policy as closely as one that starts on it, which it was not before the change."""
    trainer = trainer_of(tmp_path, tiny_model(seed=3), **settings)
    before = sampled_from(trainer)
    (FOLLOWED | REBUILT)[change](trainer.model)
    after, policy = sampled_from(trainer), policy_of(trainer)
    expected = policy
    if settings == COPY:
        model = copy.deepcopy(trainer.model)
        del model.forward  # TRL's, which stays bound to the first model and computes with its weights
        expected = sampled_from(trainer_of(tmp_path, model, **settings))
    assert torch.equal(after, expected)
    assert not torch.equal(before, after)
    if change != "rounded" and before.shape == policy.shape:  # rounding to BF16 is less than to INT8
        assert apart(after, policy) < 0.9 * apart(before, policy)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: parametrize.register_parametrization(layer, "weight", Double()),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: setattr(layer, "bias", torch.nn.Parameter(torch.ones(128))),
    ],
    ids=["parametrized", "pruned for now", "a new bias"],
)
def test_other_parameters(tmp_path, change):
    """A copy that lacks them says so; an engine that computes with the policy's own layers has them."""
    for settings in (COPY, OWN):
        trainer = trainer_of(tmp_path, tiny_model(seed=3), **settings)
        before = sampled_from(trainer)
        change(trainer.model.model.layers[0].mlp.down_proj)
        if settings == OWN:
            policy = policy_of(trainer)
            assert torch.equal(sampled_from(trainer), policy) and not torch.equal(before, policy)
            continue
        with pytest.raises(RuntimeError, match=r"streams `model.layers.0.mlp.down_proj\..*`, which its copy .* lacks"):
            sampled_from(trainer)


def test_another_model(tmp_path):
    trainer = trainer_of(tmp_path, tiny_model(seed=3))
    model, trainer.model = trainer.model, tiny_model(seed=4)
    with pytest.raises(ValueError, match=r"`trainer\.model` is another model than the trainer was built with"):
        trainer.evaluate(trainer.train_dataset)
    trainer.model = model
    trainer.evaluate(trainer.train_dataset)


@both_engines
def test_gradients_that_are_switched_off_change_nothing(tmp_path, settings):
    trainer = trainer_of(tmp_path, tiny_model(seed=3), **settings)
    before = sampled_from(trainer)
    trainer.model.requires_grad_(False)
    assert torch.equal(sampled_from(trainer), before)


def weighted(model) -> None:
    model.add_weighted_adapter(["default", "other"], [0.7, 0.6], "sum", combination_type="cat")
    model.set_adapter("sum")


def deleted(model) -> None:
    model.set_adapter("other")
    model.delete_adapter("default")


def loaded_adapter(model, path) -> None:
    saved = adapted(seed=5)
    saved.save_pretrained(path)
    model.load_adapter(path, "loaded")
    model.set_adapter("loaded")


@both_engines
@pytest.mark.parametrize("change", ["weighted", "deleted", "loaded"])
def test_adapters_that_come_and_go(tmp_path, change, settings):
    trainer = trainer_of(tmp_path / "run", adapted(), **settings)
    before = sampled_from(trainer)
    rounding = apart(before, policy_of(trainer))
    changes = {"weighted": weighted, "deleted": deleted, "loaded": lambda model: loaded_adapter(model, tmp_path)}
    changes[change](trainer.model)
    after, policy = sampled_from(trainer), policy_of(trainer)
    assert torch.equal(after, of_fresh_engine(trainer) if settings == COPY else policy)
    assert apart(before, policy) > 4 * rounding and apart(after, policy) <= 2 * rounding


class Writer(TrainerCallback):
    """Writes weights at the end of each step, and evaluates before and after."""

    def __init__(self):
        self.trainer, self.seen = None, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for seed in range(2):
            self.trainer.evaluate(self.trainer.train_dataset.select(range(2)))
            self.seen.append(
                (self.trainer.vllm_generation.engine.copy(IDS).logits.log_softmax(-1), of_fresh_engine(self.trainer))
            )
            move(model, 0.02, seed, data=True)


def test_a_callback_that_writes_and_evaluates(tmp_path):
    trainer = trainer_of(tmp_path, tiny_model(seed=3), max_steps=2)
    trainer.add_callback(writer := Writer())
    writer.trainer = trainer
    trainer.train()
    assert len(writer.seen) == 4 and all(torch.equal(*pair) for pair in writer.seen)
    assert len({logits.sum().item() for logits, _ in writer.seen}) == 4


@pytest.mark.parametrize("seed", rest_is_long(range(2)))
def test_any_order_of_changes(tmp_path, seed):
    """After each of a random sequence of edits, switches, trainings, resumes and evaluations it equals a fresh one."""
    trainer = trainer_of(tmp_path, adapted(seed), save_strategy="steps", save_steps=1)
    before, changed = sampled_from(trainer), 0
    for name in changes(trainer, seed):
        now = sampled_from(trainer)
        assert torch.equal(now, of_fresh_engine(trainer)), name
        changed += not torch.equal(now, before)
        before = now
    assert changed > STEPS / 4
