"""Repairs what a reload breaks in vLLM's layers. The faults were seen in vLLM 0.26 (CUDA) and 0.31 (CPU)."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.utils import set_weight_attrs

from .adapter import linear_layers
from .kernel_checks import UNPACKED, method_of


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


def kernel_state(model: nn.Module) -> dict[tuple[nn.Module, str], object]:
    """
    Returns what layers and their kernels hold in addition to parameters and buffers: tensors, such as the locks of
    Marlin's kernels, or the strides and scales of kernels for experts, and the objects of vLLM's that hold them. A
    reload replaces them and frees the old tensors, which captured CUDA graphs still read and write. If that memory is
    then used for something else, kernels wait forever for a lock, or use addresses that are none.

    Returns:
        `dict`: (module, path of the attribute in it) -> tensor or object, an object before what it holds.
    """
    found = {}
    for module in model.modules():
        found |= {(module, name): value for name, value in vars(module).items() if isinstance(value, Tensor)}
        if hasattr(module, "quant_method"):
            found |= {(module, path): value for path, value in _held(module.quant_method, "quant_method", set())}
    return found


def _held(owner: object, path: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yields the tensors and objects of vLLM's that an object and those inside it hold, with their paths."""
    seen.add(id(owner))
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            yield f"{path}.{name}", value
            continue
        is_vllms = type(value).__module__.startswith("vllm.model_executor.") and hasattr(value, "__dict__")
        if is_vllms and not isinstance(value, nn.Module) and id(value) not in seen:
            yield f"{path}.{name}", value
            yield from _held(value, f"{path}.{name}", seen)


def _owner(module: nn.Module, path: str) -> object | None:
    """Returns the object that has the attribute at the end of a path; `None` if the path leads nowhere any more."""
    for name in path.split(".")[:-1]:
        module = getattr(module, name, None)
    return module


def restore_kernel_state(state: dict[tuple[nn.Module, str], object]) -> None:
    """
    Puts the tensors of [`kernel_state`] back, with the values of those that replaced them in a reload, and the objects
    that a kernel makes at its first use and has not made again, such as a buffer for the order of tokens.
    """
    for (module, path), held in state.items():
        owner, name = _owner(module, path), path.rpartition(".")[2]
        if not hasattr(owner, "__dict__") or name not in vars(owner):
            continue
        now = vars(owner)[name]
        if isinstance(held, Tensor) and isinstance(now, Tensor) and now is not held and now.shape == held.shape:
            held.copy_(now)
            setattr(owner, name, held)
        elif now is None and not isinstance(held, Tensor):
            setattr(owner, name, held)


def constants(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """
    Returns the tensors that no sync sends, each with a copy on the CPU: those of kernels that share no memory with the
    model's weights, such as the strides of CUTLASS's experts, and scalars, such as the scales of a KV cache. A sleep of
    level 2 discards them, and where weights are written in place nothing makes them anew.
    """
    weights = {param.untyped_storage().data_ptr() for param in model.parameters() if param.numel() > 1}
    of_kernels = (held for (_, path), held in kernel_state(model).items() if "." in path)
    tensors = [held for held in of_kernels if isinstance(held, Tensor)]
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


def refresh_convolutions(model: nn.Module) -> None:
    """
    Gives Mamba's layers the weights of their convolution again. A CPU with products of BF16 packs those, and vLLM 0.31
    computes with the unpacked ones that it loaded first, which a reload misses.
    """
    for layer in model.modules():
        loaded = getattr(getattr(layer, "conv1d", None), UNPACKED, None)
        if loaded is not None and hasattr(layer, "conv_weights"):
            layer.conv_weights.copy_(loaded)


def _is_tied(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))
