"""The first stage of validation: each field by itself. Errors name the field, its value and the allowed values."""

import math
from dataclasses import fields
from enum import Enum
from numbers import Integral, Real
from typing import get_args, get_origin, get_type_hints

import torch
from torch.utils.checkpoint import checkpoint
from transformers import get_scheduler

from ..corrections import ALL_CORRECTIONS
from ..corrections.base import Range, ranges_of
from ..noise import SCHEDULES
from ..precisions import PRECISIONS, train_precisions
from ..renamed import check_names
from ..rollout.sampling_options import FIELDS
from ..run_spec import VLLM_MODES
from ..scaling import check_scale
from .auto import refuse_auto
from .hyperparameters import setting_fields


TYPES = {
    bool: "True or False",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    dict: "a dict (or a JSON object)",
    type(None): "None",
}
# Ranges of TRL's fields, which TRL checks only after it has loaded the model, or not at all
TRL_RANGES = {
    "temperature": Range(0.0, open_low=True),
    "top_p": Range(0.0, 1.0, open_low=True),
    "top_k": Range(-1),  # in vLLM, and in the embedded engine, both -1 and 0 switch it off
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.0, open_low=True),
    "max_completion_length": Range(1),
    "max_steps": Range(-1),
    "num_train_epochs": Range(0.0, open_low=True),
    "num_generations_eval": Range(1),
    "num_iterations": Range(1),
    "per_device_train_batch_size": Range(1),
    "gradient_accumulation_steps": Range(1),
    "generation_batch_size": Range(1),
    "steps_per_generation": Range(1),
    "per_device_eval_batch_size": Range(1),
    "max_tool_calling_iterations": Range(0),
    "weight_sync_steps": Range(1),
    "vllm_gpu_memory_utilization": Range(0.0, 1.0, open_low=True),
    "learning_rate": Range(0.0),
    "warmup_steps": Range(0.0),
    "weight_decay": Range(0.0),  # a negative one would let the weights grow
    "adam_beta1": Range(0.0, 1.0),
    "adam_beta2": Range(0.0, 1.0),
    "adam_epsilon": Range(0.0),
    "seed": Range(0, 2**32 - 1),  # NumPy's
    "beta": Range(0.0),
    "epsilon": Range(0.0),
    "epsilon_high": Range(0.0),  # so that the upper bound of a ratio is not below its lower one
    "delta": Range(0.0, open_low=True),
    "top_entropy_quantile": Range(0.0, 1.0),
    "off_policy_mask_threshold": Range(0.0, open_low=True),  # none is below a negative one or NaN
    "sapo_temperature_pos": Range(0.0, open_low=True),
    "sapo_temperature_neg": Range(0.0, open_low=True),
    "vespo_k_pos": Range(0.0),  # with NaN, TRL's loss is 0
    "vespo_k_neg": Range(0.0),
    "vespo_lambda_pos": Range(0.0),
    "vespo_lambda_neg": Range(0.0),
    "entropy_coef": Range(-math.inf),
    "entropy_coef_min": Range(-math.inf),
    "entropy_coef_max": Range(-math.inf),
    "entropy_coef_delta": Range(0.0),
    "entropy_target": Range(0.0),
    "ref_model_mixup_alpha": Range(0.0, 1.0),
    "ref_model_sync_steps": Range(1),
    "pad_to_multiple_of": Range(1),
    "max_grad_norm": Range(0.0),  # a negative norm would flip the gradient's sign in PyTorch
}
# The losses that clip the policy ratio between two bounds. Only these have an upper bound that ACR can widen.
TRUE_OR_FALSE_TOO = ("scale_rewards",)  # fields of words for which TRL also takes True and False
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def check_types(args, own_fields) -> dict[str, int | float]:
    """
    Returns, by field, Python's number for each of NumPy's, which a checkpoint could not record as JSON.

    Raises `ValueError` if one of `own_fields`, of the fields in `TRL_RANGES` or of those that are read as dicts has a
    value of another type, or if any other field of True or False (or `None`) is a string, such as "false", which Python
    counts as true.
    """
    hints, numbers = get_type_hints(type(args)), {}
    files = {"accelerator_config", "fsdp_config", "deepspeed"}  # transformers reads a string as the name of a JSON file
    dicts = [name for name in args._VALID_DICT_FIELDS if name not in files]
    flags = [name for name, hint in hints.items() if hint in (bool, bool | None)]
    texts = [name for name in flags if isinstance(getattr(args, name, None), str)]
    for name in (*own_fields, *_trl_ranges(args), *dicts, *texts):
        value = getattr(args, name)
        check_type(name, value, hints[name])
        if isinstance(value, Real) and not isinstance(value, int | float):
            numbers[name] = int(value) if isinstance(value, Integral) else float(value)
    for name in dicts:
        if name.endswith("model_init_kwargs"):
            check_names(f"`{name}`", getattr(args, name) or {})
    return numbers


def meant_words(args) -> dict[str, str]:
    """
    Returns, by field, the word "no" where YAML has made False of it and the field takes that word, such as
    `save_strategy`. Raises `ValueError` for any other True or False in a field that takes none.
    """
    hints, meant = get_type_hints(type(args)), {}
    for field in fields(args):
        value, kinds = getattr(args, field.name), get_args(hints[field.name]) or (hints[field.name],)
        takes = bool in kinds or value == field.default or field.metadata.get("const") is True
        takes = takes or field.name in TRUE_OR_FALSE_TOO
        if not isinstance(value, bool) or takes or any(value in get_args(kind) for kind in kinds):
            continue
        words = [word for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for word in kind]
        if value is False and "no" in [word.value for word in words]:
            meant[field.name] = "no"
        elif words or str in kinds:
            allowed = f"one of {', '.join(repr(word.value) for word in words)}" if words else "a string"
            allowed += " or None" if type(None) in kinds else ""
            raise ValueError(
                f"`{field.name}`={value!r} must be {allowed}. YAML reads a bare no, off, yes or on as False or True: "
                "put the word in quotes."
            )
    return meant


def check_values(args) -> None:
    """Raises `ValueError` if a field's value is unknown or out of range. The checks are the same on any machine."""
    refuse_auto(args)
    check_choice("train_precision", args.train_precision, train_precisions())
    check_choice("rollout_precision", args.rollout_precision, PRECISIONS)
    check_choice("lora_sync", args.lora_sync, ("merge", "adapter"))
    check_choice("vllm_sleep_level", args.vllm_sleep_level, (1, 2))
    check_choice("is_correction", args.is_correction, ALL_CORRECTIONS)
    check_choice("noise_schedule", args.noise_schedule, SCHEDULES)
    check_choice("vllm_mode", args.vllm_mode, VLLM_MODES)
    for name, allowed in (ranges_of(type(args)) | _trl_ranges(args)).items():
        check_range(name, getattr(args, name), allowed)
    if args.max_steps == 0:
        raise ValueError("`max_steps`=0 would still train one step. Set the number of steps, or -1 for whole epochs.")
    _check_generation_kwargs(args)
    _check_by_library(args)
    _check_hyperparameters(args)
    if args.uaq_scale is not None:
        check_scale(args.uaq_scale, "uaq_scale")


def _check_generation_kwargs(args) -> None:
    """Checks those of the `generation_kwargs` that override a field, as that field's value."""
    for name, value in (args.generation_kwargs or {}).items():
        if name not in FIELDS or value is None:
            continue
        called = f"generation_kwargs[{name!r}]"
        check_type(called, value, int if name == "top_k" else float)
        is_greedy = name == "temperature" and value == 0
        if name in TRL_RANGES and not is_greedy:
            check_range(called, value, TRL_RANGES[name])


def _check_by_library(args) -> None:
    """Raises `ValueError` for values that transformers or torch would refuse only after the model is loaded."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], args.learning_rate)
    schedule = args.lr_scheduler_type, optimizer, 0, 1, args.lr_scheduler_kwargs
    checkpointing = {"use_reentrant": False} | (args.gradient_checkpointing_kwargs or {})
    trials = {
        "lr_scheduler_kwargs": lambda: get_scheduler(*schedule),
        "gradient_checkpointing_kwargs": lambda: checkpoint(torch.clone, weight, **checkpointing),
    }
    for name, trial in trials.items():
        try:
            trial()
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{name}`={getattr(args, name)!r}: {str(error).rstrip('.')}.") from error


def _trl_ranges(args) -> dict[str, Range]:
    """Returns those of [`TRL_RANGES`] that are fields of a config, since TRL's configs have different ones."""
    return {name: allowed for name, allowed in TRL_RANGES.items() if name in args.__dataclass_fields__}


def _check_hyperparameters(args) -> None:
    """
    Checks the fields that set hyperparameters against the ranges that the corrections state. TRL's fields are checked
    only against the ranges of the chosen correction: `epsilon` may be above 1 unless `acr` reads it.
    """
    for correction, correction_class in ALL_CORRECTIONS.items():
        ranges = ranges_of(correction_class)
        for hyperparameter, name in setting_fields(correction, type(args)).items():
            is_trls = name in args.trl_config.__dataclass_fields__
            if hyperparameter in ranges and (correction == args.is_correction or not is_trls):
                check_range(name, getattr(args, name), ranges[hyperparameter])


def listed(names) -> str:
    """Joins names for a message: `'a', 'b' or 'c'`."""
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last


def is_of(kind: type, value) -> bool:
    """Whether a field of type `kind` takes `value`. A float field takes integers, but not `True`, infinity or NaN."""
    if kind in (int, float):
        is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    return isinstance(value, kind)


def check_type(name: str, value, hint) -> None:
    """Raises `ValueError` unless a field with the type hint `hint` takes `value`."""
    kinds = [get_origin(kind) or kind for kind in get_args(hint) or (hint,)]
    kinds = [kind for kind in kinds if kind is not str or dict not in kinds]  # JSON strings have been parsed already
    if not any(is_of(kind, value) for kind in kinds):
        raise ValueError(f"`{name}`={value!r} must be {' or '.join(TYPES[kind] for kind in kinds)}.")


def check_choice(name: str, value, choices) -> None:
    """Raises `ValueError` unless `value` is `None` or one of `choices`."""
    if value is not None and value not in choices:
        raise ValueError(f"`{name}`={value!r} is unknown. Allowed: {', '.join(map(repr, choices))}.")


def check_range(name: str, value: float | str | None, allowed: Range) -> None:
    """Raises `ValueError` for a number outside the range. `None` and TRL's "auto" pass."""
    broken_bound = allowed.broken_bound(value) if isinstance(value, Real) else None
    if broken_bound:
        raise ValueError(f"`{name}`={value!r} is out of range. It must be {broken_bound}.")
