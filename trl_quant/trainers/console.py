"""Selects the metrics that a run prints: TRL's own and the four of ours that README explains.

transformers' callbacks print every logged metric, 30 of them ours. The callbacks here print a selection. The log itself
(`trainer.state.log_history`, trackers) stays complete, and callbacks that a user passed are not changed.
"""

from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK


# Prefixes of this package's metrics. Of these, only metrics with a prefix in `PRINTED` are printed
OURS = ("ais/", "dynamic_sampling/", "mismatch/", "noise/", "profiling/", "rollouts/", "routing/", "step_scaling/")
OURS += ("sync_check/", "truncation/", "weights/")
PRINTED = ("mismatch/kl_k3", "mismatch/ess_ratio", "mismatch/dropped_fraction", "sync_check/")


def shown(logs: dict) -> dict:
    """Returns the metrics that are printed, among those of a step or of an evaluation (`eval_...`)."""
    return {name: value for name, value in logs.items() if _is_shown(name.removeprefix("eval_"))}


def _is_shown(name: str) -> bool:
    return name.startswith(PRINTED) or not name.startswith(OURS)


class SelectivePrinter(PrinterCallback):
    """transformers' printer of logs (`disable_tqdm=True`), for the metrics that [`shown`] selects."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=shown(logs), **kwargs)


class SelectiveProgress(ProgressCallback):
    """transformers' progress bar, with the metrics that [`shown`] selects."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=shown(logs), **kwargs)


SELECTIVE = {PrinterCallback: SelectivePrinter, ProgressCallback: SelectiveProgress}


def print_selectively(trainer: Trainer) -> None:
    """Replaces transformers' printing callback, except the one for notebooks, which prints only the loss."""
    default = PrinterCallback if trainer.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK
    if default not in SELECTIVE:
        return
    of_its_class = [callback for callback in trainer.callback_handler.callbacks if type(callback) is default]
    trainer.remove_callback(of_its_class[-1])  # transformers adds its own after those that a user passed
    trainer.add_callback(SELECTIVE[default])
