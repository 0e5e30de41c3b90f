"""`QuantRLOOTrainer`: quantized rollouts for TRL's `RLOOTrainer`, and a correction in its loss.

RLOO maximises, with the ratio `R` of a whole completion,

    J = E[ min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ],    R = exp(sum_t (logps_t - old_logps_t))

    grad J = E[ R A sum_t grad logps_t ]    where `R` is not clipped

Its loss takes no weights for tokens. [`RLOOCorrectionStep`] gives each token a weight all the same, through the
log-probability that the loss gets:

    logps'_t = logps_t.detach() + w_t (logps_t - logps_t.detach())

The value is that of `logps_t`, so `R` and what is clipped stay as they are. The gradient is `w_t` times as large, so

    grad J = E[ R A sum_t w_t grad logps_t ]

The logged loss has no weights in it for that reason; only the gradient has.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from trl import RLOOTrainer

from ..config import QuantRLOOConfig
from ..config.preflight import name_of
from ..rollout.sampling_options import biasing_options
from ..trl_seams import exchanged
from .checks import check_method
from .correction_step import scores_in_one_pass
from .hearing import HearingRollouts, HearingStep
from .introduction import PACKAGE_TAG


class RLOOCorrectionStep(HearingStep):
    """
    The correction of an RLOO trainer, and its state between two calls of TRL. Without a correction it does nothing.

    TRL's RLOO always scores the old policy, because its loss reads the sum over each completion. So every token has a
    ratio. In one pass, the current policy takes the old policy's place at each update, so R = 1. TRL's scoring pass is
    then saved, unless the KL term of the rewards reads its result too.

    The calls in their order, with what is read and written at each:

    1. `_generate_and_score_completions` begins. [`scoring`] forgets the last generation.
    2. TRL samples. [`listening`] stands between it and the engine, and hears the log-probabilities.
    3. `_generate` ends. [`take_samples`] keeps them for the tokens of the completions.
    4. TRL scores the old policy. [`saves_pass`] says whether [`take_old_logps`] stands in for that pass, and
       [`keep_old_logps`] keeps its result. The next pass, if there is one, is the reference's.
    5. `_generate_and_score_completions` ends. [`before_loss`] adds `sampling_per_token_logps` and
       `old_per_token_logps` to the batch. Except in one pass, it then corrects the generation as for GRPO.
    6. TRL shuffles the batch and splits it into micro-batches. What was written moves with its rows.
    7. `_compute_loss` begins, for each micro-batch of each update. [`during_loss`] opens a copy of the micro-batch.
    8. TRL's loss scores the current policy. [`weighted`] gives it the log-probabilities of the module's docstring, and
       writes `old_logps`, the sum over each completion, from the old policy of the correction.
    9. `_compute_loss` ends, and the copy is dropped.

    Attributes:
        old_logps (`torch.Tensor` or `None`): The old policy's log-probabilities `(B, T)` of the generation in work.
    """

    old_logps: Tensor | None = None

    @property
    def trl_scores(self) -> bool:
        return not self.trainer.one_pass

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with super().scoring(), exchanged(self, old_logps=None):
            yield

    def saves_pass(self) -> bool:
        """Whether [`take_old_logps`] replaces the next pass of TRL: the first one after it sampled."""
        if self.old_logps is not None or self.samples is None:
            return False
        is_unread = self.trainer.one_pass and not self.trainer.args.needs_reference
        return is_unread or self.knows_old_logps()

    def take_old_logps(self) -> Tensor:
        """
        Returns what stands in for the result of TRL's pass, `(B, T)`: the sampler's log-probabilities. In one pass,
        each loss overwrites them with its own.
        """
        if not self.trainer.one_pass:
            self.measure_in_first_update()
        self.old_logps = self.padded(self.samples)
        return self.old_logps

    def keep_old_logps(self, logps: Tensor) -> None:
        """Keeps the result of TRL's first pass after it sampled, which is the old policy's; `logps` is detached."""
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
        Returns the log-probabilities that TRL's loss must get, of the same values. Outside of a loss, and without
        weights, they are `logps` themselves.

        Args:
            logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the current policy in nats, just computed in the loss, with their gradient.
        """
        value = logps.detach()
        self.write_into_open_batch(value)
        batch = self.open_batch
        if batch is None or "importance_sampling_ratio" not in batch:
            return logps
        batch["old_logps"] = (batch["old_per_token_logps"] * batch["completion_mask"]).sum(1)
        return value + batch["importance_sampling_ratio"].to(value.dtype) * (logps - value)


class QuantRLOOTrainer(HearingRollouts, RLOOTrainer):
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
        one_pass (`bool`): Whether the loss's own forward scores the tokens for the correction: with `beta=0` and one
            update per generation, or if the correction compares the sampler with the current policy at each update.
        correction_step ([`RLOOCorrectionStep`]): The correction, on its way through TRL's loss.
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
        name = name_of(model)
        if args is None:
            args = self.config_class(f"{name.split('/')[-1]}-RLOO")
        elif not isinstance(args, QuantRLOOConfig):
            args = self.config_class.from_trl(args)
        check_method(self, args)
        correction = args.correction()
        is_read_once = args.one_update_per_generation and not args.needs_reference
        self.one_pass = scores_in_one_pass(correction, is_read_once)
        same_bits = args.exact_rollouts and not biasing_options(args)
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

    # The correction of the loss. `HearingRollouts` makes the earlier calls of `RLOOCorrectionStep`'s timeline

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
