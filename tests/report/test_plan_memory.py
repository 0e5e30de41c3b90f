"""The parts of a plan's memory that a CPU can show, against the bytes that the tensors of a run take."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from embedded import engine
from tiny import HYBRIDS, MIXTURES, tiny_model, tiny_tokenizer
from torch import Tensor
from training import config, lora, make
from transformers import Blip2Processor, BlipImageProcessorPil, Qwen3MoeConfig, TrainerCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import FORMATS
from trl_quant.layers import EngineExperts, EngineLinear, UnifiedLinear, weight_only
from trl_quant.report import memory
from trl_quant.report.measured import cost
from trl_quant.report.memory import BF16_BYTES, Shape, estimate, has_prompts_once
from trl_quant.storage.source import skeleton
from trl_quant.trainers.packing import packed_rows


def taken(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind some tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.bytes = taken(p.grad for p in model.parameters() if p.grad is not None)


RUNS = {  # settings, rank of an adapter, the policy's type
    "weights": ({}, 0, torch.float32),
    "weights in 16 bits": ({}, 0, torch.bfloat16),
    "codes of weights": ({"train_precision": "int8"}, 0, torch.bfloat16),
    "adapter": ({}, 8, torch.bfloat16),
    "frozen base": ({"train_precision": "nvfp4"}, 8, torch.bfloat16),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple]:
    """Of each run: arguments, shape, the policy's type, and the bytes of its parts after a step."""
    found = {}
    for name, (settings, rank, dtype) in RUNS.items():
        adapter, gradients = lora(r=rank) if rank else None, Gradients()
        model = tiny_model(dtype=dtype, hidden_size=256, intermediate_size=512)
        shape = Shape.of(model.config, adapter)
        args = config(QuantGRPOConfig, tmp_path_factory.mktemp("run"), max_steps=1, **settings)
        trainer = make(QuantGRPOTrainer, args, model=model, peft_config=adapter, callbacks=[gradients])
        trainer.train()
        adapters = {id(p) for p in trainer.model.parameters() if p.requires_grad} if rank else set()
        own = [*trainer.model.parameters(), *trainer.model.buffers()]
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        codes = [layer.codes() for layer in trainer.model.modules() if isinstance(layer, UnifiedLinear)]
        parts = {
            "policy": taken(tensor for tensor in own if id(tensor) not in adapters),
            "gradients": gradients.bytes,
            "optimizer": taken(state for state in states if isinstance(state, Tensor)),
        }
        if adapters:
            parts["adapter"] = taken(tensor for tensor in own if id(tensor) in adapters)
        if codes:
            parts["codes"] = taken(tensor for code in codes for tensor in (code.values, code.scale))
        found[name] = (args, shape, dtype, parts)
    return found


def off(run: tuple) -> set[str]:
    """The parts of a run whose estimate is not that of its tensors, within 3%."""
    args, shape, dtype, parts = run
    found = estimate(args, shape, dtype, prompt=8, card=10**9)
    estimated = found.held | found.training
    return {part for part, size in parts.items() if abs(estimated[part] / size - 1) > 0.03}


@pytest.mark.slow
def test_each_part_is_what_its_tensors_take(runs, monkeypatch):
    """And a wrong number anywhere in the formula is found."""
    assert {name: off(run) for name, run in runs.items()} == {name: set() for name in RUNS}
    planted = (
        (memory, "FP32_BYTES", 2, {"adapter": {"adapter", "gradients", "optimizer"}}),
        (memory, "OPTIMIZERS", {"adamw": lambda size: size}, {name: {"optimizer"} for name in RUNS}),
        (FORMATS["nvfp4"], "bits", 4.0, {"frozen base": {"policy"}}),
        (FORMATS["int8"], "bits", 16.0, {"codes of weights": {"codes"}}),
    )
    for owner, name, wrong, expected in planted:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            found = {run: off(runs[run]) for run in expected}
        assert found == expected, name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_layer_states_what_it_decodes_at_a_time(tmp_path, monkeypatch, checkpointing):
    """One weight's, however many layers there are."""
    adapter, settings = lora(), {"train_precision": "nvfp4", "gradient_checkpointing": checkpointing}
    args = config(QuantGRPOConfig, tmp_path, **settings)
    args.resolve_for(adapted=True)
    shape = Shape.of(tiny_model().config, adapter)

    def peak() -> int:
        return estimate(args, shape, torch.bfloat16, prompt=8, card=10**9).peak

    assert memory.BUFFER_BYTES == weight_only.BUFFER_BYTES
    before = peak()
    monkeypatch.setattr(memory, "BUFFER_BYTES", 2 * weight_only.BUFFER_BYTES)
    assert peak() - before == weight_only.BUFFER_BYTES


# Prompts

INT8 = {"rollout_precision": "int8"}
PROMPTS = [  # family, settings of its config, settings of the run, attention, whether a prompt is computed once
    ("qwen3", {}, INT8, "sdpa", True),
    ("qwen3_moe", {}, INT8, "sdpa", True),
    ("qwen3", {}, {}, "sdpa", False),
    ("qwen3", {}, {"pack_sequences": True}, "sdpa", True),
    ("qwen3", {}, INT8 | {"pack_sequences": False}, "sdpa", False),
    ("qwen3", {}, INT8 | {"neftune_noise_alpha": 5.0}, "sdpa", False),
    ("qwen3", {}, INT8, "eager", False),
    ("qwen3", {}, INT8, "flash_attention_2", False),
    ("olmo", {"attention_dropout": 0.1}, INT8, "sdpa", False),
    ("gemma2", {}, INT8, "sdpa", False),
    ("gemma2", {"attn_logit_softcapping": None}, INT8, "sdpa", True),
    ("qwen3_5_text", {}, INT8, "sdpa", False),
]


@pytest.mark.parametrize(("family", "sizes", "settings", "attention", "once"), PROMPTS)
def test_a_prompt_counts_as_the_trainer_computes_it(tmp_path, family, sizes, settings, attention, once):
    """The plan knows no model that is loaded, and asks one without weights."""
    model = tiny_model(family, **sizes)
    policy = skeleton(deepcopy(model.config), False)
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **settings), model=model)
    model.config._attn_implementation = attention  # by its name: this machine may lack its library
    rows = packed_rows(trainer)
    assert (rows is not None and rows.keywords["shares"]) == once
    run = config(QuantGRPOConfig, tmp_path, model_init_kwargs={"attn_implementation": attention}, **settings)
    for _ in range(2):
        assert has_prompts_once(run, policy, tiny_tokenizer()) == once
    assert not has_prompts_once(run, policy, Blip2Processor(BlipImageProcessorPil(), tiny_tokenizer()))


# Mixtures of experts

QWEN3_30B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
    "architectures": ["Qwen3MoeForCausalLM"],
}


def test_the_published_numbers_of_qwen3_30b_a3b(tmp_path):
    """30.5 billion parameters, 3.3 activated, as its card says; the bytes of its copies were computed by hand."""
    shape = Shape.of(Qwen3MoeConfig(**QWEN3_30B))
    assert shape.parameters == 30_532_122_624 and shape.experts == 48 * 128 * 3 * 2048 * 768
    assert round(shape.active / 1e9, 1) == 3.4 and round((shape.active - shape.embeddings // 2) / 1e9, 1) == 3.0
    assert 2 * shape.token == 96 * 2**10
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="bf16", use_vllm=True, vllm_mode="colocate")
    sizes = {}
    for precision in ("bf16", "fp8"):
        run = args.having(rollout_precision=precision, vllm_engine_kwargs={"kv_cache_memory_bytes": 0})
        found = estimate(run, shape, torch.bfloat16, prompt=8, card=10**9)
        sizes[precision] = found.held["engine"] / 2**30
    assert found.held["policy"] / 2**30 == pytest.approx(56.9, abs=0.05)
    assert sizes == {"bf16": pytest.approx(56.9, abs=0.05), "fp8": pytest.approx(29.0, abs=0.05)}


def layers_that_compute(model, tokens: Tensor) -> int:
    """Parameters that one token meets, counted where it goes: hooks on routers tell the experts."""
    chosen, hooks = {}, []
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            place = name.removesuffix("gate")
            hooks.append(module.register_forward_hook(lambda _, i, out, at=place: chosen.update({at: out[2]})))
    model(tokens)
    for hook in hooks:
        hook.remove()
    total = 0
    for name, param in model.named_parameters():
        block = name.partition("experts.")[0]
        if param.ndim == 3:
            total += sum(param[expert].numel() for expert in set(chosen[block].flatten().tolist()))
        else:
            total += param.numel()
    return total


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixtures_sizes_are_those_of_its_tensors(family, tmp_path):
    model = tiny_model(family, dtype=torch.bfloat16, num_hidden_layers=2)
    shape = Shape.of(model.config)
    held = [param for param in model.parameters() if param.ndim == 3]
    assert shape.experts == sum(param.numel() for param in held)
    assert shape.parameters == sum(param.numel() for param in model.parameters())
    assert shape.active == layers_that_compute(model, torch.tensor([[5]])) < shape.parameters
    cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    assert 3 * shape.token == sum(x.keys.numel() + x.values.numel() for x in cache.layers)
    copy = engine(model, "int8")
    copy.sync()
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", bf16=True)
    estimated = estimate(args, shape, torch.bfloat16, prompt=8, card=10**9).held["engine"]
    modules = [m.weight for m in copy.copy.modules() if isinstance(m, EngineLinear | EngineExperts)]
    codes = [tensor for weight in modules for tensor in weight if tensor is not None]
    own = taken([*copy.copy.parameters(), *codes])
    assert estimated == pytest.approx(own, rel=0.05) and estimated > 1.2 * BF16_BYTES * shape.active


def test_the_work_of_experts_counts_those_of_a_token(tmp_path):
    """More experts of a token take more work, less than in proportion; more experts in all take none."""
    args = config(QuantGRPOConfig, tmp_path, gradient_checkpointing=False)

    def activations(**settings) -> tuple[int, int]:
        shape = Shape.of(tiny_model("qwen3_moe", moe_intermediate_size=1024, **settings).config)
        return estimate(args, shape, torch.bfloat16, prompt=8, card=10**9).training["activations"], shape.wide

    (one, wide), (two, wider), (more, same) = (
        activations(**settings) for settings in ({}, {"num_experts_per_tok": 4}, {"num_experts": 8})
    )
    assert (wide, wider, same) == (2048, 4096, 2048) and more == one and 1.2 * one < two < 2 * one


def test_a_step_of_a_dense_model_is_not_a_mixtures(tmp_path):
    """Whose parameters may be as many, and other ones compute a token."""
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="bf16", use_vllm=True, vllm_mode="colocate")
    args.resolve_for(adapted=False)
    dense = Shape.of(tiny_model().config)
    sized = replace(dense, linear=7_000_000_000, other=600_000_000)
    assert "not measured for this model" not in cost(args, sized, torch.bfloat16, True)
    mixture = replace(sized, experts=6_000_000_000, per_token=2, active=sized.parameters)
    assert "not measured for this model" in cost(args, mixture, torch.bfloat16, True)
    assert "not measured for this model" in cost(args, replace(sized, state=1), torch.bfloat16, True)


# Hybrids


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrids_cache_is_transformers(family, tmp_path):
    """The states and windows of a sequence do not grow, and only layers with attention have keys and values."""
    model = tiny_model(family, dtype=torch.bfloat16, num_hidden_layers=2)
    shape = Shape.of(model.config)

    def kept(tokens: int) -> int:
        """Bytes of one sequence's cache."""
        cache = model(torch.full((1, tokens), 5), use_cache=True).past_key_values
        found = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
        states = [getattr(layer, name, {}) for layer in cache.layers for name in ("conv_states", "recurrent_states")]
        found += [tensor for each in states for tensor in each.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in found if tensor is not None)

    short, long = kept(5), kept(12)
    assert shape.cache(1, 5, 2, 2) == short and shape.cache(1, 12, 2, 2) == long
    assert long - short == 7 * shape.token * 2 and shape.state * 4 > 0.5 * short
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", bf16=True, max_completion_length=4)
    cache = estimate(args, shape, torch.bfloat16, prompt=8, card=10**9).sampling["cache"]
    assert cache == 8 * shape.cache(1, 12, 2, 2)
