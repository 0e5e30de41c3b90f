"""A made-up module with experts in tensors (experts, out, in), as transformers 5 holds them, beside linear layers."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn


EXPERTS, HIDDEN, INTERMEDIATE = 3, 192, 20
CONFIG = SimpleNamespace(experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE)


def experts_of_many_sizes(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Random weights (experts, out, in), each expert six times as large as the one before: one scale suits only one."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * 0.05 * 6.0 ** torch.arange(shape[0])[:, None, None]).to(dtype)


class MadeUpExperts(nn.Module):
    """The experts of one layer. Neither parameter is called `weight`, and their module is no `nn.Linear`."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        experts, hidden, intermediate = config.experts, config.hidden, config.intermediate
        self.gate_up_proj = nn.Parameter(experts_of_many_sizes(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(experts_of_many_sizes(experts, hidden, intermediate, seed=1))


class MadeUpMixture(nn.Module):
    """A model of one layer: a projection and experts."""

    def __init__(self, config: SimpleNamespace = CONFIG):
        super().__init__()
        self.config = config
        self.o_proj = nn.Linear(config.hidden, config.hidden, dtype=torch.bfloat16)
        self.mlp = nn.ModuleDict({"experts": MadeUpExperts(config)})

    def get_output_embeddings(self) -> None:
        return None
