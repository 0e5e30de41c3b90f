"""A tiny model and a command's options for the tests of plans, which load no weights."""

import json

import pytest
from tiny import save_tiny

from trl_quant import QuantGRPOTrainer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def options(tmp_path) -> list[str]:
    problems = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in problems))
    settings = f"--dataset_name {path} --reward_funcs arithmetic --output_dir {tmp_path / 'run'} --use_cpu true"
    settings += " --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 8 --report_to none"
    return settings.split()


@pytest.fixture
def unloaded(monkeypatch):
    """No weights are read, and no trainer is built."""

    def refuse(*args, **kwargs):
        raise AssertionError("a plan loads nothing")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    monkeypatch.setattr(QuantGRPOTrainer, "__init__", refuse)
