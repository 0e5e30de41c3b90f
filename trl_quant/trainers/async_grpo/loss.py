"""
A correction in the loss of TRL's asynchronous trainer, at any age of the samples.

TRL's loss clips the ratio of the trained policy to the sampler, over all M trained tokens of a row:

    L = -mean_t min(R_t A_t, clip(R_t, 1 - e_lo, 1 + e_hi) A_t),    R_t = exp(logps_t - old_log_probs_t)

With `coupled` that is the loss. Every other correction puts a proximal policy between the two, and a weight before A:

    old_log_probs_t := proximal_t        A_t := w_t A_t,    w_t of exp(proximal_t - rollout_logps_t)

| proximal policy | `proximal_t` | R |
|---|---|---|
| the policy at the update | `logps_t` of the loss's own forward pass, detached | 1 |
| `proximal_pass`: the policy at the last sync | what [`AsyncCorrection.scores`] returned then | 1 until an update |

Where R is 1, no clip acts, and the weight alone answers for the sampler's precision and for its age:

    grad L = -mean_t w_t A_t grad logps_t

TRL reads `old_log_probs` and `advantages` before its forward pass. So [`Late`] takes their places: what TRL reads of it
is a tensor that is filled when the forward pass has ended.

Weights of a sequence are those of a sample's trained tokens, and those that need a whole batch (`ais`) take the
micro-batch of all ranks.
"""

from contextlib import suppress

import torch
from torch import Tensor

from ...corrections.acr import rescued
from ...corrections.batch import corrected, sampling_metrics
from ...corrections.traits import Correction
from ...trl_seams import exchanged


# TRL's metrics of a ratio whose value is 1
OF_THE_RATIO = ("ratio", "kl", *(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean")))
OF_THE_RATIO += ("clip_ratio/low_min", "clip_ratio/high_max")


class Late:
    """
    Stands for an entry of a batch that TRL reads before it is known.

    Args:
        values (`torch.Tensor`): The entry's values, (1, M) with padding.

    Attributes:
        read (`torch.Tensor`): What TRL has read, (M,). To be written in place.
    """

    def __init__(self, values: Tensor):
        self.values = values

    def __getitem__(self, selected: Tensor) -> Tensor:
        self.read = self.values[selected]
        return self.read


class HasScored(Exception):
    """Ends TRL's loss after its forward pass."""


class AsyncCorrection:
    """
    The correction of an asynchronous trainer. It has no state between two losses.

    Args:
        trainer ([`QuantAsyncGRPOTrainer`]): The trainer.
        correction ([`~corrections.traits.Correction`]): The correction.
    """

    def __init__(self, trainer, correction: Correction):
        self.trainer, self.correction = trainer, correction

    @torch.no_grad()
    def scores(self, compute, model, inputs: dict[str, Tensor]) -> Tensor:
        """
        Returns the log-probabilities, in nats, of a micro-batch's trained tokens under the policy as it is now, (1, M).
        On padding they have no meaning. All ranks must call it.

        Args:
            compute (`Callable`): TRL's `compute_loss`, which makes the forward pass.
            model: The policy.
            inputs (`dict[str, torch.Tensor]`): The micro-batch of this rank.
        """
        found = []

        def scored(**row):
            found.append(model(**row).log_probs.flatten())
            raise HasScored

        with suppress(HasScored), self.trainer.compute_loss_context_manager():
            compute(scored, inputs)
        return found[0][inputs["token_index"].clamp(min=0)]

    def loss(self, compute, model, inputs: dict[str, Tensor], **given) -> Tensor:
        """
        Computes TRL's loss of a micro-batch, corrected, and logs the mismatch.

        Args:
            compute (`Callable`): TRL's `compute_loss`.
            model: The policy.
            inputs (`dict[str, torch.Tensor]`): The micro-batch of this rank, with `ages` and `turns` (1, M) and,
                with `proximal_pass`, their [`scores`] as `proximal` (1, M).
            given: TRL's further arguments.
        """
        trainer, late = self.trainer, {name: Late(inputs[name]) for name in ("old_log_probs", "advantages")}
        names = [name for name in ("token_index", "segment_id", "ages", "turns", "proximal") if name in inputs]
        selected = inputs["token_index"] >= 0
        tokens = {name: inputs[name][selected] for name in names}

        def scored(**row):
            outputs = model(**row)
            self._fill(late, outputs.log_probs.detach().flatten()[tokens["token_index"]], tokens)
            return outputs

        # `_fill` may set other clip bounds; the context restores these
        with exchanged(trainer, epsilon_low=trainer.epsilon_low, epsilon_high=trainer.epsilon_high):
            loss = compute(scored, inputs | late, **given)
        if "proximal" not in inputs and not self.correction.clips_sampler:
            for name in OF_THE_RATIO:
                trainer._metrics["train"].pop(name, None)
        return loss

    def _fill(self, late: dict[str, Late], logps: Tensor, tokens: dict[str, Tensor]) -> None:
        """Writes what TRL's loss reads next, and logs. `logps` and `tokens` are of the trained tokens, (M,)."""
        trainer, rows = self.trainer, Rows(tokens["segment_id"])
        sampled, advantages = (late[name].read for name in ("old_log_probs", "advantages"))
        proximal = tokens.get("proximal", logps).to(sampled.dtype)
        batch = {
            "sampling_per_token_logps": rows.padded(sampled),
            "old_per_token_logps": rows.padded(proximal),
            "advantages": rows.padded(advantages),
            "completion_mask": rows.padded(torch.ones_like(sampled)),
            "ages": rows.padded(tokens["ages"]),
            "turns": rows.padded(tokens["turns"]),
        }
        output = corrected(self.correction, batch, "token")
        trainer.log_values(output.metrics)
        if self.correction.clips_sampler:
            return
        trainer.log_values(sampling_metrics(batch, output.weights, trainer.accelerator.gather))
        if output.clip_high is not None:
            clipped = batch | {"clip_high": output.clip_high}
            share = rescued(rows.padded(logps), clipped, batch["completion_mask"], trainer.epsilon_high)
            trainer.log_values({"mismatch/rescued_fraction": trainer.accelerator.gather(share).mean().item()})
            low, high = rows.taken(output.clip_low), rows.taken(output.clip_high)
            trainer.epsilon_low, trainer.epsilon_high = 1 - low, high - 1
        sampled.copy_(proximal)
        advantages.mul_(rows.taken(output.weights))


class Rows:
    """
    The trained tokens of samples, one sample's after the other, as rows of a padded tensor.

    Args:
        segments (`torch.Tensor`): (M,), the number of each token's sample, in order.
    """

    def __init__(self, segments: Tensor):
        _, self.row, lengths = segments.unique_consecutive(return_inverse=True, return_counts=True)
        starts = lengths.cumsum(0) - lengths
        self.column = torch.arange(len(segments), device=segments.device) - starts[self.row]
        self.shape = len(lengths), int(lengths.max()) if len(lengths) else 0

    def padded(self, x: Tensor) -> Tensor:
        """Returns values (M,) as (B, T), with zeros on padding."""
        padded = x.new_zeros(self.shape)
        padded[self.row, self.column] = x
        return padded

    def taken(self, x: Tensor) -> Tensor:
        """Returns the values (M,) of a padded tensor (B, T)."""
        return x[self.row, self.column]
