"""`QuantPPOTrainer`: how updates add up, two models' rates and clipping, what it composes with, and that it learns."""

import math

import pytest
import torch
from long_tests import rest_is_long
from ppo_gradients import Uneven, distance, ppo, set_head
from training import dataset, lora, metrics, parameters


pytestmark = pytest.mark.isa


@pytest.mark.parametrize("shares", [False, True])
def test_minibatches_and_iterations_add_up(tmp_path, models, shares):
    """Four micro-batches in one update end where one does; the same in four updates does not."""
    ends = []
    for size, accumulated in ((8, 1), (2, 4), (2, 1)):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        settings |= {"steps_per_generation": 8 // size, "max_steps": 8 // size // accumulated}
        settings |= {"optim": "sgd", "learning_rate": 0.1, "value_learning_rate": 0.1, "max_grad_norm": 0.0}
        settings |= {"lr_scheduler_type": "constant", "vf_share_layers": shares, "loss_type": "dapo"}
        settings |= {} if shares else {"value_model_name_or_path": models["critic"]}
        trainer = ppo(tmp_path / str(len(ends)), models, Uneven, is_correction="decoupled", **settings)
        if shares:
            set_head(trainer)
        starts = flat(parameters(trainer)), flat(dict(trainer.critic.model.named_parameters()))
        trainer.train()
        ends.append([flat(parameters(trainer)), flat(dict(trainer.critic.model.named_parameters()))])
    for one, four, updates, begun in zip(*ends, starts, strict=True):
        assert distance(four - begun, one - begun) < 1e-3
        assert distance(updates - begun, one - begun) > 1e-2


def flat(tensors) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in tensors.values()]).double()


def rates_of(trainer) -> tuple[list[float], list[float]]:
    """The learning rates of critic and policy in a training."""
    rates = []
    trainer.critic.optimizer.optimizer.register_step_pre_hook(
        lambda optimizer, *args: rates.append([group["lr"] for group in optimizer.param_groups])
    )
    trainer.train()
    assert all(rate == other for rate, other in rates)
    return [rate for rate, _ in rates], [entry["learning_rate"] for entry in metrics(trainer) if "loss" in entry]


@pytest.mark.parametrize(
    ("schedule", "options", "height"),
    [
        # A rate above the policy's, one below the rate that is given as the schedule's end, and none
        *(("cosine_with_min_lr", {"min_lr": 2e-4}, height) for height in (3e-3, 1e-5)),
        *(("polynomial", {"lr_end": 5e-4}, height) for height in (1e-5, 0.0)),
        pytest.param("polynomial", {}, 3e-3, marks=pytest.mark.long),
        pytest.param("linear", {}, 0.0, marks=pytest.mark.long),
        pytest.param("warmup_stable_decay", {"num_decay_steps": 2}, 1e-5, marks=pytest.mark.long),
    ],
)
def test_the_critics_rate_follows_the_policys(tmp_path, models, schedule, options, height):
    """Also where the schedule ends at a rate that is given, which is the policy's."""
    settings = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": options, "warmup_steps": 1, "max_steps": 4}
    rates, policys = rates_of(ppo(tmp_path, models, value_learning_rate=height, vf_share_layers=True, **settings))
    assert rates == pytest.approx([height / 1e-3 * rate for rate in policys], rel=1e-6, abs=0)
    assert policys[0] == 0 < policys[3] < policys[1] == 1e-3


def test_the_critic_learns_beside_a_policy_that_does_not(tmp_path, models):
    rates, policys = rates_of(ppo(tmp_path, models, learning_rate=0.0, value_learning_rate=1e-3, max_steps=4))
    assert policys == [0] * 4 and rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_the_critics_gradient_is_clipped_by_itself(tmp_path, models):
    norms = []
    trainer = ppo(tmp_path, models, max_steps=4, value_learning_rate=3e-3, max_grad_norm=0.05)
    critic = trainer.critic
    critic.optimizer.optimizer.register_step_pre_hook(
        lambda *args: norms.append(torch.stack([p.grad.norm() for p in critic.model.parameters()]).norm().item())
    )
    trainer.train()
    assert norms == pytest.approx([0.05] * 4, rel=1e-3)
    assert min(entry["value/grad_norm"] for entry in metrics(trainer) if "loss" in entry) > 0.05


COMPOSED = {
    "iterations": {"num_iterations": 2, "is_correction": "acr"},
    "steps_per_generation": {"per_device_train_batch_size": 2, "steps_per_generation": 4, "is_correction": "ais"},
    "groups": {"num_generations": 4},
    "reference": {"beta": 0.1, "is_correction": "coupled", "use_bias_correction_kl": False},
    "truncated": {"mask_truncated_completions": True},
    "multiple": {"pad_to_multiple_of": 5},
    "padded": {"pack_sequences": False},
    "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2},
    "mixed_precision": {"bf16": True, "gradient_checkpointing": True},
    "bf16_weights": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "uaq": {"uaq_scale": 1.5},
    "trained": {"rollout_precision": None, "train_precision": "int8"},
    "unquantized": {"rollout_precision": None},
    "unclipped": {"cliprange_value": None},
    "lora": {"rollout_precision": "nf4"},
    "frozen": {"rollout_precision": None, "train_precision": "nvfp4"},
    "shared_eval": {"vf_share_layers": True, "eval_strategy": "steps", "eval_steps": 1},
    "shared_mixed_precision": {"vf_share_layers": True, "bf16": True, "gradient_checkpointing": True},
    "shared_frozen": {"vf_share_layers": True, "rollout_precision": None, "train_precision": "nvfp4"},
    "shared_trained": {"vf_share_layers": True, "rollout_precision": None, "train_precision": "int8"},
}


@pytest.mark.parametrize(
    "option",
    rest_is_long(COMPOSED, "steps_per_generation", "padded", "groups", "reference", "lora", "shared_mixed_precision"),
)
def test_composes_with_trl(tmp_path, models, option):
    adapted, evaluates = option.endswith(("lora", "frozen")), option.endswith("eval")
    given = {"peft_config": lora() if adapted else None, "eval_dataset": dataset(2) if evaluates else None}
    trainer = ppo(tmp_path, models, given=given, **{"rollout_precision": "int8"} | COMPOSED[option])
    before, critic = parameters(trainer), flat(dict(trainer.critic.model.named_parameters()))
    trainer.train()
    logs = [entry for entry in metrics(trainer) if "loss" in entry]
    assert len(logs) == 2 and all(math.isfinite(entry["loss"]) for entry in logs)
    if option != "truncated":  # every completion of a random model is cut, and then nothing counts
        moved = {name for name, value in parameters(trainer).items() if not torch.equal(value, before[name])}
        assert moved and all("lora_" in name for name in moved) == adapted
        assert not torch.equal(flat(dict(trainer.critic.model.named_parameters())), critic)
        assert all(entry["value/loss"] > 0 and entry["value/grad_norm"] > 0 for entry in logs)
        assert ("value/clip_fraction" in logs[0]) == (option != "unclipped")
    if evaluates:
        assert any(entry.get("eval_value/loss", 0) > 0 for entry in metrics(trainer))
    assert ("mismatch/kl_k3" in logs[0]) == (option != "unquantized")


def test_it_learns(tmp_path, models):
    """To write the first 64 tokens, of 320."""

    def low(completions, completion_ids, **kwargs):
        return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]

    settings = {"max_steps": 24, "learning_rate": 3e-3, "value_learning_rate": 3e-3, "per_device_train_batch_size": 16}
    settings |= {"max_completion_length": 4, "lr_scheduler_type": "constant", "rollout_precision": "int8"}
    given = {"reward_funcs": low, "train_dataset": dataset(32)}
    trainer = ppo(tmp_path, models, given=given, steps_per_generation=2, is_correction="acr", **settings)
    trainer.train()
    rewards = [entry["reward"] for entry in metrics(trainer) if "reward" in entry]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25  # from 0.2 to 0.8


def test_shared_layers_learn_what_a_prompt_is_worth(tmp_path, models):
    """A reward that the prompt's length decides."""

    def long(prompts, **kwargs):
        return [float(len(prompt) > 10) for prompt in prompts]

    settings = {"max_steps": 24, "learning_rate": 3e-3, "value_learning_rate": 1e-2, "per_device_train_batch_size": 16}
    settings |= {"max_completion_length": 4, "lr_scheduler_type": "constant", "rollout_precision": "int8"}
    settings |= {"vf_share_layers": True, "vf_coef": 1.0, "cliprange_value": None, "steps_per_generation": 2}
    trainer = ppo(tmp_path, models, given={"reward_funcs": long, "train_dataset": dataset(64)}, **settings)
    trainer.train()
    found = [entry["value/explained_variance"] for entry in metrics(trainer) if "value/explained_variance" in entry]
    assert found[0] == 0 and sum(found[-3:]) / 3 > 0.25  # 0.6
