"""`QuantRLOOTrainer`: quantized rollouts for TRL's `RLOOTrainer`, and a correction in its loss.

RLOO maximises, with the ratio `R` of a whole completion,

    J = E[ min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ],    R = exp(sum_t (logps_t - old_logps_t))

    grad J = E[ R A sum_t grad logps_t ]    where `R` is not clipped

Its loss accepts no weights for single tokens. [`RLOOCorrectionStep`] applies a weight w_t to each token through the
log-probability that it passes to the loss:

    logps'_t = logps_t.detach() + w_t (logps_t - logps_t.detach())

The value of logps'_t equals that of logps_t, so neither `R` nor the clipping changes. Its gradient is `w_t` times as
large, so

    grad J = E[ R A sum_t w_t grad logps_t ]

The weights therefore change the gradient, but not the logged loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from trl import RLOOTrainer

from ..config import QuantRLOOConfig
from ..rollout.sampling_options import biasing_options
from .checks import config_for
from .correction_step import scores_in_one_pass
from .introduction import PACKAGE_TAG
from .recorded import RecordedRollouts, RecordedStep


class RLOOCorrectionStep(RecordedStep):
    """
    The correction of an RLOO trainer, and its state between two calls of TRL. Without a correction it does nothing.

    TRL's RLOO always scores the old policy, because its loss reads the sum over each completion. So every token has a
    ratio. With `one_pass`, the current policy takes the old policy's place at each update, so R = 1. TRL's scoring pass
    is then skipped, unless the KL term of the rewards needs its result.

    The calls in their order, with what is read and written at each:

    1. `_generate_and_score_completions` begins. [`scoring`] drops the state of the last generation.
    2. TRL samples, and `vllm_generation` records the log-probabilities.
    3. `_generate` ends. [`take_turns`] keeps them for the tokens of the completions.
    4. TRL scores the old policy. [`saves_pass`] says whether [`take_old_logps`] replaces that pass, and
       [`keep_old_logps`] keeps the result. The next pass, if there is one, is the reference's.
    5. `_generate_and_score_completions` ends. [`before_loss`] adds `sampling_per_token_logps` and
       `old_per_token_logps` to the batch. Without `one_pass`, it then corrects the generation as for GRPO.
    6. TRL shuffles the batch, including the tensors written so far, and splits it into micro-batches.
    7. `_compute_loss` begins, for each micro-batch of each update. [`during_loss`] opens a copy of the micro-batch.
    8. TRL's loss scores the current policy. [`weighted`] passes it the logps'_t of the module's docstring, and
       writes `old_logps`, the sum over each completion, from the old policy of the correction.
    9. `_compute_loss` ends, and the copy is dropped.

    Attributes:
        old_logps (`torch.Tensor` or `None`): The old policy's log-probabilities `(B, T)` of the newest generation.
    """

    old_logps: Tensor | None = None

    @property
    def trl_scores(self) -> bool:
        return not self.trainer.one_pass

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self.old_logps = None
        with super().scoring():
            yield

    def saves_pass(self) -> bool:
        """Whether [`take_old_logps`] replaces TRL's next pass. It can replace only the first pass after sampling."""
        if self.old_logps is not None or self.samples is None:
            return False
        is_unread = self.trainer.one_pass and not self.trainer.args.needs_reference
        return is_unread or self.knows_old_logps()

    def take_old_logps(self) -> Tensor:
        """
        Returns the sampler's log-probabilities `(B, T)` in place of the result of TRL's pass. With `one_pass`, each
        loss overwrites them with its own.
        """
        if not self.trainer.one_pass:
            self.measure_in_first_update()
        self.old_logps = self.padded(self.samples)
        return self.old_logps

    def keep_old_logps(self, logps: Tensor) -> None:
        """Keeps the old policy's log-probabilities `(B, T)`, detached, from TRL's first pass after sampling."""
        if self.samples is not None and self.old_logps is None:
            self.old_logps = logps

    def before_loss(self, batch: dict[str, Tensor]) -> None:
        if self.samples is None:
            return
        batch["sampling_per_token_logps"] = self.padded(self.samples)
        batch["old_per_token_logps"] = self.old_logps
        super().before_loss(batch)

    def weighted(self, logps: Tensor) -> Tensor:
        """
        Returns the log-probabilities to pass to TRL's loss: the values of `logps`, with the gradient of each token
        multiplied by its weight. Outside of a loss, and without weights, returns `logps` itself.

        Args:
            logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the current policy in nats, which the loss has just computed, with gradient.
        """
        value = logps.detach()
        self.write_into_open_batch(value)
        batch = self.open_batch
        if batch is None or "importance_sampling_ratio" not in batch:
            return logps
        batch["old_logps"] = (batch["old_per_token_logps"] * batch["completion_mask"]).sum(1)
        return value + batch["importance_sampling_ratio"].to(value.dtype) * (logps - value)


class QuantRLOOTrainer(RecordedRollouts, RLOOTrainer):
    """
    TRL's [`~trl.RLOOTrainer`] with quantized rollouts and a correction for them. It takes the arguments of
    `RLOOTrainer`. With [`QuantRLOOConfig`]'s defaults, a plain [`~trl.RLOOConfig`] or `args=None` it is `RLOOTrainer`.

    ```python
    >>> trainer = QuantRLOOTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=strict_math_reward,
    ...     args=QuantRLOOConfig(use_vllm=True, rollout_precision="fp8"),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    Attributes:
        one_pass (`bool`): Whether the loss's own forward pass scores the tokens for the correction. This holds with
            `beta=0` and one update per generation, or if the correction compares the sampler with the current policy at
            each update.
        correction_step ([`RLOOCorrectionStep`]): The correction and its state.
    """

    config_class = QuantRLOOConfig
    _tag_names = [*RLOOTrainer._tag_names, PACKAGE_TAG]

    def __init__(
        self,
        model,
        reward_funcs,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
    ):
        args = config_for(self, model, args)
        correction = args.correction()
        is_read_once = args.one_update_per_generation and not args.needs_reference
        self.one_pass = scores_in_one_pass(correction, is_read_once)
        same_bits = args.samples_same_bits and not biasing_options(args)
        self.correction_step = RLOOCorrectionStep(self, correction, args.importance_sampling_level, same_bits)
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )

    # The correction in the loss. `RecordedRollouts` makes the calls of `RLOOCorrectionStep` that come before it

    def _compute_loss(self, model, inputs):
        with self.correction_step.during_loss(inputs) as batch:
            return super()._compute_loss(model, batch)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        step = self.correction_step
        if step.saves_pass():
            return step.take_old_logps(), None, None
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        step.keep_old_logps(logps.detach())
        return step.weighted(logps), *others
