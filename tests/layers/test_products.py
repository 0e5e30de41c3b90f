"""
The products of the training flow against slow references: loops over groups in float64, and what vLLM computes on a
CPU. Each also differs from what is nearly it.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from reference_formats import EPS, to

from trl_quant.formats import QuantizedTensor, quantize, quantize_activation
from trl_quant.layers import products, quantizers
from trl_quant.precisions import unified_flows


DTYPES = [torch.bfloat16, torch.float32]
T, N, K = 70, 200, 300  # nothing is a multiple of 128
every_format = pytest.mark.parametrize("format", unified_flows())
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def matrix(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Tokens of different sizes, one of them zero, and outlying features."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.logspace(-1, 1, rows)[:, None]
    x[:, ::37] *= 8
    x[rows // 2] = 0
    return x.to(dtype)


def tensors(format: str, dtype: torch.dtype) -> tuple:
    """x, its quantized form, a weight's, a bias."""
    x, w = matrix(T, K, dtype), matrix(N, K, dtype, 1)
    return x, quantizers.quantize_input(x, format), quantize(w, format), matrix(3, N, dtype, 2)[0]


def sqnr(given: torch.Tensor, right: torch.Tensor) -> float:
    right = right.double()
    return (20 * torch.log10(right.norm() / (given.double() - right).norm())).item()


def numbers(q: QuantizedTensor) -> torch.Tensor:
    """What codes and scales stand for, one by one, in float64."""
    rows, cols = q.shape
    codes, scale, result = q.values.double(), q.scale.double(), torch.empty(rows, cols, dtype=torch.float64)
    down, across = -(-rows // scale.shape[0]), cols
    if q.format == "fp8_block":
        down, across = (1 if scale.shape[0] == rows else 128), 128
    for row in range(rows):
        for first in range(0, cols, across):
            group = slice(first, first + across)
            result[row, group] = codes[row, group] * scale[row // down, first // across]
    return result


def slow_quantize(row: list[float], format: str) -> tuple[list[float], float]:
    """Codes and the scale of one group of values, by Python's numbers, each step rounded to FP32."""
    amax = max(map(abs, row))
    if format == "int8":
        scale = to(amax / 127, torch.float32)
        inverse = 0.0 if amax == 0 else to(1 / scale, torch.float32)
        return [float(min(max(round(to(v * inverse, torch.float32)), -128), 127)) for v in row], scale
    if format == "fp8":
        scale = max(to(amax / 448, torch.float32), to(1 / (448 * 512), torch.float32))
    else:
        scale = to(max(amax, to(1e-10, torch.float32)) / 448, torch.float32)
    quotients = torch.tensor([to(v / scale, torch.float32) for v in row])
    return quotients.clamp(-448, 448).to(torch.float8_e4m3fn).double().tolist(), scale


# Quantizers


@every_dtype
@every_format
def test_inputs_equal_the_loop(format, dtype):
    for size in (1.0, 1e-4, 1e-11):
        x = (matrix(9, K, torch.float32) * size).to(dtype)
        q = quantizers.quantize_input(x, format)
        assert q.scale.dtype == torch.float32 and (q.format, q.shape, q.dtype) == (format, x.shape, dtype)
        width = 128 if format == "fp8_block" else K
        for row in range(len(x)):
            for index, first in enumerate(range(0, K, width)):
                codes, scale = slow_quantize(x[row, first : first + width].tolist(), format)
                assert q.values[row, first : first + width].double().tolist() == codes
                assert q.scale[row, index].item() == scale


@every_format
def test_inputs_are_not_those_of_the_format(format):
    """vLLM's scales are in FP32, and INT8's are of 127 steps: `formats`, made for weights, differs in some codes."""
    x = matrix(64, 512, torch.bfloat16)
    q, other = quantizers.quantize_input(x, format), quantize_activation(x, format)
    share = (q.values.float() != other.values.float()).float().mean()
    assert 0.01 < share < 0.9
    for differs in [x.float()] if format == "int8" else []:
        assert (q.values != quantize_activation(differs, format).values).float().mean() > 0.01


@every_format
def test_tokens_do_not_depend_on_each_other(format):
    x = matrix(40, K, torch.bfloat16)
    whole, part = quantizers.quantize_input(x, format), quantizers.quantize_input(x[7:9], format)
    assert torch.equal(whole.values[7:9].float(), part.values.float()) and torch.equal(whole.scale[7:9], part.scale)


def test_zero_tokens():
    for format in unified_flows():
        q = quantizers.quantize_input(torch.zeros(2, 256, dtype=torch.bfloat16), format)
        assert q.values.float().abs().max() == 0 and q.scale.isfinite().all()
        assert q.dequantize().abs().max() == 0


def test_int8_equals_vllm():
    """Bit for bit what vLLM gives a layer on a CPU, which dividing by the scale or 127 / amax is not."""
    ops = pytest.importorskip("vllm._custom_ops")
    x = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scale, _ = ops.scaled_int8_quant(x)
    q = quantizers.quantize_input(x, "int8")
    assert torch.equal(codes, q.values) and torch.equal(scale, q.scale)
    assert (codes != (x.float() / scale).round()).any()
    assert (codes != quantizers.quantize_int8(x, on_cuda=True).values).any()


@every_dtype
def test_both_layouts(dtype):
    """The first as for a product over features, the second along tokens: 128 of a feature under one scale."""
    x = matrix(T + 128, K, dtype)
    rows, columns = quantizers.quantize_for_both(x)
    single = quantizers.quantize_input(x, "fp8_block")
    assert torch.equal(rows.values.float(), single.values.float()) and torch.equal(rows.scale, single.scale)
    assert columns.shape == (K, 256) and columns.scale.shape == (K, 2)
    for feature in (0, 1, 37, K - 1):
        for index in (0, 1):
            values = x[128 * index : 128 * index + 128, feature].tolist()
            codes, scale = slow_quantize(values, "fp8_block")
            codes += [0.0] * (128 - len(values))
            assert columns.values[feature, 128 * index : 128 * index + 128].double().tolist() == codes
            assert columns.scale[feature, index].item() == scale
    assert not torch.equal(columns.values[:, : T + 128].float(), rows.values.t().float())
    again = quantizers.quantize_for_both(numbers(rows).to(dtype))[1]  # of the codes, as in Jet-RL: rounded twice
    once, twice = (sqnr(numbers(q)[:, : T + 128], x.t()) for q in (columns, again))
    assert once > twice + 1


def test_small_gradients_stay():
    """Gradients are no inputs: where vLLM's least scale of a group would round all of them to 0, these stay."""
    dy = (torch.randn(T, N, generator=torch.Generator().manual_seed(0)) * 2.0**-57).bfloat16()
    for q in quantizers.quantize_for_both(dy, quantizers.LEAST_GRADIENT):
        right = dy if q.shape == dy.shape else torch.nn.functional.pad(dy, (0, 0, 0, q.shape[1] - T)).t()
        assert sqnr(numbers(q), right) > 25
    assert sqnr(numbers(quantizers.quantize_gradient(dy, torch.ones(N, 1))), dy) > 25
    assert quantizers.quantize_for_both(dy)[0].values.float().abs().max() == 0


# Products


@every_dtype
@every_format
def test_product_equals_the_loop(format, dtype):
    _, x, w, bias = tensors(format, dtype)
    exact = numbers(x) @ numbers(w).t()
    for given, right in (
        (products.product(x, w, None, dtype), exact),
        (products.product(x, w, bias, dtype), exact + bias.double()),
    ):
        assert given.dtype == dtype
        roundings = right.abs() + (exact.abs() if format == "fp8_block" else 0)  # where the sum is rounded first
        bound = EPS[dtype] / 2 * roundings + 1e-6 * (numbers(x).abs() @ numbers(w).abs().t())
        assert ((given.double() - right).abs() <= bound * (1 + 2.0**-7)).all()
    one_scale = quantize(w.dequantize(torch.float32), "fp8_tensor").dequantize()
    assert sqnr(numbers(x) @ one_scale.double().t(), exact) < 40, "the bound would see another granularity"


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_the_epilogue(format):
    """Scaled by the weight's scale, then in one step by the token's with the bias, then rounded to BF16."""
    _, x, w, bias = tensors(format, torch.bfloat16)
    sums = (x.values.double() @ w.values.double().t()).float()
    scaled = (sums * w.scale.float().view(1, -1)).double()
    right = (scaled * x.scale.double() + bias.double()).float().bfloat16()
    assert torch.equal(products.product(x, w, bias, torch.bfloat16), right)
    rounded_first = (scaled * x.scale.double()).float().bfloat16() + bias
    assert (right != rounded_first).float().mean() > 0.05


@every_format
def test_forward_is_near_bf16(format):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    given = products.product(quantizers.quantize_input(x, format), quantize(w, format), None, torch.bfloat16)
    assert sqnr(given, x.double() @ w.double().t()) > (35 if format == "int8" else 25)


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_a_token_does_not_depend_on_those_beside_it(format):
    _, x, w, bias = tensors(format, torch.bfloat16)
    whole = products.product(x, w, bias, torch.bfloat16)
    for token in range(0, T, 9):
        part = QuantizedTensor(format, x.values[token : token + 1], x.scale[token : token + 1], (1, K), x.dtype)
        assert torch.equal(products.product(part, w, bias, torch.bfloat16)[0], whole[token])


@every_dtype
@every_format
def test_input_gradient(format, dtype):
    _, _, w, _ = tensors(format, dtype)
    dy = matrix(T, N, dtype, 3)
    given = products.input_gradient(dy, w)
    assert given.dtype == dtype
    if format == "fp8_block":
        exact = numbers(quantizers.quantize_groups(dy, quantizers.LEAST_GRADIENT)) @ numbers(w)
    elif format == "fp8":
        exact = numbers(quantizers.quantize_gradient(dy, w.scale)) @ w.values.double()
        unfolded = numbers(quantizers.quantize_fp8(dy, quantizers.LEAST_GRADIENT)) @ numbers(w)
        assert sqnr(given, unfolded) < 45, "the weight's scales are folded in before dY is rounded"
    else:
        exact = dy.double() @ w.dequantize(dtype).double()
    if format != "int8":
        assert 25 < sqnr(given, dy.double() @ numbers(w)) < 45, "dY is quantized"
    assert sqnr(given, exact) > (50 if dtype == torch.bfloat16 else 120)


@every_dtype
def test_gradients_equal_the_loop(dtype):
    for size in (1.0, 2.0**-30):
        dy, scale = (matrix(9, N, torch.float32, 3) * size).to(dtype), matrix(9, N, torch.float32, 4)[0].abs()
        q = quantizers.quantize_gradient(dy, scale.unsqueeze(1))
        assert q.scale.dtype == torch.float32 and (q.shape, q.dtype) == (dy.shape, dtype)
        for row, values in enumerate(dy.float() * scale):
            amax = max(values.abs().max().item(), quantizers.LEAST_GRADIENT)
            expected = to(amax / 448, torch.float32)
            assert q.scale[row].item() == expected
            quotients = torch.tensor([to(v / expected, torch.float32) for v in values.tolist()])
            assert torch.equal(q.values[row].double(), quotients.to(torch.float8_e4m3fn).double())


@every_dtype
def test_weight_gradient(dtype):
    _, _, w, _ = tensors("fp8_block", dtype)
    x, dy = matrix(T + 128, K, dtype), matrix(T + 128, N, dtype, 3)
    _, x_t = quantizers.quantize_for_both(x)
    _, dy_t = quantizers.quantize_for_both(dy, quantizers.LEAST_GRADIENT)
    given = products.weight_gradient(dy_t, x_t, dtype)
    assert given.dtype == dtype and given.shape == (N, K)
    assert sqnr(given, numbers(dy_t) @ numbers(x_t).t()) > (50 if dtype == torch.bfloat16 else 120)
    exact = dy.double().t() @ x.double()
    assert sqnr(given, exact) > 25
    along_features = numbers(quantizers.quantize_input(dy, "fp8_block")).t() @ numbers(
        quantizers.quantize_input(x, "fp8_block")
    )
    assert sqnr(given, along_features) < 45, "groups along features are another product"
    dx, dw = products.input_and_weight_gradient(dy, w, x_t)
    assert torch.equal(dw, given) and torch.equal(dx, products.input_gradient(dy, w))
    assert products.input_and_weight_gradient(dy, w, x_t, torch.float32)[1].dtype == torch.float32


@every_format
def test_autocast_changes_nothing(format):
    x, _, w, bias = tensors(format, torch.float32)
    dy = matrix(T, N, torch.float32, 3)

    def run():
        y = products.product(quantizers.quantize_input(x, format), w, bias, torch.float32)
        return y, products.input_gradient(dy, w)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = run()
    for ours, right in zip(given, run(), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, right)


@every_format
def test_no_tokens(format):
    _, _, w, bias = tensors(format, torch.bfloat16)
    nothing = torch.zeros(0, K, dtype=torch.bfloat16)
    q = quantizers.quantize_input(nothing, format)
    assert products.product(q, w, bias, torch.bfloat16).shape == (0, N)
    dy = torch.zeros(0, N, dtype=torch.bfloat16)
    assert products.input_gradient(dy, w).shape == (0, K)
    if format == "fp8_block":
        _, x_t = quantizers.quantize_for_both(nothing)
        dw = products.input_and_weight_gradient(dy, w, x_t)[1]
        assert dw.shape == (N, K) and dw.abs().max() == 0


def test_wrong_arguments():
    x = matrix(4, K, torch.bfloat16)
    with pytest.raises(ValueError, match=r"format: 'nvfp4' has no products; allowed: int8, fp8_block, fp8, fp8_tensor"):
        quantizers.quantize_input(x, "nvfp4")
    with pytest.raises(ValueError, match=r"x: 'int8' of shape \(4, 300\), but the weight is 'fp8' of shape \(4, 300\)"):
        products.product(quantizers.quantize_input(x, "int8"), quantize(x, "fp8"), None, x.dtype)
    with pytest.raises(ValueError, match=r"x: 'int8' of shape \(4, 300\), but the weight is 'int8' of shape \(4, 20\)"):
        products.product(quantizers.quantize_input(x, "int8"), quantize(x[:, :20], "int8"), None, x.dtype)


# What only a GPU does, where it can be tried without one


@pytest.mark.parametrize("tokens", [1, 31, 32, 70])
def test_filling_up_is_exact(tokens):
    for format in unified_flows():
        q = quantizers.quantize_input(matrix(T, K, torch.bfloat16)[:tokens], format)
        values = products.filled(q.values)
        assert len(values) % 32 == 0 and values.float()[tokens:].abs().sum() == 0
        assert torch.equal(values[:tokens].float(), q.values.float())
        scale = products.filled(q.scale, by_column=True)
        assert torch.equal(scale[:tokens], q.scale) and scale.t().is_contiguous()


def test_scales_of_blocks_lie_as_the_kernel_reads_them():
    for rows, cols in ((128, 128), (256, 384), (384, 1280)):
        scale = quantize(matrix(rows, cols, torch.float32), "fp8_block").scale
        given = products.block_scales(scale)
        up = -(-scale.shape[1] // 4) * 4
        assert given.shape == (up, rows // 128) and given.stride() == (1, up)
        assert torch.equal(given[: scale.shape[1]], scale.t())


def hopper(mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """`F.scaled_mm` in float64, with the shapes and strides that torch asks for on Hopper."""
    (rows, inner), outs = mat_a.shape, mat_b.shape[1]
    groups, blocks = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    assert mat_a.is_contiguous() and mat_b.t().is_contiguous() and rows % 4 == inner % 16 == outs % 16 == 0
    assert recipe_a == groups and scale_a.shape == (rows, inner // 128) and scale_a.stride() == (1, rows)
    wide = scale_a.double().repeat_interleave(128, 1)
    if recipe_b == blocks:
        up = -(-inner // 512) * 4
        assert scale_b.shape == (up, outs // 128) and scale_b.stride() == (1, up)
        scale_b = scale_b[: inner // 128].t().repeat_interleave(128, 0)
    else:
        assert recipe_b == groups and scale_b.shape == (outs, inner // 128) and scale_b.stride() == (1, outs)
    b = mat_b.t().double() * scale_b.double().repeat_interleave(128, 1)
    return ((mat_a.double() * wide) @ b.t()).to(output_dtype)


@every_dtype
def test_hopper_is_asked_for_the_same_products(dtype, monkeypatch):
    tokens, outs, inner = 300, 256, 384
    x, dy, w = matrix(tokens, inner, dtype), matrix(tokens, outs, dtype, 1), matrix(outs, inner, dtype, 2)
    bias, weight = matrix(3, outs, dtype, 3)[0], quantize(w, "fp8_block")

    def run():
        _, x_t = quantizers.quantize_for_both(x)
        y = products.product(quantizers.quantize_input(x, "fp8_block"), weight, bias, dtype)
        return y, products.input_gradient(dy, weight), *products.input_and_weight_gradient(dy, weight, x_t)

    right, asked = run(), []
    monkeypatch.setattr(products, "multiplies_groups", lambda x: True)
    monkeypatch.setattr(F, "scaled_mm", lambda *args, **kwargs: (asked.append(1), hopper(*args, **kwargs))[1])
    for given, expected in zip(run(), right, strict=True):
        assert given.dtype == dtype and given.shape == expected.shape
        assert sqnr(given, expected) > (55 if dtype == torch.bfloat16 else 120)
    assert len(asked) == 4


@every_dtype
def test_one_scale_for_all_tokens(dtype):
    """`fp8_tensor`, as AIS samples: the product of the numbers, and not that of a scale for each token."""
    x, w, bias = matrix(40, K, dtype), matrix(72, K, dtype, 1), matrix(3, 72, dtype)[0]
    q, weight = quantizers.quantize_input(x, "fp8_tensor"), quantize(w, "fp8_tensor")
    assert q.scale.shape == weight.scale.shape == (1,)
    assert q.scale.item() == (x.abs().max() / 448).to(dtype).item()
    numbers = [t.values.double() * t.scale.double() for t in (q, weight)]
    y = products.product(q, weight, bias, dtype).double()
    right = numbers[0] @ numbers[1].t() + bias.double()
    assert sqnr(y, right) > (50 if dtype == torch.bfloat16 else 130)
    by_token = products.product(quantizers.quantize_input(x, "fp8"), quantize(w, "fp8"), bias, dtype)
    assert sqnr(by_token, right) < 40
    assert products.product(quantizers.quantize_input(x[:0], "fp8_tensor"), weight, bias, dtype).shape == (0, 72)


@pytest.mark.parametrize("format", ["fp8", "fp8_tensor"])
@pytest.mark.parametrize("tokens", [5, 64])
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="torch 2.11 has the product on GPUs alone")
def test_scaled_mm_is_asked_for_the_same_product(tokens, format, monkeypatch):
    """torch's own, which has a path for CPUs."""
    x, w, bias = (
        matrix(tokens, 384, torch.bfloat16),
        matrix(256, 384, torch.bfloat16, 1),
        matrix(3, 256, torch.bfloat16)[0],
    )
    q, weight = quantizers.quantize_input(x, format), quantize(w, format)
    right = products.product(q, weight, bias, torch.bfloat16)
    monkeypatch.setattr(products, "multiplies_fp8", lambda x: True)
    monkeypatch.setattr(products, "FAST_ACCUMULATION", False)
    assert sqnr(products.product(q, weight, bias, torch.bfloat16), right) > 50


@pytest.fixture
def own_rule():
    yield
    quantizers.follow_groups(lambda x: by_rule(x, False), torch.device("cpu"))


def by_rule(x, inverts):
    """The codes and scales of an engine, in NumPy."""
    groups = x.float().unflatten(-1, (-1, 128)).numpy()
    scale = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(1e-10)) / np.float32(448)
    values = groups * (np.float32(1) / scale) if inverts else groups / scale
    codes = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(-2), torch.from_numpy(scale[..., 0])


@pytest.mark.parametrize("inverts", [False, True])
def test_groups_follow_the_engine(inverts, own_rule):
    """In the forward pass and for the backward pass."""
    x = torch.randn(200, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantizers.follow_groups(lambda x: by_rule(x, inverts), torch.device("cpu"))
    expected = by_rule(x, inverts)[0].float()
    assert torch.equal(quantizers.quantize_input(x, "fp8_block").values.float(), expected)
    assert torch.equal(quantizers.quantize_for_both(x)[0].values.float(), expected)
    assert not torch.equal(expected, by_rule(x, not inverts)[0].float())


def test_an_unknown_rule_is_refused(own_rule):
    def rounds_scales(x):  # up to powers of two, as DeepGEMM may
        scale = by_rule(x, False)[1].log2().ceil().exp2()
        return (x.float() / scale.repeat_interleave(128, 1)).to(torch.float8_e4m3fn), scale

    with pytest.raises(ValueError, match="by a rule that is not known here"):
        quantizers.follow_groups(rounds_scales, torch.device("cpu"))
