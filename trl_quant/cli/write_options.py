"""Writes `options.json`, which `trl_quant.cli.options` reads: `python -m trl_quant.cli.write_options`."""

import json
import sys
from pathlib import Path

import trl

from ..formats import FORMATS
from ..precisions import PRECISIONS, train_precisions
from ..report.evaluation import SAMPLED
from ..report.trained import BF16, FORWARD_TYPES, MODES
from ..storage.layout import storable
from ..tasks.benchmarks import BENCHMARKS
from ..trainers.launch import TRAINERS
from .options import STORED
from .train import own_options


def trl_classes(config_class: type) -> list[list[str]]:
    """Returns the file, inside TRL, and the name of each of TRL's classes that a config inherits from, bases first."""
    of_trl = [kind for kind in config_class.__mro__ if kind.__module__.startswith("trl.")]
    root = Path(trl.__file__).parent
    files = [Path(sys.modules[kind.__module__].__file__).relative_to(root).as_posix() for kind in of_trl]
    return [[file, kind.__name__] for file, kind in zip(reversed(files), reversed(of_trl), strict=True)]


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
        "trl_configs": {name: trl_classes(trainer.config_class) for name, trainer in TRAINERS.items()},
        "train": {trainer: own_options(trainer) for trainer in TRAINERS},
    }
    return json.dumps(options, indent=1) + "\n"


if __name__ == "__main__":
    STORED.write_text(collect(), "utf-8")
