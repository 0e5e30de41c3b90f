"""Five short trainings on a CPU, side by side: samples from quantized copies, with and without correction.

    python examples/demo.py

Builds the small arithmetic model (build_arithmetic_model.py) and trains it with GRPO on full-precision, INT4 and FP8
samples, the latter two uncorrected and with AIS, all with the same seed and settings. Ends with a table, and a chart
(reward, mismatch KL, correction weight) in runs/demo. After an interruption, run it again: finished parts are not
repeated.

If vLLM is installed, the 8-bit samples come from it, in the first of FP8, block FP8 and INT8 that it supports here.
"""

import gc
import json
import os
import shutil
import sys
import warnings
import zlib
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import datasets
import transformers
from build_arithmetic_model import MAX_COMPLETION_LENGTH, BuildArguments, build
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import TrlParser
from trl.import_utils import is_vllm_available

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.report.output import plot
from trl_quant.report.runs import KL, Run, read_run
from trl_quant.report.table import table
from trl_quant.rollout.vllm.support import check_version, supported_precisions
from trl_quant.tasks import arithmetic_reward, load_prompts
from trl_quant.tasks.evaluate import mean_reward


EIGHT_BITS = ("fp8", "fp8_block", "int8")
SETTINGS = {
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    # `ais` asks for other values; here runs differ only in their samples and weights.
    "scale_rewards": "group",
    "loss_type": "dapo",
}
ENGINES = ("auto", "embedded", "vllm")
VLLM_ENGINE = {  # starts fast and quietly
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}


@dataclass
class DemoArguments:
    """The command line."""

    output_dir: str = field(default="runs/demo", metadata={"help": "Where everything goes."})
    engine: str = field(
        default="auto",
        metadata={
            "help": "What samples from the quantized copy: 'embedded', 'vllm' (for the formats that it supports), or "
            "'auto', which is 'vllm' if installed."
        },
    )
    steps: int = field(default=60, metadata={"help": "Optimizer steps of each run."})
    seed: int = field(default=0, metadata={"help": "For model, data and sampling, the same in all runs."})
    fresh: bool = field(default=False, metadata={"help": "Start over: remove `output_dir` first."})

    def __post_init__(self):
        if self.engine not in ENGINES:
            raise ValueError(f"`engine`={self.engine!r} is unknown. Allowed: {', '.join(map(repr, ENGINES))}.")
        if self.engine == "vllm" and not is_vllm_available():
            raise ValueError("`engine`='vllm', but vLLM is not installed. Use 'embedded', or install `trl_quant[cpu]`.")


@dataclass(frozen=True)
class Sampler:
    """What a run samples from, and its correction."""

    precision: str | None
    correction: str | None
    in_vllm: bool = False


def samplers(engine: str) -> dict[str, Sampler]:
    """The five runs by name."""
    in_vllm = []
    if engine != "embedded" and is_vllm_available():
        try:
            check_version()
            in_vllm = [name for name, missing in supported_precisions().items() if missing is None]
        except ImportError:  # unsupported vLLM version
            if engine == "vllm":
                raise
    eight_bits = next((name for name in EIGHT_BITS if name in in_vllm), "fp8")
    return {
        "full precision": Sampler(None, None),
        **{
            f"{precision} {correction}": Sampler(precision, correction, precision in in_vllm)
            for precision in ("int4", eight_bits)
            for correction in ("none", "ais")
        },
    }


class Follow(TrainerCallback):
    """Appends logs to metrics.jsonl and moves the progress bar."""

    def __init__(self, path: Path, progress: Progress, task: int):
        self.path, self.progress, self.task = path, progress, task

    def on_log(self, args, state, control, logs=None, **kwargs):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        if "reward" in logs:
            kl = f"KL {logs[KL]:.4f}" if KL in logs else ""
            self.progress.update(self.task, completed=state.global_step, reward=f"{logs['reward']:.2f}", kl=kl)


def train_run(name: str, sampler: Sampler, model_dir: Path, args: DemoArguments, progress: Progress) -> None:
    """One training, logged in `<output_dir>/<name>/metrics.jsonl`; a finished one is not repeated."""
    directory = Path(args.output_dir, name.replace(" ", "-"))
    task = progress.add_task(name, total=args.steps, reward="", kl="")
    settings = {
        **asdict(sampler),
        "model": zlib.crc32((model_dir / "model.safetensors").read_bytes()),
        **{key: value for key, value in asdict(args).items() if key not in ("fresh", "output_dir", "engine")},
        **SETTINGS,
    }
    finished = directory / "finished.json"
    if finished.is_file() and json.loads(finished.read_text()) == settings:
        progress.update(task, completed=args.steps, kl="done before")
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "settings.json").write_text(json.dumps(settings))

    trainer = QuantGRPOTrainer(
        model=str(model_dir),
        reward_funcs=arithmetic_reward,
        args=QuantGRPOConfig(
            output_dir=str(directory),
            rollout_precision=sampler.precision,
            is_correction=sampler.correction,
            use_vllm=sampler.in_vllm,
            vllm_mode="colocate",
            vllm_engine_kwargs=VLLM_ENGINE if sampler.in_vllm else None,
            vllm_max_model_length=4 * MAX_COMPLETION_LENGTH if sampler.in_vllm else None,
            max_steps=args.steps,
            seed=args.seed,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **SETTINGS,
        ),
        train_dataset=load_prompts(str(model_dir / "train.jsonl")),
        callbacks=[Follow(directory / "metrics.jsonl", progress, task)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.log({"eval_accuracy": initial_accuracy(model_dir)})
    trainer.train()
    trainer.log({"eval_accuracy": held_out_accuracy(trainer.model, model_dir)})
    finished.write_text(json.dumps(settings))


@cache
def initial_accuracy(model_dir: Path) -> float:
    return held_out_accuracy(AutoModelForCausalLM.from_pretrained(model_dir), model_dir)


def held_out_accuracy(model, model_dir: Path) -> float:
    """Share of held-out problems that the unquantized policy gets right at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    dataset = load_prompts(str(model_dir / "eval.jsonl"))
    return mean_reward(model, tokenizer, dataset, arithmetic_reward, MAX_COMPLETION_LENGTH)


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
    """Runs whatever is missing; returns the number of failed runs."""
    output_dir = Path(args.output_dir)
    if args.fresh:
        shutil.rmtree(output_dir, ignore_errors=True)
    console = Console()
    model_dir, failures = output_dir / "model", {}
    runs = samplers(args.engine)
    for where, inside in (("vLLM", True), ("the embedded engine", False)):
        formats = {run.precision.upper() for run in runs.values() if run.precision and run.in_vllm is inside}
        if formats:
            console.print(f"{' and '.join(sorted(formats))} samples come from {where}.")
    with quiet():
        if not (model_dir / "eval.jsonl").is_file():  # written last
            console.print("Building a small arithmetic model ...")
            build(BuildArguments(output_dir=str(model_dir), seed=args.seed))
        columns = (
            TextColumn("{task.description:16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("reward {task.fields[reward]}  {task.fields[kl]}"),
        )
        with Progress(*columns, console=console) as progress:
            for name, sampler in runs.items():
                try:
                    train_run(name, sampler, model_dir, args, progress)
                except Exception as error:  # the other runs are still worth having
                    failures[name] = f"failed: {error}"
                    console.print_exception()
                gc.collect()  # vLLM's engine ends process groups when it goes: before the next one starts its own

    found = []
    for name in runs:
        directory = output_dir / name.replace(" ", "-")
        history = read_run(directory).history if (directory / "metrics.jsonl").is_file() else []
        found.append(Run(name, history, failures.get(name, "")))
    chart = output_dir / "demo.png"
    plot(found, chart, titles=("Reward", "Mismatch KL", "Weight of a token"))
    console.print(table(found))
    console.print(f"chart: {chart}, metrics: {output_dir}/*/metrics.jsonl")
    return len(failures)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # otherwise transformers uses every GPU for this tiny model
    (demo_args,) = TrlParser(DemoArguments).parse_args_and_config()
    sys.exit(main(demo_args))
