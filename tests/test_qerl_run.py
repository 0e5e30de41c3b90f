"""QeRL's training as a whole on the demo's task: it learns, what it logs is what happened, and a kill costs nothing.

As a script, one such run.
"""

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from test_dynamic_sampling import Record, check_generation, tokens
from training import config, metrics, parameters
from transformers import TrainerCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.checkpoints import last_complete_checkpoint
from trl_quant.frozen_base import FrozenBaseConfig
from trl_quant.tasks import arithmetic_reward, load_prompts


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import build_arithmetic_model as building  # noqa: E402


pytestmark = pytest.mark.slow

STEPS, SAVE_STEPS, KILLED_AT = 30, 10, 14
STAGES, START, END = 10, 1e-2, 5e-4
ROUNDS, NUM_GENERATIONS = 2, 8
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
    "num_generations": NUM_GENERATIONS,
    "per_device_train_batch_size": 64,
    "max_completion_length": 28,
    "lr_scheduler_type": "constant",
    "learning_rate": 2e-3,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVE_STEPS,
    "model_init_kwargs": {"dtype": "bfloat16"},  # norms that would swallow the noise
}


class KillAt(TrainerCallback):
    """No `finally`, no `atexit`: as the kernel does when memory is short."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Recorded(Record):
    """The run, with what it sampled and trained on."""

    def __init__(self, model: str, output: str, **overrides):
        self.calls, self.generations = [], []
        self.trainer = QuantGRPOTrainer(
            model=model,
            args=config(QuantGRPOConfig, output, **SETTINGS | overrides),
            reward_funcs=self.recorded(arithmetic_reward),
            train_dataset=load_prompts(f"{model}/train.jsonl"),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        self.score = self.trainer._generate_and_score_completions
        self.trainer._generate_and_score_completions = self.kept


if __name__ == "__main__":
    import time
    model, output, seed = sys.argv[1:4]
    lr=float(sys.argv[4]); bs=int(sys.argv[5])
    record = Recorded(model, output, seed=int(seed), learning_rate=lr, per_device_train_batch_size=bs, save_strategy="no", **eval(os.environ.get("EXTRA","{}")))
    t=time.time()
    record.trainer.train()
    dt=time.time()-t
    first=[sum(r for *_,r in g["calls"][0])/len(g["calls"][0]) for g in record.generations]
    print("RUN", sys.argv[1:], f"{dt:.1f}s", " ".join(f"{x:.2f}" for x in first))
    print("LOG", [(round(m["noise/sigma"],5), round(m["noise/effective_sigma"]/max(m["noise/sigma"],1e-9),3), m["noise/norms"], m["dynamic_sampling/rounds"],m["dynamic_sampling/replaced_groups"],m["dynamic_sampling/remaining_fraction"]) for m in metrics(record.trainer) if "reward" in m])
