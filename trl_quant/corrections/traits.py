"""The traits of a correction. Other code reads them instead of comparing the correction's name."""

from typing import ClassVar

from .base import CorrectionInputs, CorrectionOutput


class Correction:
    """
    Base of the corrections. Each is a frozen dataclass of its hyperparameters, and overrides the traits that it has.

    Attributes:
        whole_batch (`bool`): Its weights need all tokens of a generation, scored before the first update.
        every_update (`bool`):
            It compares the sampler with the current policy: at each update, `old_logps` are the current policy's, so
            the value of `R` is 1.
        token_only (`bool`): It needs the ratio of each token (`importance_sampling_level="token"`).
        has_levels (`bool`): Its weights at the level of sequences differ from those of tokens.
        weighs_prefixes (`bool`): It maps one ratio to one weight, so it can also weigh the prefix before a token.
        moves_clip_bounds (`bool`): It sets clip bounds for each token, so it needs a loss that clips `R`.
        clips_sampler (`bool`): Its proximal policy is the sampler: `R` is the policy's ratio to the sampler.
        ignores_sampler (`bool`): It leaves GRPO's loss as if the policy itself had sampled.
        applied_by_trl (`bool`): TRL computes and applies its weights; here it is only measured.
        unfit_for_few_bits (`bool`): It loses what a run learns where the sampler has 4 bits, in the study's runs.
        settings (`dict[str, str]`): GRPO settings that its paper prescribes, by TRL's names.
        aliases (`dict[str, str]`):
            hyperparameter -> the config's field that sets it, where that is not `<correction>_<hyperparameter>`.
    """

    whole_batch: ClassVar[bool] = False
    every_update: ClassVar[bool] = False
    token_only: ClassVar[bool] = False
    has_levels: ClassVar[bool] = True
    weighs_prefixes: ClassVar[bool] = False
    moves_clip_bounds: ClassVar[bool] = False
    clips_sampler: ClassVar[bool] = False
    ignores_sampler: ClassVar[bool] = False
    applied_by_trl: ClassVar[bool] = False
    unfit_for_few_bits: ClassVar[bool] = False
    settings: ClassVar[dict[str, str]] = {}
    aliases: ClassVar[dict[str, str]] = {}

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        """Returns the weights of a batch, and for some methods clip bounds or another proximal policy."""
        raise NotImplementedError
