"""The random errors of one rounding, with which the self-check measures what rounding explains."""

import torch
from torch import Tensor


class Rounding:
    """Adds seeded random errors to outputs: up to one rounding of BF16, and the error of the device's product."""

    def __init__(self, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, y: Tensor, product_error: float = 0.0) -> Tensor:
        """Returns `y`, of shape (..., out), with both errors. `product_error` is relative, a root mean square."""
        u = torch.rand(y.shape, generator=self.generator, device=y.device) * 2 - 1
        n = torch.randn(y.shape, generator=self.generator, device=y.device)
        return (y * (1 + 2.0**-8 * u) + product_error * y.float().square().mean(-1, True).sqrt() * n).to(y.dtype)
