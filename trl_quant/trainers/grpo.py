"""`QuantGRPOTrainer` and `AISGRPOTrainer`: the glue between TRL's `GRPOTrainer` and the rooms of this package."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from ..config import AISGRPOConfig, QuantGRPOConfig
from ..config.preflight import check_before_loading, name_of
from ..corrections.acr import rescued
from ..corrections.batch import corrected, counted, joined, sampling_metrics, write
from ..policy.frozen import on_frozen_base
from ..policy.unified import check_flow, flow, follow_engine, restore, train_as_sampled
from ..rollout import RolloutEngine, RolloutNoise, engine_of
from ..rollout.rollout_func import CheckedRollout
from ..scaling import apply_uaq, uaq_applied
from ..trl_seams import exchanged
from . import checkpoints, phases
from .checks import check_method, check_model, check_trainable
from .dynamic_sampling import dynamically_sampled
from .finite import check_step, check_trained
from .reward_calls import RewardCalls, limited_tool


class QuantGRPOTrainer(GRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] with quantized rollouts and the correction for them. It takes what `GRPOTrainer` takes;
    with [`QuantGRPOConfig`]'s defaults, with a plain [`~trl.GRPOConfig`] and with `args=None` it is `GRPOTrainer`.

    ```python
    >>> trainer = QuantGRPOTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=strict_math_reward,
    ...     args=QuantGRPOConfig(use_vllm=True, rollout_precision="fp8"),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    A step whose loss or gradient is not finite ends the run before the optimizer takes it, and no checkpoint is saved
    whose weights are not finite (see [`trainers.finite`]). Where an engine of vLLM's is not needed any more, as in a
    notebook, `del trainer; gc.collect()` frees its memory.
    """

    config_class = QuantGRPOConfig
    _engine: RolloutEngine | None = None  # where samples come from, if not from TRL itself
    runs: list[str] = []  # the run that this is, last, and those that it goes on from
    _batch: dict | None = None  # what the loss is computed of, while it is
    _step_loss: Tensor | float = 0.0  # of the micro-batches of this step until now

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
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        model_name, own = name_of(model), self.config_class
        if not isinstance(args, QuantGRPOConfig):
            args = own(f"{model_name.split('/')[-1]}-GRPO") if args is None else own.from_trl(args)
        args.is_taken = True
        given["tools"] = tools and [limited_tool(tool, args.reward_timeout) for tool in tools]
        check_method(self, args)
        check_before_loading(**given | {"args": args})
        if not isinstance(model, str):
            restore(model)  # what a trainer before this one did to it
        given["rollout_func"] = rollout_func and CheckedRollout(rollout_func)
        args.rollout_precision = checkpoints.precision_before(args)
        correction = args.correction()
        self._correct = correction and partial(corrected, correction, level=args.importance_sampling_level)
        # Whether the loss's own forward scores the tokens for the correction too: no update comes between, or all count
        local = args.one_update_per_generation and not getattr(correction, "whole_batch", correction is None)
        self.one_pass = local or getattr(correction, "every_update", False)
        base = on_frozen_base(**given | {"args": args}) if args.holds_frozen_base else {}
        fields = {"model_init_kwargs": base.pop("model_init_kwargs", args.model_init_kwargs)}
        with engine_of(args, partial(train_as_sampled, self), partial(follow_engine, self), **fields):
            super().__init__(**given | {"args": args} | base)
        self._reward_calls = RewardCalls(self)
        self._engine = engine if isinstance(engine := getattr(self, "vllm_generation", None), RolloutEngine) else None
        if args.uaq_scale is not None and uaq_applied(self.model) is None:
            apply_uaq(self.model, args.uaq_scale)
        self._flow = flow(self.model)

    # Generate: what all ranks do together stands before the first turn; the turns of a rank are its own

    def _generate(self, prompts):
        check_flow(self, self._flow)
        check_model(self, self._engine)
        if self._engine is None:
            return super()._generate(prompts)
        with self.generation():
            generated = super()._generate(prompts)
        if self.args.noise_schedule is not None and self.model.training:
            self._log_values(self._engine.noise_metrics())
        return generated

    @contextmanager
    def generation(self) -> Iterator[None]:
        """
        Context of a generation, for which the engine is synced, checked and given its noise once, whatever the number
        of turns. TRL finds the weights synced; also a `rollout_func` that calls the engine itself finds it awake.
        """
        self._engine.noise = self.rollout_noise()
        with ExitStack() as turns:
            with self._engine_errors_explained():
                self._sync()
                turns.enter_context(self._engine.generation())
            yield

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        if self._engine is None:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
        self._engine.multimodal_fields = multimodal_fields
        with self._engine_errors_explained():
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)

    @contextmanager
    def _engine_errors_explained(self) -> Iterator[None]:
        try:
            yield
        except ValueError:  # already clear
            raise
        except Exception as error:
            if checkpoints.is_lost(error):  # `train` tells of a lost rank
                raise
            step, go_on = self.state.global_step, checkpoints.how_to_go_on(self.args.output_dir)
            broken = self._engine.weights.first_non_finite()
            why = f": the policy's `{broken}` holds NaN or infinity" if broken else ""
            message = f"The {self._engine.precision} rollout engine failed at step {step}{why}. {go_on} Cause: {error}"
            raise RuntimeError(message) from error

    def _sync(self) -> None:
        """
        Gives the engine the policy's weights at a new step, as TRL does before a turn, and wherever they changed since
        the last sync. The step keeps the metrics of its first sync.
        """
        is_new_step = self.state.global_step != self._last_loaded_step
        if is_new_step or self._engine.is_stale():
            metrics = self._engine.sync_metrics
            with profiling_context(self, "sync_weights"):
                self._engine.sync_weights()
            if not is_new_step:
                self._engine.sync_metrics = metrics
            self._last_loaded_step = self.state.global_step

    def rollout_noise(self) -> RolloutNoise:
        """The noise of this generation, one of its step's; evaluation samples from the clean copy."""
        args, step = self.args, self.state.global_step
        draw = self._step % args.gradient_accumulation_steps // (args.steps_per_generation * args.num_iterations)
        sigma = args.noise_sigma(step, self.state.max_steps) if self.model.training else 0.0
        return RolloutNoise(sigma, args.seed, step, draw)

    def check_sync(self) -> dict[str, float]:
        """
        [`~rollout.verify.self_check.self_check`], after a sync where the next generation would sync. Needs a vLLM
        engine.
        """
        if not hasattr(self._engine, "check_sync"):
            raise ValueError("`check_sync` checks vLLM engines: set `use_vllm=True` and a `rollout_precision`.")
        self._sync()
        return self._engine.check_sync()

    # Reward: each function in its time, each number finite

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self._reward_calls.watched():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._reward_calls.check_gathered(rewards)
        return rewards

    # Correct: what the tokens of the quantized sampler are worth

    def _generate_and_score_completions(self, inputs):
        self._unlogged = getattr(self, "_unlogged", {}) | {self.model.training: []}  # micro-batches of a generation
        scores = self.vllm_importance_sampling_correction and not self.one_pass
        with dynamically_sampled(self, inputs) as inputs, exchanged(self, vllm_importance_sampling_correction=scores):
            output = super()._generate_and_score_completions(inputs)
        if self._engine is not None and self.model.training:  # an evaluation leaves them to the step whose sync it was
            self._log_values(self._engine.take_metrics())
        if scores and self._correct is not None and output.get("sampling_per_token_logps") is not None:
            self._log_correction(output, result := self._correct(output))
            if self.args.is_correction != "trl":  # of TRL's own correction only the diagnostics are ours
                write(result, output)
        return output

    def _log_values(self, values: dict[str, float], over: bool = False) -> None:
        """Logs values with TRL's, or `over` the last ones of their names."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in values.items():
            metrics[name][-1 if over else len(metrics[name]) :] = [value]

    def _log_correction(self, batch, result) -> None:
        self._log_values(result.metrics)
        if self.args.is_correction != "trl":  # TRL logged its own ratio where it scored the batch
            self._log_values(sampling_metrics(batch, result.weights, self.accelerator.gather), over=not self.one_pass)

    # Loss: TRL's own; where nothing was scored before, its forward gives the old log-probabilities too (R = 1)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._batch is not None:
            self._correct_loss(self._batch, scored[0].detach())
        return scored

    def _compute_loss(self, model, inputs):
        with exchanged(self, _batch=dict(inputs), epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high):
            return super()._compute_loss(model, self._batch)

    def _correct_loss(self, batch, logps) -> None:
        """Gives the loss its weights where it has none yet, and a token's own clip bounds (QuRL eq. 9)."""
        if self.one_pass and "sampling_per_token_logps" in batch:
            batch["old_per_token_logps"] = logps
            write(result := self._correct(scored := dict(batch)), batch)
            (unlogged := self._unlogged[self.model.training]).append(scored)
            if len(unlogged) == (parts := self.args.steps_per_generation if self.model.training else 1):
                whole, self._unlogged[self.model.training] = joined(unlogged), []
                self._log_correction(whole, result if parts == 1 else self._correct(whole))
        if "clip_high" in batch:
            share = rescued(logps, batch, counted(batch), self.epsilon_high)
            self._log_values({"mismatch/rescued_fraction": self.accelerator.gather(share).mean().item()})
            # TRL clamps the ratio to [1 - epsilon_low, 1 + epsilon_high]; near 1 both subtractions are exact.
            self.epsilon_low, self.epsilon_high = 1 - batch["clip_low"], batch["clip_high"] - 1

    # Step: taken where loss and gradient are finite

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = self._step_loss + loss
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        loss, self._step_loss = self._step_loss, 0.0
        check_step(self, loss, norm)
        return norm

    # Checkpoints: only complete and finite ones count, and a model is scaled once

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        check_trainable(self.model)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoints.checkpoint_to_resume(self.args.output_dir)
        state = {}
        if resume_from_checkpoint:  # here, since DeepSpeed's checkpoints are loaded elsewhere than all others
            state = checkpoints.check_resume(resume_from_checkpoint, self.args, uaq_applied(self.model))
            if self._engine is not None:
                self._engine.load_state_dict(state)
        self.runs = checkpoints.new_run(state.get("runs", []))
        self._step_loss = 0.0
        with checkpoints.others_lost(self), phases.logged(self, self._engine and self._log_values):
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            check_trained(self)
        return output

    def _get_train_sampler(self, dataset=None):
        return checkpoints.same_after_resume(super()._get_train_sampler(dataset))

    def _save_checkpoint(self, model, trial):
        check_trained(self)
        state = checkpoints.recorded(self)
        if self._engine is not None:
            state |= self._engine.state_dict()  # collective
        directory, step, limit = self._get_output_dir(trial), self.state.global_step, self.args.save_total_limit
        checkpoint = f"{directory}/{PREFIX_CHECKPOINT_DIR}-{step}"
        with checkpoints.saving(checkpoint):
            if self.args.should_save:
                checkpoints.write_rollout_state(checkpoint, state)
            with exchanged(self.args, save_total_limit=None):  # by which transformers deletes in the order of times
                super()._save_checkpoint(model, trial)
        if self.args.should_save:
            checkpoints.rotate(directory, step, limit, self.state.best_model_checkpoint, self.runs)


class AISGRPOTrainer(QuantGRPOTrainer):
    """[`QuantGRPOTrainer`] with AIS-GRPO's defaults ([`AISGRPOConfig`]): adaptive weights, unnormalised advantages."""

    config_class = AISGRPOConfig
