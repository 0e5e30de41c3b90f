"""What a run prints: TRL's own metrics and the four of ours that README explains.

The callbacks of transformers print every logged metric, 30 of ours among them. These print a selection. What is logged
(`trainer.state.log_history`, trackers) stays whole, and callbacks that a user passed are left alone.
"""

from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK


# Metrics of this package begin so, and are printed only if they begin as one of `PRINTED` does
OURS = ("ais/", "dynamic_sampling/", "mismatch/", "noise/", "profiling/", "sync_check/", "weights/")
PRINTED = ("mismatch/kl_k3", "mismatch/ess_ratio", "mismatch/dropped_fraction", "sync_check/")


def shown(logs: dict) -> dict:
    """The metrics of a step, or of an evaluation (`eval_...`), that are printed."""
    return {name: value for name, value in logs.items() if _is_shown(name.removeprefix("eval_"))}


def _is_shown(name: str) -> bool:
    return name.startswith(PRINTED) or not name.startswith(OURS)


class SelectivePrinter(PrinterCallback):
    """transformers' printer of logs (`disable_tqdm=True`), for what is [`shown`]."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=shown(logs), **kwargs)


class SelectiveProgress(ProgressCallback):
    """transformers' progress bar, with what is [`shown`]."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=shown(logs), **kwargs)


SELECTIVE = {PrinterCallback: SelectivePrinter, ProgressCallback: SelectiveProgress}


def print_selectively(trainer: Trainer) -> None:
    """Replaces the callback with which transformers prints; in a notebook that prints the loss alone, and stays."""
    default = PrinterCallback if trainer.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK
    if default not in SELECTIVE:
        return
    of_its_class = [callback for callback in trainer.callback_handler.callbacks if type(callback) is default]
    trainer.remove_callback(of_its_class[-1])  # transformers adds its own after those that a user passed
    trainer.add_callback(SELECTIVE[default])
