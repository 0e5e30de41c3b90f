"""What a trainer of TRL's samples with: an engine instead of TRL's own.

    class QuantGRPOTrainer(QuantSampling, GRPOTrainer): ...

[`QuantSampling`] is the first base class. It builds the engine, gives it the policy's weights and noise before each
generation, and checks what it samples. [`~trainers.precision.QuantPrecision`] is what the trainer computes with.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from trl.extras.profiling import profiling_context

from ..policy.adapters import leave_casts_to_autocast
from ..rollout import EngineSpec, RolloutEngine, RolloutNoise, build_engine, engine_of
from ..rollout.engine import Engine, Enough, Request, Samples
from ..rollout.trl_face import QuantGeneration
from ..runs import checkpoints, unfinished
from . import phases
from .carried import CarriedStep
from .checks import DrawnPrompts, check_ends_early, check_model, tell_noise
from .correction_step import CorrectionStep, NoStep
from .dynamic_sampling import DynamicPool
from .kept import KeptStep, kept_step
from .pool import RolloutPool
from .positions import check_rows, fix_choice, models_of, own_prompts
from .precision import QuantPrecision, follow_engine, train_as_sampled
from .routing import RoutingStep, routing_step
from .step_scaling import StepScaling


logger = logging.getLogger(__name__)


class QuantSampling(QuantPrecision):
    """
    Mixin for a trainer of TRL's that builds a `VLLMGeneration` and samples from it, such as `GRPOTrainer`,
    `RLOOTrainer` or `DistillationTrainer`. Without a `rollout_precision`, TRL generates as usual.

    It relies on two more properties of TRL's trainer: its constructor looks up `VLLMGeneration` in its module;
    `_generate` samples a generation, in one or more calls of `_generate_single_turn`.

    The mixin does not use the sampler's log-probabilities. A subclass that corrects its loss for them has a
    [`correction_step`], whose state the mixin saves with an unfinished generation.

    Attributes:
        correction_step ([`~trainers.correction_step.CorrectionStep`]): The correction of the loss, if there is one.
        drawn_prompts ([`~trainers.checks.DrawnPrompts`] or `None`): The check of the prompts of each generation.
        pool ([`~trainers.pool.RolloutPool`] or `None`): The groups that have started and have not been
            returned; `None` if TRL's own order of sampling serves.
        routing ([`~trainers.routing.RoutingStep`] or `None`): The routing of the samples of a mixture of experts;
            `None` if the engine does not return it.
        truncation ([`~trainers.kept.KeptStep`] or `None`): What `top_p`, `top_k` and `min_p` left to draw each token
            from; `None` if the policy scores tokens among all.
        step_scaling ([`~trainers.step_scaling.StepScaling`] or `None`): The scaling of the optimizer's steps, with
            `ess_step_scaling`.
    """

    correction_step: CorrectionStep | NoStep = NoStep()
    drawn_prompts: DrawnPrompts | None = None  # without the constructor, everything is left to TRL's
    pool: RolloutPool | None = None
    routing: RoutingStep | None = None
    truncation: KeptStep | None = None
    step_scaling: StepScaling | None = None
    _engine: RolloutEngine | None = None  # `None` where TRL itself generates
    _has_told_unused = False

    def meet_sampler(self) -> None:
        generation = getattr(self, "vllm_generation", None)
        self._engine = generation.sampler if isinstance(generation, QuantGeneration) else None
        if self._engine is not None:
            leave_casts_to_autocast(self.model)
            tell_noise(self.model, self.args)
        self.drawn_prompts = DrawnPrompts(self, self._engine)
        if self.args.rollouts_in_flight > 1:
            check_ends_early(self.args, generation.engine, self._engine.ends_early)
        self.pool = self._new_pool()
        if self._engine is not None:
            self.truncation, self.routing = kept_step(self, self._engine), routing_step(self, self._engine)
        if self.args.ess_step_scaling:
            self.step_scaling = StepScaling(self)
            self.add_callback(self.step_scaling)

    @property
    def carried(self) -> list[CarriedStep]:
        """What is carried with the samples: the routing and the truncation, in the order in which they stand in."""
        return [step for step in (self.truncation, self.routing) if step is not None]

    def _new_pool(self) -> RolloutPool | None:
        if self.args.dynamic_sampling_rounds:
            return DynamicPool(self, self._engine)
        return RolloutPool(self, self._engine) if self.args.rollouts_in_flight > 1 else None

    def loading(self, args, **fields) -> AbstractContextManager:
        """Context of TRL's constructor, which gets our engine. Where TRL builds its own, models stay as they are."""
        prepared = {"models_loaded": partial(train_as_sampled, self), "engine_built": self._follow}
        return engine_of(type(self), args, **prepared, build=self.build_engine, **fields)

    def _follow(self, engine: RolloutEngine) -> None:
        """Makes the loaded models compute as the engine does, which TRL's constructor has just built."""
        fix_choice(self, engine, models_of(self))
        follow_engine(self, engine)

    def build_engine(self, spec: EngineSpec, model, accelerator, processing_class, **settings) -> Engine:
        """
        Builds the engine that a run with a `rollout_precision` samples from. Override it to sample from an
        [`~rollout.engine.Engine`] of your own. It is called after the models are loaded.

        Args:
            spec ([`~rollout.EngineSpec`]): The engine that the configuration describes.
            model (`nn.Module`): The policy.
            accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
            processing_class: The tokenizer or processor.
            settings: The fields of `SamplingSettings` and of `VLLMSettings`, see [`~rollout.settings`].
        """
        return build_engine(spec, model, accelerator, processing_class, **settings)

    def fix_positions(self, model) -> None:
        """Fixes the positions of one more model as those of the policy, where they depend on the longest row."""
        if self._engine is not None:
            fix_choice(self, self._engine, [model])

    # Generate. All ranks sync, check and add noise together before the first turn. In later turns, no rank waits for
    # another.

    def meet_generation(self, prompts: list) -> None:
        """Checks the policy before a generation of `prompts`, which the engine's checks may compare."""
        self.check_computation()
        if self._engine is not None:
            check_model(self, self._engine)
            self._engine.ask_prompts = partial(own_prompts, self, prompts)

    def _generate(self, prompts):
        if self._engine is None:
            self.check_computation()
            return super()._generate(prompts)
        self.vllm_generation.turns.clear()
        if self.vllm_generation.has_samples:  # of the pool, which has synced the engine
            generated = super()._generate(prompts)
        else:
            self.meet_generation(prompts)
            with self.generation():
                requests = self._engine.requests()
                generated = super()._generate(prompts)
                if requests is not None and self._engine.requests() == requests:
                    self._tell_unused()
        check_rows(self, *generated[:2])
        for step in self.carried:
            step.take(self.vllm_generation.turns, *generated[:2])
        if self.args.noise_schedule is not None and self.model.training:
            self.log_values(self._engine.noise_metrics())
        return generated

    def _tell_unused(self) -> None:
        """Warns once of a generation that was not sampled from the engine, because nothing else in a run shows it."""
        if self._has_told_unused:
            return
        self._has_told_unused = True
        logger.warning(
            "A generation was not sampled from the rollout engine (`trainer.vllm_generation`), so `rollout_precision`="
            "%r did not act on it. A correction compares the trainer with the log-probabilities that came with the "
            "samples. Call `trainer.vllm_generation.generate` in your `rollout_func` or subclass, or unset "
            "`rollout_precision`.",
            self._engine.precision,
        )

    @contextmanager
    def generation(self) -> Iterator[None]:
        """
        Context of one generation: syncs the engine, checks it and adds the noise once, for any number of turns. So TRL
        need not sync, and a `rollout_func` may call the engine directly.
        """
        self._engine.noise = self.rollout_noise()
        self.vllm_generation.begin()
        with ExitStack() as turns:
            with checkpoints.engine_explained(self, self._engine):
                self._sync()
                turns.enter_context(self._engine.generation())
            yield

    def _tokenize_prompts(self, prompts):
        tokenized = super()._tokenize_prompts(prompts)
        if self.pool is not None and self.pool.prompts is not None:
            # As they were when they were sampled: the text of a template may depend on the day
            tokenized = self.pool.prompts, *tokenized[1:]
        if self.drawn_prompts is not None:  # the constructor has run
            self.drawn_prompts.check(tokenized[0])
        return tokenized

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        if self._engine is None:
            if self.pool is not None and self.pool.samples is not None:
                token_ids, logps = self.pool.samples.token_ids, self.pool.samples.logps
                return token_ids, None if any(None in row for row in logps) else logps
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
        self.vllm_generation.multimodal_fields = multimodal_fields
        with checkpoints.engine_explained(self, self._engine):
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)

    def draw(self, requests: list[Request], enough: Enough | None, processed: Mapping[str, Any]) -> Samples:
        """Samples from the engine; see [`~rollout.RolloutEngine.draw`]."""
        with checkpoints.engine_explained(self, self._engine):
            return self._engine.draw(requests, profiling_context(self, phases.IN_VLLM), enough, processed)

    def _sync(self) -> None:
        """
        Syncs the engine at each new step, as TRL does, and whenever the policy's weights have changed since the last
        sync. A generation of the training logs how far the weights moved since the training's generation before it,
        whatever an evaluation synced in between.
        """
        self._engine.drift.evaluates = not self.model.training
        is_new_step = self.state.global_step != self._last_loaded_step
        if not is_new_step and not self._engine.is_stale():
            return
        not_logged = self._engine.sync_metrics  # an evaluation's, whose checks the next step logs
        with profiling_context(self, "sync_weights"):
            self.vllm_generation.sync_weights()
        self._engine.sync_metrics = not_logged | self._engine.sync_metrics
        self._last_loaded_step = self.state.global_step

    def rollout_noise(self) -> RolloutNoise:
        """Returns the noise of the next generation. Each generation of a step has its own; evaluation has none."""
        args, step = self.args, self.state.global_step
        micro_steps_per_generation = args.steps_per_generation * args.num_iterations
        draw = self._step % args.gradient_accumulation_steps // micro_steps_per_generation  # generation of this step
        sigma = args.noise_sigma(step, self.state.max_steps) if self.model.training else 0.0
        return RolloutNoise(sigma, args.seed, step, draw)

    def check_sync(self) -> dict[str, float]:
        """
        Runs [`~rollout.verify.self_check.self_check`] now, after a sync if one is due.

        Returns:
            `dict[str, float]`: Its metrics, `sync_check/*`.

        Raises:
            `ValueError`: The run has no vLLM engine.
        """
        if not hasattr(self._engine, "check_sync"):
            raise ValueError("`check_sync` checks vLLM engines: set `use_vllm=True` and a `rollout_precision`.")
        self._sync()
        self._engine.ask_prompts = self._engine.ask_prompts or partial(own_prompts, self, [])
        metrics = self._engine.check_sync()
        if not self._engine.is_generating:  # in sleep mode, the check woke the engine
            self._engine.rest()
        return metrics

    def _generate_and_score_completions(self, inputs):
        if self.pool is None or not self.model.training:
            output = super()._generate_and_score_completions(inputs)
        else:
            with self.pool.returning(inputs) as rows:
                output = super()._generate_and_score_completions(rows)
            if self.pool.factor > 1:
                output["ages"] = self.pool.ages(like=output["completion_ids"])
        for step in self.carried:
            step.write(output)
        if self._engine is not None and self.model.training:  # an evaluation leaves its metrics for the next step
            self.log_values(self._engine.take_metrics())
        return output

    # Score and train: with the experts that sampled each token, over the tokens that were left to draw it from

    def carrying(self, rows, model, mask):
        for step in self.carried:
            rows = step.rows(rows, model, mask)
        return rows

    def _compute_loss(self, model, inputs, *args):
        with ExitStack() as steps:
            for step in self.carried:
                steps.enter_context(step.during_loss(inputs))
            return super()._compute_loss(model, inputs, *args)

    def train(self, *args, **kwargs):
        self.pool = self._new_pool()
        if self._engine is not None:  # a new training begins with a generation of its own
            self._step, self._buffered_inputs = 0, None
        if self.step_scaling is not None:
            self.step_scaling.load_state_dict({})
        output = super().train(*args, **kwargs)
        if self.pool is not None:
            self.pool.tell_unfinished()
        return output

    # Checkpoints

    def phases_logged(self) -> AbstractContextManager:
        return phases.logged(self, None if self._engine is None else self.log_values)

    def sampling_state(self) -> dict:
        if self._engine is None:
            return {}
        scaling = {} if self.step_scaling is None else self.step_scaling.state_dict()
        progress = unfinished.progress(self) | {"global_step": self.state.global_step}
        return self._engine.state_dict() | progress | scaling

    def load_sampling_state(self, checkpoint: str, state: dict) -> None:
        if self._engine is not None:
            self._engine.load_state_dict(state)
            self._step = unfinished.resume(self, checkpoint, state)
            if self.step_scaling is not None:
                self.step_scaling.load_state_dict(state)
            self._last_loaded_step = -1
            self._metrics["train"].clear()
        if self.pool is not None:
            self.pool.load(checkpoint, state.get("micro_steps", 0))

    def save_generation(self, checkpoint: str) -> None:
        if self._engine is not None:
            unfinished.save(self, checkpoint)
        if self.pool is not None and self.args.should_save:
            self.pool.save(checkpoint)

    def generation_state(self) -> dict:
        """
        Returns the state of this rank's unfinished generation, for a checkpoint. It holds only types that
        `torch.load(weights_only=True)` accepts.
        """
        return {"inputs": self._buffered_inputs, "correction": self.correction_step.state_dict()}

    def load_generation_state(self, state: dict) -> None:
        """Loads the result of [`generation_state`]."""
        self._buffered_inputs = state["inputs"]
        self.correction_step.load_state_dict(state["correction"])
