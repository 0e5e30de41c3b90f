"""The routing that the embedded engine returns is what its routers choose when the whole text is computed at once."""

import pytest
import torch
from embedded import PROMPTS, engine
from slow_routing import as_sets, chosen_again, mixture_of
from tiny import MIXTURES, tiny_model

from trl_quant.models.routers import routers
from trl_quant.rollout.engine import Samples, requests_for
from trl_quant.rollout.routing import continued, fault_of_routing


pytestmark = pytest.mark.isa


def synced(model, precision, **settings):
    made = engine(model, precision, **settings)
    made.sync()
    return made


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_it_is_that_of_one_forward_pass(family, precision):
    """Of prompts padded on the left, and of the requests that go on with the first tokens of a completion."""
    policy = mixture_of(family)
    sampler, requests = synced(policy, precision), requests_for(PROMPTS)
    torch.manual_seed(0)
    samples = sampler.draw(requests)
    moved = 0
    for prompt, ids, routing in zip(PROMPTS, samples.token_ids, samples.routing, strict=True):
        assert routing.dtype == torch.int16 and routing.shape == (len(prompt) + len(ids) - 1, 2, 2)
        chosen = chosen_again(sampler.copy, family, prompt + ids)
        dense = chosen_again(policy, family, prompt + ids)
        for layer, sets in chosen.items():
            assert torch.equal(as_sets(routing, layer), sets[:-1])
            moved += (dense[layer] != sets).any(1).sum().item()
    assert precision == "bf16" or moved > 3  # the policy's routers choose otherwise, and it is the engine's choice
    assert sampler.returns_routing


def test_completions_of_different_lengths_have_their_own():
    """One ends at once, and one starts from tokens that were sampled before."""
    policy = mixture_of("qwen3_moe")
    sampler = synced(policy, "int4", generation_kwargs={"eos_token_id": list(range(0, 320, 7))})
    torch.manual_seed(1)
    first = sampler.draw(requests_for(PROMPTS))
    lengths = [len(ids) for ids in first.token_ids]
    assert len({*lengths}) > 1
    requests = requests_for(PROMPTS[:2])
    requests[0].sampled.extend(first.token_ids[0][:1] if lengths[0] == 1 else first.token_ids[0][:2])
    second = sampler.draw(requests)
    for request, ids, routing in zip(requests, second.token_ids, second.routing, strict=True):
        chosen = chosen_again(sampler.copy, "qwen3_moe", request.given + ids)
        assert len(routing) == len(request.given) + len(ids) - 1
        assert all(torch.equal(as_sets(routing, layer), sets[:-1]) for layer, sets in chosen.items())


def test_a_dense_policy_has_none():
    sampler = synced(tiny_model(), "int4")
    assert not sampler.returns_routing and sampler.draw(requests_for(PROMPTS)).routing is None


def test_a_token_keeps_the_experts_that_it_was_first_computed_with():
    before, after = torch.zeros(3, 2, 2), torch.ones(5, 2, 2)
    assert continued(None, after) is after
    assert continued(before, after)[:, 0, 0].tolist() == [0, 0, 0, 1, 1]


FAULTS = {
    "the routing of 2 completions was returned with 3": lambda routing: routing.pop(),
    r"completion 1 has the shape \(16, 2, 2\), and not \(17, 2, 2\)": lambda routing: routing.insert(
        1, routing.pop(1)[:-1]
    ),
    "completion 2 names an expert that the policy does not have": lambda routing: routing[2].fill_(4),
}


@pytest.mark.parametrize("says", FAULTS)
def test_a_wrong_routing_is_refused(monkeypatch, says):
    sampler = synced(mixture_of("mixtral"), "int4")
    sample = sampler.sample

    def wrong(requests, **given):
        samples = sample(requests, **given)
        FAULTS[says](samples.routing)
        return samples

    monkeypatch.setattr(sampler, "sample", wrong)
    with pytest.raises(RuntimeError, match=says):
        sampler.draw(requests_for(PROMPTS))


def test_rows_of_dense_layers_mean_nothing():
    """As in vLLM, whose array has any number there."""
    policy = mixture_of("glm4_moe")
    samples = Samples([[1, 2]], routing=[torch.full((3, 2, 2), 99, dtype=torch.int16)])
    samples.routing[0][:, 1] = torch.tensor([0, 3])
    assert fault_of_routing(samples.routing, [4], 2, routers(policy)) is None
    samples.routing[0][:, 1] = -1
    assert "an expert that" in fault_of_routing(samples.routing, [4], 2, routers(policy))
