"""
Number formats: bit-exact with compressed-tensors and bitsandbytes, with slow loops where those reject an input,
and with the properties that users rely on.
"""

from itertools import pairwise, product

import pytest
import reference_formats as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_formats import DTYPES, KINDS, bits, make
from torch import Tensor

from trl_quant.formats import (
    FORMATS,
    QuantizedTensor,
    fake_quantize_activation,
    global_scale,
    quantize,
    quantize_activation,
)
from trl_quant.formats.nf4 import NF4_GRID


PRESETS = {  # name -> compressed-tensors' preset scheme and the compressor of its checkpoint layout
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "fp8_tensor": ("FP8", "float-quantized"),
    "fp8_block": ("FP8_BLOCK", "float-quantized"),
    "int8": ("INT8", "int-quantized"),
    "nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
    "mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"),
    "int4": ("W4A16", "pack-quantized"),
}
ACTIVATIONS = [name for name, fmt in FORMATS.items() if fmt.activations]
WEIGHT_ONLY = [name for name, fmt in FORMATS.items() if not fmt.activations]


def scheme_of(name: str):
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    return preset_name_to_scheme(PRESETS[name][0], ["Linear"])


def compressed_tensors_weight(x: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores for a weight, and its dequantized values."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
    from compressed_tensors.quantization.utils import (
        calculate_qparams,
        generate_gparam,
        maybe_pad_tensor_for_block_quant,
    )

    scheme, rows = scheme_of(name), x.shape[0]
    args = scheme.weights
    if args.strategy == "tensor":
        parts = x.reshape(1, -1)
    elif args.strategy == "channel":
        parts = x.unsqueeze(1)
    elif args.strategy == "block":
        padded = maybe_pad_tensor_for_block_quant(x, args.block_structure)
        parts = padded.unfold(0, 128, 128).unfold(1, 128, 128).flatten(-2)
    else:
        parts = x.view(rows, -1, args.group_size)
    g = None
    if name == "nvfp4":
        g = generate_gparam(x.min().reshape(1), x.max().reshape(1))
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=g)
    state = {"weight": x, "weight_scale": scale, "weight_zero_point": zero}
    if g is not None:
        state["weight_global_scale"] = g
    numbers = dequantize(
        ct_quantize(x, scale, zero, args, global_scale=g), scale, zero, args, dtype=x.dtype, global_scale=g
    )
    return BaseCompressor.get_value_from_registry(PRESETS[name][1]).compress(state, scheme), numbers


def stored(q: QuantizedTensor) -> dict[str, Tensor]:
    """Our codes under compressed-tensors' names."""
    if q.format in ("fp8", "fp8_tensor", "fp8_block", "int8"):
        return {"weight": q.values, "weight_scale": q.scale}
    if q.format == "int4":
        return {
            "weight_packed": q.values.view(torch.int32),
            "weight_scale": q.scale,
            "weight_shape": torch.tensor(q.shape),
        }
    out = {"weight_packed": q.values, "weight_scale": q.scale}
    return out if q.global_scale is None else {**out, "weight_global_scale": q.global_scale}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PRESETS)
def test_weights_equal_compressed_tensors(name: str, kind: str):
    for dtype in DTYPES:
        x = make(kind, dtype, (200, 360) if name == "fp8_block" else (48, 384))
        assert_equals_compressed_tensors(x, name)


def assert_equals_compressed_tensors(x: Tensor, name: str):
    theirs, numbers = compressed_tensors_weight(x, name)
    q = quantize(x, name)
    ours = stored(q)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert ours[key].dtype == theirs[key].dtype, key
        assert ours[key].shape == theirs[key].shape, key
        assert torch.equal(bits(ours[key]), bits(theirs[key])), key
    assert q.dequantize().dtype == x.dtype
    assert torch.equal(q.dequantize(), numbers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_compressed_tensors(name: str, kind: str):
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    for dtype in DTYPES:
        # its per-token strategy treats a 2-dimensional input as one token, so the input has 3 dimensions
        x = make(kind, dtype, (24, 256)).view(4, 6, 256)
        args = scheme_of(name).input_activations.model_copy(update={"dynamic": True})
        scale, zero = compute_dynamic_scales_and_zp(x, args, module=None)
        q = quantize_activation(x, name)
        assert torch.equal(bits(q.scale), bits(scale))
        expected = fake_quantize(x, scale, zero, args)
        assert torch.equal(q.dequantize(), expected)
        assert torch.equal(fake_quantize_activation(x, name), expected)
        assert torch.equal(fake_quantize_activation(x, name, check=False), expected)


@pytest.mark.parametrize("shape", [(64, 64), (3, 21), (1, 200), (7, 1), (1, 1), (2, 3, 32)], ids=str)
@pytest.mark.parametrize("kind", ["random", "subnormal", "zero", "outlier", "wide", "negative zero"])
def test_nf4_equals_bitsandbytes(kind: str, shape: tuple[int, ...]):
    for dtype in DTYPES:
        assert_equals_bitsandbytes(make(kind, dtype, shape))


@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles for every shape
def assert_equals_bitsandbytes(x: Tensor):
    functional = pytest.importorskip("bitsandbytes.functional")
    # In one row and in float32: its AVX512 kernel is wrong for rows shorter than a block, and flushes BF16 subnormals
    packed, state = functional.quantize_4bit(x.flatten(), quant_type="nf4", blocksize=64)
    state.dtype = torch.float32
    q = quantize(x, "nf4")
    assert torch.equal(bits(q.scale), bits(state.absmax))
    assert torch.equal(q.values, packed.view(-1))
    assert torch.equal(q.dequantize(), functional.dequantize_4bit(packed, state).view(x.shape).to(x.dtype))
    assert torch.equal(q.dequantize(torch.float32), slow_dequantize_nf4(packed, state.absmax, x))


def test_nf4_divides_like_bitsandbytes():
    """A full block is multiplied by the reciprocal, a short one is divided; the difference shows near midpoints."""
    middles = [(a + b) / 2 for a, b in pairwise(NF4_GRID)] * 4
    scales = 1 + torch.rand(400, 1, generator=torch.Generator().manual_seed(0))
    ulps = torch.arange(len(middles)).remainder(5).sub(2) * 2.0**-24
    blocks = torch.cat((scales, scales * torch.tensor(middles) * (1 + ulps), scales.expand(-1, 3)), dim=1)
    assert blocks.shape[1] == 64
    assert_equals_bitsandbytes(blocks)
    for short in blocks[:50, :40]:
        assert_equals_bitsandbytes(short)


def slow_dequantize_nf4(packed: Tensor, absmax: Tensor, x: Tensor) -> Tensor:
    codes = [nibble for byte in packed.view(-1).tolist() for nibble in (byte >> 4, byte & 15)][: x.numel()]
    numbers = [slow.to(NF4_GRID[c] * absmax[i // 64].item(), torch.float32) for i, c in enumerate(codes)]
    return torch.tensor(numbers).view(x.shape)


def test_nf4_grid_is_the_papers():
    assert slow.nf4_grid() == pytest.approx(NF4_GRID, abs=2e-7)
    # and each code is the nearest grid point
    x = torch.linspace(-1, 1, 64)
    codes = torch.stack((quantize(x, "nf4").values >> 4, quantize(x, "nf4").values & 15), -1).view(-1)
    distance = (x[:, None] - torch.tensor(NF4_GRID)).abs()
    assert torch.equal(codes, distance.argmin(-1).to(torch.uint8))


def codes_of(q: QuantizedTensor) -> list[list[int]]:
    """Codes, numbered as in the slow reference, without padding."""
    if q.format == "nf4":
        return [torch.stack((q.values >> 4, q.values & 15), -1).view(-1)[: q.shape.numel()].tolist()]
    if q.values.dtype == torch.uint8:
        codes = FORMATS[q.format].codes(q.values)[..., : q.shape[-1]]
        lowest = slow.INTEGERS.get(q.format, (0, 0))[0]  # integers are stored as their distance from the lowest
        return (codes.to(torch.int8) + lowest).tolist()
    if q.values.dtype == torch.float8_e4m3fn:
        return q.values.view(torch.uint8).tolist()
    return q.values[..., : q.shape[-1]].tolist()


ODD_SHAPES = [(3, 5), (1, 1), (2, 130), (130, 2), (3, 33), (1, 257)]


@pytest.mark.parametrize("kind", ["random", "subnormal", "border", "zero", "outlier", "near ties", "large"])
@pytest.mark.parametrize("name", FORMATS)
def test_odd_shapes_equal_slow_loops(name: str, kind: str):
    """Partial groups, which compressed-tensors rejects, and everything else once more."""
    for dtype, shape in product(DTYPES, ODD_SHAPES):
        x = make(kind, dtype, shape, seed=sum(shape))
        for activation in (False, True) if FORMATS[name].activations else (False,):
            q = quantize_activation(x, name) if activation else quantize(x, name)
            if name == "nf4":
                codes, scales, values, g = slow.slow_nf4(x, list(NF4_GRID))
                codes = [codes]
            else:
                codes, scales, values, g = slow.slow_quantize(x, name, activation)
            scale = 2.0 ** (q.scale.double() - 127) if name == "mxfp4" else q.scale
            assert scale.double().flatten().tolist() == scales, shape
            assert codes_of(q) == codes, shape
            assert torch.equal(q.dequantize(), torch.tensor(values).view(shape).to(dtype)), shape
            assert g is None or q.global_scale.item() == g


def test_slow_loops_agree_with_compressed_tensors():
    """The reference itself, on shapes that compressed-tensors accepts: two independent readings of one definition."""
    for name in PRESETS:
        for dtype in DTYPES:
            for kind in ("random", "ties", "subnormal", "outlier"):
                x = make(kind, dtype, (3, 128), seed=3)
                _, numbers = compressed_tensors_weight(x, name)
                values = slow.slow_quantize(x, name)[2]
                assert torch.equal(torch.tensor(values).to(dtype), numbers), (name, dtype, kind)


def test_both_roundings_are_kept():
    """In bfloat16 the quotient is rounded before the code: a shortcut through float32 gives different codes."""
    x = make("random", torch.bfloat16)
    q = quantize(x, "int8")
    shortcut = (x.float() / q.scale.float()).clamp(-128, 127).round().to(torch.int8)
    differ = (q.values != shortcut).float().mean().item()
    assert 0.001 < differ < 0.1
    assert (q.values.int() - shortcut.int()).abs().max() == 1


@pytest.mark.parametrize("name", FORMATS)
def test_storage_is_small(name: str):
    x = make("random", torch.bfloat16, (512, 1024))
    q = quantize(x, name)
    assert q.nbytes * 8 / x.numel() == pytest.approx(FORMATS[name].bits, rel=0.01)
    assert q.nbytes == sum(t.untyped_storage().nbytes() for t in (q.values, q.scale, q.global_scale) if t is not None)


def test_global_scale_is_shared():
    q, k = make("random", torch.bfloat16, (64, 64)), 3 * make("random", torch.bfloat16, (32, 64), seed=1)
    g = global_scale(q, k)
    assert torch.equal(g, global_scale(torch.cat((q, k))))
    assert not torch.equal(g, global_scale(q))
    fused = quantize(torch.cat((q, k)), "nvfp4")
    parts = [quantize(w, "nvfp4", global_scale=g) for w in (q, k)]
    assert torch.equal(fused.values, torch.cat([p.values for p in parts]))
    assert torch.equal(bits(fused.scale), torch.cat([bits(p.scale) for p in parts]))
    with pytest.raises(ValueError, match=r"global_scale.*'int8'.*only 'nvfp4'"):
        quantize(q, "int8", global_scale=g)


def test_activation_scales_have_the_right_scope():
    """Tokens do not affect each other, except in fp8_tensor; nor do 1 x 128 groups."""
    x = make("random", torch.bfloat16, (2, 4, 256))
    loud = x.clone()
    loud[0, 0, 0] = 1000
    for name in ACTIVATIONS:
        quiet_q, loud_q = fake_quantize_activation(x, name), fake_quantize_activation(loud, name)
        assert torch.equal(quiet_q[1], loud_q[1]) == (name != "fp8_tensor")
        assert torch.equal(quiet_q[0, 0, 128:], loud_q[0, 0, 128:]) == (name == "fp8_block")
    for name in WEIGHT_ONLY:
        assert quantize_activation(x, name) is None
        assert fake_quantize_activation(x, name) is x


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_are_refused(name: str):
    for dtype, bad in product(DTYPES, [float("nan"), float("inf"), -float("inf")]):
        x = make("random", dtype, (16, 40))
        x[7, 11] = bad
        with pytest.raises(ValueError, match="x: holds NaN or infinity"):
            quantize(x, name)
        with pytest.raises(ValueError, match="x: holds NaN or infinity"):
            quantize_activation(x, name)


def test_wrong_arguments_are_refused():
    x = torch.ones(4, 4)
    with pytest.raises(ValueError, match="name: 'fp4'.*" + ", ".join(FORMATS)):
        quantize(x, "fp4")
    with pytest.raises(ValueError, match=r"x: dtype torch.float64.*torch.bfloat16"):
        quantize(x.double(), "fp8")
    with pytest.raises(ValueError, match=r"x: dtype torch.int64"):
        quantize_activation(x.long(), "fp8")
    for empty in (torch.ones(4, 0), torch.ones(0, 4), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="x: shape"):
            quantize(empty, "int8")
    with pytest.raises(ValueError, match="2 dimensions"):
        quantize(x[0], "fp8_block")


def test_parameters_do_not_enter_the_graph():
    weight = torch.nn.Parameter(torch.randn(32, 32))
    for name in FORMATS:
        q = quantize(weight, name)
        assert not q.scale.requires_grad
        assert not q.dequantize().requires_grad
        assert not fake_quantize_activation(weight, name).requires_grad or name in WEIGHT_ONLY


# Properties


@st.composite
def tensors(draw):
    """Matrices of any magnitude and shape, with zeros, in every dtype; far enough from the ends of the range."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 150)))
    x = make("wide" if draw(st.booleans()) else "random", torch.float32, shape, seed=draw(st.integers(0, 10**6)))
    x *= 2.0 ** draw(st.integers(-3, 3) if dtype == torch.float16 else st.integers(-30, 30))
    if draw(st.booleans()):
        x[draw(st.integers(0, shape[0] - 1))] = 0
    return x.to(dtype)


@settings(max_examples=100, deadline=None)
@given(x=tensors(), name=st.sampled_from(list(FORMATS)))
def test_error_is_bounded(x: Tensor, name: str):
    if x.dtype == torch.float16:
        x = x.float()  # float16 has no room for the scales of small numbers
    block = x[:1, :16]  # one scale in every format
    error = (quantize(block, name).dequantize(torch.float32) - block.float()).abs()
    rounding = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}[x.dtype]  # of scale and x / scale
    if name == "nvfp4":
        rounding += 2.0**-4  # of the E4M3 scale
    assert error.amax() <= block.float().abs().amax() * (slow.ERROR[name] + rounding)


@settings(max_examples=60, deadline=None)
@given(x=tensors(), name=st.sampled_from(list(FORMATS)))
def test_zeros_stay_zeros(x: Tensor, name: str):
    x[x.abs() < x.abs().mean()] = 0
    assert quantize(x, name).dequantize()[x == 0].count_nonzero() == 0
    if FORMATS[name].activations:
        assert fake_quantize_activation(x, name)[x == 0].count_nonzero() == 0


@settings(max_examples=60, deadline=None)
@given(x=tensors(), name=st.sampled_from(list(FORMATS)))
def test_order_is_kept(x: Tensor, name: str):
    """Under one scale a larger number never gets a smaller value."""
    row = x[:1, :16].sort(-1).values
    assert (quantize(row, name).dequantize().diff(dim=-1) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(x=tensors(), power=st.integers(-3, 3), name=st.sampled_from(list(FORMATS)))
def test_powers_of_two_only_move_the_scale(x: Tensor, power: int, name: str):
    """q(2^k x) = 2^k q(x), bit for bit, as long as no scale is subnormal or saturated."""
    if x.dtype == torch.float16:
        x = x.float()  # in float16's short range many scales and products here are subnormal
    moved = quantize(x * 2.0**power, name)
    assert torch.equal(moved.dequantize(), quantize(x, name).dequantize() * 2.0**power)
    assert torch.equal(bits(moved.values), bits(quantize(x, name).values))


@settings(max_examples=100, deadline=None)
@given(x=tensors(), name=st.sampled_from(["fp8", "fp8_tensor", "fp8_block", "mxfp4", "nf4"]))
def test_quantized_numbers_are_fixed_points(x: Tensor, name: str):
    """Quantizing again changes nothing: the block's largest value is on the grid and leads to the same scale."""
    once = quantize(x.float(), name).dequantize()
    assert torch.equal(quantize(once, name).dequantize(), once)


def test_compressed_tensors_loses_the_largest_numbers_in_mxfp4():
    """We differ on purpose: from 7/4 of the dtype's last power of two, compressed-tensors' scale is infinite."""
    for dtype in DTYPES:
        x = torch.full((1, 32), torch.finfo(dtype).max, dtype=dtype)
        with pytest.raises(AssertionError):
            assert_equals_compressed_tensors(x, "mxfp4")
        assert quantize(x, "mxfp4").dequantize().double() / x.double() == pytest.approx(0.75, rel=0.01)


@pytest.mark.parametrize("name", slow.INTEGERS)
def test_integers_shrink_when_quantized_again(name: str):
    """No fixed points: the divisor is not on the grid, so a positive maximum shrinks by `top / divisor` each time."""
    top = slow.INTEGERS[name][1]
    divisor = top + 0.5
    x = torch.linspace(-0.9, 1, 100)[None]
    once = quantize(x, name)
    twice = quantize(once.dequantize(), name)
    assert once.dequantize().amax().item() == pytest.approx(top / divisor)
    assert twice.scale.item() == pytest.approx(once.scale.item() * top / divisor)
