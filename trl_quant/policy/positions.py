"""
Fixes the positions of a model whose rotary embeddings depend on the longest row ([`~models.positions`]): one choice for
every forward pass of a run, by the run's context.

transformers' rotary modules choose in each forward pass if their attribute `rope_type` asks for it. [`fix_positions`]
writes the frequencies of the run's choice into these modules and sets the attribute to `"default"`, so that no forward
pass changes them. The model's config stays as it is, and so do the checkpoints that are saved.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..models.positions import Switching, switching


UNCHANGING = "default"  # a `rope_type` whose frequencies no forward pass changes


class _Rope(NamedTuple):
    """A rotary module, or its part for one type of layers, with the config's `rope_type`."""

    module: nn.Module
    layers: str | None
    own_type: str

    def name(self, attribute: str) -> str:
        return attribute if self.layers is None else f"{self.layers}_{attribute}"

    def set(self, rope_type: str, frequencies: torch.Tensor) -> None:
        if self.layers is None:
            self.module.rope_type = rope_type
        else:
            self.module.rope_type = self.module.rope_type | {self.layers: rope_type}
        setattr(self.module, self.name("inv_freq"), frequencies)

    def original(self) -> torch.Tensor:
        """Returns the frequencies of short passes."""
        return getattr(self.module, self.name("original_inv_freq")).clone()

    def frequencies(self, found: Switching, context: int) -> torch.Tensor:
        """Returns the frequencies of a pass whose longest row has `context` tokens."""
        if context <= found.limit:
            return self.original()
        options = {} if self.layers is None else {"layer_type": self.layers}
        compute = ROPE_INIT_FUNCTIONS[self.own_type]
        return compute(self.module.config, self.original().device, seq_len=context, **options)[0]

    def is_fixed(self, limit: int) -> bool:
        """Whether the first position stays the same in a pass of more than `limit` tokens."""
        device = self.original().device
        options = {} if self.layers is None else {"layer_type": self.layers}
        passes = [torch.tensor([[1, last]], device=device) for last in (2, limit + 1)]
        short, long = (self.module(torch.zeros(1, device=device), places, **options) for places in passes)
        return device.type == "meta" or all(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(short, long, strict=True))


def _ropes(model: nn.Module) -> Iterator[_Rope]:
    for module in model.modules():
        if not hasattr(module, "rope_type") or not hasattr(module, "config"):
            continue
        parameters = module.config.rope_parameters
        if isinstance(module.rope_type, dict):
            for layers in module.rope_type:
                yield _Rope(module, layers, parameters[layers]["rope_type"])
        else:
            yield _Rope(module, None, parameters["rope_type"])


def fix_positions(model: nn.Module, context: int) -> None:
    """
    Makes a model compute every row as in a forward pass whose longest row has `context` tokens, in place. A model
    whose positions do not depend on the longest row stays as it is.

    Raises:
        `ValueError`: The model's own code chooses in each forward pass.
    """
    found = switching(model.config)
    if found is None:
        return
    ropes = [rope for rope in _ropes(model) if rope.own_type in ROPE_INIT_FUNCTIONS]
    for rope in ropes:
        rope.set(UNCHANGING, rope.frequencies(found, context))
        rope.module.fixed_context = context
    if not ropes or not all(rope.is_fixed(found.limit) for rope in ropes):
        raise ValueError(
            f"The {type(model).__name__} has {found}, and its own code chooses in each forward pass, so trainer and "
            "sampler would choose differently. Train another model, or leave `rollout_precision` unset."
        )


def keep_cache(copy: nn.Module) -> None:
    """
    Lets a model with fixed positions generate with one cache of keys and values. Phi-3's own `generate` drops the cache
    where a row passes the original length that the config names. The config must be the model's own: it is changed.
    """
    config = copy.config.get_text_config()
    if fixed_context(copy) is not None and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = config.max_position_embeddings


def release_positions(model: nn.Module) -> None:
    """Undoes [`fix_positions`] in place: the model chooses in each forward pass again."""
    for rope in _ropes(model):
        if fixed_context(rope.module) is not None:
            rope.set(rope.own_type, rope.original())
    for module in model.modules():
        vars(module).pop("fixed_context", None)


def fixed_context(model: nn.Module) -> int | None:
    """Returns the context, in tokens, for which a model's positions were fixed; `None` if they were not."""
    return next((module.fixed_context for module in model.modules() if "fixed_context" in vars(module)), None)
