"""The training run behind `trl-quant train`: options become rewards, datasets, a trainer and a saved model."""

import importlib
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_type_hints

from datasets import Dataset
from transformers import AutoTokenizer
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.rewards import get_soft_overlong_punishment

from ..config.fields import QuantFields
from ..config.values import check_choice, check_type, listed
from ..reading import reading
from ..runs.checkpoints import start_of
from ..runs.own_directory import writing
from ..storage.named import check_named
from ..tasks import REWARDS, load_prompts
from ..tasks.data import reads_same_rows
from ..tasks.named_data import NAMED_DATA
from ..tasks.named_rewards import find_reward
from .diffusion import DiffusionGRPOTrainer
from .distillation import QuantDistillationTrainer
from .grpo import QuantGRPOTrainer
from .ppo import QuantPPOTrainer
from .rloo import QuantRLOOTrainer


class _Trainers(UserDict):
    """Maps a name to a trainer. One that is given by the name of its class is imported when it is looked up."""

    def __getitem__(self, name: str) -> type:
        found = super().__getitem__(name)
        return getattr(importlib.import_module(__package__.partition(".")[0]), found) if type(found) is str else found


# The values of `--trainer`
TRAINERS = _Trainers(
    {
        "grpo": QuantGRPOTrainer,
        "ppo": QuantPPOTrainer,
        "rloo": QuantRLOOTrainer,
        "distillation": QuantDistillationTrainer,
        "diffusion": DiffusionGRPOTrainer,
        "async_grpo": "QuantAsyncGRPOTrainer",  # TRL warns of the package that it is in
    }
)
DEFAULT_DATASET = "openai/gsm8k"
# Options that say where the prompts come from
DATA_OPTIONS = ("dataset_name", "dataset_config", "dataset_train_split", "eval_dataset_name", "dataset_test_split")
DATA_OPTIONS += ("instruction",)
REWARD_OPTIONS = ("reward_funcs", "overlong_punishment")  # options that a trainer without rewards refuses


@dataclass
class TrainArguments:
    """The options of a run that belong neither to the trainer nor to the model, such as its data and its rewards."""

    trainer: Literal[tuple(TRAINERS)] = field(
        default="grpo",
        metadata={
            "help": "The method. It decides which of TRL's options there are, and their defaults: `--trainer rloo "
            "--help` lists those of RLOO. 'distillation' needs a `teacher_model_name_or_path`, and has no rewards; "
            "'ppo' trains a critic beside the policy; 'diffusion' is GRPO for masked diffusion models; 'async_grpo' is "
            "GRPO that samples while it trains."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset id on the hub, directory, .json, .jsonl, .parquet or .csv file, or a name of a paper's "
            f"data: {listed(NAMED_DATA)}. If not set, {DEFAULT_DATASET}."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on, such as 'train[:1000]'."})
    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "Where to evaluate, with `eval_strategy`; `dataset_name` if not set."}
    )
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    instruction: str | None = field(
        default=None, metadata={"help": "Text after each prompt, such as how to mark the answer."}
    )
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
        check_choice("trainer", self.trainer, [*TRAINERS])
        if isinstance(self.reward_funcs, str):  # a YAML file may name a single one
            self.reward_funcs = [self.reward_funcs]
        if not isinstance(self.reward_funcs, list) or not all(isinstance(name, str) for name in self.reward_funcs):
            raise ValueError(f"`reward_funcs`={self.reward_funcs!r} must be a name or a list of names.")
        for name, hint in (get_type_hints(type(self)) | {"trainer": str}).items():
            if name != "reward_funcs":
                check_type(name, getattr(self, name), hint)
        self.defaults_told = [] if self.dataset_name else [f"No `dataset_name`: the run trains on {DEFAULT_DATASET}."]
        self.dataset_name = self.dataset_name or DEFAULT_DATASET
        if not 0 <= self.overlong_punishment <= 1:
            raise ValueError(f"`overlong_punishment`={self.overlong_punishment!r} must be a number from 0 to 1.")
        self.rewards = [find_reward(name) for name in self.reward_funcs]

    def data_settings(self) -> dict:
        """Returns where the prompts come from, as a checkpoint records it: files and directories by absolute paths."""
        found = {name: getattr(self, name) for name in DATA_OPTIONS}
        for name in ("dataset_name", "eval_dataset_name"):
            if found[name] is not None and Path(found[name]).exists():
                found[name] = str(Path(found[name]).resolve())
        return found


def trainer_arguments(
    script_args: TrainArguments,
    training_args: QuantFields,
    model_args: ModelConfig,
    reward_funcs: list[Callable] | None = None,
) -> dict:
    """
    Loads the datasets and returns the arguments for the trainer. The main process prints which options are at their
    defaults.

    Args:
        script_args ([`TrainArguments`]): The data and the rewards.
        training_args ([`~config.fields.QuantFields`]):
            The trainer's options, such as a [`QuantGRPOConfig`]. The trainer gets a copy, with the model's options in
            `model_init_kwargs`.
        model_args ([`~trl.ModelConfig`]): The model's options.
        reward_funcs (`list[Callable]`, *optional*): Further reward functions.

    Returns:
        `dict`: The keyword arguments of the trainer, and of [`~report.plan.make_plan`].

    Raises:
        `ValueError`: Options that do not fit the trainer, or data that do not fit the rewards.
    """
    expected = TRAINERS[script_args.trainer].config_class
    if not isinstance(training_args, expected):
        raise ValueError(
            f"`trainer`={script_args.trainer!r} takes the options of a {expected.__name__}, but got those of a "
            f"{type(training_args).__name__}. Write `--trainer {script_args.trainer}` in full, or leave it out."
        )
    if not training_args.has_rewards:
        _check_distillation(script_args, training_args, reward_funcs)
    if training_args.eval_strategy == "no" and script_args.eval_dataset_name is not None:
        raise ValueError(
            f"`eval_dataset_name`={script_args.eval_dataset_name!r} acts only with an `eval_strategy`, such as "
            "'steps', and that is 'no'. Set both, or neither."
        )
    if script_args.overlong_punishment and training_args.is_asynchronous and training_args.spec.sampler is None:
        raise ValueError(
            f"`overlong_punishment`={script_args.overlong_punishment!r} is a function that TRL makes, and TRL's worker "
            "takes only functions of a module to its process. Set a `rollout_precision`, or leave it out."
        )
    told = list(script_args.defaults_told)
    if training_args.eval_strategy != "no" and _evaluates_what_it_trains_on(script_args):
        told.append("No `eval_dataset_name`: the run is evaluated on the prompts that it trains on.")
    if training_args.spec.sampler is None:
        told.append("No `rollout_precision` and no `train_precision`: nothing is quantized.")
    if training_args.process_index == 0:
        print("\n".join(told), end="\n" if told else "")
    if training_args.has_rewards:
        overlong = _overlong_punishment(script_args.overlong_punishment, training_args.max_completion_length)
        goal = {"reward_funcs": [*script_args.rewards, *(reward_funcs or []), *overlong]}
    else:
        goal = {"teacher_model": training_args.teacher_model_name_or_path}
    datasets = load_data(script_args, training_args, model_args)
    return {**model_arguments(training_args, model_args), **goal, **datasets}


def model_arguments(training_args: QuantFields, model_args: ModelConfig) -> dict:
    """Returns those arguments of the trainer that concern neither data nor rewards, as [`trainer_arguments`] does."""
    options = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": getattr(training_args, "dtype", model_args.dtype),  # a trainer's config may have one of its own
        **(training_args.model_init_kwargs or {}),
    }
    if training_args.is_asynchronous:  # TRL's trainer sets an attention itself, and takes none
        options = {name: value for name, value in options.items() if value is not None}
    return {
        "model": model_args.model_name_or_path,
        "args": training_args.having(model_init_kwargs=options),
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
    }


def load_data(
    script_args: TrainArguments, training_args: QuantFields, model_args: ModelConfig
) -> dict[str, Dataset | None]:
    """Returns the trainer's `train_dataset` and, if evaluation is on, its `eval_dataset`, else `None`."""
    check_named("model_name_or_path", model_args.model_name_or_path, model_args.model_revision)
    try:
        with reading(model_args.model_name_or_path):
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
        config = script_args.dataset_config if name == script_args.dataset_name else None
        datasets[key] = load_prompts(name, split, config, tokenizer, script_args.instruction)
        if training_args.has_rewards:
            _check_answers(script_args.reward_funcs, name, datasets[key].column_names)
    return datasets


def _evaluates_what_it_trains_on(script_args: TrainArguments) -> bool:
    return reads_same_rows(
        script_args.dataset_name,
        script_args.dataset_train_split,
        script_args.eval_dataset_name or script_args.dataset_name,
        script_args.dataset_test_split,
    )


def train(arguments: dict, trainer_class: type, data: dict | None = None) -> None:
    """
    Trains with these [`trainer_arguments`], or resumes the run, and saves the model and the trainer's state.

    Args:
        arguments (`dict`): The trainer's arguments.
        trainer_class (`type`): The trainer.
        data (`dict`, *optional*): Where the prompts come from, for the checkpoints' record of the run.
    """
    resume = checkpoint_of(arguments)
    with writing(arguments["args"]):
        trainer = trainer_class(**arguments)
        trainer.data = data or {}
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(arguments["args"].output_dir)
        trainer.save_state()


def checkpoint_of(arguments: dict) -> str | None:
    """Returns what [`~checkpoints.start_of`] does for these [`trainer_arguments`]."""
    arguments["args"].resolve_for(adapted=arguments["peft_config"] is not None)
    return start_of(arguments["args"], arguments["peft_config"])


def _check_distillation(script_args: TrainArguments, training_args: QuantFields, reward_funcs) -> None:
    """Raises `ValueError` for a distillation run with rewards, which it does not use, or without a teacher."""
    defaults = TrainArguments()
    given = [name for name in REWARD_OPTIONS if getattr(script_args, name) != getattr(defaults, name)]
    if given or reward_funcs:
        raise ValueError(
            f"`{(given or ['reward_funcs'])[0]}` acts only with a trainer that has rewards, and `trainer`="
            f"{script_args.trainer!r}. Leave it out."
        )
    if training_args.teacher_model_name_or_path is None:
        raise ValueError("`teacher_model_name_or_path`=None: name the teacher, a hub id or a directory.")


def _check_answers(reward_funcs: list[str], dataset_name: str, columns: Sequence[str]) -> None:
    """Raises `ValueError` if a reward compares with the column 'answer' and the dataset has none."""
    if "answer" in columns:
        return
    needs_answer = [reward for reward in reward_funcs if reward in ("arithmetic", "gsm8k")]
    needs_answer += [reward for reward in reward_funcs if reward == "strict_math" and "solution" not in columns]
    if needs_answer:
        raise ValueError(
            f"`reward_funcs`={needs_answer} compare with a column 'answer', but dataset {dataset_name!r} has only "
            f"{columns}."
        )


def _overlong_punishment(share: float, length: int | None) -> list[Callable[..., list[float]]]:
    """
    Returns TRL's punishment of completions near their maximum length (DAPO eq. 13) if `share` is above 0. Raises
    `ValueError` for a share of no token.
    """
    if share and length is None:
        raise ValueError(f"`overlong_punishment`={share!r} needs a `max_completion_length`, which is None.")
    if share and not round(share * length):
        raise ValueError(
            f"`overlong_punishment`={share!r} of `max_completion_length`={length} is less than a token, which would "
            "punish nothing. Set a larger share, or 0."
        )
    return [get_soft_overlong_punishment(length, round(share * length))] if share else []
