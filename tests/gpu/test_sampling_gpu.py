"""
Lean sampling on a GPU, where vLLM schedules a step before it knows the last one's tokens: samples are its own.

A random state that all completions share does not fix vLLM's own samples there: with one seed of torch, two generations
differed on an H200 although all completions ended together. So samples are compared where vLLM repeats itself, greedy
ones and those of a seed of each request.
"""

from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest
import torch
from drawing import generated, set_options
from ended_early import at_least, prefixes
from packaging.version import Version
from speculating import DRAFTING, drafted_by
from tiny import save_tiny
from vllm_engines import GPU_MODEL, engine, policy, update
from vllm_sampling import PLACES, PROMPTS, broken_off, cached, drawn, is_lean, reasons, sampled

from trl_quant.rollout.engine import Request, requests_for
from trl_quant.rollout.verify.self_check import self_check
from trl_quant.rollout.vllm import sampling


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
# All different: with one seed, equal prompts have equal completions
APART = [[token + i for token in prompt] for i, prompt in enumerate(PROMPTS)]
STOPS = list(range(0, 250, 17))


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    model = policy(tmp_path_factory.mktemp("policy"), **GPU_MODEL).cuda()
    built = engine(model, "fp8", max_completion_length=140, max_num_seqs=len(PROMPTS))
    assert built.llm.llm_engine.engine_core.engine_core.batch_queue is not None
    built.sync()
    return built


REPEATABLE = {
    "greedy": {"temperature": 0},
    "seeds": {"seed": 3},
    "seeds, truncated": {"seed": 3, "top_p": 0.8},
}


@pytest.mark.parametrize("option", REPEATABLE)
def test_the_samples_are_vllms(sampler, option):
    option = REPEATABLE[option] | {"ignore_eos": True}
    plain, plain_ends = sampled(sampler, APART, plain=True, **option)
    blocks = cached(sampler)
    again = sampled(sampler, APART, plain=True, torch_seed=6, **option)[0]
    assert plain == again, "vLLM's own samples are not the same twice"
    lean, ends = sampled(sampler, APART, **option)
    assert is_lean(ends) and not is_lean(plain_ends)
    for name, ours, theirs in zip(("prompts", "tokens", "log-probabilities", "their ids"), lean, plain, strict=True):
        assert ours == theirs, f"{name} differ"
    assert len({tuple(ids) for ids in lean[1]}) == len(APART)
    assert blocks == cached(sampler) > 0
    assert reasons(ends) == reasons(plain_ends)
    if "seed" in option:
        assert sampled(sampler, APART, **option | {"seed": 4})[0] != lean


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


def test_unfinished_completions_have_their_first_tokens(sampler):
    """A step that vLLM has scheduled ahead leaves nothing behind, and a later call goes on."""
    options = {"temperature": 0, "stop_token_ids": STOPS, "ignore_eos": True}
    whole = drawn(sampler, requests_for(APART), **options)
    early = drawn(sampler, requests_for(APART), at_least(3), **options)
    assert 3 <= sum(early.ended) < len(APART)
    prefixes(early, whole)
    assert not sampler.llm.llm_engine.has_unfinished_requests()
    rest = drawn(sampler, [Request(ids, sampled=found) for ids, found in zip(APART, early.token_ids)], **options)
    assert max(len(a) + len(b) for a, b in zip(early.token_ids, rest.token_ids, strict=True)) <= 140
    assert drawn(sampler, requests_for(APART), **options) == whole


@pytest.mark.parametrize("place", PLACES)
def test_a_generation_that_breaks_off(sampler, monkeypatch, place):
    """Steps of it may still be under way on the GPU; the next generation has its own completions alone."""
    set_options(sampler, temperature=0, ignore_eos=True)
    sampler.llm.reset_prefix_cache()
    whole = generated(sampler, APART, copies=4)
    sampler.llm.reset_prefix_cache()
    with broken_off(sampler, monkeypatch, place, KeyboardInterrupt):
        generated(sampler, APART, copies=4)
    assert generated(sampler, APART, copies=4) == whole and len(whole[1]) == len(APART)


# Speculative decoding


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def speculating(request, tmp_path_factory):
    model = policy(tmp_path_factory.mktemp("policy"), **GPU_MODEL).cuda()
    built = engine(model, request.param, engine_kwargs=DRAFTING, max_completion_length=64, max_num_seqs=len(PROMPTS))
    built.sync()
    return built


@pytest.mark.parametrize("changed", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 20, "temperature": 1.3}])
def test_speculation_is_right(speculating, monkeypatch, changed):
    """With n-grams, at the run's temperature: the check of samples passes, and one token that is off does not."""
    monkeypatch.setattr(speculating, "settings", replace(speculating.settings, **changed))
    random = torch.cuda.get_rng_state(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    found = speculating.check_sync()
    print("\n", changed, found)
    assert 0 < found["sync_check/speculation_difference"] < found["sync_check/speculation_bound"]
    assert all(map(torch.equal, random[:2], (torch.cuda.get_rng_state(), torch.get_rng_state())))
    assert np.random.get_state()[1].tolist() == random[2]
    sample = speculating.sample

    def one_off(requests, enough=None):
        samples = sample(requests, enough)
        samples.logps[5][40] -= 5
        return samples

    monkeypatch.setattr(speculating, "sample", one_off)
    with pytest.raises(RuntimeError, match=r"of 512 sampled tokens 0 have no log-probability \(NaN\), and 1 have one"):
        speculating.check_sync()


@pytest.mark.parametrize("head_dim", [32, 64])  # the policy's, and another
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
def test_a_model_drafts(tmp_path, precision, head_dim):
    """One that is not quantized, and whose pages of keys and values may have another size."""
    model = policy(tmp_path / "policy", **GPU_MODEL).cuda()
    drafter = save_tiny(tmp_path / "drafter", dtype=torch.bfloat16, **GPU_MODEL | {"head_dim": head_dim})
    built = engine(model, precision, engine_kwargs=drafted_by(drafter), max_completion_length=64)
    for updates in range(2):
        if updates:
            update(model, seed=0)
        built.sync()
        found = built.check_sync()
        print("\n", precision, head_dim, found)
        assert 0 < found["sync_check/speculation_difference"] < found["sync_check/speculation_bound"]


def test_a_model_that_drafts_in_cuda_graphs_does_not_spoil_scores(tmp_path, monkeypatch):
    """As it does in vLLM 0.26: the check scores prompts while nothing is drafted. 0.33 scores them before it drafts."""
    model = policy(tmp_path / "policy", **GPU_MODEL).cuda()
    drafter = save_tiny(tmp_path / "drafter", dtype=torch.bfloat16, **GPU_MODEL)
    graphs = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64, 128, 256, 512]}}
    built = engine(model, "bf16", engine_kwargs=drafted_by(drafter) | graphs, max_completion_length=64)
    built.sync()
    right = self_check(built)
    print("\n", right)
    monkeypatch.setattr(sampling, "nothing_drafted", lambda llm: nullcontext())
    monkeypatch.setattr(built, "last_check", None)
    drafts_first = Version(version("vllm")) < Version("0.33")
    with pytest.raises(RuntimeError, match="corrupted: ") if drafts_first else nullcontext():
        self_check(built)


@pytest.mark.parametrize("option", REPEATABLE)
def test_lean_samples_of_speculation_are_vllms(speculating, option):
    option = REPEATABLE[option] | {"ignore_eos": True}
    plain, _ = sampled(speculating, APART, plain=True, **option)
    if plain != sampled(speculating, APART, plain=True, **option)[0]:
        pytest.skip("vLLM's own samples are not the same twice")
    speculating.take_metrics()
    lean, ends = sampled(speculating, APART, **option)
    assert lean == plain and is_lean(ends)
    found = speculating.take_metrics()
    print("\n", option, found)
    assert 0 <= found["rollouts/accepted_share"] <= 1 and found["rollouts/accepted_tokens"] <= 3
