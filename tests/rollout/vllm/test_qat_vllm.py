"""vLLM samples with the 4-bit codes that are trained: its real Marlin layers but for stand-ins of two kernels."""

import pytest
import torch
from long_tests import rest_is_long


pytest.importorskip("vllm", reason="vLLM is not installed")
from marlin_on_cpu import marlin_on_cpu
from tiny import save_tiny
from training import config, make, metrics
from vllm_engines import SMALL, assert_live_equals_fresh, engine, keep, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import quantize
from trl_quant.policy.unified import unify
from trl_quant.storage.layout import checkpoint_stream, checkpoint_tensors


pytestmark = pytest.mark.vllm
every_precision = pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    marlin_on_cpu(monkeypatch)


def trained(path, precision: str, family: str = "qwen2", dtype: torch.dtype = torch.bfloat16):
    model = policy(path, family=family, tied=family.startswith("gemma"), dtype=dtype)
    unify(model, precision)
    return model


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("precision", rest_is_long(["nvfp4", "mxfp4"]))
@pytest.mark.parametrize("family", rest_is_long(["qwen2", "gemma3", "phi3"]))
def test_live_equals_fresh(tmp_path, precision, family):
    """After each update the engine computes what one does that starts on a prepared checkpoint of the weights."""
    model = trained(tmp_path / "policy", precision, family)
    sampler = engine(model, precision, sync_check_steps=1)
    assert sampler.weights.unified(precision) and not sampler.own_base_bytes()
    assert_live_equals_fresh(sampler, model, precision, tmp_path)
    sampler.check_sync()


@every_precision
def test_the_trainers_codes_are_sent(tmp_path, precision):
    """They are not quantized again, and are those of a checkpoint, whose fused layers share a scale in NVFP4."""
    model = trained(tmp_path / "policy", precision, dtype=torch.float32)
    sampler = engine(model, precision)
    update(model, seed=0)
    sampler.sync()
    sent = dict(sampler.stream())
    expected = dict(checkpoint_stream([(n, p.detach()) for n, p in model.named_parameters()], precision))
    for name, layer in sampler.weights.unified(precision).items():
        own = checkpoint_tensors(f"{name}.weight", layer.codes())
        assert sent[f"{name}.weight_packed"] is own[f"{name}.weight_packed"] is layer.codes().values
        for part, tensor in own.items():
            assert all(torch.equal(bits(other[part]), bits(tensor)) for other in (sent, expected))
    attention = model.model.layers[0].self_attn
    alone = quantize(attention.k_proj.weight, precision)
    assert torch.equal(bits(alone.scale), bits(attention.k_proj.codes().scale)) == (precision == "mxfp4")


@pytest.mark.long
def test_a_run(tmp_path):
    """Policy and engine stay as near as BF16's two, while a policy that is quantized for the engine alone does not."""
    source, settings = save_tiny(tmp_path / "model", "qwen2", dtype=torch.bfloat16), {"max_steps": 3}
    settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_engine_kwargs": SMALL, "sync_check_steps": 1}
    settings |= {"vllm_max_model_length": 128, "vllm_gpu_memory_utilization": 0.2, "max_completion_length": 32}
    found = {}
    for name, own in (("ours", {"train_precision": "nvfp4"}), ("plain", {"rollout_precision": "nvfp4"})):
        args = config(QuantGRPOConfig, tmp_path / name, **settings, **own)
        trainer = make(QuantGRPOTrainer, args, model=source)
        keep(trainer.vllm_generation)
        assert args.lora_sync == "merge"
        trainer.train()
        found[name] = [entry["mismatch/kl_k3"] for entry in metrics(trainer) if "loss" in entry]
        assert all("sync_check/bound" in entry for entry in metrics(trainer) if "loss" in entry)
    assert max(found["ours"]) < 0.02 * min(found["plain"])
