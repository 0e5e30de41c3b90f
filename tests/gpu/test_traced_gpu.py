"""
Layers under torch.compile on a GPU, with Inductor, against the same layers without it.

python3 -m pytest -m gpu -s tests/gpu/test_traced_gpu.py
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn
from torch._dynamo.utils import counters

from trl_quant.layers import UnifiedLinear
from trl_quant.layers.packed import Packed
from trl_quant.policy.packed import accept_packed_rows, row_of
from trl_quant.policy.unified import unify
from trl_quant.precisions import qat_precisions, unified_flows


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
    pytestmark.append(pytest.mark.skip(reason="FP8 in groups needs compute capability 9.0"))
DEVICE = "cuda"
SAME = 45  # dB. The order of a sum decides last bits


def sqnr(given: torch.Tensor, right: torch.Tensor) -> float:
    given, right = given.double(), right.double()
    return (20 * torch.log10(right.norm() / (given - right).norm())).item()


def gradients(function, x: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.float().sin().sum().backward()
    found = [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in parameters)]
    for p in parameters:
        p.grad = None
    return found


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("precision", [*unified_flows(), *qat_precisions()])
def test_a_layer_follows_its_weight(precision, mode):
    """In CUDA graphs too, which are replayed from the third call on."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = UnifiedLinear.from_linear(nn.Linear(512, 256, device=DEVICE, dtype=torch.bfloat16), precision)
    function, trained = torch.compile(layer, fullgraph=True, mode=mode), [*layer.parameters()]
    for tokens in (64, 300):
        x, before = torch.randn(tokens, 512, device=DEVICE, dtype=torch.bfloat16), None
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            found, expected = gradients(function, x, trained), gradients(layer, x, trained)
            distances = [sqnr(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
            assert min(distances) > SAME
            assert before is None or sqnr(before, found[0]) < SAME
            before = found[0]
            with torch.no_grad():
                layer.weight.mul_(0.7)


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return tiny_model(hidden_size=256, intermediate_size=512).to(DEVICE, torch.bfloat16)


def adapted(model: nn.Module) -> nn.Module:
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def policy(model: nn.Module, precision: str, merged: bool = False) -> nn.Module:
    unify(model, precision, merged)
    model.enable_input_require_grads()  # so the first decoder layer is like the others
    return model


@pytest.mark.parametrize("kind", ["full", "merged"])
@pytest.mark.parametrize("precision", unified_flows())
def test_decoder_layers_are_one_graph(precision, kind):
    torch.compiler.reset()
    counters.clear()
    unquantized = tiny() if kind == "full" else adapted(tiny())
    model = policy(copy.deepcopy(unquantized), precision, merged=kind == "merged")
    layers = (model if kind == "full" else model.get_base_model()).model.layers
    ids = torch.arange(10, 74, device=DEVICE).view(2, 32)

    def update(model: nn.Module) -> list[torch.Tensor]:
        logits = model(input_ids=ids, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 3].sum().backward()
        trained = [p for name, p in model.named_parameters() if p.requires_grad and ".layers." in name]
        found = [logits.detach().clone(), *(p.grad.clone() for p in trained)]
        model.zero_grad()
        return found

    plain, other = update(model), update(unquantized)
    for layer in layers:
        layer.compile(fullgraph=True, options={"emulate_precision_casts": True})
    found = update(model)
    assert counters["stats"]["unique_graphs"] == 1 < len(layers)
    for name, ours, theirs in (("logits", found[:1], other[:1]), ("gradients", found[1:], other[1:])):
        right = plain[:1] if name == "logits" else plain[1:]
        compiled, far = (min(map(sqnr, given, right)) for given in (ours, theirs))
        print(f"RESULT {precision}, {name}: compiled {compiled:.1f} dB, in BF16 {far:.1f} dB")
        assert compiled > far + 6


@pytest.mark.parametrize("precision", unified_flows())
def test_packed_rows_of_other_lengths_are_not_compiled_again(precision):
    """The compiler takes a number for a constant until it changes, so the first rows need graphs of their own."""
    torch.compiler.reset()
    counters.clear()
    model = policy(tiny(), precision)
    accept_packed_rows(model)

    def update(prompt: int, lengths: list[int]) -> list[torch.Tensor]:
        shape = len(lengths), prompt + max(lengths)
        mask = torch.arange(shape[1], device=DEVICE) < prompt + torch.tensor(lengths, device=DEVICE)[:, None]
        ids = torch.arange(shape[0] * shape[1], device=DEVICE).view(shape) % 50 + 5
        ids[:, :prompt] = ids[0, :prompt]
        packed = Packed.sharing(mask, ids, prompt).filled_up(64)
        hidden = model.model(**row_of(packed, ids, shares=True)).last_hidden_state
        hidden.float().sin().sum().backward()
        found = [hidden.detach().clone(), *(p.grad.clone() for p in model.model.layers.parameters())]
        model.zero_grad()
        return found

    shapes = [(8, [30, 50, 90, 20]), (12, [100, 50, 130, 2]), (20, [190, 100]), (9, [40] * 6)]
    shapes += [(15, [70, 30, 110]), (7, [60, 80, 3, 20, 90]), (30, [250, 20])]
    plain = [update(*shape) for shape in shapes]
    for layer in model.model.layers:
        layer.compile(fullgraph=True, options={"emulate_precision_casts": True})
    graphs = []
    for shape, right in zip(shapes, plain, strict=True):
        distances = list(map(sqnr, update(*shape), right))
        graphs.append(counters["stats"]["unique_graphs"])
        print(f"RESULT {precision}, {shape}: hidden {distances[0]:.1f} dB, gradients {min(distances[1:]):.1f} dB")
        assert distances[0] > 25 and min(distances[1:]) > 15
    assert graphs[3] == graphs[-1] <= 4
