"""
Triton's numbers of a weight in Marlin's layout equal those of `layers.marlin` in torch bit for bit, on a GPU or in the
interpreter (see `interpreter`).
"""

import pytest
import torch
from interpreter import on_devices

from trl_quant.layers import marlin


kernels = pytest.importorskip("trl_quant.kernels.marlin")


@on_devices
@pytest.mark.parametrize("group", [16, 32])
def test_numbers(group, device):
    """Every code under every scale, whole and in parts, which start and end at a tile."""
    torch.manual_seed(0)
    inputs, outputs = 32 * 9, 64 * 3
    values = torch.randint(-(2**31), 2**31, (inputs // 16, 2 * outputs), dtype=torch.int32)
    stored = torch.arange(inputs // group * outputs).view(-1, outputs) * 7 % 256
    if group == 16:
        scale = (stored % 0xF8).to(torch.uint8).view(torch.float8_e4m3fn)  # beyond are float16's infinities
    else:
        scale = stored.clamp(max=250).to(torch.uint8).view(torch.float8_e8m0fnu)
    for rows, columns in ((slice(None), slice(None)), (slice(2, 16), slice(64, 192)), (slice(4, 6), slice(0, 64))):
        part = values[rows, 2 * (columns.start or 0) : 2 * (columns.stop or outputs)]
        groups = slice((rows.start or 0) * 16 // group, (rows.stop or inputs // 16) * 16 // group)
        scales = scale[groups, columns]
        # In FP16 the interpreter and a GPU round what it cannot hold alike, but not all that torch on a CPU does
        for dtype in (torch.bfloat16, torch.float32):
            right = marlin.product(part, marlin.scales(scales)).to(dtype)
            ours = kernels.dequantized(part.to(device), scales.to(device), dtype).cpu()
            assert ours.dtype == dtype and torch.equal(ours, right)
    assert not torch.equal(ours, right.roll(1, 0)) and right.unique().numel() > 100
