"""
Measures the perplexity of a checkpoint and of its quantized copy.

Only one model is in memory at a time: the copy's weights replace the source's.
"""

import gc
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..formats import fake_quantize_activation
from ..models.linears import fused_layer, is_mixtures, linears
from .experts import NamesOnDisk
from .files import read_heads, read_tensors, weight_files
from .layout import read_quantized
from .source import load_whole


def perplexities(
    source: Path, result: Path, format: str, sequences: Sequence[Sequence[int]], device: str, trust: bool
) -> tuple[float, float]:
    """
    Returns the perplexity of a 16-bit checkpoint and of its quantized copy, computed with the values of `formats`.

    Args:
        source, result (`Path`): The two checkpoints.
        format (`str`): The copy's format.
        sequences (`Sequence[Sequence[int]]`): Tokens, (sequences, length).
        device (`str`): Where to compute.
        trust (`bool`): Whether the checkpoint's own Python may run.
    """
    model = load_whole(source, {"trust_remote_code": trust}, dtype="auto").to(device).eval()
    before = perplexity(model, sequences)
    become_quantized(model, result, format)
    after = perplexity(model, sequences)
    del model
    gc.collect()
    return before, after


@torch.no_grad()
def perplexity(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> float:
    """Returns `exp` of the mean negative log-probability in FP32, over all tokens but the first of each sequence."""
    total = count = 0
    for sequence in sequences:
        ids = torch.tensor([sequence], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        for scores, targets in zip(logits.split(256), ids[0, 1:].split(256), strict=True):
            total += F.cross_entropy(scores.float(), targets, reduction="sum").item()
            count += len(targets)
    if math.isnan(total):
        raise ValueError(f"{type(model).__name__} computes NaN instead of log-probabilities, so it has no perplexity.")
    return torch.tensor(total / count, dtype=torch.double).exp().item()  # `math.exp` raises on infinity


@torch.no_grad()
def become_quantized(model: PreTrainedModel, checkpoint: Path, format: str) -> None:
    """
    Loads the weights of a quantized checkpoint into a model, dequantized to the model's type, and rounds the inputs of
    its linear layers and experts if the format does.

    Raises:
        ValueError: The model has other names for the checkpoint's tensors.
    """
    heads = read_heads(weight_files(checkpoint))
    on_disk = NamesOnDisk(model)
    own = dict(on_disk.stream(model.named_parameters(remove_duplicate=False)))
    places = {on_disk.of(layer.weight): place for place, layer in linears(model).items() if not layer.holds_experts}
    units: dict[str, list[str]] = {}
    for name in heads:
        units.setdefault(fused_layer(name), []).append(name)
    for names in units.values():
        tensors = read_tensors(heads, names, model.device)
        layers = read_quantized(tensors, format, model.dtype)
        weights = {f"{layer}.weight": q.dequantize() for layer, q in layers.items()}
        unknown = [name for name in weights if name not in own]
        if unknown:
            raise ValueError(f"{type(model).__name__} has no {unknown[0]}, so no perplexity can be computed.")
        others = {name: tensor for name, tensor in tensors.items() if name in own and name not in weights}
        for name, tensor in (weights | others).items():
            own[name].copy_(tensor)
        for layer in layers:
            if not is_mixtures(f"{layer}.weight"):
                model.get_submodule(places[f"{layer}.weight"]).register_forward_pre_hook(
                    lambda _, inputs: (fake_quantize_activation(inputs[0], format, check=False), *inputs[1:])
                )
    experts = {place.rpartition(".")[0] for place, layer in linears(model).items() if layer.holds_experts}
    if experts:
        model.set_experts_implementation("eager")  # transformers' loop over experts, which multiplies with `linear`
    for place in experts:
        rounding = _Rounding(format)
        model.get_submodule(place).register_forward_pre_hook(rounding.begin)
        model.get_submodule(place).register_forward_hook(rounding.end, always_call=True)


class _Rounding(TorchFunctionMode):
    """Rounds the inputs of products to `format`, from the begin of a forward pass to its end."""

    def __init__(self, format: str):
        super().__init__()
        self.format = format

    def begin(self, *_) -> None:
        self.__enter__()

    def end(self, *_) -> None:
        self.__exit__(None, None, None)

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        if function is F.linear:
            args = (fake_quantize_activation(args[0], self.format, check=False), *args[1:])
        return function(*args, **(kwargs or {}))
