"""
vLLM on two GPUs, through the trainer: tensor parallel, data parallel, and asleep between generations of unequal numbers
of turns. Each case trains in two processes, about a minute each.

    python3 -m pytest -m gpu -s tests/gpu/test_two_gpus.py
"""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2]))

pytest.importorskip("vllm", reason="vLLM is not installed")
from ranks import on_two_ranks, results
from tiny import save_tiny
from turn_ranks import assert_finished
from vllm_engines import GPU_MIXTURE, GPU_MODEL, policy
from vllm_ranks import launch, launch_exact


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    ("mode", "precision", "tuning"),
    [
        *((mode, precision, "full") for mode in ("tp", "dp") for precision in ("bf16", "fp8", "int8", "nvfp4")),
        ("tp", "fp8", "lora"),
        ("fsdp2", "fp8_block", "full"),
        ("fsdp2", "nvfp4", "lora"),
        ("zero3", "fp8", "full"),
        ("zero3", "nvfp4", "lora"),
    ],
)
def test_two_ranks(tmp_path, mode, precision, tuning):
    if mode.startswith("zero"):
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    save_tiny(tmp_path / "model", dtype=torch.bfloat16, **GPU_MODEL)
    launch(mode, precision, tuning, tmp_path)


@pytest.mark.parametrize(
    ("mode", "precision"), [("spread", "fp8"), ("gathered", "fp8"), ("gathered", "int8"), ("partitioned", "fp8")]
)
def test_a_mixture_on_two_ranks(tmp_path, mode, precision):
    """Tensor parallel, under FSDP2 and under ZeRO-3: both ranks send the experts of a check and a sync in one order."""
    if mode == "partitioned":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    policy(tmp_path / "mixture", family="qwen3_moe", tied=False, **GPU_MIXTURE)
    launch(mode, precision, "full", tmp_path)


@pytest.mark.parametrize(("precision", "tuning"), [("int8", "lora"), ("fp8_block", "full")])
def test_the_same_bits_on_two_ranks(tmp_path, precision, tuning):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}  # of 128
    save_tiny(tmp_path / "model", family="qwen2", dtype=torch.bfloat16, **GPU_MODEL | heads)
    launch_exact(precision, tuning, tmp_path)


@pytest.mark.parametrize(("precision", "level"), [("fp8", 1), ("int8", 2)])
def test_two_ranks_with_unequal_turns_asleep(tmp_path, precision, level):
    """
    One rank takes one turn a generation, the other three. Each wakes, syncs and checks once a generation, and their
    engines end as vLLM starts them on the trained weights. Tokens of tools weigh 1.
    """
    save_tiny(tmp_path / "model", dtype=torch.bfloat16, **GPU_MODEL)
    case = f"turns-{precision}-{level}"
    assert_finished(*results(tmp_path, case, on_two_ranks("ddp", tmp_path, case)), asleep=True)
