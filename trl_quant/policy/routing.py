"""
Routing replay (R3): a policy computes each token with the experts that the sampler chose for it.

Sampler and trainer round differently, so a router of the trainer may choose other experts than the sampler did, and the
token's log-probability jumps. With replay the choice is the sampler's, and the weights of the chosen experts follow
from the trainer's own logits, so that gradients reach the router:

    y_t = sum over e in C_t of:  g_te(z_t) f_e(x_t)        C_t: the sampler's;  z_t, g: the trainer's ([`gates`])

The sampler's choices are a keyword argument of the forward pass, [`Routed`], which transformers passes on to each
decoder layer and its attention. A hook on the attention, which computes before the router, hands it to a hook on the
router, which replaces the router's choice. So gradient checkpointing, which computes the layer again in the backward
pass with the same arguments, replays the same choices. Hooks on the layer itself would not do: transformers 5.24
leaves them out then. Without the keyword the hooks do nothing.

A router's logits stay what they are. transformers' load-balancing loss takes its experts from these logits, and so
stays the same function of them: it balances what the trainer's own routers would choose.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..models.routers import Router, gates, routers


ROUTED = "routed_experts"  # the keyword that takes a `Routed` through transformers' layers, and the batch's column
UNKNOWN = -1  # stands for the experts of a token that has no routing


@dataclass
class Routed:
    """
    The experts of the tokens of one forward pass.

    Parameters:
        experts (`torch.Tensor`): (..., L, k), integers: the tokens in the order in which the model computes them, all
            decoder layers, and the chosen experts. Negative where the choice is not known.
        replays (`bool`): Whether the experts are replayed. If not, they are only compared.
        compared (`dict[int, torch.Tensor]`): For each layer that has computed, (2,): the number of tokens for which its
            router would have chosen another set of experts, and the number of tokens whose experts are known.
    """

    experts: Tensor
    replays: bool = True
    compared: dict[int, Tensor] = field(default_factory=dict)

    def packed(self, rows: Tensor, filled: int) -> "Routed":
        """Returns the routing of a packed row: of the tokens at `rows`, of which the last `filled` have none."""
        experts = self.experts.flatten(0, -3)[rows]
        experts[len(rows) - filled :] = UNKNOWN
        return replace(self, experts=experts)

    def choose(self, router: Router, logits: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """
        Returns weights and indices, both `(T, k)`, in place of a router's own.

        Args:
            router ([`~models.routers.Router`]): The router.
            logits (`torch.Tensor` of shape `(T, E)`): Its logits.
            weights, indices (`torch.Tensor` of shape `(T, k)`): Its choice.
        """
        chosen = self.experts[..., router.layer, :].flatten(0, -2).to(indices)
        is_known = (chosen >= 0).all(-1, keepdim=True)
        experts = torch.where(is_known, chosen, indices)
        differs = (experts.sort(-1).values != indices.sort(-1).values).any(-1)
        self.compared[router.layer] = torch.stack([differs.sum(), is_known.sum()])
        if not self.replays:
            return weights, indices
        return gates(router.module, router.scores, logits, experts).to(weights.dtype), experts


class ReplayHooks:
    """
    The hooks of one router and of the attention of its decoder layer.

    Parameters:
        router ([`~models.routers.Router`]): The router.
    """

    def __init__(self, router: Router):
        self.router = router
        self.routed: Routed | None = None  # of the attention's call

    def begin(self, attention: nn.Module, args: tuple, kwargs: dict) -> None:
        """Takes the routing of a call of the layer's attention."""
        self.routed = kwargs.get(ROUTED)

    def choose(self, module: nn.Module, args: tuple, output: tuple) -> tuple | None:
        """Replaces the output of the router, (logits, weights, indices)."""
        if self.routed is None:
            return None
        return output[0], *self.routed.choose(self.router, *output)


def accept_routing(model: nn.Module) -> None:
    """
    Sets the hooks with which a mixture of experts takes the keyword [`ROUTED`]. They stay for good, and a second call
    adds none. Without the keyword the model computes as before, bit for bit.
    """
    for router in routers(model):
        if not takes_routing(router.module):
            hooks = ReplayHooks(router)
            children = router.decoder_layer.named_children()
            attention = next(child for name, child in children if name.endswith("_attn"))  # `self_attn`, `linear_attn`
            attention.register_forward_pre_hook(hooks.begin, with_kwargs=True)
            router.module.register_forward_hook(hooks.choose)


def takes_routing(model: nn.Module) -> bool:
    """Whether a router, or any router in a model, has the hooks of [`accept_routing`]."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return any(isinstance(getattr(hook, "__self__", None), ReplayHooks) for hook in hooks)


@contextmanager
def choices_recorded(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """
    Context in which the choices of a model's routers are recorded: for each layer with a router, the indices (T, k) of
    each of its calls.
    """
    found: dict[int, list[Tensor]] = {}
    hooks = []
    for router in routers(model):
        calls = found.setdefault(router.layer, [])
        hooks.append(router.module.register_forward_hook(partial(_record, calls)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _record(calls: list[Tensor], router: nn.Module, args: tuple, output: tuple) -> None:
    calls.append(output[2].to(torch.int16))
