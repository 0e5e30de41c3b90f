"""
Step scaling by the effective sample size: the parameters after steps are those of a slow reference.

The reference takes each step in full and then goes back a part of the way, by a factor that it computes itself from
whole logits, completion by completion. As a script, one of two ranks.
"""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from long_tests import rest_is_long
from tiny import tiny_model
from training import assert_same_run, dataset, killed_and_resumed, killing, metrics, parameters, trainer_for
from transformers import TrainerCallback

from trl_quant import QuantAsyncGRPOConfig, QuantPPOTrainer, QuantRLOOTrainer


# Two updates on each generation, each of two micro-batches; 4 bits, and steps that move the policy
RUN = {"rollout_precision": "int4", "is_correction": "tis", "num_iterations": 2, "max_steps": 6}
RUN |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
SCALED = RUN | {"ess_step_scaling": True}
OPTIMIZERS = {
    "sgd": {"optim": "sgd", "learning_rate": 0.5},
    "adamw": {"optim": "adamw_torch", "learning_rate": 3e-3, "weight_decay": 0.1},
}
LOGGED = ("step_scaling/rho", "step_scaling/rho_0", "step_scaling/factor")


def slow_log_weight(model, batch, row: int) -> float:
    """log w of one completion: a sum over its tokens, from the logits of the row without its padding."""
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
    completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0].double()
    total = 0.0
    for place, token in enumerate(completion):
        scores = logits[len(prompt) + place - 1]
        total += (scores[token] - scores.logsumexp(0)).item()
        total -= batch["sampling_per_token_logps"][row, place].item()
    return total


class GoesBack(TrainerCallback):
    """Scales what a step has changed, by `factor(rho / rho_0)`; with `gradients` the gradient instead."""

    def __init__(self, trainer, gradients: bool = False):
        self.trainer, self.gradients = trainer, gradients
        self.log_weights, self.found = [], []
        compute = trainer._compute_loss

        def computing(model, inputs):
            rows = range(len(inputs["completion_ids"]))
            self.log_weights += [slow_log_weight(trainer.model, inputs, row) for row in rows]
            return compute(model, inputs)

        trainer._compute_loss = computing
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        w = [math.exp(one) for one in self.log_weights]
        self.log_weights = []
        rho = sum(w) ** 2 / (len(w) * sum(x * x for x in w))
        self.found.append(rho)
        self.factor = min(1.0, (rho / self.found[0]) ** 0.5)
        self.before = parameters(self.trainer)
        if self.gradients:
            for param in self.trainer.model.parameters():
                param.grad *= self.factor

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.gradients:
            return
        with torch.no_grad():
            for name, param in self.trainer.model.named_parameters():
                param.copy_(self.before[name] + self.factor * (param - self.before[name]))


def distance(left, right) -> float:
    mine, theirs = (torch.cat([v.flatten() for v in parameters(one).values()]).double() for one in (left, right))
    return (mine - theirs).norm().item()


@pytest.mark.parametrize("optimizer", rest_is_long(OPTIMIZERS))
def test_the_steps_are_those_of_a_slow_reference(tmp_path, optimizer):
    """
    Up to rounding, and far from unscaled steps. Under AdamW, a scaled gradient does not scale the step. The sampler has
    no codes, which the last bits of a weight would move.
    """
    runs = {}
    for name in ("ours", "reference", "plain", "gradient"):
        given = OPTIMIZERS[optimizer] | {"ess_step_scaling": name == "ours", "rollout_precision": "bf16"}
        runs[name] = trainer_for(tmp_path / name, tiny_model(seed=3), **RUN | given)
        slow = GoesBack(runs[name], gradients=name == "gradient") if name in ("reference", "gradient") else None
        runs[name].train()
        if name == "reference":
            found = slow.found
    ours = runs["ours"]
    logs = [[log[name] for name in LOGGED] for log in metrics(ours) if LOGGED[0] in log]
    assert [log[0] for log in logs] == pytest.approx(found, rel=1e-3)
    assert {log[1] for log in logs} == {logs[0][0]} and logs[0][2] == 1.0
    assert min(log[2] for log in logs) < 0.95  # so that there is something to scale
    far = distance(ours, runs["plain"])
    assert distance(ours, runs["reference"]) < 1e-2 * far
    assert optimizer == "sgd" or distance(ours, runs["gradient"]) > 0.3 * far
    rates = [[log["learning_rate"] for log in metrics(one) if "learning_rate" in log] for one in (ours, runs["plain"])]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("kind", [QuantRLOOTrainer, QuantPPOTrainer])
def test_other_trainers_scale_too(tmp_path, kind, policy):
    """Their policies' steps. PPO's critic steps by its own learning rate."""
    given = SCALED | OPTIMIZERS["sgd"] | {"max_steps": 4}
    rates, trainer = [], trainer_for(tmp_path, policy, kind, **given)
    if kind is QuantPPOTrainer:
        step = trainer.critic.optimizer.step

        def stepping(*args, **kwargs):
            rates.append(trainer.critic.optimizer.param_groups[0]["lr"])
            return step(*args, **kwargs)

        trainer.critic.optimizer.step = stepping
    seen = []

    class Seen(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            seen.append(trainer.optimizer.param_groups[0]["lr"])

    trainer.add_callback(Seen())
    trainer.train()
    logs = [log for log in metrics(trainer) if LOGGED[0] in log]
    assert min(log["step_scaling/factor"] for log in logs) < 0.999
    assert seen == [log["step_scaling/factor"] * rate for log, rate in zip(logs, [0.5, 0.375, 0.25, 0.125])]
    if rates:
        assert [rate / rates[0] for rate in rates] == pytest.approx([1, 0.75, 0.5, 0.25])


def test_a_resumed_run_keeps_the_first_steps(tmp_path):
    """Killed in its fourth generation, in which a checkpoint lies between the two updates of the one before."""

    def build(path, kill_at=None):
        given = SCALED | OPTIMIZERS["adamw"] | {"save_strategy": "steps", "save_steps": 3}
        return trainer_for(path, tiny_model(seed=3), **given, reward_funcs=killing(kill_at), train_dataset=dataset(32))

    whole, resumed = killed_and_resumed(build, tmp_path, kill_at=3)
    logs = [log for log in metrics(whole) if "loss" in log]
    assert whole.step_scaling.first != 1.0 and len({log["step_scaling/rho"] for log in logs}) > 3
    last = [one.state.log_history.pop() for one in (whole, resumed)]  # the mean loss of what each has trained
    assert all("train_loss" in log for log in last)
    assert_same_run(whole, resumed)
    whole.train()  # anew: the first step of a run is its own
    assert whole.step_scaling.first == metrics(whole)[0]["step_scaling/rho"]


@pytest.mark.slow
def test_two_ranks_scale_by_the_completions_of_both(tmp_path, monkeypatch):
    """The factors of two ranks are those of one that has all rows, which each rank's own are not."""
    from ranks import on_two_ranks, results

    monkeypatch.setattr("ranks.__file__", __file__)
    printed = on_two_ranks("cpu", tmp_path, "case")
    first, second = results(tmp_path, "case", printed)
    assert first["logs"] == second["logs"] and first["weights"] == second["weights"]
    for step, log in enumerate(first["logs"]):
        w, own = ([math.exp(x) for rows in rank["log_weights"][step] for x in rows] for rank in (first, second))
        rho, alone = (sum(x) ** 2 / (len(x) * sum(y * y for y in x)) for x in (w + own, w))
        assert log["step_scaling/rho"] == pytest.approx(rho, rel=1e-9)
        assert abs(alone - rho) > 1e-4


def run_rank(path: Path, case: str) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    given = SCALED | OPTIMIZERS["adamw"] | {"max_steps": 3, "num_iterations": 1}
    trainer = trainer_for(path / case / "out", tiny_model(seed=3), **given, train_dataset=dataset(32))
    seen, add = [[]], trainer.step_scaling.add

    def adding(batch, logps):
        mask = batch["completion_mask"].bool()
        differences = (logps.double() - batch["sampling_per_token_logps"].double()) * mask
        seen[-1].append([sum(row) for row in differences.tolist()])
        if len(seen[-1]) == 2:
            seen.append([])
        add(batch, logps)

    trainer.step_scaling.add = adding
    trainer.train()
    weights = {name: value.double().sum().item() for name, value in parameters(trainer).items()}
    logs = [{name: log[name] for name in LOGGED} for log in metrics(trainer) if LOGGED[0] in log]
    found = {"logs": logs, "weights": weights, "log_weights": seen[:-1]}
    (path / case).mkdir(exist_ok=True)
    (path / case / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for case in sys.argv[2:]:
        run_rank(Path(sys.argv[1]), case)


def test_the_asynchronous_trainer_refuses_it(tmp_path):
    given = {"output_dir": str(tmp_path), "use_vllm": False, "rollout_precision": "int8", "use_cpu": True}
    QuantAsyncGRPOConfig(**given)
    with pytest.raises(ValueError, match="this is a QuantAsyncGRPOConfig"):
        QuantAsyncGRPOConfig(**given, ess_step_scaling=True)
