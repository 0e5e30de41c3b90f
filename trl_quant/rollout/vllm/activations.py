"""Records the activations of a vLLM engine in this process, by the policy's names."""

from functools import partial

import torch
from torch import Tensor, nn

from .adapter import names_in_vllm, places
from .sampling import checking


def activations(engine, tokens: list[int], names: list[str]) -> dict[str, Tensor]:
    """
    Returns the engine's activations for one sequence, computed without its prefix cache.

    Args:
        engine ([`VLLMEngine`]): The engine, on one device and with `enforce_eager`.
        tokens (`list[int]`): The sequence.
        names (`list[str]`):
            Points to record, in the order in which they are computed: the name of a policy's module stands for its
            output, `name.input` for its input. The last two are the norm before the head, and `logits`.

    Returns:
        `dict[str, torch.Tensor]`: Each of shape (tokens, features), for the points that vLLM's model has.

    Raises:
        `ValueError`: vLLM's model lacks the norm before the head.
    """
    (model,) = engine.llm.apply_model(lambda model: model)
    *names, logits = names
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    modules = list(dict.fromkeys(name.removesuffix(".input") for name in names))
    linear_places = places(model, modules)
    vllm_modules = dict(model.named_modules())
    handles = []
    for name, vllm_name in names_in_vllm(model, modules):
        if linear_places[name] is not None:
            layer, parts = linear_places[name]
            handles.append(layer.register_forward_hook(partial(_record_linear, found, name, parts)))
        elif vllm_name in vllm_modules:
            handles.append(vllm_modules[vllm_name].register_forward_hook(partial(_record, found, name)))
    engine.llm.reset_prefix_cache()
    try:
        one_token = checking(engine.bound, max_tokens=1)
        engine.llm.generate([{"prompt_token_ids": tokens}], one_token, use_tqdm=False)
    finally:
        for handle in handles:
            handle.remove()
    # vLLM may split the prompt into chunks. Activations after the prompt are dropped.
    whole = {name: torch.cat(chunks)[: len(tokens)].flatten(1) for name, chunks in found.items() if chunks}
    if names[-1] not in whole:
        raise ValueError(f"vLLM's {type(model).__name__} has no {names[-1]}, from which its logits are computed.")
    with torch.inference_mode():
        return whole | {logits: model.compute_logits(whole[names[-1]])}


def _record(found: dict[str, list[Tensor]], name: str, module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
    """
    Records copies of a module's input and output, because vLLM overwrites them. A norm that first adds to the residual
    stream returns the sum beside its output; that sum is recorded as its input.
    """
    y, x = output if isinstance(output, tuple) else (output, args[0])
    for point, tensor in ((name, y), (f"{name}.input", x)):
        if point in found:
            found[point].append(tensor.clone())


def _record_linear(
    found: dict[str, list[Tensor]], name: str, parts: range, layer: nn.Module, args: tuple, output: tuple
) -> None:
    """Records one of the policy's layers, whose outputs are the `parts` of a fused layer of vLLM's."""
    sizes = layer.output_partition_sizes
    start, stop = sum(sizes[: parts.start]), sum(sizes[: parts.stop])
    _record(found, name, layer, args, output[0][..., start:stop])
