"""
Routing replay in a trainer: from an engine's samples to the forward passes that score and train on them.

[`~policy.routing`] says what replay is, [`~trainers.carried`] when TRL calls what is here.
"""

import torch
from torch import Tensor, nn

from ..policy.routing import ROUTED, UNKNOWN, Routed, accept_routing, takes_routing
from ..rollout.base import RolloutEngine
from ..rollout.routing import continued
from ..rollout.trl_face import Turn
from .carried import CarriedStep, mask_of


class RoutedRows(nn.Module):
    """
    Stands in for a model where TRL calls it, or its decoder, with padded rows, and adds their routing to the call.

    Parameters:
        rows: The model, or what stands in for it.
        experts (`torch.Tensor` of shape `(B, S, L, k)`): The routing of all rows. TRL may call with some at a time.
        replays (`bool`): Whether the experts are replayed.

    Attributes:
        calls (`list[Routed]`): The routing of each call.
    """

    def __init__(self, rows, experts: Tensor, replays: bool):
        super().__init__()
        self.rows, self.experts, self.replays = rows, experts, replays
        self.calls: list[Routed] = []
        self._done = 0

    def forward(self, input_ids: Tensor, **kwargs):
        """Computes what `rows` computes, with the routing of the next rows."""
        return self.rows(input_ids=input_ids, **self._routed(input_ids), **kwargs)

    def base_model(self, input_ids: Tensor, **kwargs):
        """Computes what the decoder of `rows` computes, with the routing of the next rows."""
        is_adapted = hasattr(self.rows, "get_base_model")
        decoder = (self.rows.get_base_model() if is_adapted else self.rows).base_model
        return decoder(input_ids=input_ids, **self._routed(input_ids), **kwargs)

    def _routed(self, ids: Tensor) -> dict[str, Routed]:
        experts = self.experts[self._done : self._done + len(ids)]
        self._done += len(ids)
        if experts.shape[:2] != ids.shape:
            raise RuntimeError(
                f"TRL computes rows of the shape {tuple(ids.shape)}, and the sampler's routing is of "
                f"{tuple(experts.shape[:2])}. A subclass that changes the rows of a batch needs `router_replay=False`."
            )
        self.calls.append(Routed(experts.to(ids.device), self.replays))
        return {ROUTED: self.calls[-1]}


class RoutingStep(CarriedStep):
    """
    The routing of a trainer's samples: INT16, (B, S, L, k) as its rows are padded. A token keeps the experts of the
    turn that sampled it, also where a later turn has computed it again.

    Args:
        trainer: The trainer, whose engine returns its routing.
        replays (`bool`): Whether the experts are replayed. If not, they are only compared.
    """

    column = ROUTED

    def __init__(self, trainer, replays: bool):
        super().__init__(trainer)
        self.replays = replays
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            accept_routing(trainer.accelerator.unwrap_model(model))

    def of_turn(self, turn: Turn) -> list[Tensor | None] | None:
        return turn.routing

    def joined(self, before: Tensor | None, after: Tensor, so_far: int) -> Tensor:
        return continued(before, after)

    def check_missing(self) -> None:
        if self.trainer.args.router_replay:
            raise ValueError(
                f"`router_replay`=True, but {type(self.trainer).__name__} sampled without the routing that it "
                "replays. An engine must return it with its samples, and a subclass that overrides "
                "`_generate_single_turn` must call `super()`. Else leave the field unset."
            )

    def padded(self, mask: Tensor) -> Tensor:
        """Returns the routing of the newest generation, negative on padding and where it is unknown."""
        known = next((experts for experts in self.samples if experts is not None), torch.empty(0, 1, 1))
        padded = torch.full((*mask.shape, *known.shape[1:]), UNKNOWN, dtype=torch.int16)
        for row, experts in enumerate(self.samples):
            if experts is not None:
                places = mask[row].nonzero()[: len(experts), 0].cpu()
                padded[row, places] = experts[: len(places)].to(torch.int16)
        return padded.to(mask.device)

    def fits(self, model: nn.Module) -> bool:
        return takes_routing(model)

    def standing_in(self, rows, column: Tensor) -> RoutedRows:
        return RoutedRows(rows, column, self.replays)

    def log(self, batch: dict[str, Tensor]) -> None:
        """Logs what the passes have compared, and the share of tokens without replay."""
        compared = [call.compared for routed in self.passes for call in routed.calls]
        layers = sorted(compared[0])
        counts = sum(torch.stack([found[layer] for layer in layers]) for found in compared)  # (layers, 2)
        mask = mask_of(batch).bool()
        is_replayed = self.replays & mask & (self.opened >= 0).flatten(2).any(-1)
        last = mask.any(1).sum()  # nothing is predicted from the last token of a row
        tokens = torch.stack([is_replayed.sum(), mask.sum() - last]).unsqueeze(0)
        total = self.trainer.accelerator.reduce(torch.cat([counts, tokens]).double(), "sum")
        (differs, known), (replayed, all_tokens) = total[:-1].sum(0).tolist(), total[-1].tolist()
        shares = (total[:-1, 0] / total[:-1, 1].clamp(min=1)).tolist()
        self.trainer.log_values(
            {
                "routing/differs": differs / max(known, 1),
                **{f"routing/by_layer/{layer}": share for layer, share in zip(layers, shares, strict=True)},
                "routing/unreplayed": max(1 - replayed / max(all_tokens, 1), 0.0),
            }
        )


def routing_step(trainer, sampler: RolloutEngine) -> RoutingStep | None:
    """
    Returns the step for a trainer that samples from an engine; `None` if there is no routing to compare or to replay.

    Raises:
        `ValueError`: `router_replay=True`, and the engine returns no routing.
    """
    # It is not known which tokens of a `rollout_func` the engine has sampled, and compiled hooks were not tried
    is_left_out = getattr(trainer, "rollout_func", None) is not None or trainer.args.torch_compile
    if sampler.returns_routing and not is_left_out:
        return RoutingStep(trainer, trainer.spec.replays is not False)
    if trainer.spec.replays:
        raise ValueError(
            f"`router_replay`=True, but the {type(sampler).__name__} of this run does not return its routing. An "
            "engine that does says so by an attribute `returns_routing`. Leave the field unset, or use the embedded "
            "engine."
        )
    return None
