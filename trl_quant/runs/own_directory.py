"""A run's own `output_dir`: one run at a time writes there, and deletes only its own checkpoints."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from ..storage.lock import OUTPUT_LOCK, locked
from ..storage.manifest import MANIFEST
from ..storage.run_checkpoints import checkpoints_in, last_complete_checkpoint, number_of, runs_of
from .agreement import on_every_rank


logger = logging.getLogger(__name__)


@contextmanager
def writing(args) -> Iterator[None]:
    """
    Context in which a run alone writes into its `output_dir`. The first rank holds the lock for all of them. All ranks
    must call it.

    Raises:
        `ValueError`: Another run writes there. Raised on every rank.
    """
    refusal = f"`output_dir`={args.output_dir!r}: another run writes there. Name another directory."
    with ExitStack() as held:
        with on_every_rank():
            if args.process_index == 0:
                check_place(args.output_dir)
                held.enter_context(locked(Path(args.output_dir, OUTPUT_LOCK), refusal))
        yield


def check_place(output_dir: str) -> None:
    """Raises `ValueError` if a directory does not exist and cannot be made, or cannot be written."""
    place = Path(output_dir).absolute()
    found = next(path for path in (place, *place.parents) if path.exists())
    if not found.is_dir() or not os.access(found, os.W_OK):
        wrong = "cannot be written" if found.is_dir() else "is not a directory"
        raise ValueError(f"`output_dir`={output_dir!r}: {found} {wrong}. Name another directory.")


def beside_another_run(output_dir: str) -> str | None:
    """Returns why a new run should not save into a directory, or `None` if it may."""
    other = last_complete_checkpoint(output_dir)
    if other is None:
        return None
    return (
        f"`output_dir`={output_dir!r} holds the checkpoint {Path(other).name} of an earlier run. Name another "
        "directory, or continue that run with `resume_from_checkpoint`=True."
    )


def tell_another_run(args) -> None:
    """Warns if a new run would save beside another run's checkpoints."""
    beside = beside_another_run(args.output_dir)
    if beside is not None and args.should_save:
        logger.warning(beside)


def of_other_runs(output_dir: str, runs: list[str]) -> dict[str, str]:
    """Returns the checkpoints in a directory that none of these runs saved: name -> the run that saved it."""
    last = {path.name: runs_of(path)[-1:] for path in checkpoints_in(output_dir)}
    return {name: run[0] for name, run in last.items() if run and run[0] not in runs}


def check_alone(output_dir: str, runs: list[str], before: dict[str, str]) -> None:
    """
    Raises `ValueError` if another run has saved a checkpoint in a run's directory since `before`, the result of
    [`of_other_runs`] when it began. A file system without locks lets it.
    """
    for name, run in of_other_runs(output_dir, runs).items():
        if before.get(name) != run:
            raise ValueError(
                f"`output_dir`={output_dir!r}: another run, {run}, saved {name} there while this one, {runs[-1]}, "
                "trained. Stop one of them, and resume the other in a directory of its own."
            )


def begin(checkpoint: str | Path) -> None:
    """
    Must be called before any other file of a checkpoint is written. A run that resumed from an earlier checkpoint
    writes over a later one, whose trainer state, left in place, would mark a mixture of both as whole.
    """
    for name in (TRAINER_STATE_NAME, MANIFEST):
        Path(checkpoint, name).unlink(missing_ok=True)


def rotate(output_dir: str, step: int, limit: int | None, best: str | None, runs: list[str]) -> None:
    """
    Deletes the oldest checkpoints, by their steps, until `limit` are left. transformers goes by their times instead, so
    after a clock was set back it takes new checkpoints for old ones. Checkpoints after `step` are deleted first: they
    date from before the run resumed from an earlier one. Checkpoints of other runs are neither counted nor deleted.
    """
    if limit is None or limit <= 0:
        return
    own = [path for path in checkpoints_in(output_dir) if not runs_of(path) or runs_of(path)[-1] in runs]
    own.sort(key=lambda path: (number_of(path) <= step, number_of(path)))
    protected = {path for path in own if number_of(path) == step or (best and path.name == Path(best).name)}
    surplus = max(len(own) - max(limit, len(protected)), 0)
    deletable = [path for path in own if path not in protected]
    for path in deletable[:surplus]:
        begin(path)  # it no longer counts as whole, even if this process is killed before all of it is deleted
        shutil.rmtree(path, ignore_errors=True)
