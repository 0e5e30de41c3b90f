"""
Keeps the policy's classes as they are when vLLM starts in the trainer's process.

vLLM runs families that it has no model for, and all with `model_impl="transformers"`, with transformers' own classes.
It makes the decoder's class one that it compiles, with another base, `__init__` and `__call__`. In one process that is
the policy's class too, and a policy has nothing of what this `__call__` reads. Here vLLM's model gets a subclass with
vLLM's changes, and the class itself gets back what it had.

vLLM also has configs of its own for some families, such as Qwen3.5, and transformers then reads these by `AutoConfig`.
transformers' models cannot be built from them, so transformers gets its own back. A config of a checkpoint's own code,
which the run may trust, is never given to it: another checkpoint of that family would then run this code.

Last, engines of one process share a rotary embedding where its sizes agree, and vLLM's GLM changes it for all of them.
Here each engine starts with its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT


@contextmanager
def keeping_classes(policy: nn.Module) -> Iterator[dict[type, type]]:
    """
    Context in which vLLM starts, with new rotary embeddings. On exit the classes of the policy's models have their
    bases and attributes back, and transformers reads configs of their families with its own classes.

    Yields:
        `dict[type, type]`: Class that vLLM changed -> subclass with vLLM's changes. It is filled on exit.
    """
    models = [module for module in policy.modules() if isinstance(module, PreTrainedModel)]
    classes = {type(model) for model in models}
    before = {cls: (cls.__bases__, dict(vars(cls))) for cls in classes}
    changed: dict[type, type] = {}
    _ROPE_DICT.clear()
    try:
        yield changed
    finally:
        for family in {model.config.model_type for model in models} & CONFIG_MAPPING_NAMES.keys():
            if CONFIG_MAPPING[family].__module__.startswith("vllm."):
                AutoConfig.register(family, getattr(transformers, CONFIG_MAPPING_NAMES[family]), exist_ok=True)
        for cls, (bases, attributes) in before.items():
            added = tuple(base for base in cls.__bases__ if base not in bases)
            replaced = {name: value for name, value in vars(cls).items() if value is not attributes.get(name)}
            if not added:
                continue
            cls.__bases__ = bases
            for name in replaced:
                if name in attributes:
                    setattr(cls, name, attributes[name])
                else:
                    delattr(cls, name)
            changed[cls] = type(cls.__name__, (cls, *added), replaced | {"__module__": cls.__module__})


def take_subclasses(model: nn.Module, changed: dict[type, type]) -> None:
    """Gives the parts of vLLM's model the subclasses of [`keeping_classes`]."""
    for module in model.modules():
        if type(module) in changed:
            module.__class__ = changed[type(module)]
