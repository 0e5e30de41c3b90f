"""Configurations: TRL's `GRPOConfig` with flat fields for the rollout copy, its correction, its noise and its scaling.

Every field is checked when the configuration is built, before any model is loaded.
"""

import copy
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar, get_type_hints

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments
from trl import GRPOConfig

from ..corrections import ACR, AIS, CORRECTIONS, DPPO, TIS, TRM, CorrectionInputs, CorrectionOutput, Geometric, IcePop
from ..corrections.trl import TRL
from ..noise import SCHEDULES, sigma
from ..precisions import PRECISIONS, frozen_bases, train_precisions
from ..rollout.spec import default_lora_sync
from .consistency import check_consistent, check_values
from .values import BOUNDS, check_type, listed


logger = logging.getLogger(__name__)

# Fields of ours that change how a run computes, not what
OPERATIONAL = ("vllm_engine_kwargs", "vllm_sleep_level", "sync_check_steps", "resume_with_changes")
OPERATIONAL += ("reward_timeout", "vllm_request_timeout")

# What changes the training's mathematics: of transformers these fields, of TRL all but those that begin like this
LEARNING = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed")
LEARNING += ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args")
LEARNING += ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16", "data_seed")
NOT_LEARNING = ("log_", "num_completions_to_print", "num_generations_eval", "trust_remote_code", "ds3_", "vllm_server")
NOT_LEARNING += ("vllm_group_port", "vllm_gpu_memory", "vllm_enable_sleep", "vllm_tensor", "model_init_kwargs")


@dataclass
class QuantGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`QuantGRPOTrainer`]: every argument of TRL's [`~trl.GRPOConfig`], and those below. With only
    defaults the trainer is TRL's `GRPOTrainer`.

    Where the samples come from: with `use_vllm=True`, vLLM in `rollout_precision`; with `use_vllm=False` and a
    `rollout_precision`, an embedded quantized copy of the policy; without a `rollout_precision`, TRL's own generation.

    Parameters:
        > Parameters that control what the policy computes in

        train_precision (`str`, *optional*):
            Number format that the policy is trained in. `"fp8_block"`, `"fp8"` or `"int8"` (Jet-RL): the decoder's
            linear layers compute what the engine computes in that precision, on weights that stay in 16 or 32 bits; a
            LoRA adapter is merged before they are quantized, or beside them with `lora_sync="adapter"`. `"nvfp4"`,
            `"mxfp4"`, or `"nf4"` through bitsandbytes (QeRL, QLoRA): a frozen base under a LoRA adapter, so that the
            policy is `Q(W) + BA`; it is quantized while it loads, or comes from a checkpoint that `trl-quant prepare`
            wrote. If `None`, the policy computes as it is loaded.
        exact_rollouts (`bool`, *optional*, defaults to `False`):
            Whether scoring and training use the kernels of the vLLM engine between the linear layers too (norms, rotary
            embeddings, attention, log-probabilities), and vLLM computes a token the same whatever is beside it, so that
            trainer and sampler get the same bits. With `train_precision` `"fp8_block"` or `"int8"`, vLLM in colocate
            mode, and a Hopper GPU; sampling is slower (see the benchmarks).

        > Parameters that control the rollout copy

        rollout_precision (`str`, *optional*):
            Number format of the copy of the policy that samples completions, a key of [`~precisions.PRECISIONS`]; or
            `"auto"`, with vLLM in colocate mode: measures each precision that vLLM runs here with engines like the
            run's own, and puts the fastest (of those within 5%, the most exact) in place of `"auto"` (a resumed run
            keeps that of its checkpoint). If `None`, that of `train_precision`; without one, TRL generates as it always
            does.
        vllm_engine_kwargs (`dict`, *optional*):
            Further arguments of vLLM's `LLM` in colocate mode, fields of `vllm.EngineArgs`, such as
            `{"kv_cache_dtype": "fp8"}`, or `{"model": "my-model-int8"}` to start it on a checkpoint that `trl-quant
            prepare` wrote. Those that have a field of their own here are refused.
        vllm_sleep_level (`int`, *optional*):
            What vLLM does with its weights while it sleeps (`vllm_enable_sleep_mode=True`): 2 discards them, 1 keeps
            them in host memory. `lora_sync="adapter"` needs 1, since nothing brings the base back; a base that is the
            trainer's too stays where it is. If `None`, 1 with `lora_sync="adapter"`, else 2.
        lora_sync (`str`, *optional*):
            How a LoRA adapter reaches vLLM: `"merge"` streams the base with the adapter merged in and quantizes the
            sum; `"adapter"` sends A and B alone and leaves the quantized base as it was loaded. If `None`, `"adapter"`
            in colocate mode where the policy's base is frozen in the `rollout_precision`, else `"merge"`.
        sync_check_steps (`int`, *optional*, defaults to `50`):
            Steps from one self-check of the vLLM engine to the next: a few prompts are scored by the engine and by the
            policy, and training stops where they disagree by more than the format explains. 0 switches it off.

        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds that the vLLM server may take, in total, to answer a request of a run with a `rollout_precision`, or
            to take new weights. After that the run ends with an error that says what was asked, and can be resumed.
            If `None`, it waits for ever.
        reward_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds that a call of a reward function or a tool may take. After that the run ends with an error that
            names the function, and can be resumed; of a tool the model is told. A function that hangs in C, where
            Python cannot interrupt it, ends the process a minute later. If `None`, it waits for ever.
        resume_with_changes (`bool`, *optional*, defaults to `False`):
            Whether a run may go on from a checkpoint that was trained with other settings of the rollout copy, its
            correction or its noise. Each difference is logged. By default it is refused.

        > Parameters that control the correction of the mismatch between sampler and trainer

        is_correction (`str`, *optional*):
            What a token of the quantized sampler is worth: `"trl"` (TRL's own importance sampling, governed by its
            `vllm_importance_sampling_*` arguments), or a key of [`~corrections.CORRECTIONS`]: `"none"`, `"coupled"`,
            `"decoupled"`, `"tis"`, `"acr"`, `"ais"`, `"icepop"`, `"geometric"`, `"trm"` or `"dppo"`. If `None`, `"trl"`
            without a `rollout_precision` and `"tis"` with one.
        scale_rewards (`str`, *optional*):
            As in TRL. If `None`, what the correction's method asks for: `"none"` with `ais`, else TRL's default.
        loss_type (`str`, *optional*):
            As in TRL. If `None`, what the correction's method asks for: `"grpo"` with `ais`, else TRL's default.
        is_cap (`float`, *optional*):
            Cap C >= 1 on the ratio w = exp(old_logps - rollout_logps), for `tis`, `acr`, `ais` and `dppo`. If `None`,
            2 for `tis` and `acr`, 5 for `ais`, 10 for `dppo`.
        ais_delta (`float`, *optional*, defaults to `0.02`):
            Mean |old_logps - rollout_logps|, in nats, at which AIS applies its full correction.
        ais_gamma (`float`, *optional*, defaults to `1.2`):
            Growth of the advantages' standard deviation under the weights that AIS tolerates.
        ais_beta_var (`float`, *optional*, defaults to `1.0`):
            Strength of AIS's penalty beyond `ais_gamma`.
        icepop_low (`float`, *optional*, defaults to `0.5`):
            Ratio w, from 0 to 1, below which IcePop drops a token.
        icepop_high (`float`, *optional*, defaults to `5.0`):
            Ratio w, at least 1, above which IcePop drops a token.
        geometric_epsilon (`float`, *optional*, defaults to `0.01`):
            Distance from 1, at most 1, beyond which the geometric mean of w has its sequence dropped.
        trm_delta (`float`, *optional*, defaults to `0.05`):
            Largest (log w)^2 / 2 of a token, in nats, that trust region masking keeps in a sequence.
        dppo_delta (`float`, *optional*, defaults to `0.15`):
            Probability, at most 1, that DPPO lets a token move away from the sampler.

        > Parameters that control adaptive quantization noise (AQN)

        noise_schedule (`str`, *optional*):
            Decay of the noise on the sampler's norm weights: `"exponential"`, `"linear"`, `"cosine"` or
            `"logarithmic"`. If `None`, no noise. Needs a `rollout_precision` (`"bf16"` for noise alone).
        noise_sigma_start (`float`, *optional*, defaults to `1e-2`):
            Standard deviation of the noise in the first noisy stage.
        noise_sigma_end (`float`, *optional*, defaults to `5e-4`):
            Standard deviation of the noise in the last stage, at most `noise_sigma_start`.
        noise_stages (`int`, *optional*, defaults to `10`):
            Number of equal stages, at least 3, that training is divided into; the first has no noise.

        > Parameters that control dynamic sampling (DAPO)

        dynamic_sampling_rounds (`int`, *optional*, defaults to `0`):
            Further rounds of sampling a generation may take to replace groups whose rewards do not differ, which teach
            nothing, by groups of fresh prompts. What still has no replacement then stays, with advantages of 0. 0
            switches it off.

        > Parameters that control update-aware quantization (UAQ)

        uaq_scale (`float`, *optional*):
            Factor s > 0 of the invariant scaling applied once before training: each norm weight is multiplied by s and
            the linear layers that it feeds are divided by s. QuRL uses 1.5 for INT8 and FP8. If `None`, no scaling.
    """

    is_taken: ClassVar[bool] = False  # by a trainer of ours
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    train_precision: str | None = field(
        default=None,
        metadata={
            "help": f"Number format that the policy is trained in: {listed(train_precisions())}; of these "
            f"{listed(frozen_bases())} hold a frozen base under LoRA. If not set, the policy computes as it is loaded."
        },
    )
    exact_rollouts: bool = field(
        default=False,
        metadata={
            "help": "Score and train with the vLLM engine's own kernels, so that trainer and sampler get the same bits."
        },
    )
    rollout_precision: str | None = field(
        default=None,
        metadata={
            "help": f"Number format of the copy of the policy that samples completions: {listed(PRECISIONS)}, or "
            "'auto' for the fastest in vLLM, measured at the start. If not set, that of `train_precision`; without "
            "one, TRL generates as it always does."
        },
    )
    vllm_engine_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Further arguments of vLLM's `LLM` in colocate mode, fields of `vllm.EngineArgs`, as a dict or a "
            "JSON string."
        },
    )
    vllm_sleep_level: int | None = field(
        default=None,
        metadata={
            "help": "vLLM's sleep level with `vllm_enable_sleep_mode`: 2 discards the weights, 1 keeps them. If not "
            "set, 1 with `lora_sync='adapter'`, else 2."
        },
    )
    lora_sync: str | None = field(
        default=None,
        metadata={
            "help": "How a LoRA adapter reaches vLLM: 'merge' into the quantized weights, or as 'adapter'. If not set, "
            "'adapter' in colocate mode where the base is frozen in the `rollout_precision`, else 'merge'."
        },
    )
    sync_check_steps: int = field(
        default=50,
        metadata={"help": "Steps from one self-check of the vLLM engine to the next; 0 switches it off."},
    )
    vllm_request_timeout: float | None = field(
        default=1800.0,
        metadata={
            "help": "Seconds that the vLLM server may take to answer a request of a run with a `rollout_precision`, or "
            "to take new weights, before the run ends."
        },
    )
    reward_timeout: float | None = field(
        default=1800.0,
        metadata={"help": "Seconds that a call of a reward function or a tool may take."},
    )
    resume_with_changes: bool = field(
        default=False,
        metadata={"help": "Go on from a checkpoint of a run with other rollout settings; the log says which."},
    )
    is_correction: str | None = field(
        default=None,
        metadata={
            "help": f"Correction of the mismatch between sampler and trainer: 'trl' (TRL's own), "
            f"{listed(CORRECTIONS)}. If not set, 'trl' without a `rollout_precision`, 'tis' with one."
        },
    )
    scale_rewards: str | None = field(
        default=None,
        metadata={"help": "As in TRL. If not set, 'none' with `is_correction` 'ais', else TRL's default, 'group'."},
    )
    loss_type: str | None = field(
        default=None,
        metadata={"help": "As in TRL. If not set, 'grpo' with `is_correction` 'ais', else TRL's default, 'dapo'."},
    )
    is_cap: float | None = field(
        default=None,
        metadata={
            "help": "Cap C >= 1 on the ratio between trainer and sampler, for 'tis', 'acr', 'ais' and 'dppo'. If not "
            f"set, {TIS.cap:g} for 'tis', {ACR.cap:g} for 'acr', {AIS.cap:g} for 'ais', {DPPO.cap:g} for 'dppo'."
        },
    )
    ais_delta: float = field(
        default=AIS.delta,
        metadata={"help": "Mean absolute log-probability difference at which AIS applies its full correction."},
    )
    ais_gamma: float = field(
        default=AIS.gamma,
        metadata={"help": "Growth of the advantages' standard deviation under the weights that AIS tolerates."},
    )
    ais_beta_var: float = field(
        default=AIS.beta_var,
        metadata={"help": "Strength of AIS's penalty on the growth of the variance beyond `ais_gamma`."},
    )
    icepop_low: float = field(
        default=IcePop.low, metadata={"help": "Ratio w, from 0 to 1, below which IcePop drops a token."}
    )
    icepop_high: float = field(
        default=IcePop.high, metadata={"help": "Ratio w, at least 1, above which IcePop drops a token."}
    )
    geometric_epsilon: float = field(
        default=Geometric.epsilon,
        metadata={"help": "Distance from 1 beyond which the geometric mean of w has its sequence dropped."},
    )
    trm_delta: float = field(
        default=TRM.delta,
        metadata={"help": "Largest (log w)^2 / 2 of a token that trust region masking keeps in a sequence."},
    )
    dppo_delta: float = field(
        default=DPPO.delta, metadata={"help": "Probability that DPPO lets a token move away from the sampler."}
    )
    noise_schedule: str | None = field(
        default=None,
        metadata={
            "help": "Decay of the adaptive quantization noise on the sampler's norm weights: "
            f"{listed(SCHEDULES)}. If not set, no noise."
        },
    )
    noise_sigma_start: float = field(
        default=1e-2,
        metadata={"help": "Standard deviation of the noise in the first noisy stage."},
    )
    noise_sigma_end: float = field(
        default=5e-4,
        metadata={"help": "Standard deviation of the noise in the last stage, at most `noise_sigma_start`."},
    )
    noise_stages: int = field(
        default=10,
        metadata={"help": "Number of equal stages, at least 3, of the noise schedule; the first has no noise."},
    )
    dynamic_sampling_rounds: int = field(
        default=0,
        metadata={
            "help": "Further rounds of sampling, at most, to replace groups whose rewards do not differ by groups of "
            "fresh prompts (DAPO); 0 switches it off."
        },
    )
    uaq_scale: float | None = field(
        default=None,
        metadata={
            "help": "Factor s > 0 of the invariant scaling applied once before training: norm weights are multiplied "
            "by s, the linear layers that they feed divided by s. QuRL uses 1.5. If not set, no scaling."
        },
    )

    def __post_init__(self):
        self._check_types()
        self._resolve()
        self._join_ranks_on_cpus()
        try:
            super().__post_init__()
        except ValueError:
            check_values(self)  # what is wrong comes before what this machine lacks
            raise
        check_values(self)
        check_consistent(self)

    def _join_ranks_on_cpus(self):
        """
        Does what transformers does for GPUs alone: `ddp_timeout` reaches the ranks, which would wait for half an hour,
        and optimizers are loaded on a device that `torch.load` knows, which accelerate's "cpu:0" is not.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and (self.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")):
            os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
            PartialState(cpu=True, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)

    def _check_types(self):
        """The fields added here hold what their types say, before anything computes with them."""
        for name in self._VALID_DICT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, str) and value.lstrip().startswith("{"):  # TRL takes other strings for file names
                try:
                    setattr(self, name, json.loads(value))
                except ValueError as error:
                    raise ValueError(f"`{name}`={value!r} is no JSON object: {error}.") from error
        hints = get_type_hints(QuantGRPOConfig)
        for name in _added():
            check_type(name, getattr(self, name), hints[name])
        for name in BOUNDS:
            check_type(name, getattr(self, name), hints[name])

    def _resolve(self):
        """Fills in what depends on other fields."""
        if self.rollout_precision is None:
            self.rollout_precision = self.train_precision
        if self.lora_sync is None:
            mode = self.vllm_mode if self.use_vllm else "embedded"
            self.lora_sync = default_lora_sync(mode, self.rollout_precision, self.train_precision)
        if self.vllm_sleep_level is None:
            self.vllm_sleep_level = 1 if self.lora_sync == "adapter" else 2
        if self.is_correction is None:
            self.is_correction = "trl" if self.rollout_precision is None else "tis"
        for name, value in self._method_settings().items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _method_settings(self) -> dict[str, str]:
        """`scale_rewards` and `loss_type` as the correction's method has them, else as TRL has them."""
        trl = {name: GRPOConfig.__dataclass_fields__[name].default for name in ("scale_rewards", "loss_type")}
        return trl | getattr(CORRECTIONS.get(self.is_correction), "settings", {})

    @classmethod
    def from_grpo(cls, args: GRPOConfig) -> "QuantGRPOConfig":
        """
        A copy of TRL's configuration as one of this class: its values stay, the added fields take our defaults. What
        the correction's method asks for takes the place of TRL's defaults, and the log says so.
        """
        if not isinstance(args, GRPOConfig):
            raise ValueError(f"`args` is a {type(args).__name__}. It must be a `{cls.__name__}` or TRL's `GRPOConfig`.")
        config = copy.copy(args)
        config.__class__ = cls
        for f in fields(cls):
            if not hasattr(args, f.name):
                setattr(config, f.name, f.default)
        config._check_types()
        config._resolve()
        for name, value in config._method_settings().items():
            default = GRPOConfig.__dataclass_fields__[name].default
            if value != default and getattr(args, name) == default:
                logger.warning(
                    "`%s`=%r, as the method of `is_correction`=%r has it.", name, value, config.is_correction
                )
                setattr(config, name, value)
        check_values(config)
        check_consistent(config)
        return config

    @property
    def epsilon_low(self) -> float:
        """TRL's `epsilon`, by the name of the bound that it is."""
        return self.epsilon

    @property
    def samples_as_trained(self) -> bool:
        """Whether sampler and trainer compute in the same precision."""
        return self.train_precision is not None and self.rollout_precision == self.train_precision

    @property
    def holds_frozen_base(self) -> bool:
        """Whether the policy's base is held in few bits, frozen under an adapter."""
        return self.train_precision in frozen_bases()

    @property
    def fsdp_version(self) -> int | None:
        """That of the FSDP which shards the policy, as given here (`fsdp`) or by accelerate's launcher."""
        if self.fsdp_plugin_args is not None:
            return self.fsdp_plugin_args["fsdp_version"]
        launched = parse_flag_from_env("ACCELERATE_USE_FSDP")
        return int(os.environ.get("FSDP_VERSION", 1)) if launched else None

    @property
    def one_update_per_generation(self) -> bool:
        """Whether a generation serves one optimizer step, whose policy is then the one that it was sampled for."""
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    def noise_sigma(self, step: int, total_steps: int) -> float:
        """Standard deviation of the noise at an optimizer step; 0 without a `noise_schedule`."""
        if self.noise_schedule is None:
            return 0.0
        ends = self.noise_sigma_start, self.noise_sigma_end
        return sigma(step, total_steps, self.noise_schedule, self.noise_stages, *ends)

    def correction(self) -> Callable[[CorrectionInputs], CorrectionOutput] | None:
        """
        The correction of this run, with its hyperparameters: a field `x` of the correction `ais` is `ais_x`, `is_x` or
        `x` here, and keeps its own default where that is `None`.

        `None` where TRL corrects for its own sampler, and where nothing is to be corrected.
        """
        measured = self.rollout_precision is not None and self.vllm_importance_sampling_correction
        if self.is_correction == "trl" and not measured:
            return None
        kind = TRL if self.is_correction == "trl" else CORRECTIONS[self.is_correction]
        given = {}
        for f in fields(kind):
            names = (f"{self.is_correction}_{f.name}", f"is_{f.name}", f"vllm_importance_sampling_{f.name}", f.name)
            own = next((name for name in names if hasattr(self, name)), None)
            if own is not None and getattr(self, own) is not None:
                given[f.name] = getattr(self, own)
        return kind(**given)

    def training_settings(self) -> dict:
        """The fields added here that change what is trained, as a checkpoint records them."""
        names = set(_added()) - {*OPERATIONAL}
        return {name: getattr(self, name) for name in sorted(names)}

    def inherited_settings(self) -> dict:
        """The fields of TRL and transformers that change what is trained, as a checkpoint records them."""
        of_trl = set(GRPOConfig.__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__)
        names = {name for name in of_trl if not name.startswith(NOT_LEARNING)} | {*LEARNING}
        return {name: value for name, value in sorted(self.to_sanitized_dict().items()) if name in names}

    @classmethod
    def plain_settings(cls) -> dict:
        """[`~QuantGRPOConfig.training_settings`] of a checkpoint of TRL's own trainer."""
        defaults = {f.name: f.default for f in fields(QuantGRPOConfig)} | {"is_correction": "trl", "lora_sync": "merge"}
        names = set(_added()) - {*OPERATIONAL}
        return {name: defaults[name] for name in sorted(names)}

    def get_process_log_level(self) -> int:
        """What every trainer asks for first: TRL's own, which knows nothing of the fields added here, is told of."""
        if not self.is_taken and self.rollout_precision is not None:
            logger.warning(
                "`rollout_precision`=%r acts only with `QuantGRPOTrainer`: this trainer samples without quantization "
                "and corrects nothing of ours.",
                self.rollout_precision,
            )
        return super().get_process_log_level()


def _added() -> list[str]:
    """Fields of [`QuantGRPOConfig`] that TRL does not have."""
    return [f.name for f in fields(QuantGRPOConfig) if f.name not in GRPOConfig.__dataclass_fields__]


@dataclass
class AISGRPOConfig(QuantGRPOConfig):
    """Configuration of [`AISGRPOTrainer`]: [`QuantGRPOConfig`] with `is_correction="ais"` and what it asks for."""

    is_correction: str | None = field(
        default="ais", metadata=QuantGRPOConfig.__dataclass_fields__["is_correction"].metadata
    )
