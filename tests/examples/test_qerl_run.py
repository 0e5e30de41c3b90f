"""
QeRL's training as a whole, on the demo's task: it learns, what it logs is what happened, and a kill costs nothing.

As a script, those runs.
"""

import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from dynamic import Record, check_generation, tokens
from peft import LoraConfig
from places import ROOT
from training import config, metrics, parameters
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.policy.frozen import FrozenBaseConfig
from trl_quant.storage.run_checkpoints import last_complete_checkpoint
from trl_quant.tasks import arithmetic_reward, load_prompts


sys.path.insert(0, str(ROOT / "examples"))

import build_arithmetic_model as building


pytestmark = [pytest.mark.isa, pytest.mark.slow, pytest.mark.long]

STEPS, SAVE_STEPS = 20, 5
KILLED_AT, RESUMED_TO = 6, 10
STAGES, START, END = 10, 1e-2, 5e-4
NORMS, CHANNELS = 4, 128  # two of each layer
ROUNDS, GROUP = 2, 8
SETTINGS = {
    "train_precision": "nvfp4",
    "noise_schedule": "exponential",
    "noise_sigma_start": START,
    "noise_sigma_end": END,
    "noise_stages": STAGES,
    "is_correction": "coupled",
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "dynamic_sampling_rounds": ROUNDS,
    "num_generations": GROUP,
    "per_device_train_batch_size": 64,
    "max_completion_length": 28,  # 25 tokens are the longest solution of two digits
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVE_STEPS,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The stored one, with a few differences of two digits to train on, of which it is right on nearly half."""
    path = shutil.copytree(building.STORED, tmp_path_factory.mktemp("qerl") / "model")
    task = building.BuildArguments(operations="-", max_digits=2)
    building.prompts(task, seed=1, count=40, held_out=False).to_json(path / "train.jsonl")
    return str(path)


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory) -> dict[str, SimpleNamespace]:
    """One that nothing breaks; and one that is killed, and resumed for a while, each time in a process of its own."""
    path = tmp_path_factory.mktemp("runs")
    warm.run([sys.executable, __file__, model, path], check=True)
    found = {"left": json.loads((path / "left.json").read_text())}
    for name in ("whole", "broken"):
        found[name] = SimpleNamespace(path=path / name, **torch.load(path / name / "run.pt", weights_only=False))
    return found


@pytest.fixture(scope="module")
def whole(runs) -> SimpleNamespace:
    return runs["whole"]


@pytest.fixture(scope="module")
def logs(whole) -> list[dict]:
    """One for each step."""
    found = [log for log in whole.metrics if "loss" in log]
    assert [log["step"] for log in found] == [*range(1, STEPS + 1)]
    return found


def groups(rows: list[tuple]) -> list[list[tuple]]:
    return [rows[i : i + GROUP] for i in range(0, len(rows), GROUP)]


def differ(rewards: list[float]) -> bool:
    return len(set(rewards)) > 1


# What is learned


def test_it_learns(whole):
    """By the first rounds alone, since what is trained on is never all right."""
    rewards = [[reward for *_, reward in generation["calls"][0]] for generation in whole.generations]
    shares = torch.tensor(rewards).mean(1)
    assert len(shares) == STEPS and shares[:5].mean() < 0.55
    assert shares[-5:].mean() > shares[:5].mean() + 0.15


def test_only_the_adapter_moves(whole, model):
    """The base is, bit for bit, what the checkpoint packs into; so are the norms, noised as the sampler's are."""
    before, after = whole.before, whole.after
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if ".lora_" in name} and len(moved) == 2 * 14
    frozen = FrozenBaseConfig("nvfp4", "bfloat16")  # the checkpoint's type
    fresh = AutoModelForCausalLM.from_pretrained(model, quantization_config=frozen, dtype=torch.float32)
    base = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for name, value in after.items()
        if name not in moved
    }
    expected = dict(fresh.named_parameters())
    assert base.keys() == expected.keys() and sum(name.endswith("weight_packed") for name in base) == 14
    assert not [name for name, value in expected.items() if not torch.equal(base[name], value)]


# What is sampled


def test_noise_follows_its_schedule(logs):
    """None in the first stage, then from `START` to `END` in equal ratios, and it is on the sampler's norms."""
    stage = [step * STAGES // STEPS for step in range(STEPS)]
    sigmas = [START * (END / START) ** ((k - 1) / (STAGES - 2)) if k else 0.0 for k in stage]
    assert sigmas[STEPS // STAGES] == START and sigmas[-1] == pytest.approx(END)
    assert [log["noise/sigma"] for log in logs] == pytest.approx(sigmas, rel=1e-9)
    assert [log["noise/norms"] for log in logs] == [NORMS if sigma else 0 for sigma in sigmas]
    arrived = [log["noise/effective_sigma"] / sigma for log, sigma in zip(logs, sigmas, strict=True) if sigma]
    assert not any(log["noise/effective_sigma"] for log, sigma in zip(logs, sigmas, strict=True) if not sigma)
    error = 1 / math.sqrt(2 * NORMS * CHANNELS)  # of a standard deviation from so many draws
    assert all(abs(ratio - 1) < 4.5 * error for ratio in arrived)
    assert math.sqrt(sum(ratio**2 for ratio in arrived) / len(arrived)) == pytest.approx(1, abs=0.02)


def test_noise_is_the_only_mismatch(whole, logs):
    """Sampler and policy are one, but for the noise, which is on the sampler's norms alone."""
    clean = STEPS // STAGES
    differences = [log["sampling/sampling_logp_difference/mean"] for log in logs]
    assert max(differences[:clean]) < 1e-6
    stages = torch.tensor(differences[clean:]).view(-1, clean).mean(1).tolist()
    assert stages[0] > 5 * stages[-1] and stages[-1] > 1e-5
    laid = torch.cat([*whole.noise.values()])
    assert len(laid) == NORMS * CHANNELS and laid.square().mean().sqrt().item() == pytest.approx(END, rel=0.15)


def test_groups_that_teach_nothing_give_way(whole, logs):
    """Unless the budget ends first; the counts are those of what was sampled and of what was trained on."""
    replaced = remained = 0
    for log, generation in zip(logs, whole.generations, strict=True):
        calls, trained = generation["calls"], generation["trained"]
        check_generation(calls, trained, GROUP, once=False)
        rewards = {(prompt, ids): reward for call in calls for prompt, ids, reward in call}
        useful = [differ([reward for *_, reward in group]) for group in groups(calls[0])]
        final = [differ([rewards[row[:2]] for row in group]) for group in groups(trained)]
        counts = {
            "rounds": len(calls) - 1,
            "uninformative_fraction": useful.count(False) / len(useful),
            "replaced_groups": final.count(True) - useful.count(True),
            "remaining_fraction": final.count(False) / len(final),
            "wasted_tokens": sum(map(tokens, calls)) - tokens(trained),
        }
        assert {name: log[f"dynamic_sampling/{name}"] for name in counts} == pytest.approx(counts)
        assert log["frac_reward_zero_std"] == pytest.approx(counts["remaining_fraction"])
        assert all(final) or len(calls) == 1 + ROUNDS  # only a spent budget leaves one
        assert len(calls) == 1 or not all(useful)
        replaced, remained = replaced + counts["replaced_groups"], remained + final.count(False)
    assert replaced > STEPS / 2 and replaced > 2 * remained


# A kill


def test_killed_and_resumed_equals_unbroken(runs, whole):
    """Bit for bit: what is logged, sampled and trained on, and the adapter, in memory and saved."""
    resumed = runs["broken"]
    assert f"checkpoint-{RESUMED_TO}" not in runs["left"] and "run.pt" not in runs["left"]
    assert resumed.generations == whole.generations[SAVE_STEPS:RESUMED_TO]
    assert resumed.metrics == [log for log in whole.metrics if log["step"] <= RESUMED_TO]
    assert resumed.after.keys() == whole.then.keys()
    assert not [name for name, value in whole.then.items() if not torch.equal(resumed.after[name], value)]
    adapters = [run.path / f"checkpoint-{RESUMED_TO}" / "adapter_model.safetensors" for run in (whole, resumed)]
    early = whole.path / f"checkpoint-{SAVE_STEPS}" / "adapter_model.safetensors"
    assert adapters[0].read_bytes() == adapters[1].read_bytes() != early.read_bytes()


# The run


class Killed(TrainerCallback):
    """Between two checkpoints, without a chance to tidy up."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


class Stopped(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == RESUMED_TO


class Looked(TrainerCallback):
    """Keeps the parameters that the resumed run ends with."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == RESUMED_TO:
            self.seen = parameters(self.trainer)


class Run(Record):
    """Everything that is sampled, by generation, and what it is then trained on."""

    def __init__(self, model: str, output: str, **overrides):
        self.calls, self.generations = [], []
        self.trainer = QuantGRPOTrainer(
            model=model,
            reward_funcs=self.recorded(arithmetic_reward),
            args=config(QuantGRPOConfig, output, **SETTINGS | overrides),
            train_dataset=load_prompts(f"{model}/train.jsonl"),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        self.score = self.trainer._generate_and_score_completions
        self.trainer._generate_and_score_completions = self.kept


def run(model: str, output: str, how: str) -> None:
    record = Run(model, output)
    trainer, before = record.trainer, parameters(record.trainer)
    looked = Looked(trainer)
    trainer.add_callback({"kill": Killed(), "resume": Stopped(), "finish": looked}[how])
    trainer.train(resume_from_checkpoint=how == "resume" or None)
    policy = dict(trainer.model.get_base_model().named_parameters())
    sampler = trainer.vllm_generation.engine.copy.named_parameters()
    found = {
        "before": before,
        "after": parameters(trainer),
        "then": looked.seen,
        "noise": {name: (held - policy[name]).detach() for name, held in sampler if held is not policy[name]},
        "metrics": [log for log in metrics(trainer) if "train_loss" not in log],  # averaged over one process's steps
        "generations": record.generations,
    }
    torch.save(found, Path(output) / "run.pt")


def main(model: str, path: Path) -> None:
    """
    The runs, and what the killed one had left. Each is a fork of this process, which has done nothing but the imports:
    they take as long as many steps.
    """
    fork = multiprocessing.get_context("fork")

    def start(output: str, how: str) -> multiprocessing.Process:
        process = fork.Process(target=run, args=(model, str(path / output), how), daemon=True)
        process.start()
        return process

    def ended(process: multiprocessing.Process) -> int:
        process.join()
        return process.exitcode

    whole, broken = start("whole", "finish"), start("broken", "kill")
    assert ended(broken) == -signal.SIGKILL
    (path / "left.json").write_text(json.dumps([file.name for file in (path / "broken").iterdir()]))
    assert last_complete_checkpoint(path / "broken").endswith(f"checkpoint-{SAVE_STEPS}")
    assert ended(start("broken", "resume")) == ended(whole) == 0


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
