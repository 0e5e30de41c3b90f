"""A base frozen in FP8 or INT8 codes under an adapter beside it: products, gradients, memory and loading."""

import copy

import pytest
import torch
from frozen_layers import close
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, save_tiny, tiny_model
from torch import nn
from training import config
from transformers import AutoModelForCausalLM

from trl_quant import QuantGRPOConfig
from trl_quant.cli import main
from trl_quant.formats import quantize
from trl_quant.layers import FrozenLinear, UnifiedLinear
from trl_quant.layers.eager import below_each_other
from trl_quant.layers.joint import Joint
from trl_quant.layers.quantizers import quantize_for_both, quantize_gradient, quantize_input
from trl_quant.policy.adapters import FrozenLoraLinear, with_frozen_layers
from trl_quant.policy.frozen import FrozenBaseConfig, freeze, on_frozen_base
from trl_quant.policy.unified import unify
from trl_quant.precisions import unified_flows


every_precision = pytest.mark.parametrize("precision", unified_flows())
SIZES = (256, 128, 72)
SCALING = (2.0, 0.3, 1.7)
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}


class Group(nn.Module):
    """Layers of one input; those in `adapted` have an adapter, each with another rank and scaling."""

    def __init__(self, precision: str, adapted=(0, 1, 2), joined: bool = True, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        plain = [nn.Linear(384, size, bias=i != 1).to(dtype) for i, size in enumerate(SIZES)]
        self.weights = [layer.weight.detach().clone() for layer in plain]
        for i, layer in enumerate(plain):
            setattr(self, f"l{i}", FrozenLinear.from_linear(layer, precision))
        names = [f"l{i}" for i in adapted]
        if names:
            config = LoraConfig(r=4, target_modules=names, init_lora_weights=False)
            config.rank_pattern = {f"l{i}": 4 + i for i in adapted}
            config.alpha_pattern = {f"l{i}": SCALING[i] * (4 + i) for i in adapted}
            get_peft_model(self, with_frozen_layers(config))
        if joined:
            group = Joint(self.layers)
            for layer in self.bases:
                layer.joint = group

    @property
    def layers(self) -> list[nn.Module]:
        return [getattr(self, f"l{i}") for i in range(3)]

    @property
    def bases(self) -> list[FrozenLinear]:
        return [getattr(layer, "base_layer", layer) for layer in self.layers]

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(2, 20, 384, generator=torch.Generator().manual_seed(1))
    return (x * torch.logspace(-2, 2, 40).view(2, 20, 1)).to(dtype).requires_grad_()


def gradients_of(outputs, *parameters):
    """dY of each output, BF16 numbers of different sizes, and the gradients of their products' sum."""
    generator = torch.Generator().manual_seed(2)
    dys = [10.0**-i * torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for i, y in enumerate(outputs)]
    return dys, torch.autograd.grad(outputs, parameters, dys)


def input_gradient(dys, codes, precision: str) -> torch.Tensor:
    """dX of the base alone, in FP64, with dY quantized as the precision has it."""
    dy, numbers = torch.cat(dys, 1), torch.cat([q.dequantize(torch.float64) for q in codes])
    if precision == "int8":
        return dy.double() @ numbers
    if precision == "fp8":
        scales, values = torch.cat([q.scale for q in codes]), torch.cat([q.values.double() for q in codes])
        return quantize_gradient(dy, scales).dequantize(torch.float64) @ values
    return quantize_for_both(dy)[0].dequantize(torch.float64) @ numbers


@every_precision
@pytest.mark.parametrize("adapted", [(0, 1, 2), (0, 2), (1,), ()], ids=str)
def test_products_of_numbers_in_fp64(precision, adapted):
    group, x = Group(precision, adapted), inputs()
    matrices = {i: (group.layers[i].lora_A.default.weight, group.layers[i].lora_B.default.weight) for i in adapted}
    trained = [matrix for pair in matrices.values() for matrix in pair]
    biases = [group.bases[0].bias, group.bases[2].bias]
    outputs = group(x)
    dys, (dx, *others) = gradients_of(outputs, x, *trained)
    flat, codes = x.detach().flatten(0, 1), [quantize(w, precision) for w in group.weights]
    dys = [dy.flatten(0, 1) for dy in dys]
    numbers, wide = quantize_input(flat, precision).dequantize(torch.float64), flat.double()
    expected = []
    for i, q in enumerate(codes):
        y = numbers @ q.dequantize(torch.float64).t()
        if i in matrices:
            a, b = (matrix.detach().double() for matrix in matrices[i])
            branch = SCALING[i] * wide @ a.t() @ b.t()
            assert branch.norm() > 0.1 * y.norm()  # of the codes' numbers it would be another
            assert (SCALING[i] * numbers @ a.t() @ b.t() - branch).norm() > 1e-3 * branch.norm()
            y = y + branch
        expected.append(y if i == 1 else y + biases[i // 2].detach().double())
    close([y.detach().flatten(0, 1).double() for y in outputs], expected, 1e-5)

    right = input_gradient(dys, codes, precision)
    of_matrices = []
    for i, pair in matrices.items():
        a, b = (matrix.detach().double() for matrix in pair)
        dh = SCALING[i] * dys[i].double() @ b
        right = right + dh @ a
        of_matrices += [dh.t() @ wide, SCALING[i] * dys[i].double().t() @ (wide @ a.t())]
    close([dx.flatten(0, 1).double(), *(g.double() for g in others)], [right, *of_matrices], 1e-5)


@every_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_is_computed_as_alone(precision, dtype):
    x = inputs(dtype)
    together, alone = (Group(precision, joined=joined, dtype=dtype)(x) for joined in (True, False))
    # In FP32 sums depend on a matrix's shape
    close([y.detach() for y in together], [y.detach() for y in alone], 1e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("change", ["A", "B", "scaling", "disabled", "codes"])
def test_a_change_between_two_layers_is_seen(change):
    """The first call computes the second layer's output, too. A change in between makes that output invalid."""
    group, fresh, x = Group("int8"), Group("int8"), inputs()
    with torch.no_grad():
        group.l0(x)
        for one in (group, fresh):
            if change == "A":
                one.l1.lora_A.default.weight.mul_(2)
            elif change == "B":
                one.l1.lora_B.default.weight.mul_(2)
            elif change == "scaling":
                one.l1.scaling["default"] = 5.0
            elif change == "disabled":
                one.l1.enable_adapters(False)
            else:
                one.l1.base_layer.weight_packed.data.neg_()
                one.l1.base_layer.weight_packed.data = one.l1.base_layer.weight_packed.data.clone()
        y = group.l1(x)
        assert torch.equal(y, fresh.l1(x)) and not torch.equal(y, Group("int8").l1(x))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_pefts(training):
    """While it draws, PEFT computes the branch of its layer; the other layers and all bases stay one product."""
    group, x = Group("int8", (0, 2)), inputs()
    group.l0.lora_dropout["default"] = nn.Dropout(0.5).train(training)
    torch.manual_seed(3)
    ours = group(x)
    torch.manual_seed(3)
    base = [layer(x) for layer in group.bases]
    inputs_of = [group.l0.lora_dropout["default"](x), x]
    branch = [
        scaling * layer.lora_B.default(layer.lora_A.default(given))
        for scaling, layer, given in zip((SCALING[0], SCALING[2]), (group.l0, group.l2), inputs_of)
    ]
    assert torch.equal(inputs_of[0], x) != training
    close(ours, [base[0] + branch[0], base[1], base[2] + branch[1]], 1e-5)


def storages(tensors) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@every_precision
def test_codes_are_held_once(precision):
    """One byte a weight: the joint product multiplies the rows that the layers hold, and nothing else is kept."""
    group = Group(precision, (0,))
    before = [layer.dequantize() for layer in group.bases]
    assert len(storages(layer.weight_packed for layer in group.bases)) == 3
    assert not any(p.dtype.itemsize > 1 and p.numel() >= 384 * 72 for p in group.parameters())
    group(inputs())
    (storage,) = storages(layer.weight_packed for layer in group.bases)
    joint = group.bases[0].joint
    assert joint.codes([layer.operand() for layer in group.layers]).values.untyped_storage().data_ptr() == storage
    assert group.bases[0].weight_packed.untyped_storage().nbytes() == 384 * sum(SIZES)
    for layer, values in zip(group.bases, before, strict=True):
        assert torch.equal(layer.dequantize(), values) and layer.dequantize().dtype == values.dtype


def test_rows_of_one_matrix_are_not_copied():
    matrix = torch.arange(40, dtype=torch.int8).view(10, 4)
    parts = matrix.split([3, 5, 2])
    assert below_each_other(parts).data_ptr() == matrix.data_ptr()
    for other in (parts[::-1], parts[:1] + parts[2:], [part.clone() for part in parts], matrix.t().split([1, 3])):
        for dtype in (torch.int8, torch.bfloat16):
            given = [part if dtype == part.dtype else part.to(dtype) for part in other]
            joined = below_each_other(given)
            assert torch.equal(joined, torch.cat(given)) and joined.data_ptr() != matrix.data_ptr()


def models(precision: str, family: str, **options):
    """The same model twice: with weights that are quantized, and on codes alone; both with one adapter, in FP32."""
    torch.manual_seed(0)
    model = tiny_model(family=family, **options)
    frozen = copy.deepcopy(model)
    freeze(frozen, precision)
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    both = []
    for one, config_ in ((model, adapter), (frozen, with_frozen_layers(adapter))):
        torch.manual_seed(1)
        both.append(get_peft_model(one, config_))
        unify(both[-1], precision, rounds_to=torch.bfloat16)
    adapter = {name: tensor for name, tensor in both[0].state_dict().items() if ".lora_" in name}
    assert adapter and not both[1].load_state_dict(adapter, strict=False).unexpected_keys
    return both


@every_precision
@pytest.mark.parametrize("family", rest_is_long(FAMILIES, "qwen3", "gemma3", "phi3"))
def test_a_model_as_on_16_bit_weights(precision, family):
    """Without the adapter the same bits; with it, products in another order flip a few codes of inputs."""
    held, frozen = models(precision, family)
    assert [type(m) for m in frozen.modules() if "Lora" in type(m).__name__].count(FrozenLoraLinear) > 0
    assert not any(isinstance(module, UnifiedLinear) for module in frozen.modules())
    tokens = torch.arange(48).view(2, 24) % 40 + 3
    with torch.no_grad():
        ours, theirs = frozen(tokens).logits, held(tokens).logits
        with frozen.disable_adapter(), held.disable_adapter():
            base, reference = frozen(tokens).logits, held(tokens).logits
    if precision != "fp8_block":
        assert torch.equal(base, reference)
    print((ours - theirs).norm() / theirs.norm(), (ours - base).norm() / theirs.norm())
    assert (ours - theirs).norm() < 5e-3 * theirs.norm()
    assert (ours - base).norm() > 0.1 * theirs.norm()


@every_precision
def test_loading_packs_each_layer(tmp_path, precision):
    """The same codes as of the loaded checkpoint, whatever type it is loaded in."""
    path = save_tiny(tmp_path / "model", family="qwen2", dtype=torch.bfloat16)
    quantization = FrozenBaseConfig(precision)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization, dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}
    assert len(layers) == 7 * model.config.num_hidden_layers
    for name, layer in layers.items():
        q = quantize(expected.get_submodule(name).weight, layer.format)
        assert torch.equal(layer.codes().values.view(torch.uint8), q.values.view(torch.uint8))
        assert torch.equal(layer.codes().scale, q.scale)
        assert not any(param.requires_grad for param in layer.parameters())


@every_precision
def test_a_prepared_checkpoint_is_held_as_it_is(tmp_path, precision):
    """Its codes and scales, which it stores as `weight` and `weight_scale`, and none of the 16-bit weights."""
    path = save_tiny(tmp_path / "model", family="qwen2", dtype=torch.bfloat16)
    main(["prepare", "--model", str(path), "--format", precision, "--output", str(tmp_path / "prepared")])
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    freeze(own, precision)
    args = config(QuantGRPOConfig, tmp_path / "out", train_precision=precision, lora_sync="adapter", **COLOCATED)
    given = {"quantization_config": None, "peft_config": LoraConfig(r=4, target_modules="all-linear")}
    given = on_frozen_base(args, model=str(tmp_path / "prepared"), **given)
    options = given["model_init_kwargs"] | {"quantization_config": given["quantization_config"]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "prepared", **options)
    expected = own.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.float(), expected[name].float()), name


def test_when_a_base_is_held_in_codes(tmp_path):
    """Only under an adapter that stays beside it, and not under FSDP, which shards 16-bit weights."""
    colocated = COLOCATED | {"train_precision": "fp8"}
    assert config(QuantGRPOConfig, tmp_path / "a", **colocated, lora_sync="adapter").spec.training.kind == "frozen"
    assert config(QuantGRPOConfig, tmp_path / "b", **colocated).spec.training.kind == "unified"
    sharded = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}
    args = config(QuantGRPOConfig, tmp_path / "c", **colocated, lora_sync="adapter", **sharded)
    assert args.spec.training.kind == "unified"
    args = config(QuantGRPOConfig, tmp_path / "d", **colocated, lora_sync="adapter")
    args.resolve_for(adapted=False)
    assert args.spec.training.kind == "unified"
