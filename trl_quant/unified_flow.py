"""
The policy trained in the numbers that sample from it (Jet-RL, arXiv:2601.14243): how a policy comes to compute so.

    policy = Q(W), or Q(W + s B A)         the decoder's linear layers, in trainer and engine alike

[`unify`] puts a [`~layers.UnifiedLinear`] around the weights that each layer has. Embeddings, norms and the head stay
as they are, and so do the names and types of all that is trained and saved.
"""

import torch
from peft.tuners.lora import Linear
from torch import nn
from transformers import AutoConfig, TrainerCallback

from .adapters import UnifiedLoraLinear
from .layers import UnifiedLinear
from .precisions import unified_flows
from .rollout.vllm.support import quantized_layers


def unify(model: nn.Module, precision: str, merged: bool = False, rounds_to: torch.dtype | None = None) -> None:
    """
    Has the decoder's linear layers compute as an engine in `precision` does, in place.

    Args:
        model (`nn.Module`): A model of transformers, with or without an adapter of PEFT.
        precision (`str`): Key of `PRECISIONS`: `"fp8_block"`, `"fp8"` or `"int8"`.
        merged (`bool`, *optional*, defaults to `False`):
            Whether LoRA adapters are quantized with the weights that they belong to. Else they stay beside them.
        rounds_to (`torch.dtype`, *optional*): As in [`~layers.UnifiedLinear`].

    Raises:
        `ValueError`: for layers that are quantized otherwise, and adapters that cannot be merged at each step.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name in quantized_layers(base):
        linear = base.get_submodule(name)
        if ".lora_" in name or isinstance(linear, UnifiedLinear):
            continue
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"`train_precision`={precision!r} trains 16- or 32-bit weights, and `{name}` is a "
                f"{type(linear).__name__}. Load the model without a `quantization_config`."
            )
        layer = UnifiedLinear.from_linear(linear, precision)
        layer.rounds_to = rounds_to
        base.set_submodule(name, layer)
    for name, layer in base.named_modules() if merged else ():
        if isinstance(getattr(layer, "base_layer", None), UnifiedLinear):
            _merge_at_each_step(name, layer)


def _merge_at_each_step(name: str, layer: nn.Module) -> None:
    if isinstance(layer, UnifiedLoraLinear):
        return
    plain = type(layer) is Linear and not layer.lora_variant and not any(layer.lora_bias.values())
    if not plain or any(type(dropout) is not nn.Identity for dropout in layer.lora_dropout.values()):
        raise ValueError(
            f"`lora_sync`='merge' with `train_precision`: the adapter of `{name}` is more than a product of B and A "
            "(dropout, a bias, DoRA or another method), and cannot be quantized with the weight at each step. Use "
            "plain LoRA with `lora_dropout=0`, or `lora_sync='adapter'`."
        )
    layer.__class__ = UnifiedLoraLinear  # PEFT's own layer with another forward: nothing else of it changes


class WeightsMoved(TrainerCallback):
    """Has the layers quantize their weights again after each optimizer step, whatever way the optimizer wrote them."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for module in model.modules():
            if isinstance(module, UnifiedLinear):
                module.forget()

    on_optimizer_step = on_train_begin


def train_as_sampled(trainer) -> None:
    """Has a trainer whose models are loaded train in its `train_precision`, its reference policy included."""
    args = trainer.args
    if args.train_precision not in unified_flows():
        return
    merged, rounds_to = args.lora_sync == "merge", None
    if not merged:  # the engine quantizes the checkpoint, whatever type the trainer loaded it to
        rounds_to = AutoConfig.from_pretrained(trainer.model.name_or_path).dtype or torch.bfloat16
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            unify(model, args.train_precision, merged, rounds_to)
    trainer.add_callback(WeightsMoved())
