"""Holds what is known of a run before a model is loaded: settings, the trainer's other arguments, models' configs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
from accelerate.utils import is_peft_model
from torch.nn import Module
from transformers import AutoConfig, AutoProcessor, PreTrainedConfig, PreTrainedModel

from ..models.families import number_of_experts
from ..reading import reading
from ..run_spec import RunSpec
from ..storage.named import check_named
from ..storage.source import skeleton


OF_LOADING = ("attn_implementation", "dtype", "quantization_config")  # arguments of a model that its config lacks


def name_of(model) -> str:
    """Returns the name that a model is or was loaded by. Raises `ValueError` for anything but a model or its name."""
    if isinstance(model, str):
        return model
    if not isinstance(model, Module) or not hasattr(model, "config"):
        given = repr(model) if len(repr(model)) < 100 else f"{type(model).__name__}(...)"
        raise ValueError(
            f"`model`={given} must be a name, a directory or a model of transformers; a directory is given as a string."
        )
    return getattr(model.config, "name_or_path", None) or ""


def read_policy(model, args) -> PreTrainedConfig:
    """
    Returns the config of a policy. For a name, it is read as TRL will read it: `model_init_kwargs` replace its fields.
    """
    if not isinstance(model, str):
        return model.config
    given = args.model_init_kwargs or {}
    options = {name: value for name, value in given.items() if name not in OF_LOADING}
    options["trust_remote_code"] = args.trust_remote_code
    if Path(model, "adapter_config.json").is_file() and not Path(model, "config.json").is_file():
        raise ValueError(
            f"`model`={model!r} is an adapter without its base. Load both, with "
            "`peft.AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True)`, and pass what that returns."
        )
    try:
        with reading(model):
            return AutoConfig.from_pretrained(model, **options)
    except (OSError, ValueError) as error:
        fault = "cannot be read"
        if Path(model).is_dir() and not Path(model, "config.json").is_file():
            fault = "is a directory without a config.json"
        raise ValueError(f"`model`={model!r} {fault}: {error}") from error


def read_processing_class(name: str, args):
    """Returns the tokenizer or processor that TRL loads for a policy of this name."""
    options = {"revision": (args.model_init_kwargs or {}).get("revision")}
    with reading(name):
        return AutoProcessor.from_pretrained(name, trust_remote_code=args.trust_remote_code, **options)


def read_teacher(teacher, args) -> PreTrainedConfig:
    """Returns the config of a teacher. For a name, it is read as TRL will read it."""
    if not isinstance(teacher, str):
        return teacher.config
    revision = (args.teacher_model_init_kwargs or {}).get("revision", args.teacher_model_revision)
    options = {} if revision is None else {"revision": revision}
    check_named("teacher_model", teacher, revision)
    try:
        with reading(teacher):
            return AutoConfig.from_pretrained(teacher, trust_remote_code=args.trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"`teacher_model`={teacher!r} cannot be read: {error}") from error


def vocabulary_sizes(args, model, teacher) -> tuple[int, int]:
    """Returns the rows of the student's and of the teacher's embedding, by their configs."""
    configs = read_policy(model, args), read_teacher(teacher, args)
    return tuple(config.get_text_config().vocab_size for config in configs)


@dataclass(frozen=True)
class Given:
    """
    What is known of a run. Configs of models are read when they are first asked for.

    Parameters:
        args ([`~config.fields.QuantFields`]):
            The run's settings.
        model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            The policy, or its name.
        others (`Mapping`, *optional*):
            The trainer's other arguments, such as `peft_config`. One that is not there counts as `None`.
    """

    args: Any
    model: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def spec(self) -> RunSpec:
        """The description of the run."""
        return self.args.spec

    @property
    def peft_config(self):
        """The adapter that the trainer adds; `None` if there is none, or if the policy has it already."""
        return self.others.get("peft_config")

    @property
    def processing_class(self):
        """The policy's tokenizer or processor; `None` for the one that TRL loads."""
        return self.others.get("processing_class")

    @cached_property
    def processor(self):
        """The policy's tokenizer or processor, also one that TRL will load; `None` if that cannot be read."""
        if self.processing_class is not None:
            return self.processing_class
        try:
            return read_processing_class(name_of(self.model), self.args)
        except (OSError, ValueError):
            return None

    @property
    def teacher(self):
        """The teacher of a distillation, or its name."""
        return self.others.get("teacher_model")

    @property
    def is_named(self) -> bool:
        """Whether the policy is given by its name, and not loaded yet."""
        return isinstance(self.model, str)

    @property
    def has_adapter(self) -> bool:
        """Whether the policy has an adapter, or gets one."""
        return self.peft_config is not None or (not self.is_named and is_peft_model(self.model))

    @property
    def quantization_config(self):
        """transformers' `quantization_config`, in either of its places; `None` if there is none."""
        return self.others.get("quantization_config") or (self.args.model_init_kwargs or {}).get("quantization_config")

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The policy's config."""
        return read_policy(self.model, self.args)

    @cached_property
    def teacher_config(self) -> PreTrainedConfig:
        """The teacher's config."""
        return read_teacher(self.teacher, self.args)

    @property
    def experts(self) -> int:
        """The number of the policy's experts; 0 for a dense one."""
        experts = number_of_experts(self.config.to_dict())
        return experts if experts > 1 else 0

    @property
    def model_class(self) -> type[PreTrainedModel] | None:
        """The policy's class; `None` if transformers does not have it."""
        if self.is_named:
            found = getattr(transformers, (self.config.architectures or [""])[0], None)
        else:
            found = type(self.model.get_base_model() if is_peft_model(self.model) else self.model)
        return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None

    @property
    def policy(self):
        """The policy; if it is not loaded yet, its skeleton on the meta device."""
        return skeleton(self.config, self.args.trust_remote_code) if self.is_named else self.model
