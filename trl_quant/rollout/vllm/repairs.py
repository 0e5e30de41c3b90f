"""Repairs what a reload breaks in vLLM's layers. The faults were seen in vLLM 0.26 (CUDA) and 0.31 (CPU)."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.utils import set_weight_attrs

from .adapter import linear_layers
from .kernel_checks import method_of


def keep_onednn_scales(model: nn.Module) -> None:
    """
    Makes INT8 kernels on CPUs survive a reload.

    Without AMX a layer gives oneDNN a raw pointer to its scales. A reload frees the tensor behind it, which leads to
    wrong results or NaN; here the kernel holds a reference to it. The kernel also sets the layer's weight to `None`. A
    server's reload drops such an attribute, which the kernel needs; here the weight becomes an empty tensor.
    """
    for layer in linear_layers(model).values():
        kernel = method_of(layer)[1]
        if hasattr(kernel, "process_weights_for_onednn"):
            kernel.process_weights_for_onednn = partial(_process_and_keep, kernel)


def _process_and_keep(kernel, layer: nn.Module) -> None:
    type(kernel).process_weights_for_onednn(kernel, layer)
    weight, scale = kernel.layer_param_names[:2]
    kernel.kept_scale = getattr(layer, scale).data  # a plain tensor, since a reload would replace a parameter
    setattr(layer, weight, nn.Parameter(torch.empty(0), requires_grad=False))


def keep_bias_loaders(model: nn.Module) -> None:
    """
    Gives the biases of Marlin's layers a weight loader. These layers create a new bias without a loader, and a reload
    in vLLM 0.31 needs one, because it loads the bias part by part.
    """
    for layer in linear_layers(model).values():
        if getattr(layer, "bias", None) is not None and not hasattr(layer.bias, "weight_loader"):
            set_weight_attrs(layer.bias, {"output_dim": 0, "weight_loader": layer.weight_loader})


def plain_tensors(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """
    Returns the tensors that layers hold in addition to their parameters and buffers, such as the locks of Marlin's
    kernels, or the strides and scales of kernels for experts. A reload replaces them and frees the old ones, which
    captured CUDA graphs still read. If the memory of a lock is then used for something else, the kernels wait forever.

    Returns:
        `dict`: (module, path of the attribute in it) -> tensor.
    """
    found = {}
    for module in model.modules():
        found |= {(module, name): value for name, value in vars(module).items() if isinstance(value, Tensor)}
        if hasattr(module, "quant_method"):
            found |= {(module, path): value for path, value in _held(module.quant_method, "quant_method", set())}
    return found


def _held(owner: object, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that an object of vLLM's, and those inside it, hold as attributes, with their paths."""
    seen.add(id(owner))
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            yield f"{path}.{name}", value
            continue
        is_vllms = type(value).__module__.startswith("vllm.model_executor.") and hasattr(value, "__dict__")
        if is_vllms and not isinstance(value, nn.Module) and id(value) not in seen:
            yield from _held(value, f"{path}.{name}", seen)


def _owner(module: nn.Module, path: str) -> object | None:
    """Returns the object that has the attribute at the end of a path; `None` if the path leads nowhere any more."""
    for name in path.split(".")[:-1]:
        module = getattr(module, name, None)
    return module


def restore_plain_tensors(plain: dict[tuple[nn.Module, str], Tensor]) -> None:
    """Puts the tensors of [`plain_tensors`] back, with the values of those that replaced them in a reload."""
    for (module, path), tensor in plain.items():
        owner, name = _owner(module, path), path.rpartition(".")[2]
        replacement = vars(owner).get(name) if hasattr(owner, "__dict__") else None
        if isinstance(replacement, Tensor) and replacement is not tensor and replacement.shape == tensor.shape:
            tensor.copy_(replacement)
            setattr(owner, name, tensor)


def constants(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """
    Returns the tensors that no sync sends, each with a copy on the CPU: those of kernels that share no memory with the
    model's weights, such as the strides of CUTLASS's experts, and scalars, such as the scales of a KV cache. A sleep of
    level 2 discards them, and where weights are written in place nothing makes them anew.
    """
    weights = {param.untyped_storage().data_ptr() for param in model.parameters() if param.numel() > 1}
    tensors = [tensor for (_, path), tensor in plain_tensors(model).items() if "." in path]
    found = {id(tensor): tensor for tensor in (*tensors, *(p.data for p in model.parameters() if p.numel() == 1))}
    kept = [tensor for tensor in found.values() if tensor.untyped_storage().data_ptr() not in weights]
    return [(tensor, tensor.to("cpu", copy=True)) for tensor in kept]


def refresh_tied_head(model: nn.Module) -> None:
    """Packs the embedding for a tied head again. On a CPU the head keeps a packed copy that a reload misses."""
    for language_model in model.modules():  # it is `model` itself, or a part of a vision-language model
        head = getattr(language_model, "lm_head", None)
        head = getattr(head, "base_layer", head)
        if head is not None and head.weight.is_cpu and _is_tied(language_model):
            head.quant_method.process_weights_after_loading(head)


def _is_tied(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))
