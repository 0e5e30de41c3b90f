"""The generation that a checkpoint interrupts.

A generation may serve several optimizer steps. TRL keeps its samples only in memory, so a run that resumed between two
of these steps would sample again, and all later generations would begin at other steps than in an unbroken run. So a
checkpoint inside a generation holds the part of it that has not been trained on, in one file for each rank, and the
resumed run trains on the same samples as an unbroken run.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer

from ..reading import DamagedFile, reading
from ..storage.run_checkpoints import GENERATION_NAME


logger = logging.getLogger(__name__)


def save(trainer: Trainer, checkpoint: str | Path) -> None:
    """Saves this rank's unfinished generation, if any. Must be called before the rest of the checkpoint is written."""
    path = file_of(trainer, checkpoint)
    path.unlink(missing_ok=True)  # of an earlier run that was killed while it saved this checkpoint
    if is_inside(trainer, trainer._step):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"form": form(trainer)} | trainer.generation_state(), path)


def resume(trainer: Trainer, checkpoint: str | Path, state: dict) -> int:
    """
    Continues the generation that a checkpoint interrupts. If any rank cannot, all ranks sample a new one and log a
    warning. All ranks must call it.

    Args:
        trainer (`Trainer`): The trainer, before it trains.
        checkpoint (`str` or `Path`): The checkpoint that it resumes from.
        state (`dict`): What [`progress`] returned when the checkpoint was saved; empty in older ones.

    Returns:
        `int`: The number of micro-batches that the run has trained on, or 0 if a new generation begins.
    """
    micro_steps = state.get("micro_steps", 0)
    if not state.get("inside_generation"):
        # If the schedule has changed since, this step may lie inside a generation. A new generation then begins
        return 0 if is_inside(trainer, micro_steps) else micro_steps
    found = read(file_of(trainer, checkpoint), trainer.accelerator.device)
    if not all(gather_object([found.pop("form", None) == form(trainer)])):
        logger.warning(
            "The checkpoint %s lies inside a generation that this run cannot continue: its samples are not in the "
            "checkpoint, or belong to other ranks, batches or settings. The run samples a new one.",
            checkpoint,
        )
        return 0
    trainer.load_generation_state(found)
    return micro_steps


def progress(trainer: Trainer) -> dict:
    """Returns a run's progress, for a checkpoint's record."""
    return {"micro_steps": trainer._step, "inside_generation": is_inside(trainer, trainer._step)}


def is_inside(trainer: Trainer, micro_steps: int) -> bool:
    """Whether a generation has micro-batches left to train on."""
    return micro_steps % (trainer.args.steps_per_generation * trainer.args.num_iterations) != 0


def file_of(trainer: Trainer, checkpoint: str | Path) -> Path:
    """Returns the path of this rank's file in a checkpoint."""
    return Path(checkpoint, f"{GENERATION_NAME}{trainer.args.process_index}.pt")


def form(trainer: Trainer) -> dict:
    """Returns the settings that a generation's micro-batches, and the tensors computed for them, depend on."""
    args = trainer.args
    names = ("world_size", "per_device_train_batch_size", "steps_per_generation", "num_iterations", "needs_reference")
    settings = json.loads(json.dumps(args.training_settings()))
    return {name: getattr(args, name) for name in names} | settings


def read(path: Path, device: torch.device) -> dict[str, Any]:
    """Reads what [`save`] saved. The result is empty if the file is missing or damaged."""
    try:
        with reading(path):
            return dict(torch.load(path, map_location=device, weights_only=True))
    except (OSError, DamagedFile):
        return {}
