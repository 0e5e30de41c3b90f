"""vLLM in this process stops once enough completions have ended, and goes on with the others in a later call."""

import pytest
import torch
from ended_early import at_least, prefixes


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import engine, policy
from vllm_sampling import PROMPTS, drawn, plainly

from trl_quant.rollout.engine import Request, requests_for


pytestmark = pytest.mark.vllm
ENDS = list(range(0, 250, 17))  # completions of many lengths


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    built = engine(policy(tmp_path_factory.mktemp("policy")), "int8", max_completion_length=60, max_num_seqs=16)
    built.sync()
    return built


@pytest.mark.parametrize("kind", ["lean", "plain", "text"])
def test_unfinished_completions_have_their_first_tokens(sampler, monkeypatch, kind):
    options = {"stop_token_ids": ENDS} | ({"stop": ["never met"]} if kind == "text" else {})
    if kind == "plain":
        monkeypatch.setattr(sampler, "sampling", plainly)
    whole = drawn(sampler, requests_for(PROMPTS), **options)
    early = drawn(sampler, requests_for(PROMPTS), at_least(5), **options)
    assert whole.ended is None and 5 <= sum(early.ended) < len(PROMPTS)
    prefixes(early, whole)
    llm = sampler.llm.llm_engine
    assert not llm.has_unfinished_requests() and not llm.engine_core.engine_core.scheduler.requests
    again = drawn(sampler, requests_for(PROMPTS), **options)
    assert again == whole


def test_nothing_is_enough_and_all_have_ended(sampler):
    whole = drawn(sampler, requests_for(PROMPTS), stop_token_ids=ENDS)
    assert drawn(sampler, requests_for(PROMPTS), lambda ended: False, stop_token_ids=ENDS) == whole
    none = drawn(sampler, requests_for(PROMPTS), lambda ended: True, stop_token_ids=ENDS)
    assert max(map(len, none.token_ids)) <= 2 and not all(none.ended)


def test_a_later_call_goes_on(sampler):
    """Sampling is greedy, so the rest is known. The limit counts the tokens of both calls."""
    options = {"temperature": 0.0, "ignore_eos": True}
    whole = drawn(sampler, requests_for(PROMPTS), **options)
    requests = [Request(prompt, sampled=ids[: 5 * i]) for i, (prompt, ids) in enumerate(zip(PROMPTS, whole.token_ids))]
    rest = drawn(sampler, requests, **options)
    for request, ids, logps, all_ids, all_logps in zip(requests, *rest_of(rest), *rest_of(whole), strict=True):
        assert len(request.sampled) + len(ids) == len(all_ids) == 60
        if ids == all_ids[len(request.sampled) :]:  # else two tokens were nearly as likely
            expected = torch.tensor(all_logps[len(request.sampled) :])
            torch.testing.assert_close(torch.tensor(logps), expected, rtol=0, atol=0.05)
    same = [ids == all_ids[len(r.sampled) :] for r, ids, all_ids in zip(requests, rest.token_ids, whole.token_ids)]
    assert sum(same) > len(same) / 2
    assert drawn(sampler, requests_for(PROMPTS), **options) == whole  # the limit of one request is no other's


def rest_of(samples):
    return samples.token_ids, samples.logps
