"""
One frozen base for trainer and vLLM on a GPU: vLLM's own kernels under CUDA graphs, asleep, with noise, and in a run on
a prepared checkpoint.

    python3 -m pytest -m gpu -s tests/gpu/test_one_copy_gpu.py

`-s` shows the memory that it saves, and how far trainer and engine are from each other.
"""

import logging
import os

import pytest
import torch
from on_gpu import LORA, logps, mismatch, sampled
from peft import LoraConfig, get_peft_model


pytest.importorskip("vllm", reason="vLLM is not installed")
from drawing import generated
from safetensors.torch import load_file
from tiny import save_tiny
from training import config, dataset, make, parameters
from vllm_engines import GPU_MODEL, GPU_RUN, PROMPTS, SLEEPING, SMALL, engine, greedy, keep, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.layers import FrozenLinear
from trl_quant.noise import noised_norms
from trl_quant.policy.adapters import with_frozen_layers
from trl_quant.policy.frozen import freeze
from trl_quant.policy.unified import unify
from trl_quant.precisions import unified_flows
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.vllm import one_copy
from trl_quant.storage.layout import quantize_checkpoint


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
FOUR_BITS = ["nvfp4", "mxfp4"]
every_precision = pytest.mark.parametrize("precision", FOUR_BITS + unified_flows())


def adapted(path, precision: str | None, family: str = "qwen2", **shape):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = policy(path, tied=family.startswith("gemma"), family=family, **GPU_MODEL | shape).cuda()
        if precision is None:
            return get_peft_model(model, LoraConfig(**LORA))
        freeze(model, precision)
        model = get_peft_model(model, with_frozen_layers(LoraConfig(**LORA)))
        if precision in unified_flows():
            unify(model, precision)
        return model


def base(model) -> dict[str, FrozenLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, FrozenLinear)}


@every_precision
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3", "phi3"])
def test_one_memory(tmp_path, precision, family, monkeypatch, caplog):
    """The engine computes what one with a base of its own does, bit for bit, and the base is what it was."""
    model = adapted(tmp_path / "policy", precision, family)
    before = {name: layer.dequantize() for name, layer in base(model).items()}
    with monkeypatch.context() as patch:
        patch.setattr(one_copy, "lent_weights", lambda: None)
        own = engine(model, precision, lora_sync="adapter")
    forward = torch.cat(logps(model, PROMPTS))  # from the start of an engine on, inputs are quantized by its rule
    torch.cuda.synchronize()
    with caplog.at_level(logging.INFO, "trl_quant"):
        shared = engine(model, precision, lora_sync="adapter", sync_check_steps=1)
    assert "hold one copy" in caplog.text
    for seed in range(2):
        update(model, seed=seed)
        for sampler in (own, shared):
            sampler.sync()
        assert greedy(shared.llm) == greedy(own.llm)
    print(f"\n{precision:>10} {family}: {shared.check_sync()}")
    parameters = dict(shared.llm.apply_model(lambda model: dict(model.named_parameters()))[0])
    theirs = {tensor.untyped_storage().data_ptr() for tensor in parameters.values()}
    for name, layer in base(model).items():
        assert torch.equal(layer.dequantize(), before[name])
        held = [layer.weight_packed, layer.weight_scale] if precision in FOUR_BITS else [layer.weight_packed]
        assert {t.untyped_storage().data_ptr() for t in held} <= theirs
    update(model, seed=1, size=-0.02)
    update(model, seed=0, size=-0.02)
    assert (torch.cat(logps(model, PROMPTS)) - forward).abs().mean() < 0.1 * forward.std()


@pytest.mark.parametrize("precision", FOUR_BITS)
def test_mismatch_like_bf16s(tmp_path, precision):
    model = adapted(tmp_path / "policy", precision)
    options = {"max_completion_length": 128, "max_num_seqs": 64}
    shared = engine(model, precision, lora_sync="adapter", **options)
    shared.sync()
    found = mismatch(shared, model)
    plain = adapted(tmp_path / "plain", None)
    bf16 = engine(plain, "bf16", **options)
    bf16.sync()
    reference = mismatch(bf16, plain)
    merged = engine(plain, precision, **options)
    merged.sync()
    apart = mismatch(merged, plain)
    print(f"\n{precision:>10}: KL of the shared base {found:.2e}, of BF16 {reference:.2e}, of Q(W + BA) {apart:.2e}")
    assert 0 < found < 1.5 * reference < 0.1 * apart


@every_precision
def test_noise_on_the_shared_base(tmp_path, precision):
    """It arrives, raises the sampler's entropy, leaves the trainer alone, and goes again."""
    model = adapted(tmp_path / "policy", precision)
    shared = engine(model, precision, lora_sync="adapter", wide_norms=True, max_completion_length=64, max_num_seqs=64)
    shared.sync()
    norms = shared.read_norms()
    clean, forward, surprise = greedy(shared.llm), torch.cat(logps(model, PROMPTS)), {}
    for sigma in (0.0, 5e-4, 1e-2, 1e-1, 0.0):
        shared.noise = RolloutNoise(sigma, seed=1, step=int(1e5 * sigma))
        prompts, completions, _ = sampled(shared)
        ours = logps(model, [prompt + ids for prompt, ids in zip(prompts, completions, strict=True)])
        surprise[sigma] = -torch.cat([own[len(p) - 1 :] for p, own in zip(prompts, ours, strict=True)]).mean().item()
        assert shared.effective_sigma == pytest.approx(sigma, rel=0.05)
        assert torch.equal(torch.cat(logps(model, PROMPTS)), forward)
    print(f"\n{precision:>10}: policy's surprise at the samples by sigma {surprise}")
    assert surprise[1e-1] > surprise[0.0]
    # A cached prefix leaves fewer tokens to the first forward: other kernels, other last bits. `clean` had none.
    shared.llm.reset_prefix_cache()
    assert greedy(shared.llm) == clean
    own = dict(model.get_base_model().named_parameters())
    names = noised_norms(shared.weights.model_type, own)
    for name, norm in zip(names, shared.read_norms().values(), strict=True):
        assert torch.equal(norm, own[name].float())
    assert all(torch.equal(norm, shared.read_norms()[name]) for name, norm in norms.items())


def memory_of_this_process() -> int:
    """Bytes of the card that this process holds; the card's free memory changes with the tests beside this one."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    # By its own name: NVML numbers all cards of the host, whatever CUDA_VISIBLE_DEVICES says
    card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    (held,) = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return held


@every_precision
def test_asleep(tmp_path, precision):
    """Sleep frees the KV cache and keeps the base, on which the trainer goes on computing."""
    model = adapted(tmp_path / "policy", precision)
    sleep = {"enable_sleep_mode": True, "sleep_level": 1, "engine_kwargs": SLEEPING}
    sampler = engine(model, precision, lora_sync="adapter", **sleep)
    sampler.sync()
    sampler.ensure_ready()
    awake = memory_of_this_process()
    seen, forward = greedy(sampler.llm), torch.cat(logps(model, PROMPTS))
    generated(sampler, [[1, 2, 3]])  # after which it sleeps
    assert awake - memory_of_this_process() > SLEEPING["kv_cache_memory_bytes"] / 2
    assert torch.equal(torch.cat(logps(model, PROMPTS)), forward)
    update(model, seed=0)
    sampler.sync()
    sampler.ensure_ready()
    assert greedy(sampler.llm) != seen
    update(model, seed=0, size=-0.02)
    sampler.sync()
    assert (torch.cat(logps(model, PROMPTS)) - forward).abs().mean() < 0.1 * forward.std()


def test_products(tmp_path):
    """What the trainer multiplies with is what vLLM's kernel multiplies with."""
    model = adapted(tmp_path / "policy", "nvfp4")
    shared = engine(model, "nvfp4", lora_sync="adapter")
    layers = shared.llm.apply_model(lambda m: {n: x for n, x in m.named_modules() if n.endswith("down_proj")})[0]
    for name, theirs in layers.items():
        ours = base(model)[f"base_model.model.{name}.base_layer"]
        x = torch.randn(77, ours.in_features, device="cuda", dtype=torch.bfloat16)
        y = theirs.scheme.apply_weights(theirs, x).float()
        exact = x.double() @ ours.dequantize(torch.float32).double().t()
        errors = [((given.double() - exact).norm() / exact.norm()).item() for given in (ours(x), y)]
        assert errors[0] < 1.1 * errors[1] < 0.01
        assert ((y - ours(x).float().roll(1, 1)).norm() / y.norm()).item() > 0.5


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, which compare where CUDA compares no FP8."""
    return tensor.detach().reshape(-1).view(torch.uint8).cpu()


@pytest.mark.parametrize("precision", unified_flows())
def test_a_run_on_a_prepared_checkpoint(tmp_path, precision, monkeypatch, caplog):
    """
    GRPO on the codes of a checkpoint in FP8 or INT8, which trainer and engine share: the adapter alone moves, and the
    engine ends as one that has loaded the checkpoint itself.
    """
    source = save_tiny(tmp_path / "model", tied=False, dtype=torch.bfloat16, family="qwen2", **GPU_MODEL)
    prepared = quantize_checkpoint(source, tmp_path / "prepared", precision)
    settings = {"train_precision": precision, "lora_sync": "adapter", "sync_check_steps": 1, "max_steps": 3}
    args = config(QuantGRPOConfig, tmp_path / "out", **GPU_RUN, vllm_engine_kwargs=SMALL, **settings)
    options = {"peft_config": LoraConfig(**LORA), "train_dataset": dataset(32)}
    with caplog.at_level(logging.INFO, "trl_quant"):
        trainer = make(QuantGRPOTrainer, args, model=str(prepared), **options)
    keep(trainer)
    assert "hold one copy" in caplog.text
    sampler, start = trainer.vllm_generation.engine, parameters(trainer)
    sampler.sync()
    first = greedy(sampler.llm)
    trainer.train()

    logs = [log for log in trainer.state.log_history if "sync_check/bound" in log]
    print(f"\n{precision:>10}: KL {[log['mismatch/kl_k3'] for log in logs]}, {trainer.check_sync()}")
    assert [log["step"] for log in logs] == [1, 2, 3]
    moved = {name for name, value in parameters(trainer).items() if not torch.equal(bits(value), bits(start[name]))}
    assert moved == {name for name in start if ".lora_" in name}
    stored, layers = load_file(prepared / "model.safetensors"), base(trainer.model)
    assert len(layers) == 7 * GPU_MODEL["num_hidden_layers"]
    for name, layer in layers.items():
        codes = stored[name.removeprefix("base_model.model.").removesuffix("base_layer") + "weight"]
        assert torch.equal(bits(layer.codes().values), bits(codes)), name
    with monkeypatch.context() as patch:
        patch.setattr(one_copy, "lent_weights", lambda: None)
        own = engine(trainer.model, precision, lora_sync="adapter")
    own.sync()
    assert greedy(sampler.llm) == greedy(own.llm) != first
