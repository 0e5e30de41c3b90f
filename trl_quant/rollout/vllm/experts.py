"""
Reads and mends the experts and routers of vLLM's mixtures, in BF16.

vLLM holds the experts of a decoder layer in two tensors, `w13_weight` (E, 2 I, H), gate over up, and `w2_weight`
(E, H, I). On a CPU its kernel reads them in a packed order, in which each expert is packed by itself.
"""

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import extract_layer_index

from ...models.families import EXPERT, EXPERT_PARTS
from ...models.names import place_in_layer
from .adapter import linear_layers


HELD_AS = {2: "w13_weight", 1: "w2_weight"}  # how many matrices of an expert a tensor joins -> vLLM's name of it
READABLE = ("CPU", "TRITON")  # backends that hold experts as they are loaded, or packed as `held_form` packs them


def expert_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the modules that hold the experts of vLLM's decoder layers, by the index of the layer."""
    found = {}
    for name, module in model.named_modules():
        held = dict(module.named_parameters(recurse=False))
        if all(tensor in held for tensor in HELD_AS.values()):
            found[extract_layer_index(name)] = module
    return found


def check_experts(model: nn.Module) -> None:
    """
    Raises `ValueError` if the experts of vLLM's model are not unquantized, or held in an order that the self-check
    cannot read.
    """
    for index, layer in expert_layers(model).items():
        method = layer.quant_method
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        if backend not in READABLE:
            raise ValueError(
                f"The experts of layer {index} run {type(method).__name__} ({backend}), and the self-check reads only "
                f"those of {' and '.join(READABLE)}. Sample with `use_vllm=False`, or leave `rollout_precision` unset."
            )
        width = method.moe.intermediate_size_per_partition
        if layer.w2_weight.shape[-1] != width:
            raise ValueError(
                f"vLLM pads experts {width} wide to {layer.w2_weight.shape[-1]} here, and could not load new weights. "
                "Sample with `use_vllm=False`."
            )


def repack_experts(model: nn.Module) -> None:
    """Packs experts on a CPU. vLLM packs them at the first load alone, and a reload writes them unpacked."""
    for layer in expert_layers(model).values():
        if layer.w13_weight.is_cpu:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def differing_expert_or_router(model: nn.Module, name: str, tensor: Tensor) -> str | None:
    """
    Compares a tensor of the policy's experts or routers with vLLM's, bit for bit in vLLM's type.

    Args:
        model (`nn.Module`): vLLM's model.
        name (`str`): The policy's name of the tensor.
        tensor (`torch.Tensor`): All experts of a layer (E, out, in), or a router's weight (E, in) or bias (E,).

    Returns:
        `str` or `None`: The name, with the number of the first expert that differs; `None` if all are the same.
    """
    _, index, path = place_in_layer(name)
    leaf = path.rpartition(".")[2]
    if not EXPERT.fullmatch(name):
        return None if _same_router(model, index, path, tensor) else name
    layer = expert_layers(model)[index]
    held = getattr(layer, HELD_AS[EXPERT_PARTS[leaf]])
    for expert, matrix in enumerate(tensor):
        if not torch.equal(held[expert], held_form(layer, matrix.to(held))):
            return f"{name}[{expert}]"
    return None


def held_form(layer: nn.Module, matrix: Tensor) -> Tensor:
    """Returns the matrix (out, in) of one expert as a layer of vLLM's holds it after loading."""
    if not matrix.is_cpu:
        return matrix
    return ops.cpu_prepack_moe_weight(matrix[None].contiguous(), layer.quant_method.moe_kernel.fused_experts.isa)[0]


def _same_router(model: nn.Module, index: int, path: str, tensor: Tensor) -> bool:
    """Whether vLLM's router, or its gate of a shared expert, has this weight (out, in), or this bias."""
    *_, gate, leaf = path.split(".")
    (router,) = (
        layer
        for name, layer in linear_layers(model).items()
        if name.endswith(f".{gate}") and extract_layer_index(name) == index
    )
    if leaf != "weight":
        held = getattr(router, leaf)
        return torch.equal(held, tensor.to(held))
    held = read_router(router)
    return torch.equal(held, tensor.to(held))


def read_router(router: LinearBase) -> Tensor:
    """
    Returns the weight (out, in) with which a router computes, in its own type and however its kernel holds it: the
    product with the identity, which adds only zeros to each value.
    """
    # W^T (in, out) = I (in, in) @ W^T (in, out)
    product = router(torch.eye(router.input_size, dtype=router.params_dtype, device=router.weight.device))
    return (product[0] if isinstance(product, tuple) else product).t().to(router.params_dtype)
