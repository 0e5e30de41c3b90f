"""The config of the asynchronous trainer: TRL's `AsyncGRPOConfig` with the fields of this package."""

from dataclasses import dataclass
from typing import ClassVar

from trl.experimental.async_grpo import AsyncGRPOConfig

from .documentation import documentation, explain
from .fields import QuantFields


@dataclass
class AsynchronousFields:
    """Where the samples of a run come from that samples while it trains."""

    use_vllm: bool = True
    """Whether a vLLM server samples, in the `rollout_precision` if there is one. If not, an embedded copy of the policy
    does, in a thread of the trainer's process.
    """

    vllm_group_port: int = 51216
    """Port over which a server gets weights in the `rollout_precision`. Each run on a machine needs one of its own."""

    proximal_pass: bool = False
    """Whether the policy at a sync is the proximal policy of all updates until the next sync (decoupled PPO). After the
    sync, the samples of these updates are taken together, and one more forward pass scores them. The weight w compares
    the proximal policy with the sampler, and TRL's clip bounds act on R, the ratio of the trained policy to the
    proximal one. Needs `weight_sync_steps` above 1. If not set, each update's own policy is the proximal one, and R is
    1.
    """


# TRL's trainer packs its samples by itself, and replays no routing
OF_TRL = {"pack_sequences": False, "router_replay": False}
ASYNCHRONOUS = {"what samples while the policy trains": explain(AsynchronousFields)}


@dataclass
class QuantAsyncGRPOConfig(AsynchronousFields, QuantFields, AsyncGRPOConfig):
    """
    Configuration of [`QuantAsyncGRPOTrainer`]: all fields of TRL's [`~trl.experimental.async_grpo.AsyncGRPOConfig`],
    those of [`~config.fields.QuantFields`], and the one below. With the defaults alone, the trainer is TRL's
    `AsyncGRPOTrainer`.

    Here `max_staleness` is the largest age, in versions of the weights, that a token may have in the update that trains
    on it; a version is what one sync brings. With `use_vllm=False`, `token_budget` is 0 by default: a micro-batch is
    `per_device_train_batch_size` samples.
    """

    trl_config: ClassVar[type] = AsyncGRPOConfig
    further_sections: ClassVar[dict[str, type]] = ASYNCHRONOUS
    has_correction: ClassVar[bool] = True
    corrected_by_trl: ClassVar[bool] = False
    is_asynchronous: ClassVar[bool] = True

    # Fields of TRL's other configs, which are constants in this trainer
    beta: ClassVar[float] = 0.0
    num_iterations: ClassVar[int] = 1
    sync_ref_model: ClassVar[bool] = False
    vllm_mode: ClassVar[str] = "server"
    vllm_enable_sleep_mode: ClassVar[bool] = False
    cache_implementation: ClassVar[str | None] = None
    generation_kwargs: ClassVar[dict | None] = None
    reward_weights: ClassVar[list[float] | None] = None
    vllm_structured_outputs_regex: ClassVar[str | None] = None
    use_transformers_continuous_batching: ClassVar[bool] = False

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches of a generation: what is taken off the queue together."""
        return self.gradient_accumulation_steps * (self.weight_sync_steps if self.proximal_pass else 1)

    @property
    def generation_batch_size(self) -> int:
        """Samples of a generation, on all ranks together; with a `token_budget`, about as many."""
        return self.per_device_train_batch_size * self.world_size * self.steps_per_generation

    @property
    def is_left_to_trl(self) -> bool:
        """Whether the run is that of TRL's trainer, with nothing of this package but its attention."""
        return self.rollout_precision is None and self.correction_class.applied_by_trl

    @property
    def standardizes(self) -> bool:
        """Whether advantages are divided by the standard deviation of their group, as TRL's worker does."""
        return "scale_rewards" not in self.correction_class.settings

    @classmethod
    def plain_settings(cls) -> dict:
        return super().plain_settings() | OF_TRL

    def _resolve(self):
        for name, value in OF_TRL.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if not self.use_vllm:
            if self.token_budget is None:
                self.token_budget = 0
            # The thread that samples draws from torch's random state, which a recomputation would set back meanwhile
            checkpointing = {"use_reentrant": False, "preserve_rng_state": False}
            self.gradient_checkpointing_kwargs = checkpointing | (self.gradient_checkpointing_kwargs or {})
        super()._resolve()


QuantAsyncGRPOConfig.__doc__ = (QuantAsyncGRPOConfig.__doc__ or "") + documentation(ASYNCHRONOUS)
