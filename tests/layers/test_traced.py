"""Layers under torch.compile: in one graph, with the bits of the same layer without the compiler."""

import copy
import pickle
import shutil
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from accelerate.utils import compile_regions
from long_tests import rest_is_long
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from trained import trainer_of
from training import dataset
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_quant.layers import FrozenLinear, UnifiedLinear, products, quantizers, traced, weight_only
from trl_quant.layers.joint import WAITING, Joint
from trl_quant.policy.adapters import UnifiedLoraLinear, with_frozen_layers
from trl_quant.policy.unified import restore, unify
from trl_quant.precisions import qat_precisions, unified_flows


pytestmark = pytest.mark.usefixtures("tracing")
FLOWS = unified_flows()
GRAPHS = [
    *(
        (precision, kind, (i + j) % 2 > 0)
        for i, kind in enumerate(["merged", "beside", "full"])
        for j, precision in enumerate(FLOWS)
    ),
    *(("nvfp4", "full", checkpointing) for checkpointing in (False, True)),
]
ADAPTED = [
    (kind, precision, (torch.bfloat16, torch.float32)[(i + j) % 2])
    for i, kind in enumerate(["merged", "beside", "beside codes"])
    for j, precision in enumerate(FLOWS)
]


@pytest.fixture(autouse=True)
def forgotten(tracing):
    torch.compiler.reset()
    counters.clear()


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def gradients(function, x: torch.Tensor, *parameters) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    y.float().sin().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in parameters)]
    for p in parameters:
        p.grad = None
    return found


def same(ours: list, theirs: list) -> bool:
    assert len(ours) == len(theirs) and all(torch.isfinite(y).all() for y in theirs)
    return all(map(torch.equal, ours, theirs))


def parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize(("dtype", "bias"), rest_is_long([(torch.bfloat16, False), (torch.float32, True)]))
@pytest.mark.parametrize("precision", [*FLOWS, *qat_precisions()])
def test_a_layer_that_trains(precision, dtype, bias):
    torch.manual_seed(0)
    layer = UnifiedLinear.from_linear(nn.Linear(256, 128, bias=bias, dtype=dtype), precision)
    x, function = torch.randn(2, 5, 256, dtype=dtype), compiled(layer)
    before = gradients(layer, x, *parameters(layer))
    assert same(gradients(function, x, *parameters(layer)), before)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    after = gradients(layer, x, *parameters(layer))
    assert same(gradients(function, x, *parameters(layer)), after) and not torch.equal(before[0], after[0])
    layer.weight.requires_grad_(False)
    assert same(gradients(function, x), gradients(layer, x))


@pytest.mark.parametrize("precision", FLOWS)
def test_autocast(precision):
    torch.manual_seed(0)
    layer, x = UnifiedLinear.from_linear(nn.Linear(256, 128), precision), torch.randn(5, 256)
    function = compiled(layer)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(function, x, *parameters(layer))
        assert same(found, gradients(layer, x, *parameters(layer))) and found[0].dtype == torch.bfloat16


def adapted(layer: nn.Module, config: LoraConfig) -> nn.Module:
    model = get_peft_model(nn.Sequential(layer), config, autocast_adapter_dtype=False)
    found = model.base_model.model[0]
    nn.init.normal_(found.lora_B["default"].weight, std=0.05)
    return found


@pytest.mark.parametrize(
    ("kind", "precision", "dtype"),
    rest_is_long(ADAPTED, *ADAPTED[::4]),  # each kind and each precision once
)
def test_a_layer_with_an_adapter(kind, precision, dtype):
    torch.manual_seed(0)
    config, linear = LoraConfig(r=4, lora_alpha=6, target_modules=["0"]), nn.Linear(256, 128, dtype=dtype)
    if kind == "beside codes":
        layer = adapted(FrozenLinear.from_linear(linear, precision), with_frozen_layers(config))
    else:
        layer = adapted(UnifiedLinear.from_linear(linear, precision), config)
        layer.__class__, layer.merges = UnifiedLoraLinear, kind == "merged"
        layer.enroll()
    x, function = torch.randn(2, 5, 256, dtype=dtype), compiled(layer)
    before = gradients(layer, x, *parameters(layer))
    assert same(gradients(function, x, *parameters(layer)), before) and len(before) == 4
    with torch.no_grad():
        layer.lora_A["default"].weight.mul_(-3)
    after = gradients(layer, x, *parameters(layer))
    assert same(gradients(function, x, *parameters(layer)), after) and not torch.equal(before[0], after[0])
    layer.requires_grad_(False)  # a frozen adapter passes gradients on
    assert same(gradients(function, x), after[:2])


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_a_copy_multiplies_its_own_weight(precision):
    layer = UnifiedLinear.from_linear(nn.Linear(256, 128), precision)
    other, x = copy.deepcopy(layer), torch.randn(5, 256)
    with torch.no_grad():
        other.weight.mul_(2)
    torch.testing.assert_close(compiled(other)(x), other(x), rtol=0, atol=0)
    assert not torch.equal(compiled(other)(x), compiled(layer)(x))


def test_a_pickled_model_computes_the_same():
    model, ids = policy("fp8", "full"), torch.arange(10, 42).view(2, 16)
    model.disable_input_require_grads()  # transformers' hook cannot be pickled
    loaded = pickle.loads(pickle.dumps(model))
    for copied in (loaded, copy.deepcopy(model)):
        assert torch.equal(copied(input_ids=ids).logits, model(input_ids=ids).logits)
    restore(model)
    assert "forward" not in vars(model.model.layers[0].mlp)


@pytest.mark.parametrize("name", ["product", "input_gradient", "input_and_weight_gradient", "product_by_number"])
def test_no_operator_that_asks_a_layer_is_captured_in_a_cuda_graph(name):
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.trl_quant, name).default.tags


# A whole model


def policy(precision: str, kind: str, checkpointing: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = tiny_model().to(torch.bfloat16)
    if kind != "full":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    unify(model, precision, merged=kind == "merged")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()  # so the first layer is like the others
    return model.train()


def update(model: nn.Module, function: nn.Module) -> list[torch.Tensor]:
    ids = torch.arange(10, 42).view(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = function(input_ids=ids, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    found = [logits.detach(), *(p.grad for p in parameters(model))]
    for p in parameters(model):
        p.grad = None
    return found


@pytest.mark.parametrize(
    ("precision", "kind", "checkpointing"),
    rest_is_long(GRAPHS, GRAPHS[0], GRAPHS[-1]),  # an adapter, and all weights
)
def test_a_decoder_layer_is_one_graph(precision, kind, checkpointing):
    model = policy(precision, kind, checkpointing)
    right = update(model, model)
    plain, layers = copy.deepcopy(model), (model if kind == "full" else model.get_base_model()).model.layers
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert same(update(model, model), right)
    assert len(layers) > 1 and counters["stats"]["unique_graphs"] == 1
    for either in (model, plain):
        with torch.no_grad():
            for parameter in parameters(either):
                parameter.mul_(1.5)
    found = update(model, model)
    assert same(found, update(plain, plain)) and not torch.equal(found[0], right[0])


def test_layers_that_share_an_input_are_one_product():
    model = policy("fp8", "merged")
    regions = compile_regions(model, backend="aot_eager")
    calls, rooms = [], {}
    for name, room, each in (
        ("quantizers", quantizers, ["quantize_input"]),
        ("products", products, ["product", "input_gradient"]),
    ):
        counted = {function: Mock(side_effect=getattr(room, function)) for function in each}
        calls += counted.values()
        rooms[name] = SimpleNamespace(**vars(room) | counted)
    with patch.multiple(traced, **rooms):  # as operators see them
        update(model, regions)
    for call in calls:
        assert call.call_count == 4 * model.config.num_hidden_layers  # q, k and v; o; gate and up; down


@pytest.mark.parametrize("of", rest_is_long(["up_proj", "k_proj"]))
def test_a_hook_runs_around_its_own_layer(of):
    """As FSDP's, which gathers a weight: the layers before its own must not have computed with the weight already."""

    @torch._dynamo.disable
    def write(module: nn.Module, given) -> None:
        with torch.no_grad():
            module.weight.mul_(1.5)

    model = policy("fp8", "full")
    unchanged = update(model, model)
    for layer in model.model.layers:
        (hooked,) = (module for name, module in layer.named_modules() if name.endswith(of))
        hooked.register_forward_pre_hook(write)
    plain = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    right = update(plain, plain)
    assert same(update(model, model), right) and not torch.equal(right[0], unchanged[0])


@pytest.mark.long
def test_a_graph_that_ends_between_layers_with_one_input():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(UnifiedLinear.from_linear(nn.Linear(256, 128), "fp8") for _ in range(2))
            for layer in self.layers:
                layer.joint = joint

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            torch._dynamo.graph_break()
            return first - self.layers[0](x).sin() * self.layers[1](x)

    torch.manual_seed(0)
    joint = Joint([])
    model, x = Shared(), torch.randn(5, 256)
    joint.layers = list(model.layers)
    function = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        assert same(gradients(function, x, *parameters(model)), gradients(model, x, *parameters(model)))
        with torch.no_grad():
            model.layers[1].weight.mul_(0.5)
    function(x)
    assert getattr(x, WAITING) == []


def test_checkpointing_inside_of_a_graph():
    """As in transformers 5.23. There the compiler refuses writes to objects from outside."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(UnifiedLinear.from_linear(nn.Linear(256, 128), "fp8") for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            return self.layers[0](x) * self.layers[1](x)

    torch.manual_seed(0)
    model, x = Shared(), torch.randn(5, 256)
    joint = Joint(model.layers)
    for layer in model.layers:
        layer.joint = joint
    function = torch.compile(partial(checkpoint, model, use_reentrant=False), backend="aot_eager", fullgraph=True)
    assert same(gradients(function, x, *parameters(model)), gradients(model, x, *parameters(model)))


@pytest.mark.isa
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="Inductor 2.11 does not keep them on a CPU")
def test_inductor_keeps_the_bits_if_it_keeps_the_roundings():
    model, ids = policy("fp8", "full"), torch.arange(10, 42).view(2, 16)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        for keeps in (True, False):
            model.model.layers[0].compile(fullgraph=True, options={"emulate_precision_casts": keeps})
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain) is keeps
            torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "kind", "of", "layers"),
    [
        # An adapter and all weights, compiled in one of the two ways, each with two layers. A precision is in one run:
        # `test_a_decoder_layer_is_one_graph` has it with an adapter and with all weights
        ("int8", "full", "each layer", 2),
        ("fp8", "lora", "model", 2),
        ("nvfp4", "full", "model", 1),
    ],
)
@pytest.mark.long
def test_a_run_equals_one_without_the_compiler(tmp_path, precision, kind, of, layers):
    room, products_of_a_layer = (traced, 4) if precision in FLOWS else (weight_only, 7)
    function, expected = room.codes_of, products_of_a_layer * layers

    def run(compiles: bool) -> dict[str, torch.Tensor]:
        options = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiles and of == "model" else {}
        options |= {"pack_sequences": False}  # on a CPU, attention in packed rows loops over the segments
        if of == "model":  # prompts of one length: for another one a whole model is compiled again, which takes long
            options |= {"train_dataset": dataset(8).select([2, 6])}
        model = tiny_model(seed=3, num_hidden_layers=layers)
        trainer = trainer_of(tmp_path, precision, model, peft=kind == "lora", max_steps=2, **options)
        for module in trainer.model.modules():
            if compiles and of == "each layer" and isinstance(module, GradientCheckpointingLayer):
                module.compile(backend="aot_eager")
        calls = []
        with patch.object(room, "codes_of", lambda *args: calls.append(args) or function(*args)):
            trainer.train()
        assert len(calls) >= 2 * expected if compiles else not calls
        return {name.replace("_orig_mod.", ""): p.detach() for name, p in trainer.model.named_parameters()}

    plain, found = run(compiles=False), run(compiles=True)
    assert all(torch.equal(value, plain[name]) for name, value in found.items()) and found.keys() == plain.keys()


# An adapter adds the same operations to a graph in each precision, so one precision is enough
@pytest.mark.long
@pytest.mark.parametrize(("precision", "kind"), [("int8", "full"), ("fp8_block", "merged")])
def test_rows_of_other_lengths_are_not_compiled_again(precision, kind):
    model = policy(precision, kind)
    for layer in (model if kind == "full" else model.get_base_model()).model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for length in (30, 150, 170, 190):
        logits = model(input_ids=torch.arange(10, 10 + length).unsqueeze(0), use_cache=False).logits
        logits.float().log_softmax(-1)[..., 3].sum().backward()
    assert counters["stats"]["unique_graphs"] == 2  # of the first length, and of any other
