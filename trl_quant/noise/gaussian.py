"""Gaussian noise on the norms that feed linear layers (QeRL, section 3.3, eq. 7-12, appendix G).

    w_noise = w + Z,    Z ~ N(0, sigma^2), one value per channel                      eq. 7, 10
    RMSNorm_{w + Z}(x) = (1 + Z / w) * RMSNorm_w(x)                                   eq. 11

The linear layers that a norm feeds then behave as if each input channel of their quantized weights were multiplied by
`1 + Z / w` (eq. 12): noise on quantized weights without extra parameters or kernels. q, k and v share the Z of
`input_layernorm`; gate and up share the Z of the norm before the MLP. q/k norms and the final norm are not noised.

| paper | here |
|---|---|
| `Z_noise` | the normal vector, keyed by `(seed, step, name, draw)` |
| `w`, `w_noise` | `weight` and the result |
| `sigma` | `sigma`, from [`~noise.schedules`] |

Only the sampler is noised. The noise is added to the clean weight each time and never accumulates.
"""

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.norms import feeding_norms


def noised_norms(model_type: str, names: Iterable[str]) -> list[str]:
    """
    Returns the names of the noised norm weights, two per decoder layer.

    Args:
        model_type (`str`): `model_type` of the text model's config.
        names (`Iterable[str]`): Names of the sampler's parameters.

    Raises:
        `ValueError`: for an unknown family, or if a decoder layer among `names` lacks a norm.
    """
    return list(feeding_norms(model_type, names))


@torch.no_grad()
def norm_noise(weight: Tensor, sigma: float, seed: int, step: int, name: str, draw: int = 0) -> Tensor:
    """
    Returns a norm's weight plus its noise, as a new tensor.

    The noise depends only on `(seed, step, name, draw)`, so it is the same on every rank, on every device, and after a
    resume. Drawing it leaves the global random state unchanged.

    Args:
        weight (`torch.Tensor` of shape `(channels,)`): Clean weight, in any floating-point type.
        sigma (`float`): Standard deviation; 0 returns the weight bit for bit.
        seed (`int`): Seed of the run.
        step (`int`): Optimizer step that the samples belong to.
        name (`str`): Name of the weight.
        draw (`int`, *optional*, defaults to `0`): Index of the generation within its step.

    Returns:
        `torch.Tensor` of shape `(channels,)`: `weight + Z`, added in float32 and rounded to the type of `weight`.

    Raises:
        `ValueError`: if `sigma` is negative or not finite.
    """
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma must be finite and >= 0, got {sigma}.")
    if sigma == 0:
        return weight.clone()
    # Draw in float64 and round: float32 draws take different code paths on different CPUs.
    z = torch.randn(weight.shape, generator=_generator(seed, step, name, draw), dtype=torch.float64).float()
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + sigma * z.to(weight.device)).to(weight.dtype)


def _generator(seed: int, step: int, name: str, draw: int) -> torch.Generator:
    place = f"{step}.{draw}" if draw else step
    return keyed_generator(f"{seed}/{place}/{name}")


def keyed_generator(key: str) -> torch.Generator:
    """
    Returns a generator of random numbers that depends only on `key`: the same on every rank and after a resume. It is
    seeded by a cryptographic hash, because Python's `hash` differs between processes.
    """
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
