"""Two ranks on this CPU: tensor and data parallel engines, and policies that FSDP2 and ZeRO hold in parts."""

import pytest
import torch
from tiny import save_tiny


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_ranks import launch


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "precision", "tuning"),
    [
        ("tp", "int8", "lora"),
        ("dp", "int8", "full"),
        ("fsdp2", "bf16", "full"),
        ("fsdp2", "int8", "lora"),
        ("zero2", "int8", "full"),
        ("zero3", "int8", "full"),
        ("zero3", "bf16", "lora"),
    ],
)
def test_engines_end_as_fresh_ones(tmp_path, mode, precision, tuning):
    if mode.startswith("zero"):
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    save_tiny(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    launch(mode, precision, tuning, tmp_path)
