"""The RMSNorm kernel against its twin, `trl_quant.layers.norm.rms_norm`, on a GPU or in the interpreter."""

import re

import pytest
import torch
from interpreter import INTERPRETED, on_devices, ptx_of

from trl_quant.formats.fp8 import FP8Block
from trl_quant.layers import inputs as inputs_of_layers
from trl_quant.layers import norm as twin
from trl_quant.layers import quantizers
from trl_quant.precisions import unified_flows


tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("trl_quant.kernels.norm")

SHAPES = [(1, 128), (5, 96), (7, 896), (2, 3, 64)]


def inputs(shape, dtype, device):
    generator = torch.Generator().manual_seed(0)
    x, residual = (3 * torch.randn(shape, generator=generator) for _ in range(2))
    weight = 1 + torch.randn(shape[-1], generator=generator) / 4
    return [t.to(dtype).to(device) for t in (x, residual, weight)]


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adds", [True, False])
def test_equals_its_twin(device, dtype, shape, adds):
    """The sum bit for bit; the output but for the order of a sum, which moves a last bit now and then."""
    x, residual, weight = inputs(shape, dtype, device)
    given = [t.clone() for t in (x, residual, weight)]
    y, total, codes = kernels.rms_norm(x, weight, 1e-5, residual if adds else None)
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), given, strict=True))
    x, residual, weight = (t.cpu() for t in given)
    expected, sums = twin.rms_norm(x, weight, 1e-5, residual if adds else None)
    assert torch.equal(total.cpu(), sums)
    last_bit = torch.finfo(dtype).eps
    torch.testing.assert_close(y.cpu(), expected, rtol=(2 if dtype == torch.bfloat16 else 8) * last_bit, atol=0)
    if dtype == torch.bfloat16:
        assert (y.cpu() == expected).float().mean() > 0.99
    assert y.shape == x.shape and codes is None


@on_devices
@pytest.mark.parametrize("format", unified_flows())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_of_the_output(device, dtype, format):
    """Those of the quantizers, of the output in BF16; that has the same bits without, and after a sum."""
    for shape in ((5, 96), (2, 3, 64), (3, 260), *([] if INTERPRETED else [(70, 1024), (70, 4096)])):
        x, residual, weight = inputs(shape, dtype, device)
        x[0] = 0
        y, _, codes = kernels.rms_norm(x, weight, 1e-5, None, format, torch.bfloat16)
        assert torch.equal(y, kernels.rms_norm(x, weight, 1e-5)[0])
        added, total, _ = kernels.rms_norm(x, weight, 1e-5, residual)
        assert torch.equal(added, kernels.rms_norm(total, weight, 1e-5, None, format, torch.bfloat16)[0])
        flat = y.flatten(0, -2).to(torch.bfloat16)
        by = {"fp8": quantizers.quantize_fp8, "fp8_block": lambda y: quantizers.quantize_groups(y, FP8Block.least_amax)}
        twin = by.get(format, lambda y: quantizers.quantize_int8(y, True))(flat)
        assert (codes.format, codes.shape, codes.dtype) == (twin.format, twin.shape, twin.dtype)
        assert codes.scale.shape == twin.scale.shape and torch.equal(codes.scale, twin.scale)
        assert torch.equal(codes.values.view(torch.uint8), twin.values.view(torch.uint8))
        if format == "fp8_block":
            inverted = kernels.rms_norm(x, weight, 1e-5, None, format, torch.bfloat16, True)[2]
            twin = quantizers.quantize_groups(flat, FP8Block.least_amax, True)
            assert torch.equal(inverted.values.view(torch.uint8), twin.values.view(torch.uint8))


@on_devices
@pytest.mark.parametrize("format", unified_flows())
def test_the_next_layer_finds_the_codes(device, format, monkeypatch):
    """And makes those of the columns, which the norm has not, where scales are theirs."""
    monkeypatch.setattr(quantizers, "has_kernels", lambda x, format: True)
    x, _, weight = inputs((5, 140), torch.bfloat16, device)
    y = twin.fused_rms_norm(x.requires_grad_(), weight, 1e-5, format, torch.bfloat16)
    by = {"int8": lambda y: quantizers.quantize_int8(y, True), "fp8": quantizers.quantize_fp8}
    both = quantizers.quantize_groups_for_both(y.detach(), FP8Block.least_amax, quantizers.inverts())
    expected = by.get(format, lambda y: both[0])(y.detach()), both[1]
    with monkeypatch.context() as no_quantizers:
        no_quantizers.setattr(inputs_of_layers, "quantize_input", None)
        rows, none = inputs_of_layers.quantized(y, y.dtype, format, both=False)
    assert torch.equal(rows.values.view(torch.uint8), expected[0].values.view(torch.uint8)) and none is None
    _, columns = inputs_of_layers.quantized(y, y.dtype, format, both=True)
    right = expected[format == "fp8_block"]
    assert torch.equal(columns.values.view(torch.uint8), right.values.view(torch.uint8))


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(device, dtype, monkeypatch):
    """Of x and weight, against autograd in FP64; few programs share many tokens."""
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    for shape in (*SHAPES, (90, 130)):
        x, dy, weight = inputs(shape, dtype, device)
        wide = x.double().requires_grad_(), weight.double()
        normed = wide[0] * (wide[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        (dx,) = torch.autograd.grad(normed * wide[1], wide[0], dy.double())
        dw = (dy.double() * normed.detach().to(dtype)).flatten(0, -2).sum(0)
        for trains in (True, False):
            ours = kernels.rms_norm_backward(dy, x, weight, 1e-5, trains)
            bound = {"rtol": 2**-7, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(ours[0].double(), dx, **bound)
            assert ours[0].dtype == dtype and (ours[1] is None) is not trains
            if trains:
                torch.testing.assert_close(ours[1].double(), dw, **bound)
    assert kernels.rms_norm_backward(dy[:0], x[:0], weight, 1e-5, True)[1].tolist() == [0] * 130


@on_devices
def test_a_token_gets_the_same_bits_in_any_batch(device):
    x, residual, weight = inputs((40, 96), torch.bfloat16, device)
    y, *_ = kernels.rms_norm(x, weight, 1e-5, residual)
    for rows in (1, 7, 33):
        assert torch.equal(kernels.rms_norm(x[:rows], weight, 1e-5, residual[:rows])[0], y[:rows])
    assert kernels.rms_norm(x[:0], weight, 1e-5)[0].shape == (0, 96)


KINDS_OF_CODES = [*((name, False) for name in (None, *unified_flows())), ("fp8_block", True)]


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@pytest.mark.parametrize(("format", "inverts"), KINDS_OF_CODES)
def test_reads_and_writes_16_bytes_at_once(format, inverts):
    kind = {None: "-", "int8": "*i8"}.get(format, "*fp8e4nv")
    types = f"*bf16 *bf16 *bf16 *bf16 *bf16 {kind} {'*fp32' if format else '-'} i32 i32 fp32 fp32"
    traits = {"GROUPED": format == "fp8_block", "INT8": format == "int8", "INVERTS": inverts}
    constants = {"CODE": tl.bfloat16, **traits, "ROWS": 1, "COLS": 4096}
    code = ptx_of(kernels.norm_kernel, types, constants, num_warps=8)
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) >= 6 and len(re.findall(r"st\.global\.v4\.b32", code)) >= 4
    if format:
        assert code.count("div.rn.f32") <= 4, "no division for each value"
    types = "*bf16 *bf16 *bf16 *bf16 *fp32 i32 i32 fp32"
    code = ptx_of(kernels.gradient_kernel, types, {"ROWS": 1, "COLS": 4096}, num_warps=8)
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) >= 6
