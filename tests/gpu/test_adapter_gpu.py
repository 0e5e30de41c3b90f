"""An adapter in vLLM's layers on a GPU: under captured CUDA graphs, under vLLM's compiler, asleep.

    python3 -m pytest -m gpu -s tests/gpu/test_adapter_gpu.py

`-s` shows how far an adapter is from the policy, and how long a push takes.
"""

import time

import pytest
import torch
from peft import LoraConfig, get_peft_model


pytest.importorskip("vllm", reason="vLLM is not installed")
from drawing import generated
from vllm_engines import GPU_MODEL, SLEEPING, SMALL, engine, fresh, greedy, policy, score, update

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
        sampler.sync()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        print(f"{precision:>10} push {1e3 * seconds:.1f} ms, {sampler.check_sync()}")
        seen.append(greedy(sampler.llm))
        first = first or {n: p.clone() for n, p in model.named_parameters() if "lora_" in n}
        started = engine(model, precision, lora_sync="adapter")
        started.sync()
        assert seen[-1] == greedy(started.llm)
    model.load_state_dict(first, strict=False)
    sampler.sync()
    assert greedy(sampler.llm) == seen[0] != seen[1]
    without_b(model)
    sampler.sync()
    assert greedy(sampler.llm) == greedy(fresh(model.get_base_model(), precision, tmp_path / "base")) != seen[0]


CAPTURE = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
# The compiled graph, with the kernels of the eager one in it
SAME_KERNELS = {"custom_ops": ["all"], "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}}


def compiled(**config) -> dict:
    return {**SMALL, "compilation_config": CAPTURE | config}


def distances(model, samplers, before):
    """For each of two updates: the scores of the synced engines, and how far the first one's moved."""
    for seed in range(2):
        update(model, seed=seed, size=0.05)
        for each in samplers:
            each.sync()
        scores = [score(each.llm) for each in samplers]
        yield scores, apart(scores[0], before)
        before = scores[0]


def apart(a, b) -> float:
    return (a - b).abs().mean().item()


def test_under_vllms_compiler(tmp_path, precision):
    """As without the compiler, after an engine alike but for the adapter has left its compiled model behind."""
    model = adapted(tmp_path / "policy")
    base = score(engine(model.get_base_model(), precision, engine_kwargs=compiled(**SAME_KERNELS)).llm)
    sampler = engine(model, precision, lora_sync="adapter", engine_kwargs=compiled(**SAME_KERNELS), sync_check_steps=1)
    eager = engine(model, precision, lora_sync="adapter")
    assert sampler.llm.llm_engine.vllm_config.compilation_config.mode > 0
    for (ours, theirs), moved in distances(model, (sampler, eager), base):
        print(f"{precision:>10} compiled: error {apart(ours, theirs):.5f}, moved {moved:.5f}, {sampler.check_sync()}")
        assert moved > 10 * apart(ours, theirs)


def test_under_vllms_compiler_and_its_kernels(tmp_path, precision):
    """
    The compiler's own kernels round differently, which moves codes: with an adapter beside the base no more than with a
    merged one. That is less than an update moves, so the test sees an adapter that did not arrive.
    """
    model = adapted(tmp_path / "policy")
    base = score(engine(model.get_base_model(), precision, engine_kwargs=compiled()).llm)
    kinds = [(sync, kwargs) for sync in ("adapter", "merge") for kwargs in (compiled(), SMALL)]
    samplers = [engine(model, precision, lora_sync=sync, engine_kwargs=kwargs) for sync, kwargs in kinds]
    for (ours, eager, merged, merged_eager), moved in distances(model, samplers, base):
        error, rounding = apart(ours, eager), apart(merged, merged_eager)
        print(f"{precision:>10} compiler's kernels: error {error:.5f}, merged {rounding:.5f}, moved {moved:.5f}")
        assert error < 1.5 * rounding < moved


def test_asleep(tmp_path, precision):
    """At level 1 base and adapter come back as they were, and a push reaches an engine that slept."""
    model = adapted(tmp_path / "policy")
    sleep = {"enable_sleep_mode": True, "sleep_level": 1, "engine_kwargs": SLEEPING}
    sampler = engine(model, precision, lora_sync="adapter", **sleep)
    seen = []
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync()
        for _ in range(2):
            sampler.ensure_ready()
            seen.append(greedy(sampler.llm))
            generated(sampler, [[1, 2, 3]])  # after which it sleeps
    assert seen[0] == seen[1] != seen[2] == seen[3]
