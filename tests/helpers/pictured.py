"""Requests with images to vLLM engines, and what these make of them."""

from readers import picture, processed
from vllm import SamplingParams

from trl_quant.rollout.engine import Request
from trl_quant.rollout.vllm.adapter import linear_layers
from trl_quant.rollout.vllm.images import generated


PICTURES = [picture(1), picture(2, 40, 40)]
TEXT = "language_model.model.layers."  # the beginning of vLLM's names of the text's layers


def asked(processor, images=PICTURES, text: str = "What?") -> Request:
    return Request(processed(processor, images, text)["input_ids"][0].tolist(), images or None)


def greedy_pictured(sampler, requests: list[Request], tokens: int = 6) -> list[tuple]:
    """The tokens with which the engine goes on, with their log-probabilities, and those of the prompt's."""
    given = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found = []
    for request, output in zip(requests, generated(sampler.llm, requests, given, sampler.image_token), strict=True):
        completion = output.outputs[0]
        assert list(output.prompt_token_ids) == request.given
        ids = [*request.given[1:], *completion.token_ids]
        steps = [*output.prompt_logprobs[1:], *completion.logprobs]
        found.append((ids, [step[token].logprob for token, step in zip(ids, steps, strict=True)]))
    return found


def methods(sampler) -> dict[str, str]:
    """The class that computes each of vLLM's linear layers."""

    def named(model):
        layers = linear_layers(model).items()
        return {name: type(getattr(layer, "scheme", None) or layer.quant_method).__name__ for name, layer in layers}

    return sampler.llm.apply_model(named)[0]


def outside_of_text(names) -> set[str]:
    """Those of vLLM's linear layers that see images: a tower's, and what joins it to the text."""
    return {name for name in names if not name.startswith(TEXT)}
