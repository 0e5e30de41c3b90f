"""Runs of `QuantPPOTrainer`: killed and resumed ones, what is refused before anything is loaded, and vLLM's engine."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny, save_tiny_vision, tiny_model
from training import Killed, config, dataset, killing, lora, make, metrics, parameters, spread
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    TrainerCallback,
)
from trl import GRPOConfig

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantPPOConfig, QuantPPOTrainer
from trl_quant.config.before_loading import check_before_loading
from trl_quant.config.checks import check_what
from trl_quant.config.given import Given
from trl_quant.storage.manifest import MANIFEST
from trl_quant.storage.run_checkpoints import has_whole_weights, last_complete_checkpoint
from trl_quant.trainers.critic import load_critic


pytestmark = pytest.mark.isa


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("policy") / "model", seed=3)


def ppo(path, policy, kill_at=None, given=None, **settings) -> QuantPPOTrainer:
    """Four updates on each of two generations, saved after each generation."""
    settings = {
        "rollout_precision": "int4",
        "is_correction": "acr",
        "num_generations": 1,
        "per_device_train_batch_size": 2,
        "steps_per_generation": 4,
        "max_steps": 8,
        "value_learning_rate": 3e-3,
        "save_strategy": "steps",
        "save_steps": 4,
    } | settings
    given = {"reward_funcs": killing(kill_at)} | (given or {})
    return make(QuantPPOTrainer, config(QuantPPOConfig, path, **settings), model=policy, **given)


def logged(trainer) -> list[dict]:
    return [entry for entry in metrics(trainer) if "loss" in entry]


def critic_of(trainer) -> dict[str, torch.Tensor]:
    """The critic's weights and the state of its optimizer."""
    critic = trainer.critic
    found = dict(critic.model.named_parameters())
    states = enumerate(critic.optimizer.state_dict()["state"].values())
    return found | {f"{i} {name}": value for i, state in states for name, value in state.items()}


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class Watch(TrainerCallback):
    """Calls a function at each event of a kind."""

    def __init__(self, event: str, look):
        setattr(self, event, lambda *args, **kwargs: look())


def assert_same(left, right) -> None:
    """But for the self-check's values, which are of the first prompts that a trainer samples for."""
    left_logs, right_logs = (
        [{name: value for name, value in log.items() if "sync_check/" not in name} for log in logged(trainer)]
        for trainer in (left, right)
    )
    assert left_logs == right_logs
    for found, expected in ((parameters(left), parameters(right)), (critic_of(left), critic_of(right))):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# Checkpoints


def unbroken(path, policy, **options):
    """Returns a run's trainer, after a second run that was killed and resumed has come out the same."""
    whole = ppo(path / "whole", policy, **options)
    whole.train()
    with pytest.raises(Killed):
        ppo(path / "broken", policy, kill_at=2, **options).train()
    resumed = ppo(path / "broken", policy, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, whole)
    return whole


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2, "is_correction": "ais", "max_steps": 16, "save_steps": 8},
        {"beta": 0.1, "bf16": True, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 5e-4}},
        {"optim": "sgd", "value_learning_rate": 0.1},  # without a state, in which the schedule's rate could stand
    ],
    ids=["plain", "iterations", "reference", "sgd"],
)
def test_killed_and_resumed_equals_unbroken(tmp_path, policy, options):
    """Bit for bit: the log, the policy, the critic and the state of its optimizer."""
    whole = unbroken(tmp_path, policy, **options)
    half = options.get("save_steps", 4)
    # A critic that began anew, or whose optimizer did, would be another
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / f"whole/checkpoint-{half}/critic")
    end = AutoModelForTokenClassification.from_pretrained(tmp_path / f"whole/checkpoint-{2 * half}/critic")
    assert not torch.equal(saved.score.weight, end.score.weight) and saved.score.weight.abs().max() > 0
    assert torch.equal(end.score.weight, whole.critic.model.score.weight.cpu())


@pytest.mark.parametrize("options", [{"is_correction": "acr"}, {"vf_share_layers": True}], ids=["own", "shared"])
def test_a_resume_inside_a_generation(tmp_path, policy, options):
    """The values and returns of its samples go on too. Eight updates use a generation."""
    unbroken(tmp_path, policy, num_iterations=2, max_steps=12, save_steps=5, **options)
    assert (tmp_path / "whole/checkpoint-5/unfinished_generation_0.pt").is_file()


def test_killed_and_resumed_equals_unbroken_with_shared_layers(tmp_path, policy):
    """Bit for bit, where the checkpoint has the value head and its optimizer, and no second model."""
    options = {"vf_share_layers": True, "vf_coef": 0.5, "is_correction": "ais", "num_iterations": 2}
    whole = unbroken(tmp_path, policy, max_steps=16, save_steps=8, **options)
    saved, end = (load_file(tmp_path / f"whole/checkpoint-{step}/critic/model.safetensors") for step in (8, 16))
    assert {name: value.numel() for name, value in end.items()} == {"score.weight": 128, "score.bias": 1}
    assert not torch.equal(saved["score.weight"], end["score.weight"]) and saved["score.weight"].abs().max() > 0
    assert torch.equal(end["score.weight"], whole.critic.model.score.weight)
    states = [torch.load(tmp_path / f"whole/checkpoint-{step}/critic/optimizer.pt") for step in (8, 16)]
    first, last = (state["state"]["score.weight"]["exp_avg_sq"] for state in states)
    assert not torch.equal(first, last) and first.max() > 0


def test_a_resume_needs_the_critic(tmp_path, policy):
    """Whatever of it is missing or broken is named; a checkpoint with a critic alone has no weights."""
    trainer = ppo(tmp_path, policy)
    trainer.train()
    saved = tmp_path / "checkpoint-8"
    (saved / MANIFEST).unlink()  # as of an older version
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        file = saved / "critic" / name
        whole = file.read_bytes()
        file.unlink() if name != "optimizer.pt" else file.write_bytes(whole[:100])
        with pytest.raises(ValueError, match=r"checkpoint-8/critic(/optimizer.pt is damaged| lacks)"):
            ppo(tmp_path, policy, max_steps=12).train(resume_from_checkpoint=str(saved))
        file.write_bytes(whole)
    ppo(tmp_path, policy, max_steps=12).train(resume_from_checkpoint=str(saved))
    (saved / "model.safetensors").unlink()
    assert not has_whole_weights(saved)
    (tmp_path / "checkpoint-12" / "trainer_state.json").unlink()  # killed while saving
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-4")


@pytest.mark.parametrize("shares", [False, True])
def test_a_checkpoint_of_the_policy_alone(tmp_path, policy, caplog, shares):
    """A run resumes from it: the policy goes on, and the critic starts again."""
    options = {"save_only_model": True, "vf_share_layers": shares}
    first = ppo(tmp_path, policy, max_steps=4, **options)
    new = weights_of(first.critic.model)
    first.train()
    resumed = ppo(tmp_path, policy, **options)
    begun = {}

    def look():
        critic = resumed.critic
        begun.update(critic=weights_of(critic.model), policy=parameters(resumed), rates=critic.scheduler.get_last_lr())
        assert not critic.optimizer.state_dict()["state"]

    resumed.add_callback(Watch("on_train_begin", look))
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(begun["critic"][name], value) for name, value in new.items())
    assert not all(torch.equal(value, new[name]) for name, value in weights_of(first.critic.model).items())
    assert all(torch.equal(begun["policy"][name], value) for name, value in parameters(first).items())
    assert begun["rates"] == [3e-3, 3e-3] and resumed.state.global_step == 8
    assert "optimizer, learning rate schedule, critic and random state start again" in caplog.text


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_the_best_checkpoint_is_loaded_with_its_critic(tmp_path, policy, caplog, shares, alone):
    """The first of two is the best one. Without a critic in it, the last one stays, and the run says so."""

    def falling(completions, **kwargs):
        step = trainer.state.global_step
        return [(i % 3 if trainer.model.training else 10.0) - step for i in range(len(completions))]

    options = {"vf_share_layers": shares, "save_only_model": alone, "eval_strategy": "steps", "eval_steps": 4}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    trainer = ppo(tmp_path, policy, given={"reward_funcs": falling, "eval_dataset": dataset(8)}, **options)
    last = {}

    def look():
        last.update(critic=weights_of(trainer.critic.model), policy=parameters(trainer))

    trainer.add_callback(Watch("on_step_end", look))
    trainer.train()
    best = tmp_path / "checkpoint-4"
    assert trainer.state.best_model_checkpoint == str(best)
    saved = load_file(best / "model.safetensors")
    assert all(torch.equal(value, parameters(trainer)[name]) for name, value in saved.items())
    assert not all(torch.equal(value, last["policy"][name]) for name, value in saved.items())
    expected = last["critic"] if alone else load_file(best / "critic/model.safetensors")
    found = weights_of(trainer.critic.model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert alone or not all(torch.equal(found[name], last["critic"][name]) for name in found)
    assert ("without its critic: the critic stays the last" in caplog.text) == alone


def test_a_resume_with_other_advantages_is_refused(tmp_path, policy):
    ppo(tmp_path, policy).train()
    others = {"lam": 0.9, "gamma": 0.5, "cliprange_value": None, "value_learning_rate": 1e-4, "vf_share_layers": True}
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"`{name}`: .* -> {value}"):
            ppo(tmp_path, policy, max_steps=12, **{name: value}).train(resume_from_checkpoint=True)


def test_the_critic_of_a_checkpoint_starts_another_run(tmp_path, policy):
    first = ppo(tmp_path / "first", policy)
    first.train()
    second = ppo(tmp_path / "second", policy, value_model_name_or_path=str(tmp_path / "first/checkpoint-8/critic"))
    theirs = dict(first.critic.model.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in second.critic.model.named_parameters())


@pytest.mark.parametrize("what", ["gradient", "weight"])
def test_a_critic_that_is_not_finite_ends_the_run(tmp_path, policy, what):
    trainer = ppo(tmp_path, policy)
    trainer.critic.model.score.bias.register_hook(
        lambda gradient: gradient * (torch.nan if what == "gradient" and trainer.state.global_step == 5 else 1.0)
    )
    if what == "weight":
        step = trainer.critic.optimizer.optimizer.register_step_post_hook(
            lambda *args: trainer.state.global_step == 7 and trainer.critic.model.score.bias.data.fill_(torch.nan)
        )
        assert step is not None
    says = "Step 6 of the critic is not finite" if what == "gradient" else "critic's `score.bias` is not finite after"
    with pytest.raises(RuntimeError, match=says):
        trainer.train()
    assert not (tmp_path / "checkpoint-8").exists()
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-4")


def test_it_is_trained_again(tmp_path, policy):
    """A second training continues from the weights of the first, with a schedule of its own."""
    trainer = ppo(tmp_path, policy, save_strategy="no")
    trainer.train()
    rates = []
    trainer.critic.optimizer.optimizer.register_step_pre_hook(lambda o, *args: rates.append(o.param_groups[0]["lr"]))
    trainer.train()
    assert rates == pytest.approx([3e-3 * (8 - i) / 8 for i in range(8)])


# What is refused

CONFIGS = [
    ({"scale_rewards": "group"}, "`scale_rewards`='group' compares the completions"),
    ({"scale_rewards": "batch"}, "`scale_rewards`='batch' compares"),
    ({"loss_type": "cispo"}, "`loss_type`='cispo' does not clip the ratio of each token"),
    ({"loss_type": "luspo"}, "`loss_type`='luspo' does not clip"),
    ({"importance_sampling_level": "sequence"}, "`importance_sampling_level`='sequence' has one ratio"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "`multi_objective_aggregation`='normalize_then_sum'"),
    ({"dynamic_sampling_rounds": 1}, "`dynamic_sampling_rounds`=1 acts only with a trainer that has dynamic sampling"),
    ({"optim": "adalomo"}, "PPO's critic cannot be trained with `optim`='adalomo', which is built around one model"),
    ({"optim": "schedule_free_adamw"}, "into training mode for the policy alone. Use"),
    (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
        "PPO's critic cannot be trained with `lr_scheduler_type`=",
    ),
    ({"num_generations": 0}, "`num_generations`=0 is out of range"),
    ({"num_generations": 3}, r"generation_batch_size \(8\) must be divisible by num_generations \(3\)"),
    ({"num_generations": "1"}, "`num_generations`='1' must be an integer"),
    ({"gamma": 1.5}, "`gamma`=1.5 is out of range"),
    ({"lam": -0.1}, "`lam`=-0.1 is out of range"),
    ({"cliprange_value": 0.0}, "`cliprange_value`=0.0 is out of range"),
    ({"value_learning_rate": -1.0}, "`value_learning_rate`=-1.0 is out of range"),
    ({"value_model_name_or_path": 3}, "`value_model_name_or_path`=3 must be a string or None"),
    ({"vf_coef": 0.5}, "`vf_coef`=0.5 acts only with `vf_share_layers=True`"),
    ({"vf_coef": 0.0, "vf_share_layers": True}, "`vf_coef`=0.0 is out of range"),
    ({"vf_share_layers": 1}, "`vf_share_layers`=1 must be True or False"),
    (
        {"vf_share_layers": True, "value_model_name_or_path": "x"},
        "`value_model_name_or_path`='x' is a critic of its own",
    ),
    ({"vf_share_layers": True, "torch_compile": True}, "a policy compiled with `torch_compile` does not expose them"),
]


@pytest.mark.parametrize(("settings", "says"), CONFIGS, ids=lambda value: str(value)[:40])
def test_a_config_refuses(tmp_path, settings, says):
    with pytest.raises(ValueError, match=says):
        config(QuantPPOConfig, tmp_path, **{"num_generations": 1} | settings)


@pytest.mark.parametrize(("name", "says"), [("fp16", "`fp16`"), ("fsdp_version", "FSDP1"), ("deepspeed", "DeepSpeed")])
def test_a_config_refuses_other_ways_to_shard(tmp_path, monkeypatch, name, says):
    if name == "fsdp_version":
        monkeypatch.setattr(QuantPPOConfig, "fsdp_version", 1)
    built = config(QuantPPOConfig, tmp_path, num_generations=1) if name != "fsdp_version" else None
    if name == "fp16":
        built.fp16 = True
    if name == "deepspeed":
        built.deepspeed_plugin = object()
    with pytest.raises(ValueError, match=f"PPO's critic cannot be trained with {says}"):
        config(QuantPPOConfig, tmp_path, num_generations=1) if built is None else check_what("fields", Given(built))


def test_a_schedule_that_knows_one_optimizer_is_refused(tmp_path, policy):
    """Before anything is loaded. An optimizer is the policy's alone, and taken."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    args = config(QuantPPOConfig, tmp_path, num_generations=1)
    with pytest.raises(ValueError, match=r"`optimizers` has a schedule.*`lr_scheduler_type`"):
        make(QuantPPOTrainer, args, model=str(tmp_path / "nowhere"), optimizers=(optimizer, schedule))
    assert make(QuantPPOTrainer, args, model=policy, optimizers=(optimizer, None)).optimizer is optimizer


def test_defaults(tmp_path):
    """One completion a prompt, which GRPO still refuses; TRL's check is back where it was."""
    built = config(QuantPPOConfig, tmp_path, num_generations=1, is_correction="ais", rollout_precision="int8")
    assert (built.num_generations, built.scale_rewards, built.loss_type) == (1, "none", "grpo")
    assert type(built.num_generations) is int
    assert config(QuantPPOConfig, tmp_path, num_generations=4).loss_type == "dapo"
    for kind in (GRPOConfig, QuantGRPOConfig):
        with pytest.raises(ValueError, match="requires at least 2 generations"):
            config(kind, tmp_path, num_generations=1)
    with pytest.raises(ValueError, match=r"`args` is a GRPOConfig\. It must be a `QuantPPOConfig`"):
        QuantPPOConfig.from_trl(config(GRPOConfig, tmp_path))


def test_a_trainer_takes_its_own_config(tmp_path, policy):
    for kind, other in ((QuantPPOTrainer, QuantGRPOConfig), (QuantGRPOTrainer, QuantPPOConfig)):
        with pytest.raises(ValueError, match="PPO has a critic, and GRPO compares"):
            make(kind, config(other, tmp_path), model=policy)


def test_a_critic_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path, policy, monkeypatch):
    monkeypatch.setattr("trl_quant.trainers.sampling.engine_of", None)  # which would load the policy
    fewer = save_tiny(tmp_path / "fewer", vocab_size=300)
    quantized = shutil.copytree(policy, tmp_path / "quantized")
    written = json.loads((quantized / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "fp8"}
    (quantized / "config.json").write_text(json.dumps(written))
    cases = {
        str(tmp_path / "nowhere"): "is neither a directory here",
        fewer: "has 300 tokens, and the policy 320",
        str(quantized): "is quantized, and the critic trains all of its weights",
        save_tiny_vision(tmp_path / "vision"): "`model_type`='blip-2', of which transformers has no token classifier",
    }
    for name, says in cases.items():
        with pytest.raises(ValueError, match=f"{re.escape(repr(name))}.*{says}"):
            ppo(tmp_path, policy, value_model_name_or_path=name)
    with pytest.raises(ValueError, match="built in memory, and the critic starts from a checkpoint"):
        ppo(tmp_path, tiny_model(seed=3))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # a value head needs none
        ppo(tmp_path, tiny_model(seed=3), vf_share_layers=True)
    pictures = dataset(8).add_column("image", [None] * 8)
    named = {
        "`train_dataset`": {"train_dataset": pictures},
        "`eval_dataset`": {"eval_dataset": pictures},
        r"`eval_dataset\['b'\]`": {"eval_dataset": {"a": dataset(8), "b": pictures}},
    }
    for shares in (False, True):
        for name, given in named.items():
            with pytest.raises(ValueError, match=f"{name} has a column 'image', and the critic reads only text"):
                ppo(tmp_path, policy, given=given, vf_share_layers=shares)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        ppo(tmp_path, policy, given={"eval_dataset": {"a": dataset(8)}})


def test_a_critic_gives_one_value(tmp_path, policy):
    """A reward model of two labels is refused before it is loaded; one of one label and a language model are taken."""
    for kind, labels in ((AutoModelForSequenceClassification, 2), (AutoModelForTokenClassification, 3)):
        name = str(tmp_path / f"labels{labels}")
        kind.from_pretrained(policy, num_labels=labels).save_pretrained(name)
        (tmp_path / f"labels{labels}/model.safetensors").unlink()
        says = f"critic's {name!r} is a Qwen3For.*Classification with {labels} labels, and a critic gives one value"
        with pytest.raises(ValueError, match=f"{says}.*`value_model_name_or_path`"):
            ppo(tmp_path, policy, value_model_name_or_path=name)
    reward = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    reward.score.weight.data.fill_(0.5)
    reward.save_pretrained(tmp_path / "reward")
    score = ppo(tmp_path, policy, value_model_name_or_path=str(tmp_path / "reward")).critic.model.score
    assert (score.weight == 0.5).all() and score.bias == 0
    assert AutoConfig.from_pretrained(policy).num_labels == 2
    assert (ppo(tmp_path, policy).critic.model.score.weight == 0).all()


@pytest.mark.parametrize("other", [False, True])
def test_the_policys_revision_is_that_of_its_own_checkpoint_alone(tmp_path, policy, monkeypatch, other):
    """The check before loading and the loading itself read the critic alike."""
    asked, read = [], AutoConfig.from_pretrained

    def spy(name, **options):
        asked.append((str(name), options.get("revision")))
        return read(name, **options)

    critic = str(shutil.copytree(policy, tmp_path / "critic")) if other else policy
    settings = {"num_generations": 1, "model_init_kwargs": {"revision": "r"}}
    args = config(QuantPPOConfig, tmp_path, value_model_name_or_path=critic if other else None, **settings)
    monkeypatch.setattr(AutoConfig, "from_pretrained", spy)
    check_before_loading(policy, args, dataset(), None, None, reward_funcs=spread)
    assert set(asked) == ({(policy, "r"), (critic, None)} if other else {(policy, "r")})
    asked.clear()
    load_critic(critic, args)
    assert set(asked) == {(critic, None if other else "r")}


def test_a_critic_without_its_layers_is_refused(tmp_path, policy):
    """A checkpoint whose names do not match would be a critic of zeros; one without a head is a language model."""
    other = shutil.copytree(policy, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    args = config(QuantPPOConfig, tmp_path, num_generations=1)
    assert load_critic(str(other), args).model.norm.weight.abs().max() > 0
    renamed = {name.replace("q_proj", "query"): value for name, value in weights.items()}
    save_file(renamed, other / "model.safetensors", {"format": "pt"})
    says = (
        f"{re.escape(repr(str(other)))} lacks 2 weights of a Qwen3ForTokenClassification: .*0.self_attn.q_proj.weight"
    )
    with pytest.raises(ValueError, match=says + ".*`value_model_name_or_path`"):
        load_critic(str(other), args)


def test_a_new_head_has_memory_on_every_rank(tmp_path, policy, monkeypatch):
    """On ranks that read no file, transformers 5.23 leaves it on "meta", where all weights have one address."""
    load = AutoModelForTokenClassification.from_pretrained

    def without_a_head(*args, **given):
        model, loaded = load(*args, **given)
        model.score.to("meta")
        return model, loaded

    monkeypatch.setattr(AutoModelForTokenClassification, "from_pretrained", without_a_head)
    head = load_critic(policy, config(QuantPPOConfig, tmp_path, num_generations=1)).score
    assert all(part.device.type == "cpu" and part.requires_grad and not part.any() for part in head.parameters())
    assert head.weight.data_ptr() != head.bias.data_ptr() and head.weight.data_ptr() != 0


def test_a_policy_that_was_quantized_as_it_was_loaded(tmp_path, policy):
    """Its critic starts from the checkpoint, which is not quantized."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    args = config(QuantPPOConfig, tmp_path, num_generations=1)
    check_before_loading(model, args, dataset(), None, None, reward_funcs=spread)
    with pytest.raises(ValueError, match="is quantized, and the critic trains all of its weights"):
        model.config.save_pretrained(tmp_path / "quantized")
        args.value_model_name_or_path = str(tmp_path / "quantized")
        check_before_loading(model, args, dataset(), None, None, reward_funcs=spread)


def test_a_critic_without_packed_rows(tmp_path, policy, caplog):
    """Of another family: it computes padding, and says so; with `pack_sequences=True` it is refused."""
    other = save_tiny(tmp_path / "critic", "gemma2")
    trainer = ppo(tmp_path, policy, value_model_name_or_path=other)
    assert trainer.packs and not trainer.critic.packs and "the critic's attention caps logits" in caplog.text
    with pytest.raises(ValueError, match="`pack_sequences`=True cannot act: the critic's attention caps logits"):
        ppo(tmp_path, policy, value_model_name_or_path=other, pack_sequences=True)


# vLLM


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("options", "adapted"),
    [
        ({}, False),
        ({"vf_share_layers": True, "vf_coef": 0.5}, False),
        ({"vf_share_layers": True, "vf_coef": 0.5}, True),
    ],
    ids=["own", "shared", "shared, merged"],
)
def test_vllm_ends_as_a_fresh_engine(tmp_path, options, adapted):
    """
    Two generations of two updates each in INT8; after them live equals fresh, bit for bit. A run that resumes from
    the checkpoint between them comes out the same.
    """
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import SMALL, assert_live_equals_fresh, keep

    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_engine_kwargs": SMALL}
    settings = {
        "steps_per_generation": 2,
        "max_steps": 4,
        "save_steps": 2,
        "rollout_precision": "int8",
        "sync_check_steps": 1,
    }
    peft_config = lora() if adapted else None
    trainer, resumed = (
        ppo(tmp_path, model, given={"peft_config": peft_config}, **settings, **vllm, **options) for _ in range(2)
    )
    keep([trainer, resumed])
    trainer.train()
    assert [entry["step"] for entry in logged(trainer) if entry.get("mismatch/kl_k3", 0) > 0] == [1, 3]
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(resumed, trainer)
    trainer.check_sync()
    assert_live_equals_fresh(trainer.vllm_generation.engine, trainer.model, "int8", tmp_path)
