"""Writes `options.json`, which `trl_quant.cli.options` reads: `python -m trl_quant.cli.write_options`."""

import json

from ..formats import FORMATS
from ..precisions import PRECISIONS, train_precisions
from ..report.evaluation import SAMPLED
from ..report.trained import BF16, FORWARD_TYPES, MODES
from ..storage.layout import storable
from ..tasks.benchmarks import BENCHMARKS
from ..trainers.launch import TRAINERS
from .options import STORED
from .train import own_options


def collect() -> str:
    """Returns the contents of the file."""
    allowed = {
        "rollout_precision": PRECISIONS,
        "train_precision": [BF16, *train_precisions()],
        "engine": MODES,
        "dtype": FORWARD_TYPES,
        "format": storable(),
        "base_format": FORMATS,
        "task": BENCHMARKS,
    }
    options = {
        "choices": {option: list(values) for option, values in allowed.items()},
        "sampling": SAMPLED,
        "train": {trainer: own_options(trainer) for trainer in TRAINERS},
    }
    return json.dumps(options, indent=1) + "\n"


if __name__ == "__main__":
    STORED.write_text(collect(), "utf-8")
