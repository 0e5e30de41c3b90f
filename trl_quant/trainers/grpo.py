"""`QuantGRPOTrainer` and `AISGRPOTrainer`: quantized rollouts for TRL's `GRPOTrainer`, and a correction in its loss."""

from trl import GRPOTrainer

from ..config import AISGRPOConfig, QuantGRPOConfig
from ..corrections.batch import counted
from ..rollout.sampling_options import biasing_options
from .checks import config_for
from .correction_step import CorrectionStep, scores_in_one_pass
from .introduction import PACKAGE_TAG
from .sampling import QuantSampling
from .ties import tied


class QuantGRPOTrainer(QuantSampling, GRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] with quantized rollouts and a correction for them. It takes the arguments of
    `GRPOTrainer`. With [`QuantGRPOConfig`]'s defaults, a plain [`~trl.GRPOConfig`] or `args=None` it is `GRPOTrainer`.

    ```python
    >>> trainer = QuantGRPOTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=strict_math_reward,
    ...     args=QuantGRPOConfig(use_vllm=True, rollout_precision="fp8"),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    A step whose loss or gradient is not finite ends the run before the optimizer takes it, and weights that are not
    finite are never saved (see [`runs.finite`]). To free the memory of a vLLM engine, for example in a notebook,
    run `del trainer; gc.collect()`.

    Attributes:
        one_pass (`bool`): Whether the loss's own forward pass also scores the tokens for the correction (see
            [`~trainers.correction_step.CorrectionStep`]).
        correction_step ([`~trainers.correction_step.CorrectionStep`]): The correction and its state.
    """

    config_class = QuantGRPOConfig
    _tag_names = [*GRPOTrainer._tag_names, PACKAGE_TAG]

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        args = config_for(self, model, args)
        correction = args.correction()
        self.one_pass = scores_in_one_pass(correction, args.one_update_per_generation)
        same_bits = args.samples_same_bits and not biasing_options(args)
        self.correction_step = CorrectionStep(self, correction, args.importance_sampling_level, same_bits)
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
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )

    def fields_while_built(self, args) -> dict:
        # Our weights replace TRL's ratio. VESPO accepts only a ratio for each token, which our weights are.
        if args.loss_type == "vespo" and not args.correction_class.applied_by_trl:
            return {"vllm_importance_sampling_mode": "token_truncate"}
        return {}

    # The correction, in the order of `CorrectionStep`'s list of calls

    def _generate_and_score_completions(self, inputs):
        with self.correction_step.scoring():
            output = super()._generate_and_score_completions(inputs)
        self.correct(output)
        return output

    def _generate(self, prompts):
        generated = super()._generate(prompts)
        self.correction_step.take_samples(generated[4])  # log-probabilities of the completions' tokens
        return generated

    def correct(self, batch) -> None:
        """Corrects a generation in place, before its first loss (see [`~trainers.correction_step.CorrectionStep`])."""
        self.correction_step.before_loss(batch)

    def _compute_loss(self, model, inputs):
        with self.correction_step.during_loss(inputs) as batch:
            return super()._compute_loss(model, batch)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if self.correction_step.saves_pass():
            return self.correction_step.take_old_logps(), None, None
        logps, entropies, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.correction_step.write_into_open_batch(logps.detach())
        batch = self.correction_step.open_batch
        if self.packs and batch is not None and entropies is not None and self.top_entropy_quantile < 1.0:
            entropies = tied(entropies, counted(batch), batch, self.accelerator)
        return logps, entropies, *others


class AISGRPOTrainer(QuantGRPOTrainer):
    """[`QuantGRPOTrainer`] with AIS-GRPO's defaults ([`AISGRPOConfig`]): adaptive weights, unnormalised advantages."""

    config_class = AISGRPOConfig
