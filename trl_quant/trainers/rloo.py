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

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from trl import RLOOTrainer

from ..config import QuantRLOOConfig
from ..config.preflight import name_of
from ..rollout.sampling_options import biasing_options
from ..trl_seams import exchanged
from .checks import check_method
from .correction_step import CorrectionStep
from .introduction import PACKAGE_TAG
from .quantized import QuantRollouts


class Heard:
    """Stands in for an engine and passes on what it samples, because TRL's RLOO drops the log-probabilities."""

    def __init__(self, engine, hear: Callable[[list], None]):
        self.engine, self.hear = engine, hear

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def generate(self, *args, **kwargs) -> tuple:
        samples = self.engine.generate(*args, **kwargs)
        self.hear([[drawn for drawn, *_ in row] for row in samples[2]])
        return samples


class RLOOCorrectionStep(CorrectionStep):
    """
    The correction of an RLOO trainer, and its state between two calls of TRL. Without a correction it does nothing.

    TRL's RLOO always scores the old policy, whose sum over a completion its loss reads, so there is a ratio for every
    token. In one pass (`every_update`) the current policy takes its place at each update, and R = 1.

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
        heard (`list` or `None`): The log-probability of each sampled token, until `_generate` ends.
        old_logps (`torch.Tensor` or `None`): The old policy's log-probabilities `(B, T)` of the generation in work.
    """

    heard: list[list[float | None]] | None = None
    old_logps: Tensor | None = None

    @property
    def trl_scores(self) -> bool:
        return not self.trainer.one_pass

    @property
    def trl_logs(self) -> bool:
        return False

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self.forget_last()
        with exchanged(self, samples=None, heard=None, old_logps=None):
            yield

    def listening(self) -> AbstractContextManager:
        """Context of TRL's `_generate_single_turn`."""
        trainer = self.trainer
        if self.correction is None or not trainer.use_vllm:
            return nullcontext()
        return exchanged(trainer, vllm_generation=Heard(trainer.vllm_generation, self.hear))

    def hear(self, logps: list[list[float | None]]) -> None:
        self.heard = logps

    def take_samples(self, completions: list[list[int]]) -> None:
        """Takes what was heard of each completion. A subclass of the trainer may have cut it."""
        if self.heard is not None:
            self.samples = [logps[: len(ids)] for logps, ids in zip(self.heard, completions, strict=True)]

    def saves_pass(self) -> bool:
        """Whether [`take_old_logps`] replaces the next pass of TRL: the first one after it sampled."""
        return self.old_logps is None and self.samples is not None and self.knows_old_logps()

    def take_old_logps(self) -> Tensor:
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


class QuantRLOOTrainer(QuantRollouts, RLOOTrainer):
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
        one_pass (`bool`): Whether the correction compares the sampler with the current policy at each update.
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
        self.one_pass = correction is not None and correction.every_update
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
        if correction is not None and self.use_vllm:
            self.vllm_generation.logprobs = 0  # the drawn token's; TRL asks for none

    # The correction, in the order of `RLOOCorrectionStep`'s timeline

    def _generate_and_score_completions(self, inputs):
        with self.correction_step.scoring():
            output = super()._generate_and_score_completions(inputs)
            self.correction_step.before_loss(output)
        return output

    def _generate_single_turn(self, *args, **kwargs):
        with self.correction_step.listening():
            return super()._generate_single_turn(*args, **kwargs)

    def _generate(self, prompts):
        generated = super()._generate(prompts)
        self.correction_step.take_samples(generated[1])  # token ids of the completions
        return generated

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
