"""What the layers of a vLLM engine in this process compute, by the policy's names."""

from functools import partial

import torch
from torch import Tensor, nn

from .adapter import names_in_vllm, places


def activations(engine, tokens: list[int], names: list[str]) -> dict[str, Tensor]:
    """
    The engine's activations over one sequence, in a pass without its prefix cache.

    Args:
        engine ([`VLLMEngine`]): The engine, on one device and with `enforce_eager`.
        tokens (`list[int]`): The sequence.
        names (`list[str]`):
            Modules of the policy for their outputs, `name.input` for their inputs, in the order in which they run; at
            the end the norm before the head, and `logits`.

    Returns:
        `dict[str, torch.Tensor]`: (tokens, features), of those that vLLM's model has.
    """
    from vllm import SamplingParams

    (model,) = engine.llm.apply_model(lambda model: model)
    *names, logits = names
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    modules = list(dict.fromkeys(name.removesuffix(".input") for name in names))
    layers, own, handles = places(model, modules), dict(model.named_modules()), []
    for name, vllms in names_in_vllm(model, modules):
        if layers[name] is not None:
            layer, parts = layers[name]
            handles.append(layer.register_forward_hook(partial(_note_linear, found, name, parts)))
        elif vllms in own:
            handles.append(own[vllms].register_forward_hook(partial(_note, found, name)))
    engine.llm.reset_prefix_cache()
    try:
        one = SamplingParams(temperature=0, max_tokens=1)
        engine.llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
    finally:
        for handle in handles:
            handle.remove()
    # A prompt may come in several parts, and what is computed after it does not count
    whole = {name: torch.cat(parts)[: len(tokens)].flatten(1) for name, parts in found.items() if parts}
    if names[-1] not in whole:
        raise ValueError(f"vLLM's {type(model).__name__} has no {names[-1]}, which its logits are computed from.")
    with torch.inference_mode():
        return whole | {logits: model.compute_logits(whole[names[-1]])}


def _note(found: dict[str, list[Tensor]], name: str, module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
    """Of a norm that adds to the residual stream first, the sum is the input. Copies, since vLLM goes on in place."""
    y, x = output if isinstance(output, tuple) else (output, args[0])
    for point, tensor in ((name, y), (f"{name}.input", x)):
        if point in found:
            found[point].append(tensor.clone())


def _note_linear(
    found: dict[str, list[Tensor]], name: str, parts: range, layer: nn.Module, args: tuple, output: tuple
) -> None:
    """Of a layer that is several of the policy's, the outputs that are its own."""
    sizes = layer.output_partition_sizes
    _note(found, name, layer, args, output[0][..., sum(sizes[: parts.start]) : sum(sizes[: parts.stop])])
