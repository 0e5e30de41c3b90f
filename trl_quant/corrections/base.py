"""The inputs and outputs of every correction, and the range of each hyperparameter.

| name | policy | log-probabilities from |
|---|---|---|
| `rollout_logps` | behaviour: the quantized (and noised) sampler | the rollout engine, with each token |
| `old_logps` | proximal: the trainer at generation time, or at each update | trainer forward, no grad |
| `logps` | current | trainer forward, with grad (not needed here) |
"""

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import get_args, get_type_hints

from torch import Tensor


@dataclass(frozen=True)
class CorrectionInputs:
    """
    One batch of sampled tokens. Log-probabilities are natural logs, after temperature.

    Args:
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the sampler. NaN or -inf marks a token that the sampler did not score.
        old_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the trainer at generation time; for corrections with `every_update`, those of the
            current policy.
        advantages (`torch.Tensor` of shape `(B,)`, `(B, 1)` or `(B, T)`):
            Advantages, broadcast over the tokens of a sequence.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 (or `True`) on the completion tokens that count. The other tokens are not read.
        level (`str`, *optional*, defaults to `"token"`):
            The unit that gets a weight: a `"token"`; a `"sequence"`, whose ratio is the product of its tokens' ratios;
            or a `"prefix"`, the tokens before a token, whose ratio is the product of their ratios.
        ages (`torch.Tensor` of shape `(B, T)`, *optional*):
            The age of each token, in generations: how many generations ago it was sampled. No correction reads it.
        turns (`torch.Tensor` of shape `(B, T)`, *optional*):
            The turn of each token, from 1, where the mask does not show it. No correction reads it.

    Raises:
        `ValueError`: if the shapes do not match, or `level` is unknown.
    """

    rollout_logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    mask: Tensor
    level: str = "token"
    ages: Tensor | None = None
    turns: Tensor | None = None

    def __post_init__(self):
        if self.level not in ("token", "sequence", "prefix"):
            raise ValueError(f"level must be 'token', 'sequence' or 'prefix', got {self.level!r}.")
        shape = self.old_logps.shape
        if len(shape) != 2:
            raise ValueError(f"old_logps must have shape (B, T), got {tuple(shape)}.")
        for name in ("rollout_logps", "mask", "ages", "turns"):
            given = getattr(self, name)
            got = shape if given is None else given.shape
            if got != shape:
                raise ValueError(f"{name} must have the shape of old_logps, {tuple(shape)}, got {tuple(got)}.")
        allowed = [shape[:1], (shape[0], 1), shape]
        if self.advantages.shape not in allowed:
            names = ", ".join(str(tuple(s)) for s in allowed)
            raise ValueError(f"advantages must have one of the shapes {names}, got {tuple(self.advantages.shape)}.")


@dataclass(frozen=True)
class CorrectionOutput:
    """
    The correction's part of the loss. All tensors are detached.

    Args:
        weights (`torch.Tensor` of shape `(B, T)` or `None`):
            Factor on each token's clipped objective. It is exactly 1 on masked tokens. On unscored tokens it is 1 too,
            unless it is the weight of their sequence or of their prefix. `None` keeps the loss's own.
        clip_low (`torch.Tensor` of shape `(B, T)` or `None`):
            Lower bound on the ratio `R`; `None` keeps the loss's own.
        clip_high (`torch.Tensor` of shape `(B, T)` or `None`):
            Upper bound on the ratio `R`; `None` keeps the loss's own.
        metrics (`dict[str, float]`):
            Diagnostics over the unmasked, scored tokens of all ranks (see [`~corrections.diagnostics`]).
        old_logps (`torch.Tensor` of shape `(B, T)` or `None`):
            Log-probabilities to use as the proximal policy, so that `R = exp(logps - old_logps)`; `None` keeps the
            trainer's own.
    """

    weights: Tensor | None
    clip_low: Tensor | None = None
    clip_high: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    old_logps: Tensor | None = None


@dataclass(frozen=True)
class Range:
    """
    The numbers that a field may hold, stated in its type: `delta: Annotated[float, Range(0, 1, open_low=True)]`.

    Args:
        low (`float`): The smallest number.
        high (`float`, *optional*): The largest number; infinity by default.
        open_low (`bool`, *optional*, defaults to `False`): Whether the field must be greater than `low`.
    """

    low: float
    high: float = math.inf
    open_low: bool = False

    def broken_bound(self, value: float) -> str | None:
        """Returns the bound that `value` violates, such as `">= 1"`, or `None`. NaN violates the lower bound."""
        is_above = value > self.low if self.open_low else value >= self.low
        if not is_above:
            return self._lower_bound()
        return f"<= {self.high}" if value > self.high else None

    def __str__(self) -> str:
        return self._lower_bound() + ("" if self.high == math.inf else f" and <= {self.high}")

    def _lower_bound(self) -> str:
        return f"> {self.low}" if self.open_low else f">= {self.low}"


def ranges_of(kind: type) -> dict[str, Range]:
    """Returns field -> range, for the fields of a dataclass whose type states one."""
    hints = get_type_hints(kind, include_extras=True)
    stated = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: part for name, parts in stated.items() for part in parts if isinstance(part, Range)}


def check_ranges(correction) -> None:
    """Raises `ValueError` for a hyperparameter outside its range. `None` passes if the type allows it."""
    hints = get_type_hints(type(correction))
    for name, allowed in ranges_of(type(correction)).items():
        value = getattr(correction, name)
        if value is None and type(None) in get_args(hints[name]):
            continue
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or allowed.broken_bound(value) is not None:
            raise ValueError(f"{name} must be a number {allowed}, got {value!r}.")
