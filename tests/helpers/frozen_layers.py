"""Frozen layers for the tests, their gradients, and what they save for backward."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PretrainedConfig

from trl_quant.formats import QuantizedTensor
from trl_quant.layers import FrozenLinear
from trl_quant.layers.joint import output
from trl_quant.policy.adapters import FrozenLoraLinear, with_frozen_layers
from trl_quant.precisions import four_bits


DTYPES = [torch.bfloat16, torch.float32]
every_precision = pytest.mark.parametrize("precision", four_bits())


def linear(inputs: int = 384, outputs: int = 72, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def frozen_linear(precision: str = "nvfp4", *args, **kwargs) -> FrozenLinear:
    return FrozenLinear.from_linear(linear(*args, **kwargs), precision)


def frozen_lora_linear(x: torch.Tensor, layer: FrozenLinear, a: torch.Tensor, b: torch.Tensor, scaling: float):
    """A frozen layer and an adapter beside it, as one function."""
    return output(x, layer.operand(a, b, scaling), layer.number)


def layers(model) -> dict[str, FrozenLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}


def storages(tensors) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def gradients(function, x: torch.Tensor, *parameters: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of a fixed weighted sum of it: of the inputs, then of the parameters."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, *parameters), dy)]


def same(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def close(ours, theirs, tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


def saved_bytes(function, *held: torch.Tensor) -> int:
    """Bytes that a forward pass saves for backward, but for the storage of the tensors that are held anyway."""
    own = {tensor.untyped_storage().data_ptr() for tensor in held}
    saved = {}

    def pack(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep = function()
        total = sum(saved.values())
        del keep
    return total


def adapted(precision: str = "nvfp4", dtype: torch.dtype = torch.float32, **settings) -> FrozenLoraLinear:
    """A layer as PEFT makes it, with an adapter that does something."""
    torch.manual_seed(1)
    settings = {"r": 8, "lora_alpha": 12, "target_modules": ["0"], "init_lora_weights": False} | settings
    model = nn.Sequential(frozen_linear(precision, dtype=dtype))
    layer = get_peft_model(model, with_frozen_layers(LoraConfig(**settings))).base_model.model[0]
    assert type(layer) is FrozenLoraLinear
    return layer


def adapter(layer: FrozenLoraLinear, name: str = "default") -> list[torch.Tensor]:
    return [layer.lora_A[name].weight, layer.lora_B[name].weight]


def inputs(tokens: int = 40, features: int = 384, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inputs whose tokens and features differ in size, so that a scale of the wrong ones is seen."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, tokens // 2, features, generator=generator)
    return (x * torch.logspace(-2, 2, tokens).view(2, -1, 1) * torch.linspace(0.1, 3, features)).to(dtype)


class Decoder(nn.Sequential):
    """As much of a model of transformers as `linears` asks for."""

    config = PretrainedConfig()

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return None


def same_codes(left: QuantizedTensor, right: QuantizedTensor) -> bool:
    """Whether codes and scales are equal bit for bit, NVFP4's global scale among them."""
    pairs = [(left.values, right.values), (left.scale, right.scale)]
    if left.global_scale is not None:
        pairs.append((left.global_scale, right.global_scale))
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
