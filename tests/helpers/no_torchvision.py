"""Lets vLLM load Qwen3.5 where torchvision is missing. Its images need that, and its text does not."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def load_text_models() -> None:
    """Imports vLLM's Qwen3.5, with empty modules in place of those of torchvision that its processor names."""
    if find_spec("torchvision") is not None:
        return
    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None, is_package=True)
    for name in names[1:]:
        parent, _, leaf = name.rpartition(".")
        setattr(sys.modules[parent], leaf, sys.modules[name])
    try:
        import vllm.model_executor.models.qwen3_5  # noqa: F401
    finally:
        for name in names:
            del sys.modules[name]
