"""A base frozen in four bits on a GPU: what its kernels compute, against the numbers of the format and PEFT's layer.

The kernels themselves: `python3 -m pytest -m gpu tests/kernels/test_dequantize_kernel.py`.

python3 -m pytest -m gpu -s tests/gpu/test_frozen_gpu.py
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from frozen_layers import frozen_lora_linear
from torch import nn

from trl_quant.layers import FrozenLinear, weight_only
from trl_quant.precisions import four_bits


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHAPES = [(1024, 3584), (3584, 1024), (1000, 1536), (130, 320)]  # (out, in)
TOKENS = [0, 1, 16, 257, 1024]  # on both sides of `FUSED_TOKENS`
every_precision = pytest.mark.parametrize("precision", four_bits())


def layer_of(precision: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> FrozenLinear:
    torch.manual_seed(0)
    plain = nn.Linear(shape[1], shape[0], device="cuda").to(dtype)
    return FrozenLinear.from_linear(plain, precision)


def gradients(function, x, *parameters):
    x = x.detach().clone().requires_grad_()
    y = function(x)
    dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, *parameters), dy)]


def error(given: torch.Tensor, exact: torch.Tensor) -> float:
    return ((given.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


@every_precision
def test_numbers_equal_the_cpu(precision):
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            layer = layer_of(precision, shape, dtype)
            on_cpu = copy.deepcopy(layer).cpu()
            assert torch.equal(layer.dequantize().cpu(), on_cpu.dequantize())
            assert torch.equal(layer.dequantize(torch.float32).cpu(), on_cpu.dequantize(torch.float32))


@pytest.fixture
def sums_in_float32():
    """Forbids cuBLAS to add up the parts of a split sum in 16 bits, which it does for some shapes alone."""
    settings = torch.backends.cuda.matmul  # pytest's monkeypatch cannot restore attributes that are computed
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(settings, name) for name in names}
    for name in names:
        setattr(settings, name, False)
    yield
    for name, value in before.items():
        setattr(settings, name, value)


@every_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("sums_in_float32")
def test_products(precision, dtype, monkeypatch):
    """As near to the exact product as `F.linear` on the numbers, whichever way they are multiplied."""
    for shape in SHAPES:
        layer = layer_of(precision, shape, dtype)
        exact = layer.dequantize().double()
        for tokens in TOKENS:
            x = torch.randn(tokens, shape[1], device="cuda").to(dtype)
            theirs = gradients(partial(F.linear, weight=layer.dequantize(), bias=layer.bias), x)
            right = gradients(partial(F.linear, weight=exact, bias=layer.bias.double()), x.double())
            for fused, buffer in ((0, 128 << 20), (0, 1), (1 << 20, 128 << 20)):
                monkeypatch.setattr(weight_only, "FUSED_TOKENS", fused)
                monkeypatch.setattr(weight_only, "FUSED_OUTPUTS", 1)
                monkeypatch.setattr(weight_only, "BUFFER_BYTES", buffer)
                for name, given, reference, best in zip(["y", "dx"], gradients(layer, x), theirs, right, strict=True):
                    assert given.dtype == reference.dtype and given.shape == reference.shape
                    case = f"{name} of {tokens} tokens with {shape}, fused up to {fused}, buffer of {buffer} bytes"
                    assert error(given, best) <= 1.1 * error(reference, best) + 1e-5, case
            if tokens:
                assert error(theirs[0], F.linear(x, exact.roll(1, 1).to(dtype), layer.bias)) > 0.1


def test_float32_takes_cublas():
    layer = layer_of("nvfp4", SHAPES[0])
    x = torch.randn(5, SHAPES[0][1], device="cuda")
    assert error(layer(x), F.linear(x.double(), layer.dequantize().double(), layer.bias.double())) < 1e-5


def test_the_numbers_are_not_kept():
    """Peak memory of a forward and a backward pass: the buffer and the activations, never the whole weight."""
    layer = layer_of("nvfp4", (16384, 8192))
    x = torch.randn(512, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = layer(x)
    assert torch.cuda.memory_allocated() - start <= y.nbytes + (1 << 20)
    y.sum().backward()
    activations = 4 * y.nbytes + 4 * x.nbytes
    whole = 16384 * 8192 * 2
    assert torch.cuda.max_memory_allocated() - start < weight_only.BUFFER_BYTES + activations < whole


@every_precision
@pytest.mark.parametrize("autocast", [False, True])
def test_lora_equals_peft(precision, autocast):
    """FP32 adapters on a BF16 base, no farther from the exact gradients than PEFT's layer under autocast."""
    peft = pytest.importorskip("peft")
    from trl_quant.policy.adapters import with_frozen_layers

    config = with_frozen_layers(peft.LoraConfig(r=32, target_modules=["0"], init_lora_weights=False))
    model = peft.get_peft_model(nn.Sequential(layer_of(precision, SHAPES[0])), config)
    layer = model.base_model.model[0]
    assert {p.device.type for p in layer.parameters()} == {"cuda"}
    exact = copy.deepcopy(layer).double()
    for tokens in (16, 1024):
        x = torch.randn(2, tokens, SHAPES[0][1], device="cuda", dtype=torch.bfloat16)

        def run(forward, layer, x, autocast=autocast):
            parameters = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)

            def function(x):
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                    return forward(layer, x)

            return gradients(function, x, *parameters)

        by_peft = peft.tuners.lora.Linear.forward
        ours, theirs = run(type(layer).forward, layer, x), run(by_peft, layer, x, autocast=True)
        right = run(by_peft, exact, x.double(), autocast=False)
        for given, reference, best in zip(ours, theirs, right, strict=True):
            assert given.dtype == reference.dtype
            assert 0 < error(given, best) < 1.1 * error(reference, best) < 0.02


def test_torch_compile():
    layer = layer_of("nvfp4", SHAPES[0])
    a = torch.randn(16, SHAPES[0][1], device="cuda", requires_grad=True)
    b = torch.randn(SHAPES[0][0], 16, device="cuda", requires_grad=True)

    def function(x):
        return frozen_lora_linear(layer(x)[..., :1] + x, layer, a, b, 0.5)

    for tokens in (16, 1024):
        x = torch.randn(tokens, SHAPES[0][1], device="cuda", dtype=torch.bfloat16)
        torch.compiler.reset()
        compiled = gradients(torch.compile(function, fullgraph=True), x, a, b)
        for ours, eager in zip(compiled, gradients(function, x, a, b), strict=True):
            assert error(ours, eager) < 0.02
