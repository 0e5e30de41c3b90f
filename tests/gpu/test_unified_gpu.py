"""
The products of the training flow on a GPU, against the twins in torch and against vLLM's own operators.

The kernels themselves: `python3 -m pytest -m gpu tests/kernels/test_unified_kernel.py`.

python3 -m pytest -m gpu -s tests/gpu/test_unified_gpu.py
"""

import pytest
import torch
import torch.nn.functional as F

from trl_quant.formats import QuantizedTensor, quantize, quantize_activation
from trl_quant.formats.fp8 import FP8Block
from trl_quant.layers import UnifiedLinear, products, quantizers
from trl_quant.layers.gated import silu_mul
from trl_quant.layers.joint import Joint
from trl_quant.precisions import unified_flows, with_products


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
    pytestmark.append(pytest.mark.skip(reason="FP8 needs compute capability 8.9"))
every_format = pytest.mark.parametrize("format", unified_flows())
# (tokens, outputs, inputs): filled up or not, scales in fours or not, shapes that no FP8 kernel takes
SHAPES = [
    (512, 1536, 1024),
    (300, 256, 384),
    (1, 128, 256),
    (17, 640, 1152),
    (70, 200, 304),
    (33, 96, 1000),
    (7, 33, 1001),
]
# dB. A BF16 result differs from the twin's in the last bit where the order of a sum decides; INT8's 127.5 for 127, the
# slightest of mistakes, would be 48
SAME = 55
FAST = 35  # where tensor cores add up with 14 bits


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """On the CPU: tokens of different sizes, one of them zero, and outlying features."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-1, 1, rows)[:, None]
    x[:, ::37] *= 8
    x[rows // 2] *= rows == 1
    return x.to(dtype)


def cuda(q: QuantizedTensor) -> QuantizedTensor:
    return q.to("cuda")


def sqnr(given: torch.Tensor, right: torch.Tensor) -> float:
    given, right = given.cpu().double(), right.cpu().double()
    return (20 * torch.log10(right.norm() / (given - right).norm())).item()


def differing(ours: QuantizedTensor, values: torch.Tensor, scale: torch.Tensor) -> int:
    """How many codes or scales differ; -0 equals 0."""
    codes = (ours.values.cpu().float() != values.cpu().float()).sum()
    return int(codes + (ours.scale.cpu().flatten() != scale.cpu().reshape(ours.scale.shape).flatten()).sum())


# Quantizers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 14336), (3, 128), (129, 40), (2, 40000)])
def test_inputs_equal_the_twins(shape, dtype):
    x = matrix(*shape, dtype)
    twins = {"fp8": quantizers.quantize_fp8(x), "int8": quantizers.quantize_int8(x, on_cuda=True)}
    twins["fp8_tensor"] = quantize_activation(x, "fp8_tensor")
    for format, twin in twins.items():
        assert differing(quantizers.quantize_input(x.cuda(), format), twin.values, twin.scale) == 0, format
    for amax in (quantizers.LEAST_GRADIENT, FP8Block.least_amax):
        twins = quantizers.quantize_groups_for_both(x, amax)
        for ours, twin in zip(quantizers.quantize_for_both(x.cuda(), amax), twins, strict=True):
            assert ours.shape == twin.shape and differing(ours, twin.values, twin.scale) == 0
    assert differing(quantizers.quantize_input(x.cuda(), "fp8_block"), twins[0].values, twins[0].scale) == 0


def test_every_pair_of_bf16_mantissas():
    """Each of 128 mantissas over each other, where the quotients are that lie between two codes."""
    mantissas = 1 + torch.arange(128) / 128
    x = (mantissas[None, :] * torch.tensor([2.0**-k for k in range(1, 9)])[:, None]).flatten()
    rows = torch.cat([mantissas[:, None], x.repeat(128, 1)], 1).bfloat16()
    for format, twin in (("fp8", quantizers.quantize_fp8(rows)), ("int8", quantizers.quantize_int8(rows, True))):
        assert differing(quantizers.quantize_input(rows.cuda(), format), twin.values, twin.scale) == 0
    groups = torch.cat(
        [mantissas[:, None, None].expand(128, 9, 1), x[: 9 * 113].view(1, 9, 113).expand(128, 9, 113)], 2
    )
    groups = torch.nn.functional.pad(groups, (0, 14)).flatten(1).bfloat16()
    twin = quantizers.quantize_groups(groups, FP8Block.least_amax)
    assert differing(quantizers.quantize_input(groups.cuda(), "fp8_block"), twin.values, twin.scale) == 0


def test_transposed_weight():
    for shape in ((1024, 3584), (130, 300)):
        w = quantize(matrix(*shape), "fp8_block")
        ours, twin = products.transposed(cuda(w)), products.transposed(w)
        assert ours.shape == twin.shape and differing(ours, twin.values, twin.scale) == 0


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_numbers(format):
    for dtype in (torch.bfloat16, torch.float32):
        q = quantize(matrix(300, 1000, dtype), format)
        for wanted in (torch.bfloat16, torch.float32):
            assert torch.equal(products.dequantize(cuda(q), wanted).cpu(), q.dequantize(wanted))


# Products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", with_products())
def test_product_equals_the_twin(format, dtype, monkeypatch):
    for tokens, outputs, inputs in SHAPES:
        x, w = matrix(tokens, inputs, dtype), quantize(matrix(outputs, inputs, dtype, 1) / 64, format)
        q = quantizers.quantize_input(x, format)
        for bias in (None, matrix(3, outputs, dtype, 2)[0]):
            right = products.product(q, w, bias, dtype)
            for fast in (False, True) if format in ("fp8", "fp8_tensor") else (False,):
                monkeypatch.setattr(products, "FAST_ACCUMULATION", fast)
                given = products.product(cuda(q), cuda(w), None if bias is None else bias.cuda(), dtype)
                assert given.dtype == dtype and given.shape == right.shape
                case = f"{format} {dtype} {(tokens, outputs, inputs)}, bias: {bias is not None}, fast: {fast}"
                print(f"{case}: {sqnr(given, right):.0f} dB, {(given.cpu() == right).float().mean():.1%} bit-equal")
                if format == "int8":
                    assert torch.equal(given.cpu(), right), case
                assert sqnr(given, right) > (FAST if fast else SAME), case


@every_format
def test_gradients_equal_the_twins(format):
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, outputs, inputs in SHAPES:
            w, x = quantize(matrix(outputs, inputs, dtype, 1) / 64, format), matrix(tokens, inputs, dtype)
            dy = matrix(tokens, outputs, dtype, 3) * 1e-6
            right, given = products.input_gradient(dy, w), products.input_gradient(dy.cuda(), cuda(w))
            case = f"{format} {dtype} {(tokens, outputs, inputs)}"
            print(f"{case}: dX {sqnr(given, right):.0f} dB")
            assert given.dtype == dtype and sqnr(given, right) > SAME, case
            if format == "fp8_block":
                _, x_t = quantizers.quantize_for_both(x)
                right = products.input_and_weight_gradient(dy, w, x_t, dtype)
                _, x_t = quantizers.quantize_for_both(x.cuda())
                given = products.input_and_weight_gradient(dy.cuda(), cuda(w), x_t, dtype)
                print(f"{case}: dX {sqnr(given[0], right[0]):.0f} dB, dW {sqnr(given[1], right[1]):.0f} dB")
                for ours, theirs in zip(given, right, strict=True):
                    assert ours.dtype == dtype and sqnr(ours, theirs) > SAME, case


@every_format
def test_large_products_are_near_bf16(format):
    """And in low precision: not the BF16 product by another name."""
    x, w = torch.randn(4096, 4096).bfloat16().cuda(), torch.randn(6144, 4096).bfloat16().cuda() / 64
    dy = torch.randn(4096, 6144).bfloat16().cuda()
    q = quantize(w, format)
    results = {"Y": (products.product(quantizers.quantize_input(x, format), q, None, x.dtype), x @ w.t())}
    results["dX"] = (products.input_gradient(dy, q), dy @ w)
    if format == "fp8_block":
        _, x_t = quantizers.quantize_for_both(x)
        results["dW"] = (products.input_and_weight_gradient(dy, q, x_t)[1], dy.t() @ x)
    for name, (given, right) in results.items():
        print(f"{format} {name}: {sqnr(given, right):.1f} dB")
        assert 25 < sqnr(given, right) < 50


# vLLM


def test_inputs_equal_vllm():
    """Of this version: 0.26 divides by the scales of groups, 0.33 multiplies by their inverses."""
    ops = pytest.importorskip("vllm._custom_ops")
    fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    support = pytest.importorskip("trl_quant.rollout.vllm.support")
    support.compute_as_vllm("fp8_block", torch.device("cuda"))
    for shape in ((1024, 4096), (257, 14336)):
        x = matrix(*shape).cuda()
        wide = fp8_utils.per_token_group_quant_fp8(x.float(), 128, use_ue8m0=False)
        assert differing(quantizers.quantize_input(x.float(), "fp8_block"), *wide) == 0
        theirs = {
            "int8": ops.scaled_int8_quant(x)[:2],
            "fp8": ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
            "fp8_block": fp8_utils.per_token_group_quant_fp8(x, 128, use_ue8m0=False),
        }
        counts = {name: differing(quantizers.quantize_input(x, name), *given) for name, given in theirs.items()}
        print(f"{shape}: codes and scales that differ from vLLM's: {counts}")
        assert not any(counts.values())
        other = quantizers.quantize_groups(x, FP8Block.least_amax, not quantizers.inverts())
        assert differing(other, *theirs["fp8_block"]) > 100


def test_the_activation_equals_torchs_and_vllms():
    """Of all finite BF16 gates."""
    pytest.importorskip("vllm._custom_ops")
    gate = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()].view(-1, 255 * 16).cuda()
    up = matrix(*gate.shape).cuda()
    theirs = torch.empty_like(gate)
    namespace = "_C"  # vLLM's operators
    getattr(torch.ops, namespace).silu_and_mul(theirs, torch.cat([gate, up], -1))
    for precision in unified_flows():
        y = silu_mul(gate, up, precision, True)
        assert torch.equal(y.isnan(), theirs.isnan())  # infinity times 0
        assert torch.equal(y.nan_to_num(), (F.silu(gate) * up).nan_to_num())
        print(f"{precision}: {(y.nan_to_num() == theirs.nan_to_num()).float().mean():.2%} bit-equal to vLLM's")
        assert torch.equal(y.nan_to_num(), theirs.nan_to_num())
    wide = matrix(512, 1024, torch.float32).cuda()
    assert sqnr(silu_mul(wide, wide.flip(0), "fp8", True), F.silu(wide) * wide.flip(0)) > 130  # FP32's last bits


@pytest.mark.parametrize("joined", [False, True])
def test_a_hand_over_changes_nothing(joined):
    """
    A whole MLP, forward and backward, against the same layers with torch's activation between them. Gate and up compute
    alone or together.
    """
    for precision in unified_flows():
        layers = []
        for shape in ((512, 1408), (512, 1408), (1408, 512)):
            linear = torch.nn.Linear(*shape, bias=False, device="cuda", dtype=torch.bfloat16)
            layers.append(UnifiedLinear.from_linear(linear, precision))
        gate, up, down = layers
        gate.joint = up.joint = Joint([gate, up]) if joined else None
        x, results = matrix(300, 512).cuda().requires_grad_(), []
        for ours in (True, False):
            g, u = gate(x), up(x)
            y = down(silu_mul(g, u, precision, True) if ours else F.silu(g) * u)
            results.append([y, *torch.autograd.grad(y, [x, *(layer.weight for layer in layers)], x.detach())])
        assert torch.equal(results[0][0], results[1][0])
        for ours, theirs in zip(results[0][1:], results[1][1:], strict=True):
            print(f"{precision}: gradients {sqnr(ours, theirs):.0f} dB from torch's")
            assert sqnr(ours, theirs) > FAST  # rounding in FP8 doubles what is left of another last bit


def test_layers_of_one_input_equal_each_alone():
    """Outputs and gradients of q, k and v as one product, by cuBLAS's kernels for other shapes."""
    for precision in unified_flows():
        layers, found = [], []
        for outputs, bias in ((1024, True), (256, False), (256, True)):
            linear = torch.nn.Linear(1024, outputs, bias=bias, device="cuda", dtype=torch.bfloat16)
            layers.append(UnifiedLinear.from_linear(linear, precision))
        for joint in (Joint(layers), None):
            for layer in layers:
                layer.joint = joint
            x = matrix(300, 1024).cuda().requires_grad_()
            outputs = [layer(x) for layer in layers]
            dys = [matrix(300, layer.out_features, seed=3).cuda() for layer in layers]
            found.append([*outputs, *torch.autograd.grad(outputs, [x, *(layer.weight for layer in layers)], dys)])
        for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
            print(f"{precision}, {i}: {sqnr(ours, theirs):.0f} dB, {(ours == theirs).float().mean():.1%} bit-equal")
            assert sqnr(ours, theirs) > (25 if i == 3 and precision == "fp8" else FAST)  # dX in FP8: one scale for all


@pytest.mark.parametrize("engines", [True, False])
def test_products_equal_vllm(engines, monkeypatch, request):
    """
    INT8 bit for bit, by vLLM's product and by ours. FP8 of one scale a token is added up in another order, by another
    kernel.
    """
    ops, used = pytest.importorskip("vllm._custom_ops"), []
    support, followed = pytest.importorskip("trl_quant.rollout.vllm.support"), []
    monkeypatch.setattr(support, "follow_int8", followed.append)
    support.compute_as_vllm("int8", torch.device("cuda"))
    (multiply,) = followed
    products.follow_int8((lambda *args: used.append(1) or multiply(*args)) if engines else None)
    request.addfinalizer(lambda: products.follow_int8(None))
    for tokens, outputs, inputs in ((1024, 4096, 4096), (48, 6144, 4096), (1, 4096, 14336)):
        x = matrix(tokens, inputs).cuda()
        for format in ("int8", "fp8"):
            w = cuda(quantize(matrix(outputs, inputs, seed=1) / 64, format))
            q = quantizers.quantize_input(x, format)
            for bias in (None, matrix(3, outputs, seed=2)[0].cuda()):
                scales = q.scale, w.scale.float()
                theirs = ops.cutlass_scaled_mm(q.values, w.values.t(), *scales, torch.bfloat16, bias)
                ours = products.product(q, w, bias, torch.bfloat16)
                same = (ours == theirs).float().mean().item()
                print(f"{format} {(tokens, outputs, inputs)}, bias: {bias is not None}: {sqnr(ours, theirs):.0f} dB, "
                      f"{same:.1%} bit-equal to vLLM's")  # fmt: skip
                assert same == 1 if format == "int8" else sqnr(ours, theirs) > FAST
    assert len(used) == (6 if engines else 0)


def test_groups_equal_deep_gemm():
    """The engine's product where it has DeepGEMM, given the same codes and scales."""
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm")
    if not deep_gemm.is_deep_gemm_supported():
        pytest.skip("no DeepGEMM")
    print(f"vLLM rounds scales to powers of two: {deep_gemm.is_deep_gemm_e8m0_used()}")
    for tokens, outputs, inputs in ((1024, 4096, 4096), (16, 6144, 4096)):
        q = quantizers.quantize_input(matrix(tokens, inputs).cuda(), "fp8_block")
        w = cuda(quantize(matrix(outputs, inputs, torch.float32, seed=1) / 64, "fp8_block"))
        theirs = torch.empty(tokens, outputs, dtype=torch.bfloat16, device="cuda")
        operands = (q.values, q.scale), (w.values, w.scale)
        deep_gemm.fp8_gemm_nt(*operands, theirs, is_deep_gemm_e8m0_used=False)
        ours = products.product(q, w, None, torch.bfloat16)
        same = (ours == theirs).float().mean().item()
        print(f"{(tokens, outputs, inputs)}: {sqnr(ours, theirs):.0f} dB, {same:.1%} bit-equal to DeepGEMM's")
        assert sqnr(ours, theirs) > SAME
