"""Applies a correction in TRL's loss: from sampled tokens to the weights that multiply each token's loss.

TRL calls our trainer at five places between a generation and its losses. [`CorrectionStep`] holds the state that those
calls share.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import pad

from ..corrections import Correction, CorrectionOutput
from ..corrections.acr import rescued
from ..corrections.batch import corrected, counted, joined, sampling_metrics, write
from ..trl_seams import exchanged


class NoStep:
    """
    Stands in for a [`CorrectionStep`] and leaves everything to TRL: in a trainer without a correction, and in one that
    was made without its constructor, as tests of single methods do.
    """

    correction = open_batch = None

    def scoring(self) -> AbstractContextManager:
        return nullcontext()

    def during_loss(self, batch: dict[str, Tensor]) -> AbstractContextManager:
        return nullcontext(batch)

    def saves_pass(self) -> bool:
        return False

    def weighted(self, logps: Tensor) -> Tensor:
        return logps

    def state_dict(self) -> dict:
        return {}

    def take_samples(self, *samples) -> None: ...

    take_turns = before_loss = write_into_open_batch = keep_old_logps = load_state_dict = take_samples


class CorrectionStep:
    """
    The correction of one trainer, and its state between two calls of TRL.

    A correction needs three numbers for each token: the sampler's log-probability, the old policy's log-probability and
    the advantage. The engine returns the sampler's log-probabilities with the tokens. The old policy's come from one of
    two places, as `trainer.one_pass` says:

    - `one_pass=False`, several updates per generation: the policy moves between the updates, so TRL scores the whole
      generation before the first loss, in an extra forward pass. If the sampler's log-probabilities equal the trainer's
      bit for bit (`exact_rollouts`), they replace that pass.
    - `one_pass=True`: the policy of the loss is the old policy, so the loss's own forward pass scores the tokens, R =
      1, and no extra pass is needed. This holds if a generation serves one update, or if the correction compares the
      sampler with the current policy at each update (`every_update`).

    The calls in their order, with what is read and written at each:

    1. `_generate_and_score_completions` begins. [`scoring`] lets TRL score the generation, unless `one_pass`.
    2. TRL samples, and [`take_samples`] gets the sampler's log-probabilities.
    3. If TRL scores the generation, it calls `_get_per_token_logps_and_entropies`. [`saves_pass`] says whether
       [`take_old_logps`] replaces that pass.
    4. `_generate_and_score_completions` ends. Its batch has `sampling_per_token_logps`, `advantages` and, if scored,
       `old_per_token_logps`. [`before_loss`] reads these three, writes `importance_sampling_ratio` into the batch (for
       some corrections also clip bounds or other `old_per_token_logps`), and logs. With `one_pass` it does nothing.
    5. TRL shuffles the batch, including the tensors written so far, and splits it into micro-batches.
    6. `_compute_loss` begins, for each micro-batch of each update. [`during_loss`] opens a copy of the micro-batch.
    7. TRL's loss calls `_get_per_token_logps_and_entropies`. [`write_into_open_batch`] gets the log-probabilities of
       the current policy. With `one_pass`, it writes them as `old_per_token_logps`, so R = 1, then writes what
       [`before_loss`] would have written, and logs after the last micro-batch of the generation. If the sampler's
       log-probabilities replaced a pass, it measures the mismatch here, and logs after the last micro-batch of the
       first update, because until then the policy is the one that was sampled from. If the batch has clip bounds for
       each token, it sets the trainer's `epsilon_low` and `epsilon_high` to them.
    8. The rest of TRL's loss reads `importance_sampling_ratio`, `old_per_token_logps` and both epsilons.
    9. `_compute_loss` ends. [`during_loss`] drops the copy and restores the epsilons.

    A loss never changes the batch that TRL buffers, so a second update reads the same batch.

    Args:
        trainer ([`~trl.GRPOTrainer`]): The trainer, with `one_pass` and the methods of [`~trainers.sampling`].
        correction ([`~corrections.traits.Correction`] or `None`): `None` leaves everything to TRL.
        level (`str`): `importance_sampling_level`, `"token"` or `"sequence"`.
        same_bits (`bool`): Whether the sampler's log-probabilities equal the trainer's bit for bit.

    Attributes:
        open_batch (`dict` or `None`): The micro-batch whose loss TRL is computing; `None` outside of a loss.
        samples (`list` or `None`): The sampler's log-probabilities of each completion, until TRL scores it.
        seen (`dict[str, list[dict]]`): For `"train"` and `"eval"`, the micro-batches of the generation that a loss has
            scored and that have not been logged.
        awaited (`dict[str, int]`): For `"train"` and `"eval"`, if a generation's scoring pass was replaced and its
            metrics are not logged yet: the number of micro-batches after which to log them; else 0.
    """

    def __init__(self, trainer: GRPOTrainer, correction: Correction | None, level: str, same_bits: bool):
        self.trainer, self.correction, self.level, self.same_bits = trainer, correction, level, same_bits
        self.open_batch: dict[str, Tensor] | None = None
        self.samples: list[list[float | None]] | None = None
        self.seen: dict[str, list[dict[str, Tensor]]] = {"train": [], "eval": []}
        self.awaited = {"train": 0, "eval": 0}

    @property
    def mode(self) -> str:
        """The mode of the trainer, `"train"` or `"eval"`."""
        return "train" if self.trainer.model.training else "eval"

    @property
    def trl_scores(self) -> bool:
        """Whether TRL scores a whole generation before the first loss."""
        return self.trainer.vllm_importance_sampling_correction and not self.trainer.one_pass

    @property
    def trl_logs(self) -> bool:
        """Whether TRL has logged `sampling/*` metrics of its own ratio, which [`log`] then replaces."""
        return not self.trainer.one_pass

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context of TRL's `_generate_and_score_completions`. First drops the micro-batches of the last generation."""
        self.forget_last()
        with self.sampled(), exchanged(self.trainer, vllm_importance_sampling_correction=self.trl_scores):
            yield

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Context of one generation, which begins and ends without samples."""
        self.samples = None
        try:
            yield
        finally:
            self.samples = None

    def forget_last(self) -> None:
        """Drops the micro-batches of the last generation, and metrics of it that have not been logged."""
        self.seen[self.mode], self.awaited[self.mode] = [], 0

    def state_dict(self) -> dict:
        """Returns the state of the generation in training, for a checkpoint between two of its optimizer steps."""
        return {"seen": self.seen["train"], "unseen": self.awaited["train"]}  # keys that older checkpoints use too

    def load_state_dict(self, state: dict) -> None:
        """Loads the result of [`state_dict`]."""
        self.seen["train"], self.awaited["train"] = state["seen"], state["unseen"]

    def take_samples(self, logps: list[list[float | None]] | None) -> None:
        """Takes the sampler's log-probabilities of each completion, or `None` if the sampler returns none."""
        if logps is None and self.trainer.args.vllm_importance_sampling_correction:
            self.refuse_missing_logps()
        self.samples = logps

    def refuse_missing_logps(self) -> None:
        """Raises `ValueError`, because the sampler returned no log-probabilities, if the correction needs them."""
        if self.correction is not None and self.trainer.use_vllm:
            raise ValueError(
                f"{type(self.trainer).__name__} sampled without the log-probabilities that the run compares with the "
                "trainer's. A subclass that overrides `_generate_single_turn` must call `super()` or the engine, "
                "`vllm_generation`, or leave `rollout_precision` unset, which does not act on other samples."
            )

    def saves_pass(self) -> bool:
        """
        Whether [`take_old_logps`] replaces TRL's next pass. It can replace only the first pass after sampling, and only
        if that pass scores the old policy.
        """
        if self.samples is None or self.correction is None or self.correction.applied_by_trl:
            return False
        if self.trainer.one_pass:
            return not self.trainer.args.one_update_per_generation  # else TRL makes no such pass
        return self.knows_old_logps()

    def knows_old_logps(self) -> bool:
        """Whether the sampler's log-probabilities equal the old policy's for every token."""
        return self.same_bits and all(logp is not None for row in self.samples for logp in row)

    def take_old_logps(self) -> Tensor | None:
        """
        Returns the replacement for the result of TRL's pass: the sampler's log-probabilities `(B, T)`, with zeros on
        padding; with `one_pass` `None`, because each loss scores its own tokens. It replaces one pass: TRL computes any
        further pass over the generation.
        """
        samples, self.samples = self.samples, None
        if self.trainer.one_pass:
            return None
        self.measure_in_first_update()
        return self.padded(samples)

    def measure_in_first_update(self) -> None:
        """Postpones the metrics of this generation until the losses of its first update have scored it."""
        if self.mode == "eval":
            self.awaited["eval"] = 1
            return
        args = self.trainer.args
        left_of_update = args.gradient_accumulation_steps - self.trainer._step % args.gradient_accumulation_steps
        self.awaited["train"] = min(left_of_update, args.steps_per_generation)

    def padded(self, samples: list[list[float | None]]) -> Tensor:
        """Returns log-probabilities as TRL pads completions, `(B, T)`: zeros on padding, NaN where one is unknown."""
        rows = [torch.tensor([math.nan if logp is None else logp for logp in row]) for row in samples]
        multiple = self.trainer.pad_to_multiple_of
        padded = pad(rows, padding_value=0.0, padding_side="right", pad_to_multiple_of=multiple)
        return padded.to(self.trainer.accelerator.device)

    def before_loss(self, batch: dict[str, Tensor]) -> None:
        """Corrects a generation that TRL has scored: writes the weights into `batch`, and logs."""
        if not self.trl_scores or self.correction is None or batch.get("sampling_per_token_logps") is None:
            return
        output = corrected(self.correction, batch, self.level)
        if not self.awaited[self.mode]:
            self.log(batch, output)
        write(output, batch)

    @contextmanager
    def during_loss(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Context of TRL's `_compute_loss`, which must be given the copy of `batch` that this yields."""
        trainer = self.trainer
        # `write_into_open_batch` may set other bounds inside the context. Its exit restores these.
        with (
            exchanged(trainer, epsilon_low=trainer.epsilon_low, epsilon_high=trainer.epsilon_high),
            self.opened(batch) as open_batch,
        ):
            yield open_batch

    @contextmanager
    def opened(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Context in which a copy of `batch`, which it yields, is the open micro-batch."""
        self.open_batch = dict(batch)
        try:
            yield self.open_batch
        finally:
            self.open_batch = None

    def write_into_open_batch(self, logps: Tensor) -> None:
        """
        Writes the tensors that the rest of TRL's loss reads. Outside of a loss it does nothing.

        Args:
            logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the current policy in nats, detached, which the loss has just computed.
        """
        batch = self.open_batch
        if batch is None:
            return
        if self.trainer.step_scaling is not None:
            self.trainer.step_scaling.add(batch, logps)
        if self.trainer.one_pass and "sampling_per_token_logps" in batch:
            batch["old_per_token_logps"] = logps
            scored = dict(batch)
            output = corrected(self.correction, scored, self.level)
            write(output, batch)
            self._log_after_last(scored, output, self.trainer.args.steps_per_generation if self.mode == "train" else 1)
        elif self.awaited[self.mode]:
            scored = batch | {"old_per_token_logps": logps}
            self._log_after_last(scored, corrected(self.correction, scored, self.level), self.awaited[self.mode])
        if "clip_high" in batch:
            self._set_clip_bounds(batch, logps)

    def _log_after_last(self, batch: dict[str, Tensor], output: CorrectionOutput, parts: int) -> None:
        """Logs the metrics of `parts` micro-batches once all are seen. `batch` and `output` are those of the newest."""
        seen = self.seen[self.mode]
        seen.append(batch)
        if len(seen) < parts:
            return
        self.forget_last()
        if parts == 1:
            self.log(batch, output)
        else:
            whole = joined(seen)
            self.log(whole, corrected(self.correction, whole, self.level))

    def _set_clip_bounds(self, batch: dict[str, Tensor], logps: Tensor) -> None:
        """Gives TRL's loss the clip bounds of each token (QuRL eq. 9), and logs the share of rescued tokens."""
        trainer = self.trainer
        share = rescued(logps, batch, counted(batch), trainer.epsilon_high)
        trainer.log_values({"mismatch/rescued_fraction": trainer.accelerator.gather(share).mean().item()})
        # TRL clamps the ratio to [1 - epsilon_low, 1 + epsilon_high]; near 1 both subtractions are exact.
        trainer.epsilon_low, trainer.epsilon_high = 1 - batch["clip_low"], batch["clip_high"] - 1

    def log(self, batch: dict[str, Tensor], output: CorrectionOutput) -> None:
        """Logs the metrics of a whole generation, and TRL's `sampling/*` metrics for weights that replace TRL's."""
        trainer = self.trainer
        trainer.log_values(output.metrics)
        if output.weights is None:  # TRL has logged its own
            return
        metrics = sampling_metrics(batch, output.weights, trainer.accelerator.gather)
        if self.trl_logs:
            trainer.replace_values(metrics)
        else:
            trainer.log_values(metrics)


def scores_in_one_pass(correction: Correction | None, one_update_per_generation: bool) -> bool:
    """Whether the loss's own forward pass also scores the tokens for the correction, so that TRL's pass is skipped."""
    if correction is None:
        return False
    if correction.every_update:
        return True
    return one_update_per_generation and not correction.whole_batch
