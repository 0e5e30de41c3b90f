"""Quantized rollouts for any of TRL's online trainers.

    class QuantGRPOTrainer(QuantRollouts, GRPOTrainer): ...

[`QuantRollouts`] is the first base class. It builds the engine instead of TRL's own, gives it the policy's weights and
noise before each generation, and checks rewards, steps and checkpoints.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

from accelerate.utils import is_peft_model
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.extras.profiling import profiling_context

from ..config.data import check_evaluated
from ..config.preflight import check_before_loading
from ..policy.adapters import leave_casts_to_autocast, name_revision
from ..policy.frozen import on_frozen_base
from ..policy.packed import PackedBackbone, PackedRows
from ..policy.positions import release_positions
from ..policy.unified import flow, restore
from ..reading import ANOTHER, blaming, reading
from ..renamed import CurrentNames
from ..rollout import EngineSpec, RolloutEngine, RolloutNoise, build_engine, engine_of
from ..rollout.engine import Engine
from ..rollout.trl_face import QuantGeneration
from ..run_spec import RunSpec
from ..scaling import apply_uaq, uaq_applied
from ..storage.manifest import check_read
from ..storage.quantization import record_gathered_dtype
from ..storage.run_checkpoints import OPTIMIZER, RANDOM, SCALER, SCHEDULER, files_of
from ..trl_seams import exchanged
from . import checkpoints, own_directory, phases, unfinished
from .agreement import check_same_settings, on_every_rank
from .checks import DrawnPrompts, check_adapters, check_model, check_trainable, tell_noise
from .correction_step import CorrectionStep, NoStep
from .finite import FiniteSteps, check_trained
from .introduction import add_to_card, introduce
from .packing import packed_batches, packed_rows
from .positions import check_rows, check_same_choice, fix_choice, models_of, own_prompts
from .precision import check_flow, follow_engine, train_as_sampled
from .record import RunRecord
from .reward_calls import RewardCalls
from .streams import DrawnRows
from .user_calls import UserCalls


logger = logging.getLogger(__name__)


class QuantRollouts(CurrentNames):
    """
    Mixin for a trainer of TRL's that builds a `VLLMGeneration` and samples from it, such as `GRPOTrainer`,
    `RLOOTrainer` or `DistillationTrainer`. Without a `rollout_precision`, TRL generates as usual.

    It relies on four properties of TRL's trainer, which tests check for every trainer: its constructor looks up
    `VLLMGeneration` in its module; `_generate` samples a generation, in one or more calls of `_generate_single_turn`;
    `_calculate_rewards`, where there are rewards, calls `reward_funcs`; `_metrics["train"]` and `["eval"]` hold lists
    of values until they are logged.

    The mixin does not use the sampler's log-probabilities. A subclass that corrects its loss for them has a
    [`correction_step`], whose state the mixin saves with an unfinished generation.

    Attributes:
        runs (`list[str]`): Names of the runs that this one continues, followed by its own.
        data (`dict`): Where the prompts come from, as [`~trainers.launch.TrainArguments.data_settings`] returns it.
        spec ([`~run_spec.RunSpec`]): What the run computes with, samples from and corrects by; fixed when it was built.
        correction_step ([`~trainers.correction_step.CorrectionStep`]): The correction of the loss, if there is one.
        drawn_prompts ([`~trainers.checks.DrawnPrompts`] or `None`): The check of the prompts of each generation.
        drawn_rows ([`~trainers.streams.DrawnRows`] or `None`): Checks the rows of each generation.
    """

    runs: list[str] = []
    data: dict = {}  # only `trl-quant train` knows it; the API gets rows
    correction_step: CorrectionStep | NoStep = NoStep()
    _engine: RolloutEngine | None = None  # `None` where TRL itself generates
    _has_told_unused = False
    # What the constructor sets. Without it, each method leaves everything to TRL's
    spec: RunSpec | None = None
    _flow: set[tuple] | None = None
    _packed_rows: Callable[..., PackedRows] | None = None
    drawn_rows: DrawnRows | None = None
    _user_calls: UserCalls | None = None
    _reward_calls: RewardCalls | None = None
    _finite_steps: FiniteSteps | None = None
    drawn_prompts: DrawnPrompts | None = None

    def __init__(self, *, model, args, eval_dataset=None, quantization_config=None, peft_config=None, **given):
        """Takes the arguments of TRL's trainer. `args` is a configuration with this package's fields, or `None`."""
        given |= {
            "eval_dataset": eval_dataset,
            "quantization_config": quantization_config,
            "peft_config": peft_config,
        }
        args.is_taken = True
        args.resolve_for(adapted=peft_config is not None or (not isinstance(model, str) and is_peft_model(model)))
        check_same_settings(args, model, **given)
        check_before_loading(model=model, args=args, **given)
        self.spec = args.spec
        with own_directory.writing(args):
            pass  # another run is refused now, and not when this one begins
        self._record = RunRecord(args, model=model, **given)
        if not isinstance(model, str):
            restore(model)  # undoes what an earlier trainer did to this model
            release_positions(model)
        fields = {"model_init_kwargs": args.model_init_kwargs}
        if self.spec.training.kind == "frozen":
            given |= on_frozen_base(model=model, args=args, **given)
            fields["model_init_kwargs"] = given.pop("model_init_kwargs")
        self._user_calls = UserCalls(self, args)
        given |= self._user_calls.guarded(given)
        fields |= self.fields_while_built(args)
        with (
            blaming(*self._record.identities.directories),
            engine_of(
                type(self),
                args,
                models_loaded=partial(train_as_sampled, self),
                engine_built=self._follow,
                build=self.build_engine,
                **fields,
            ),
        ):
            super().__init__(model=model, args=args, **given)
        if peft_config is not None and isinstance(model, str):
            name_revision(self.model, (args.model_init_kwargs or {}).get("revision"))
        generation = getattr(self, "vllm_generation", None)
        self._engine = generation.sampler if isinstance(generation, QuantGeneration) else None
        if self._engine is not None:
            leave_casts_to_autocast(self.model)
            tell_noise(self.model, args)
        gathered_in = self._engine.weights.gathered_dtype if self.spec.training.kind == "qat" else None
        record_gathered_dtype(self.model.config, gathered_in)
        self.drawn_prompts = DrawnPrompts(self, self._engine)
        self.drawn_rows = DrawnRows(self, given)
        self._reward_calls = RewardCalls(self, self._user_calls)
        self._finite_steps = FiniteSteps(self)
        if args.uaq_scale is not None and uaq_applied(self.model) is None:
            apply_uaq(self.model, args.uaq_scale)
        self._flow = flow(self.model)
        self._packed_rows = packed_rows(self)
        self.runs = []  # `train` adds the name of this run
        introduce(self)

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

    def fields_while_built(self, args) -> dict:
        """Returns the fields of `args` for which TRL's constructor must see other values."""
        return {}

    def fix_positions(self, model) -> None:
        """Fixes the positions of one more model as those of the policy, where they depend on the longest row."""
        if self._engine is not None:
            fix_choice(self, self._engine, [model])

    @property
    def packs(self) -> bool:
        """Whether the policy and its reference or teacher compute packed rows."""
        return self._packed_rows is not None

    # Metrics

    def log_values(self, values: dict[str, float]) -> None:
        """Adds values to the metrics that TRL logs next."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in values.items():
            metrics[name].append(value)

    def replace_values(self, values: dict[str, float]) -> None:
        """As [`log_values`], but replaces the last value of each metric."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in values.items():
            metrics[name][-1:] = [value]

    # Generate. All ranks sync, check and add noise together before the first turn. In later turns, no rank waits for
    # another.

    def _generate(self, prompts):
        if self._flow is not None:
            check_flow(self, self._flow)
        if self._engine is None:
            return super()._generate(prompts)
        check_model(self, self._engine)
        self._engine.ask_prompts = partial(own_prompts, self, prompts)
        with self.generation():
            requests = self._engine.requests()
            generated = super()._generate(prompts)
            if requests is not None and self._engine.requests() == requests:
                self._tell_unused()
        check_rows(self, *generated[:2])
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
            with self._engine_errors_explained():
                self._sync()
                turns.enter_context(self._engine.generation())
            yield

    def _tokenize_prompts(self, prompts):
        tokenized = super()._tokenize_prompts(prompts)
        if self.drawn_prompts is not None:  # the constructor has run
            self.drawn_prompts.check(tokenized[0])
        return tokenized

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        if self._engine is None:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
        self._engine.multimodal_fields = multimodal_fields
        with self._engine_errors_explained():
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)

    @contextmanager
    def _engine_errors_explained(self) -> Iterator[None]:
        """Context in which an error of the engine also names the step, and the checkpoint to resume from."""
        try:
            yield
        except ValueError:  # its message already tells the user what to do
            raise
        except Exception as error:
            if checkpoints.is_lost(error):  # `train` adds the explanation
                raise
            step, go_on = self.state.global_step, checkpoints.how_to_go_on(self.args.output_dir)
            broken = self._engine.weights.first_non_finite()
            why = f": the policy's `{broken}` holds NaN or infinity" if broken else ""
            message = f"The {self._engine.precision} rollout engine failed at step {step}{why}. {go_on} Cause: {error}"
            raise RuntimeError(message) from error

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
        if self.drawn_rows is not None:
            self.drawn_rows.check(inputs)
        with nullcontext() if self._user_calls is None else self._user_calls.watched():
            output = super()._generate_and_score_completions(inputs)
        if self._engine is not None and self.model.training:  # an evaluation leaves its metrics for the next step
            self.log_values(self._engine.take_metrics())
        return output

    # Score: the policy and its reference or teacher compute packed rows

    def _prepare_inputs(self, generation_batch):
        with nullcontext() if self._packed_rows is None else packed_batches(self):
            return super()._prepare_inputs(generation_batch)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if self._packed_rows is not None:
            model = self._packed_rows(model, prompt=input_ids.shape[1] - logits_to_keep)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _get_last_hidden_state(self, unwrapped_model, *args, **kwargs):  # of distillation
        if self._packed_rows is not None:
            unwrapped_model = PackedBackbone(unwrapped_model)
        return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)

    # Reward: each function must return in time, and each reward must be finite

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self._reward_calls is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        with self._reward_calls.watched():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._reward_calls.check_gathered(rewards)
        if self.model.training:
            self._reward_calls.tell_zeros(rewards, completions)
        return rewards

    # Step: the optimizer takes only finite steps

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._finite_steps is not None:
            self._finite_steps.add_loss(loss)
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self._finite_steps is not None:
            self._finite_steps.check_and_forget(norm)
        return norm

    # Checkpoints: a run saves only finite weights, and resumes only from a complete checkpoint

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """
        Trains as TRL's trainer does.

        Raises:
            `ValueError`: Nothing would be trained, or the run cannot resume from the checkpoint.
            `RuntimeError`: A step or a trained weight is not finite, the engine failed, or another rank was lost.
        """
        check_trainable(self.model)
        check_adapters(self.model)
        with own_directory.writing(self.args):
            return self._train(resume_from_checkpoint, *args, **kwargs)

    def _train(self, resume_from_checkpoint, *args, **kwargs):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoints.checkpoint_to_resume(self.args.output_dir)
        state = {}
        if resume_from_checkpoint:  # checked here, before transformers or DeepSpeed loads it
            adapter = self.model.peft_config.get("default") if is_peft_model(self.model) else None
            with on_every_rank():
                checkpoints.check_adapter(resume_from_checkpoint, adapter)
            state = checkpoints.check_resume(resume_from_checkpoint, self.args, uaq_applied(self.model))
            check_same_choice(self, resume_from_checkpoint, state.get("context"))
            if self._engine is not None:
                self._engine.load_state_dict(state)
                self._step = unfinished.resume(self, resume_from_checkpoint, state)
                self._last_loaded_step = -1
                self._metrics["train"].clear()
        else:
            own_directory.tell_another_run(self.args)
        self._record.begin(self, resume_from_checkpoint or None)
        self.runs = checkpoints.new_run(state.get("runs", []))
        self._others = own_directory.of_other_runs(self.args.output_dir, self.runs)
        self._finite_steps.begin()
        log_phases = None if self._engine is None else self.log_values
        with checkpoints.others_lost(self), phases.logged(self, log_phases):
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            self.drawn_rows.check_trained()
            check_trained(self)
        return output

    def evaluate(self, eval_dataset=None, *args, **kwargs):
        """Evaluates as TRL's trainer does. Raises `ValueError` for a dataset without rows or with malformed ones."""
        if self.drawn_rows is None:  # made without the constructor
            return super().evaluate(eval_dataset, *args, **kwargs)
        if eval_dataset is not None and not isinstance(eval_dataset, str):  # a name is one of `self.eval_dataset`
            check_evaluated(self.args, eval_dataset, self.drawn_rows.environments)
        before = self.drawn_rows.count
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if self.drawn_rows.count == before:
            raise ValueError("`eval_dataset` ended before its first row, so nothing was evaluated.")
        return metrics

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

    # What transformers reads of a checkpoint

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        with reading(resume_from_checkpoint, advice=ANOTHER):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if is_peft_model(model) and len(model.peft_config) > 1:  # then transformers loads the others alone
                model.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _load_best_model(self):
        check_read(self.state.best_model_checkpoint, ["*"], "`load_best_model_at_end`")
        with reading(self.state.best_model_checkpoint, advice=ANOTHER):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint):
        with reading(*files_of(checkpoint, OPTIMIZER, SCHEDULER), advice=ANOTHER):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint):
        with reading(*files_of(checkpoint, SCALER), advice=ANOTHER):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint):
        with reading(*files_of(checkpoint, RANDOM), advice=ANOTHER):
            super()._load_rng_state(checkpoint)

    def _get_train_sampler(self, dataset=None):
        return checkpoints.same_after_resume(super()._get_train_sampler(dataset))

    def create_model_card(self, *args, **kwargs):
        super().create_model_card(*args, **kwargs)
        add_to_card(self)

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        if self.args.should_save and not _internal_call:  # else `_save_checkpoint` records
            checkpoints.write_rollout_state(output_dir or self.args.output_dir, checkpoints.recorded(self))
        if self.args.should_save and not _internal_call:
            self._record.write_beside(self, output_dir or self.args.output_dir)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # The trainer state, which the first rank writes next, marks a checkpoint as complete: for every rank
        self._record.gather(self, output_dir)

    def _save_checkpoint(self, model, trial):
        check_trained(self)
        state = checkpoints.recorded(self)
        if self._engine is not None:
            state |= self._engine.state_dict() | unfinished.progress(self) | {"global_step": self.state.global_step}
        directory, step, limit = self._get_output_dir(trial), self.state.global_step, self.args.save_total_limit
        checkpoint = f"{directory}/{PREFIX_CHECKPOINT_DIR}-{step}"
        with on_every_rank():
            own_directory.check_alone(directory, self.runs, self._others)
        with checkpoints.saving(checkpoint):
            if self.args.should_save:
                own_directory.begin(checkpoint)
            if self._engine is not None:
                unfinished.save(self, checkpoint)
            self._record.gather(self, checkpoint)
            if self.args.should_save:
                checkpoints.write_rollout_state(checkpoint, state)
            # `rotate` deletes old checkpoints by their steps; transformers would delete them by their times
            with exchanged(self.args, save_total_limit=None), self._record.finishing(self):
                super()._save_checkpoint(model, trial)
        if self.args.should_save:
            own_directory.rotate(directory, step, limit, self.state.best_model_checkpoint, self.runs)
