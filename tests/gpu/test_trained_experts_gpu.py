"""
Experts that train in FP8, on a GPU: torch's products of all experts in one call against the twins on a CPU and against
dense layers, and vLLM with the trainer's codes.

    python3 -m pytest -m gpu -s tests/gpu/test_trained_experts_gpu.py

`-s` shows how near the products are, and the KL of trainer and engine.
"""

import copy
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from slow_experts import DenseExperts
from tiny import MIXTURES
from torch import nn

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import quantize
from trl_quant.layers import UnifiedExperts
from trl_quant.layers.grouped import grouped_input_gradient, grouped_product, grouped_weight_gradient
from trl_quant.layers.quantizers import quantize_gradient, quantize_input
from trl_quant.policy.frozen import freeze
from trl_quant.policy.unified import unify


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
    pytestmark.append(pytest.mark.skip(reason="FP8 needs compute capability 8.9"))
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# (tokens of each expert, outputs, inputs): in one call on Hopper, empty experts among them, or one after the other
SHAPES = [
    ([300, 0, 17, 1, 64, 130, 0, 5], 1536, 1024),
    ([0, 0, 40, 0], 256, 384),
    ([7] * 128, 512, 256),
    ([33, 9, 0], 200, 304),
]
SAME, FAST = 55, 35  # dB, as in the tests of linear layers: of sums in FP32, and with 14 bits
LAYERS = 30  # dB: a last bit of an output moves a code of the layer that follows
ATTENTION = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)


def matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """On the CPU: tokens of different sizes, and outlying features."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-1, 1, rows)[:, None]
    x[:, ::37] *= 8
    return x.bfloat16()


def stack(experts: int, rows: int, cols: int) -> torch.Tensor:
    """A weight (experts, rows, cols), whose experts differ in size."""
    x = torch.randn(experts, rows, cols, generator=torch.Generator().manual_seed(1)) / 64
    return (x * 2.0 ** (torch.arange(experts) % 5 - 2)[:, None, None]).bfloat16()


def sqnr(given: torch.Tensor, right: torch.Tensor) -> float:
    given, right = given.cpu().double(), right.cpu().double()
    return (20 * torch.log10(right.norm() / (given - right).norm())).item()


def counted(monkeypatch) -> list:
    """The products of all experts in one call, as they are made."""
    calls = []
    for name in ("scaled_grouped_mm", "grouped_mm"):
        multiply = getattr(F, name)

        def counts(*args, multiply=multiply, name=name, **kwargs):
            calls.append(name)
            return multiply(*args, **kwargs)

        monkeypatch.setattr(F, name, counts)
    return calls


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_the_twins(shape, monkeypatch):
    counts, outputs, inputs = shape
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    rows, w = sum(counts), quantize(stack(len(counts), outputs, inputs), "fp8")
    q, dy = quantize_input(matrix(rows, inputs), "fp8"), matrix(rows, outputs, 3) * 1e-3
    x = q.dequantize(torch.bfloat16)
    right = {
        "Y": grouped_product(q, w, ends, torch.bfloat16),
        "dX": grouped_input_gradient(dy, w, ends),
        "dW": grouped_weight_gradient(dy.float(), x.float(), ends),
    }
    calls, ends_there = counted(monkeypatch), ends.cuda()
    given = {
        "Y": grouped_product(q.to("cuda"), w.to("cuda"), ends_there, torch.bfloat16),
        "dX": grouped_input_gradient(dy.cuda(), w.to("cuda"), ends_there),
        "dW": grouped_weight_gradient(dy.cuda(), x.cuda(), ends_there),
    }
    in_one_call = HOPPER and outputs % 16 == inputs % 16 == 0
    assert calls == (["scaled_grouped_mm"] * 2 + ["grouped_mm"] if in_one_call else [])
    for name, result in given.items():
        print(f"{shape[1:]}, {len(counts)} experts, {name}: {sqnr(result, right[name]):.0f} dB")
        assert result.dtype == torch.bfloat16 and result.shape == right[name].shape
        assert sqnr(result, right[name]) > (50 if name == "dW" else FAST), name
    reached = torch.tensor(counts) > 0
    assert (given["dW"].cpu()[~reached] == 0).all() and given["dW"].cpu()[reached].any(-1).any(-1).all()


def test_gradients_are_quantized_as_on_a_cpu():
    dy, scale = matrix(200, 768), stack(4, 768, 1).abs() + 0.01
    owner = (torch.arange(200) * 4 // 200).to(torch.int32)
    ours, twin = quantize_gradient(dy.cuda(), scale.cuda(), owner.cuda()), quantize_gradient(dy, scale, owner)
    assert torch.equal(ours.values.cpu().float(), twin.values.float()) and torch.equal(ours.scale.cpu(), twin.scale)


def experts_of(count: int, hidden: int, width: int, dtype: torch.dtype) -> nn.Module:
    module = nn.Module()
    module.config, module.num_experts, module.act_fn = SimpleNamespace(), count, nn.SiLU()
    module.gate_up_proj = nn.Parameter(stack(count, 2 * width, hidden).to("cuda", dtype))
    module.down_proj = nn.Parameter(stack(count, hidden, width).flip(0).to("cuda", dtype))
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(16, 1024, 512), (8, 304, 200)], ids=str)
def test_experts_compute_as_dense_layers(sizes, dtype, monkeypatch):
    """Outputs, and gradients of tokens, of the router's weights, and of the experts, of which one gets no token."""
    count, hidden, width = sizes
    experts = experts_of(*sizes, dtype)
    plain, dense = copy.deepcopy(experts), DenseExperts(experts)
    module = UnifiedExperts(experts, "fp8", is_silu=True)
    generator = torch.Generator().manual_seed(5)
    chosen = torch.stack([torch.randperm(count - 1, generator=generator)[:4] for _ in range(700)]).cuda()
    weights, found = torch.rand(700, 4, generator=generator).to("cuda", dtype), []
    dy, calls = matrix(700, hidden, 7).to("cuda", dtype), counted(monkeypatch)
    for layer in (module, dense):
        x, g = (tensor.to("cuda", dtype).requires_grad_() for tensor in (matrix(700, hidden), weights))
        y = layer(x, chosen, g)
        y.backward(dy)
        gradients = dense.gradients() if layer is dense else (module.gate_up_proj.grad, module.down_proj.grad)
        found.append({"y": y, "x": x.grad, "g": g.grad, "gate_up": gradients[0], "down": gradients[1]})
    in_one_call = HOPPER and dtype == torch.bfloat16
    assert calls.count("scaled_grouped_mm") == (4 if in_one_call and width % 16 == 0 else calls.count("grouped_mm") * 2)
    ours, theirs = found
    for name, right in theirs.items():
        print(f"{sizes} {dtype} {name}: {sqnr(ours[name], right):.0f} dB")
        assert sqnr(ours[name], right) > LAYERS, name
    assert (ours["gate_up"][-1] == 0).all() and (ours["down"][-1] == 0).all()
    assert 15 < sqnr(ours["y"], unquantized(plain, x, chosen, g)) < 45


@torch.no_grad()
def unquantized(experts: nn.Module, x, chosen, weights) -> torch.Tensor:
    y = torch.zeros_like(x)
    for expert in chosen.unique():
        tokens, places = torch.where(chosen == expert)
        gate, up = F.linear(x[tokens], experts.gate_up_proj[expert]).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, experts.down_proj[expert])
        y.index_add_(0, tokens, out * weights[tokens, places, None])
    return y


# vLLM


def held(sampler) -> dict[int, dict[str, torch.Tensor]]:
    """The codes of experts with which vLLM multiplies, by layer and by the policy's names."""
    from trl_quant.rollout.vllm.experts import HELD_AS, expert_layers

    (layers,) = sampler.llm.apply_model(expert_layers)
    return {index: {leaf: getattr(layer, name) for leaf, name in HELD_AS.items()} for index, layer in layers.items()}


def experts_by_layer(model) -> dict[int, UnifiedExperts]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = enumerate(base.get_decoder().layers)
    return {index: layer.mlp.experts for index, layer in layers if hasattr(layer.mlp, "experts")}


@pytest.mark.vllm
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "merge"])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_engine_multiplies_with_the_trainers_codes(family, adapted, tmp_path):
    """After each sync; and it is nearer to this trainer than to one in BF16, which chooses other experts too."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from on_gpu import mismatch
    from vllm_engines import engine, mixture, update

    model = mixture(tmp_path / "policy", family)
    if adapted:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = get_peft_model(model, ATTENTION)
    plain = copy.deepcopy(model)
    unify(model, "fp8", merged=adapted)
    sampler = engine(model, "fp8", sync_check_steps=1, max_completion_length=64, max_num_seqs=64)
    for step in range(3):
        if step:
            update(model, seed=step)
            update(plain, seed=step)
        sampler.sync()
        codes = held(sampler)
        assert codes.keys() == experts_by_layer(model).keys()
        for index, experts in experts_by_layer(model).items():
            for leaf, tensor in codes[index].items():
                assert torch.equal(tensor.view(torch.uint8), experts.codes(leaf).values.view(torch.uint8))
        sampler.check_sync()
    ours, bf16 = mismatch(sampler, model), mismatch(sampler, plain)
    print(f"\n{family} {'merge' if adapted else 'full'}: KL of this trainer {ours:.2e}, of one in BF16 {bf16:.2e}")
    assert 0 <= ours < 0.8 * bf16


@pytest.mark.vllm
@pytest.mark.parametrize("family", MIXTURES)
def test_one_copy_of_frozen_experts(family, tmp_path, caplog):
    """Trainer and engine multiply with the same memory, under an adapter that each sync brings."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from on_gpu import mismatch
    from vllm_engines import engine, mixture, update

    model = mixture(tmp_path / "policy", family)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(model, ATTENTION)
    plain, ids = copy.deepcopy(model), torch.arange(40, device="cuda")[None]
    freeze(model, "fp8")
    unify(model, "fp8", False, torch.bfloat16)
    with torch.no_grad():
        before = model(ids).logits
    with caplog.at_level("INFO", "trl_quant"):
        options = {"sync_check_steps": 1, "max_completion_length": 64, "max_num_seqs": 64}
        sampler = engine(model, "fp8", lora_sync="adapter", **options)
    assert "hold one copy" in caplog.text
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    codes = held(sampler)
    for index, experts in experts_by_layer(model).items():
        for leaf, tensor in codes[index].items():
            assert tensor.data_ptr() == getattr(experts, leaf).data_ptr()
    for step in range(2):
        update(model, seed=step)
        update(plain, seed=step)
        sampler.sync()
        sampler.check_sync()
    ours, bf16 = mismatch(sampler, model), mismatch(sampler, plain)
    print(f"\n{family}: KL of a trainer on the same copy {ours:.2e}, of one in BF16 {bf16:.2e}")
    assert 0 <= ours < 0.8 * bf16
    next(iter(codes.values()))["down_proj"].view(torch.uint8)[0].bitwise_xor_(0x80)
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, before)


@pytest.mark.vllm
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "merge"])
def test_a_run_with_replay(adapted, tmp_path):
    """Three steps with vLLM's routing: the mismatch is smaller than that of a trainer in BF16 on the same sampler."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from training import config, make, metrics
    from vllm_engines import GPU_RUN, SMALL, keep, mixture

    mixture(tmp_path / "model", "qwen3_moe")
    path, found = str(tmp_path / "model"), []
    for precision in ("fp8", None):
        settings = GPU_RUN | {"max_steps": 3, "max_completion_length": 64, "vllm_engine_kwargs": SMALL}
        settings |= {"rollout_precision": "fp8", "train_precision": precision, "gradient_checkpointing": True}
        settings |= {"router_replay": True, "is_correction": "tis"}
        args = config(QuantGRPOConfig, tmp_path / str(precision), **settings)
        trainer = make(QuantGRPOTrainer, args, model=path, peft_config=copy.deepcopy(ATTENTION) if adapted else None)
        keep(trainer)
        trainer.train()
        logs = [log for log in metrics(trainer) if "loss" in log]
        found.append(mean(log["mismatch/kl_k3"] for log in logs))
        print(f"\ntrain_precision={precision}: KL {found[-1]:.2e}, {[log.get('routing/differs') for log in logs]}")
    assert 0 <= found[0] < 0.8 * found[1]
