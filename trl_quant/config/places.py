"""The models that a run reads, and the directory that it writes, which must not be one of theirs."""

import re
from dataclasses import fields
from pathlib import Path

from torch.nn import Module
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..storage.identity import POLICY
from ..storage.run_checkpoints import CRITIC_NAME


CRITIC_START = "value_model_name_or_path"
MODEL_FIELD = "_name_or_path"  # the end of the name of a field that names a model
OWN_PLACES = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+(/{CRITIC_NAME})?")  # where a run writes in its `output_dir`


def models_read(model, args, **others) -> dict[str, tuple[str, str | None]]:
    """
    Returns the models that a run loads: what each is to the run -> its name or directory, and its revision. TRL loads
    the reference from the policy's path, so it is the policy.

    Args:
        model: The policy, or its name.
        args: The run's config. Each of its fields that ends in `_name_or_path` names a model.
        others: The trainer's other arguments. Those that are models or their names, or lists of such, are read.
    """
    given = {POLICY: [model], "vllm_engine_kwargs['model']": [(args.vllm_engine_kwargs or {}).get("model")]}
    given |= {f.name: [getattr(args, f.name)] for f in fields(args) if f.name.endswith(MODEL_FIELD)}
    given |= {name: value if isinstance(value, list | tuple) else [value] for name, value in others.items()}
    revisions = {POLICY: (args.model_init_kwargs or {}).get("revision")}
    teachers = dict.fromkeys(("teacher_model", "teacher_model_name_or_path"), "teacher_model_revision")
    revisions |= {role: getattr(args, field, None) for role, field in teachers.items()}
    found = {}
    for role, parts in given.items():
        for i, part in enumerate(parts):
            name = getattr(getattr(part, "config", None), "name_or_path", None) if isinstance(part, Module) else part
            if isinstance(name, str) and name:
                found[role if len(parts) == 1 else f"{role}[{i}]"] = name, revisions.get(role)
    return found


def check_output_dir(args, models: dict[str, tuple[str, str | None]]) -> None:
    """
    Raises `ValueError` if a run would write its `output_dir` over a model that it reads.

    Args:
        args: The run's config.
        models (`dict`): The result of [`models_read`].
    """
    output = Path(args.output_dir).resolve()
    for role, (name, _) in models.items():
        if not Path(name).is_dir():
            continue
        place = Path(name).resolve()
        inside = place.relative_to(output).as_posix() if place.is_relative_to(output) else None
        if inside == "." or (inside is not None and OWN_PLACES.fullmatch(inside)):
            raise ValueError(
                f"`output_dir`={args.output_dir!r}: the run would write over {name}, which it reads ({role}). Name "
                "another directory."
            )
