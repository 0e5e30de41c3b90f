"""
Gives vLLM, in this process, a prompt's images at the places that the trainer scores.

The trainer has the prompt that transformers' processor wrote, with one image token for each feature of an image. vLLM
writes these tokens itself, and not always at the same places: in place of one token (Qwen), of a mark and with line
breaks around them (Gemma 3), before the prompt (BLIP-2). Here vLLM prepares the images as always, and then gets the
trainer's prompt with their places in it. A server gets the places in the same way ([`~server.placed`]).
"""

from collections.abc import Callable, Iterator

import torch

from ...trl_seams import exchanged
from ..engine import Request


def generated(llm, requests: list[Request], parameters, image_token: int | None) -> list:
    """
    Returns the outputs of vLLM's `llm` for requests, with or without images.

    Args:
        llm (`vllm.LLM`): vLLM.
        requests (`list[Request]`): The requests.
        parameters: vLLM's `SamplingParams`, one for all requests or one for each.
        image_token (`int` or `None`):
            The token of which a prompt has one for each feature of its images; `None` if it is not known, and vLLM
            places them.

    Raises:
        `ValueError`: A prompt has another number of image tokens than its images have features.
        `RuntimeError`: vLLM has placed the images, and so made another prompt.
    """
    renderer = llm.llm_engine.renderer
    given = iter(requests)
    placing = {"render_cmpl": at_their_places(renderer.render_cmpl, given, image_token)}
    with exchanged(renderer, **placing if image_token is not None else {}):
        outputs = llm.generate([vllm_prompt(one) for one in requests], sampling_params=parameters, use_tqdm=False)
    check_read(requests, outputs)
    return outputs


def vllm_prompt(request: Request) -> dict:
    """Returns a request's prompt as vLLM takes it."""
    prompt = {"prompt_token_ids": request.given}
    if request.images is None:
        return prompt
    images = request.images if len(request.images) > 1 else request.images[0]
    return prompt | {"multi_modal_data": {"image": images}}


def at_their_places(render: Callable, requests: Iterator[Request], image_token: int) -> Callable:
    """
    Returns vLLM's `render_cmpl`, which prepares prompts and images, with the images at the places of the `requests`.
    vLLM must prepare them in this order.
    """

    def rendered(prompts, *args, **kwargs) -> list:
        once = []  # a token for each image: of more, vLLM would take another image's
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            kept = [token for token, last in zip(ids, [None, *ids]) if token != image_token or last != token]
            once.append({**prompt, "prompt_token_ids": kept} if "multi_modal_data" in prompt else prompt)
        inputs = render(once, *args, **kwargs)
        for found, request in zip(inputs, requests):
            if request.images is not None:
                places = found["mm_placeholders"]["image"]
                counts = [place.get_num_embeds() for place in places]
                found["prompt_token_ids"] = request.given
                found["mm_placeholders"] = {"image": placeholders(request.prompt, counts, image_token)}
        return inputs

    return rendered


def placeholders(prompt: list[int], counts: list[int], image_token: int) -> list:
    """
    Returns the places of images in a prompt, as vLLM's `PlaceholderRange`.

    Args:
        prompt (`list[int]`): Token ids.
        counts (`list[int]`): The number of features of each image.
        image_token (`int`): The token that stands for a feature.

    Raises:
        `ValueError`: The prompt has another number of these tokens.
    """
    from vllm.multimodal.inputs import PlaceholderRange

    places = [place for place, token in enumerate(prompt) if token == image_token]
    if len(places) != sum(counts):
        raise ValueError(
            f"A prompt has {len(places)} image tokens, and vLLM makes {sum(counts)} features of its {len(counts)} "
            "images. Sample from the embedded engine (`use_vllm=False`)."
        )
    found, rest = [], iter(places)
    for count in counts:
        own = torch.tensor([next(rest) for _ in range(count)])
        first, last = own[0].item(), own[-1].item()
        is_feature = torch.zeros(last + 1 - first, dtype=torch.bool)
        is_feature[own - first] = True
        found.append(PlaceholderRange(first, last + 1 - first, None if is_feature.all() else is_feature))
    return found


def check_read(requests: list[Request], outputs) -> None:
    """Raises `RuntimeError` if vLLM has read another prompt, which only an image's tokens can cause, than was given."""
    for row, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        if request.images is not None and list(output.prompt_token_ids) != request.given:
            raise RuntimeError(
                f"vLLM sampled from another prompt than the trainer scores: prompt {row} has {len(request.given)} "
                f"tokens, and vLLM made {len(output.prompt_token_ids)} of it, since it writes the tokens of an image "
                "itself, and the processor does not name its `image_token_id`. Sample from the embedded engine "
                "(`use_vllm=False`) or from a server (`vllm_mode='server'`)."
            )
