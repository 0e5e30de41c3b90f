"""`trl-quant train`: GRPO with quantized rollouts, configured on the command line or in a `--config` file.

    trl-quant train --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --rollout_precision fp8 --use_vllm true
    trl-quant train --model_name_or_path MODEL --dataset_name problems.jsonl --rollout_precision int4

TRL's parser reads the options: the fields of [`TrainArguments`], [`QuantGRPOConfig`] and TRL's `ModelConfig`, which has
PEFT's. Bad input is refused before a model is loaded.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import iscoroutinefunction
from numbers import Real

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from trl.rewards import get_soft_overlong_punishment
from yaml import YAMLError

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import plain_errors
from trl_quant.cli.options import PROG, USAGE, about_unknown, check_train
from trl_quant.config.fields import SECTIONS
from trl_quant.report.plan import make_plan
from trl_quant.tasks import REWARDS, load_prompts


DEFAULT_DATASET = "openai/gsm8k"


@dataclass
class TrainArguments:
    """What to train on."""

    dataset_name: str | None = field(
        default=None,
        metadata={"help": f"Dataset id on the hub, directory, or .json or .jsonl file. If not set, {DEFAULT_DATASET}."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on, such as 'train[:1000]'."})
    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "Where to evaluate, with `eval_strategy`; `dataset_name` if not set."}
    )
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["gsm8k"],
        metadata={"help": f"Rewards, summed: {', '.join(REWARDS)}, or the dotted path of a function of your own."},
    )
    overlong_punishment: float = field(
        default=0.0,
        metadata={
            "help": "Last part of `max_completion_length`, from 0 to 1, over which a further reward falls from 0 to -1 "
            "(DAPO); 0 for none."
        },
    )

    dry_run: bool = field(
        default=False, metadata={"help": "Check everything, say what the run would do and need, and load nothing."}
    )

    def __post_init__(self):
        self.defaults_told = [] if self.dataset_name else [f"No `dataset_name`: the run trains on {DEFAULT_DATASET}."]
        self.dataset_name = self.dataset_name or DEFAULT_DATASET
        if not 0 <= self.overlong_punishment <= 1:
            raise ValueError(f"`overlong_punishment`={self.overlong_punishment!r} must be a number from 0 to 1.")
        self.rewards = [_reward(name) for name in self.reward_funcs]


def _reward(name: str) -> Callable[..., list[float | None]]:
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.rpartition(".")
    try:
        sys.path.insert(0, os.getcwd())
        reward = getattr(importlib.import_module(module), function)
    except (ValueError, ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(
            f"`reward_funcs`={name!r} is unknown ({error}). Allowed: {', '.join(map(repr, REWARDS))}, or the dotted "
            "path of a function, such as 'my_rewards.brevity'."
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(reward):
        raise ValueError(f"`reward_funcs`={name!r} is a {type(reward).__name__}, not a function.")
    return reward if iscoroutinefunction(reward) else _returning_rewards(reward, name)


def _returning_rewards(reward: Callable, name: str) -> Callable[..., list[float | None]]:
    """The same reward, with an error that names it where it returns no rewards."""

    @wraps(reward)
    def checked(*args, **kwargs):
        rewards = reward(*args, **kwargs)
        if not isinstance(rewards, Iterable) or not all(value is None or _is_number(value) for value in rewards):
            raise ValueError(
                f"`reward_funcs`={name!r} returned {str(rewards)[:80]}, which must be a list with a number or None for "
                "each completion."
            )
        return rewards

    return checked


def _is_number(value) -> bool:
    return isinstance(value, Real) or getattr(value, "ndim", None) == 0


def _overlong_punishment(part: float, length: int | None) -> list[Callable[..., list[float]]]:
    """TRL's punishment of completions close to their greatest length (DAPO eq. 13), if `part` is above 0."""
    if part and length is None:
        raise ValueError(f"`overlong_punishment`={part!r} needs a `max_completion_length`, which is None.")
    return [get_soft_overlong_punishment(length, round(part * length))] if part else []


class Parser(TrlParser):
    """TRL's parser, which also names the options of a config file that it does not know."""

    def __init__(self):
        self.added, self.misnamed = [], []
        super().__init__((TrainArguments, QuantGRPOConfig, ModelConfig), prog=PROG, usage=USAGE)

    def add_argument(self, *names, **options):
        self.added.append(super().add_argument(*names, **options))
        return self.added[-1]

    def named(self) -> dict[str, argparse.Action]:
        """Name of an option -> what argparse knows of it. `--no_x` has the name of `--x`, and comes after it."""
        return {action.dest: action for action in reversed(self.added) if action.dest != "help"}

    def set_defaults_with_config(self, **config) -> list[str]:
        self.misnamed += super().set_defaults_with_config(**config)
        return self.misnamed

    def parse_args_into_dataclasses(self, args=None, **options):
        """Names unknown options first, since a config may be refused for what this machine lacks."""
        if unknown := self.misnamed + self.parse_known_args(args)[1]:
            self.error(about_unknown(unknown))
        return super().parse_args_into_dataclasses(args, **options)


def own_options() -> dict[str, dict[str, dict]]:
    """Heading -> name -> fields of [`~options.Option`], for the options that this package defines."""
    actions, found = Parser().named(), {}
    for name, title in _titles().items():
        action = actions[name]
        allowed = None if action.choices is None else list(action.choices)
        option = {"nargs": action.nargs, "default": action.default, "help": action.help, "choices": allowed}
        found.setdefault(title, {})[name] = option
    return found


def _titles() -> dict[str, str]:
    """Option -> heading of its group in the help."""
    found = {f.name: "what to train on" for f in fields(TrainArguments)}
    for title, section in SECTIONS.items():
        found |= {f.name: title for f in fields(section)}
    redefined = [f.name for f in fields(QuantGRPOConfig) if f.name in QuantGRPOConfig.__annotations__]
    return found | dict.fromkeys(redefined, "settings that follow the correction")


def parse_args(
    argv: list[str] | None = None, recipe: dict | None = None
) -> tuple[TrainArguments, QuantGRPOConfig, ModelConfig]:
    """Reads and checks the command line. A script's `recipe` replaces defaults of the options."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available():
        # accelerate does not pass `use_cpu` on to the processes it starts, and without it each would train by itself.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    argv = sys.argv[1:] if argv is None else list(argv)
    prog, usage = PROG, USAGE
    if recipe:
        prog, usage = os.path.basename(sys.argv[0]), "%(prog)s [--config FILE.yaml] [options]"
    check_train(argv, prog, usage, recipe)
    parser = Parser()
    parser.prog, parser.usage = prog, usage
    parser.set_defaults_with_config(**recipe or {})
    argv = [part for given in argv for part in (given.split("=", 1) if given.startswith("--config=") else [given])]
    if any(part == "--config" and after.startswith("--") for part, after in zip(argv, [*argv[1:], "--"])):
        parser.error("argument --config: expected a YAML file")
    try:
        parsed = parser.parse_args_and_config(argv)
    except YAMLError as error:
        raise ValueError(f"`--config`: not a YAML file: {error}") from error
    if parsed[2].model_name_or_path is None:
        raise ValueError("`model_name_or_path`=None: name the model to train, a hub id or a directory.")
    return tuple(parsed)


def load_data(
    script_args: TrainArguments, training_args: QuantGRPOConfig, model_args: ModelConfig
) -> dict[str, Dataset | None]:
    """The trainer's `train_dataset` and, if evaluation is on, `eval_dataset`."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            trust_remote_code=training_args.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        name = model_args.model_name_or_path
        raise ValueError(f"`model_name_or_path`={name!r}: its tokenizer cannot be read. {error}") from error
    sources = {"train_dataset": (script_args.dataset_name, script_args.dataset_train_split)}
    if training_args.eval_strategy != "no":
        name = script_args.eval_dataset_name or script_args.dataset_name
        sources["eval_dataset"] = (name, script_args.dataset_test_split)
    datasets = {}
    for key, (name, split) in sources.items():
        datasets[key] = load_prompts(name, split, script_args.dataset_config, tokenizer)
        columns = datasets[key].column_names
        needs_answer = [r for r in script_args.reward_funcs if r in ("arithmetic", "gsm8k")]
        needs_answer += [r for r in script_args.reward_funcs if r == "strict_math" and "solution" not in columns]
        if needs_answer and "answer" not in columns:
            raise ValueError(
                f"`reward_funcs`={needs_answer} compare with a column 'answer', but dataset {name!r} has only "
                f"{columns}."
            )
    return datasets


@plain_errors()
def main(argv: list[str] | None = None, reward_funcs: list[Callable] | None = None, recipe: dict | None = None) -> None:
    """Trains and saves.

    Args:
        argv (`list[str]`, *optional*): the command line, by default this process's.
        reward_funcs (`list[Callable]`, *optional*): functions in TRL's signature, beside those of the command line.
        recipe (`dict`, *optional*): option -> default in place of the usual one.
    """
    script_args, training_args, model_args = parse_args(argv, recipe)
    given = trainer_arguments(script_args, training_args, model_args, reward_funcs)
    if script_args.dry_run:
        refused = show_plan(given)
        if refused is not None:
            raise refused
        return
    trainer = QuantGRPOTrainer(**given)
    resume = training_args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume in ("true", "True") else resume)
    trainer.save_model(training_args.output_dir)
    trainer.save_state()


def trainer_arguments(
    script_args: TrainArguments,
    training_args: QuantGRPOConfig,
    model_args: ModelConfig,
    reward_funcs: list[Callable] | None = None,
) -> dict:
    """What the trainer is built with; says on the main process what was left to defaults."""
    told = list(script_args.defaults_told)
    if training_args.rollout_precision is None:
        told.append("No `rollout_precision` and no `train_precision`: nothing is quantized.")
    if training_args.process_index == 0:
        print("\n".join(told), end="\n" if told else "")
    overlong = _overlong_punishment(script_args.overlong_punishment, training_args.max_completion_length)
    datasets = load_data(script_args, training_args, model_args)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return {
        "model": model_args.model_name_or_path,
        "reward_funcs": [*script_args.rewards, *(reward_funcs or []), *overlong],
        "args": training_args,
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
        **datasets,
    }


def show_plan(given: dict, card: int | None = None) -> Exception | None:
    """Prints what a run with these [`trainer_arguments`] would do; returns why it cannot start here, if it cannot."""
    plan = make_plan(**given, card=card)
    print("\n".join(plan.lines))
    return plan.refused
