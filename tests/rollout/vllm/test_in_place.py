"""Syncs that write into vLLM's parameters leave what vLLM's own reload leaves, bit for bit."""

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel as Kernel
from vllm_engines import engine, greedy, policy, update

from trl_quant.rollout.vllm import in_place, worker
from trl_quant.rollout.vllm.base import VLLMBase


pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """A kernel that holds codes as CUTLASS does, in place of oneDNN's, which packs them."""

    def process_weights_after_loading(self, layer):
        layer.weight = torch.nn.Parameter(layer.weight.t().data, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data, requires_grad=False)

    def apply_weights(self, layer, x, bias=None):
        y = x.float() @ (layer.weight.float() * layer.weight_scale.float().view(1, -1))
        return (y if bias is None else y + bias.float()).to(x.dtype)

    monkeypatch.setattr(Kernel, "process_weights_after_loading", process_weights_after_loading)
    monkeypatch.setattr(Kernel, "apply_weights", apply_weights)
    monkeypatch.setattr(in_place, "AS_STORED", ("CPUInt8",))
    monkeypatch.setattr(VLLMBase, "on_cpu", False)


def pack_head(model) -> None:
    """On a CPU an untied head keeps a packed copy, on a GPU none."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def held(sampler) -> dict[str, torch.Tensor]:
    (found,) = sampler.llm.apply_model(lambda m: {n: p.detach().clone() for n, p in m.named_parameters()})
    return found


@pytest.mark.parametrize(
    ("family", "tied", "with_lora"),
    [("qwen2", False, False), ("qwen2", True, True), ("llama", False, True), ("phi3", False, False)],
)
def test_as_a_reload(tmp_path, monkeypatch, family, tied, with_lora):
    model = policy(tmp_path / "policy", with_lora, family=family, tied=tied)
    sampler = engine(model, "int8")
    sampler.sync()
    views, metrics = sampler.destinations, sampler.sync_metrics
    assert views and "weights/normalized_update" not in metrics
    reloads = []
    reload = worker.reload
    monkeypatch.setattr(worker, "reload", lambda *args, **kwargs: reloads.append(1) or reload(*args, **kwargs))
    before, pointers = held(sampler), {name: view.data_ptr() for name, view in views.items()}
    update(model, seed=0)
    sampler.sync()
    assert sampler.sync_metrics.keys() > metrics.keys() and sampler.sync_metrics["weights/normalized_update"] > 0
    assert not reloads
    sampler.llm.apply_model(pack_head)
    written, sampled = held(sampler), greedy(sampler.llm)

    sampler.destinations, sampler.is_current = None, False
    sampler.llm.apply_model(lambda m: [p.data.zero_() for p in m.parameters() if p.numel() > 1])
    sampler.sync()
    assert {name: view.data_ptr() for name, view in sampler.destinations.items()} == pointers
    reloaded = held(sampler)
    assert reloads
    assert written.keys() == reloaded.keys()
    assert all(torch.equal(value, reloaded[name]) for name, value in written.items())
    assert any(not torch.equal(value, before[name]) for name, value in written.items())
    assert sampled == greedy(sampler.llm)


def test_layouts_that_are_reloaded(tmp_path, monkeypatch):
    """Kernels that may store codes otherwise, and models that hold a weight which the policy does not send."""
    model = policy(tmp_path / "policy", family="qwen2", tied=False)
    sampler = engine(model, "int8")
    sampler.sync()
    sent = dict(sampler.stream(whole=True))

    def find(tensors):
        names = [*sampler.weights.parameters(), "model.gone.weight"]
        return sampler.llm.apply_model(lambda m: in_place.destinations(m, tensors.items(), names))[0]

    assert find(sent).keys() == sent.keys() == sampler.destinations.keys()
    norm = "model.norm.weight"
    assert find({name: tensor for name, tensor in sent.items() if name != norm}) == {}
    assert find(sent | {norm: torch.ones(1)}) == {}
    assert find(sent | {"model.gone.weight": torch.ones(1)}) == {}
    with pytest.raises(RuntimeError, match="streamed no model"):
        in_place.write(sampler.destinations, [(n, t) for n, t in sent.items() if n != norm])
    with pytest.raises(RuntimeError, match=r"streamed no model.layers.1.mlp.down_proj"):
        groups = {"model.layers.1.mlp"}
        some = sampler.stream(groups, whole=True)
        in_place.write(sampler.destinations, [(n, t) for n, t in some if ".down_proj" not in n], groups)
    with pytest.raises(RuntimeError, match="did not stream before"):
        in_place.write(sampler.destinations, sent.items(), {"model.layers.1.mlp"})
    with pytest.raises(RuntimeError, match="did not stream before"):
        in_place.write({}, sampler.stream())
    global_scale = "model.layers.0.self_attn.q_proj.weight_global_scale"
    sampler.llm.apply_model(  # as Marlin's layers have it, of q, k and v
        lambda m: setattr(m.model.layers[0].self_attn.qkv_proj, "weight_global_scale", torch.tensor(0.5))
    )
    assert find(sent | {global_scale: torch.tensor([0.5])}) == {}
    update(model, seed=0)
    assert find(dict(sampler.stream())) == {}
    monkeypatch.setattr(in_place, "AS_STORED", ("Cutlass",))
    assert find(sent) == {}


def test_codes_are_compared_bit_for_bit():
    codes = torch.tensor([[0.0, -0.0, 448.0, -1.5]]).to(torch.float8_e4m3fn)
    assert in_place.holds(codes, codes.clone())
    assert not in_place.holds(codes, codes.float().abs().to(codes.dtype))
    assert not in_place.holds(codes, codes[:, :1])
    scale = torch.tensor([[0.5], [0.25]])
    assert in_place.holds(scale, scale.bfloat16())
    assert not in_place.holds(scale + 2**-20, scale.bfloat16())


def test_a_kernel_that_orders_rows_otherwise_is_reloaded(tmp_path, monkeypatch):
    """Its memory has the right shape, and another order than the tensors of a sync."""
    prepare = Kernel.process_weights_after_loading

    def shuffled(self, layer):
        prepare(self, layer)
        layer.weight.data = layer.weight.data.roll(1, 1)

    monkeypatch.setattr(Kernel, "process_weights_after_loading", shuffled)
    model = policy(tmp_path / "policy", family="qwen2", tied=False)
    sampler = engine(model, "int8")
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync()
        assert sampler.destinations == {}
