"""Takes what an evaluation depends on from the record of its run, unless the command line says otherwise.

Each value that is taken is told in one line, and so is what the record does not say. A model that is no run has no
record, and gets the command's defaults.
"""

import ast
import json
from collections.abc import Callable
from dataclasses import replace

from ..rollout.sampling_options import BOTH, acts
from ..rollout.vllm.support import check_device
from ..tasks.benchmarks import BENCHMARKS, Benchmark
from ..tasks.data import reads_same_rows
from ..tasks.named_rewards import find_reward
from ..tasks.rewards import REWARDS


BF16 = "bf16"
OWN_TASK = "run"  # name of the task that a run records
# Type of the policy's weights, whether autocast was on -> key of `trained.FORWARD_TYPES`
TYPES_OF_RUN = {
    ("float32", True): "mixed",
    ("float32", False): "float32",
    ("bfloat16", True): "mixed_bfloat16",
    ("bfloat16", False): "bfloat16",
}
NOT_GREEDY = ("temperature", "top_p", "top_k", "min_p")  # sampling options that a greedy answer has no use for


def _recorded(name: str) -> Callable[[dict, object], object]:
    return lambda settings, options: settings.get(name)


def _precision(name: str) -> Callable[[dict, object], object]:
    return lambda settings, options: settings.get(name) or (BF16 if settings else None)


def _as_json(name: str) -> Callable[[dict, object], str | None]:
    """Returns a reader of a dictionary, which a checkpoint records as Python writes it."""

    def read(settings, options) -> str | None:
        if settings.get(name) is None or (name == "vllm_engine_kwargs" and options.engine != "vllm"):
            return None
        value = settings[name]
        try:
            return json.dumps(ast.literal_eval(value) if isinstance(value, str) else value)
        except (ValueError, SyntaxError, TypeError) as error:
            raise ValueError(
                f"`--{name}`: the run recorded {value!r}, which cannot be read back. Give it as a JSON object, '{{}}' "
                "for none."
            ) from error

    return read


def _dtype(settings: dict, options) -> str | None:
    weights, mixed = settings.get("dtype"), bool(settings.get("bf16"))
    if weights is None:
        return None
    if settings.get("fp16") or (weights, mixed) not in TYPES_OF_RUN:
        raise ValueError(
            f"`--dtype`: the run trained weights in {weights} with `bf16`={mixed} and `fp16`={settings.get('fp16')}, "
            "which an evaluation cannot repeat. Name the types to evaluate it in."
        )
    return TYPES_OF_RUN[weights, mixed]


def _engine(settings: dict, options) -> str | None:
    if "use_vllm" not in settings:
        return None
    return "vllm" if settings["use_vllm"] and _why_not_vllm(options.rollout_precision) is None else "embedded"


def _why_not_vllm(precision: str) -> str | None:
    """Returns the reason why vLLM cannot sample in a precision on this machine; `None` if it can."""
    try:
        check_device(precision, otherwise="--engine embedded")
    except (ImportError, ValueError) as error:
        return str(error)
    return None


# Option of `eval` or `report --mismatch` -> its value by a run's record and the options so far; `None` if unknown
OF_RUN: dict[str, Callable[[dict, object], object]] = {
    "rollout_precision": _precision("rollout_precision"),
    "train_precision": _precision("train_precision"),
    "engine": _engine,
    "vllm_engine_kwargs": _as_json("vllm_engine_kwargs"),
    "dtype": _dtype,
    "max_completion_length": _recorded("max_completion_length"),
    "temperature": _recorded("temperature"),
    "top_p": _recorded("top_p"),
    "top_k": _recorded("top_k"),
    "min_p": _recorded("min_p"),
    "repetition_penalty": _recorded("repetition_penalty"),
    "generation_kwargs": _as_json("generation_kwargs"),
}
# Option -> the values that a line need not tell
NEUTRAL = {name: BOTH.get(name, ("{}",)) for name in OF_RUN}


def take(options, settings: dict, defaults: dict) -> list[str]:
    """
    Fills in the options that were not given: from a run's record, else with the command's defaults.

    Args:
        options: The options of a command; those that were not given are `None`.
        settings (`dict`): The record of the run; empty for a model that is no run.
        defaults (`dict`): Option -> default, for keys of [`OF_RUN`], in their order.

    Returns:
        `list[str]`: A line for each value of the run that acts, and for each that its record lacks.
    """
    lines = []
    for name in (name for name in OF_RUN if name in defaults and getattr(options, name) is None):
        value = OF_RUN[name](settings, options)
        setattr(options, name, defaults[name] if value is None else value)
        if acts(value, NEUTRAL[name]):
            lines.append(f"{name}: {value}, as in the run")
        elif settings and value is None and name in ("dtype", "engine"):
            lines.append(f"{name}: {defaults[name]}, since the run did not record its own")
        if name == "engine" and settings.get("use_vllm") and value == "embedded":
            why = _why_not_vllm(options.rollout_precision)
            lines[-1] = f"engine: embedded, though the run sampled with vLLM. {why}"
    return lines


def not_repeated(settings: dict) -> list[str]:
    """Returns a line for each setting of a run that changes what it samples, and that an evaluation cannot repeat."""
    lines = []
    if settings.get("tools"):
        lines.append(f"tools: none, while the run called {', '.join(settings['tools'])}; each answer is one turn")
    if settings.get("rollout_func"):
        lines.append(f"rollout_func: none, while the run sampled through {settings['rollout_func']}")
    if settings.get("exact_rollouts"):
        lines.append("exact_rollouts: off, while the run's trainer computed with vLLM's own kernels")
    return lines


# Data and rewards


def own_reward(settings: dict, model: str) -> tuple[str, list[str]]:
    """
    Returns the name of the reward that says whether a run's answers are right, and those of its rewards that look at
    the completion alone, such as at its format.

    Raises:
        ValueError: The run recorded no reward, one that cannot be found by its name, or several of the first kind.
    """
    names = settings.get("reward_funcs") or []
    alone = [name for name, reward in REWARDS.items() if not Benchmark(reward).reads]
    alone += [name for name in names if name.lstrip("<").startswith("trl.")]  # of lengths and formats
    compared = names if len(names) == 1 else [name for name in names if name not in alone]
    if len(compared) == 1 and "<" not in compared[0]:
        return compared[0], [name for name in names if name not in compared]
    why = f"its rewards are {names}, of which no single one can be taken" if names else "it records no rewards"
    raise ValueError(f"`--task`: {model!r} has no task of its own: {why}. Name one of {', '.join(BENCHMARKS)}.")


def own_benchmark(options, settings: dict) -> tuple[Benchmark, list[str]]:
    """
    Returns what `eval` asks and how it scores. Without a `--task` that is the run's reward on the run's data. With one
    the data are the run's too if the run was trained with the task's reward, or if the task has no data of its own.

    Args:
        options ([`~report.evaluation.EvaluationOptions`]): The options. Without a task, `task` becomes [`OWN_TASK`].
        settings (`dict`): The record of the run; empty for a model that is no run.

    Returns:
        `tuple[Benchmark, list[str]]`: The task, and a line for each part of it that is the run's.

    Raises:
        ValueError: The run does not record a reward or data that are needed.
    """
    lines = []
    if options.task is None:
        name, left_out = own_reward(settings, options.model)
        benchmark, options.task = Benchmark(find_reward(name)), OWN_TASK
        lines.append(f"task: right is what the run's reward {name!r} says")
        lines += [f"reward {other!r}: left out, since it does not compare with the data" for other in left_out]
    else:
        benchmark = BENCHMARKS[options.task]
        trained_with = [REWARDS.get(name) for name in settings.get("reward_funcs") or []]
        if benchmark.has_data and (options.task_kwargs is not None or benchmark.reward not in trained_with):
            told = settings and options.data is None
            return benchmark, ["data and instruction: the task's, not the run's"] if told else []
    if settings.get("dataset_name"):
        benchmark = replace(benchmark, instruction=settings["instruction"] or "")
        if options.instruction is None:
            lines.append(f"instruction: {settings['instruction'] or 'none'}, as in the run")
    if options.data is not None or not settings:
        return benchmark, lines
    if not settings.get("dataset_name"):
        why = "the run did not record its data, which only `trl-quant train` does"
        if not benchmark.has_data:
            raise ValueError(f"`--data`=None, and {why}. Name a file or a directory.")
        return benchmark, [*lines, f"data: the task's, since {why}"]
    source, split = settings["dataset_name"], settings["dataset_train_split"]
    own, own_split = settings["eval_dataset_name"] or source, settings["dataset_test_split"]
    what = "what the run trained on" if reads_same_rows(source, split, own, own_split) else "the run's"
    lines.append(f"data: {own}, split {own_split}, {what}")
    config = settings["dataset_config"] if own == source else None
    return replace(benchmark, source=own, split=own_split, config=config, answer="answer", problems=None), lines
