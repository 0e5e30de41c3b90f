"""The config of the trainer of masked diffusion models: [`QuantGRPOConfig`] with the schedule and the masks."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..corrections.base import Range
from .documentation import documentation, explain
from .grpo import QuantGRPOConfig


@dataclass
class DenoisingFields:
    """How completions are denoised, and how they are scored."""

    block_length: Annotated[int, Range(1)] = 32
    """Tokens of a block. Blocks are denoised from left to right. It must divide `max_completion_length`."""

    tokens_per_step: Annotated[int, Range(1)] = 2
    """Tokens that each denoising step writes: those of the block that the model is surest of. It must divide
    `block_length`.
    """

    cache_finished_blocks: bool = False
    """Whether the denoising steps of a block share the keys and values of the prompt and of the blocks before it, as
    the block's first step has computed them. Faster, but an approximation: with attention in both directions, exact
    keys and values would change at each step. Scoring does not use it.
    """

    prompt_mask_probability: Annotated[float, Range(0.0, 1.0)] = 0.15
    """Probability with which each token of a prompt is masked where a completion is scored."""

    mask_token_id: Annotated[int | None, Range(0)] = None
    """The mask token. If not set, the tokenizer's, else the `mask_token_id` of the model's config."""

    prompt_mask_draws: Annotated[int | None, Range(1)] = None
    """Number of masks for each prompt of a generation, at most `num_iterations`. A completion that is trained on
    several times uses one mask after the other, and policy, reference and sampler score it once under each mask. If not
    set, `num_iterations`, so that each update of a completion has a mask of its own; or 1 with a
    `prompt_mask_probability` of 0 or 1, where all masks are the same.
    """


DENOISING = {"denoising and the one-step estimate": explain(DenoisingFields)}


@dataclass
class DiffusionGRPOConfig(DenoisingFields, QuantGRPOConfig):
    """
    Configuration of [`DiffusionGRPOTrainer`]: [`QuantGRPOConfig`] with the fields below.

    Completions come from an embedded copy of the policy in the `rollout_precision`. If that is not set, it is
    `train_precision`, or else "bf16", with which the copy is not quantized. Fields that only a sampler from left to
    right can use are refused.
    """

    further_sections: ClassVar[dict[str, type]] = DENOISING
    denoises: ClassVar[bool] = True

    def _resolve(self):
        if self.pack_sequences is None:
            self.pack_sequences = False
        super()._resolve()

    @property
    def mask_draws(self) -> int:
        """The number of masks that each prompt of a generation has."""
        if self.prompt_mask_draws is not None:
            return self.prompt_mask_draws
        return self.num_iterations if 0 < self.prompt_mask_probability < 1 else 1


DiffusionGRPOConfig.__doc__ = (DiffusionGRPOConfig.__doc__ or "") + documentation(DENOISING)
