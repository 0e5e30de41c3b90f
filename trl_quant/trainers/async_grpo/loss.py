"""
A correction in the loss of TRL's asynchronous trainer, at any age of the samples.

TRL's loss clips the ratio of the trained policy to the sampler, over all M trained tokens of a row:

    L = -mean_t min(R_t A_t, clip(R_t, 1 - e_lo, 1 + e_hi) A_t),    R_t = exp(logps_t - old_log_probs_t)

With `coupled` that is the loss. Every other correction takes the policy at the moment of training as the proximal one.
The loss's own forward pass computes it, so the value of R is 1, no clip acts, and the weight alone answers for the
sampler's precision and for its age:

    old_log_probs_t := logps_t, detached        A_t := w_t A_t        grad L = -mean_t w_t A_t grad logps_t

TRL reads `old_log_probs` and `advantages` before its forward pass. So [`Late`] takes their places: what TRL reads of it
is a tensor that is filled when the forward pass has ended.

Weights of a sequence are those of a sample's trained tokens, and those that need a whole batch (`ais`) take the
micro-batch of all ranks.
"""

import torch
from torch import Tensor

from ...corrections.batch import corrected, sampling_metrics
from ...corrections.traits import Correction


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


class AsyncCorrection:
    """
    The correction of an asynchronous trainer. It has no state between two losses.

    Args:
        trainer ([`QuantAsyncGRPOTrainer`]): The trainer.
        correction ([`~corrections.traits.Correction`]): The correction.
    """

    def __init__(self, trainer, correction: Correction):
        self.trainer, self.correction = trainer, correction

    def loss(self, compute, model, inputs: dict[str, Tensor], **given) -> Tensor:
        """
        Computes TRL's loss of a micro-batch, corrected, and logs the mismatch.

        Args:
            compute (`Callable`): TRL's `compute_loss`.
            model: The policy.
            inputs (`dict[str, torch.Tensor]`): The micro-batch of this rank, with `ages` (1, M).
            given: TRL's further arguments.
        """
        late = {name: Late(inputs[name]) for name in ("old_log_probs", "advantages")}
        selected = inputs["token_index"] >= 0
        places, segments, ages = (inputs[name][selected] for name in ("token_index", "segment_id", "ages"))
        changes_loss = False

        def scored(**row):
            nonlocal changes_loss
            outputs = model(**row)
            logps = outputs.log_probs.detach().flatten()[places]
            changes_loss = self._fill(late, logps, segments, ages)
            return outputs

        loss = compute(scored, inputs | late, **given)
        if changes_loss:
            for name in OF_THE_RATIO:
                self.trainer._metrics["train"].pop(name, None)
        return loss

    def _fill(self, late: dict[str, Late], logps: Tensor, segments: Tensor, ages: Tensor) -> bool:
        """Writes what TRL's loss reads next, and logs. Returns whether the loss is another than TRL's."""
        sampled, advantages = (late[name].read for name in ("old_log_probs", "advantages"))
        rows = Rows(segments)
        batch = {
            "sampling_per_token_logps": rows.padded(sampled),
            "old_per_token_logps": rows.padded(logps.to(sampled.dtype)),
            "advantages": rows.padded(advantages),
            "completion_mask": rows.padded(torch.ones_like(sampled)),
            "ages": rows.padded(ages),
        }
        output = corrected(self.correction, batch, "token")
        trainer = self.trainer
        trainer.log_values(output.metrics)
        if output.old_logps is not None:  # the sampler is the proximal policy, as in TRL's loss
            return False
        trainer.log_values(sampling_metrics(batch, output.weights, trainer.accelerator.gather))
        sampled.copy_(logps)
        advantages.mul_(rows.taken(output.weights))
        return True


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
