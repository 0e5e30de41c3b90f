"""The config of the PPO trainer: the config of GRPO, with the fields of the critic."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..corrections.base import Range
from .documentation import documentation, explain
from .grpo import QuantGRPOConfig
from .values import check_range


@dataclass
class CriticFields:
    """The critic, and the advantages that it gives."""

    num_generations: Annotated[int, Range(1)] = 1
    """Completions of a prompt in a generation. PPO does not compare them, so one is enough. The generation batch must
    be divisible by it.
    """

    vf_share_layers: bool = False
    """Whether the critic is a value head on the policy's layers, which the value loss then trains too. If not, the
    critic is a model of its own.
    """

    vf_coef: Annotated[float, Range(0.0, open_low=True)] = 0.1
    """Factor of the value loss in the sum of both losses. It acts only with `vf_share_layers`."""

    value_model_name_or_path: str | None = None
    """Model that the critic starts from, a hub id or a directory: a language model, a reward model, or the `critic` of
    an earlier run's checkpoint. It must have the policy's tokens. If not set, the policy's own checkpoint. A value head
    that the model does not have starts at zero.
    """

    value_learning_rate: Annotated[float, Range(0.0)] = 1e-5
    """Learning rate of the critic; with `vf_share_layers`, of the value head. The schedule has the shape of the
    policy's, and the optimizer has the policy's other settings.
    """

    gamma: Annotated[float, Range(0.0, 1.0)] = 1.0
    """Discount factor per token of the rewards that come later."""

    lam: Annotated[float, Range(0.0, 1.0)] = 1.0
    """Lambda of generalized advantage estimation (GAE): 1 compares a token's value with the reward that the completion
    gets, 0 with the critic's value of the next token.
    """

    cliprange_value: Annotated[float | None, Range(0.0, open_low=True)] = 0.5
    """How far a value may move from the one at generation time before the critic's loss clips it. If None, nothing is
    clipped.
    """


CRITICIZING = {"the critic, and the advantages that it gives": explain(CriticFields)}


@dataclass
class QuantPPOConfig(CriticFields, QuantGRPOConfig):
    """
    Configuration of [`QuantPPOTrainer`]: all fields of TRL's [`~trl.GRPOConfig`], those of
    [`~config.fields.QuantFields`], and the ones below.

    `beta` is the coefficient of TRL's KL term, which is part of the loss and not of the reward. Options that compare
    the completions of a prompt are refused: `scale_rewards` must be "none" and `dynamic_sampling_rounds` 0. The loss
    clips the ratio of each token, and `loss_type` says how it averages over tokens.
    """

    further_sections: ClassVar[dict[str, type]] = CRITICIZING
    has_dynamic_sampling: ClassVar[bool] = False
    has_critic: ClassVar[bool] = True

    def __post_init__(self):
        self._read()  # first, so that an error names `num_generations` as it was given
        from ..trl_seams import one_generation_allowed  # here, because it loads vLLM

        with one_generation_allowed(self):
            super().__post_init__()

    def _read(self):
        super()._read()
        check_range("num_generations", self.num_generations, Range(1))  # TRL divides by it

    def _method_settings(self) -> dict[str, str]:
        return super()._method_settings() | {"scale_rewards": "none"}

    @property
    def critic_source(self) -> dict:
        """
        The arguments of `from_pretrained` that locate the critic. The policy's checkpoint is read at its own revision.
        """
        options = {"trust_remote_code": self.trust_remote_code}
        revision = (self.model_init_kwargs or {}).get("revision")
        if self.value_model_name_or_path is None and revision is not None:
            options["revision"] = revision
        return options

    @classmethod
    def from_trl(cls, args) -> "QuantPPOConfig":
        raise ValueError(f"`args` is a {type(args).__name__}. It must be a `{cls.__name__}`: TRL has no config of PPO.")

    from_grpo = from_trl


QuantPPOConfig.__doc__ = (QuantPPOConfig.__doc__ or "") + documentation(CRITICIZING)
