"""The RMSNorm kernel against its twin, `trl_quant.layers.exact.rms_norm`, on a GPU or in the interpreter."""

import re

import pytest
import torch
from interpreter import INTERPRETED, on_devices, ptx_of, rerun, reruns

from trl_quant.layers import exact


kernels = pytest.importorskip("trl_quant.kernels.norm")

SHAPES = [(1, 128), (5, 96), (7, 896), (2, 3, 64)]


def inputs(shape, dtype, device):
    generator = torch.Generator().manual_seed(0)
    x, residual = (3 * torch.randn(shape, generator=generator) for _ in range(2))
    weight = 1 + torch.randn(shape[-1], generator=generator) / 4
    return [t.to(dtype).to(device) for t in (x, residual, weight)]


@pytest.mark.slow
@reruns
def test_in_the_interpreter():
    assert rerun(__file__) > 10


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adds", [True, False])
def test_equals_its_twin(device, dtype, shape, adds):
    """The sum bit for bit; the output but for the order of a sum, which moves a last bit now and then."""
    x, residual, weight = inputs(shape, dtype, device)
    given = [t.clone() for t in (x, residual, weight)]
    y, total = kernels.rms_norm(x, weight, 1e-5, residual if adds else None)
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), given, strict=True))
    x, residual, weight = (t.cpu() for t in given)
    expected, sums = exact.rms_norm(x, weight, 1e-5, residual if adds else None)
    assert torch.equal(total.cpu(), sums)
    last_bit = torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=(2 if dtype == torch.bfloat16 else 8) * last_bit, atol=0)
    if dtype == torch.bfloat16:
        assert (y.cpu() == expected).float().mean() > 0.99
    assert y.shape == x.shape


@on_devices
def test_a_token_gets_the_same_bits_in_any_batch(device):
    x, residual, weight = inputs((40, 96), torch.bfloat16, device)
    y, _ = kernels.rms_norm(x, weight, 1e-5, residual)
    for rows in (1, 7, 33):
        assert torch.equal(kernels.rms_norm(x[:rows], weight, 1e-5, residual[:rows])[0], y[:rows])
    assert kernels.rms_norm(x[:0], weight, 1e-5)[0].shape == (0, 96)


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
def test_reads_and_writes_16_bytes_at_once():
    types = "*bf16 *bf16 *bf16 *bf16 *bf16 i32 fp32"
    code = ptx_of(kernels.norm_kernel, types, {"ADD": True, "BLOCK": 4096}, num_warps=8)
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) >= 6 and len(re.findall(r"st\.global\.v4\.b32", code)) >= 4
