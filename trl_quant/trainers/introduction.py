"""Describes a run: one printed line when its trainer is built, and the same line in the model card."""

from pathlib import Path

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard
from transformers import Trainer

from .. import __version__
from ..config.summary import summary
from ..reading import reading
from .console import print_selectively


PACKAGE_TAG = "trl-quant"


def introduce(trainer: Trainer) -> None:
    """Prints once what the run does, and selects which metrics it prints from then on."""
    if trainer.is_world_process_zero():
        print(_summary(trainer))
    print_selectively(trainer)


def add_to_card(trainer: Trainer) -> None:
    """Adds the package, its version and the description of the run to the model card that TRL has just written."""
    if not trainer.is_world_process_zero():
        return
    path = Path(trainer.args.output_dir, "README.md")
    with reading(path):
        card = ModelCard.load(path)
    card.text += f"\n\n### Rollouts\n\nTrained with trl_quant {__version__}. {_summary(trainer)}.\n"
    card.save(path)


def _summary(trainer: Trainer) -> str:
    return summary(trainer.args, is_peft_model(trainer.model), trainer.model.dtype)
