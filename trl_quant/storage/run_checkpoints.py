"""Reads the checkpoints of a run: which exist, which are complete, and what the run wrote beside its weights."""

import os
import platform
import re
import zipfile
from pathlib import Path

from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..reading import ANOTHER, DamagedFile, read_json, reading
from .files import ROLLOUT_STATE_NAME, read_heads


CRITIC_NAME = "critic"  # a directory
GENERATION_NAME = "unfinished_generation_"  # prefix of a rank's file, followed by the rank
POOL_NAME = "rollouts_in_flight.pt"
SHARD = re.compile(r".*-\d{5}-of-\d{5}\.(safetensors|bin)")
# The names that transformers and accelerate use: one file, one for each rank, or a directory under FSDP
OPTIMIZER = re.compile(r"optimizer\.(pt|bin)|optimizer_\d+|optimizer\.pt_.*|rank\d+-of-\d+-optimizer\.pt")
RANDOM = re.compile(r"rng_state(_\d+)?\.pth")
SCHEDULER, SCALER = (re.compile(re.escape(name)) for name in (SCHEDULER_NAME, SCALER_NAME))


def last_complete_checkpoint(output_dir: str) -> str | None:
    """
    Returns the newest checkpoint in `output_dir` with complete weights, or `None`. To resume, a run may need more files
    (see [`last_to_resume`]).
    """
    whole = [path for path in checkpoints_in(output_dir) if has_whole_weights(path)]
    return os.fspath(whole[-1]) if whole else None


def last_to_resume(output_dir: str) -> str | None:
    """Returns the newest checkpoint in `output_dir` from which a run can resume, or `None`."""
    whole = [path for path in checkpoints_in(output_dir) if is_whole(path)]
    return os.fspath(whole[-1]) if whole else None


def checkpoints_in(output_dir: str) -> list[Path]:
    """
    Returns all checkpoints in `output_dir`, complete or not, in the order of their steps. A copy that the user keeps
    there by another name, such as `checkpoint-best-300`, is not among them.
    """
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [path for path in Path(output_dir).glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def is_whole(path: Path) -> bool:
    return has_whole_weights(path) and not lacking(path)


def has_whole_weights(path: Path) -> bool:
    """
    Whether a checkpoint holds its trainer state and all of its weights. The trainer state is written last. So a run
    that was killed while it saved, or whose disk was full, leaves a directory without a readable trainer state. A run
    that was killed while it deleted a checkpoint may leave only some of its weights. With `save_on_each_node` only the
    first host has weights, since transformers writes a model on rank 0 alone.
    """
    try:
        read_json(path / TRAINER_STATE_NAME)
        read_heads(sorted(path.glob("*.safetensors")))
        indexed = set()
        for index in path.glob("*.index.json"):
            with reading(index):
                indexed |= set(map(str, read_json(index)["weight_map"].values()))
        if any(not (path / name).is_file() for name in indexed):
            return False
        shards = {file.name for file in path.iterdir() if SHARD.fullmatch(file.name)}
        weights = {file.name for file in path.iterdir() if file.is_dir() or file.suffix in (".safetensors", ".bin")}
        return shards <= indexed and bool(weights - {TRAINING_ARGS_NAME, CRITIC_NAME})
    except (OSError, DamagedFile):
        return False


def lacking(path: Path) -> list[str]:
    """
    Returns the parts, other than weights, that a checkpoint lacks to resume a run; empty with `save_only_model`. An
    incomplete file counts as lacking: a host that was killed while it saved leaves one beside the other ranks' files.
    """
    if saved_only_model(path):
        return []
    files = list(path.iterdir())
    is_written = {file.name: file.suffix not in (".pt", ".pth") or zipfile.is_zipfile(file) for file in files}
    needed = {"random state": RANDOM}
    # DeepSpeed's directory holds optimizer and scheduler
    if not any(name.startswith("global_step") for name in is_written):
        needed = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER} | needed
    found = {part: [is_written[name] for name in is_written if needed[part].fullmatch(name)] for part in needed}
    return [part for part, files in found.items() if not files or not all(files)]


def files_of(path: str | Path | None, *parts: re.Pattern) -> list[Path]:
    """Returns those files and directories of a checkpoint that hold some of its parts; none without a checkpoint."""
    found = sorted(Path(path).iterdir()) if path else []
    return [file for file in found if any(part.fullmatch(file.name) for part in parts)]


def saved_only_model(path: str | Path) -> bool:
    return arguments_of(path).get("save_only_model") is True


def arguments_of(path: str | Path) -> dict:
    try:
        return read_rollout_state(path).get("arguments", {})
    except ValueError:  # code that needs the file raises the error again
        return {}


def runs_of(path: str | Path) -> list[str]:
    """Returns the names of the runs that led to a checkpoint, its own last; empty for older versions."""
    try:
        return read_rollout_state(path).get("runs", [])
    except ValueError:
        return []


def how_to_go_on(output_dir: str) -> str:
    """Returns advice for an error message: the checkpoint from which a run can resume, as far as this host can see."""
    checkpoint = last_to_resume(output_dir)
    if checkpoint is not None:
        return f"The last whole checkpoint is {checkpoint}; continue with `train(resume_from_checkpoint=True)`."
    if os.environ.get("GROUP_RANK", "0") != "0":  # torchrun's number of this host
        return (
            f"There is no whole checkpoint in {output_dir} on this host, {platform.node()}, but the first host saves "
            "them: copy its last one here and continue with `train(resume_from_checkpoint=True)`."
        )
    weights = last_complete_checkpoint(output_dir)
    if weights is not None:
        return (
            f"No checkpoint in {output_dir} can be resumed. {weights} holds a model, but lacks its "
            f"{' and '.join(lacking(Path(weights)))}: begin a new run from it, with `model={weights!r}`."
        )
    incomplete = [path.name for path in checkpoints_in(output_dir)]
    if incomplete:
        names = ", ".join(incomplete)
        return f"There is no whole checkpoint in {output_dir}; not written to the end: {names}. Delete and start again."
    return f"There is no checkpoint in {output_dir}; start again."


def read_rollout_state(checkpoint: str | Path) -> dict:
    """Reads the state that [`write_rollout_state`] wrote; empty for a checkpoint of another trainer."""
    return read_state(Path(checkpoint, ROLLOUT_STATE_NAME))


def read_state(path: Path) -> dict:
    """Reads the object in a JSON file; empty if there is no file. Raises [`~reading.DamagedFile`]."""
    if not path.is_file():
        return {}
    return read_json(path, ANOTHER)
