"""What a checkpoint holds beside TRL's, which one is whole, and what must match when a run goes on from it."""

import json
import os
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


ROLLOUT_STATE_NAME = "rollout_state.json"


def last_complete_checkpoint(output_dir: str) -> str | None:
    """
    The newest checkpoint in `output_dir` that was written to its end, or `None`. The trainer state is written last:
    a run that was killed, or whose disk was full, while saving leaves a directory without a readable one.
    """
    steps = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            steps[int(path.name.rpartition("-")[2])] = json.loads((path / "trainer_state.json").read_text()) and path
        except (OSError, ValueError):
            continue
    return os.fspath(steps[max(steps)]) if steps else None


def how_to_go_on(output_dir: str) -> str:
    """Where a run that failed can go on."""
    checkpoint = last_complete_checkpoint(output_dir)
    if checkpoint is not None:
        return f"The last whole checkpoint is {checkpoint}; continue with `train(resume_from_checkpoint=True)`."
    return f"There is no whole checkpoint in {output_dir}; start again, with a smaller `save_steps`."


def precision_before(output_dir: str) -> str | None:
    """The precision of the run whose last whole checkpoint is in `output_dir`, if there is one."""
    return read_rollout_state(last_complete_checkpoint(output_dir) or "").get("precision")


def write_rollout_state(checkpoint: str | Path, state: dict) -> None:
    """Writes what the engine must find again, before the rest of the checkpoint is written."""
    Path(checkpoint).mkdir(parents=True, exist_ok=True)
    (Path(checkpoint) / ROLLOUT_STATE_NAME).write_text(json.dumps(state))


def read_rollout_state(checkpoint: str | Path) -> dict:
    """What the engine of a checkpoint left, empty for a checkpoint of another trainer."""
    path = Path(checkpoint, ROLLOUT_STATE_NAME)
    return json.loads(path.read_text()) if path.is_file() else {}


def check_uaq(checkpoint: str | Path, applied: float | None) -> None:
    """Raises `ValueError` for a checkpoint whose weights were scaled otherwise than those of this run."""
    path = Path(checkpoint) / "config.json"
    if path.is_file() and (recorded := json.loads(path.read_text()).get("uaq_scale")) != applied:
        raise ValueError(
            f"The checkpoint {checkpoint} was trained with `uaq_scale`={recorded}, this run has `uaq_scale`={applied}. "
            "Resume with the same value."
        )
