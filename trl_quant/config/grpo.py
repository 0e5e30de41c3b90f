"""The configs of the GRPO trainers: TRL's `GRPOConfig` with the fields of this package."""

import logging
from dataclasses import dataclass, field
from typing import ClassVar

from trl import GRPOConfig

from ..corrections import ALL_CORRECTIONS, Correction
from .documentation import documentation, explain
from .fields import SECTIONS, QuantFields
from .values import CLIPPED_LOSSES, check_choice, check_type


logger = logging.getLogger(__name__)

CHOICES = {  # of TRL's fields, which TRL checks only after it has sampled
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}


@dataclass
class QuantGRPOConfig(QuantFields, GRPOConfig):
    """
    Configuration of [`QuantGRPOTrainer`]: all fields of TRL's [`~trl.GRPOConfig`], and those of
    [`~config.fields.QuantFields`]. With the defaults alone, the trainer is TRL's `GRPOTrainer`.

    `use_vllm` and `rollout_precision` decide where samples come from. With `use_vllm=True`, they come from vLLM in the
    `rollout_precision`. With `use_vllm=False` and a `rollout_precision`, they come from an embedded quantized copy of
    the policy. Without a `rollout_precision`, TRL generates as usual.
    """

    trl_config: ClassVar[type] = GRPOConfig
    has_correction: ClassVar[bool] = True
    has_dynamic_sampling: ClassVar[bool] = True

    scale_rewards: str | None = None
    """As in TRL. If not set, 'none' with `is_correction` 'ais', else TRL's default, 'group'."""

    loss_type: str | None = None
    """As in TRL. If not set, 'grpo' with `is_correction` 'ais', else TRL's default, 'dapo'."""

    def _resolve(self):
        super()._resolve()
        for name, value in self._method_settings().items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _method_settings(self) -> dict[str, str]:
        """Returns `scale_rewards` and `loss_type` as the correction's method defines them, or TRL's defaults."""
        trl = {name: GRPOConfig.__dataclass_fields__[name].default for name in ("scale_rewards", "loss_type")}
        correction_class = ALL_CORRECTIONS.get(self.is_correction, Correction)  # `check_values` refuses unknown names
        return trl | correction_class.settings

    def _check(self):
        check_choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        check_choice("loss_type", self.loss_type, (*CLIPPED_LOSSES, "cispo", "sapo", "vespo"))
        for name, allowed in CHOICES.items():
            check_type(name, getattr(self, name), str)
            check_choice(name, getattr(self, name), allowed)
        super()._check()

    @classmethod
    def from_trl(cls, args: GRPOConfig) -> "QuantGRPOConfig":
        """
        Copies TRL's config into one of this class. TRL's values are kept, and the added fields get their defaults.
        Settings that the correction's method defines replace TRL's defaults, and the log says so.
        """
        config = super().from_trl(args)
        for name, value in config._method_settings().items():
            default = GRPOConfig.__dataclass_fields__[name].default
            if value != default and getattr(args, name) == default:
                logger.warning(
                    "`%s` is set to %r, which the method of `is_correction`=%r needs.",
                    name,
                    value,
                    config.is_correction,
                )
                setattr(config, name, value)
        return config

    from_grpo = from_trl  # the earlier name, from when GRPO was the only trainer

    def correction(self) -> Correction | None:
        """
        Builds the correction of this run with its hyperparameters (see [`~QuantFields.correction`]). Returns `None` if
        TRL corrects for its own sampler, or if there is nothing to correct.
        """
        if self.correction_class.applied_by_trl and not self.vllm_importance_sampling_correction:
            return None
        return super().correction()


explain(QuantGRPOConfig)
QuantGRPOConfig.__doc__ = (QuantGRPOConfig.__doc__ or "") + documentation(SECTIONS)


@dataclass
class AISGRPOConfig(QuantGRPOConfig):
    """Configuration of [`AISGRPOTrainer`]: [`QuantGRPOConfig`] with `is_correction="ais"` and the settings of AIS."""

    is_correction: str | None = field(
        default="ais", metadata=QuantGRPOConfig.__dataclass_fields__["is_correction"].metadata
    )
