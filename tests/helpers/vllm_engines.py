"""Real vLLM engines for the tests, in this process, with a tiny model: about a second each once vLLM is imported."""

import copy
import functools
import os
from pathlib import Path

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
GPU = torch.cuda.is_available()
FP8_CACHE = GPU or torch.cpu._is_avx512_supported()  # whether vLLM keeps keys and values in FP8 here
if not GPU:
    torch._dynamo.config.disable = True

from accelerate import Accelerator
from frozen_layers import layers
from peft import get_peft_model
from tiny import MIXTURES, save_tiny, tiny_tokenizer
from training import lora, metrics, parameters
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from trl_quant.config.checks.rule import refusal
from trl_quant.models.families import GATES, HEAD, ROUTERS, number_of_experts
from trl_quant.models.linears import unquantized_linears
from trl_quant.precisions import PRECISIONS
from trl_quant.rollout import VLLMEngine
from trl_quant.rollout.verify.rows import check_sequences
from trl_quant.rollout.verify.self_check import Reference, mean_difference
from trl_quant.rollout.vllm.attention import check_cpu_kernels
from trl_quant.rollout.vllm.own_class import keeping_classes, take_subclasses
from trl_quant.rollout.vllm.support import check_experts_here
from trl_quant.storage.layout import quantize_checkpoint


# Each engine on a CPU looks through all modules for Triton kernels to replace, half a second; the first has found them
if replace := getattr(current_platform, "register_triton_kernel_overrides", None):
    current_platform.register_triton_kernel_overrides = functools.cache(replace)
# What vLLM learns about an architecture it learns in a process of its own, which imports vLLM again
registry._run_in_subprocess = lambda inspect: inspect()

MEMORY = 0.05 if GPU else 0.2  # of the device, at most: tests on a GPU run beside each other
SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "disable_log_stats": True}
if GPU:  # captured CUDA graphs, without the minutes that torch.compile takes
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    SMALL |= {"enforce_eager": False, "compilation_config": graphs, "kv_cache_memory_bytes": 256 << 20}
# Of runs in which vLLM samples in the trainer's process
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "vllm_engine_kwargs": SMALL, "vllm_max_model_length": 512}
# Of engines that sleep: they free so much that other tests on the card, which move its free memory too, do not matter
SLEEPING = SMALL | {"kv_cache_memory_bytes": 6 << 30}
# Of the models in tests on GPUs: large enough for every kernel, on one GPU or two
GPU_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "initializer_range": 0.03,
}
# Of the mixtures: every matrix is a multiple of 128 wide and high, as block scales need
GPU_MIXTURE = {"hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 1024, "head_dim": 64}
GPU_MIXTURE |= {"num_attention_heads": 8, "num_key_value_heads": 4}
LACKS = {"mixtral": ("moe_intermediate_size", "head_dim"), "qwen2_moe": ("head_dim",)}
# Of the runs in tests on GPUs
GPU_RUN = {
    "bf16": True,
    "use_cpu": False,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 512,
    "vllm_gpu_memory_utilization": MEMORY,
}
# Of runs with a frozen base, in which steps with noise and steps without alternate with syncs and checks
NOISY_RUN = COLOCATED | {
    "vllm_max_model_length": 256,
    "noise_schedule": "exponential",
    "noise_stages": 3,
    "sync_check_steps": 2,
    "max_steps": 6,
    "learning_rate": 1e-2,
}
# two longer than vLLM's cache blocks of 128 tokens on a CPU, one shorter
PROMPTS = [[(7 * i + 3) % 250 for i in range(200)], [(i * i) % 251 for i in range(140)], [5, 6, 7]]

# Deleting an engine tears down the process group that all engines share, so all live until the end.
_alive = []


def allow_experts() -> None:
    """Gives this process the group of ranks of experts, which vLLM makes only if its first engine is a mixture."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        world = parallel_state.get_world_group()
        backend = torch.distributed.get_backend(world.device_group)
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [world.ranks], world.local_rank, backend, group_name="ep"
        )


def policy(path, with_lora: bool = False, dtype: torch.dtype = torch.bfloat16, **kwargs):
    """A tiny policy loaded from a checkpoint at `path`."""
    if kwargs.get("family") in (*MIXTURES, "qwen3_next"):
        if missing := refusal(check_experts_here, "bf16"):
            pytest.skip(missing)
        allow_experts()
    model = AutoModelForCausalLM.from_pretrained(save_tiny(path, dtype=torch.bfloat16, **kwargs), dtype=dtype)
    if not with_lora:
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(model, lora())


def mixture(path, family: str):
    """A mixture of experts on a GPU."""
    sizes = {name: size for name, size in GPU_MIXTURE.items() if name not in LACKS.get(family, ())}
    return policy(path, family=family, tied=False, **sizes).cuda()


def update(model, seed: int, size: float = 0.02) -> None:
    """Moves all trainable weights, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator).to(param), alpha=size)


def require_kernels(model) -> None:
    """Skips a test of a model for which vLLM has no kernels on this CPU; runs are refused in the same words."""
    if missing := refusal(check_cpu_kernels, model.config):
        pytest.skip(missing)


def engine(model, precision: str, processor=None, **options) -> VLLMEngine:
    require_kernels(model)
    if GPU and number_of_experts(model.config.to_dict()) > 1 and (missing := refusal(check_experts_here, precision)):
        pytest.skip(missing)
    settings = {
        "mode": "colocate",
        "max_model_length": 512,
        "max_num_seqs": 8,
        "max_completion_length": 8,
        "engine_kwargs": SMALL,
        "sync_check_steps": 0,
        "gpu_memory_utilization": MEMORY,
    }
    given = model, Accelerator(cpu=not GPU), processor or tiny_tokenizer()
    built = VLLMEngine(*given, precision=precision, **settings | options)
    _alive.append(built)
    return built


def fresh(model, precision: str, path, prepared: bool = False, device: str = "cpu", **options) -> LLM:
    """
    vLLM itself, started on a checkpoint of the policy's current weights; PEFT merges adapters. `prepared` checkpoints,
    from which engines of policies start that train in `precision`, and those of codes are quantized on `device`.
    """
    model = copy.deepcopy(model)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    elif getattr(model, "peft_config", None):  # the base of a policy with adapters
        model = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=model.dtype)
    ranks = torch.distributed.is_initialized()
    prepared = prepared or PRECISIONS[precision].travels_quantized
    quantized = Path(f"{path}-{precision}") if prepared else path
    if not ranks or torch.distributed.get_rank() == 0:
        model.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        if quantized != path and not quantized.exists():
            quantize_checkpoint(
                path, quantized, precision, [*HEAD, *unquantized_linears(model), ROUTERS, GATES], device=device
            )
    if ranks:
        torch.distributed.barrier()
    settings = {
        "quantization": None if prepared else PRECISIONS[precision].vllm.online,
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "logprobs_mode": "processed_logprobs",
        "gpu_memory_utilization": MEMORY,
        **SMALL,
        **(PRECISIONS[precision].vllm.for_experts if number_of_experts(model.config.to_dict()) > 1 else {}),
    }
    with keeping_classes(model) as changed:
        llm = LLM(str(quantized), **settings | options)
    llm.apply_model(functools.partial(take_subclasses, changed=changed))
    _alive.append(llm)
    return llm


def greedy(llm: LLM, prompts=PROMPTS, n: int = 8) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of each prompt and their log-probabilities."""
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=n, logprobs=0), use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        (list(c.token_ids), [step[token].logprob for token, step in zip(c.token_ids, c.logprobs, strict=True)])
        for c in completions
    ]


def assert_live_equals_fresh(sampler: VLLMEngine, model, precision: str, path) -> None:
    """After each of two updates the engine samples what one does that starts on the model's weights, bit for bit."""
    seen = []
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync()
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(model, precision, path / f"checkpoint-{seed}"))
    assert seen[0] != seen[1]


def one_by_one(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Same as [`greedy`], one prompt at a time, as a server also allows."""
    return [greedy(llm, [ids])[0] for ids in PROMPTS]


def served(client, n: int = 8) -> list[tuple[list[int], list[float]]]:
    """Same as [`one_by_one`], from the server behind TRL's client."""
    answers = [client.generate([ids], max_tokens=n, temperature=0.0, logprobs=0) for ids in PROMPTS]
    return [(answer["completion_ids"][0], [step[0] for step in answer["logprobs"][0]]) for answer in answers]


def score(llm: LLM, **options) -> torch.Tensor:
    """Log-probability of every token but the first of each prompt."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(prompts, scoring, use_tqdm=False, **options)
    return torch.tensor(
        [
            step[token].logprob
            for output, ids in zip(outputs, PROMPTS, strict=True)
            for token, step in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


def fp8_block_anywhere(monkeypatch) -> None:
    """On a CPU without AMX, runs vLLM's own FP8 block layer with a stand-in for the matrix product only."""
    if torch.cpu._is_amx_tile_supported():
        return
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    def apply_weights(self, layer, x, bias=None):
        scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = layer.weight.float() * scale[: layer.weight.shape[0], : layer.weight.shape[1]]
        return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)

    monkeypatch.setattr(
        CPUFp8BlockScaledMMKernel, "is_supported", classmethod(lambda cls, capability=None: (True, None))
    )
    monkeypatch.setattr(CPUFp8BlockScaledMMKernel, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(CPUFp8BlockScaledMMKernel, "apply_weights", apply_weights)
    supported = dict.fromkeys(("bf16", "int8", "fp8_block"))
    monkeypatch.setattr("trl_quant.rollout.vllm.support.supported_precisions", lambda: supported)


def set_scale(sampler: VLLMEngine, name: str, value: float, layer: int = 1) -> None:
    """Writes a scale of the KV cache of one layer."""

    def write(model):
        attention = model.get_submodule(f"model.layers.{layer}.self_attn.attn")
        held = getattr(attention, name)
        held.data.fill_(value) if isinstance(held, torch.Tensor) else setattr(attention, name, value)

    sampler.llm.apply_model(write)
    sampler.llm.reset_prefix_cache()


def unrounded(sampler: VLLMEngine) -> float:
    """How far the engine is from the self-check's reference if that does not round keys and values."""
    prompts = check_sequences(sampler.tokenizer, max(2 * sampler.limits()[0] + 32, 160))
    sequences, sampled = sampler.logps(prompts, 4)
    caches, sampler.caches = sampler.caches, {}
    try:
        return mean_difference(sampled, Reference(sampler).logps(sequences))
    finally:
        sampler.caches = caches


def keep(thing) -> None:
    """Keeps an object that holds an engine alive until the end of all tests."""
    _alive.append(thing)


def train_beside_the_base(trainer, mismatch: float) -> tuple[list[dict], set[str]]:
    """
    Trains an adapter with [`NOISY_RUN`] on a base that vLLM shares, which stays as it is. Without noise the mismatch is
    smaller than `mismatch`. Returns what was logged and the names of what moved.
    """
    base = {name: layer.dequantize() for name, layer in layers(trainer.model).items()}
    start = parameters(trainer)
    trainer.train()
    moved = {name for name, param in parameters(trainer).items() if not torch.equal(param, start[name])}
    assert base and moved == {name for name in start if ".lora_" in name}
    assert all(torch.equal(layer.dequantize(), base[name]) for name, layer in layers(trainer.model).items())
    logged = [entry for entry in metrics(trainer) if "loss" in entry]
    clean = [entry["mismatch/kl_k3"] for entry in logged if not entry["noise/sigma"]]
    noised = [entry["mismatch/kl_k3"] for entry in logged if entry["noise/sigma"]]
    assert clean and noised and max(clean) < mismatch
    trainer.check_sync()
    return logged, moved
