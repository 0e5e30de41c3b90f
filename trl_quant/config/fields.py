"""The fields that every trainer of this package adds to its TRL config.

Each section of fields is a small dataclass, and [`QuantFields`] joins them. The text below a field is its meaning:
`trl-quant train --help` prints it, and `help(QuantGRPOConfig)` shows it (see [`~config.documentation`]).
"""

import copy
import json
import logging
import os
from dataclasses import dataclass, fields
from threading import TIMEOUT_MAX
from typing import Annotated, ClassVar

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from ..corrections import AIS, ALL_CORRECTIONS, CIS, DPPO, TRM, Correction, Geometric, IcePop
from ..corrections.base import Range
from ..noise import sigma
from ..noise.schedules import LEAST_STAGES
from ..precisions import frozen_bases, unified_flows
from ..renamed import CurrentNames
from ..run_spec import (
    INDEPENDENT,
    RunSpec,
    default_correction,
    default_lora_sync,
    default_precision,
    default_sleep_level,
)
from .checks import check_what
from .documentation import explain
from .given import Given
from .hyperparameters import setting_fields
from .values import check_types, check_values, meant_words


logger = logging.getLogger(__name__)

# Our fields that do not change the result of training
OPERATIONAL = (
    *("vllm_engine_kwargs", "vllm_sleep_level", "vllm_request_timeout"),
    *("sync_check_steps", "resume_with_changes", "reward_timeout"),
)
# transformers' fields that change the result of training
LEARNING = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16", "data_seed"),
)
# Prefixes of TRL's fields that do not change the result of training; all others do
NOT_LEARNING = (
    *("log_", "num_completions_to_print", "num_generations_eval", "trust_remote_code", "ds3_", "vllm_server"),
    *("vllm_group_port", "vllm_gpu_memory", "vllm_enable_sleep", "vllm_tensor", "model_init_kwargs"),
)

Seconds = Annotated[float | None, Range(0.0, TIMEOUT_MAX, open_low=True)]


@dataclass
class PolicyFields:
    """The policy's precision."""

    train_precision: str | None = None
    """Number format that the policy is trained in: {train_precisions}. Under a LoRA adapter, {frozen_bases} (QeRL,
    QLoRA) freeze the base, so that the policy is Q(W) + BA; the base is quantized while it loads, or comes from a
    checkpoint that `trl-quant prepare` wrote. Without an adapter, {qat_precisions} train all weights for 4 bits
    (quantization-aware training): each forward pass computes with Q(W), and the gradients go to W, which stays in 16 or
    32 bits. With {unified_flows} (Jet-RL) the decoder's linear layers compute what the engine computes in this
    precision, on weights that stay in 16 or 32 bits. A LoRA adapter is merged before these are quantized; with
    `lora_sync='adapter'` it stays beside a base in codes. If not set, the policy computes as loaded.
    """

    exact_rollouts: bool = False
    """Whether scoring and training use the vLLM engine's own kernels between the linear layers too (norms, rotary
    embeddings, attention, log-probabilities), so that trainer and sampler get the same bits. vLLM then computes each
    token independently of the rest of the batch, which makes sampling slower. Needs `train_precision` {exact_flows},
    vLLM in colocate mode, and a Hopper GPU.
    """

    pack_sequences: bool | None = None
    """Whether scoring and training compute the sequences of a micro-batch in one row without padding. The loss stays
    the same, up to the rounding of sums. `True` raises an error where that is not possible; if not set, runs with a
    `rollout_precision` pack where it is.
    """

    router_replay: bool | None = None
    """Whether scoring and training send each token of a mixture of experts to the experts that the sampler chose
    (routing replay, R3), with the weights of the policy's own router. If not set, it is replayed where the engine
    returns its routing: the embedded one does, and vLLM in this process on a GPU. `True` raises an error elsewhere.
    """

    truncation_replay: bool | None = None
    """Whether scoring and training renormalise the policy over the tokens that `top_p`, `top_k` and `min_p` left the
    sampler, so that w is the format's alone. If not set, they do with the embedded engine. `True` also asks vLLM from
    0.28 on, in this process on a GPU, and raises an error elsewhere.
    """


@dataclass
class RolloutFields:
    """The rollout copy."""

    rollout_precision: str | None = None
    """Number format of the copy of the policy that samples completions: {precisions}. `trl-quant choose MODEL` measures
    those that vLLM runs here, and names the fastest (of those within 5 percent, the most exact). If not set, that of
    `train_precision`; without one, TRL generates as usual.
    """

    vllm_engine_kwargs: dict | str | None = None
    """Further arguments of vLLM's `LLM` in colocate mode, as a dict or a JSON string: fields of `vllm.EngineArgs`, such
    as {'kv_cache_dtype': 'fp8'}, or {'model': 'my-model-int8'} to start on a checkpoint that `trl-quant prepare`
    wrote. Arguments that have a field here are refused.
    """

    vllm_sleep_level: int | None = None
    """What vLLM does with its weights while it sleeps (`vllm_enable_sleep_mode`): 2 discards them, 1 keeps them in host
    memory. `lora_sync='adapter'` needs 1, because no sync brings the base back; a base that vLLM shares with the
    trainer stays in place. If not set, 1 with `lora_sync='adapter'`, else 2.
    """

    lora_sync: str | None = None
    """How a LoRA adapter reaches vLLM: 'merge' streams the base with the adapter merged in and quantizes the sum;
    'adapter' sends only A and B and leaves the quantized base as it was loaded. If not set, 'adapter' in colocate mode
    where the policy's base is frozen in the `rollout_precision`, else 'merge'.
    """

    sync_check_steps: Annotated[int, Range(0)] = 50
    """Number of weight syncs from one self-check of the vLLM engine to the next. Engine and policy score a few prompts;
    training stops if they disagree by more than the format explains. 0: no checks.
    """

    vllm_request_timeout: Seconds = 1800.0
    """Seconds that the vLLM server may take to answer a request of a run with a `rollout_precision`, or to take new
    weights. After that the run ends with an error that names the request, and can be resumed. If None, the run waits
    for ever.
    """

    reward_timeout: Seconds = 1800.0
    """Seconds that a call of a reward function, a tool, an environment or a `rollout_func` may take. After that the run
    ends with an error that names the function, and can be resumed; if it was a tool, the model is told instead. A
    function that hangs in C, where Python cannot interrupt it, ends the process a minute later. If None, the run waits
    for ever.
    """

    resume_with_changes: bool = False
    """Whether a run may resume from a checkpoint that was trained with other settings of the rollout copy, its
    correction or its noise. Each difference is logged. By default the resume is refused.
    """


@dataclass
class CorrectionFields:
    """The correction of the mismatch between sampler and trainer."""

    is_correction: str | None = None
    """Correction of the mismatch between sampler and trainer: 'trl' (TRL's own importance sampling, set by its
    `vllm_importance_sampling_*` fields), {corrections}. If not set, 'trl' without a `rollout_precision`, and with one
    'tis', or 'none' in distillation.
    """

    is_cap: float | None = None
    """Cap C >= 1 on the ratio w = exp(old_logps - rollout_logps), for 'tis', 'acr', 'ais' and 'dppo'. If not set,
    {tis_cap} for 'tis', {acr_cap} for 'acr', {ais_cap} for 'ais', {dppo_cap} for 'dppo'.
    """

    ais_delta: float = AIS.delta
    """Mean |old_logps - rollout_logps|, in nats, at which AIS applies its full correction."""

    ais_gamma: float = AIS.gamma
    """Ratio of weighted to unweighted standard deviation of advantages that AIS tolerates."""

    ais_beta_var: float = AIS.beta_var
    """Strength of AIS's penalty on growth beyond `ais_gamma`."""

    cis_lam: float = CIS.lam
    """Lambda >= 0 of 'cis', whose cap on w is 1 + lambda max(1 - p, kappa), p the policy's probability of the token."""

    cis_kappa: float = CIS.kappa
    """Kappa of 'cis', at most 1, which bounds its cap from below as p nears 1."""

    icepop_low: float = IcePop.low
    """Ratio w, from 0 to 1, below which IcePop drops a token."""

    icepop_high: float = IcePop.high
    """Ratio w, at least 1, above which IcePop drops a token."""

    geometric_epsilon: float = Geometric.epsilon
    """Distance from 1, at most 1, that the geometric mean of w may have before 'geometric' drops the sequence."""

    trm_delta: float = TRM.delta
    """Largest (log w)^2 / 2 of a token, in nats, that trust region masking keeps in a sequence."""

    dppo_delta: float = DPPO.delta
    """Probability, at most 1, by which DPPO lets a token move away from the sampler."""

    ess_step_scaling: bool = False
    """Whether each step's learning rate is multiplied by min(1, sqrt(rho / rho_0)) (after VCPO): rho is the effective
    sample size of the step's completions, divided by their number, under the uncapped weights of whole completions, and
    rho_0 is rho of the run's first step. Needs a `rollout_precision` ('bf16' for the unquantized one).
    """


@dataclass
class NoiseFields:
    """Adaptive quantization noise (AQN)."""

    noise_schedule: str | None = None
    """How the noise on the sampler's norm weights decays: {schedules}. Needs a `rollout_precision` ('bf16' for noise
    without quantization). If not set, there is no noise.
    """

    noise_sigma_start: float = 1e-2
    """Standard deviation of the noise in the first noisy stage."""

    noise_sigma_end: Annotated[float, Range(0.0, open_low=True)] = 5e-4
    """Standard deviation of the noise in the last stage, at most `noise_sigma_start`."""

    noise_stages: Annotated[int, Range(LEAST_STAGES)] = 10
    """Number of equal stages, at least {least_stages}, that training is divided into. The first stage has no noise."""


@dataclass
class DynamicSamplingFields:
    """Dynamic sampling (DAPO)."""

    dynamic_sampling_rounds: Annotated[int, Range(0)] = 0
    """Further rounds of sampling, at most, in which a generation replaces groups whose rewards do not differ, and which
    therefore teach nothing, by groups of the next prompts, also across an epoch's end. A group that still has no
    replacement then stays, with advantages of 0. 0 switches this off.
    """


@dataclass
class PartialRolloutFields:
    """Partial rollouts."""

    rollouts_in_flight: Annotated[float, Range(1.0)] = 1.0
    """Groups of completions in flight when a generation starts, divided by the groups that it returns. Above 1, a
    generation ends when enough groups have finished, and the others go on in the next one, so that no step waits for
    the longest completion. Their older tokens were sampled by older weights, and the correction weighs them by age and
    precision at once. Needs a `rollout_precision` ('bf16' for the unquantized one). 1: every generation waits for all.
    """

    max_staleness: Annotated[int, Range(0)] = 4
    """Age, in generations, that a group may have when it returns. A generation waits for groups that would become
    older. `rollouts_in_flight` may be at most 1 more.
    """


@dataclass
class ScalingFields:
    """Update-aware quantization (UAQ)."""

    uaq_scale: float | None = None
    """Factor s > 0 of the invariant scaling that is applied once before training: each norm weight is multiplied by s,
    and the linear layers that it feeds are divided by s. QuRL uses 1.5 for INT8 and FP8. If not set, nothing is scaled.
    """


# What the fields of a section control -> the section, in the order of the help
SECTIONS = {
    "what the policy computes in": explain(PolicyFields),
    "the rollout copy": explain(RolloutFields),
    "the correction of the mismatch between sampler and trainer": explain(CorrectionFields),
    "adaptive quantization noise (AQN)": explain(NoiseFields),
    "dynamic sampling (DAPO)": explain(DynamicSamplingFields),
    "partial rollouts": explain(PartialRolloutFields),
    "update-aware quantization (UAQ)": explain(ScalingFields),
}


@dataclass
class QuantFields(CurrentNames, *SECTIONS.values()):
    """
    The fields of this package that every trainer has, and their checks.

    The class does not inherit from TRL's configs. A trainer's config inherits from it and from TRL's, in this order:

    ```python
    @dataclass
    class QuantGRPOConfig(QuantFields, GRPOConfig):
        trl_config: ClassVar[type] = GRPOConfig
    ```

    Corrections and dynamic sampling need code in the trainer. The config of a trainer with this code sets
    `has_correction` or `has_dynamic_sampling`. Any other config refuses these fields, which would do nothing, and with
    a `rollout_precision` its `is_correction` is "none".
    """

    trl_config: ClassVar[type[TrainingArguments]]  # TRL's config, with all other fields
    further_sections: ClassVar[dict[str, type]] = {}  # sections that only this config adds, in the form of `SECTIONS`
    has_correction: ClassVar[bool] = False  # whether the trainer's loss takes the weights of a correction
    corrected_by_trl: ClassVar[bool] = True  # whether TRL's trainer has a correction of its own
    clips_completions: ClassVar[bool] = False  # whether the loss clips one ratio for a whole completion
    has_dynamic_sampling: ClassVar[bool] = False  # whether the trainer replaces groups that teach nothing
    has_critic: ClassVar[bool] = False  # whether a critic gives each token an advantage
    has_rewards: ClassVar[bool] = True  # whether reward functions score the completions
    is_asynchronous: ClassVar[bool] = False  # whether it samples while it trains
    denoises: ClassVar[bool] = False  # whether completions are denoised (masked diffusion), not written left to right
    is_taken: ClassVar[bool] = False  # whether a run of this package got the config
    is_adapted: ClassVar[bool] = True  # whether the policy has an adapter; see `resolve_for`

    def __post_init__(self):
        self._read()
        self._settle()
        self._join_ranks_on_cpus()
        try:
            super().__post_init__()
        except ValueError:
            check_values(self)  # so a wrong value is reported before a feature that this machine lacks
            raise
        self._check()

    def _read(self):
        """Parses JSON strings and words of YAML, and checks all types before anything computes with a value."""
        for name in (*self._VALID_DICT_FIELDS, "vllm_engine_kwargs"):
            value = getattr(self, name)
            if isinstance(value, str) and value.lstrip().startswith("{"):  # for TRL any other string is a file name
                try:
                    setattr(self, name, json.loads(value))
                except ValueError as error:
                    raise ValueError(f"`{name}`={value!r} is not a JSON object: {error}.") from error
        vars(self).update(meant_words(self))
        vars(self).update(check_types(self, self.own_fields()))

    def _settle(self):
        """Calls `_resolve` and records which fields it set. A later call resets those that were not assigned since."""
        kept = [name for name, value in getattr(self, "derived", {}).items() if getattr(self, name) == value]
        vars(self).update(dict.fromkeys(kept))
        left_open = [f.name for f in fields(self) if getattr(self, f.name) is None]
        self._resolve()
        self.derived = {name: value for name in left_open if (value := getattr(self, name)) is not None}

    def having(self, **values) -> "QuantFields":
        """Returns a copy with other values, and with the defaults that follow from them. The copy is not checked."""
        config = copy.copy(self)
        vars(config).update(values)
        config.derived = {name: value for name, value in self.derived.items() if name not in values}
        config._settle()
        return config

    def check_assigned(self) -> None:
        """Checks fields that were assigned after the config was built, and sets the defaults that follow from them."""
        if self.checked != {f.name: getattr(self, f.name) for f in fields(self)}:
            self._read()
            self._settle()
            self._check()

    def _resolve(self):
        """Sets the fields whose default depends on other fields."""
        if self.rollout_precision is None:
            self.rollout_precision = default_precision(self.train_precision, self.denoises)
        if self.lora_sync is None:
            mode = self.vllm_mode if self.use_vllm else "embedded"
            training = self.train_precision if self.is_adapted else None
            self.lora_sync = default_lora_sync(mode, self.rollout_precision, training)
        if self.vllm_sleep_level is None:
            self.vllm_sleep_level = default_sleep_level(self.lora_sync)
        if self.is_correction is None:
            self.is_correction = default_correction(self.rollout_precision, self.has_correction and self.has_rewards)
        if self.use_liger_kernel and self.train_precision in unified_flows():  # ours quantize in the same pass
            self.liger_kernel_config = {"rms_norm": False, "swiglu": False} | (self.liger_kernel_config or {})

    def resolve_for(self, adapted: bool) -> None:
        """
        Records that a run takes the config and whether its policy has an adapter, which is known only once the run has
        its model, and sets the defaults that depend on it. Until then a 4-bit `train_precision` counts as that of a
        frozen base.
        """
        self.is_taken = True
        if adapted == self.is_adapted:
            return
        self.is_adapted = adapted
        if self.train_precision in frozen_bases():
            self._settle()

    def _join_ranks_on_cpus(self):
        """
        Starts the process group of ranks on CPUs, as transformers does for GPUs only. This passes `ddp_timeout` on to
        the ranks, which would otherwise wait for half an hour. It also names the device "cpu", because `torch.load`
        cannot load optimizers to accelerate's "cpu:0".
        """
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and (self.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")):
            os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
            PartialState(cpu=True, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)

    def _check(self):
        """Checks each value, then the fields against each other."""
        check_values(self)
        check_what("fields", Given(self))
        self.checked = {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_trl(cls, args: TrainingArguments) -> "QuantFields":
        """Copies TRL's config, with defaults for the added fields. Raises `ValueError` for any other kind of `args`."""
        if not isinstance(args, cls.trl_config):
            raise ValueError(
                f"`args` is a {type(args).__name__}. It must be a `{cls.__name__}` or TRL's "
                f"`{cls.trl_config.__name__}`."
            )
        config = copy.copy(args)
        config.__class__ = cls
        for f in fields(cls):
            if not hasattr(args, f.name):
                setattr(config, f.name, f.default)
        config._read()
        config._settle()
        config._check()
        return config

    @classmethod
    def own_fields(cls) -> list[str]:
        """Returns the names of the fields that this package adds to TRL's config."""
        return [f.name for section in (QuantFields, *cls.further_sections.values()) for f in fields(section)]

    @property
    def spec(self) -> RunSpec:
        """The run that the fields describe, as they are now. A trainer keeps the one that it was built with."""
        return RunSpec.from_config(self)

    @property
    def fsdp_version(self) -> int | None:
        """The version of FSDP, set by `fsdp` or by accelerate's launcher; `None` without FSDP."""
        if self.fsdp_plugin_args is not None:
            return self.fsdp_plugin_args["fsdp_version"]
        launched = parse_flag_from_env("ACCELERATE_USE_FSDP")
        return int(os.environ.get("FSDP_VERSION", 1)) if launched else None

    @property
    def one_update_per_generation(self) -> bool:
        """Whether each generation serves one optimizer step, which then updates the very policy that sampled it."""
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    @property
    def samples_same_bits(self) -> bool:
        """
        Whether the sampler's log-probabilities are the policy's bit for bit when it is trained. Those of older tokens
        are an older policy's.
        """
        return self.exact_rollouts and self.rollouts_in_flight == 1

    @property
    def needs_reference(self) -> bool:
        """Whether TRL loads a reference model beside the policy, or uses the policy without its adapter as one."""
        return self.beta != 0

    def noise_sigma(self, step: int, total_steps: int) -> float:
        """Returns the standard deviation of the noise at an optimizer step; 0 without a `noise_schedule`."""
        if self.noise_schedule is None:
            return 0.0
        ends = self.noise_sigma_start, self.noise_sigma_end
        return sigma(step, total_steps, self.noise_schedule, self.noise_stages, *ends)

    @property
    def correction_class(self) -> type[Correction]:
        """The class of this run's correction, which states its traits."""
        return ALL_CORRECTIONS[self.is_correction]

    def correction(self) -> Correction | None:
        """
        Builds the correction of this run with its hyperparameters (see [`~config.hyperparameters`]). A hyperparameter
        whose field is `None` keeps its own default. Returns `None` if TRL corrects for its own sampler.
        """
        if self.correction_class.applied_by_trl and self.rollout_precision is None:
            return None
        names = setting_fields(self.is_correction, type(self))
        given = {setting: value for setting, name in names.items() if (value := getattr(self, name)) is not None}
        return self.correction_class(**given)

    def training_settings(self) -> dict:
        """Returns the added fields that change the result of training, as a checkpoint records them."""
        return {name: getattr(self, name) for name in sorted({*self.own_fields()} - {*OPERATIONAL})}

    @classmethod
    def plain_settings(cls) -> dict:
        """Returns the [`~QuantFields.training_settings`] that describe a run of TRL's own trainer."""
        defaults = {f.name: f.default for f in fields(cls)} | INDEPENDENT
        return {name: defaults[name] for name in sorted({*cls.own_fields()} - {*OPERATIONAL})}

    def inherited_settings(self) -> dict:
        """Returns TRL's and transformers' fields that change the result of training, as a checkpoint records them."""
        of_trl = set(self.trl_config.__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__)
        names = {name for name in of_trl if not name.startswith(NOT_LEARNING)} | {*LEARNING}
        return {name: value for name, value in sorted(self.to_sanitized_dict().items()) if name in names}

    def get_process_log_level(self) -> int:
        """Warns if TRL's own trainer, which ignores our fields, got this config. Every trainer calls this first."""
        if not self.is_taken and self.rollout_precision is not None:
            logger.warning(
                "`rollout_precision`=%r acts only with `Quant%s`: this trainer samples without quantization and "
                "ignores the fields that correct for it.",
                self.rollout_precision,
                self.trl_config.__name__.replace("Config", "Trainer"),
            )
        return super().get_process_log_level()
