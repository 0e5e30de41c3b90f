"""
Triton's numbers of a four-bit weight equal `QuantizedTensor.dequantize` bit for bit, and its products those of torch,
on a GPU or in the interpreter (see `interpreter`), which multiplies no BF16: products are those of FP16 there.
"""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from interpreter import INTERPRETED, in_types, on_devices, ptx_of, triton
from made_up_experts import experts_of_many_sizes
from reference_formats import DTYPES, bits, make

from trl_quant import formats
from trl_quant.precisions import four_bits


kernels = pytest.importorskip("trl_quant.kernels.dequantize")

SHAPES = [(5, 96), (20, 320), (1, 128), (3, 50), (20, 832)]  # several programs, groups that are not full
every_format = pytest.mark.parametrize("name", four_bits())


def quantized(name: str, dtype: torch.dtype, shape: tuple, kind: str = "random") -> formats.QuantizedTensor | None:
    """A weight in rows; `None` where NF4's blocks run across them."""
    if name == "nf4" and shape[1] % 64:
        return None
    q = formats.quantize(make(kind, dtype, shape, seed=sum(shape)), name)
    return replace(q, values=q.values.view(shape[0], -1), scale=q.scale.view(shape[0], -1))


@on_devices
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", ["random", "wide", "underflow"])
@every_format
def test_numbers_equal_formats(name, kind, device):
    for dtype, shape in in_types(DTYPES, SHAPES) if kind == "random" else product(DTYPES, SHAPES[1:2]):
        if (q := quantized(name, dtype, shape, kind)) is None:
            continue
        for wanted in (None, torch.float32):
            assert torch.equal(bits(kernels.dequantize(q.to(device), wanted).cpu()), bits(q.dequantize(wanted)))


@on_devices
@every_format
def test_every_code_and_scale(name, device):
    """All 256 bytes under every scale that can be stored."""
    group = formats.FORMATS[name].group if name != "nf4" else 64
    values = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 512 // group)
    if name == "nvfp4":
        scale = (scale % 127).view(torch.float8_e4m3fn)  # no sign, no NaN
    elif name == "mxfp4":
        scale.clamp_(max=254)
    else:
        scale = torch.exp2((scale.float() - 128) / 3).to(torch.bfloat16 if name == "int4" else torch.float32)
    shared = torch.tensor([2688 / 0.37]) if name == "nvfp4" else None
    for dtype in (torch.bfloat16, torch.float32):
        q = formats.QuantizedTensor(name, values, scale, torch.Size((256, 512)), dtype, shared)
        assert torch.equal(bits(kernels.dequantize(q.to(device)).cpu()), bits(q.dequantize()))
    if name == "nvfp4":
        q.scale[3, 5] = float("nan")
        numbers = kernels.dequantize(q.to(device)).cpu()
        assert numbers[3, 80:96].isnan().all() and numbers.isnan().sum() == 16


@on_devices
def test_scales_that_fsdp_made_wider(device):
    """Its mixed precision hands over all scales, the global one too, in BF16."""
    q = quantized("nvfp4", torch.bfloat16, (20, 320))
    assert torch.equal(q.global_scale.bfloat16(), q.global_scale)
    wide = replace(q, scale=q.scale.bfloat16(), global_scale=q.global_scale.bfloat16()).to(device)
    assert torch.equal(bits(kernels.dequantize(wide).cpu()), bits(q.dequantize()))


@on_devices
@every_format
def test_parts_of_a_weight(name, device):
    q = quantized(name, torch.bfloat16, (40, 384)).to(device)
    width = q.values.shape[1] // q.scale.shape[1]
    first = 128 // (2 * width)  # groups
    part = replace(
        q, values=q.values[8:24, first * width :], scale=q.scale[8:24, first:], shape=torch.Size((16, 384 - 128))
    )
    expected = kernels.dequantize(q)[8:24, 128:]
    assert torch.equal(bits(kernels.dequantize(part)), bits(expected.contiguous()))
    assert torch.equal(bits(part.dequantize()), bits(expected.contiguous()))


@on_devices
@every_format
def test_experts_are_dequantized_one_by_one(name, device):
    """Each with its own scales, at several programs an expert; parts of experts too."""
    x = experts_of_many_sizes(3, 40, 384)
    q = formats.quantize(x, name)
    q = replace(q, values=q.values.view(3, 40, -1), scale=q.scale.view(3, 40, -1)).to(device)
    numbers = kernels.dequantize(q)
    alone = [formats.quantize(expert, name).dequantize() for expert in x]
    assert torch.equal(bits(numbers.cpu()), bits(torch.stack(alone)))
    part = replace(q, values=q.values[:, 8:24], scale=q.scale[:, 8:24], shape=torch.Size((3, 16, 384)))
    assert torch.equal(bits(kernels.dequantize(part)), bits(numbers[:, 8:24]))
    if name == "nvfp4":
        of_the_first = replace(q, global_scale=q.global_scale[:1].expand(3, 1))
        assert not torch.equal(numbers.cpu(), of_the_first.dequantize().cpu())
    with pytest.raises(ValueError, match=f"q: '{name}' .*has no kernel; allowed are matrices"):
        kernels.matmul(torch.ones(2, 384, dtype=torch.float16, device=device), q)


@on_devices
@pytest.mark.parametrize("transposed", [True, False])
@every_format
def test_products_equal_torch(name, transposed, device):
    """To the rounding of a sum in FP32; one code more or less in a row would show."""
    dtypes = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
    for dtype, shape, tokens in product(dtypes, [(37, 320), (130, 192)], [1, 70]):
        q = quantized(name, dtype, shape)
        w = q.dequantize().double()
        x = make("random", dtype, (tokens, shape[1] if transposed else shape[0]), seed=tokens)
        bias = make("random", dtype, (shape[0],)) if transposed else None
        exact = x.double() @ (w.t() if transposed else w) + (0 if bias is None else bias.double())
        given = kernels.matmul(x.to(device), q.to(device), None if bias is None else bias.to(device), transposed)
        error = (given.cpu().double() - exact).norm() / exact.norm()
        assert error < (4e-4 if dtype == torch.float16 else 3e-3)
        shifted = x.double() @ (w.roll(1, 1).t() if transposed else w.roll(1, 0))
        assert (given.cpu().double() - shifted).norm() / exact.norm() > 0.1


@on_devices
def test_views_and_no_tokens(device):
    q = quantized("nvfp4", torch.float16, (48, 320)).to(device)
    x = make("random", torch.float16, (320, 24)).to(device)
    assert torch.equal(kernels.matmul(x.t(), q), kernels.matmul(x.t().contiguous(), q))
    assert kernels.matmul(x.t()[:0], q).shape == (0, 48)


@on_devices
def test_wrong_arguments_are_refused(device):
    with pytest.raises(ValueError, match=r"q: 'fp8' .*has no kernel; .*QuantizedTensor\.dequantize"):
        kernels.dequantize(formats.quantize(torch.ones(4, 64, device=device), "fp8"))
    with pytest.raises(ValueError, match=r"q: 'nf4' with values of shape \(128,\) has no kernel"):
        kernels.dequantize(formats.quantize(torch.ones(4, 64, device=device), "nf4"))
    q = quantized("mxfp4", torch.bfloat16, (4, 64)).to(device)
    with pytest.raises(ValueError, match=r"x: dtype torch\.float32 has no kernel; allowed: torch\.bfloat16"):
        kernels.matmul(torch.ones(2, 64, device=device), q)


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
def test_a_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match=r"q: on cpu, but a kernel needs a CUDA device.*QuantizedTensor\.dequantize"):
        kernels.dequantize(formats.quantize(torch.ones(4, 64), "nvfp4"))


# format -> codes, numbers of a group, types of scale, global scale and table
LAYOUTS = {
    "nvfp4": ("e2m1", 16, "*u8 *fp32 -"),
    "mxfp4": ("e2m1", 32, "*u8 - -"),
    "nf4": ("table", 64, "*fp32 - *fp32"),
    "int4": ("integers", 128, "*i16 - -"),
}


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@every_format
def test_compiles_for_hopper(name):
    """Without a GPU: exact arithmetic with subnormals, 16 bytes a write; products on tensor cores, loads in advance."""
    codes, group, tensors = LAYOUTS[name]
    constants = {"CODES": codes, "GROUP": group}
    ptx = ptx_of(
        kernels.dequantize_kernel, f"*bf16 *u8 {tensors} i32 i32 i32 i32", constants | {"ROWS": 16, "COLS": 256}
    )
    assert not re.findall(r"\.ftz|\.approx|div\.full|\bfma\.", ptx)
    assert ("div.rn.f32" in ptx) == (name == "nvfp4")
    assert re.search(r"st\.global\.v4\.b32", ptx)
    if name != "nvfp4":
        return
    constants |= {"NUMBER": triton.language.bfloat16}
    for forward, config in ((True, kernels.TILINGS[0]), (False, kernels.TILINGS[-1])):
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        types = f"*bf16 *bf16 - *u8 {tensors} i32 i32 i32 i32 i32 i32"
        constants |= {"FORWARD": forward, **config.kwargs}
        ptx = ptx_of(kernels.matmul_kernel.fn, types, constants, **options)
        assert ("mma.sync" if config is kernels.TILINGS[0] else "wgmma.mma_async") in ptx
        assert "cp.async" in ptx, "loads ahead"
