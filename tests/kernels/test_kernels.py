"""Triton quantizers equal `trl_quant.formats` bit for bit, on a GPU or in the interpreter (see `interpreter`)."""

import re
from itertools import product

import pytest
import torch
from interpreter import INTERPRETED, in_types, on_devices, triton
from long_tests import rest_is_long
from made_up_experts import MadeUpMixture, experts_of_many_sizes
from reference_formats import DTYPES, KINDS, bits, make

from trl_quant import formats
from trl_quant.storage.layout import quantizers_on


kernels = pytest.importorskip("trl_quant.kernels.quantize")

SHAPES = {  # odd and even, one row, several programs, rows too long for one program
    "fp8": [(5, 96), (3, 50), (1, 1), (2, 32768 + 40)],
    "int8": [(5, 96), (3, 50), (1, 1), (2, 32768 + 40)],
    "fp8_tensor": [(5, 96), (3, 50), (1, 1), (3, 6000)],
    "fp8_block": [(130, 140), (1, 257), (128, 128), (2, 100, 40)],
    "nvfp4": [(5, 96), (3, 50), (1, 1), (3, 6000), (2, 3, 40)],
    "mxfp4": [(5, 96), (3, 50), (1, 1), (3, 6000), (2, 3, 40)],
}


def assert_equal(ours: formats.QuantizedTensor, theirs: formats.QuantizedTensor):
    assert (ours.format, ours.shape, ours.dtype) == (theirs.format, theirs.shape, theirs.dtype)
    for field in ("values", "scale", "global_scale"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype), field
            assert torch.equal(bits(a.cpu().flatten()), bits(b.flatten())), field


@on_devices
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_equals_formats(name, kind, device):
    shapes = SHAPES[name] if kind == "random" or not INTERPRETED else SHAPES[name][1:2]
    for dtype, shape in in_types(DTYPES, shapes) if kind == "random" else product(DTYPES, shapes):
        x = make(kind, dtype, shape, seed=sum(shape))
        assert_equal(kernels.quantize(x.to(device), name), formats.quantize(x, name))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_large_weights_equal_formats(name):
    """Real shapes, many programs; the torch code also gives the same bits on the GPU and on the CPU."""
    for dtype, shape in product(DTYPES, [(1024, 3584), (512, 18944), (1000, 5000), (64, 40000)]):
        for kind in ("random", "near ties", "wide", "underflow"):
            x = make(kind, dtype, shape)
            expected = formats.quantize(x, name)
            assert_equal(kernels.quantize(x.cuda(), name), expected)
            assert_equal(formats.quantize(x.cuda(), name), expected)
            assert torch.equal(formats.quantize(x.cuda(), name).dequantize().cpu(), expected.dequantize())


def test_the_reciprocal_is_exact_for_bfloat16():
    """The one shortcut: for all significands of x and s, `x * RN(1 / s)` rounds to the same bfloat16 as `x / s`."""
    significands = torch.arange(128, 256).float()
    x, s = significands[:, None], significands[None, :]
    assert torch.equal((x * (1 / s)).bfloat16(), (x / s).bfloat16())
    assert not torch.equal(x * (1 / s), x / s), "a shortcut indeed"
    assert not torch.equal((x.half() * (1 / s.half())), x.half() / s.half())


@on_devices
def test_views_and_parameters(device):
    x = make("random", torch.bfloat16, (64, 96)).to(device)
    for view in (x.t(), x[::2], x[:, 3:50], torch.nn.Parameter(x)):
        for name in kernels.KERNELS:
            assert_equal(kernels.quantize(view, name), formats.quantize(view.cpu(), name))


@on_devices
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_global_scale(device):
    for dtype, kind in product(DTYPES, ["random", "zero", "large", "small", "subnormal"]):
        tensors = [make(kind, dtype, (7, 50), seed=seed) for seed in range(3)]
        g = kernels.global_scale(*(t.to(device) for t in tensors))
        expected = formats.global_scale(*tensors)
        assert torch.equal(g.cpu(), expected)
        q = kernels.quantize(tensors[0].to(device), "nvfp4", global_scale=g)
        assert_equal(q, formats.quantize(tensors[0], "nvfp4", global_scale=expected))


@on_devices
@pytest.mark.parametrize("name", rest_is_long(kernels.KERNELS, "int8", "fp8", "mxfp4"))
def test_experts_are_quantized_one_by_one(name, device):
    """Each as the kernel quantizes it alone; as rows of one matrix, some formats would scale them together."""
    several_programs = experts_of_many_sizes(3, 20, 1000, dtype=torch.float32)
    for x in (*MadeUpMixture().mlp["experts"].parameters(), several_programs, several_programs[:, 3:18, 5:].half()):
        x = x.detach().to(device)
        together, alone = kernels.quantize(x, name), [kernels.quantize(expert, name) for expert in x]
        assert_equal(together, formats.quantize(x.cpu(), name))
        for field in ("values", "scale", "global_scale") if name == "nvfp4" else ("values", "scale"):
            expected = torch.stack([getattr(expert, field) for expert in alone])
            assert torch.equal(bits(getattr(together, field).flatten()), bits(expected.flatten())), field
        in_one = kernels.quantize(x.flatten(0, 1), name).dequantize().view_as(x)
        assert torch.equal(together.dequantize(), in_one) == (name in ("fp8", "int8", "mxfp4"))


@on_devices
def test_experts_share_a_global_scale_with_those_of_their_index(device):
    weights = [experts_of_many_sizes(3, rows, 600, seed=rows) for rows in (20, 40)]
    g = kernels.global_scale(*(weight.to(device) for weight in weights))
    assert torch.equal(g.cpu(), torch.stack([formats.global_scale(*pair) for pair in zip(*weights)]))
    for weight in weights:
        q = kernels.quantize(weight.to(device), "nvfp4", global_scale=g)
        assert_equal(q, formats.quantize(weight, "nvfp4", global_scale=g.cpu()))
    assert not torch.equal(q.scale.cpu().float(), formats.quantize(weight, "nvfp4").scale.float())
    with pytest.raises(ValueError, match=r"global_scale: shape \(3, 1\), but x of shape \(20, 600\) needs \(1,\)"):
        kernels.quantize(weights[0][0].to(device), "nvfp4", global_scale=g)
    with pytest.raises(ValueError, match=r"tensors: shapes \(3, 20, 600\), \(20, 600\)"):
        kernels.global_scale(weights[0].to(device), weights[0][0].to(device))


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_nan_in_one_expert_is_found(name, device):
    x = experts_of_many_sizes(3, 20, 40).to(device)
    x[1, 7, 11] = float("nan")
    found = [bool(kernels.shows_non_finite(scale, name)) for scale in kernels.quantize(x, name, check=False).scale]
    assert found == [False, True, False]


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", rest_is_long(kernels.KERNELS, "int8", "fp8", "nvfp4"))
def test_nan_and_infinity_are_refused(name, device):
    for dtype, bad in product(DTYPES, [float("nan"), float("inf"), -float("inf")]):
        x = make("random", dtype, (16, 40)).to(device)
        good = kernels.global_scale(x) if name == "nvfp4" else None
        x[7, 11] = bad
        with pytest.raises(ValueError, match="x: holds NaN or infinity"):
            kernels.quantize(x, name)
        with pytest.raises(ValueError, match="x: holds NaN or infinity"):
            kernels.quantize(x, name, global_scale=good)
        unchecked = kernels.quantize(x, name, global_scale=good, check=False)
        assert kernels.shows_non_finite(unchecked.scale, name)
        fine = kernels.quantize(make("random", dtype, (16, 40)).to(device), name)
        assert not kernels.shows_non_finite(fine.scale, name)


@on_devices
def test_a_checkpoint_is_quantized_on_a_gpu_in_formats_without_a_kernel_too(device):
    """As `trl-quant prepare --format int4` does there."""
    x = make("random", torch.bfloat16, (5, 256)).to(device)
    for name in ("int4", "int8"):
        assert_equal(quantizers_on("cuda")["quantizer"](x, name), formats.quantize(x.cpu(), name))


@on_devices
def test_wrong_arguments_are_refused(device):
    x = torch.ones(4, 4, device=device)
    with pytest.raises(ValueError, match="name: 'fp4' is not a format"):
        kernels.quantize(x, "fp4")
    with pytest.raises(ValueError, match=r"name: 'nf4' has no kernel; allowed: fp8, .*trl_quant\.formats\.quantize"):
        kernels.quantize(x, "nf4")
    with pytest.raises(ValueError, match=r"x: dtype torch\.float64"):
        kernels.quantize(x.double(), "fp8")
    with pytest.raises(ValueError, match="x: shape"):
        kernels.quantize(x[:0], "fp8")
    with pytest.raises(ValueError, match="2 dimensions"):
        kernels.quantize(x[0], "fp8_block")
    with pytest.raises(ValueError, match=r"global_scale: given for 'int8'"):
        kernels.quantize(x, "int8", global_scale=kernels.global_scale(x))


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
def test_a_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match=r"x: on cpu, but a kernel needs a CUDA device.*trl_quant\.formats\.quantize"):
        kernels.quantize(torch.ones(4, 4), "int8")


# kernel -> argument types, constants
COMPILED = {
    "_rows_kernel": ("x *fp8e4nv x i32 i32", {"INT8": False, "ROWS": 2, "COLS": 4096, "ONCE": True}),
    "_block_kernel": ("x *fp8e4nv x i32 i32", {}),
    "_tensor_kernel": ("x *fp8e4nv x *i32 i32", {"SIZE": 8192}),
    "_amax_kernel": ("x *i32 i32", {"SIZE": 16384}),
    "_fp4_kernel": ("x *u8 *u8 *fp32 i32 i32", {"NVFP4": True, "BLOCK": 16, "COUNT": 512}),
}


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_hopper(name):
    """Without a GPU: the code for sm_90 has only IEEE divisions, keeps subnormals, and reads 16 bytes at a time."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, (types, constants) = getattr(kernels, name), COMPILED[name]
    for x in ("*bf16", "*fp16", "*fp32"):
        given = [x if t == "x" else t for t in types.split()]
        signature = dict(zip(kernel.arg_names, given)) | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in range(len(given))},
        )
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
        assert not re.findall(r"\.ftz|\.approx|div\.full|\bfma\.", ptx)
        assert ("div.rn.f32" in ptx) == (name != "_amax_kernel")
        assert re.search(r"ld\.global\.v4\.b32", ptx)
