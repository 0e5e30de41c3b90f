"""A pytest plugin (`-p substitution`): TRL's tests, unchanged, with classes of `trl_quant` in place of TRL's own.

It is loaded before any test module, so a test's `from trl import GRPOTrainer` gets the class named in the environment.
Written by `run.py`:
    UPSTREAM_TRAINER, UPSTREAM_CONFIG   names in `trl_quant`, or empty for TRL's own
    UPSTREAM_WORK                       folder that `stand_in_hub.py` has filled
    UPSTREAM_RECORD                     file that gets one JSON line per test: outcome, reason and what `train` logged
    UPSTREAM_TIMEOUT                    seconds allowed for one test
"""

import hashlib
import importlib.util
import json
import os
import signal
import types
from pathlib import Path

import datasets
import pytest
import torch
import transformers
import trl  # the installed one: the tests' checkout holds another, which must not be found first
import trl.import_utils as import_utils
from stand_in_hub import compact_id


UNREPEATABLE = ("time", "per_second", "runtime", "flos")  # parts of logged keys
logs: list[str] = []

for name, substitute in [("GRPOTrainer", "UPSTREAM_TRAINER"), ("GRPOConfig", "UPSTREAM_CONFIG")]:
    if os.environ[substitute]:
        import trl_quant

        setattr(trl, name, getattr(trl_quant, os.environ[substitute]))

original_load_dataset = datasets.load_dataset
original_train = transformers.Trainer.train


def load_dataset(path, name=None, **kwargs):
    folder = Path(os.environ["UPSTREAM_WORK"]) / "datasets" / path.split("/")[-1] / str(name)
    files = {split: str(folder / f"{split}.parquet") for split in ("train", "test")}
    return original_load_dataset("parquet", data_files=files, **kwargs)


def train(self, *args, **kwargs):
    try:
        return original_train(self, *args, **kwargs)
    finally:
        for entry in self.state.log_history:
            logs.append(json.dumps({k: v for k, v in entry.items() if not any(part in k for part in UNREPEATABLE)}))


def availability(name):
    """`trl.import_utils.is_<package>_available`, for a checkout older than TRL that asks for one that is gone."""
    package = name.removeprefix("is_").removesuffix("_available")
    if name != f"is_{package}_available":
        raise AttributeError(name)
    return lambda: importlib.util.find_spec(package) is not None


datasets.load_dataset = load_dataset
transformers.Trainer.train = train
import_utils.__getattr__ = availability


def pytest_configure(config):
    assert "site-packages" in trl.__file__, f"TRL comes from {trl.__file__}, not from the environment"


class Torch(types.ModuleType):
    """`torch`, but a tensor of token ids hard-coded for Qwen's vocabulary gets the ids of the stand-in."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def tensor(self, data, **kwargs):
        made = torch.tensor(data, **kwargs)
        return made.apply_(compact_id) if made.dtype == torch.int64 and (made > 100_000).any() else made


def pytest_runtest_setup(item):
    assert item.module.GRPOTrainer.__name__ == (os.environ["UPSTREAM_TRAINER"] or "GRPOTrainer")
    item.module.torch = Torch("torch")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    def give_up(signum, frame):
        raise TimeoutError(f"longer than {os.environ['UPSTREAM_TIMEOUT']} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(os.environ["UPSTREAM_TIMEOUT"]))
    yield
    signal.alarm(0)


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
    outcome = "error" if report.when != "call" and report.outcome == "failed" else report.outcome
    line = {"test": report.nodeid.split("::", 1)[1], "outcome": outcome, "reason": reason, "seconds": report.duration}
    line |= {"steps": len(logs), "logs": hashlib.sha256("\n".join(logs).encode()).hexdigest() if logs else None}
    logs.clear()
    with open(os.environ["UPSTREAM_RECORD"], "a") as file:
        file.write(json.dumps(line) + "\n")
