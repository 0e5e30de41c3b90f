"""A KV cache in FP8 on a GPU: what it holds, and the self-check after each sync, through the trainer.

    python3 -m pytest -m gpu -s tests/gpu/test_kv_cache_gpu.py

About half a minute per precision. `-s` shows what each self-check found.
"""

import pytest
import torch
from tiny import save_tiny
from training import config, dataset, make


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm import _custom_ops as ops
from vllm_engines import GPU_MODEL, GPU_RUN, SMALL, keep, set_scale, unrounded

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout.verify.kv_cache import CACHE_FORMATS, KVCache
from trl_quant.rollout.vllm.support import supported_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.mark.parametrize("scale", [1.0, 0.25, 4.0])
def test_it_holds_what_vllm_stores(scale):
    """Keys, values and queries, bit for bit on all numbers of BF16: vLLM's kernels for GPUs round to nearest."""
    numbers = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    numbers = torch.where(numbers.isfinite(), numbers, 0).reshape(1024, 2, 32).cuda()  # tokens, heads, head_dim
    keys, values = torch.zeros(2, 64, 16, 2, 32, dtype=torch.uint8, device="cuda")  # blocks, tokens, heads, head_dim
    tensor = torch.tensor(scale, device="cuda")
    ops.reshape_and_cache_flash(
        numbers, numbers, keys, values, torch.arange(1024, device="cuda"), "fp8", tensor, tensor
    )
    queries, _ = ops.scaled_fp8_quant(numbers.flatten(1), tensor)
    ours = KVCache("fp8", {"_v_scale": scale}, in_fp8=True, truncates=False).stored(numbers.float(), "_v_scale")
    for codes in (keys, values, queries):
        assert torch.equal(codes.view(CACHE_FORMATS["fp8"]).float().reshape(numbers.shape) * scale, ours)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_every_sync_is_checked(tmp_path, precision):
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    args = config(
        QuantGRPOConfig,
        tmp_path / "out",
        **GPU_RUN,
        rollout_precision=precision,
        vllm_engine_kwargs=SMALL | {"kv_cache_dtype": "fp8"},
        max_steps=20,
        learning_rate=1e-4,
        sync_check_steps=1,
    )
    path = save_tiny(tmp_path / "model", dtype=torch.bfloat16, family="qwen2", **GPU_MODEL)
    trainer = make(QuantGRPOTrainer, args, model=path, train_dataset=dataset(32))
    trainer.train()
    keep(trainer)
    checks = [log for log in trainer.state.log_history if "sync_check/bound" in log]
    for log in checks:
        difference, bound = log["sync_check/logp_difference"], log["sync_check/bound"]
        print(f"{precision:>5} step {log['step']}: difference {difference:.5f}, bound {bound:.5f}")
    assert len(checks) == 20

    sampler, found = trainer.vllm_generation.engine, trainer.check_sync()
    cache, without = sampler.caches[1], unrounded(sampler)
    backend = sampler.llm.apply_model(lambda model: str(model.model.layers[1].self_attn.attn))
    print(f"{precision:>5} {cache}, {backend}")
    print(f"{precision:>5} {found}; without rounding in the reference {without:.5f}")
    if precision == "bf16":  # else the codes of the inputs, which the smallest difference flips, drown it
        assert without > 1.1 * found["sync_check/logp_difference"]
    for name in ("_k_scale", "_v_scale", "_v_scale_float"):
        set_scale(sampler, name, 4.0)
        with pytest.raises(RuntimeError, match=f"stale: in layer 1 the KV cache's `{name}` is 4, a fresh engine's 1"):
            trainer.check_sync()
        set_scale(sampler, name, 1.0)
        trainer.check_sync()  # after a check that failed it sends all weights, which sets the scales too
