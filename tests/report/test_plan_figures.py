"""A plan's memory, against what was measured."""

import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from figures import H200, MEMORY, RESULTS, cells_of, read
from long_tests import rest_is_long
from pages import ROOT
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel

from trl_quant import DiffusionGRPOConfig, QuantGRPOConfig, QuantRLOOConfig
from trl_quant.report.memory import Shape, estimate, has_prompts_once
from trl_quant.rollout.embedded.diffusion import Schedule, denoise
from trl_quant.storage.source import skeleton, skeleton_of


sys.path.append(str(ROOT / "benchmarks"))
from diffusion import SHAPES as DIFFUSION_SHAPES
from engines import SHAPES, adapter, model_directory
from raw_results import read_results


CARDS = {"H200": 143_771 << 20, "H100": 81_559 << 20}  # bytes, as nvidia-smi tells them
PROMPT = 256  # tokens, in every benchmark
WITHIN = 0.10
GEMMA2_9B = {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16}
GEMMA2_9B |= {"num_key_value_heads": 8, "head_dim": 256}


@pytest.fixture(scope="module")
def policies() -> dict[str, PreTrainedModel]:
    """The benchmarks' models, and two that cannot pack, without weights."""
    found = {
        size: skeleton_of(Path(model_directory(size))) for size in ("3b", "7b", "14b", "32b", "70b", "30b-a3b", "9b")
    }
    found["gemma2"] = skeleton(Gemma2Config(**GEMMA2_9B), False)
    found["dropout"] = skeleton(LlamaConfig(attention_dropout=0.1), False)
    return found


@pytest.fixture(scope="module")
def shapes(policies) -> dict[tuple[str, int], Shape]:
    def of(size: str, rank: int) -> Shape:
        return Shape.of(policies[size].config, adapter(policies[size], rank) if rank else None)

    return {(size, 32): of(size, 32) for size in policies} | {("7b", 0): of("7b", 0)}


@pytest.fixture
def estimated(shapes, policies, tmp_path):
    """Bytes that torch holds while it trains, by the benchmark's settings."""

    def of(size: str, rank: int = 32, card: str = "H200", kind: type = QuantGRPOConfig, **settings):
        args = kind(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **settings)
        args.resolve_for(adapted=rank > 0)
        once = has_prompts_once(args, policies[size], None)
        return estimate(args, shapes[size, rank], torch.bfloat16, PROMPT, CARDS[card], once)

    return of


def held(memory) -> int:
    return sum(memory.held.values())


def while_training(memory) -> int:
    return held(memory) + sum(memory.training.values())


def near(estimate: int, figure: int) -> bool:
    print(f"estimated {estimate / 1e9:.2f} GB, measured {figure / 1e9:.2f} GB: {estimate / figure - 1:+.1%}")
    return abs(estimate / figure - 1) <= WITHIN


# Memory


def shape_counts(size: str) -> tuple[int, int]:
    """Parameters of Qwen2.5's linear layers, and the rest, counted by hand."""
    s = SHAPES[size]
    hidden, wide, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
    pairs = hidden // s["heads"] * s["kv_heads"]
    linear = layers * (2 * hidden * hidden + 2 * hidden * pairs + 3 * hidden * wide)
    return linear, 2 * 152064 * hidden + layers * (hidden + 2 * pairs + 2 * hidden) + hidden


@pytest.mark.parametrize("size", rest_is_long(["7b", "3b", "70b"]))
def test_a_models_parameters_are_counted(shapes, size):
    shape, sizes = shapes[size, 32], SHAPES[size]
    assert (shape.linear, shape.other) == shape_counts(size)
    ends = 6 * sizes["hidden_size"] + 2 * sizes["hidden_size"] // sizes["heads"] * sizes["kv_heads"]
    ends += 3 * (sizes["hidden_size"] + sizes["intermediate_size"])
    assert shape.adapter == 32 * ends * sizes["num_hidden_layers"]
    assert (shape.wide, shape.hidden) == (sizes["intermediate_size"], sizes["hidden_size"])


@pytest.mark.parametrize("size", ["32b", "70b"])
def test_memory_of_whole_steps_on_a_frozen_base(shapes, estimated, size):
    """
    Every figure of `benchmarks/memory.py`, but for what torch reserved before the first step: it kept blocks that it
    had freed, up to the cap of the run, which no model's shape tells.
    """
    result = read(f"memory-32b-70b-{H200}")
    given, row = result["arguments"], result["results"][size]["nvfp4"]
    tokens = given["batch"] * (given["prompt"] + given["new"])
    cache = int(1.1 * tokens * 2 * shapes[size, 32].token)
    memory = estimated(
        size,
        num_generations=given["generations"],
        per_device_train_batch_size=given["micro"],
        gradient_accumulation_steps=given["batch"] // given["micro"],
        max_completion_length=given["new"],
        train_precision="nvfp4",
        is_correction=given["correction"],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_engine_kwargs={"kv_cache_memory_bytes": cache},
    )
    assert memory.peak == while_training(memory)
    before = held(memory) - memory.held["optimizer"]
    assert near(before, row["start"]["allocated"])
    for kind in ("allocated", "reserved"):
        assert near(memory.peak, row["steps"][kind])
    assert near(memory.card, row["steps"]["reserved"] + row["steps"]["beside"])
    assert not near(memory.peak - memory.held["policy"] // 4, row["steps"]["allocated"])  # the bound can fail


@pytest.mark.parametrize("name", ["3b", "7b", "14b", "32b"])
def test_memory_of_an_update(estimated, name):
    for size, kinds in read(f"update-{name}-{H200}")["results"].items():
        for kind, rows in kinds.items():
            for tokens, row in rows.items():
                sequences = int(tokens) // 2048
                ours = {} if kind in ("trl", "bf16") else {"train_precision": kind}
                memory = estimated(
                    size,
                    num_generations=max(sequences, 2),
                    per_device_train_batch_size=sequences,
                    gradient_accumulation_steps=1 if sequences > 1 else 2,
                    max_completion_length=2048 - PROMPT,
                    **ours,
                )
                assert near(while_training(memory), row["peak_bytes"]), (kind, tokens)


def runs_of_steps() -> list:
    """
    (file, arguments, size, rank, micro-batch, trainer, shape, bytes) of every step that was measured, but PPO's and
    unsloth's, whose memory is not estimated.
    """
    found = []
    for path in sorted(RESULTS.glob("step-*.json.xz")):
        content = read_results(path)
        for run in content["runs"]:
            method, _, name = run["trainer"].partition("@")[0].partition("+")[0].removesuffix("/exact").rpartition(":")
            if method == "ppo" or name.startswith("unsloth"):
                continue
            given = content["arguments"] | {"lengths": content["lengths"], "method": method} | run
            rollout, _, train = name.partition("/")
            train, _, lora_sync = train.partition("/")
            given |= {"train_precision": train or None, "lora_sync": lora_sync or None}
            for shape, result in run["results"].items():
                # The control has switched off the scoring, and not the correction's memory
                kind = "trl" if rollout.startswith("trl") else rollout
                place = (path.name, given, run["size"], given["lora"], run["micro"], kind, shape)
                found.append((*place, result["peak_bytes"]))
    return found


def estimate_of_step(estimated, run) -> int:
    _, given, size, rank, micro, kind, shape, _ = run
    completions, new = map(int, shape.partition(" ")[0].split("x"))
    if kind != "trl" and not shape.endswith(" equal"):  # packed rows hold no padding
        new = max(sum(each) for each in given["lengths"][shape]) // completions
    settings = {"optim": "adamw_torch_fused" if rank else "sgd"}
    if kind != "trl":
        settings |= {"rollout_precision": kind, "train_precision": given.get("train_precision")}
        if given.get("lora_sync") == "adapter":
            settings["lora_sync"] = "adapter"
    (card,) = (card for card in CARDS if card in run[0])
    return while_training(
        estimated(
            size,
            rank,
            card,
            QuantRLOOConfig if given.get("method") == "rloo" else QuantGRPOConfig,
            num_generations=given["generations"],
            per_device_train_batch_size=min(micro, completions),
            gradient_accumulation_steps=max(completions // micro, 1),
            max_completion_length=new,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=given["vllm_gpu_memory_utilization"],
            **settings,
        )
    )


def off(errors: list[float]) -> str:
    """How the page tells the errors of estimates, each a share of the figure."""
    return f"from {-min(errors):.1%} too low to {max(errors):.1%} too high"


def is_plain(run) -> bool:
    """Whether all completions have one length, and no row shares a prompt."""
    return run[6].endswith(" equal") and run[1].get("method") != "rloo"


@pytest.mark.parametrize("run", runs_of_steps(), ids=lambda run: f"{run[0].removesuffix('.json.xz')} {run[5]} {run[6]}")
def test_memory_of_a_step(estimated, run):
    assert near(estimate_of_step(estimated, run), run[-1])


def test_a_prompt_counts_once_in_packed_rows(estimated):
    """Where prompts are as long as completions, counting each completion's would be far too much."""
    (run,) = (run for run in runs_of_steps() if "30b-a3b-one-copy" in run[0] and run[4] == 64)
    assert near(estimate_of_step(estimated, run), run[-1])
    assert not near(estimate_of_step(partial(estimated, pack_sequences=False), run), run[-1])


SHARED = {"rollout_precision": "fp8", "num_generations": 8, "per_device_train_batch_size": 16, "bf16": True}
SHARED |= {"gradient_accumulation_steps": 1}


def attending(name: str) -> dict:
    return {"model_init_kwargs": {"attn_implementation": name}}


@pytest.mark.parametrize(
    ("size", "settings", "prompts"),
    [
        ("7b", {}, 2),
        ("7b", {"gradient_accumulation_steps": 4}, 8),
        ("7b", {"gradient_accumulation_steps": 16}, 16),  # one row of each group
        ("7b", {"per_device_train_batch_size": 12, "num_generations": 12}, 1),
        ("7b", {"rollout_precision": None}, 16),
        ("7b", {"rollout_precision": None, "pack_sequences": True}, 2),
        ("7b", {"pack_sequences": False}, 16),
        ("7b", {"neftune_noise_alpha": 5.0}, 16),
        ("7b", attending("sdpa"), 2),
        ("7b", attending("eager"), 16),
        ("7b", attending("flash_attention_2"), 16),  # packed, and each completion with its prompt
        ("30b-a3b", {}, 2),
        ("9b", {}, 16),  # the state of a hybrid cannot go on in several completions
        ("gemma2", {}, 16),
        ("dropout", {}, 16),
    ],
)
def test_prompts_of_a_micro_batch(shapes, policies, tmp_path, size, settings, prompts):
    args = QuantGRPOConfig(output_dir=tmp_path, use_cpu=True, report_to=[], **SHARED | settings)
    args.resolve_for(adapted=True)
    assert computed_prompts(args, shapes[size, 32], policies[size]) == prompts


def test_prompts_of_a_rank_that_has_parts_of_groups(shapes, policies, tmp_path):
    """Three ranks draw four completions of a prompt each, in groups of six: the second has parts of two groups."""
    args = QuantGRPOConfig(output_dir=tmp_path, use_cpu=True, report_to=[], **SHARED)
    args.resolve_for(adapted=True)
    args.per_device_train_batch_size, args.steps_per_generation, args.num_generations = 4, 1, 6
    assert computed_prompts(args, shapes["7b", 32], policies["7b"]) == 2


def computed_prompts(args, shape, policy) -> float:
    """How many times a token of the prompts counts."""
    once = has_prompts_once(args, policy, None)
    one, more = (
        estimate(args, shape, torch.bfloat16, tokens, CARDS["H200"], once).training["checkpoints"] for tokens in (0, 1)
    )
    return (more - one) / (2 * shape.hidden * shape.layers)


@pytest.mark.parametrize("start", ["whole steps with vLLM", "the same with completions that differ"])
def test_memory_of_steps_on_the_page(estimated, start):
    runs = [run for run in runs_of_steps() if is_plain(run) == start.startswith("whole")]
    assert cells_of(MEMORY, start)[1] == off([estimate_of_step(estimated, run) / run[-1] - 1 for run in runs])


def denoiser(**sizes) -> LlamaConfig:
    return LlamaConfig(is_causal=False, architectures=["LlamaForCausalLM"], **sizes)


def while_denoising(path, config: LlamaConfig, prompt: int, rows: int, rank: int = 0, **settings):
    adapter = LoraConfig(r=rank, target_modules="all-linear") if rank else None
    micro = settings.setdefault("per_device_train_batch_size", rows)
    args = DiffusionGRPOConfig(
        output_dir=path,
        use_cpu=True,
        bf16=True,
        report_to=[],
        gradient_accumulation_steps=rows // micro,
        mask_token_id=4,
        **settings,
    )
    args.resolve_for(adapted=rank > 0)
    return estimate(args, Shape.of(config, adapter), torch.bfloat16, prompt, CARDS["H100"])


@pytest.mark.long
@pytest.mark.slow
def test_memory_of_masked_diffusion_steps(tmp_path):
    errors = []
    for path in sorted(RESULTS.glob("diffusion-8b-*.json.xz")):
        found = read_results(path)
        given, config = found["arguments"], denoiser(vocab_size=128832, **DIFFUSION_SHAPES["8b"])  # the tokenizer's
        measured = [(run, *item) for run in found["runs"] for item in run["results"].items()]
        for run, shape, result in measured:
            memory = while_denoising(
                tmp_path,
                config,
                given["prompt"],
                int(shape.partition("x")[0]),
                given["lora"],
                rollout_precision=run["trainer"],
                num_generations=given["generations"],
                per_device_train_batch_size=run["micro"],
                max_completion_length=given["new"],
                beta=given["beta"],
            )
            assert near(memory.peak, result["peak_bytes"])
            errors.append(memory.peak / result["peak_bytes"] - 1)
    assert len(errors) == 9
    assert cells_of(MEMORY, "whole steps of an 8B masked diffusion model")[1] == off(errors)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operators have returned and that still live."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.sizes:
                self.sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage.data_ptr())
        self.peak = max(self.peak, sum(self.sizes.values()))
        return found


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "wide", "vocabulary"), rest_is_long([(16, 768, 8192), (16, 2048, 64), (64, 768, 64)]))
def test_memory_of_denoising(tmp_path, monkeypatch, rows, wide, vocabulary):
    """Against the tensors that live while a small model samples, whether its MLP or its logits take most."""
    sizes = {"hidden_size": 256, "intermediate_size": wide, "num_hidden_layers": 2, "num_attention_heads": 4}
    config, prompt, length, block = denoiser(vocab_size=vocabulary, **sizes), 16, 32, 8
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompts = torch.randint(5, vocabulary, (rows, prompt))
    live = Live()
    live.sizes |= {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}
    with live:
        denoise(model, prompts, torch.ones_like(prompts), Schedule(length, block, block, 1.0), 4, [3])
    settings = {"rollout_precision": "bf16", "max_completion_length": length, "block_length": block}
    found = while_denoising(tmp_path, config, prompt, rows, num_generations=rows, **settings)
    assert found.sampling["denoising"] == pytest.approx(live.peak, rel=0.02)
    # A generation of any size is denoised in parts
    monkeypatch.setattr("trl_quant.report.memory.TOKENS_AT_ONCE", rows // 4 * (prompt + length))
    parts = while_denoising(tmp_path, config, prompt, rows, num_generations=rows, **settings)
    assert parts.sampling["denoising"] == found.sampling["denoising"] // 4


def test_parts_follow_the_settings(shapes, tmp_path):
    """Each part is what the settings say, by hand, in FP32 and BF16, and comes and goes with them."""

    def parts(rank: int = 32, dtype=torch.bfloat16, **settings) -> dict[str, int]:
        batch = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 44}
        args = QuantGRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **batch | settings)
        memory = estimate(args, shapes["7b", rank], dtype, 20, 80 * 10**9)
        return memory.held | memory.training | memory.sampling

    shape = shapes["7b", 32]
    full, adapted = parts(rank=0, dtype=torch.float32), parts()
    assert full["policy"] == full["gradients"] == full["optimizer"] // 2 == 4 * shape.parameters
    assert adapted["policy"] == 2 * shape.parameters and adapted["adapter"] == 4 * shape.adapter
    assert adapted["optimizer"] == 2 * adapted["gradients"] == 8 * shape.adapter
    assert "reference" not in parts(rank=0) and "reference" not in parts(beta=0.1)
    assert parts(rank=0, beta=0.1)["reference"] == 2 * shape.parameters
    assert parts(rank=0, optim="adafactor")["optimizer"] == 0
    assert parts(rank=0, optim="adamw_bnb_8bit")["optimizer"] == 2 * shape.parameters

    assert adapted["engine"] == 0 and adapted["cache"] == 8 * 64 * 2 * shape.token // 4
    assert parts(rollout_precision="int8")["engine"] == 2 * shape.parameters
    assert parts(rollout_precision="fp8_block")["engine"] == 4 * shape.linear + 2 * shape.other
    assert parts(train_precision="nvfp4")["engine"] == 0
    assert parts(train_precision="nvfp4")["policy"] == shape.linear * 4.5 / 8 + 2 * shape.other
    assert parts(train_precision="int8")["codes"] == shape.linear
    colocated = {"rollout_precision": "fp8", "use_vllm": True, "vllm_mode": "colocate"}
    assert parts(**colocated)["engine"] == 24 * 10**9 and parts(**colocated)["cache"] == 0
    assert parts(**colocated | {"vllm_mode": "server"})["engine"] == 0
    given = parts(**colocated, vllm_engine_kwargs={"kv_cache_memory_bytes": 10**9})
    assert given["engine"] == 10**9 + shape.linear + 2 * shape.other
    in_flight = {"rollout_precision": "int8", "rollouts_in_flight": 2.5, "max_staleness": 2}  # 3 groups of 2, not 1
    assert parts(**in_flight)["cache"] == 3 * parts(rollout_precision="int8")["cache"]
    assert parts(rank=0, optim="adamw_torch_4bit")["optimizer"] == shape.parameters
    assert parts(rank=0, optim="lion_8bit")["optimizer"] == shape.parameters
    assert parts(rank=0, optim="lion_32bit")["optimizer"] == 2 * shape.parameters
    assert parts(rank=0, optim="paged_ademamix_8bit")["optimizer"] == 0
    longer = parts(gradient_checkpointing=False)
    assert longer["activations"] > adapted["checkpoints"] + adapted["work"]


def test_a_gpu_samples_its_own_share(shapes, tmp_path, monkeypatch):
    """A generation's completions are those of all GPUs; each holds the cache of its own."""

    def sampling() -> dict[str, int]:
        batch = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 44}
        args = QuantGRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **batch)
        return estimate(args, shapes["7b", 32], torch.bfloat16, 20, 80 * 10**9).sampling

    alone = sampling()
    monkeypatch.setattr(QuantGRPOConfig, "world_size", 4)
    assert sampling() == alone and alone["cache"] > 0
