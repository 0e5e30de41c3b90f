"""
Lean sampling on a GPU, where vLLM schedules a step before it knows the last one's tokens: samples are its own.

Whether that further step still holds a completion that just ended is a matter of time there. It decides on the batch,
and so on the random numbers: vLLM's own samples are the same twice only where no completion ends before the others.
"""

import pytest
import torch
from test_vllm_sampling import PROMPTS, cached, reasons, sampled
from vllm_engines import GPU_MODEL, engine, policy


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
STOPS = list(range(0, 250, 17))


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    model = policy(tmp_path_factory.mktemp("policy"), **GPU_MODEL).cuda()
    built = engine(model, "fp8", max_completion_length=140, max_num_seqs=len(PROMPTS))
    assert built.llm.llm_engine.engine_core.engine_core.batch_queue is not None
    built.sync_weights()
    return built


@pytest.mark.parametrize("option", [{}, {"top_p": 0.8}])
def test_the_samples_are_vllms(sampler, option):
    option = option | {"ignore_eos": True}
    sampled(sampler, plain=True, **option)  # may leave a step to be drawn in the next generation, as all others do
    plain, plain_ends = sampled(sampler, plain=True, **option)
    assert plain == sampled(sampler, plain=True, **option)[0], "vLLM's own samples are not the same twice"
    blocks = cached(sampler)
    lean, ends = sampled(sampler, **option)
    for name, ours, theirs in zip(("prompts", "tokens", "log-probabilities", "their ids"), lean, plain, strict=True):
        assert ours == theirs, f"{name} differ"
    assert len(lean[1]) == len(PROMPTS)
    assert blocks == cached(sampler) > 0
    assert reasons(ends) == reasons(plain_ends)
    assert sampled(sampler, seed=6, **option)[0] != lean


def test_completions_that_end_early(sampler):
    """They end at their first stop token; each log-probability is that of its token, as vLLM scores it afterwards."""
    (prompts, completions, logps, _), ends = sampled(sampler, stop_token_ids=STOPS, ignore_eos=True)
    assert prompts == PROMPTS and len({len(ids) for ids in completions}) > 3
    for ids, (_, reason, token) in zip(completions, reasons(ends), strict=True):
        first = next((i for i, t in enumerate(ids) if t in STOPS), None)
        assert (len(ids) == 140 and first is None) or (first == len(ids) - 1 and reason == "stop"), (reason, token)
    whole = [prompt + ids for prompt, ids in zip(prompts, completions, strict=True)]
    scored = sampler.logps(whole, 1)[1]
    right, shifted = [], []
    for prompt, ids, sampled_logps, found in zip(prompts, completions, logps, scored, strict=True):
        own = torch.tensor(sampled_logps).flatten()
        right.append((found[len(prompt) - 1 :][: len(ids)] - own).abs())
        shifted.append((found[len(prompt) :][: len(ids)] - own).abs())
    right, shifted = torch.cat(right).mean(), torch.cat(shifted).mean()
    print(f"\nfrom vLLM's own scores {right:.4f} nats, from those of the next tokens {shifted:.4f}")
    assert right < 0.1 * shifted
