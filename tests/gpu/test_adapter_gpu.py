"""An adapter in vLLM's layers on a GPU: under captured CUDA graphs, under vLLM's compiler, asleep.

    python3 -m pytest -m gpu -s tests/gpu/test_adapter_gpu.py

`-s` shows how far an adapter is from the policy, and how long a push takes.
"""

import time

import pytest
import torch
from peft import LoraConfig, get_peft_model


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import GPU_MODEL, SMALL, engine, fresh, greedy, policy, score, update

from trl_quant.precisions import in_vllm
from trl_quant.rollout.vllm.support import supported_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
LORA = {"r": 16, "lora_alpha": 64, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(params=in_vllm())
def precision(request):
    if missing := supported_precisions()[request.param]:
        pytest.skip(missing)
    return request.param


def adapted(path, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = policy(path, tied=False, family="qwen2", **GPU_MODEL)
        return get_peft_model(model, LoraConfig(**LORA | settings)).cuda()


def without_b(model) -> None:
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.zero_()


def test_pushes_under_cuda_graphs(tmp_path, precision):
    """Bit for bit as fresh engines; back to the first adapter; and without one as an engine that knows of none."""
    model = adapted(tmp_path / "policy", rank_pattern={"k_proj": 8, "down_proj": 32})
    sampler = engine(model, precision, lora_sync="adapter", sync_check_steps=1)
    assert not sampler.llm.llm_engine.vllm_config.model_config.enforce_eager
    seen, first = [], None
    for seed in range(2):
        update(model, seed=seed)
        start = time.perf_counter()
        sampler.sync_weights()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        print(f"{precision:>10} push {1e3 * seconds:.1f} ms, {sampler.check_sync()}")
        seen.append(greedy(sampler.llm))
        first = first or {n: p.clone() for n, p in model.named_parameters() if "lora_" in n}
        started = engine(model, precision, lora_sync="adapter")
        started.sync_weights()
        assert seen[-1] == greedy(started.llm)
    model.load_state_dict(first, strict=False)
    sampler.sync_weights()
    assert greedy(sampler.llm) == seen[0] != seen[1]
    without_b(model)
    sampler.sync_weights()
    assert greedy(sampler.llm) == greedy(fresh(model.get_base_model(), precision, tmp_path / "base")) != seen[0]


def test_under_vllms_compiler(tmp_path, precision):
    """As without the compiler, after an engine alike but for the adapter has left its compiled model behind.

    The compiler rounds otherwise, which moves codes: by how much, the same policy says that is merged into its base.
    """
    compiled = {**SMALL, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
    model = adapted(tmp_path / "policy")
    base = score(engine(model.get_base_model(), precision, engine_kwargs=compiled).llm)
    sampler = engine(model, precision, lora_sync="adapter", engine_kwargs=compiled, sync_check_steps=1)
    eager = engine(model, precision, lora_sync="adapter")
    merged = [engine(model, precision, lora_sync="merge", engine_kwargs=kwargs) for kwargs in (compiled, SMALL)]
    assert sampler.llm.llm_engine.vllm_config.compilation_config.mode > 0
    before = base
    for seed in range(2):
        update(model, seed=seed, size=0.05)
        for each in (sampler, eager, *merged):
            each.sync_weights()
        print(f"{precision:>10} {sampler.check_sync()}")
        ours, theirs, *others = (score(each.llm) for each in (sampler, eager, *merged))
        error, moved = (ours - theirs).abs().mean().item(), (ours - before).abs().mean().item()
        rounding = (others[0] - others[1]).abs().mean().item()
        print(f"{precision:>10} compiled: error {error:.5f}, merged {rounding:.5f}, the one before {moved:.5f}")
        assert error < 1.5 * rounding
        assert moved > 10 * error
        before = ours


@pytest.mark.own_process
def test_asleep(tmp_path, precision):
    """At level 1 base and adapter come back as they were, and a push reaches an engine that slept."""
    model = adapted(tmp_path / "policy")
    sampler = engine(model, precision, lora_sync="adapter", enable_sleep_mode=True, sleep_level=1)
    seen = []
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync_weights()
        for _ in range(2):
            sampler.ensure_ready()
            seen.append(greedy(sampler.llm))
            sampler.generate([[1, 2, 3]], None, 1)  # after which it sleeps
    assert seen[0] == seen[1] != seen[2] == seen[3]
