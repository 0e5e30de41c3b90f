"""Two ranks on this CPU, each with its part of the model (tensor parallel) or an engine of its own (data parallel)."""

import pytest
import torch
from tiny import save_tiny


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_ranks import launch


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "precision", "tuning"), [("tp", "int8", "lora"), ("dp", "int8", "full")])
def test_engines_end_as_fresh_ones(tmp_path, mode, precision, tuning):
    save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    launch(mode, precision, tuning, tmp_path)
