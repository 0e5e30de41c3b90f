"""
What a trainer of TRL's computes with: layers in its `train_precision`, packed rows, rewards and steps that must be
finite, and checkpoints. `policy/`, which knows no trainer, changes the models.

[`~trainers.sampling.QuantSampling`] adds what it samples with.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate.utils import broadcast, is_peft_model
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..config.before_loading import check_before_loading
from ..config.data import check_evaluated
from ..layers.products import multiplies
from ..policy.adapters import UnifiedLoraLinear, name_revision
from ..policy.exact.model import compute_exactly
from ..policy.frozen import on_frozen_base
from ..policy.packed import PackedBackbone, PackedRows
from ..policy.positions import release_positions
from ..policy.unified import checkpoint_dtype, flow, restore, unified_layers, unify
from ..precisions import PRECISIONS, frozen_bases, unified_flows
from ..reading import ANOTHER, blaming, reading
from ..renamed import CurrentNames
from ..rollout.weights import PolicyWeights
from ..run_spec import RunSpec
from ..runs import checkpoints, own_directory
from ..runs.agreement import check_same_settings, on_every_rank
from ..runs.finite import FiniteSteps, check_trained
from ..runs.record import RunRecord
from ..runs.reward_calls import RewardCalls
from ..runs.saved_names import load_as_saved, saves_other_names
from ..runs.user_calls import UserCalls
from ..scaling import apply_uaq, uaq_applied
from ..storage.manifest import check_read
from ..storage.quantization import record_gathered_dtype
from ..storage.run_checkpoints import OPTIMIZER, RANDOM, SCALER, SCHEDULER, files_of
from ..storage.whole import write_whole
from ..trl_seams import arguments_seen, old_checkpoints_kept
from .checks import check_adapters, check_trainable
from .introduction import add_to_card, introduce
from .packing import packed_batches, packed_rows
from .positions import check_same_choice
from .streams import DrawnRows


logger = logging.getLogger(__name__)


class WeightsMoved(TrainerCallback):
    """Makes the layers quantize their weights again after each optimizer step, however the optimizer wrote them."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.layers = unified_layers(model)
        self.merged = {m.base_layer for m in model.modules() if isinstance(m, UnifiedLoraLinear) and m.merges}
        for layer in self.layers:
            layer.forget()

    def on_optimizer_step(self, args, state, control, **kwargs):
        for layer in self.layers:
            if layer in self.merged or any(param.requires_grad for param in layer.parameters(recurse=False)):
                layer.forget()


def hand_out(model: nn.Module, device: torch.device) -> None:
    """Sends a model's weights from the first rank, which alone has them under `cpu_ram_efficient_loading`, to all."""
    for param in model.parameters():
        param.data = broadcast(param.data.to(device)).to(param.device)


def train_as_sampled(trainer) -> None:
    """Switches the loaded policy and reference of a trainer to its `train_precision`."""
    args, reference = trainer.args, getattr(trainer, "ref_model", None)
    if reference is not None and args.fsdp_version == 2:
        hand_out(reference, trainer.accelerator.device)  # accelerate does so for the policy only
    training = trainer.spec.training
    if training.precision is None or (training.freezes_base and training.precision in frozen_bases()):
        return  # a frozen 4-bit base computes by itself
    merged, rounds_to = args.lora_sync == "merge", None
    if not merged:
        start = (args.vllm_engine_kwargs or {}).get("model", trainer.model.name_or_path)
        rounds_to = checkpoint_dtype(start, args.trust_remote_code)
    device = trainer.accelerator.device
    has_products = args.train_precision in unified_flows()
    if has_products and device.type == "cuda" and not multiplies(PRECISIONS[args.train_precision].format, device):
        logger.warning(
            "This device does not multiply in `train_precision`=%r, so the policy's layers multiply the rounded values "
            "in BF16. That is slower than without `train_precision`, and differs from what vLLM computes.",
            args.train_precision,
        )
    unify(trainer.model, args.train_precision, merged, rounds_to)
    trainer.add_callback(WeightsMoved())
    if reference is not None:
        unify(reference, args.train_precision)
        for layer in unified_layers(reference):
            layer.moves_unseen = args.sync_ref_model


def follow_engine(trainer, engine) -> None:
    """Under `exact_rollouts`, makes a trainer's policy and reference compute with its engine's kernels, in BF16."""
    if trainer.args.exact_rollouts:
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            if not trainer.args.bf16 and next(model.parameters()).dtype != engine.kernels.dtype:
                raise ValueError("`exact_rollouts`=True computes in BF16: set `bf16=True`, or load the model in BF16.")
            compute_exactly(model, engine.kernels)


def check_flow(trainer, before: set[tuple]) -> None:
    """Raises `ValueError` if another trainer changed how the policy computes: `before` is what [`flow`] returned."""
    if flow(trainer.model) != before:
        raise ValueError(
            f"`train_precision`={trainer.args.train_precision!r}, but a trainer that was built later on the same model "
            "changed how it computes. Build this trainer again, or load a model for each of the two."
        )


class QuantPrecision(CurrentNames):
    """
    Mixin for one of TRL's online trainers: what it computes with. It does not know how the trainer samples.

    It relies on these properties of TRL's trainer, which tests check for every trainer: `_calculate_rewards`, where
    there are rewards, calls `reward_funcs`; `_metrics["train"]` and `["eval"]` hold lists of values until they are
    logged.

    Attributes:
        runs (`list[str]`): Names of the runs that this one continues, followed by its own.
        data (`dict`): Where the prompts come from, as [`~trainers.launch.TrainArguments.data_settings`] returns it.
        spec ([`~run_spec.RunSpec`]): What the run computes with, samples from and corrects by; fixed when it was built.
        drawn_rows ([`~trainers.streams.DrawnRows`] or `None`): Checks the rows of each generation.
        user_calls ([`~runs.user_calls.UserCalls`] or `None`): Guards the calls of the user's functions.
    """

    runs: list[str] = []
    data: dict = {}  # only `trl-quant train` knows it; the API gets rows
    # What the constructor sets. Without it, each method leaves everything to TRL's
    spec: RunSpec | None = None
    _flow: set[tuple] | None = None
    _packed_rows: Callable[..., PackedRows] | None = None
    drawn_rows: DrawnRows | None = None
    user_calls: UserCalls | None = None
    _reward_calls: RewardCalls | None = None
    _finite_steps: FiniteSteps | None = None

    def __init__(self, *, model, args, eval_dataset=None, quantization_config=None, peft_config=None, **given):
        """Takes the arguments of TRL's trainer. `args` is a configuration with this package's fields, or `None`."""
        given |= {
            "eval_dataset": eval_dataset,
            "quantization_config": quantization_config,
            "peft_config": peft_config,
        }
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
        if self.spec.training.freezes_base:
            given |= on_frozen_base(model=model, args=args, **given)
            fields["model_init_kwargs"] = given.pop("model_init_kwargs")
        self.user_calls = UserCalls(self, args)
        given |= self.guarded_functions(given)
        fields |= self.fields_while_built(args)
        with blaming(*self._record.identities.directories), self.loading(args, **fields):
            super().__init__(model=model, args=args, **given)
        if peft_config is not None and isinstance(model, str):
            name_revision(self.model, (args.model_init_kwargs or {}).get("revision"))
        self.meet_sampler()
        gathered_in = None
        if self.spec.training.is_qat:
            gathered_in = PolicyWeights(self.model, self.accelerator).gathered_dtype
        record_gathered_dtype(self.model.config, gathered_in)
        self.drawn_rows = DrawnRows(self, given)
        self._reward_calls = RewardCalls(self, self.user_calls)
        self._finite_steps = FiniteSteps(self)
        if args.uaq_scale is not None and uaq_applied(self.model) is None:
            apply_uaq(self.model, args.uaq_scale)
        self._flow = flow(self.model)
        self._packed_rows = packed_rows(self)
        self.runs = []  # `train` adds the name of this run
        introduce(self)

    @contextmanager
    def loading(self, args, **fields) -> Iterator[None]:
        """
        Context of TRL's constructor, in which `args` has the given `fields`. When it ends, the loaded models compute in
        the `train_precision`.
        """
        with arguments_seen(args, **fields):
            yield
        train_as_sampled(self)

    def fields_while_built(self, args) -> dict:
        """Returns the fields of `args` for which TRL's constructor must see other values."""
        return {}

    def guarded_functions(self, given: dict) -> dict:
        """Returns the functions of a user among TRL's arguments that this process calls, with guarded calls."""
        return self.user_calls.guarded(given)

    @property
    def packs(self) -> bool:
        """Whether the policy and its reference or teacher compute packed rows."""
        return self._packed_rows is not None

    # What a trainer that samples from an engine adds

    def meet_sampler(self) -> None:
        """Called when TRL's constructor has ended, before the models are prepared further."""

    def sampling_state(self) -> dict:
        """Returns what a checkpoint records of the sampler."""
        return {}

    def load_sampling_state(self, checkpoint: str, state: dict) -> None:
        """Loads from a checkpoint what [`sampling_state`] and [`save_generation`] have saved in it."""

    def save_generation(self, checkpoint: str) -> None:
        """Saves this rank's unfinished generation in a checkpoint."""

    def carrying(self, rows, model: nn.Module, mask: Tensor):
        """
        Returns what TRL calls with padded rows instead of the model: it adds what the engine has returned with their
        tokens ([`~trainers.carried`]). `rows` is the model, or what stands in for it already; `mask` is 1 on tokens,
        (B, S).
        """
        return rows

    def phases_logged(self) -> AbstractContextManager:
        """Context of a training, in which the seconds of its phases are logged."""
        return nullcontext()

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

    # Generate: the rows must be drawn, the policy must compute as it did when the trainer was built, and the functions
    # that the user gave must return in time

    def check_computation(self) -> None:
        """Raises `ValueError` if another trainer changed how the policy computes."""
        if self._flow is not None:
            check_flow(self, self._flow)

    def _generate_and_score_completions(self, inputs):
        if self.drawn_rows is not None:
            self.drawn_rows.check(inputs)
        with nullcontext() if self.user_calls is None else self.user_calls.watched():
            return super()._generate_and_score_completions(inputs)

    # Score: the policy and its reference or teacher compute packed rows

    def _prepare_inputs(self, generation_batch):
        with nullcontext() if self._packed_rows is None else packed_batches(self):
            return super()._prepare_inputs(generation_batch)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        rows = model
        if self._packed_rows is not None:
            rows = self._packed_rows(model, prompt=input_ids.shape[1] - logits_to_keep)
        rows = self.carrying(rows, model, attention_mask)
        return super()._get_per_token_logps_and_entropies(
            rows, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _get_last_hidden_state(self, unwrapped_model, input_ids, attention_mask, *args, **kwargs):  # of distillation
        rows = unwrapped_model if self._packed_rows is None else PackedBackbone(unwrapped_model)
        rows = self.carrying(rows, unwrapped_model, attention_mask)
        return super()._get_last_hidden_state(rows, input_ids, attention_mask, *args, **kwargs)

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
            self.load_sampling_state(resume_from_checkpoint, state)
        else:
            own_directory.tell_another_run(self.args)
        self._record.begin(self, resume_from_checkpoint or None)
        self.runs = checkpoints.new_run(state.get("runs", []))
        self._others = own_directory.of_other_runs(self.args.output_dir, self.runs)
        self._finite_steps.begin()
        with checkpoints.others_lost(self), self.phases_logged():
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            self.drawn_rows.check_trained()
            check_trained(self)
        return output

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # of a finished run, which transformers would train a step further

    def _finalize_training(self, *args, **kwargs):
        with old_checkpoints_kept():
            return super()._finalize_training(*args, **kwargs)

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

    # What transformers reads of a checkpoint

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        with reading(resume_from_checkpoint, advice=ANOTHER):
            if not self.is_fsdp_enabled and saves_other_names(model):
                load_as_saved(model, resume_from_checkpoint)
                return
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if is_peft_model(model) and len(model.peft_config) > 1:  # then transformers loads the others alone
                model.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _load_best_model(self):
        check_read(self.state.best_model_checkpoint, ["*"], "`load_best_model_at_end`")
        with reading(self.state.best_model_checkpoint, advice=ANOTHER):
            super()._load_best_model()
            if not (self.is_fsdp_enabled or self.is_deepspeed_enabled) and saves_other_names(self.model):
                load_as_saved(self.model, self.state.best_model_checkpoint)

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
        state = checkpoints.recorded(self) | self.sampling_state()
        directory, step, limit = self._get_output_dir(trial), self.state.global_step, self.args.save_total_limit
        checkpoint = f"{directory}/{PREFIX_CHECKPOINT_DIR}-{step}"
        with on_every_rank():
            own_directory.check_alone(directory, self.runs, self._others)
        with checkpoints.saving(checkpoint):
            if self.args.should_save:
                own_directory.begin(checkpoint)
            self.save_generation(checkpoint)
            self._record.gather(self, checkpoint)
            if self.args.should_save:
                checkpoints.write_rollout_state(checkpoint, state)
                if getattr(self, "use_adaptive_entropy", False):  # TRL writes it again, after the manifest
                    entropy = {"entropy_coef": self.entropy_coef, "last_world_entropy": self._last_world_entropy}
                    write_whole(Path(checkpoint, "entropy_ctrl_state.json"), json.dumps(entropy))
            # `rotate` deletes old checkpoints by their steps; transformers would delete them by their times
            with old_checkpoints_kept(), self._record.finishing(self):
                super()._save_checkpoint(model, trial)
        if self.args.should_save:
            own_directory.rotate(directory, step, limit, self.state.best_model_checkpoint, self.runs)
