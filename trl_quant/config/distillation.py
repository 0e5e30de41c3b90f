"""The config of the distillation trainer: TRL's `DistillationConfig` with the fields of this package."""

from dataclasses import dataclass
from typing import ClassVar

from trl import DistillationConfig

from ..precisions import frozen_bases
from .documentation import documentation, explain
from .fields import QuantFields
from .values import check_choice


@dataclass
class TeacherFields:
    """The teacher's precision."""

    teacher_precision: str | None = None
    """Number format of the teacher's decoder: {frozen_bases}. The teacher is quantized while it loads, so it must be
    given by its name. The student then learns from the quantized teacher. If not set, the teacher computes as it is
    loaded.
    """


TEACHING = {"the teacher": explain(TeacherFields)}


@dataclass
class QuantDistillationConfig(TeacherFields, QuantFields, DistillationConfig):
    """
    Configuration of [`QuantDistillationTrainer`]: all fields of TRL's [`~trl.DistillationConfig`], those of
    [`~config.fields.QuantFields`], and the one below. With the defaults alone, the trainer is TRL's
    `DistillationTrainer`.

    `use_vllm` and `rollout_precision` decide where the student's samples come from, as in [`QuantGRPOConfig`]. Unlike
    there, `is_correction` is "none" by default with a `rollout_precision`. Allowed are "none" and the corrections that
    can weigh the prefix before a token: "decoupled", "tis" and "icepop".
    """

    trl_config: ClassVar[type] = DistillationConfig
    further_sections: ClassVar[dict[str, type]] = TEACHING
    has_correction: ClassVar[bool] = True
    corrected_by_trl: ClassVar[bool] = False
    has_rewards: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False  # here `beta` chooses the divergence

    # Fields of TRL's other configs, which are constants in this trainer
    num_generations: ClassVar[int] = 1
    num_iterations: ClassVar[int] = 1
    sync_ref_model: ClassVar[bool] = False
    use_transformers_continuous_batching: ClassVar[bool] = False

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches of a generation. They are those of one optimizer step."""
        return self.gradient_accumulation_steps

    @property
    def generation_batch_size(self) -> int:
        """Completions of a generation, on all ranks together."""
        return self.per_device_train_batch_size * self.world_size * self.gradient_accumulation_steps

    def _check(self):
        check_choice("teacher_precision", self.teacher_precision, frozen_bases())
        super()._check()


QuantDistillationConfig.__doc__ = (QuantDistillationConfig.__doc__ or "") + documentation(TEACHING)
