"""Reads single layers and tensors of a policy: what adapters wrap, what is quantized, what a rank holds of a shard."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..layers import FrozenLinear
from ..policy.adapters import is_plain


def outer_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names and modules of a model. An adapted layer counts as one module, PEFT's wrapper."""
    adapted = None
    for path, module in model.named_modules():
        if adapted is not None and path.startswith(adapted):
            continue
        if isinstance(module, BaseTunerLayer):
            adapted = f"{path}."
        yield path, module


def base_layer(layer: nn.Module) -> nn.Module:
    """Returns the layer that an adapter wraps, or the layer itself."""
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer


def dense_parameters(linear: nn.Linear) -> dict[str, Tensor]:
    """Returns the parameters of a linear layer that is not sharded, by name; a quantized weight is dequantized."""
    if isinstance(linear, FrozenLinear):
        params = {"weight": linear.dequantize()}
        if linear.bias is not None:
            params["bias"] = linear.bias.data
        return params
    params = {name: param.data for name, param in linear.named_parameters()}
    if not params["weight"].is_floating_point():
        params["weight"] = dequantized(linear)
    return params


def dequantized(linear: nn.Linear) -> Tensor:
    """
    Returns the dequantized weight (out, in) of a 4- or 8-bit layer of bitsandbytes, and leaves the layer as it was.
    Raises `ValueError` if bitsandbytes has repacked the weight, so that it cannot be read exactly.
    """
    weight = linear.weight
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        raise ValueError(
            "bitsandbytes has repacked the 4-bit base for AVX-512 in the forward pass of an evaluation, and it can no "
            "longer be read exactly. Load the base in 8 or 16 bits on this CPU, or use a GPU."
        )
    try:
        return dequantize_module_weight(linear).data
    finally:
        linear.weight = weight  # PEFT replaces an 8-bit weight on a CPU


def adapters_beside(layer: BaseTunerLayer) -> list[str]:
    """
    Returns the adapters that a layer's forward pass adds to its base: none if they are disabled, or merged already.

    Raises:
        `ValueError`: The adapters are merged and disabled, so the next forward pass would unmerge them from the base.
    """
    if layer.merged and layer.disable_adapters:
        raise ValueError(
            "The policy's adapters are merged and disabled, so its next forward pass changes its weights. Call "
            "`unmerge_adapter()` before you disable them."
        )
    return [] if layer.merged or layer.disable_adapters else list(layer.active_adapters)


def merges_by_adding(layer: BaseTunerLayer) -> bool:
    """Whether merging a layer's adapters only adds one matrix per adapter to its weight."""
    base = layer.get_base_layer()
    if isinstance(base, FrozenLinear):
        return True
    if not is_plain(layer):
        return not base.weight.is_floating_point()  # PEFT cannot merge other adapters into a copy of such a base
    if layer.lora_variant or not isinstance(base, nn.Linear):
        return False
    return all(name in layer.lora_A and not layer.lora_bias.get(name, False) for name in layer.active_adapters)


def ties_embeddings(policy: PreTrainedModel) -> bool:
    """
    Whether a policy's head shares the weight of its embeddings. The config may be wrong about this: `modules_to_save`,
    LoRA on one of the two, or a change in memory unties them.
    """
    embeddings, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    wrapped = BaseTunerLayer | AuxiliaryTrainingWrapper
    if head is None or isinstance(head, wrapped) or isinstance(embeddings, wrapped):
        return False
    return head.weight is embeddings.weight


def local_part(param: Tensor) -> Tensor:
    """Returns this rank's shard of a parameter under FSDP2 or ZeRO-3, and otherwise the parameter itself."""
    return param.to_local() if isinstance(param, DTensor) else getattr(param, "ds_tensor", param)


def is_finite(tensor: Tensor) -> bool:
    """
    Whether a tensor is free of NaN and infinity. True for 8-bit codes, and for a tensor without values on this rank.
    """
    if not tensor.is_floating_point() or tensor.element_size() == 1 or tensor.is_meta or not tensor.numel():
        return True
    return bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which `dtype` is torch's default. Unlike vLLM's below 0.30, it restores the default on an error."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
