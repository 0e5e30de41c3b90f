"""The config of the RLOO trainer: TRL's `RLOOConfig` with the fields of this package, and the level of the weights."""

from dataclasses import dataclass
from typing import ClassVar

from trl import RLOOConfig

from .documentation import documentation, explain
from .fields import QuantFields
from .values import check_choice


@dataclass
class LevelFields:
    """The unit that a correction weighs."""

    importance_sampling_level: str = "token"
    """What the correction weighs: 'token' gives each token the weight of its own ratio w, 'sequence' gives all tokens
    of a completion the weight of their product. In both cases RLOO clips the policy ratio of the whole completion.
    """


WEIGHING = {"the unit that a correction weighs": explain(LevelFields)}


@dataclass
class QuantRLOOConfig(LevelFields, QuantFields, RLOOConfig):
    """
    Configuration of [`QuantRLOOTrainer`]: all fields of TRL's [`~trl.RLOOConfig`], those of
    [`~config.fields.QuantFields`], and the one below. With the defaults alone, the trainer is TRL's `RLOOTrainer`.

    `use_vllm` and `rollout_precision` decide where samples come from, as in [`QuantGRPOConfig`]. TRL's RLOO has no
    correction of its own, so `is_correction="trl"` leaves TRL's sampler uncorrected, and is refused with a
    `rollout_precision`. `acr` is refused too: it moves the clip bound of a token, and RLOO clips whole completions.
    """

    trl_config: ClassVar[type] = RLOOConfig
    further_sections: ClassVar[dict[str, type]] = WEIGHING
    has_correction: ClassVar[bool] = True
    corrected_by_trl: ClassVar[bool] = False
    clips_completions: ClassVar[bool] = True

    def _check(self):
        check_choice("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        super()._check()


QuantRLOOConfig.__doc__ = (QuantRLOOConfig.__doc__ or "") + documentation(WEIGHING)
