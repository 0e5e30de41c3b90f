"""`trl-quant train`: GRPO with quantized rollouts, from the command line or a `--config` file, by TRL's own parser.

    trl-quant train --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --rollout_precision fp8 --use_vllm true
    trl-quant train --model_name_or_path MODEL --dataset_name problems.jsonl --rollout_precision int4

Options are those of [`TrainArguments`], [`QuantGRPOConfig`] and TRL's `ModelConfig` (which has PEFT's). Bad input is
refused before a model is loaded.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.tasks import REWARDS, load_prompts


@dataclass
class TrainArguments:
    """What to train on."""

    dataset_name: str = field(
        default="openai/gsm8k", metadata={"help": "Dataset id on the hub, directory, or .json or .jsonl file."}
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

    def __post_init__(self):
        self.rewards = [_reward(name) for name in self.reward_funcs]


def _reward(name: str) -> Callable[..., list[float | None]]:
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.rpartition(".")
    try:
        sys.path.insert(0, os.getcwd())
        return getattr(importlib.import_module(module), function)
    except (ValueError, ImportError, AttributeError):
        raise ValueError(
            f"`reward_funcs`={name!r} is unknown. Allowed: {', '.join(map(repr, REWARDS))}, or the dotted path of a "
            "function, such as 'my_rewards.brevity'."
        ) from None
    finally:
        sys.path.remove(os.getcwd())


def parse_args(argv: list[str] | None = None) -> tuple[TrainArguments, QuantGRPOConfig, ModelConfig]:
    """Reads the command line and checks it."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available():
        # accelerate does not pass `use_cpu` on to the processes it starts, and without it each would train by itself.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    parsed = TrlParser((TrainArguments, QuantGRPOConfig, ModelConfig)).parse_args_and_config(argv)
    if parsed[2].model_name_or_path is None:
        raise ValueError("`model_name_or_path`=None: name the model to train, a hub id or a directory.")
    return parsed


def load_data(
    script_args: TrainArguments, training_args: QuantGRPOConfig, model_args: ModelConfig
) -> dict[str, Dataset | None]:
    """The trainer's `train_dataset` and, if evaluation is on, `eval_dataset`."""
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=training_args.trust_remote_code,
    )
    sources = {"train_dataset": (script_args.dataset_name, script_args.dataset_train_split)}
    if training_args.eval_strategy != "no":
        name = script_args.eval_dataset_name or script_args.dataset_name
        sources["eval_dataset"] = (name, script_args.dataset_test_split)
    datasets = {}
    for key, (name, split) in sources.items():
        datasets[key] = load_prompts(name, split, script_args.dataset_config, tokenizer)
        needs_answer = [r for r in script_args.reward_funcs if r in ("arithmetic", "gsm8k")]
        if needs_answer and "answer" not in datasets[key].column_names:
            raise ValueError(
                f"`reward_funcs`={needs_answer} compare with a column 'answer', but dataset {name!r} has only "
                f"{datasets[key].column_names}."
            )
    return datasets


def main(argv: list[str] | None = None, reward_funcs: list[Callable] | None = None) -> None:
    """Trains and saves.

    Args:
        argv (`list[str]`, *optional*): the command line, by default this process's.
        reward_funcs (`list[Callable]`, *optional*): functions in TRL's signature, beside those of the command line.
    """
    try:
        script_args, training_args, model_args = parse_args(argv)
        datasets = load_data(script_args, training_args, model_args)
    except ValueError as error:
        sys.exit(f"error: {error}")

    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = QuantGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[*script_args.rewards, *(reward_funcs or [])],
        args=training_args,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        **datasets,
    )
    resume = training_args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume in ("true", "True") else resume)
    trainer.save_model(training_args.output_dir)
    trainer.save_state()
