"""One run of the study, in a process of its own: trains what `settings.json` in its directory says.

    python benchmarks/study/trial.py runs/study/corrections/fp8-tis-seed0 runs/study/models/3-digits-0.33

It logs to `metrics.jsonl` there. `finished.json`, written last, says on which machine, with which versions, and from
which commit.
"""

import json
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import datasets
import torch
import transformers
from peft import LoraConfig
from torch import nn
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from trl_quant.policy.unified import unify
from trl_quant.storage.whole import write_whole
from trl_quant.tasks import load_prompts
from trl_quant.tasks.evaluate import mean_reward
from trl_quant.trainers.launch import TRAINERS
from trl_quant.trl_seams import llm_with


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from build_arithmetic_model import BuildArguments  # noqa: E402
from build_masked_model import accuracy as denoised_accuracy  # noqa: E402
from distillation import disturbed  # noqa: E402
from engines import machine  # noqa: E402
from pace import Pace  # noqa: E402


# What belongs to no cell: how a run logs
QUIET = {
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


# And how vLLM does that is told to: many share a GPU
VLLM = {
    "bf16": torch.cuda.is_available(),
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.05,
    "vllm_engine_kwargs": {
        "kv_cache_memory_bytes": (2 << 30) if torch.cuda.is_available() else (64 << 20),
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    },
}


DRAWS = 4  # completions of each held-out problem, where a policy is judged as it is served


class Log(TrainerCallback):
    """Appends each log entry to a file, and how often the policy is right on held-out problems."""

    def __init__(self, path: Path, accuracy: Callable[..., float], evaluations: int, served: Sequence[str], draws: int):
        self.path, self.accuracy, self.evaluations = path, accuracy, evaluations
        self.served, self.draws = served, draws

    def write(self, step: int, entry: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **entry}) + "\n")

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.write(0, {"eval_accuracy": self.accuracy(model)})

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        self.write(state.global_step, logs)
        steps = (state.global_step, state.global_step - 1)
        done, before = (step * self.evaluations // state.max_steps for step in steps)
        if "grad_norm" in logs and done > before:
            self.write(state.global_step, {"eval_accuracy": self.accuracy(model)})

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if self.draws:
            right = fmean(self.accuracy(model, seed=draw) for draw in range(self.draws))
            self.write(state.global_step, {"final_accuracy": right})
        if self.served:
            self.write(state.global_step, self.as_served(model))

    def as_served(self, model: nn.Module) -> dict[str, float]:
        """How often the policy is right with the weights of its linear layers in each precision to serve, as a mean."""
        found = {}
        for precision in self.served:
            judged = quantized(model, precision)
            found[f"served/{precision}"] = fmean(self.accuracy(judged, seed=draw) for draw in range(DRAWS))
        return found


def quantized(model: nn.Module, precision: str) -> nn.Module:
    """A copy of a policy that computes with weights in `precision`; one that does so already is returned itself."""
    if any(getattr(layer, "precision", None) == precision for layer in model.modules()):
        return model
    copied = deepcopy(model)
    vars(copied).pop("forward", None)  # TRL's, which calls the policy's modules
    unify(copied, precision)
    return copied


def accuracy_of(settings: dict, reward: Callable[..., list], model: Path) -> Callable[..., float]:
    """How often a policy is right on the problems held out beside `model`, sampled at temperature 1."""
    tokenizer, held_out = AutoTokenizer.from_pretrained(model), load_prompts(str(model / "eval.jsonl"))
    if settings["trainer"] == "diffusion":
        return lambda policy, **draw: denoised_accuracy(policy, tokenizer, held_out, **draw)
    length = settings["max_completion_length"]
    return lambda policy, **draw: mean_reward(policy, tokenizer, held_out, reward, length, **draw)


def trainer_of(settings: dict) -> type:
    """The class that trains a cell."""
    return TRAINERS[settings["trainer"] if settings["age"] is None else f"async_{settings['trainer']}"]


def arguments_of(settings: dict) -> dict:
    """What the trainer's config takes of a cell's settings."""
    known = {field.name for field in fields(trainer_of(settings).config_class)}
    own = {name: value for name, value in settings.items() if name in known}
    if settings["age"] is not None:
        own |= {"max_staleness": settings["age"], "max_inflight_tasks": settings["per_device_train_batch_size"]}
    return own


def train(directory: Path, model: Path) -> None:
    """Trains as [`~cells.Cell.settings`] in `directory` say, from `model`."""
    settings, start = json.loads((directory / "settings.json").read_text()), time.time()
    trainer_class, arguments = trainer_of(settings), arguments_of(settings)
    config = trainer_class.config_class
    engine = nullcontext()
    if settings["use_vllm"]:
        arguments |= VLLM | {"vllm_max_model_length": 2 * settings["max_completion_length"]}
        if settings["rollout_precision"] is None:  # TRL takes no arguments for vLLM
            engine = llm_with(**arguments.pop("vllm_engine_kwargs"))
    rank = settings["lora_rank"]
    reward = BuildArguments(**{name: settings[name] for name in ("quotient", "countdown", "word_problems")}).reward
    if config.has_rewards:
        task = {"model": str(model), "reward_funcs": reward}
    else:
        task = {"model": disturbed(model), "teacher_model": str(model)}
    pace = None if settings["age"] is None else Pace(settings["age"])
    data, accuracy = load_prompts(str(model / "train.jsonl")), accuracy_of(settings, reward, model)
    if pace is not None:
        data, accuracy = data.shuffle(settings["seed"]), pace.at_rest(accuracy)  # the others shuffle by themselves
    with engine:
        trainer = trainer_class(
            **task,
            args=config(output_dir=str(directory), **QUIET | arguments),
            train_dataset=data,
            peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None,
            callbacks=[
                *([] if pace is None else [pace]),
                Log(
                    directory / "metrics.jsonl",
                    accuracy,
                    settings["evaluations"],
                    settings["served"].split(),
                    settings["draws"],
                ),
            ],
        )
    trainer.remove_callback(PrinterCallback)
    if pace is not None:
        pace.set(trainer)
    trainer.train()
    finished = environment() | {"model_sha256": sha256_of(model), "seconds": round(time.time() - start)}
    write_whole(directory / "finished.json", json.dumps(finished).encode())


def sha256_of(model: Path) -> str:
    """Of the weights that a run starts from."""
    return sha256((model / "model.safetensors").read_bytes()).hexdigest()


def cpu() -> str:
    """Its model, and the instruction set that torch takes of it, by which a run's bits may differ."""
    info = Path("/proc/cpuinfo")  # of Linux
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{models[0] if models else machine()}, {torch.backends.cpu.get_cpu_capability()}"


def environment() -> dict:
    """Where a result comes from."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    git = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    return {
        "machine": machine() if torch.cuda.is_available() else cpu(),
        "commit": git.stdout.strip() or "unknown",
        **versions,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    train(*map(Path, sys.argv[1:]))
