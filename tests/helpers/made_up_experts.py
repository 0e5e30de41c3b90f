"""A made-up module with experts in tensors (experts, out, in), as transformers 5 holds them, beside linear layers."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn


def experts_of_many_sizes(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Random weights (experts, out, in), each expert 64 times as large as the one before: one scale suits only one."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (x * 0.05 * 64.0 ** torch.arange(shape[0], device="cpu")[:, None, None]).to(dtype)


class MadeUpExperts(nn.Module):
    """The experts of one layer. Neither parameter is called `weight`, and their module is no `nn.Linear`."""

    def __init__(self, experts: int, hidden: int, intermediate: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(experts_of_many_sizes(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(experts_of_many_sizes(experts, hidden, intermediate, seed=1))


class MadeUpMixture(nn.Module):
    """A model of one layer: a projection and experts. Its config holds its sizes, as in transformers."""

    def __init__(
        self, config: SimpleNamespace | None = None, experts: int = 3, hidden: int = 192, intermediate: int = 20
    ):
        super().__init__()
        self.config = config or SimpleNamespace(experts=experts, hidden=hidden, intermediate=intermediate)
        self.o_proj = nn.Linear(self.config.hidden, self.config.hidden, dtype=torch.bfloat16)
        self.mlp = nn.ModuleDict({"experts": MadeUpExperts(**vars(self.config))})

    def get_output_embeddings(self) -> None:
        return None
