"""Which sampling options act on the rest of a completion as on the whole one, in vLLM."""

from dataclasses import replace

import pytest
import torch
from long_tests import rest_is_long


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.sampling_params import RepetitionDetectionParams
from vllm_engines import engine, policy
from vllm_sampling import PROMPTS

from trl_quant.rollout.engine import Request, requests_for
from trl_quant.rollout.sampling_options import breaks_when_continued


pytestmark = pytest.mark.vllm
ENDS = list(range(0, 250, 17))  # completions of many lengths
MOST = 40
# The same with the rest as with the whole; all of them act on samples of temperature 0
RIGHT = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "min_tokens": {"min_tokens": 25, "stop_token_ids": ENDS},
    "stop_token_ids": {"stop_token_ids": ENDS},
    "logit_bias": {"logit_bias": {7: 3.0, 9: 3.0, 11: -5.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(30, 120))},
}
WRONG = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "structured_outputs": {"structured_outputs": {"regex": "[a-z]{30}"}},
    "seed": {"seed": 3, "temperature": 1.0},
    "repetition_detection": {
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=1, min_count=30),
        "allowed_token_ids": [7],
    },
}


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    built = engine(policy(tmp_path_factory.mktemp("policy")), "bf16", max_completion_length=MOST)
    built.sync()
    return built


def greedy_rows(sampler, requests, **options) -> list[list[int]]:
    """The tokens of each completion. The call is one that `draw` may refuse."""
    sampler.settings = replace(sampler.settings, generation_kwargs={"temperature": 0.0} | options)
    sampler.llm.reset_prefix_cache()
    return sampler.sample(requests).token_ids


def continued(sampler, options) -> list[bool]:
    """Whether the rest of each completion, from about its middle, is what one call sampled."""
    whole = greedy_rows(sampler, requests_for(PROMPTS), **options)
    cuts = [len(ids) // 2 for ids in whole]
    requests = [Request(prompt, sampled=ids[:cut]) for prompt, ids, cut in zip(PROMPTS, whole, cuts, strict=True)]
    rest = greedy_rows(sampler, requests, **options)
    return [ids == all_ids[cut:] for ids, all_ids, cut in zip(rest, whole, cuts, strict=True)]


@pytest.mark.parametrize("name", rest_is_long(RIGHT, "min_tokens"))
def test_options_that_act_on_the_rest_as_on_the_whole(sampler, name):
    options, others = RIGHT[name], {key: value for key, value in RIGHT[name].items() if key != name}
    assert breaks_when_continued(options) == []
    plain, acting = (greedy_rows(sampler, requests_for(PROMPTS), **given) for given in (others, options))
    assert plain != acting
    same = continued(sampler, options)
    assert sum(same) > len(same) / 2  # not all: another batch may round otherwise


@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not(sampler, name):
    assert breaks_when_continued(WRONG[name]) == [name]
    same = continued(sampler, WRONG[name])
    assert sum(same) < len(same) / 2
    with pytest.raises(ValueError, match=rf"the options \['{name}'\] act on a completion from its start"):
        sampler.draw([Request(PROMPTS[0], sampled=[5])])


def words(sampler, rows) -> list[tuple[list[int], list[int], str]]:
    """A prompt, the tokens that follow it up to two letters that have not followed each other before, and these."""
    found = []
    for prompt, ids in zip(PROMPTS[::4], rows, strict=True):
        for end in range(5, len(ids)):
            text = sampler.tokenizer.decode(ids[end - 2 : end])
            if text not in sampler.tokenizer.decode(ids[: end - 1]):
                found.append((prompt, ids[:end], text))
                break
    return found


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_across_the_border(sampler, name):
    """A string that begins in one call and ends in the next neither ends the completion nor is it forbidden."""
    letters = {"ignore_eos": True, "allowed_token_ids": sampler.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")}
    found = words(sampler, greedy_rows(sampler, requests_for(PROMPTS[::4]), **letters))
    assert len(found) > 1
    for prompt, ids, text in found:
        options = letters | {name: [text]}
        assert breaks_when_continued(options) == [name]
        (whole,), (rest,) = (
            greedy_rows(sampler, [Request(prompt, sampled=given)], **options) for given in ([], ids[:-1])
        )
        assert (whole == ids) if name == "stop" else (whole[: len(ids)] != ids)
        assert rest[0] == ids[-1] and len(rest) == MOST - len(ids) + 1
    with pytest.raises(ValueError, match=rf"the options \['{name}'\]"):
        sampler.draw([Request(PROMPTS[0], sampled=[5])])


def test_a_regular_expression_of_the_settings(sampler):
    sampler.settings = replace(sampler.settings, generation_kwargs={}, structured_outputs_regex="[ab]{3}")
    try:
        assert len(sampler.draw(requests_for(PROMPTS[:1])).token_ids[0]) >= 3
        with pytest.raises(ValueError, match=r"the options \['structured_outputs'\]"):
            sampler.draw([Request(PROMPTS[0], sampled=[5])])
    finally:
        sampler.settings = replace(sampler.settings, structured_outputs_regex=None)


def test_log_probabilities_of_the_rest(sampler):
    """With what a penalty makes of the prompt and the tokens so far."""
    options = {"repetition_penalty": 1.5, "min_tokens": 30, "stop_token_ids": ENDS, "temperature": 0.0}
    sampler.settings = replace(sampler.settings, generation_kwargs=options)
    whole = sampler.draw(requests_for(PROMPTS))
    rest = sampler.draw([Request(prompt, sampled=ids[:10]) for prompt, ids in zip(PROMPTS, whole.token_ids)])
    compared = 0
    for ids, logps, all_ids, all_logps in zip(rest.token_ids, rest.logps, whole.token_ids, whole.logps, strict=True):
        if ids == all_ids[10:]:
            compared += 1
            torch.testing.assert_close(torch.tensor(logps), torch.tensor(all_logps[10:]), rtol=0, atol=0.05)
    assert compared > len(PROMPTS) / 2
