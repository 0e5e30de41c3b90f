"""The experts of a mixture that trains in FP8, each made of dense layers: what `UnifiedExperts` must equal."""

import torch
import torch.nn.functional as F
from torch import nn

from trl_quant.layers import UnifiedLinear
from trl_quant.layers.joint import Joint


class DenseExperts(nn.Module):
    """Experts of `experts.gate_up_proj` and `down_proj`, as three linear layers each, which gate and up share."""

    def __init__(self, experts: nn.Module, precision: str = "fp8"):
        super().__init__()
        self.layers = nn.ModuleList()
        for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
            matrices = [*gate_up.detach().chunk(2), down.detach()]
            made = nn.ModuleList([UnifiedLinear.from_linear(linear(matrix), precision) for matrix in matrices])
            joint = Joint(made[:2])
            made[0].joint = made[1].joint = joint
            self.layers.append(made)

    def forward(self, hidden, chosen, weights):
        hidden = hidden.clone()  # so that the experts' gradients add up before they meet those of a shared expert
        y = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, weights.dtype))
        for expert, (gate, up, down) in enumerate(self.layers):
            tokens, places = torch.where(chosen == expert)
            if len(tokens):
                x = hidden[tokens]
                out = down(F.silu(gate(x)) * up(x)) * weights[tokens, places, None]
                y = y.index_add(0, tokens, out)
        return y.to(hidden.dtype)

    def stacked(self, of) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor of each layer, such as its gradient, as the two tensors of all experts."""
        rows = [[of(layer) for layer in layers] for layers in self.layers]
        return torch.stack([torch.cat(row[:2]) for row in rows]), torch.stack([row[2] for row in rows])

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of the two tensors, 0 for experts without tokens."""
        return self.stacked(
            lambda layer: torch.zeros_like(layer.weight) if layer.weight.grad is None else layer.weight.grad
        )


def linear(matrix: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(*reversed(matrix.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(matrix.clone())
    return layer
