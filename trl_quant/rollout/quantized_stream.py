"""The policy's weights on their way into an engine that holds compressed-tensors' layout: quantized one by one."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..formats import QuantizedTensor, global_scale, quantize


def quantize_stream(
    weights: Iterable[tuple[str, Tensor]],
    precision: str,
    parts: dict[str, tuple[str, ...]],
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """
    Replaces the weight of each linear layer by its codes and scales, and passes the other tensors on.

    Weights are rounded to BF16 before, as vLLM does with the checkpoint of a BF16 or an online engine. NVFP4 layers
    that the engine fuses wait for each other, since they share a global scale.

    Args:
        weights (`Iterable[tuple[str, torch.Tensor]]`): Names and tensors, in the order of the model.
        precision (`str`): Name of the format.
        parts (`dict[str, tuple[str, ...]]`): Quantized layers, each with those that it is fused with, itself included.
        device (`torch.device`, *optional*): Where to quantize; by default where the tensors are.

    Raises:
        `ValueError`: for a weight that cannot be quantized, naming it.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        layer = name.removesuffix(".weight")
        if layer == name or layer not in parts:
            yield name, tensor
            continue
        waiting[layer] = tensor.detach().to(device or tensor.device, torch.bfloat16)
        group = parts[layer] if precision == "nvfp4" else (layer,)
        if waiting.keys() >= set(group):
            shared = global_scale(*(waiting[part] for part in group)) if precision == "nvfp4" else None
            for part in group:
                try:
                    quantized = quantize(waiting.pop(part), precision, shared)
                except ValueError as error:
                    raise ValueError(f"Cannot quantize `{part}.weight` for the rollout: {error}") from error
                yield from _checkpoint_tensors(part, quantized)
    if waiting:
        raise ValueError(f"The policy did not stream all layers that the engine fuses with {', '.join(waiting)}.")


def _checkpoint_tensors(layer: str, quantized: QuantizedTensor) -> Iterator[tuple[str, Tensor]]:
    packed = quantized.values.dtype == torch.uint8
    yield f"{layer}.weight_packed" if packed else f"{layer}.weight", quantized.values
    yield f"{layer}.weight_scale", quantized.scale
    if quantized.global_scale is not None:
        yield f"{layer}.weight_global_scale", quantized.global_scale
