"""Samples of a vLLM engine, with and without what trl_quant leaves out of a decode step; and generations that fail."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from drawing import generated, set_options


# Of 200, 126 and 3 tokens, each four times: past, up to and before the end of a cache block of 128
PROMPTS = [[(7 * i + 3) % 250 for i in range(n)] for n in (200, 126, 3) for _ in range(4)]


def plainly() -> nullcontext:
    """In place of an engine's `sampling`: vLLM samples as it does by itself."""
    return nullcontext({})


def sampled(sampler, prompts=PROMPTS, plain=False, torch_seed=5, **generation_kwargs):
    """What TRL gets for `prompts`, and vLLM's completions; `plain` as vLLM does by itself."""
    seen, generate = [], sampler.llm.generate

    def spy(inputs, sampling_params, **kwargs):
        outputs = generate(inputs, sampling_params=sampling_params, **kwargs)
        seen.append((sampling_params, outputs))
        return outputs

    torch.manual_seed(torch_seed)
    set_options(sampler, **generation_kwargs)
    sampler.llm.generate = spy
    own, sampler.sampling = sampler.sampling, plainly if plain else sampler.sampling
    try:
        sampler.llm.reset_prefix_cache()
        found = generated(sampler, prompts, copies=4)
    finally:
        sampler.llm.generate, sampler.sampling = generate, own
    return found, seen


def drawn(sampler, requests, enough=None, **options):
    """The samples of a call that may end early."""
    torch.manual_seed(5)
    set_options(sampler, **options)
    sampler.llm.reset_prefix_cache()
    return sampler.draw(requests, enough=enough)


def reasons(seen) -> list[tuple]:
    """Why completions ended."""
    outputs = [output for _, outputs in seen for output in outputs]
    return [(output.prompt_token_ids, c.finish_reason, c.stop_reason) for output in outputs for c in output.outputs]


def is_lean(seen) -> bool:
    """Whether all log-probabilities are numbers. vLLM's own are not."""
    completions = [completion for _, outputs in seen for output in outputs for completion in output.outputs]
    return all(isinstance(logp, float) for completion in completions for logp in completion.logprobs)


def cached(sampler) -> int:
    pool = sampler.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return len(pool.cached_block_hash_to_block)


PLACES = {  # name -> method of the engine, how many of its calls succeed, and whether the next fails before it acts
    "before a step": ("llm.llm_engine.step", 2, True),
    "after a step": ("llm.llm_engine.step", 2, False),
    "before the model": ("core.model_executor.execute_model", 0, True),  # blocks of the prompts count as cached
    "before the sampling": ("core.model_executor.sample_tokens", 3, True),
    "after the sampling": ("core.model_executor.sample_tokens", 3, False),
    "between the prompts": ("core.scheduler.add_request", 5, True),
    "as tokens arrive": ("llm.llm_engine.output_processor.process_outputs", 3, False),
}


@contextmanager
def broken_off(sampler, monkeypatch, place: str, error: type[BaseException]):
    """The engine raises `error` at that place, and is left without a request that waits."""
    path, calls, before = PLACES[place]
    *parts, name = path.split(".")
    owner = sampler.llm.llm_engine.engine_core.engine_core if parts[0] == "core" else sampler.llm
    for part in parts[1:]:
        owner = getattr(owner, part)
    original, seen = getattr(owner, name), []

    def breaking(*args, **kwargs):
        seen.append(1)
        if len(seen) == calls + 1 and before:
            raise error
        result = original(*args, **kwargs)
        if len(seen) == calls + 1:
            raise error
        return result

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(owner, name, breaking)
        yield
    assert not sampler.llm.llm_engine.has_unfinished_requests()
