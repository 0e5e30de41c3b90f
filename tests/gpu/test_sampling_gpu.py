"""Lean sampling on a GPU, where vLLM schedules a step before it knows the last one's tokens: samples are its own."""

import pytest
from test_vllm_sampling import PROMPTS, cached, sampled
from vllm_engines import GPU_MODEL, engine, policy


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.mark.parametrize("option", [{}, {"stop_token_ids": list(range(0, 250, 17))}, {"top_p": 0.8}])
def test_the_samples_are_vllms(tmp_path, option):
    sampler = engine(policy(tmp_path, **GPU_MODEL).cuda(), "fp8", max_completion_length=140, max_num_seqs=16)
    core = sampler.llm.llm_engine.engine_core.engine_core
    assert core.batch_queue is not None
    sampler.sync_weights()
    lean, _ = sampled(sampler, **option)
    blocks = cached(sampler)
    plain, _ = sampled(sampler, plain=True, **option)
    assert lean == plain and len(lean[1]) == len(PROMPTS)
    assert blocks == cached(sampler) > 0
    assert sampled(sampler, seed=6)[0] != lean
