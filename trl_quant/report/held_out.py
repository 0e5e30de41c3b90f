"""
Tells apart the evaluations of several datasets.

TRL evaluates one dataset after the other, and logs an entry for each. It writes the dataset's name into the metrics of
the loss and of the time, such as `eval_a_loss` and `eval_a_runtime`, but logs `eval_reward` and all its other metrics
under the same names. A [`~report.runs.Run`] therefore files a metric under the name that [`of_dataset`] gives to it.
"""

HELD_OUT = "eval_"  # prefix of an evaluation's metrics


def dataset_of(entry: dict) -> str:
    """Returns the name of the dataset on which a log entry evaluates; `""` if the entry does not name one."""
    for name in ("_runtime", "_loss"):
        found = [key for key in entry if key.startswith(HELD_OUT) and key.endswith(name)]
        if found:  # an evaluation's own metrics come before those that a reward function logs
            return "" if f"eval{name}" in found else found[0].removeprefix(HELD_OUT).removesuffix(name)
    return ""


def of_dataset(metric: str, dataset: str) -> str:
    """Returns the name of one dataset's metric: `eval_reward` becomes `eval_a_reward`, and `reward` stays the same."""
    own = f"{HELD_OUT}{dataset}_"
    if not dataset or not metric.startswith(HELD_OUT) or metric.startswith(own):
        return metric
    return own + metric.removeprefix(HELD_OUT)
