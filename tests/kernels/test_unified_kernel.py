"""
The kernels of the training flow equal `trl_quant.layers.quantizers` bit for bit, on a GPU or in the interpreter (see
`interpreter`), and compile for Hopper.
"""

import re
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
import torch.nn.functional as F
from interpreter import INTERPRETED, in_types, on_devices, ptx_of
from long_tests import rest_is_long
from made_up_experts import experts_of_many_sizes
from reference_formats import bits, make

from trl_quant.formats import QuantizedTensor
from trl_quant.formats import quantize as quantize_weight
from trl_quant.formats.fp8 import FP8Block
from trl_quant.layers import inputs as inputs_of_layers
from trl_quant.layers import products, quantizers
from trl_quant.layers.gated import silu_mul
from trl_quant.precisions import unified_flows


kernels = pytest.importorskip("trl_quant.kernels.unified")

DTYPES = [torch.bfloat16, torch.float32]
KINDS = ["random", "near ties", "zeros", "small"]
SHAPES = [(5, 96), (3, 50), (1, 1), (130, 140), (128, 256), (257, 40), (3, 4100)]  # tokens, features


def shapes_of(kind: str) -> list[tuple]:
    """All of them; in the interpreter, which is slow, for another kind than the random one an odd and a long shape."""
    return SHAPES if kind == "random" or not INTERPRETED else [(3, 50), (3, 4100)]


def inputs(kind: str, dtype: torch.dtype, shape: tuple) -> torch.Tensor:
    """With a row and a column of zeros where there is room for them."""
    generator = torch.Generator().manual_seed(sum(shape))
    if kind == "near ties":  # quotients on both sides of, and at, the middle between two codes
        largest = 14 * (1 + torch.arange(shape[0]) % 9)[:, None]
        x = (torch.rand(shape, generator=generator) * 2 - 1).mul(largest).round() / 4
        x[:, :1] = largest / 4
    else:
        x = torch.randn(shape, generator=generator)
    x = x * {"zeros": 0.0, "small": 1e-11}.get(kind, 1.0)
    if min(shape) > 2:
        x[2], x[:, 1] = 0, 0
    return x.to(dtype)


def assert_equal(ours: QuantizedTensor, theirs: QuantizedTensor):
    assert (ours.format, ours.shape, ours.dtype) == (theirs.format, theirs.shape, theirs.dtype)
    for field in ("values", "scale"):
        a, b = getattr(ours, field).cpu(), getattr(theirs, field).cpu()
        assert (a.shape, a.dtype) == (b.shape, b.dtype), field
        assert torch.equal(bits(a.flatten()), bits(b.flatten())), field


@on_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_cuda", [True, False])
def test_int8_rows(on_cuda, kind, device):
    for dtype, shape in in_types(DTYPES, shapes_of(kind)):
        x = inputs(kind, dtype, shape).to(device)
        ours = kernels.quantize_rows(x, "int8", on_cuda)
        assert_equal(ours, quantizers.quantize_int8(x, on_cuda))


@on_devices
def test_the_two_inverses_of_int8_differ(device):
    """Not a distinction without a difference: 127 / amax, and the inverse of amax / 127."""
    x = inputs("random", torch.bfloat16, (256, 256)).to(device)
    codes = [kernels.quantize_rows(x, "int8", on_cuda).values for on_cuda in (True, False)]
    assert 0 < (codes[0] != codes[1]).float().mean() < 0.05


@on_devices
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_rows(kind, device):
    for dtype, shape in in_types(DTYPES, shapes_of(kind)):
        x = inputs(kind, dtype, shape).to(device)
        assert_equal(kernels.quantize_rows(x, "fp8", True), quantizers.quantize_fp8(x))


@on_devices
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, device):
    for dtype, shape in in_types(DTYPES, shapes_of(kind)):
        dy = inputs(kind, dtype, shape).to(device)
        scale = torch.linspace(1e-4, 3, shape[1], device=device)
        given = kernels.quantize_gradient(dy, scale, quantizers.LEAST_GRADIENT)
        right = quantizers.quantize_fp8(dy.float() * scale, quantizers.LEAST_GRADIENT)
        assert_equal(given, replace(right, dtype=dtype))


@on_devices
def test_gradients_of_experts(device):
    """The scales of its own expert multiply each row."""
    for dtype, shape in in_types(DTYPES, SHAPES):
        dy = inputs("random", dtype, shape).to(device)
        scale = torch.linspace(1e-4, 3, 3 * shape[1], device=device).view(3, shape[1])
        owner = (torch.arange(shape[0], device=device) * 3 // shape[0]).to(torch.int32)
        given = kernels.quantize_gradient(dy, scale, quantizers.LEAST_GRADIENT, owner)
        right = quantizers.quantize_fp8(dy.float() * scale[owner], quantizers.LEAST_GRADIENT)
        assert_equal(given, replace(right, dtype=dtype))


@on_devices
@pytest.mark.parametrize(
    ("kind", "least"), [*((kind, FP8Block.least_amax) for kind in KINDS), ("small", quantizers.LEAST_GRADIENT)]
)
def test_groups(kind, least, device):
    # In the interpreter other kinds than the random one have an odd shape and one of several blocks both ways, and the
    # random one has the two rules in turn, each in both types
    shapes = SHAPES if not INTERPRETED else SHAPES[:5] if kind == "random" else [(3, 50), (130, 140)]
    rules = (False, True) if kind == "random" else (False,)
    cases = in_types(DTYPES, shapes)
    for (dtype, shape), inverts in zip(cases, cycle(sorted(2 * rules))) if INTERPRETED else product(cases, rules):
        x = inputs(kind, dtype, shape).to(device)
        rows, columns = quantizers.quantize_groups_for_both(x, least, inverts)
        assert_equal(kernels.quantize_groups(x, least, inverts), rows)
        for ours, theirs in zip(kernels.quantize_groups_for_both(x, least, inverts), (rows, columns), strict=True):
            assert_equal(ours, theirs)


@on_devices
def test_groups_by_the_inverse_of_the_scale(device):
    """Some codes are neighbours of those by a division: the only difference, and one that the test above would see."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    by_division, by_inverse = (kernels.quantize_groups(x, 1e-10, inverts) for inverts in (False, True))
    assert torch.equal(by_division.scale, by_inverse.scale)
    apart = by_division.values.view(torch.uint8).int() - by_inverse.values.view(torch.uint8).int()
    assert set(apart.unique().tolist()) == {-1, 0, 1} and (apart != 0).float().mean() < 0.001


@on_devices
def test_views_are_read_as_they_are(device):
    x = inputs("random", torch.bfloat16, (300, 260)).to(device)
    for view in (x.t(), x[:, 3:130], x[5:40]):
        assert_equal(kernels.quantize_groups(view, 1e-10), quantizers.quantize_groups(view, 1e-10))
        assert_equal(kernels.quantize_rows(view, "fp8", True), quantizers.quantize_fp8(view))


@on_devices
def test_transpose(device):
    for shape in (*SHAPES, (132, 300), (8, 40)):
        codes = torch.arange(shape[0] * shape[1]).view(shape).to(torch.uint8).view(torch.float8_e4m3fn).to(device)
        assert torch.equal(bits(kernels.transpose(codes)), bits(codes.t().contiguous()))


@on_devices
def test_scaled_sums(device):
    """Sums beyond 2^24, which FP32 rounds; with and without a bias that takes part in one rounding."""
    generator = torch.Generator().manual_seed(0)
    for dtype, shape in in_types(DTYPES, SHAPES):
        sums = torch.randint(-(2**29), 2**29, shape, generator=generator, dtype=torch.int32).to(device)
        x_scale = (torch.rand(shape[0], 1, generator=generator) * 1e-4).to(device)
        for w_dtype, bias in product(DTYPES, (None, torch.randn(shape[1], generator=generator).to(dtype).to(device))):
            w_scale = (torch.rand(shape[1], 1, generator=generator) * 1e-4).to(w_dtype).to(device)
            arguments = (sums, x_scale, w_scale, bias, dtype)
            assert torch.equal(bits(kernels.scale_sums(*arguments)), bits(products.scale_sums(*arguments)))


@on_devices
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_numbers(format, device):
    for dtype, shape in in_types(DTYPES, SHAPES):
        q = quantize_weight(make("random", dtype, shape), format).to(device)
        for wanted in DTYPES:
            assert torch.equal(bits(kernels.dequantize_rows(q, wanted)), bits(q.dequantize(wanted)))
    values = torch.arange(256, dtype=torch.uint8, device=device).repeat(3, 1)
    values = values.view(torch.int8) if format == "int8" else values.view(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0], [1 / 448], [3e-30]], device=device)
    q = QuantizedTensor(format, values, scale, values.shape, torch.bfloat16)
    ours, theirs = kernels.dequantize_rows(q, torch.float32), q.dequantize(torch.float32)
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_rows_than_a_grid_has_on_its_other_axes():
    """16 rows a program, and more than 65535 programs: the tokens of a mixture, each once for each of its experts."""
    rows = 16 * 65535 + 1
    codes = torch.randint(-127, 128, (rows, 3), dtype=torch.int8, device="cuda")
    scale = torch.rand(rows, 1, device="cuda")
    q = QuantizedTensor("int8", codes, scale, codes.shape, torch.bfloat16)
    assert torch.equal(bits(kernels.dequantize_rows(q, torch.float32)), bits(q.dequantize(torch.float32)))
    arguments = codes.int(), scale, scale[:3], None, torch.float32
    assert torch.equal(bits(kernels.scale_sums(*arguments)), bits(products.scale_sums(*arguments)))


@on_devices
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_experts_are_read_one_by_one(format, device):
    """Numbers and transposed codes of (experts, out, in); 22 rows are no whole words."""
    for rows in (132, 22):
        x = experts_of_many_sizes(3, rows, 300)
        q, alone = quantize_weight(x, format).to(device), [quantize_weight(expert, format) for expert in x]
        expected = torch.stack([expert.dequantize() for expert in alone])
        assert torch.equal(bits(kernels.dequantize_rows(q, x.dtype).cpu()), bits(expected))
        turned = torch.stack([expert.values.view(torch.uint8).t() for expert in alone])
        assert torch.equal(bits(kernels.transpose(q.values).cpu()), turned)
        assert not torch.equal(turned[0], turned[1]), "an expert read twice would show"


def gated(dtype: torch.dtype, shape: tuple, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = (inputs("random", dtype, shape).roll(k, 0).to(device) for k in (0, 1))
    return gate * 4, up


@pytest.mark.long
@on_devices
def test_silu_of_a_gate_and_codes(device):
    """In one pass what is otherwise three, codes of the rounded product."""
    for dtype, shape in in_types(DTYPES, [*SHAPES[:4], SHAPES[-1]]):
        gate, up = gated(dtype, shape, device)
        for format, twin in (("int8", lambda y: quantizers.quantize_int8(y, True)), ("fp8", quantizers.quantize_fp8)):
            q, y = kernels.rows(gate, format, True, up)
            assert_equal(q, twin(y))
        torch.testing.assert_close(y, F.silu(gate) * up, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)
        for both in (False, True):
            row, column, again = kernels.groups(gate, FP8Block.least_amax, False, both, up)
            assert torch.equal(again, y)
            twins = quantizers.quantize_groups_for_both(y, FP8Block.least_amax)
            for ours, theirs in zip((row, column)[: 1 + both], twins, strict=False):
                assert_equal(ours, theirs)


@on_devices
@pytest.mark.parametrize("precision", unified_flows())
def test_the_next_layer_finds_the_codes(precision, device, monkeypatch):
    monkeypatch.setattr(quantizers, "has_kernels", lambda x, format: True)
    gate, up = (x.requires_grad_() for x in gated(torch.bfloat16, (130, 140), device))
    for both in (True, False):
        y = silu_mul(gate, up, precision, both)
        with monkeypatch.context() as no_quantizers:
            no_quantizers.setattr(inputs_of_layers, "quantize_input", None)
            no_quantizers.setattr(inputs_of_layers, "quantize_for_both", None)
            rows, columns = inputs_of_layers.quantized(y, y.dtype, precision, both)
        if precision == "int8":
            twins = 2 * (quantizers.quantize_int8(y, True),)
        elif precision == "fp8":
            twins = 2 * (quantizers.quantize_fp8(y),)
        else:
            twins = quantizers.quantize_groups_for_both(y, FP8Block.least_amax)
        assert_equal(rows, twins[0])
        assert (columns is not None) is both
        if both:
            assert_equal(columns, twins[1])


@on_devices
@pytest.mark.parametrize(("tokens", "cols"), rest_is_long([(9, 140), (2, 4100)]))
def test_columns_of_a_wider_matrix(tokens, cols, device):
    """Gate and up side by side, as one product writes them: the same as of matrices of their own."""
    wide = torch.cat(gated(torch.bfloat16, (tokens, cols), device), 1)
    halves = wide.split(cols, 1)
    assert not halves[1].is_contiguous()
    gate, up = (half.contiguous() for half in halves)
    for ours, theirs in (
        (kernels.rows(halves[0], "fp8", True, halves[1]), kernels.rows(gate, "fp8", True, up)),
        (kernels.rows(halves[1], "int8", True), kernels.rows(up, "int8", True)),
        (kernels.groups(halves[0], 1e-10, False, True, halves[1]), kernels.groups(gate, 1e-10, False, True, up)),
        (kernels.groups(halves[1], 1e-10, False, False), kernels.groups(up, 1e-10, False, False)),
    ):
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, QuantizedTensor):
                assert_equal(one, other)
            else:
                assert (one is None and other is None) or torch.equal(one, other)
    dy = torch.ones_like(gate)
    for one, other in zip(kernels.silu_mul_backward(dy, *halves), kernels.silu_mul_backward(dy, gate, up), strict=True):
        assert torch.equal(one, other)
        assert one.stride(0) == 2 * cols, "halves of one matrix"


@on_devices
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_silu_of_every_number(device):
    """Of all BF16 numbers, on a GPU bit for bit; elsewhere NumPy's exponential may put one on the other side."""
    gate = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).to(device)
    gate = gate[gate.isfinite()].view(-1, 255)
    y = kernels.rows(gate, "fp8", True, torch.ones_like(gate))[1]
    assert (y != F.silu(gate)).sum() <= (0 if device == "cuda" else 2)


@on_devices
def test_gradients_of_silu(device):
    for dtype, shape in in_types(DTYPES, SHAPES):
        gate, up = (x.requires_grad_() for x in gated(dtype, shape, device))
        dy = inputs("random", dtype, shape).flip(0).to(device)
        right = torch.autograd.grad(F.silu(gate) * up, (gate, up), dy)
        for ours, theirs in zip(kernels.silu_mul_backward(dy, gate, up), right, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


ROWS = {"ROWS": 1, "COLS": 4096}
FP8_ROWS = ROWS | {"INT8": False, "ON_CUDA": True}
LONG = {"INT8": False, "ON_CUDA": True, "COLS": 2048}
COMPILED = {
    "int8 rows": (
        kernels.rows_kernel,
        "*bf16 - - - - *i8 *fp32 i32 i32 i32 fp32",
        ROWS | {"INT8": True, "ON_CUDA": True},
        4,
    ),
    "fp8 rows": (kernels.rows_kernel, "*bf16 - - - - *fp8e4nv *fp32 i32 i32 i32 fp32", FP8_ROWS, 4),
    "fp8 gradients": (kernels.rows_kernel, "*bf16 - - *fp32 - *fp8e4nv *fp32 i32 i32 i32 fp32", FP8_ROWS, 4),
    "of experts": (kernels.rows_kernel, "*bf16 - - *fp32 *i32 *fp8e4nv *fp32 i32 i32 i32 fp32", FP8_ROWS, 4),
    "fp8 long": (kernels.long_rows_kernel, "*bf16 - - *fp32 - *fp8e4nv *fp32 i32 i32 i32 fp32", LONG, 8),
    "of experts, long": (kernels.long_rows_kernel, "*bf16 - - *fp32 *i32 *fp8e4nv *fp32 i32 i32 i32 fp32", LONG, 8),
    "silu, long": (kernels.long_rows_kernel, "*bf16 *bf16 *bf16 - - *fp8e4nv *fp32 i32 i32 i32 fp32", LONG, 8),
    "groups": (
        kernels.groups_kernel,
        "*bf16 - - *fp8e4nv *fp32 - - i32 i32 i32 i32 fp32",
        {"BOTH": False, "INVERTS": False},
        8,
    ),
    "both": (
        kernels.groups_kernel,
        "*bf16 - - *fp8e4nv *fp32 *i32 *fp32 i32 i32 i32 i32 fp32",
        {"BOTH": True, "INVERTS": False},
        8,
    ),
    "inverted": (
        kernels.groups_kernel,
        "*bf16 - - *fp8e4nv *fp32 *i32 *fp32 i32 i32 i32 i32 fp32",
        {"BOTH": True, "INVERTS": True},
        8,
    ),
    "silu, both": (
        kernels.groups_kernel,
        "*bf16 *bf16 *bf16 *fp8e4nv *fp32 *i32 *fp32 i32 i32 i32 i32 fp32",
        {"BOTH": True, "INVERTS": False},
        16,
    ),
    "gradients": (kernels.gradient_kernel, "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32", {"BLOCK": 2048}, 4),
    "transpose": (kernels.transpose_kernel, "*u8 *i32 i32 i32", {}, 8),
    "sums": (kernels.sums_kernel, "*i32 *bf16 *fp32 *fp32 *bf16 i32 i32", {"ROWS": 16, "COLS": 256}, 4),
    "numbers": (kernels.numbers_kernel, "*u8 *fp32 *bf16 i32 i32", {"INT8": False, "ROWS": 16, "COLS": 256}, 4),
}


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_hopper(name):
    """Without a GPU: exact arithmetic with subnormals, one division a scale, whole vectors written."""
    kernel, types, constants, warps = COMPILED[name]
    ptx = ptx_of(kernel, types, constants, num_warps=warps)
    if name != "gradients" and "silu" not in name:
        assert not re.findall(r"\.ftz|\.approx|div\.full", ptx)
    assert re.search(r"st\.global\.v[24]\.b32|st\.global\.b64", ptx)
    if name in ("fp8 rows", "fp8 gradients", "of experts", "fp8 long", "groups", "both", "inverted"):
        values = 64 if name not in ("both", "inverted") else 128  # of a thread
        assert ptx.count("div.rn.f32") <= values // 3, "a division for each scale, none for each value"
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    if name in ("sums", "product"):
        assert "fma.rn.f32" in ptx
    if name == "product":
        assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in ptx and "cp.async" in ptx
