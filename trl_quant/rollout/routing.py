"""
The routing that an engine returns with its samples: which experts its routers chose, in vLLM's shape.

For a request whose prompt and completion so far have P tokens, and for which C tokens were sampled, it is an INT16
tensor (P + C - 1, L, k): tokens, all decoder layers, chosen experts. The last token has none, because no token was
computed from it. Rows of layers without a router mean nothing.
"""

import torch
from torch import Tensor

from ..models.routers import Router


def split_by_request(choices: dict[int, list[Tensor]], layers: int, given: list[int], new: list[int]) -> list[Tensor]:
    """
    Divides the recorded choices of a batch, whose requests are padded on the left, among the requests.

    Args:
        choices (`dict[int, list[torch.Tensor]]`):
            For each layer with a router, the indices `(B T_i, k)` of each of its calls, one after the other: first of
            the padded requests, then of one token a request.
        layers (`int`): The number L of decoder layers.
        given, new (`list[int]`): The tokens that each of the B requests starts from, and those that were sampled.

    Returns:
        `list[torch.Tensor]`: The routing of each request, on the CPU.
    """
    batch, longest = len(given), max(given)
    joined = {layer: torch.cat([x.view(batch, -1, x.shape[-1]) for x in calls], 1) for layer, calls in choices.items()}
    one = next(iter(joined.values()))
    whole = one.new_full((*one.shape[:2], layers, one.shape[2]), -1)
    for layer, indices in joined.items():
        whole[:, :, layer] = indices
    whole = whole.cpu()
    return [
        row[longest - before : longest + after - 1].clone()
        for row, before, after in zip(whole, given, new, strict=True)
    ]


def continued(before: Tensor | None, after: Tensor) -> Tensor:
    """
    Joins the routing of a request's tokens so far with that of the same request after it went on. A token keeps the
    experts with which it was first computed, although the engine has computed it again.
    """
    return after if before is None else torch.cat([before, after[len(before) :]])


def fault_of_routing(routing: list[Tensor | None], lengths: list[int], layers: int, found: list[Router]) -> str | None:
    """
    Returns what is wrong with an engine's routing, or `None`.

    Args:
        routing (`list[torch.Tensor | None]`): The routing of each request; `None` for one that was not computed.
        lengths (`list[int]`): The number of tokens of each request, with those that were sampled.
        layers (`int`): The number L of decoder layers.
        found (`list[Router]`): The policy's routers.
    """
    if not found:
        return "the policy, which has no routers, got a routing"
    if len(routing) != len(lengths):
        return f"the routing of {len(routing)} completions was returned with {len(lengths)} completions"
    for row, (experts, length) in enumerate(zip(routing, lengths, strict=True)):
        if experts is None:
            continue
        expected = (length - 1, layers, found[0].module.top_k)
        if tuple(experts.shape) != expected:
            return f"the routing of completion {row} has the shape {tuple(experts.shape)}, and not {expected}"
        chosen = experts[:, [router.layer for router in found]]
        if chosen.numel() and (chosen.min() < 0 or chosen.max() >= found[0].module.num_experts):
            return f"the routing of completion {row} names an expert that the policy does not have"
    return None
