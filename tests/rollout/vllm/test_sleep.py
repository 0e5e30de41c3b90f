"""vLLM's sleep between generations, which needs a GPU (gpu/test_vllm_gpu.py): a set stands in for what sleeps."""

import pytest
import torch
from long_tests import rest_is_long
from tiny import save_tiny
from training import config, make


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import SMALL

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("level", rest_is_long([1, 2], 2))
def test_a_check_between_generations_ends_asleep(tmp_path, monkeypatch, level):
    """Else the engine would hold its memory during the optimizer's steps."""
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    settings = {"use_vllm": True, "vllm_mode": "colocate", "rollout_precision": "bf16", "vllm_engine_kwargs": SMALL}
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out", **settings), model=str(model))
    engine, memory = trainer.vllm_generation.engine, {"weights", "kv_cache"}
    asleep: set[str] = set()
    monkeypatch.setattr(engine, "sleep_level", level)
    monkeypatch.setattr(engine.llm, "sleep", lambda level: asleep.update(memory))
    monkeypatch.setattr(engine.llm, "wake_up", lambda tags: asleep.difference_update(tags))
    engine.rest()
    assert asleep == memory
    trainer.check_sync()
    assert asleep == memory
    with trainer.generation():
        assert not asleep
        trainer.check_sync()  # as a `rollout_func` may
        assert not asleep
    assert asleep == memory
