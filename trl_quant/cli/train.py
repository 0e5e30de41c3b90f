"""`trl-quant train`: trains with quantized rollouts, configured on the command line or in a `--config` file.

    trl-quant train --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --rollout_precision fp8 --use_vllm true
    trl-quant train --trainer rloo --model_name_or_path MODEL --dataset_name problems.jsonl --rollout_precision int4

TRL's parser reads the options: the fields of [`TrainArguments`], of the config of the chosen trainer, such as
[`QuantGRPOConfig`], and of TRL's `ModelConfig`, which includes PEFT's. [`trl_quant.trainers.launch`] runs the training.
Bad input is refused before a model is loaded.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from inspect import get_annotations

import torch
from trl import ModelConfig, TrlParser

from ..config.fields import SECTIONS, QuantFields
from ..config.values import meant_words
from ..report.plan import make_plan
from ..trainers import launch
from ..trainers.launch import TrainArguments
from . import plain_errors
from .options import DEFAULTS, PROG, USAGE, about_unknown, check_train, chosen_trainer, read_config


# Options of TRL's `ModelConfig` that act only with `use_peft`: those of PEFT's adapter, and of bitsandbytes' base
OF_ADAPTER = (*(f.name for f in fields(ModelConfig) if f.name.startswith("lora_")), "use_rslora", "use_dora")
OF_BASE = ("load_in_8bit", "load_in_4bit")


@dataclass
class WithoutDtype(ModelConfig):
    """TRL's `ModelConfig` beside a trainer's config that has a `dtype` too: that one is the option, and acts."""

    dtype: str | None = field(default=None, init=False)


class Parser(TrlParser):
    """TRL's parser of a trainer's options. It also refuses unknown options in a config file, and names them."""

    def __init__(self, trainer: str):
        self.trainer, self.added, self.misnamed = trainer, [], []
        config = launch.TRAINERS[trainer].config_class
        model = WithoutDtype if "dtype" in config.__dataclass_fields__ else ModelConfig
        super().__init__((TrainArguments, config, model), prog=PROG, usage=USAGE)

    def add_argument(self, *names, **options):
        self.added.append(super().add_argument(*names, **options))
        return self.added[-1]

    def named(self) -> dict[str, argparse.Action]:
        """Returns name -> action of each option. Where `--no_x` has the name of `--x`, the action is that of `--x`."""
        return {action.dest: action for action in reversed(self.added) if action.dest != "help"}

    def set_defaults_with_config(self, **config) -> list[str]:
        self.misnamed += super().set_defaults_with_config(**config)
        return self.misnamed

    def parse_args_into_dataclasses(self, args=None, **options):
        """First refuses what is wrong on any machine. Building the config may fail for features that this one lacks."""
        given, unknown = self.parse_known_args(args)
        unknown = self.misnamed + unknown
        if unknown:
            self.error(about_unknown(unknown, self.trainer))
        if given.model_name_or_path is None:
            raise ValueError("`model_name_or_path`=None: name the model to train, a hub id or a directory.")
        return super().parse_args_into_dataclasses(args, **options)


def own_options(trainer: str) -> dict[str, dict[str, dict]]:
    """Returns heading -> name -> the fields of [`~options.Option`], for the options that this package defines."""
    actions, found = Parser(trainer).named(), {}
    for name, title in _titles(trainer).items():
        action = actions[name]
        allowed = None if action.choices is None else list(action.choices)
        option = {"nargs": action.nargs, "default": action.default, "help": action.help, "choices": allowed}
        found.setdefault(title, {})[name] = option
    return found


def _titles(trainer: str) -> dict[str, str]:
    """Returns the heading of each option's group in the help."""
    found = {f.name: "what to train on" for f in fields(TrainArguments)}
    config = launch.TRAINERS[trainer].config_class
    for title, section in (SECTIONS | config.further_sections).items():
        found |= {f.name: title for f in fields(section)}
    ours = [get_annotations(c) for c in config.__mro__ if issubclass(c, QuantFields) and c is not QuantFields]
    redefined = [f.name for f in fields(config) if any(f.name in annotations for annotations in ours)]
    return found | dict.fromkeys(redefined, "settings that follow the correction")


def parse_args(
    argv: list[str] | None = None, recipe: dict | None = None
) -> tuple[TrainArguments, QuantFields, ModelConfig]:
    """Parses and checks the command line. A script's `recipe` replaces the options' defaults."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available():
        # accelerate does not pass `use_cpu` on to the processes that it starts, and each would then train by itself
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    argv = sys.argv[1:] if argv is None else list(argv)
    prog, usage = PROG, USAGE
    if recipe:
        prog, usage = os.path.basename(sys.argv[0]), "%(prog)s [--config FILE.yaml] [options]"
    check_train(argv, prog, usage, recipe)
    parser = Parser(chosen_trainer(argv, recipe))
    parser.prog, parser.usage = prog, usage
    parser.set_defaults_with_config(**DEFAULTS | (recipe or {}))
    argv = [part for given in argv for part in (given.split("=", 1) if given.startswith("--config=") else [given])]
    if any(part == "--config" and after.startswith("--") for part, after in zip(argv, [*argv[1:], "--"])):
        parser.error("argument --config: expected a YAML file")
    if "--config" in argv:
        read_config(argv[argv.index("--config") + 1])
    parsed = parser.parse_args_and_config(argv)
    vars(parsed[2]).update(meant_words(parsed[2]))
    _check_adapter(parsed[2], vars(ModelConfig()) | DEFAULTS | (recipe or {}))
    return tuple(parsed)


def _check_adapter(model_args: ModelConfig, defaults: dict) -> None:
    """Refuses options of an adapter, and a base that cannot be trained without one, if `use_peft` is not set."""
    if model_args.use_peft:
        return
    for names, why in (
        (OF_ADAPTER, "without it all weights are trained"),
        (OF_BASE, "weights in so few bits cannot be trained"),
    ):
        for name in names:
            value = getattr(model_args, name)
            if value != defaults[name]:
                raise ValueError(f"`{name}`={value!r} acts only with `use_peft`=True: {why}. Set both, or neither.")


@plain_errors()
def main(argv: list[str] | None = None, reward_funcs: list[Callable] | None = None, recipe: dict | None = None) -> None:
    """Trains and saves the model, or with `--dry_run` prints the plan of the run.

    Args:
        argv (`list[str]`, *optional*): The command line, by default this process's.
        reward_funcs (`list[Callable]`, *optional*): Reward functions in TRL's signature, added to the command line's.
        recipe (`dict`, *optional*): Defaults of options that replace the usual ones.
    """
    script_args, training_args, model_args = parse_args(argv, recipe)
    arguments = launch.trainer_arguments(script_args, training_args, model_args, reward_funcs)
    if not script_args.dry_run:
        launch.train(arguments, launch.TRAINERS[script_args.trainer], script_args.data_settings())
        return
    launch.checkpoint_of(arguments)
    plan = make_plan(**arguments)
    print("\n".join(plan.lines))
    if plan.refused is not None:
        raise plan.refused
    if not plan.fits:
        raise SystemExit(1)
