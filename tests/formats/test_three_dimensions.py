"""Weights (experts, out, in): each expert gets the codes and scales that it would get alone."""

from itertools import product

import pytest
import reference_formats as slow
import torch
from made_up_experts import MadeUpMixture, experts_of_many_sizes
from reference_formats import DTYPES, bits

from trl_quant.formats import FORMATS, QuantizedTensor, global_scale, quantize
from trl_quant.formats.nf4 import NF4_GRID


MATRIX_WIDE = {"fp8_tensor", "fp8_block", "nvfp4"}  # formats whose scales depend on more than one row


def assert_experts_are_alone(q: QuantizedTensor, alone: list[QuantizedTensor]):
    """Every tensor of `q` is the stack of the experts' own; NF4's, which are flat, their concatenation."""
    join = torch.cat if q.format == "nf4" else torch.stack
    for field in ("values", "scale", "global_scale"):
        together, parts = getattr(q, field), [getattr(expert, field) for expert in alone]
        assert (together is None) == (parts[0] is None), field
        if together is not None:
            expected = join(parts)
            assert (together.shape, together.dtype) == (expected.shape, expected.dtype), field
            assert torch.equal(bits(together.flatten()), bits(expected.flatten())), field
    assert torch.equal(bits(q.dequantize()), bits(torch.stack([expert.dequantize() for expert in alone])))


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_quantized_one_by_one(name: str):
    for dtype, parameter in product(DTYPES, MadeUpMixture().mlp["experts"].parameters()):
        x = parameter.detach().to(dtype)
        q = quantize(x, name)
        assert_experts_are_alone(q, [quantize(expert, name) for expert in x])
        in_one = quantize(x.flatten(0, 1), name)  # the shortcut: all experts as the rows of one matrix
        assert torch.equal(q.dequantize(), in_one.dequantize().view_as(x)) == (name not in MATRIX_WIDE)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_equal_slow_loops(name: str):
    for dtype in DTYPES:
        x = experts_of_many_sizes(3, 4, 48, dtype=dtype)
        q = quantize(x, name)
        for index, expert in enumerate(x):
            if name == "nf4":
                _, scales, values, g = slow.slow_nf4(expert, list(NF4_GRID))
                scale = q.scale.view(3, -1)
            else:
                _, scales, values, g = slow.slow_quantize(expert, name)
                scale = 2.0 ** (q.scale.double() - 127) if name == "mxfp4" else q.scale
            assert scale[index].double().flatten().tolist() == scales
            assert torch.equal(q.dequantize()[index], torch.tensor(values).view(expert.shape).to(dtype))
            assert g is None or q.global_scale[index].tolist() == [g]


@pytest.mark.parametrize("name", sorted(MATRIX_WIDE))
def test_an_expert_changes_no_other(name: str):
    x = experts_of_many_sizes(3, 40, 192)
    louder = x.clone()
    louder[1] *= 7
    before, after = quantize(x, name), quantize(louder, name)
    assert [torch.equal(a, b) for a, b in zip(before.dequantize(), after.dequantize())] == [True, False, True]


def test_experts_share_a_global_scale_with_those_of_their_index():
    gate, up = experts_of_many_sizes(3, 20, 64), 3 * experts_of_many_sizes(3, 24, 64, seed=1)
    g = global_scale(gate, up)
    assert torch.equal(g, torch.stack([global_scale(*pair) for pair in zip(gate, up)]))
    assert torch.equal(g, global_scale(torch.cat((gate, up), dim=1)))
    assert (g != global_scale(gate.flatten(0, 1), up.flatten(0, 1))).sum() == 2  # the largest expert's is that of all
    fused = quantize(torch.cat((gate, up), dim=1), "nvfp4")
    parts = [quantize(weight, "nvfp4", global_scale=g) for weight in (gate, up)]
    assert torch.equal(fused.values, torch.cat([part.values for part in parts], dim=1))
    assert torch.equal(bits(fused.scale), torch.cat([bits(part.scale) for part in parts], dim=1))


def test_a_global_scale_of_another_shape_is_refused():
    x = experts_of_many_sizes(3, 20, 64)
    with pytest.raises(ValueError, match=r"global_scale: shape \(1,\), but x of shape \(3, 20, 64\) needs \(3, 1\)"):
        quantize(x, "nvfp4", global_scale=global_scale(x[0]))
    with pytest.raises(ValueError, match=r"global_scale: shape \(3, 1\), but x of shape \(20, 64\) needs \(1,\)"):
        quantize(x[0], "nvfp4", global_scale=global_scale(x))
    with pytest.raises(ValueError, match=r"tensors: shapes \(3, 20, 64\), \(2, 20, 64\); .* equally many experts"):
        global_scale(x, x[:2])


def test_a_block_of_nf4_may_cross_two_experts():
    """bitsandbytes cuts the flattened tensor into blocks of 64 values; experts are alone where these end with them."""
    x = experts_of_many_sizes(3, 3, 32)
    assert not torch.equal(quantize(x, "nf4").dequantize()[0], quantize(x[0], "nf4").dequantize())
    whole = x[:, :2]
    assert torch.equal(quantize(whole, "nf4").dequantize()[0], quantize(whole[0], "nf4").dequantize())
