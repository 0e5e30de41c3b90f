"""Four short trainings on a CPU: with INT4 samples a model learns with the default correction, and not with `coupled`.

    python examples/demo.py

A small model that is right on a third of its sums (arithmetic_model) is trained with GRPO four times, with the same
seed and settings. It samples in full precision, from an INT4 copy with the correction `coupled`, and from an INT4 and
an FP8 copy with the default correction, `tis`. Ends with a table and a chart (reward, mismatch KL, correction weight)
in runs/demo, and fails if the runs do not show the point. After an interruption, run it again: finished runs are not
repeated.
"""

import json
import os
import shutil
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import datasets
import torch
import transformers
from build_arithmetic_model import MAX_COMPLETION_LENGTH, STORED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import TrlParser

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.report.output import plot
from trl_quant.report.runs import KL, Run, read_run
from trl_quant.tasks import arithmetic_reward, load_prompts
from trl_quant.tasks.evaluate import mean_reward


RUNS = {  # name -> its settings beside `SETTINGS`, and whether it learns
    "full precision": ({}, True),
    "int4 coupled": ({"rollout_precision": "int4", "is_correction": "coupled"}, False),
    "int4 default": ({"rollout_precision": "int4"}, True),
    "fp8 default": ({"rollout_precision": "fp8"}, True),
}
SETTINGS = {
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "num_iterations": 2,
}
LEARNS = 0.1  # gain in held-out accuracy from which on a run learns
SHOWN = (
    "In these runs of one model and one seed, it learned from INT4 and FP8 samples with the default correction, `tis`, "
    "and not from INT4 samples with `coupled`."
)


@dataclass
class DemoArguments:
    """The command line."""

    output_dir: str = field(default="runs/demo", metadata={"help": "Where everything goes."})
    steps: int = field(default=100, metadata={"help": "Optimizer steps of each run."})
    seed: int = field(default=0, metadata={"help": "For data and sampling, the same in all runs."})
    fresh: bool = field(default=False, metadata={"help": "Start over: remove `output_dir` first."})


class Follow(TrainerCallback):
    """Appends logs to metrics.jsonl and moves the progress bar."""

    def __init__(self, path: Path, progress: Progress, task: int):
        self.path, self.progress, self.task = path, progress, task

    def on_log(self, args, state, control, logs=None, **kwargs):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        self.progress.update(self.task, completed=state.global_step)
        if "reward" in logs:  # the first of the steps that use the same samples
            kl = f"KL {logs[KL]:.4f}" if KL in logs else ""
            self.progress.update(self.task, reward=f"{logs['reward']:.2f}", kl=kl)


def directory_of(name: str, args: DemoArguments) -> Path:
    return Path(args.output_dir, name.replace(" ", "-"))


def train_run(name: str, args: DemoArguments, progress: Progress) -> None:
    """One training, logged in `<output_dir>/<name>/metrics.jsonl`; a finished one is not repeated."""
    directory = directory_of(name, args)
    task = progress.add_task(name, total=args.steps, reward="", kl="")
    own, _ = RUNS[name]
    settings = {**SETTINGS, **own, "max_steps": args.steps, "seed": args.seed}
    finished = directory / "finished.json"
    if finished.is_file() and json.loads(finished.read_text()) == settings:
        progress.update(task, completed=args.steps, kl="done before")
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "settings.json").write_text(json.dumps(settings))

    trainer = QuantGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(STORED, dtype=torch.float32),
        reward_funcs=arithmetic_reward,
        args=QuantGRPOConfig(
            output_dir=str(directory),
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **settings,
        ),
        train_dataset=load_prompts(str(STORED / "train.jsonl")),
        callbacks=[Follow(directory / "metrics.jsonl", progress, task)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.log({"eval_accuracy": held_out_accuracy(trainer.model)})
    trainer.train()
    trainer.log({"eval_accuracy": held_out_accuracy(trainer.model)})
    finished.write_text(json.dumps(settings))


def held_out_accuracy(model) -> float:
    """Share of held-out problems that the unquantized policy gets right at temperature 1."""
    tokenizer, asked = AutoTokenizer.from_pretrained(STORED), load_prompts(str(STORED / "eval.jsonl"))
    return mean_reward(model, tokenizer, asked, arithmetic_reward, MAX_COMPLETION_LENGTH)


def gain(run: Run) -> float:
    """Of the held-out accuracy of a finished run."""
    before, *_, after = run.values("eval_accuracy")
    return after - before


def outcome(run: Run) -> str:
    if gain(run) < 0:
        return "collapses"
    return "learns" if gain(run) >= LEARNS else "learns little"


def table(runs: list[Run]) -> Table:
    """How often each run was right before and after, how far its sampler was from the policy, and what became of it."""
    result = Table("run", "right before", "right after", "mismatch (KL)", "outcome")
    for run in runs:
        if run.status != "done":
            result.add_row(run.name, "", "", "", run.status)
            continue
        accuracy, kl = run.values("eval_accuracy"), run.values(KL)
        result.add_row(
            run.name,
            f"{accuracy[0]:.0%}",
            f"{accuracy[-1]:.0%}",
            f"{fmean(kl):.4f}" if kl else "0",
            outcome(run),
        )
    return result


@contextmanager
def quiet():
    """No progress bars or notices but our own."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
        datasets.enable_progress_bars()


def main(args: DemoArguments) -> int:
    """Runs what is missing; returns how many runs failed, or ended otherwise than `RUNS` says."""
    output_dir, console, failures = Path(args.output_dir), Console(), {}
    if args.fresh:
        shutil.rmtree(output_dir, ignore_errors=True)
    columns = (
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("reward {task.fields[reward]}  {task.fields[kl]}"),
    )
    with quiet(), Progress(*columns, console=console) as progress:
        for name in RUNS:
            try:
                train_run(name, args, progress)
            except Exception as error:  # the other runs are still worth having
                failures[name] = f"failed: {error}"
                console.print_exception()

    found = []
    for name in RUNS:
        directory = directory_of(name, args)
        history = read_run(directory).history if (directory / "metrics.jsonl").is_file() else []
        found.append(Run(name, history, failures.get(name, "")))
    chart = output_dir / "demo.png"
    plot(found, chart, titles=("Reward", "Mismatch KL", "Weight of a token"))
    console.print(table(found))
    console.print(f"chart: {chart}, metrics: {output_dir}/*/metrics.jsonl")
    wrong = [run.name for run in found if run.status != "done" or (gain(run) >= LEARNS) != RUNS[run.name][1]]
    console.print(f"The point is not shown: {' and '.join(wrong)} ended otherwise than usual." if wrong else SHOWN)
    return len(wrong)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # otherwise transformers uses every GPU for this tiny model
    (demo_args,) = TrlParser(DemoArguments).parse_args_and_config()
    sys.exit(main(demo_args))
