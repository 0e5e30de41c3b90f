"""Sampling without what nobody reads: the samples are vLLM's own, bit for bit, and text is made where it is needed."""

import gc
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny import save_tiny
from training import config, lora, make, metrics


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import SMALL, engine, keep, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout.sampling_options import VLLM
from trl_quant.rollout.vllm import worker
from trl_quant.rollout.vllm.sampling import BlocksWithRoom, extract_logprobs


pytestmark = pytest.mark.vllm
# Of 200, 126 and 3 tokens, each four times: past, up to and before the end of a cache block of 128
PROMPTS = [[(7 * i + 3) % 250 for i in range(n)] for n in (200, 126, 3) for _ in range(4)]


def sampled(sampler, prompts=PROMPTS, plain=False, torch_seed=5, **generation_kwargs):
    """What TRL gets for `prompts`, and vLLM's completions; `plain` as vLLM does by itself."""
    seen, generate = [], sampler.llm.generate

    def spy(inputs, sampling_params, **kwargs):
        outputs = generate(inputs, sampling_params=sampling_params, **kwargs)
        seen.append((sampling_params, outputs))
        return outputs

    torch.manual_seed(torch_seed)
    sampler.generation_kwargs = generation_kwargs
    sampler.llm.generate = spy
    own, sampler.sampling = sampler.sampling, nullcontext if plain else sampler.sampling
    try:
        sampler.llm.reset_prefix_cache()
        found = sampler.generate(prompts, None, 4)
    finally:
        sampler.llm.generate, sampler.sampling = generate, own
    return found, seen


def reasons(seen) -> list[tuple]:
    """Why completions ended."""
    outputs = [output for _, outputs in seen for output in outputs]
    return [(output.prompt_token_ids, c.finish_reason, c.stop_reason) for output in outputs for c in output.outputs]


def is_lean(seen) -> bool:
    """Whether all log-probabilities are numbers. vLLM's own are not."""
    completions = [completion for _, outputs in seen for output in outputs for completion in output.outputs]
    return all(isinstance(logp, float) for completion in completions for logp in completion.logprobs)


def cached(sampler) -> int:
    pool = sampler.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return len(pool.cached_block_hash_to_block)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    built = engine(policy(tmp_path_factory.mktemp("policy")), "int8", max_completion_length=140, max_num_seqs=16)
    built.sync_weights()
    return built


OPTIONS = {
    "nothing": {},
    "truncated": {"top_p": 0.8, "top_k": 20},
    "stop_token_ids": {"stop_token_ids": list(range(0, 250, 17))},  # completions of many lengths
    "min_tokens": {"min_tokens": 3, "ignore_eos": True},
    "ends with a block": {"max_tokens": 3, "ignore_eos": True},  # 126 and the first two are read, the third is not
    "penalties": {"frequency_penalty": 0.5},
    "greedy": {"temperature": 0},
    "seeds": {"seed": 3},  # of each request, in place of torch's random state
    "seeds, truncated": {"seed": 3, "top_p": 0.8},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_samples_are_vllms(sampler, option):
    """Ids, log-probabilities and the blocks that the prefix cache has afterwards."""
    kwargs = OPTIONS[option]
    lean, ends = sampled(sampler, **kwargs)
    blocks = cached(sampler)
    plain, plain_ends = sampled(sampler, plain=True, **kwargs)
    assert is_lean(ends) and not is_lean(plain_ends)
    assert lean == plain and len(lean[1]) == len(PROMPTS)
    assert blocks == cached(sampler) > 0
    assert reasons(ends) == reasons(plain_ends)
    if option == "stop_token_ids":
        assert len({len(ids) for ids in lean[1]}) > 3
    assert all(len(logp) == 1 and logp[0] <= 0 for logps in lean[2] for logp in logps)
    same = sampled(sampler, torch_seed=6, **kwargs)[0] == lean
    assert same == ("seed" in kwargs or "temperature" in kwargs)
    if "seed" in kwargs:
        assert sampled(sampler, **kwargs | {"seed": 4})[0] != lean


# Each in `sampling_options.VLLM`, beside what it needs to act
BIASING = {
    "top_p": {"top_p": 0.8},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "min_tokens": {"min_tokens": 60, "stop_token_ids": list(range(0, 250, 3))},
    "logit_bias": {"logit_bias": dict.fromkeys(range(0, 250, 3), 2.0)},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 250, 3))},
    "temperature": {"temperature": 0.5},
}


def distance(sampler, **generation_kwargs) -> float:
    """Mean size of log w: of what is sampled, with what the policy says at temperature 1."""
    (prompts, completions, logps, _), _ = sampled(sampler, PROMPTS[-4:], **generation_kwargs | {"max_tokens": 60})
    found = []
    for prompt, ids, row in zip(prompts, completions, logps):
        with torch.no_grad():
            scores = sampler.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        found.append(scores[range(len(ids)), ids] - torch.tensor(row)[:, 0])
    return torch.cat(found).abs().mean().item()


def test_options_that_are_said_to_bias_the_ratio_do(tmp_path):
    """
    vLLM returns the log-probability that a token was drawn with, after all of them. In BF16, since INT8 products are
    far off where a CPU has no VNNI.
    """
    sampler = engine(policy(tmp_path / "policy"), "bf16", max_completion_length=140, max_num_seqs=12)
    sampler.sync_weights()
    plain = distance(sampler)
    found = {name: distance(sampler, **options) for name, options in BIASING.items()}
    assert BIASING.keys() <= {*VLLM, "temperature"}
    assert all(value > 3 * plain for value in found.values()), (plain, found)
    for harmless in ({"seed": 3}, {"ignore_eos": True}, {"stop_token_ids": list(range(0, 250, 17))}):
        assert distance(sampler, **harmless) < 1.5 * plain


def test_a_full_cache(tmp_path):
    """With room for a few completions at a time, others are put off and start again."""
    kwargs = {"engine_kwargs": SMALL | {"num_gpu_blocks_override": 7}, "max_completion_length": 140}
    sampler = engine(policy(tmp_path / "policy"), "int8", max_num_seqs=12, **kwargs)
    manager = sampler.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    put_off, allocate = [], manager.allocate_slots

    def noting(request, tokens, **kwargs):
        blocks = allocate(request, tokens, **kwargs)
        put_off.extend([request.request_id] if blocks is None and request.num_output_tokens else [])
        return blocks

    manager.allocate_slots = noting
    short = [prompt[-3:] for prompt in PROMPTS]
    lean, _ = sampled(sampler, short)
    assert put_off
    plain, _ = sampled(sampler, short, plain=True)
    assert lean == plain


def test_with_an_adapter_and_after_a_sync(tmp_path):
    model = policy(tmp_path / "policy", with_lora=True)
    sampler = engine(model, "int8", lora_sync="adapter")
    sampler.sync_weights()
    before, _ = sampled(sampler)
    update(model, seed=0, size=0.1)
    sampler.sync_weights()
    lean, _ = sampled(sampler)
    assert lean == sampled(sampler, plain=True)[0] and lean != before


def test_every_token_has_a_block(sampler, monkeypatch):
    """Asked of vLLM's own tables, at every token; and vLLM is asked for blocks no more often than they fill up."""
    manager = sampler.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    allocate, calls = BlocksWithRoom.allocate, []
    asked = []

    def checked(self, request, num_new_tokens, **kwargs):
        monkeypatch.setattr(self, "allocate_slots", lambda *a, f=manager_allocate, **k: asked.append(1) or f(*a, **k))
        blocks = allocate(self, request, num_new_tokens, **kwargs)
        held = len(manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id])
        computed = request.num_computed_tokens + num_new_tokens
        assert held * self.block_size >= computed - kwargs.get("num_new_computed_tokens", 0)
        calls.append(1)
        return blocks

    manager_allocate = manager.allocate_slots
    monkeypatch.setattr(BlocksWithRoom, "allocate", checked)
    sampled(sampler, ignore_eos=True)
    assert len(calls) >= 140 * len(PROMPTS) > 20 * len(asked) > 0


TEXT = {
    "stop": ({"stop": ["e"]}, True),
    "structured_outputs": ({"structured_outputs": {"regex": "[ab]{3}"}}, True),
    "detokenize": ({"detokenize": True}, True),
    "no stop": ({"stop": []}, False),
    "no text": ({"detokenize": False}, False),
    "nothing": ({}, False),
    "logprobs": ({"logprobs": 3}, False),
}


@pytest.mark.parametrize("case", TEXT)
def test_text_is_made_where_it_is_needed(sampler, case):
    kwargs, needed = TEXT[case]
    found, [(params, outputs)] = sampled(sampler, PROMPTS[:4], **kwargs)
    completions = [completion for output in outputs for completion in output.outputs]
    assert params.detokenize == needed and any(completion.text for completion in completions) == needed
    assert [completion.token_ids for completion in completions] == found[1]
    if case == "stop":
        assert any(completion.stop_reason == "e" for completion in completions)
    if case == "structured_outputs":
        assert all(set(completion.text[-3:]) <= set("ab") for completion in completions)
    if case == "logprobs":
        assert max(len(logp) for logps in found[2] for logp in logps) >= 3
        assert found == sampled(sampler, PROMPTS[:4], plain=True, **kwargs)[0]


def test_a_regex_needs_text(sampler):
    sampler.structured_outputs_regex = "[ab]{3}"
    try:
        _, [(params, _)] = sampled(sampler, PROMPTS[:4])
    finally:
        sampler.structured_outputs_regex = None
    assert params.detokenize


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_as_before(sampler, monkeypatch, fails):
    """After a generation, and after one that broke."""
    core = sampler.llm.llm_engine.engine_core.engine_core
    places = [(core.scheduler.kv_cache_manager, name) for name in ("allocate_slots", "cache_blocks")]
    places += [(sampler.llm.llm_engine.output_processor, "process_outputs"), (sampler, "generation_kwargs")]
    sampler.generation_kwargs = {}
    before = [getattr(place, name) for place, name in places]
    inside = []

    def look(*args, **kwargs):
        inside.append((gc.isenabled(), [getattr(place, name) for place, name in places] == before))
        if fails:
            raise RuntimeError("device lost")
        return original(*args, **kwargs)

    original = sampler.llm.generate
    monkeypatch.setattr(sampler.llm, "generate", look)
    if fails:
        with pytest.raises(RuntimeError, match="device lost"):
            sampler.generate(PROMPTS, None, 4)
    else:
        sampler.generate(PROMPTS, None, 4)
    assert inside == [(False, False)]
    assert gc.isenabled() and [getattr(place, name) for place, name in places] == before


# What a generation that breaks off leaves behind: nothing


PLACES = {  # where it breaks off, and after how many calls
    "before a step": ("llm.llm_engine.step", 2, True),
    "after a step": ("llm.llm_engine.step", 2, False),
    "before the model": ("core.model_executor.execute_model", 0, True),  # blocks of the prompts count as cached
    "before the sampling": ("core.model_executor.sample_tokens", 3, True),
    "after the sampling": ("core.model_executor.sample_tokens", 3, False),
    "between the prompts": ("core.scheduler.add_request", 5, True),
    "as tokens arrive": ("llm.llm_engine.output_processor.process_outputs", 3, False),
}


def break_off(sampler, monkeypatch, place: str, error: type[BaseException]) -> None:
    """Has the engine raise `error` once, at that place."""
    path, calls, before = PLACES[place]
    *parts, name = path.split(".")
    owner = sampler.llm.llm_engine.engine_core.engine_core if parts[0] == "core" else sampler.llm
    for part in parts[1:]:
        owner = getattr(owner, part)
    original, seen = getattr(owner, name), []

    def breaking(*args, **kwargs):
        seen.append(1)
        if len(seen) == calls + 1 and before:
            raise error
        result = original(*args, **kwargs)
        if len(seen) == calls + 1:
            raise error
        return result

    monkeypatch.setattr(owner, name, breaking)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("place", PLACES)
def test_a_generation_that_breaks_off(sampler, monkeypatch, place, error):
    """The next one has its own completions alone, and they are those of an engine in which nothing broke."""
    sampler.generation_kwargs = {}
    others = [[(11 * i + 5) % 250 for i in range(n)] for n in (200, 126, 3) for _ in range(4)]
    torch.manual_seed(5)
    sampler.llm.reset_prefix_cache()
    whole = sampler.generate(others, None, 4)
    sampler.llm.reset_prefix_cache()
    sampler.generate(PROMPTS, None, 4)  # writes other keys and values where the next prompts come
    sampler.llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        break_off(sampler, patch, place, error)
        with pytest.raises(error):
            sampler.generate(others, None, 4)
    assert not sampler.llm.llm_engine.has_unfinished_requests()
    torch.manual_seed(5)
    assert sampler.generate(others, None, 4) == whole and len(whole[1]) == len(others)
    (held,) = sampler.llm.collective_rpc(worker.forget_step)
    assert len(held) <= len(others), "the worker still holds requests of an earlier generation"


@pytest.mark.parametrize("place", PLACES)
def test_a_self_check_that_breaks_off(sampler, monkeypatch, place):
    sampler.llm.reset_prefix_cache()
    prompts = [[(11 * i + 5) % 250 for i in range(n)] for n in (200, 126, 3)]
    sequences, logps = sampler.logps(prompts, 4)
    sampler.llm.reset_prefix_cache()
    sampler.logps(PROMPTS[::4], 4)
    sampler.llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        break_off(sampler, patch, place if place != "between the prompts" else "before a step", KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            sampler.logps(prompts, 4)
    again, scored = sampler.logps(prompts, 4)
    assert again == sequences and all(map(torch.equal, scored, logps))


@pytest.mark.parametrize("statistics", [False, True])
def test_statistics_are_of_each_token(tmp_path, monkeypatch, statistics):
    """Where vLLM keeps them, it sees every token; where not, a completion once."""
    sampler = engine(policy(tmp_path), "int8", engine_kwargs=SMALL | {"disable_log_stats": not statistics})
    processor, seen = sampler.llm.llm_engine.output_processor, []
    process = processor.process_outputs

    def spy(outputs, *args, **kwargs):
        seen.extend(len(output.new_token_ids) for output in outputs)
        return process(outputs, *args, **kwargs)

    monkeypatch.setattr(processor, "process_outputs", spy)
    found, [(params, _)] = sampled(sampler, PROMPTS[:4], ignore_eos=True)
    assert seen == ([1] * 32 if statistics else [8] * 4) and not params.detokenize
    assert found == sampled(sampler, PROMPTS[:4], plain=True, ignore_eos=True)[0]


def test_unscored_tokens():
    completion = SimpleNamespace(token_ids=[4, 5], logprobs=[math.nan, -1.0])
    assert extract_logprobs([SimpleNamespace(outputs=[completion])]) == ([[[None], [-1.0]]], [[[4], [5]]])


@pytest.mark.parametrize("lora_sync", ["merge", "adapter"])
def test_through_the_trainer(tmp_path, lora_sync):
    """Two runs with and without: the same numbers in every metric."""
    model, logs = save_tiny(tmp_path / "model", dtype=torch.bfloat16), []
    for plain in (False, True):
        settings = {"use_vllm": True, "rollout_precision": "int8", "vllm_engine_kwargs": SMALL, "max_steps": 2}
        settings |= {"vllm_max_model_length": 512, "lora_sync": lora_sync}
        torch.manual_seed(0)
        args = config(QuantGRPOConfig, tmp_path / "out", vllm_mode="colocate", **settings)
        trainer = make(QuantGRPOTrainer, args, model=model, peft_config=lora())
        keep(trainer)
        if plain:
            trainer.vllm_generation.sampling = nullcontext
        trainer.train()
        logs.append(metrics(trainer)[:2])
    assert logs[0] == logs[1] and logs[0][0]["mismatch/kl_k3"] > 0
