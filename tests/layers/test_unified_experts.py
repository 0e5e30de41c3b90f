"""Experts trained in the numbers that sample from them, against experts made of dense layers of those numbers."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from slow_experts import DenseExperts
from torch import nn
from torch.utils.checkpoint import checkpoint

from trl_quant.formats import quantize
from trl_quant.layers import SampledExperts, UnheldExperts, UnifiedExperts, grouped, unified
from trl_quant.layers.grouped import grouped_input_gradient, grouped_product, grouped_weight_gradient
from trl_quant.layers.products import input_gradient, product
from trl_quant.layers.quantizers import quantize_gradient, quantize_input
from trl_quant.layers.unified_experts import Sorting
from trl_quant.precisions import experts_flows, unified_flows


pytestmark = pytest.mark.isa
EXPERTS, HIDDEN, WIDTH, TOKENS = 6, 48, 40, 30
every_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Eager(nn.Module):
    """Experts as transformers has them, with its loop. Each expert has weights of twice the size of the one before."""

    def __init__(self, dtype=torch.float32, activation=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = 2.0 ** torch.arange(EXPERTS)[:, None, None] / 20
        self.config, self.num_experts, self.act_fn = SimpleNamespace(), EXPERTS, activation or nn.SiLU()
        self.gate_up_proj = nn.Parameter(
            (torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * sizes).to(dtype)
        )
        self.down_proj = nn.Parameter((torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) / sizes / 9).to(dtype))

    def forward(self, hidden, chosen, weights):
        y = torch.zeros_like(hidden)
        for expert in chosen.unique():
            tokens, places = torch.where(chosen == expert)
            gate, up = F.linear(hidden[tokens], self.gate_up_proj[expert]).chunk(2, -1)
            out = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            y = y.index_add(0, tokens, out * weights[tokens, places, None])
        return y


def given(dtype=torch.float32, reached=EXPERTS, chosen=2, tokens=TOKENS):
    """Tokens of different sizes, their experts, and the weights of these."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator) * torch.logspace(-1, 1, tokens)[:, None]
    experts = torch.stack([torch.randperm(reached, generator=generator)[:chosen] for _ in range(tokens)])
    weights = torch.rand(tokens, chosen, generator=generator)
    return x.to(dtype).requires_grad_(), experts, weights.to(dtype).requires_grad_()


def gradients(module, x, experts, weights, *parameters):
    y = module(x, experts, weights)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, weights, *parameters), dy)


def of_experts(module, *args):
    return gradients(module, *args, module.gate_up_proj, module.down_proj)


def of_dense(module, x, experts, weights):
    x, weights = (tensor.detach().clone().requires_grad_() for tensor in (x, weights))
    y = module(x, experts, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return y.detach(), x.grad, weights.grad, *module.gradients()


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


# The module


@every_type
@pytest.mark.parametrize("reached", [EXPERTS, 3])
def test_outputs_and_gradients_are_those_of_dense_layers(dtype, reached):
    """Bit for bit with two experts a token, whose sum has no order; and far from those of the weights themselves."""
    experts, args = Eager(dtype), given(dtype, reached)
    dense, plain = of_dense(DenseExperts(experts), *args), of_experts(experts, *args)
    ours = of_experts(UnifiedExperts(experts, "fp8"), *args)
    same(ours, dense)
    assert (ours[3][reached:] == 0).all() and (ours[3][:reached].flatten(1).norm(dim=1) > 0).all()
    for one, other in zip(ours, plain, strict=True):
        distance = (one - other).double().norm() / other.double().norm()
        assert 4e-3 < distance < 0.12


def test_many_experts_of_a_token_add_up_once_rounded():
    """In FP32 before the result is rounded to BF16, where a loop over experts rounds after each."""
    experts, args = Eager(torch.bfloat16), given(torch.bfloat16, chosen=5)
    dense, module = DenseExperts(experts), UnifiedExperts(experts, "fp8")
    wide = [tensor.float() for tensor in of_dense(dense, *args)[:2]]
    ours = [tensor.float() for tensor in of_experts(module, *args)[:2]]
    exact = torch.zeros(TOKENS, HIDDEN)
    x, chosen, weights = args
    for number in range(5):  # one expert of each token at a time
        exact += dense(x, chosen[:, number : number + 1], weights[:, number : number + 1]).float()
    assert torch.equal(ours[0], exact.bfloat16().float()) and not torch.equal(ours[0], wide[0])
    assert (ours[1] - wide[1]).norm() < 2**-8 * wide[1].norm()


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU()])
def test_another_activation(activation):
    experts, args = Eager(activation=activation), given()
    plain = of_experts(experts, *args)
    ours = of_experts(UnifiedExperts(experts, "fp8", is_silu=isinstance(activation, nn.SiLU)), *args)
    assert all((one - other).norm() < 0.12 * other.norm() for one, other in zip(ours, plain, strict=True))


def test_checkpointing_and_frozen_weights():
    module, args = UnifiedExperts(Eager(), "fp8"), given()
    whole = of_experts(module, *args)

    def again(*args):
        return checkpoint(module, *args, use_reentrant=False)

    same(gradients(again, *args, module.gate_up_proj, module.down_proj), whole)
    module.requires_grad_(False)
    same(gradients(module, *args), whole[:3])
    with torch.no_grad():
        assert torch.equal(module(*args), whole[0])


def test_autocast_and_rounding():
    """A policy in FP32 computes in autocast's type; its scales are those of the type that an engine starts from."""
    module, (x, chosen, weights) = UnifiedExperts(Eager(), "fp8"), given()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, chosen, weights)
    assert y.dtype == torch.float32
    narrow = [tensor.detach().bfloat16() for tensor in (x, weights)]
    sums = module(narrow[0], chosen, weights.detach())  # weights stay in the router's type
    assert torch.equal(y.bfloat16(), sums)
    module.rounds_to = torch.bfloat16
    module.forget()
    codes = module.codes("down_proj")
    expected = quantize(module.down_proj.detach().bfloat16(), "fp8")
    assert codes.scale.dtype == torch.bfloat16 and torch.equal(codes.scale, expected.scale)


def test_weights_are_quantized_once_a_step_and_after_each_write(monkeypatch):
    made = []
    monkeypatch.setattr(unified, "quantize", lambda *args: made.append(1) or quantize(*args))
    module, args = UnifiedExperts(Eager(), "fp8"), given()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-5)
    for step in range(1, 4):
        for _ in range(2):
            y = checkpoint(module, *args, use_reentrant=False)
            y.square().mean().backward()
        assert len(made) == 2 * step  # of two tensors
        optimizer.step()
    assert not torch.equal(module(*args), y)
    assert torch.equal(module(*args), DenseExperts(module)(*args))
    before = module(*args)
    module.gate_up_proj.data.mul_(2)
    assert torch.equal(module(*args), before)  # what writes past torch must say so
    module.forget()
    assert torch.equal(module(*args), DenseExperts(module)(*args)) and not torch.equal(module(*args), before)
    module.moves_unseen = True
    module.down_proj.data.mul_(2)
    assert torch.equal(module(*args), DenseExperts(module)(*args))
    assert module.to(torch.bfloat16).codes("down_proj").dtype == torch.bfloat16


def test_it_keeps_the_parameters_and_gives_them_back():
    experts, args = Eager(), given()
    own = dict(experts.named_parameters())
    module = UnifiedExperts(experts, "fp8")
    assert dict(module.named_parameters()) == own and not [*experts.parameters()]
    other = copy.deepcopy(module)
    module(*args)
    other.load_state_dict({name: 2 * tensor for name, tensor in own.items()})
    assert torch.equal(other(*args), DenseExperts(other)(*args))
    module.down_proj = nn.Parameter(module.down_proj.detach() * 3)
    plain = module.plain()
    assert plain is experts and plain.down_proj is module.down_proj and plain.gate_up_proj is own["gate_up_proj"]
    held = SampledExperts(plain, "fp8")
    for leaf in own:
        held.load(leaf, module.codes(leaf))
    assert torch.equal(held(*args), module(*args)) and not [*held.parameters()]
    held.load("down_proj", own["down_proj"].detach())  # values
    assert not torch.equal(held(*args), module(*args))
    for precision in set(unified_flows()) - set(experts_flows()):
        with pytest.raises(ValueError, match="cannot be that of experts; allowed: fp8"):
            UnifiedExperts(Eager(), precision)


def test_a_check_may_put_an_engines_experts_in_place_of_the_tensors():
    module, args = UnifiedExperts(Eager(), "fp8"), given()
    tensors = {leaf: getattr(module, leaf) for leaf in ("gate_up_proj", "down_proj")}
    expected = module(*args)
    for leaf, tensor in tensors.items():
        delattr(module, leaf)
        read = lambda tensor=tensor: tensor  # noqa: E731
        setattr(module, leaf, UnheldExperts(read, tuple(tensor.shape), "fp8", torch.float32))
    found = module(*args)
    assert 0 < (found - expected).norm() < 1e-2 * expected.norm()
    for leaf, tensor in tensors.items():
        setattr(module, leaf, tensor)
    assert torch.equal(module(*args), expected)


# Its products


def test_tokens_are_sorted_by_expert():
    chosen = given(reached=4)[1]
    sorting = Sorting.by_expert(chosen, EXPERTS)
    rows = [(expert, token, place) for token, row in enumerate(chosen.tolist()) for place, expert in enumerate(row)]
    rows.sort()
    assert sorting.tokens.tolist() == [token for _, token, _ in rows]
    assert sorting.ends.tolist() == [sum(expert <= e for expert, _, _ in rows) for e in range(EXPERTS)]
    assert sorting.ends.dtype == torch.int32
    values = torch.tensor([[100 * token + place] for _, token, place in rows])
    assert sorting.by_token(values)[..., 0].tolist() == [[100 * token, 100 * token + 1] for token in range(TOKENS)]


@every_type
def test_products_are_those_of_each_expert(dtype):
    """Also of one that gets no row, and of rows that are fewer than one expert's."""
    generator = torch.Generator().manual_seed(3)
    w = quantize(Eager(dtype).gate_up_proj.detach(), "fp8")
    for counts in ([5, 0, 7, 1, 0, 2], [0, 0, 1, 0, 0, 0], [0] * 6):
        ends, rows = torch.tensor(counts).cumsum(0).to(torch.int32), sum(counts)
        x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
        dy = torch.randn(rows, 2 * WIDTH, generator=generator).to(dtype)
        q = (
            quantize_input(x, "fp8")
            if rows
            else quantize_input(torch.zeros(1, HIDDEN, dtype=dtype), "fp8").rows(slice(0))
        )
        y, dx = grouped_product(q, w, ends, dtype), grouped_input_gradient(dy, w, ends)
        dw = grouped_weight_gradient(dy, q.dequantize(dtype), ends)
        assert (y.shape, dx.shape, dw.shape) == ((rows, 2 * WIDTH), (rows, HIDDEN), (6, 2 * WIDTH, HIDDEN))
        start = 0
        for expert, count in enumerate(counts):
            part, matrix = slice(start, start + count), quantize(Eager(dtype).gate_up_proj[expert], "fp8")
            start += count
            if not count:
                assert (dw[expert] == 0).all()
                continue
            assert torch.equal(y[part], product(quantize_input(x[part], "fp8"), matrix, None, dtype))
            assert torch.equal(dx[part], input_gradient(dy[part], matrix))
            assert torch.equal(dw[expert], dy[part].t() @ quantize_input(x[part], "fp8").dequantize(dtype))


def test_a_gradient_has_the_scales_of_its_own_expert():
    dy, scale = torch.randn(9, 16), torch.rand(3, 16, 1) + 0.1
    owner = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 2])
    ours = quantize_gradient(dy, scale, owner)
    for row, expert in enumerate(owner.tolist()):
        alone = quantize_gradient(dy[row : row + 1], scale[expert])
        assert torch.equal(ours.values[row : row + 1].float(), alone.values.float())
        assert torch.equal(ours.scale[row : row + 1], alone.scale)


def test_what_one_call_multiplies(monkeypatch):
    """On Hopper alone, in BF16, with sizes in sixteens; what it is called with gives the loop's results."""
    experts, args, calls = Eager(torch.bfloat16), given(torch.bfloat16), []
    before = of_experts(UnifiedExperts(Eager(torch.bfloat16), "fp8"), *args)

    def in_one_call(a, b, scale_a, kind_a, scale_b, kind_b, offs, output_dtype, use_fast_accum):
        calls.append((kind_a, kind_b, use_fast_accum))
        assert a.is_contiguous() and b.stride(-2) == 1 and offs.dtype == torch.int32
        assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_b.stride(-1) == 1
        y = F.grouped_mm(a.float(), b.float(), offs=offs)
        owner = torch.searchsorted(offs, torch.arange(len(a)), right=True)
        return (y * scale_a[:, None] * scale_b[owner]).to(output_dtype)

    monkeypatch.setattr(grouped, "multiplies_groups", lambda x: True)
    monkeypatch.setattr(F, "scaled_grouped_mm", in_one_call)
    of_experts(UnifiedExperts(Eager(torch.bfloat16), "fp8"), *args)
    assert len(calls) == 2  # gate and up are 80 wide together, and the 40 inputs of down are no multiple of 16
    calls.clear()
    experts.gate_up_proj = nn.Parameter(F.pad(experts.gate_up_proj.detach(), (0, 0, 0, 16)))
    experts.down_proj = nn.Parameter(F.pad(experts.down_proj.detach(), (0, 8)))
    gate, up = experts.gate_up_proj.detach()[:, :80].chunk(2, 1)
    experts.gate_up_proj.data = torch.cat([F.pad(gate, (0, 0, 0, 8)), F.pad(up, (0, 0, 0, 8))], 1)
    padded = of_experts(UnifiedExperts(experts, "fp8"), *args)
    row = F.ScalingType.RowWise
    assert calls == [(row, row, True)] * 4  # two products forward and two backward
    for one, other in zip(padded[:3], before[:3], strict=True):
        assert (one - other).float().norm() < 2**-7 * other.float().norm()
    for one, other in ((padded[3][:, :40], before[3][:, :40]), (padded[4][..., :40], before[4])):
        assert (one - other).float().norm() < 2**-7 * other.float().norm()
