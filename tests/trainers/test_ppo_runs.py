"""Runs of `QuantPPOTrainer`: killed and resumed ones, and vLLM's engine."""

from functools import partial

import pytest
import torch
from long_tests import rest_is_long
from ppo_runs import ppo
from safetensors.torch import load_file
from tiny import save_tiny
from training import dataset, killed_and_resumed, lora, metrics, parameters
from transformers import (
    AutoModelForTokenClassification,
    TrainerCallback,
)

from trl_quant.storage.manifest import MANIFEST
from trl_quant.storage.run_checkpoints import has_whole_weights, last_complete_checkpoint


pytestmark = pytest.mark.isa


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


SHORT = {"per_device_train_batch_size": 4, "steps_per_generation": 2}  # two updates on a generation instead of four


def unbroken(path, policy, **options):
    """Returns a run's trainer, after a second run that was killed and resumed has come out the same."""
    whole, resumed = killed_and_resumed(partial(ppo, policy=policy, **options), path, kill_at=2)
    assert_same(resumed, whole)
    return whole


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        SHORT | {"num_iterations": 2, "is_correction": "ais", "max_steps": 8, "save_steps": 4},
        pytest.param(
            SHORT
            | {
                "max_steps": 4,
                "save_steps": 2,
                "beta": 0.1,
                "bf16": True,
                "lr_scheduler_type": "polynomial",
                "lr_scheduler_kwargs": {"lr_end": 5e-4},
            },
            marks=pytest.mark.long,
        ),
        # Without a state, in which the schedule's rate could stand
        pytest.param({"optim": "sgd", "value_learning_rate": 0.1}, marks=pytest.mark.long),
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


@pytest.mark.parametrize(
    "options", rest_is_long([{"is_correction": "acr"}, {"vf_share_layers": True}]), ids=["own", "shared"]
)
def test_a_resume_inside_a_generation(tmp_path, policy, options):
    """The values and returns of its samples go on too. Four updates use a generation."""
    unbroken(tmp_path, policy, num_iterations=2, max_steps=6, save_steps=3, **SHORT, **options)
    assert (tmp_path / "whole/checkpoint-3/unfinished_generation_0.pt").is_file()


def test_killed_and_resumed_equals_unbroken_with_shared_layers(tmp_path, policy):
    """Bit for bit, where the checkpoint has the value head and its optimizer, and no second model."""
    options = SHORT | {"vf_share_layers": True, "vf_coef": 0.5, "is_correction": "ais", "num_iterations": 2}
    whole = unbroken(tmp_path, policy, max_steps=8, save_steps=4, **options)
    saved, end = (load_file(tmp_path / f"whole/checkpoint-{step}/critic/model.safetensors") for step in (4, 8))
    assert {name: value.numel() for name, value in end.items()} == {"score.weight": 128, "score.bias": 1}
    assert not torch.equal(saved["score.weight"], end["score.weight"]) and saved["score.weight"].abs().max() > 0
    assert torch.equal(end["score.weight"], whole.critic.model.score.weight)
    states = [torch.load(tmp_path / f"whole/checkpoint-{step}/critic/optimizer.pt") for step in (4, 8)]
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
@pytest.mark.parametrize("alone", rest_is_long([False, True]))
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


@pytest.mark.long
def test_it_is_trained_again(tmp_path, policy):
    """A second training continues from the weights of the first, with a schedule of its own."""
    trainer = ppo(tmp_path, policy, save_strategy="no")
    trainer.train()
    rates = []
    trainer.critic.optimizer.optimizer.register_step_pre_hook(lambda o, *args: rates.append(o.param_groups[0]["lr"]))
    trainer.train()
    assert rates == pytest.approx([3e-3 * (8 - i) / 8 for i in range(8)])


# vLLM


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("options", "adapted"),
    rest_is_long([({"vf_share_layers": True, "vf_coef": 0.5}, True), ({}, False)]),
    ids=["shared, merged", "own"],
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


@pytest.mark.parametrize("shares", rest_is_long([True, False]))
def test_gradients_of_an_interrupted_step_are_dropped(tmp_path, policy, shares):
    """Between two micro-batches, in a notebook: the same trainer goes on."""

    class Interrupted(TrainerCallback):
        armed = True

        def on_substep_end(self, args, state, control, **kwargs):
            if self.armed and state.global_step == 3:
                self.armed = False
                raise KeyboardInterrupt

    given = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    given |= {"save_steps": 2, "max_steps": 4, "vf_share_layers": shares, "given": {"train_dataset": dataset(32)}}
    whole = ppo(tmp_path / "whole", policy, **given)
    whole.train()
    stopped = ppo(tmp_path / "stopped", policy, **given)
    stopped.add_callback(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    stopped.train(resume_from_checkpoint=True)
    for left, right in ((whole.model, stopped.model), (whole.critic.model, stopped.critic.model)):
        now = dict(right.named_parameters())
        assert all(torch.equal(now[name], value) for name, value in left.named_parameters())
