"""
Unfinished completions go on in the next generation: each token has the log-probability of the weights that sampled it,
each prompt is sampled once, and the gradients are those of slow references. Engine and policy compute in FP32, so that
age alone makes their log-probabilities differ.
"""

import logging
import math

import pytest
import torch
from long_tests import rest_is_long
from reference import DROPPING, OBJECTIVES, hyperparameters, rloo_gradient
from reference_ppo import logps as slow_logps
from remembering import partial_run
from training import Killed, dataset, killing, metrics, parameters, trainer_for

from trl_quant import QuantDistillationTrainer, QuantGRPOTrainer, QuantPPOTrainer, QuantRLOOTrainer
from trl_quant.corrections import CORRECTIONS


pytestmark = pytest.mark.isa

KINDS = {
    "GRPO": QuantGRPOTrainer,
    "RLOO": QuantRLOOTrainer,
    "PPO": QuantPPOTrainer,
    "distillation": QuantDistillationTrainer,
}
each_kind = pytest.mark.parametrize("kind", KINDS)
SETTINGS = {
    "PPO": {"num_generations": 1, "vf_share_layers": True},
    "distillation": {"is_correction": "tis"},
    "RLOO": {"beta": 0.0},
}


def run_of(path, kind, **given):
    return partial_run(path, KINDS[kind], **SETTINGS.get(kind, {}) | given)


def noted(trainer) -> list[dict]:
    """The list to which the trainer will add each micro-batch, as its loss gets it, with the policy's log-probs."""
    seen, compute = [], trainer._compute_loss

    def computed(model, inputs, *others):
        with torch.no_grad():
            seen.append(dict(inputs) | {"now": slow_logps(trainer.model.eval(), inputs)})
            trainer.model.train()
        return compute(model, inputs, *others)

    trainer._compute_loss = computed
    return seen


def of_versions(trainer, batch: dict, generation: int) -> torch.Tensor:
    """The log-probabilities `(B, T)` of a batch's tokens under the weights that sampled each of them."""
    found = torch.full(batch["ages"].shape, math.nan)
    for age in batch["ages"][batch["completion_mask"].bool()].unique().tolist():
        scored = slow_logps(trainer.memory.versions[generation - age], batch)
        found = torch.where(batch["ages"] == age, scored, found)
    return found.detach()


@pytest.mark.parametrize("kind", rest_is_long(KINDS, "GRPO", "PPO"))
def test_each_token_has_the_log_probability_of_its_version(tmp_path, kind):
    trainer = run_of(tmp_path, kind)
    batches = noted(trainer)
    trainer.train()
    ages = set()
    for generation, batch in enumerate(batches):
        mask = batch["completion_mask"].bool()
        mu, right = batch["sampling_per_token_logps"], of_versions(trainer, batch, generation)
        assert (mu - right).abs()[mask].max() < 1e-5
        young = mask & (batch["ages"] == 0)
        assert not young.any() or ((batch["now"] - mu).exp() - 1).abs()[young].max() < 1e-5
        old = mask & (batch["ages"] > 0)
        if old.any():  # another version's differ: the test could tell
            assert (batch["now"] - mu).abs()[old].max() > 1e-3
            ages |= set(batch["ages"][old].tolist())
        log = metrics(trainer)[generation]
        assert log["rollouts/age"] == pytest.approx(batch["ages"][mask].float().mean().item())
        assert log["rollouts/age_max"] == batch["ages"][mask].max()
    assert ages >= {1}


@pytest.mark.parametrize("kind", rest_is_long(KINDS, "GRPO", "distillation"))
def test_every_prompt_is_sampled_once_in_trls_order(tmp_path, kind):
    """Over two epochs and a half, whose border a generation straddles; nothing is left at the end of the run."""
    settings = {"train_dataset": dataset(7), "num_train_epochs": 2.5, "max_steps": -1, "save_strategy": "no"}
    runs = {
        factor: run_of(tmp_path / str(factor), kind, rollouts_in_flight=factor, **settings) for factor in (1.0, 3.0)
    }
    for trainer in runs.values():
        trainer.train()
    plain, partial = (trainer.memory.starts for trainer in runs.values())
    assert len(plain) > 7 and plain == partial
    assert not runs[3.0].pool.groups and runs[3.0].pool.generation == runs[1.0].state.global_step
    trained = metrics(runs[3.0])
    assert [log["step"] for log in trained] == [log["step"] for log in metrics(runs[1.0])]
    assert sum(log.get("rollouts/carried", 0) for log in trained) > 0


def test_rows_and_rewards_stay_with_their_completions(tmp_path):
    """Rewards see each completion with the columns of its own row, groups whole."""
    seen = []

    def reward(prompts, completions, completion_ids, number, **kwargs):
        seen.append([*zip(prompts, map(tuple, completion_ids), number, strict=True)])
        return [float(sum(ids) % 5) for ids in completion_ids]

    data = dataset(8).add_column("number", [*range(8)])
    trainer = run_of(tmp_path, "GRPO", train_dataset=data, reward_funcs=reward, max_steps=4)
    batches = noted(trainer)
    trainer.train()
    rows = dict(zip(data["prompt"], data["number"], strict=True))
    for calls, batch in zip(seen, batches, strict=True):
        assert all(rows[prompt] == number for prompt, _, number in calls)
        assert all(calls[i][0] == calls[i + 1][0] for i in range(0, 4, 2)) and calls[0][0] != calls[2][0]
        # What was sampled from a prompt is scored with that prompt's row. TRL shuffles the rows of a generation
        expected = [(tuple(trainer._tokenize_prompts([prompt])[0][0]), ids) for prompt, ids, _ in calls]
        parts = (batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"))
        rows_of_batch = zip(*parts, strict=True)
        kept = [(tuple(p[m.bool()].tolist()), tuple(c[n.bool()].tolist())) for p, m, c, n in rows_of_batch]
        assert sorted(kept) == sorted(expected)
    returned = [(prompt, ids) for calls in seen for prompt, ids, _ in calls]
    assert len({prompt for prompt, _ in returned}) == 8


def test_lengths_of_a_start_and_of_a_return(tmp_path):
    """The first generations return the short ones of their start; over the run both have the same mean."""
    seen, lengths = [], {}

    def reward(prompts, completion_ids, **kwargs):
        seen.append([len(ids) for ids in completion_ids])
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            lengths.setdefault(prompt, []).append(len(ids))
        return [float(sum(ids) % 5) for ids in completion_ids]

    settings = {"train_dataset": dataset(16), "max_steps": 8, "max_completion_length": 30}
    trainer = run_of(tmp_path, "GRPO", rollouts_in_flight=3.0, reward_funcs=reward, **settings)
    trainer.train()
    order = [trainer.train_dataset[trainer.pool.order[place]]["prompt"] for place in range(16)]
    logs = [log for log in metrics(trainer) if "loss" in log]
    told = [log["rollouts/started_length"] for log in logs if "rollouts/started_length" in log]
    # 6 groups start in the first generation, then 2 in each, until the last two have none left to start
    starts = [order[:6], *(order[i : i + 2] for i in range(6, 16, 2))]
    means = [torch.tensor([lengths[prompt] for prompt in start]).float().mean().item() for start in starts]
    assert told and all(any(abs(length - mean) < 1e-4 for mean in means) for length in told)
    assert not trainer.pool.cohorts
    assert sum(seen[0]) / 4 < means[0]


def gradient(loss, model) -> torch.Tensor:
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True)
    return torch.cat([part.flatten() for part in found]).double()


@pytest.mark.parametrize(
    ("kind", "correction"),
    rest_is_long(
        [
            *(("GRPO", name) for name in CORRECTIONS),
            # Each way in which a correction acts: another proximal policy, weights of a batch, fewer sequences, updates
            *(("RLOO", name) for name in ("coupled", "ais", "geometric", "dppo")),
            # PPO has GRPO's loss: weights, clip bounds, and its own advantages of dropped sequences
            *(("PPO", name) for name in ("decoupled", "acr", "trm")),
        ],
        *(("GRPO", name) for name in ("coupled", "tis", "acr", "ais", "geometric", "dppo")),
        *(("RLOO", "ais"), ("PPO", "trm")),
    ),
)
def test_gradients_are_those_of_the_slow_references(tmp_path, kind, correction):
    """Of the batch of a third generation, with each weight from the version of its token; age 0 is a shortcut."""
    given = DROPPING.get(correction, {}) | ({"geometric_epsilon": 0.02} if correction == "geometric" else {})
    loss_type = {} if kind == "RLOO" else {"loss_type": "bnpo"}
    trainer = run_of(
        tmp_path, kind, is_correction=correction, max_steps=3, max_completion_length=8, **loss_type, **given
    )
    distances, compute = [], trainer._compute_loss

    def computed(model, inputs, *others):
        loss = compute(model, inputs, *others)
        mine, batch = gradient(loss, trainer.model), dict(inputs)
        mask, advantages = batch["completion_mask"], batch["advantages"]
        now = slow_logps(trainer.model, batch)
        found = []
        for mu in (of_versions(trainer, batch, len(distances)), now.detach()):
            values = now.detach(), mu, advantages, mask, 0.2, 0.2
            if kind == "RLOO":
                factors = rloo_gradient(correction, now.detach(), *values, **hyperparameters(correction, given))
                right = -(factors * now).sum()
            else:
                right = -OBJECTIVES[correction](now, *values, **hyperparameters(correction, given))
            right = gradient(right, trainer.model)
            found.append(((mine - right).norm() / right.norm()).item())
        distances.append((*found, batch["ages"].max().item()))
        return loss

    trainer._compute_loss = computed
    trainer.train()
    assert all(right < 1e-4 for right, *_ in distances)
    assert max(age for *_, age in distances) > 0
    if correction not in ("none", "coupled"):
        assert max(shortcut for _, shortcut, age in distances if age) > 3e-4


# Waiting, and the end of a run


def test_no_group_becomes_too_old(tmp_path):
    """At most one generation: the pool waits for groups that would be older, and their tokens are at most that old."""
    trainer = run_of(tmp_path, "GRPO", max_staleness=1, max_steps=6, num_train_epochs=9)
    trainer.train()
    oldest = [log["rollouts/age_max"] for log in metrics(trainer) if "loss" in log]
    assert max(oldest) == 1
    free = run_of(tmp_path, "GRPO", max_staleness=4, rollouts_in_flight=4.0, max_steps=4, num_train_epochs=9)
    free.train()
    assert max(log["rollouts/age_max"] for log in metrics(free) if "loss" in log) > 1


def test_a_stopped_run_says_what_it_leaves(tmp_path, caplog):
    trainer = run_of(tmp_path, "GRPO", max_steps=6)
    stop = trainer.callback_handler.on_step_end

    def stopping(args, state, control):
        control = stop(args, state, control)
        control.should_training_stop = state.global_step == 2
        return control

    trainer.callback_handler.on_step_end = stopping
    with caplog.at_level(logging.WARNING):
        trainer.train()
    groups = trainer.pool.groups
    tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    assert groups and tokens
    assert (
        f"The run ended with {len(groups)} groups in flight, whose {tokens} tokens were not trained on" in caplog.text
    )


def test_an_evaluation_in_between_changes_nothing(tmp_path):
    """It samples its own completions whole, from the same engine."""
    runs = []
    for strategy in ("no", "steps"):
        evaluated = {"eval_strategy": strategy, "eval_steps": 1, "eval_dataset": dataset(2), "num_generations_eval": 2}
        trainer = run_of(tmp_path / strategy, "GRPO", per_device_eval_batch_size=2, max_steps=3, **evaluated)
        states, generate = [], trainer.memory.sample

        def sample(requests, enough=None, generate=generate, trainer=trainer, states=states):
            if trainer.model.training:
                torch.manual_seed(len(states))
                states.append(1)
            return generate(requests, enough)

        trainer.memory.sample = sample
        trainer.train()
        runs.append(trainer)
    mine, theirs = (parameters(trainer) for trainer in runs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# Checkpoints


def quantized(path, kill_at=None):
    """The embedded engine, INT8, with noise, and two optimizer steps in each of three generations."""
    settings = {"rollout_precision": "int8", "rollouts_in_flight": 2.5, "noise_schedule": "linear"}
    settings |= {"per_device_train_batch_size": 4, "num_generations": 2, "steps_per_generation": 2}
    settings |= {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "max_completion_length": 24}
    ends = {"generation_kwargs": {"eos_token_id": [*range(0, 320, 13)]}}
    reward = {"reward_funcs": killing(kill_at), "train_dataset": dataset(10)}
    return trainer_for(path, kind=QuantGRPOTrainer, **settings, **ends, **reward)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    trainer = quantized(tmp_path_factory.mktemp("unbroken"))
    trainer.train()
    assert sum(log.get("rollouts/carried", 0) for log in metrics(trainer)) > 0
    return trainer


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    path = tmp_path_factory.mktemp("killed")
    with pytest.raises(Killed):
        quantized(path, kill_at=3).train()
    return path


@pytest.mark.parametrize("step", [4, 3, 2])
def test_a_killed_run_resumes_with_the_bits_of_an_unbroken_one(killed, unbroken, step):
    """Killed in the last of three generations, from checkpoints before it, inside of the second, and before that."""
    resumed = quantized(killed)
    resumed.train(resume_from_checkpoint=str(killed / f"checkpoint-{step}"))
    assert resumed.pool.generation == unbroken.pool.generation == 3 and not resumed.pool.groups
    mine, theirs = parameters(resumed), parameters(unbroken)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    logs = [log for log in metrics(unbroken) if "loss" in log]
    assert [log for log in metrics(resumed) if "loss" in log] == logs
