"""`QuantAsyncGRPOTrainer`: TRL's `AsyncGRPOTrainer`, which samples while it trains, with quantized rollouts."""

import itertools
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType

from accelerate.utils import is_peft_model, send_to_device
from torch import Tensor
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.models.utils import disable_gradient_checkpointing

from ...config.async_grpo import QuantAsyncGRPOConfig
from ...policy.adapters import leave_casts_to_autocast
from ...policy.trees import TREES, check_tree
from ...rollout import RolloutEngine, RolloutNoise, build_engine
from ...rollout.settings import SAMPLING
from ...runs.agreement import on_every_rank
from ...runs.checkpoints import engine_explained, recorded, write_rollout_state
from ...storage.run_checkpoints import read_rollout_state
from ...trl_seams import arguments_seen, flops_if_known, without_peak_flops
from ..checks import DrawnPrompts, config_for, tell_noise
from ..introduction import PACKAGE_TAG
from ..precision import QuantPrecision
from .loss import AsyncCorrection
from .micro_batches import MicroBatches, check_budget
from .sampling_thread import SamplingThread


logger = logging.getLogger(__name__)


class TRLsArguments(AsyncGRPOTrainer):
    """TRL's trainer, called as its other trainers are, with the sampler of ours if there is one."""

    def __init__(self, *, args, eval_dataset=None, quantization_config=None, **given):
        init = args.model_init_kwargs
        if quantization_config is not None:
            init = (init or {}) | {"quantization_config": quantization_config}
        with arguments_seen(args, model_init_kwargs=init):
            super().__init__(args=args, **given | self.sampler_for(args=args, **given))


class QuantAsyncGRPOTrainer(QuantPrecision, TRLsArguments):
    """
    TRL's [`~trl.experimental.async_grpo.AsyncGRPOTrainer`] with quantized rollouts and a correction for them. It takes
    the arguments of `AsyncGRPOTrainer`, and `quantization_config`. With [`QuantAsyncGRPOConfig`]'s defaults or a plain
    `AsyncGRPOConfig` it is `AsyncGRPOTrainer`, with torch's attention in the place of the hub's kernel.

    ```python
    >>> trainer = QuantAsyncGRPOTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=strict_math_reward,
    ...     args=QuantAsyncGRPOConfig(rollout_precision="fp8"),  # of a server; `use_vllm=False` for the embedded engine
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    A trainer trains once: TRL starts its worker a single time.

    Attributes:
        sampling_thread ([`~trainers.async_grpo.sampling_thread.SamplingThread`] or `None`): What samples beside the
            training; `None` where TRL's worker does, or one that was passed.
        correction ([`~trainers.async_grpo.loss.AsyncCorrection`] or `None`): The correction of the loss.
    """

    config_class = QuantAsyncGRPOConfig
    _tag_names = [*AsyncGRPOTrainer._tag_names, PACKAGE_TAG]
    sampling_thread: SamplingThread | None = None
    correction: AsyncCorrection | None = None
    _engine: RolloutEngine | None = None
    _noise_metrics: Mapping[str, float] = MappingProxyType({})  # of the version that is trained on

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        processing_class=None,
        callbacks=None,
        optimizers=(None, None),
        peft_config=None,
        tools=None,
        environment_factory=None,
        rollout_worker=None,
        weight_transfer=None,
        quantization_config=None,
    ):
        if not isinstance(model, str):
            raise ValueError(
                f"`model` is a {type(model).__name__}. TRL's asynchronous trainer loads the policy by itself: pass a "
                "name or a directory."
            )
        args = config_for(self, model, args)
        correction = args.correction()
        if correction is not None:
            self.correction = AsyncCorrection(self, correction)
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            environment_factory=environment_factory,
            rollout_worker=rollout_worker,
            weight_transfer=weight_transfer,
            quantization_config=quantization_config,
        )

    # Built: TRL gets the thread as its worker, and the thread its engine once the policy is loaded

    def guarded_functions(self, given: dict) -> dict:
        if self.spec.sampler is None:
            return {}  # TRL sends them to a process of its own, and pickles them
        return super().guarded_functions(given)

    def sampler_for(self, args, train_dataset, reward_funcs, tools, environment_factory, **others) -> dict:
        """Returns the arguments with which TRL's trainer samples from our engine; none if it does not."""
        if self.spec.sampler is None:
            return {}
        rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] * (reward_funcs is not None)
        speakers = {"tools": tools, "environment_factory": environment_factory}
        self.sampling_thread = SamplingThread(args, rewards, self.user_calls, **speakers)
        return {"rollout_worker": self.sampling_thread, "weight_transfer": self.sampling_thread}

    def loading(self, args, **fields) -> AbstractContextManager:
        context = ExitStack()
        context.enter_context(without_peak_flops())
        context.enter_context(super().loading(args, **fields))
        return context

    def train(self, *args, **kwargs):
        with flops_if_known():
            return super().train(*args, **kwargs)

    def meet_sampler(self) -> None:
        policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
        policy.set_attn_implementation(TREES)
        with on_every_rank():
            # Where ranks load one copy, the first has it; under ZeRO-3 none has a whole one
            if self.accelerator.is_main_process and not is_deepspeed_zero3_enabled():
                with self.accelerator.autocast():
                    check_tree(self.model, policy)
        if self.sampling_thread is None:
            return
        args = self.args
        settings = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
        if args.use_vllm:
            settings |= {"mode": args.vllm_mode, "server_base_url": args.vllm_server_base_url.rstrip("/")}
            settings |= {"server_timeout": args.vllm_server_timeout, "group_port": args.vllm_group_port}
            settings["trust_remote_code"] = args.trust_remote_code
        leave_casts_to_autocast(self.model)
        tell_noise(self.model, args)
        self._engine = build_engine(self.spec.sampler, self.model, self.accelerator, self.processing_class, **settings)
        drawn_prompts = DrawnPrompts(self, self._engine)
        self.sampling_thread.meet(self._engine, lambda first: self.drawn_rows.endless(first), drawn_prompts)

    # Sync: a version of the weights

    def rollout_noise(self) -> RolloutNoise:
        """
        Returns the noise of the next version of the weights. A run of so many epochs ends with their last group, long
        before the `max_steps` that TRL gives it, so its stages are counted in groups.
        """
        step, of_run = self.state.global_step, (self.state.global_step, self.state.max_steps)
        if self._epoch_stop_groups is not None:
            of_run = self._groups_trained, self._epoch_stop_groups
        return RolloutNoise(self.args.noise_sigma(*of_run), self.args.seed, step)

    @property
    def _groups_trained(self) -> int:
        return self._groups_before_resume + len(self._trained_groups)

    def _sync_weight_merged(self, t0):
        if self._engine is None:
            return super()._sync_weight_merged(t0)
        self.check_computation()
        with self.sampling_thread.paused() as engine:
            paused = time.time()
            engine.noise = self.rollout_noise()
            with engine_explained(self, engine):
                engine.sync()
            self.model_version += 1
            self.sampling_thread.update_model_version(self.model_version)
        self.log_values(engine.take_metrics())
        self.log_values(self._noise_metrics)
        if self.args.noise_schedule is not None:
            self._noise_metrics = engine.noise_metrics()
        return paused, paused, time.time()

    # Train

    def get_train_dataloader(self):
        if self.args.is_left_to_trl:
            return super().get_train_dataloader()
        with on_every_rank():
            if self.accelerator.is_main_process:
                check_budget(self)
        budget = self.args.token_budget
        if budget is None and self.accelerator.is_main_process:  # the longest row of the server, as in TRL
            self.vllm_client.wait_for_server_ready()
            budget = self.vllm_client.get_max_model_len()
        self._rollout_dataset = MicroBatches(self, max(budget or 0, 0))
        return self._rollout_dataset

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the log-probabilities of a micro-batch's trained tokens under the policy as it is now, (1, M)."""
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            inputs = send_to_device(batch, self.accelerator.device)
            return self.correction.scores(super().compute_loss, self.model_wrapped, inputs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        given = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        if self.correction is None:
            return super().compute_loss(model, inputs, **given)
        return self.correction.loss(super().compute_loss, model, inputs, **given)

    # Checkpoints: the place in the data and the version; what the queue holds is not saved

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self._engine is None and self.args.should_save:
            # TRL has written the place of its own worker over what was recorded of the run
            write_rollout_state(output_dir, recorded(self) | read_rollout_state(output_dir))

    def sampling_state(self) -> dict:
        if self._engine is None:
            return {}
        passed = self._trained_groups | self._rollout_dataset.dropped_groups
        place = next(group for group in itertools.count() if group not in passed)
        counts = {"prompt_index": self.sampling_thread.first_row + place, "groups_trained": self._groups_trained}
        return self._engine.state_dict() | counts | {"model_version": self.model_version}

    def load_sampling_state(self, checkpoint: str, state: dict) -> None:
        if self._engine is None:
            if "prompt_index" not in state and isinstance(self.rollout_worker, AsyncRolloutWorker):
                raise ValueError(
                    f"{checkpoint} holds no place in the data for TRL's worker: its run sampled in another way."
                )
            return
        self._engine.load_state_dict(state)
        if "prompt_index" not in state:
            logger.warning("%s is of a run that sampled in another way. The data begin anew.", checkpoint)
            return
        self.model_version = state.get("model_version", 0)
        self.sampling_thread.first_row = state["prompt_index"]
        self._groups_before_resume = state.get("groups_trained", state["prompt_index"])
        logger.warning(
            "Samples that waited for training when %s was saved are not in it. They are sampled again, from prompt %d "
            "on, with the weights of the checkpoint.",
            checkpoint,
            self.sampling_thread.first_row,
        )
