"""
A hybrid behind a real vLLM server on this CPU, in BF16: after each sync it equals a fresh engine, and the self-check
finds parts of a state that are not the policy's.
"""

import pytest
from long_tests import rest_is_long


pytest.importorskip("vllm", reason="vLLM is not installed")
from accelerate import Accelerator
from servers import serving
from tampering import assert_stale_is_found
from tiny import tiny_tokenizer
from vllm_engines import fresh, one_by_one, policy, require_kernels, served, update

from trl_quant.rollout import VLLMServerEngine


pytestmark = [pytest.mark.vllm, pytest.mark.slow]
STALE = {"falcon_h1": ("mamba.conv1d.weight", "mamba.A_log")}
STALE |= {"qwen3_5_text": ("linear_attn.conv1d.weight", "linear_attn.A_log")}


@pytest.mark.parametrize("family", rest_is_long(STALE))
def test_syncs_leave_the_bits_of_a_fresh_engine(family, tmp_path, monkeypatch):
    """Convolutions move from sync to sync, which a CPU with products of BF16 packs."""
    model = policy(tmp_path / "model", family=family, tied=False)
    require_kernels(model)
    settings = {"mode": "server", "max_completion_length": 8, "sync_check_steps": 0, "request_timeout": 60.0}
    seen = []
    with serving(tmp_path / "model", "--no-enable-prefix-caching") as (url, _):
        sampler = VLLMServerEngine(
            model, Accelerator(cpu=True), tiny_tokenizer(), precision="bf16", server_base_url=url, **settings
        )
        for seed in range(2):
            update(model, seed=seed)
            sampler.sync()
            seen.append(served(sampler.vllm_client))
            started = fresh(model, "bf16", tmp_path / f"checkpoint-{seed}", enable_prefix_caching=False)
            assert seen[-1] == one_by_one(started)
        assert seen[0] != seen[1]
        metrics = sampler.check_sync()
        assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"] / 2
        assert sampler.differing_weight() is None
        for part in STALE[family]:
            assert_stale_is_found(sampler, f"layers.0.{part}")
