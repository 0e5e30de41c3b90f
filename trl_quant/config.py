"""Configurations: TRL's `GRPOConfig` with flat fields for the rollout copy, its correction, its noise and its scaling.

Every field is checked when the configuration is built, before any model is loaded.
"""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar, get_type_hints

from trl import GRPOConfig

from .corrections import ACR, AIS, CORRECTIONS, TIS, CorrectionInputs, CorrectionOutput
from .corrections.trl import TRL
from .noise import SCHEDULES, sigma
from .precisions import PRECISIONS, in_vllm
from .rollout import VLLM_MODES
from .rollout.vllm.support import check_engine_kwargs
from .scaling import check_scale
from .values import BOUNDS, CHOICES, CLIPPED_LOSSES, check_at_least, check_bounds, check_choice, check_type, listed


logger = logging.getLogger(__name__)

MODEL_IMPLS = ("vllm", "transformers", "auto")
LORA_SYNCS = ("merge", "adapter")
# Fields of ours that change how a run computes, not what
OPERATIONAL = ("vllm_engine_kwargs", "vllm_sleep_level", "sync_check_steps", "resume_with_changes")
VLLM_FIELDS = ("vllm_engine_kwargs", "vllm_sleep_level", "lora_sync")  # of the colocated engine


@dataclass
class QuantGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`QuantGRPOTrainer`]: every argument of TRL's [`~trl.GRPOConfig`], and those below. With only
    defaults the trainer is TRL's `GRPOTrainer`.

    Where the samples come from: with `use_vllm=True`, vLLM in `rollout_precision`; with `use_vllm=False` and a
    `rollout_precision`, an embedded quantized copy of the policy; without a `rollout_precision`, TRL's own generation.

    Parameters:
        > Parameters that control the rollout copy

        rollout_precision (`str`, *optional*):
            Number format of the copy of the policy that samples completions, a key of [`~precisions.PRECISIONS`]; or
            `"auto"`, with vLLM in colocate mode: measures each precision that vLLM runs here with engines like the
            run's own, and puts the fastest (of those within 5%, the most exact) in place of `"auto"` (a resumed run
            keeps that of its checkpoint). If `None`, TRL generates as it always does.
        vllm_engine_kwargs (`dict`, *optional*):
            Further arguments of vLLM's `LLM` in colocate mode, fields of `vllm.EngineArgs`, such as
            `{"kv_cache_dtype": "fp8"}`, or `{"model": "my-model-int8"}` to start it on a checkpoint that `trl-quant
            prepare` wrote. Those that have a field of their own here are refused.
        vllm_sleep_level (`int`, *optional*, defaults to `2`):
            What vLLM does with its weights while it sleeps (`vllm_enable_sleep_mode=True`): 2 discards them, 1 keeps
            them in host memory. `lora_sync="adapter"` needs 1, since nothing brings the base back.
        lora_sync (`str`, *optional*, defaults to `"merge"`):
            How a LoRA adapter reaches vLLM: `"merge"` streams the base with the adapter merged in and quantizes the
            sum; `"adapter"` sends A and B alone and leaves the quantized base as it was loaded.
        sync_check_steps (`int`, *optional*, defaults to `50`):
            Steps from one self-check of the vLLM engine to the next: a few prompts are scored by the engine and by the
            policy, and training stops where they disagree by more than the format explains. 0 switches it off.

        resume_with_changes (`bool`, *optional*, defaults to `False`):
            Whether a run may go on from a checkpoint that was trained with other settings of the rollout copy, its
            correction or its noise. Each difference is logged. By default it is refused.

        > Parameters that control the correction of the mismatch between sampler and trainer

        is_correction (`str`, *optional*):
            What a token of the quantized sampler is worth: `"trl"` (TRL's own importance sampling, governed by its
            `vllm_importance_sampling_*` arguments), `"none"`, `"coupled"`, `"decoupled"`, `"tis"`, `"acr"` or `"ais"`.
            If `None`, `"trl"` without a `rollout_precision` and `"acr"` with one.
        scale_rewards (`str`, *optional*):
            As in TRL. If `None`, what the correction's method asks for: `"none"` with `ais`, else TRL's default.
        loss_type (`str`, *optional*):
            As in TRL. If `None`, what the correction's method asks for: `"grpo"` with `ais`, else TRL's default.
        is_cap (`float`, *optional*):
            Cap C >= 1 on the ratio w = exp(old_logps - rollout_logps), for `tis`, `acr` and `ais`. If `None`, 2 for
            `tis` and `acr`, 5 for `ais`.
        ais_delta (`float`, *optional*, defaults to `0.02`):
            Mean |old_logps - rollout_logps|, in nats, at which AIS applies its full correction.
        ais_gamma (`float`, *optional*, defaults to `1.2`):
            Growth of the advantages' standard deviation under the weights that AIS tolerates.
        ais_beta_var (`float`, *optional*, defaults to `1.0`):
            Strength of AIS's penalty beyond `ais_gamma`.

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

        > Parameters that control update-aware quantization (UAQ)

        uaq_scale (`float`, *optional*):
            Factor s > 0 of the invariant scaling applied once before training: each norm weight is multiplied by s and
            the linear layers that it feeds are divided by s. QuRL uses 1.5 for INT8 and FP8. If `None`, no scaling.
    """

    is_taken: ClassVar[bool] = False  # by a trainer of ours
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    rollout_precision: str | None = field(
        default=None,
        metadata={
            "help": f"Number format of the copy of the policy that samples completions: {listed(PRECISIONS)}, or "
            "'auto' for the fastest in vLLM, measured at the start. If not set, TRL generates as it always does."
        },
    )
    vllm_engine_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Further arguments of vLLM's `LLM` in colocate mode, fields of `vllm.EngineArgs`, as a dict or a "
            "JSON string."
        },
    )
    vllm_sleep_level: int = field(
        default=2,
        metadata={"help": "vLLM's sleep level with `vllm_enable_sleep_mode`: 2 discards the weights, 1 keeps them."},
    )
    lora_sync: str = field(
        default="merge",
        metadata={"help": "How a LoRA adapter reaches vLLM: 'merge' into the quantized weights, or as 'adapter'."},
    )
    sync_check_steps: int = field(
        default=50,
        metadata={"help": "Steps from one self-check of the vLLM engine to the next; 0 switches it off."},
    )
    resume_with_changes: bool = field(
        default=False,
        metadata={"help": "Go on from a checkpoint of a run with other rollout settings; the log says which."},
    )
    is_correction: str | None = field(
        default=None,
        metadata={
            "help": f"Correction of the mismatch between sampler and trainer: 'trl' (TRL's own), "
            f"{listed(CORRECTIONS)}. If not set, 'trl' without a `rollout_precision`, 'acr' with one."
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
            "help": "Cap C >= 1 on the ratio between trainer and sampler, for 'tis', 'acr' and 'ais'. If not set, "
            f"{TIS.cap:g} for 'tis', {ACR.cap:g} for 'acr', {AIS.cap:g} for 'ais'."
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
        super().__post_init__()
        self._check()

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
        if self.is_correction is None:
            self.is_correction = "trl" if self.rollout_precision is None else "acr"
        for name, value in self._method_settings().items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _method_settings(self) -> dict[str, str]:
        """`scale_rewards` and `loss_type` as the correction's method has them, else as TRL has them."""
        trl = {name: GRPOConfig.__dataclass_fields__[name].default for name in ("scale_rewards", "loss_type")}
        return trl | getattr(CORRECTIONS.get(self.is_correction), "settings", {})

    def _check(self):
        check_choice("rollout_precision", self.rollout_precision, (*PRECISIONS, "auto"))
        check_choice("lora_sync", self.lora_sync, LORA_SYNCS)
        check_choice("vllm_sleep_level", self.vllm_sleep_level, (1, 2))
        check_choice("is_correction", self.is_correction, ("trl", *CORRECTIONS))
        check_choice("noise_schedule", self.noise_schedule, SCHEDULES)
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        check_choice("vllm_mode", self.vllm_mode, VLLM_MODES)
        check_at_least("is_cap", self.is_cap, 1.0)
        check_at_least("ais_delta", self.ais_delta, 0.0, strict=True)
        check_at_least("ais_gamma", self.ais_gamma, 0.0, strict=True)
        check_at_least("ais_beta_var", self.ais_beta_var, 0.0)
        check_at_least("noise_sigma_end", self.noise_sigma_end, 0.0, strict=True)
        check_at_least("noise_stages", self.noise_stages, 3)
        check_at_least("sync_check_steps", self.sync_check_steps, 0)
        for name in BOUNDS:
            check_bounds(name, getattr(self, name))
        if self.uaq_scale is not None:
            check_scale(self.uaq_scale, "uaq_scale")
        if not self.noise_sigma_start >= self.noise_sigma_end:
            raise ValueError(
                f"`noise_sigma_start`={self.noise_sigma_start!r} is below `noise_sigma_end`={self.noise_sigma_end!r}. "
                "The noise decays: it must start at least as large as it ends."
            )

        if self.rollout_precision is not None:
            self._check_rollout()
        else:
            self._check_no_rollout()
        self._check_hyperparameters()
        if self.is_correction == "acr":
            self._check_acr()
        if self.is_correction != "trl":
            self._check_trl_correction()
        if self.use_vllm or self.rollout_precision is not None:
            self._check_sampler()

    def _check_hyperparameters(self):
        """Those of another correction, or of a noise that there is not, are refused."""
        taken = {f.name for f in fields(CORRECTIONS[self.is_correction])} if self.is_correction != "trl" else set()
        for correction in CORRECTIONS:
            names = [name for name in self.__dataclass_fields__ if name.startswith(f"{correction}_")]
            if correction != self.is_correction:
                self._refuse_set(names, f"`is_correction`={correction!r}, and it is {self.is_correction!r}")
        if "cap" not in taken:
            capped = listed(name for name, kind in CORRECTIONS.items() if "cap" in kind.__dataclass_fields__)
            self._refuse_set(("is_cap",), f"`is_correction` {capped}, and it is {self.is_correction!r}")
        if self.noise_schedule is None:
            self._refuse_set(("noise_sigma_start", "noise_sigma_end", "noise_stages"), "a `noise_schedule`")
        if self.uaq_scale is not None and self.sync_ref_model:
            raise ValueError(
                f"`uaq_scale`={self.uaq_scale!r} cannot be combined with `sync_ref_model=True`, which would mix scaled "
                "weights with the reference model's unscaled ones. Unset one of the two."
            )

    def _check_sampler(self):
        """What is said of a run whose samples are compared with the trainer."""
        cut = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": bool(self.min_p)}
        if any(cut.values()):
            logger.warning(
                "%s: the sampler's log-probabilities are those after truncation, the trainer's are not. Part "
                "of `mismatch/*`, and of what corrections act on, is then the truncation and not `rollout_precision`: "
                "with top_p=0.9 the mean weight is 0.9 without any quantization.",
                " and ".join(f"`{name}`={getattr(self, name)!r}" for name, value in cut.items() if value),
            )
        if self.is_correction == "trl" and self.rollout_precision and not self.vllm_importance_sampling_correction:
            logger.warning(
                "`vllm_importance_sampling_correction=False` with `is_correction='trl'`: the mismatch between sampler "
                "and trainer is neither corrected nor measured."
            )
        if self.is_correction == "acr" and self.one_update_per_generation:
            logger.warning(
                "With one update per generation no clip bound acts, and `is_correction='acr'` is 'tis', bit for bit. "
                "They part where a generation serves several updates (`num_iterations`, `steps_per_generation`)."
            )

    def _check_no_rollout(self):
        self._refuse_set((*VLLM_FIELDS, "sync_check_steps"), "a `rollout_precision`, which is not set")
        if self.noise_schedule is not None:
            raise ValueError(
                f"`noise_schedule`={self.noise_schedule!r} needs a copy of the policy to add noise to, but "
                "`rollout_precision` is not set. Set `rollout_precision='bf16'` for noise without quantization."
            )

    def _check_rollout(self):
        if self.use_transformers_continuous_batching:
            raise ValueError(
                f"`rollout_precision`={self.rollout_precision!r} cannot be combined with "
                "`use_transformers_continuous_batching=True`, which samples from the full-precision policy and returns "
                "no log-probabilities. Unset one of the two."
            )
        if self.rollout_precision == "auto" and not (self.use_vllm and self.vllm_mode == "colocate"):
            raise ValueError(
                "`rollout_precision`='auto' measures the engines of vLLM: set `use_vllm=True` and "
                "`vllm_mode='colocate'` (a server runs in the precision that it was started in), or name a precision."
            )
        if self.use_vllm and self.rollout_precision not in (*in_vllm(), "auto"):
            raise ValueError(
                f"`rollout_precision`={self.rollout_precision!r} is not available with `use_vllm=True`. Allowed there: "
                f"{listed(in_vllm())}; with `use_vllm=False` it runs in the embedded engine."
            )
        self._check_vllm()

    def _check_vllm(self):
        if not self.use_vllm:
            return self._refuse_set((*VLLM_FIELDS, "sync_check_steps"), "vLLM, and `use_vllm=False`")
        check_choice("vllm_model_impl", self.vllm_model_impl, MODEL_IMPLS)
        length = self.vllm_max_model_length
        if length is not None and self.max_completion_length is not None and length <= self.max_completion_length:
            raise ValueError(
                f"`vllm_max_model_length`={length} leaves no room for a prompt beside `max_completion_length`="
                f"{self.max_completion_length}. It must be greater."
            )
        check_engine_kwargs(self.vllm_engine_kwargs or {})
        if self.vllm_mode == "server":
            instead = "`vllm_mode='colocate'`: a server takes its arguments when it is started, and merged weights"
            self._refuse_set(VLLM_FIELDS, instead)
        if self.lora_sync == "adapter" and self.vllm_enable_sleep_mode and self.vllm_sleep_level == 2:
            raise ValueError(
                "`lora_sync`='adapter' cannot be combined with `vllm_sleep_level`=2, which discards the engine's base "
                "weights: no sync brings them back. Set `vllm_sleep_level=1`, or `lora_sync='merge'`."
            )

    def _refuse_set(self, names, reason: str):
        """Raises `ValueError` for fields that were set but do not act."""
        default = {f.name: f.default for f in fields(self)}
        given = [
            f"`{name}`={getattr(self, name)!r}" for name in names if getattr(self, name) not in (default[name], {})
        ]
        if given:
            raise ValueError(f"{' and '.join(given)} acts only with {reason}.")

    def _check_acr(self):
        others = "`is_correction` 'tis', 'ais', 'decoupled', 'none' or 'trl'"
        if self.delta is not None:
            raise ValueError(
                f"`is_correction`='acr' widens the upper clip bound without limit, and `delta`={self.delta!r} cuts the "
                f"ratio before it. Unset `delta`, or use {others}."
            )
        if self.loss_type not in CLIPPED_LOSSES:
            raise ValueError(
                f"`is_correction`='acr' widens the upper clip bound of the policy ratio, and `loss_type`="
                f"{self.loss_type!r} has none. Use {others}, or a loss that clips: {', '.join(CLIPPED_LOSSES)}."
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                "`is_correction`='acr' bounds the ratio of each token, but `importance_sampling_level`="
                f"{self.importance_sampling_level!r} has one ratio for a whole sequence. Use {others}."
            )

    def _check_trl_correction(self):
        has_sampler = self.use_vllm or self.rollout_precision is not None
        if has_sampler and not self.vllm_importance_sampling_correction:
            raise ValueError(
                f"`is_correction`={self.is_correction!r} compares the sampler with the trainer, which "
                "`vllm_importance_sampling_correction=False` switches off. Leave that at True, and use "
                "`is_correction='none'` to ignore the sampler."
            )
        default = {f.name: f.default for f in fields(GRPOConfig)}
        names = [f"vllm_importance_sampling_{f.name}" for f in fields(TRL)]
        changed = [name for name in names if has_sampler and getattr(self, name) != default[name]]
        if changed:
            logger.warning(
                "%s only act with `is_correction='trl'`; they are ignored with is_correction=%r.",
                " and ".join(f"`{name}`" for name in changed),
                self.is_correction,
            )

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
        config._check()
        return config

    @property
    def epsilon_low(self) -> float:
        """TRL's `epsilon`, by the name of the bound that it is."""
        return self.epsilon

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

    @classmethod
    def plain_settings(cls) -> dict:
        """[`~QuantGRPOConfig.training_settings`] of a checkpoint of TRL's own trainer."""
        defaults = {f.name: f.default for f in fields(QuantGRPOConfig)} | {"is_correction": "trl"}
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
