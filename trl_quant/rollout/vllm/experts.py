"""
Reads and mends the experts and routers of vLLM's mixtures.

vLLM holds the experts of a decoder layer in two tensors, `w13_weight` (E, 2 I, H), gate over up, and `w2_weight`
(E, H, I), with their scales in `w13_weight_scale` and `w2_weight_scale`. The self-check compares each expert of each
layer with the policy's, because a text reaches only some of them:

| kernels | hold experts | are compared by |
|---|---|---|
| Triton, CUTLASS | as they are loaded | their codes and scales, bit for bit |
| of a CPU, in BF16 | packed, each expert by itself | the packed weights, bit for bit |
| Marlin | in an order of its own | one product of each expert |
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import extract_layer_index

from ...formats import FORMATS, QuantizedTensor
from ...formats.nvfp4 import global_scale
from ...models.families import EXPERT, EXPERT_PARTS
from ...models.names import place_in_layer
from ...precisions import PRECISIONS
from ...storage.layout import checkpoint_tensors


GATE_UP, DOWN = EXPERT_PARTS  # the policy's names of the two tensors of a layer's experts
HELD_AS = {GATE_UP: "w13_weight", DOWN: "w2_weight"}  # vLLM's names of them
OF_CPU = "CPU"  # backend that packs each expert
AS_LOADED = ("TRITON", "CUTLASS", OF_CPU)  # backends that hold experts as they are loaded, or as `held_form` says
REORDERED = ("MARLIN",)  # backends that hold them in an order of their own
PRODUCTS_DIFFER = 2**-6  # relative difference of two products. BF16 explains a third of it


def expert_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the modules that hold the experts of vLLM's decoder layers, by the index of the layer."""
    found = {}
    for name, module in model.named_modules():
        held = dict(module.named_parameters(recurse=False))
        if all(tensor in held for tensor in HELD_AS.values()):
            found[extract_layer_index(name)] = module
    return found


def backend_of(layer: nn.Module) -> str:
    """Returns vLLM's name of the kernels that multiply with a layer's experts, without "VLLM_"; "" if it has none."""
    chosen = (value for name, value in vars(layer.quant_method).items() if name.endswith("_backend"))
    return next((backend.name.removeprefix("VLLM_") for backend in chosen if hasattr(backend, "name")), "")


def held_experts(layers: dict[int, nn.Module], name: str) -> Tensor | None:
    """
    Returns the tensor (experts, ...) in which vLLM holds the experts of a layer, or their codes or scales, as a sync
    sends them; `None` if the kernels have an order of their own.

    Args:
        layers (`dict[int, nn.Module]`): The [`expert_layers`].
        name (`str`): The policy's name, such as `model.layers.0.mlp.experts.down_proj`; of scales, with `_scale`.
    """
    _, index, path = place_in_layer(name)
    leaf = path.rpartition(".")[2]
    held_as = HELD_AS.get(leaf.removesuffix("_scale"))
    if held_as is None or backend_of(layers[index]) not in AS_LOADED:
        return None
    held = getattr(layers[index], f"{held_as}_scale" if leaf.endswith("_scale") else held_as, None)
    return None if held is None else held.data


def check_experts(model: nn.Module, precision: str) -> None:
    """
    Raises `ValueError` if vLLM does not compute its model's experts as `precision` says, or holds them in an order that
    the self-check cannot read.
    """
    format = PRECISIONS[precision].format
    weight_only = format is not None and FORMATS[format].activations is None
    backends = REORDERED if weight_only else AS_LOADED
    for index, layer in expert_layers(model).items():
        method, backend = layer.quant_method, backend_of(layer)
        if type(method).__name__ != PRECISIONS[precision].vllm.experts or backend not in backends:
            raise ValueError(
                f"`rollout_precision`={precision!r}: vLLM runs the experts of layer {index} with "
                f"{type(method).__name__} ({backend or 'no kernel'}), not with {PRECISIONS[precision].vllm.experts} "
                f"({' or '.join(backends)}). Sample with `use_vllm=False`, or leave `rollout_precision` unset."
            )
        multiplied = method.moe_quant_config  # `None` where vLLM does not say
        if multiplied is not None and (multiplied.quant_dtype is None) != (format is None or weight_only):
            raise ValueError(
                f"`rollout_precision`={precision!r}: vLLM multiplies the experts of layer {index} with inputs in "
                f"{multiplied.quant_dtype or '16 bits'}, which is another precision. Sample with `use_vllm=False`."
            )
        width = method.moe.intermediate_size_per_partition
        if backend in AS_LOADED and layer.w2_weight.shape[-1] != width:
            raise ValueError(
                f"vLLM pads experts {width} wide to {layer.w2_weight.shape[-1]} here, and could not load new weights. "
                "Sample with `use_vllm=False`."
            )


def repack_experts(model: nn.Module, names: Iterable[str]) -> None:
    """
    Packs experts on a CPU, of the decoder layers that a reload of the tensors called `names` has written. vLLM packs
    them at the first load alone, and a reload writes them unpacked.
    """
    reloaded = {place_in_layer(name)[1] for name in names if EXPERT.fullmatch(name)}
    for index, layer in expert_layers(model).items():
        if index in reloaded and backend_of(layer) == OF_CPU:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


class ExpertsCheck:
    """
    Compares the policy's experts and routers with those of vLLM's model.

    Parameters:
        model (`nn.Module`): vLLM's model.
        config (`VllmConfig`): vLLM's configuration.
        format (`str` or `None`): Key of `FORMATS` in which the engine multiplies; `None` for BF16.
        quantizer, shared_scale (`Callable`, *optional*): See [`~storage.layout.quantizers_on`].
    """

    def __init__(
        self,
        model: nn.Module,
        config: VllmConfig,
        format: str | None,
        quantizer: Callable[..., QuantizedTensor] | None = None,
        shared_scale: Callable[..., Tensor] = global_scale,
    ):
        self.model, self.config, self.format = model, config, format
        self.quantizer, self.shared_scale = quantizer, shared_scale
        self.layers = expert_layers(model)
        self._waiting: dict[int, tuple[str, Tensor]] = {}  # by layer, the first tensor of its experts

    def differing(self, name: str, tensor: Tensor) -> str | None:
        """
        Compares a tensor of a router, or the experts of a layer once both of their tensors have been given.

        Args:
            name (`str`): The policy's name of the tensor.
            tensor (`torch.Tensor`): All experts of a layer (E, out, in), or a router's weight (E, in) or bias (E,).

        Returns:
            `str` or `None`: The name of what differs, with the number of the first expert that does; `None` if all are
            the same.
        """
        _, index, path = place_in_layer(name)
        if tensor.ndim < 3:
            return None if _same_router(self.model, index, path, tensor) else name
        if index not in self._waiting:
            self._waiting[index] = name, tensor
            return None
        pair = dict([self._waiting.pop(index), (name, tensor)])
        experts = {own.rpartition(".")[2]: (own, stack) for own, stack in pair.items()}
        layer = self.layers[index]
        if backend_of(layer) in REORDERED:
            (place, gate_up), (_, down) = experts[GATE_UP], experts[DOWN]
            wrong = self._wrong_product(layer, gate_up, down)
            return None if wrong is None else f"{place.rpartition('.')[0]}[{wrong}]"
        for leaf in EXPERT_PARTS:
            own, stack = experts[leaf]
            for expert, matrix in enumerate(stack):
                if not self._same_weights(layer, leaf, expert, matrix):
                    return f"{own}[{expert}]"
        return None

    def _quantized(self, leaf: str, matrix: Tensor) -> list[QuantizedTensor]:
        """Quantizes the matrices of one expert that a tensor joins, one below the other."""
        parts = matrix.chunk(EXPERT_PARTS[leaf])
        shared = {"global_scale": self.shared_scale(*parts)} if FORMATS[self.format].shares_scale else {}
        return [self.quantizer(part.contiguous(), self.format, **shared) for part in parts]

    def _same_weights(self, layer: nn.Module, leaf: str, expert: int, matrix: Tensor) -> bool:
        """Whether vLLM's layer holds the matrix (out, in) of an expert, bit for bit in vLLM's types."""
        held = getattr(layer, HELD_AS[leaf])[expert]
        if self.format is None:
            parts = matrix.to(held).chunk(EXPERT_PARTS[leaf])
            return torch.equal(held, held_form(layer, torch.cat([_of_rank(layer, leaf, part) for part in parts])))
        stored = [checkpoint_tensors(".weight", part) for part in self._quantized(leaf, matrix)]
        codes, scales = (
            torch.cat([_of_rank(layer, leaf, part[name]) for part in stored]) for name in (".weight", ".weight_scale")
        )
        held_scales = getattr(layer, f"{HELD_AS[leaf]}_scale")[expert]
        same = torch.equal(held.view(torch.uint8), codes.to(held.device).view(torch.uint8))
        if same and torch.equal(held_scales, scales.to(held_scales)):
            return True
        if not FORMATS[self.format].per_row:
            return False
        # The values of codes that a policy holds may have other codes when they are quantized again
        values = (held.float() * held_scales).to(matrix.dtype)
        own = torch.cat([_of_rank(layer, leaf, part) for part in matrix.chunk(EXPERT_PARTS[leaf])])
        return torch.equal(values, own.to(values.device))

    def _wrong_product(self, layer: nn.Module, gate_up: Tensor, down: Tensor) -> int | None:
        """
        Returns the number of the first expert whose product with a random vector differs from that of the policy's
        quantized weights; `None` if none does.

        Args:
            layer (`nn.Module`): vLLM's layer.
            gate_up (`torch.Tensor`): Gate and up of each expert, (E, 2 I, H).
            down (`torch.Tensor`): Down of each expert, (E, H, I).
        """
        experts, _, hidden = gate_up.shape
        device, dtype = layer.w13_weight.device, self.config.model_config.dtype
        x = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        ids = torch.arange(experts, dtype=torch.int32, device=device)[:, None]
        ones = torch.ones_like(ids, dtype=torch.float32)
        with set_forward_context(None, self.config):
            found = layer.quant_method.apply(layer, x.clone(), ones, ids, None, None)
        activation = ACT2FN[layer.activation.value]
        for expert in range(experts):
            quantized = [*self._quantized(GATE_UP, gate_up[expert]), *self._quantized(DOWN, down[expert])]
            leaves = (GATE_UP, GATE_UP, DOWN)
            whole = zip(leaves, (weight.dequantize(torch.float32) for weight in quantized), strict=True)
            gate, up, out = (_of_rank(layer, leaf, weight) for leaf, weight in whole)
            row = x[expert].float()
            expected = out @ (activation(gate @ row) * (up @ row))
            if not (found[expert].float() - expected).norm() <= PRODUCTS_DIFFER * expected.norm():  # also finds NaN
                return expert
        return None


def _of_rank(layer: nn.Module, leaf: str, matrix: Tensor) -> Tensor:
    """
    Returns this rank's part of an expert's gate, up or down, or of its scales: rows of gate and up, columns of down. A
    scale of all columns belongs to each rank.
    """
    moe, dim = layer.quant_method.moe, 1 if leaf == DOWN else 0
    return matrix if matrix.shape[dim] == 1 else matrix.chunk(moe.tp_size, dim)[moe.tp_rank]


def held_form(layer: nn.Module, matrix: Tensor) -> Tensor:
    """Returns the matrix (out, in) of one expert, in BF16, as a layer of vLLM's holds it after loading."""
    if backend_of(layer) != OF_CPU:
        return matrix
    return ops.cpu_prepack_moe_weight(matrix[None].contiguous(), layer.quant_method.moe_kernel.fused_experts.isa)[0]


def _same_router(model: nn.Module, index: int, path: str, tensor: Tensor) -> bool:
    """Whether vLLM's router, or its gate of a shared expert, has this weight (out, in), or this bias."""
    *_, gate, leaf = path.split(".")
    named = (item for item in model.named_modules() if item[0].endswith(f".{gate}"))
    found = (module for name, module in named if extract_layer_index(name) == index)
    (router,) = (module for module in found if isinstance(module, LinearBase | nn.Linear))
    held = getattr(router, leaf) if leaf != "weight" or isinstance(router, nn.Linear) else read_router(router)
    return torch.equal(held, tensor.to(held))


def read_router(router: LinearBase) -> Tensor:
    """
    Returns the weight (out, in) with which a router computes, in its own type and however its kernel holds it: the
    product with the identity, which adds only zeros to each value.
    """
    # W^T (in, out) = I (in, in) @ W^T (in, out)
    product = router(torch.eye(router.input_size, dtype=router.params_dtype, device=router.weight.device))
    return (product[0] if isinstance(product, tuple) else product).t().to(router.params_dtype)
