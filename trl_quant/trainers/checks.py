"""Checks that need the trainer or its loaded model. All others are in `config/` and run before a model is loaded."""

import logging

from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn import Dropout, Module

from ..config.fields import QuantFields
from ..config.given import name_of
from ..config.lengths import Context, check_fits, context_of
from ..storage.adapter import NAME, active_adapters


logger = logging.getLogger(__name__)


def config_for(trainer, model, args) -> QuantFields:
    """
    Returns the configuration of a trainer: `args`, TRL's config with defaults for the fields of this package, or for
    `None` the defaults, with a directory of the model's name. Fields that were assigned after the config was built are
    checked here.

    Raises:
        `ValueError`: The config, its correction or its way of sampling does not fit the trainer's class, or the policy
            is no model and no name of one.
    """
    kind, name = trainer.config_class, name_of(model)
    if args is None:
        args = kind(f"{name.split('/')[-1]}-{kind.trl_config.__name__.removesuffix('Config')}")
    elif not (isinstance(args, QuantFields) and isinstance(args, kind.trl_config)):
        args = kind.from_trl(args)
    args.check_assigned()
    _check_method(trainer, args)
    return args


def _check_method(trainer, args) -> None:
    method = trainer.config_class.__dataclass_fields__["is_correction"].default
    if method is not None and args.is_correction != method:
        raise ValueError(
            f"`is_correction`={args.is_correction!r}, but {type(trainer).__name__} runs {method!r}. Pass a "
            f"`{trainer.config_class.__name__}`, or use `QuantGRPOTrainer`."
        )
    if args.denoises != trainer.config_class.denoises:
        raise ValueError(
            f"`args` is a {type(args).__name__}, but {type(trainer).__name__} takes a "
            f"`{trainer.config_class.__name__}`: one samples by denoising, the other from left to right."
        )
    if args.has_critic != trainer.config_class.has_critic:
        raise ValueError(
            f"`args` is a {type(args).__name__}, but {type(trainer).__name__} takes a "
            f"`{trainer.config_class.__name__}`: PPO has a critic, and GRPO compares the completions of a prompt."
        )


def check_model(trainer, engine) -> None:
    """
    Raises `ValueError` if `trainer.model` was replaced, because its engine and its optimizer still hold the model that
    the trainer was built with.
    """
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # then `trainer.model` is a wrapper
    if not sharded and trainer.model is not engine.model:
        raise ValueError(
            "`trainer.model` is another model than the trainer was built with, and the engine samples from the first "
            "one. Load the weights into the first (`load_state_dict`), or build a trainer for the new one."
        )


def check_ends_early(args, engine, ends_early: bool) -> None:
    """Raises `ValueError` for partial rollouts with an engine that samples only whole completions."""
    if not ends_early:
        raise ValueError(
            f"`rollouts_in_flight`={args.rollouts_in_flight!r}, but {type(engine).__name__}.sample has no argument "
            "`enough`, so it samples only whole completions. Add it (see `rollout.engine.Engine`), or leave "
            "`rollouts_in_flight` at 1."
        )


def check_adapters(model: Module) -> None:
    """Raises `ValueError` if a policy computes with other adapters than the one that a checkpoint is read with."""
    active = active_adapters(model)
    if active not in ([], [NAME]):
        raise ValueError(
            f"The policy computes with the adapters {active}, but is resumed, exported and evaluated with the adapter "
            f"{NAME!r} alone. Merge the others into the base (`merge_and_unload`), save that, and train one adapter on "
            f"it, by the name {NAME!r}."
        )


def tell_noise(model: Module, args) -> None:
    """Warns of dropout and NEFTune in a policy with an engine, because only the trainer applies them."""
    noise = {
        "dropout": max((module.p for module in model.modules() if isinstance(module, Dropout)), default=0.0),
        "attention_dropout": max(
            (getattr(module, "attention_dropout", 0.0) for module in model.modules()), default=0.0
        ),
        "neftune_noise_alpha": args.neftune_noise_alpha,
    }
    given = [f"`{name}`={value!r}" for name, value in noise.items() if value]
    if given:
        logger.warning(
            "%s: the trainer scores with this noise, and the engine samples without it. Part of `mismatch/*`, and of "
            "what the correction acts on, then comes from the noise and not from `rollout_precision`. Leave it at 0, "
            "as in a `peft_config` with `lora_dropout=0`.",
            " and ".join(given),
        )


def check_trainable(model: Module) -> None:
    """Raises `ValueError` for a model without anything to train."""
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "No parameter of the policy requires a gradient, so nothing would be trained. This happens after "
            "`merge_and_unload()`, `disable_adapter_layers()`, or `PeftModel.from_pretrained(...)` without "
            "`is_trainable=True`. Pass a `peft_config`, or call `model.requires_grad_(True)`."
        )
    if any(isinstance(module, BaseTunerLayer) and module.merged for module in model.modules()):
        raise ValueError("The policy's adapters are merged into it and would not be trained. Call `unmerge_adapter()`.")


class DrawnPrompts:
    """
    Checks the prompts of each generation against the sampler's context: those of a stream, whose lengths are not known
    before, and all others too, since only some of a large dataset are measured before the run.

    Args:
        trainer: The trainer, with a policy.
        engine ([`~rollout.RolloutEngine`] or `None`): The engine that samples; `None` if TRL samples.
    """

    def __init__(self, trainer, engine):
        self.trainer = trainer
        self.context = context_of(trainer.args, trainer.model.config)
        if hasattr(engine, "limits"):  # vLLM says what it takes
            self.context = Context(engine.limits()[1], "the engine's `max_model_len`", True)
        self.all_fitted = True

    def check(self, prompts: list[list[int]]) -> None:
        """Raises `ValueError` for a prompt that fills the context, and warns once of completions that are shortened."""
        lengths = [len(ids) for ids in prompts]
        if self.context is None or not (self.all_fitted or max(lengths) >= self.context.tokens):
            return
        where = f"The generation at step {self.trainer.state.global_step}"
        self.all_fitted = check_fits(self.trainer.args, self.context, lengths, where)
