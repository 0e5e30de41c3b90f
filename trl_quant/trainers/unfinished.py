"""The generation that a checkpoint interrupts.

A generation may serve several optimizer steps. TRL keeps its samples in memory, so a run that resumes between two of
these steps would sample anew, and count the updates of all later generations from there. Here a checkpoint inside a
generation holds what is left of it, one file for each rank, and the resumed run trains on the samples of an unbroken
run.
"""

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer

from ..storage.run_checkpoints import GENERATION_NAME


logger = logging.getLogger(__name__)


def save(trainer: Trainer, checkpoint: str | Path) -> None:
    """Saves what is left of this rank's generation. Must be called before the rest of the checkpoint is saved."""
    path = file_of(trainer, checkpoint)
    path.unlink(missing_ok=True)  # of an earlier run that was killed while it saved this checkpoint
    if is_inside(trainer, trainer._step):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"form": form(trainer)} | trainer.generation_state(), path)


def resume(trainer: Trainer, checkpoint: str | Path, micro_steps: int) -> int:
    """
    Continues the generation that a checkpoint interrupts. If a rank cannot, all ranks sample a new one, and the log
    says so. Collective.

    Args:
        trainer (`Trainer`): The trainer, before it trains.
        checkpoint (`str` or `Path`): The checkpoint that it resumes from.
        micro_steps (`int`): The micro-batches that the run had trained on.

    Returns:
        `int`: `micro_steps`, or 0 where a new generation begins.
    """
    if is_inside(trainer, micro_steps):
        found = read(file_of(trainer, checkpoint), trainer.accelerator.device)
        if not all(gather_object([found.pop("form", None) == form(trainer)])):
            logger.warning(
                "The checkpoint %s lies inside a generation that this run cannot continue: its samples are not in the "
                "checkpoint, or are those of other batches or ranks. The run samples a new one.",
                checkpoint,
            )
            return 0
        trainer.load_generation_state(found)
    return micro_steps


def is_inside(trainer: Trainer, micro_steps: int) -> bool:
    """Whether a generation has micro-batches left to train on."""
    return micro_steps % (trainer.args.steps_per_generation * trainer.args.num_iterations) != 0


def file_of(trainer: Trainer, checkpoint: str | Path) -> Path:
    return Path(checkpoint, f"{GENERATION_NAME}{trainer.args.process_index}.pt")


def form(trainer: Trainer) -> list[int]:
    """What a generation's micro-batches depend on: ranks, rows, parts and updates."""
    args = trainer.args
    return [args.world_size, args.per_device_train_batch_size, args.steps_per_generation, args.num_iterations]


def read(path: Path, device: torch.device) -> dict[str, Any]:
    """Reads what [`save`] saved; empty if there is no such file, or a part of one."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError):
        return {}
