"""
Triton's gradients of log-probabilities and entropies are those of torch but for the last bits, on a GPU or in the
interpreter (see `interpreter`).
"""

import pytest
import torch
from interpreter import on_devices


kernels = pytest.importorskip("trl_quant.kernels.head")


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [300, 5000])  # a part of a block, and more than one
def test_slopes_and_entropies(dtype, vocabulary, device):
    generator = torch.Generator().manual_seed(0)
    z = (3 * torch.randn(7, vocabulary, generator=generator)).to(dtype)
    ids = torch.tensor([0, 1, 2, vocabulary - 1, vocabulary // 2, 7, 8])
    z[1, 1], z[2, 0] = 40, 40  # certain of the target, and of another token
    wide = z.double()
    p, lse = wide.softmax(1), wide.logsumexp(1)
    expected, entropies = torch.eye(vocabulary, dtype=torch.double)[ids] - p, -(p * wide.log_softmax(1)).sum(1)
    z, ids, lse = z.to(device), ids.to(device), lse.float().to(device)
    d = torch.full_like(z, torch.nan).bfloat16()
    same, given = z.clone(), (ids, lse)
    found = kernels.slopes(z, *given, d), kernels.slopes(same, *given, same), kernels.slopes(z, *given, None)
    for each in found:
        torch.testing.assert_close(each.cpu().double(), entropies, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d.cpu().double(), expected, rtol=2**-8, atol=1e-6)
    assert torch.equal(same.bfloat16(), d)
