"""Inputs and outputs of every correction, and the check for their hyperparameters.

| name | policy | log-probabilities from |
|---|---|---|
| `rollout_logps` | behaviour: the quantized (and noised) sampler | the rollout engine, with each token |
| `old_logps` | proximal: the trainer at generation time, or at each update | trainer forward, no grad |
| `logps` | current | trainer forward, with grad (not needed here) |
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class CorrectionInputs:
    """
    One batch of sampled tokens. Log-probabilities are natural logs, after temperature.

    Args:
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the sampler. NaN or -inf marks a token that the sampler did not score.
        old_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the trainer at generation time, or now for corrections with `every_update`.
        advantages (`torch.Tensor` of shape `(B,)`, `(B, 1)` or `(B, T)`):
            Advantages, broadcast over the tokens of a sequence.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 (or `True`) on the completion tokens that count. Values elsewhere are never read.
        level (`str`, *optional*, defaults to `"token"`):
            What a weight belongs to: `"token"`, or `"sequence"`, whose ratio is the product of its tokens' ratios.

    Raises:
        `ValueError`: if the shapes do not match.
    """

    rollout_logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    mask: Tensor
    level: str = "token"

    def __post_init__(self):
        if self.level not in ("token", "sequence"):
            raise ValueError(f"level must be 'token' or 'sequence', got {self.level!r}.")
        shape = self.old_logps.shape
        if len(shape) != 2:
            raise ValueError(f"old_logps must have shape (B, T), got {tuple(shape)}.")
        for name in ("rollout_logps", "mask"):
            got = getattr(self, name).shape
            if got != shape:
                raise ValueError(f"{name} must have the shape of old_logps, {tuple(shape)}, got {tuple(got)}.")
        allowed = [shape[:1], (shape[0], 1), shape]
        if self.advantages.shape not in allowed:
            names = ", ".join(str(tuple(s)) for s in allowed)
            raise ValueError(f"advantages must have one of the shapes {names}, got {tuple(self.advantages.shape)}.")


@dataclass(frozen=True)
class CorrectionOutput:
    """
    What the loss needs, all detached.

    Args:
        weights (`torch.Tensor` of shape `(B, T)`):
            Factor on each token's clipped objective; exactly 1 on masked tokens, and on unscored ones unless the weight
            is their sequence's.
        clip_low (`torch.Tensor` of shape `(B, T)` or `None`):
            Lower bound on the ratio `R`; `None` keeps the loss's own.
        clip_high (`torch.Tensor` of shape `(B, T)` or `None`):
            Upper bound on the ratio `R`; `None` keeps the loss's own.
        metrics (`dict[str, float]`):
            Diagnostics over the unmasked, scored tokens of all ranks, see [`~corrections.diagnostics`].
        old_logps (`torch.Tensor` of shape `(B, T)` or `None`):
            Log-probabilities to use as the proximal policy, so that `R = exp(logps - old_logps)`; `None` keeps the
            trainer's own.
    """

    weights: Tensor
    clip_low: Tensor | None = None
    clip_high: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    old_logps: Tensor | None = None


def check(name: str, value: float, low: float, high: float = float("inf"), open_low: bool = False) -> None:
    """Raise `ValueError` unless `value` is a number in `[low, high]`, or in `(low, high]` with `open_low`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):
        above = f"> {low:g}" if open_low else f">= {low:g}"
        below = "" if high == float("inf") else f" and <= {high:g}"
        raise ValueError(f"{name} must be a number {above}{below}, got {value!r}.")
