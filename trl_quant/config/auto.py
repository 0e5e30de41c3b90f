"""Refuses `rollout_precision="auto"`, with which earlier versions measured the precisions when a run started."""

from contextlib import suppress

from ..storage.run_checkpoints import last_to_resume, read_rollout_state


def refuse_auto(args) -> None:
    """Raises `ValueError` for `rollout_precision="auto"`. The message says how to choose a precision, or to resume."""
    if args.rollout_precision != "auto":
        return
    told = (
        "`rollout_precision`='auto': a run no longer measures by itself. `trl-quant choose MODEL --config run.yaml "
        "--write run.yaml` measures the precisions on this machine with the run's settings, and writes the fastest "
        "into the file. "
    )
    checkpoint, recorded = _recorded(args)
    if recorded is None:
        told += (
            "To resume a run that began with 'auto', name the precision that its checkpoints record: "
            "`rollout_precision`, among the `settings` in their rollout_state.json."
        )
    else:
        told += f"To resume {checkpoint}, set `rollout_precision`={recorded!r}, in which it was trained."
    raise ValueError(told)


def _recorded(args) -> tuple[str | None, str | None]:
    """Returns the checkpoint that a run is to resume from, and the precision that was chosen for it, where found."""
    resume = str(args.resume_from_checkpoint).lower()
    if resume in ("none", "false"):
        return None, None
    checkpoint = last_to_resume(args.output_dir) if resume == "true" else args.resume_from_checkpoint
    with suppress(OSError, ValueError):  # whoever resumes from a damaged checkpoint is told what is wrong with it
        return checkpoint, read_rollout_state(checkpoint or "").get("settings", {}).get("rollout_precision")
    return checkpoint, None
