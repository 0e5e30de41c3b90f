"""The embedded engine stops once enough completions have ended, and goes on with the others in a later call."""

import pytest
import torch
from accelerate import Accelerator
from ended_early import at_least, prefixes
from made_up_engine import MadeUp
from masked_policy import trainer as masked
from tiny import tiny_model, tiny_tokenizer

from trl_quant.rollout import EngineSpec, TransformersEngine
from trl_quant.rollout.answers import fault_of_samples
from trl_quant.rollout.base import AdaptedEngine
from trl_quant.rollout.engine import Request, Samples, requests_for


pytestmark = pytest.mark.isa
PROMPTS = [[72, 101, 108], [50, 43, 50, 61, 32, 7], [9], [8, 8]] * 3


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    model, tokenizer = tiny_model(seed=1), tiny_tokenizer()
    built = TransformersEngine(
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=tokenizer,
        precision="bf16",
        max_completion_length=20,
    )
    built.sync()
    return built


def drawn(engine, requests, enough=None, temperature=1.0, **options):
    options = {"eos_token_id": list(range(0, 320, 11)), **options}  # completions of many lengths
    engine.settings = type(engine.settings)(temperature, max_completion_length=20, generation_kwargs=options)
    torch.manual_seed(0)
    return engine.draw(requests, enough=enough)


@pytest.mark.parametrize("options", [{}, {"stop_strings": ["a", "e", "b"]}])
def test_unfinished_completions_have_their_first_tokens(engine, options):
    whole = drawn(engine, requests_for(PROMPTS), **options)
    early = drawn(engine, requests_for(PROMPTS), at_least(6), **options)
    assert whole.ended is None and 6 <= sum(early.ended) < len(PROMPTS)
    prefixes(early, whole)
    assert drawn(engine, requests_for(PROMPTS), lambda ended: False, **options) == whole


def test_a_later_call_goes_on(engine):
    """Sampling is greedy, so the rest is known. Each row ends at its own limit, whatever its neighbours have left."""
    options = {"temperature": 0.0, "eos_token_id": None}
    whole = drawn(engine, requests_for(PROMPTS), **options)
    requests = [Request(prompt, sampled=ids[:i]) for i, (prompt, ids) in enumerate(zip(PROMPTS, whole.token_ids))]
    rest = drawn(engine, requests, **options)
    for i, (ids, logps) in enumerate(zip(rest.token_ids, rest.logps, strict=True)):
        assert i + len(ids) == len(whole.token_ids[i]) == 20 and ids == whole.token_ids[i][i:]
        torch.testing.assert_close(torch.tensor(logps), torch.tensor(whole.logps[i][i:]), rtol=0, atol=1e-4)


def test_only_completions_that_have_ended_need_a_token():
    asked = {"count": 2, "vocabulary": 9, "most": 5}
    assert fault_of_samples([[], [1]], None, None, ended=[False, True], **asked) is None
    assert fault_of_samples([[1], []], None, None, ended=[False, True], **asked) == "completion 1 has no token"
    assert fault_of_samples([[1], []], None, None, **asked) == "completion 1 has no token"


@pytest.mark.parametrize("given", [{"enough": at_least(1)}, {"sampled": [5]}])
def test_a_masked_diffusion_model_has_no_rest(tmp_path, given):
    engine = masked(tmp_path, rollout_precision="int4").vllm_generation.engine
    request = Request([5, 6], sampled=given.get("sampled", []))
    with pytest.raises(ValueError, match="writes all tokens of a completion together"):
        engine.sample([request], given.get("enough"))


def test_a_request_without_a_rest_is_refused(engine):
    requests = [Request([5], sampled=[7] * 19), Request([5], sampled=[7] * 20)]
    with pytest.raises(ValueError, match="Request 1 has 20 sampled tokens already, and its completion may have 20"):
        drawn(engine, requests)
    assert [len(ids) for ids in drawn(engine, requests[:1], eos_token_id=None).token_ids] == [1]


class Continuing(MadeUp):
    """A user's engine that goes on with completions."""

    def sample(self, requests, enough=None):
        return Samples([[65 + len(request.sampled)] for request in requests], None, [enough([True])])


def test_a_users_engine_says_whether_it_can_go_on():
    """One that does not know of `enough` would start each completion again."""
    given = {"model": tiny_model(seed=1), "accelerator": Accelerator(cpu=True), "processing_class": tiny_tokenizer()}
    adapted = AdaptedEngine(MadeUp(), EngineSpec("embedded", "int8"), **given)
    assert len(adapted.sample(requests_for([[5]])).token_ids) == 1
    for requests, enough in ((requests_for([[5]]), all), ([Request([5], sampled=[6])], None)):
        with pytest.raises(ValueError, match=r"MadeUp.sample has no argument `enough`"):
            adapted.sample(requests, enough)
    samples = AdaptedEngine(Continuing(), EngineSpec("embedded", "int8"), **given).sample(
        [Request([5], sampled=[6])], all
    )
    assert samples == Samples([[66]], None, [True])
