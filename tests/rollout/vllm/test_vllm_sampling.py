"""Lean sampling in vLLM leaves out what nobody reads: the samples keep their bits, and text is made where needed."""

import gc
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drawing import generated, set_options
from long_tests import rest_is_long
from tiny import save_tiny
from training import config, lora, make, metrics


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm import EngineArgs
from vllm_engines import SMALL, engine, keep, policy, update
from vllm_sampling import PLACES, PROMPTS, broken_off, cached, is_lean, plainly, reasons, sampled

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout.engine import Samples, requests_for
from trl_quant.rollout.sampling_options import VLLM
from trl_quant.rollout.vllm import worker
from trl_quant.rollout.vllm.sampling import BlocksWithRoom, left_by, read


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    built = engine(policy(tmp_path_factory.mktemp("policy")), "int8", max_completion_length=20, max_num_seqs=16)
    built.sync()
    return built


LONG = {"max_tokens": 140}  # longer than a cache block
OPTIONS = {
    "nothing": LONG,
    "truncated": {"top_p": 0.8, "top_k": 20},
    "stop_token_ids": {"stop_token_ids": list(range(0, 250, 17))},  # completions of many lengths
    "min_tokens": {"min_tokens": 3, "ignore_eos": True},
    # of 128 tokens: vLLM reads the prompt of 126 and two tokens more, not the third
    "ends with a block": {"max_tokens": 3, "ignore_eos": True},
    "penalties": {"frequency_penalty": 0.5},
    "greedy": {"temperature": 0},
    "seeds": {"seed": 3},  # each request has its own random state, in place of torch's
    "seeds, truncated": {"seed": 3, "top_p": 0.8},
}


@pytest.mark.parametrize("lean", [True, False])
def test_what_truncation_left_comes_with_its_tokens(sampler, monkeypatch, lean):
    """Here a runner is imitated that returns it, which vLLM has on GPUs alone: each token, and the one after it."""
    if not hasattr(EngineArgs, "return_sampling_mask"):
        pytest.skip("this version does not return what truncation left")
    from vllm.v1.outputs import SamplingMaskLists

    scheduler = sampler.llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def updating(*args):
        found = update(*args)
        for output in (one for outputs in found.values() for one in outputs.outputs if one.new_token_ids):
            (token,) = output.new_token_ids
            output.new_sampling_mask = SamplingMaskLists(np.array([token, (token + 1) % 320]))
        return found

    monkeypatch.setattr(scheduler, "update_from_output", updating)
    monkeypatch.setattr(sampler, "sampling", sampler.sampling if lean else plainly)
    set_options(sampler, stop_token_ids=list(range(0, 250, 17)))
    samples = sampler.draw(requests_for(PROMPTS))
    assert len({*map(len, samples.token_ids)}) > 2
    for ids, kept in zip(samples.token_ids, samples.kept, strict=True):
        assert [left.tolist() for left in kept.ids()] == [[token, (token + 1) % 320] for token in ids]
    several = SamplingMaskLists(np.array([5, 6, 7, 8, 9]), np.array([0, 2, 3, 5]))  # of three tokens in a step
    assert [left.tolist() for left in left_by(several)] == [[5, 6], [7], [8, 9]]


@pytest.mark.parametrize(
    "option", rest_is_long(OPTIONS, "truncated", "stop_token_ids", "ends with a block", "penalties", "seeds, truncated")
)
def test_the_samples_are_vllms(sampler, option):
    """Lean sampling has vLLM's ids and log-probabilities, and leaves the same blocks in the prefix cache."""
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


# Options of `sampling_options.VLLM`, each with the others that it needs to act
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
    """Mean size of log w: the policy's log-probability at temperature 1 less the sampler's."""
    (prompts, completions, logps, _), _ = sampled(sampler, PROMPTS[-4:], **generation_kwargs | {"max_tokens": 60})
    found = []
    for prompt, ids, row in zip(prompts, completions, logps):
        with torch.no_grad():
            scores = sampler.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        found.append(scores[range(len(ids)), ids] - torch.tensor(row)[:, 0])
    return torch.cat(found).abs().mean().item()


@pytest.mark.long
def test_options_that_are_said_to_bias_the_ratio_do(tmp_path):
    """
    vLLM returns the log-probability with which it drew a token, after all options. The test runs in BF16, since INT8
    products are far off on a CPU without VNNI.
    """
    sampler = engine(policy(tmp_path / "policy"), "bf16", max_completion_length=140, max_num_seqs=12)
    sampler.sync()
    plain = distance(sampler)
    found = {name: distance(sampler, **options) for name, options in BIASING.items()}
    assert BIASING.keys() <= {*VLLM, "temperature"}
    assert all(value > 3 * plain for value in found.values()), (plain, found)
    for harmless in ({"seed": 3}, {"ignore_eos": True}, {"stop_token_ids": list(range(0, 250, 17))}):
        assert distance(sampler, **harmless) < 1.5 * plain


def test_a_full_cache(tmp_path):
    """Where the cache holds a few completions at a time, vLLM puts others off and starts them again."""
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
    sampler.sync()
    before, _ = sampled(sampler)
    update(model, seed=0, size=0.1)
    sampler.sync()
    lean, _ = sampled(sampler)
    assert lean == sampled(sampler, plain=True)[0] and lean != before


def test_every_token_has_a_block(sampler, monkeypatch):
    """vLLM's own tables have a block for each token, though vLLM is asked for one only when the last is full."""
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
    sampled(sampler, ignore_eos=True, **LONG)
    assert len(calls) >= 140 * len(PROMPTS) > 20 * len(asked) > 0


TEXT = {
    "stop": ({"stop": ["e"]} | LONG, True),
    "structured_outputs": ({"structured_outputs": {"regex": "[ab]{3}"}}, True),
    "detokenize": ({"detokenize": True}, True),
    "no stop": ({"stop": []}, False),
    "no text": ({"detokenize": False}, False),
    "nothing": ({}, False),
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


def test_of_further_tokens_of_a_position_the_drawn_ones_count(sampler):
    """TRL would train on the likeliest one's log-probability. A run cannot ask for them; see `SET_BY_TRL`."""
    found, [(params, outputs)] = sampled(sampler, PROMPTS[:4], logprobs=3)
    assert params.logprobs == 3 and found == sampled(sampler, PROMPTS[:4])[0]
    likeliest = [max(step.values(), key=lambda one: one.logprob).logprob for step in outputs[0].outputs[0].logprobs]
    assert likeliest != [logp for (logp,) in found[2][0]]


def test_a_regex_needs_text(sampler):
    plain = sampler.settings
    sampler.settings = replace(plain, structured_outputs_regex="[ab]{3}")
    try:
        _, [(params, outputs)] = sampled(sampler, PROMPTS[:4])
    finally:
        sampler.settings = plain
    texts = [output.outputs[0].text for output in outputs]
    assert params.detokenize and all(set(text[-3:]) <= set("ab") for text in texts)


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_as_before(sampler, monkeypatch, fails):
    """After a generation, and after one that failed."""
    core = sampler.llm.llm_engine.engine_core.engine_core
    places = [(core.scheduler.kv_cache_manager, name) for name in ("allocate_slots", "cache_blocks")]
    places += [(sampler.llm.llm_engine.output_processor, "process_outputs"), (sampler, "settings")]
    set_options(sampler)
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
            generated(sampler, PROMPTS, copies=4)
    else:
        generated(sampler, PROMPTS, copies=4)
    assert inside == [(False, False)]
    assert gc.isenabled() and [getattr(place, name) for place, name in places] == before


# A generation that breaks off leaves nothing behind


@pytest.mark.parametrize("error", rest_is_long([KeyboardInterrupt, RuntimeError]))
@pytest.mark.parametrize("place", PLACES)
def test_a_generation_that_breaks_off(sampler, monkeypatch, place, error):
    """The next generation has no completion of it, and is that of an engine in which nothing failed."""
    set_options(sampler)
    others = [[(11 * i + 5) % 250 for i in range(n)] for n in (200, 126, 3) for _ in range(4)]
    torch.manual_seed(5)
    sampler.llm.reset_prefix_cache()
    whole = generated(sampler, others, copies=4)
    sampler.llm.reset_prefix_cache()
    generated(sampler, PROMPTS, copies=4)  # overwrites the keys and values of `others`
    sampler.llm.reset_prefix_cache()
    with broken_off(sampler, monkeypatch, place, error):
        generated(sampler, others, copies=4)
    torch.manual_seed(5)
    assert generated(sampler, others, copies=4) == whole and len(whole[1]) == len(others)
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
    place = "before a step" if place == "between the prompts" else place  # there are three prompts
    with broken_off(sampler, monkeypatch, place, KeyboardInterrupt):
        sampler.logps(prompts, 4)
    again, scored = sampler.logps(prompts, 4)
    assert again == sequences and all(map(torch.equal, scored, logps))


@pytest.mark.parametrize("statistics", [False, True])
def test_statistics_are_of_each_token(tmp_path, monkeypatch, statistics):
    """vLLM sees every token where it keeps statistics, and each completion once where it does not."""
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


def made_up(token_ids, logprobs, routed_experts=None):
    completion = SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason="stop")
    completion.routed_experts = routed_experts
    return SimpleNamespace(outputs=[completion])


def test_unscored_tokens():
    assert read([made_up([4, 5], [math.nan, -1.0])]) == Samples([[4, 5]], [[None, -1.0]])


def test_the_routing_of_experts_is_read():
    """Of up to 256 experts vLLM returns bytes, and of more two. A request that it has not computed has none."""
    for kind, largest in (np.uint8, 255), (np.uint16, 511):
        experts = np.array([[[0, largest]]], dtype=kind)
        read_experts, none = read([made_up([4], [-1.0], experts), made_up([], [])]).routing
        assert read_experts.tolist() == [[[0, largest]]] and read_experts.dtype == torch.int16 and none is None


@pytest.mark.parametrize("at_once", [False, True])
def test_the_routing_of_experts_is_not_cut(sampler, monkeypatch, at_once):
    """
    vLLM 0.31 returns it step by step, and others may at the end; a CPU's vLLM never does, so the test attaches one.
    With lean sampling each completion has what vLLM itself makes of it: a row for each token but the last.
    """
    scheduler = sampler.llm.llm_engine.engine_core.engine_core.scheduler
    update_from_output, before = scheduler.update_from_output, {}

    def attached(*args, **kwargs):
        found = update_from_output(*args, **kwargs)
        for output in (output for outputs in found.values() for output in outputs.outputs):
            request = scheduler.requests.get(output.request_id) or finished[output.request_id]
            done, tokens = before.get(output.request_id, 0), request.num_tokens - 1
            if not at_once or output.finish_reason is not None:
                places = np.arange(done, tokens) % 200
                output.routed_experts = np.broadcast_to(places[:, None, None], (tokens - done, 2, 2)).astype(np.uint8)
                before[output.request_id] = tokens
        return found

    finished, add = {}, scheduler.add_request
    monkeypatch.setattr(scheduler, "add_request", lambda one: finished.update({one.request_id: one}) or add(one))
    monkeypatch.setattr(scheduler, "update_from_output", attached)
    requests, seen = requests_for(PROMPTS), []
    for lean in (True, False):
        set_options(sampler, stop_token_ids=list(range(0, 250, 17)))
        monkeypatch.setattr(sampler, "sampling", sampler.sampling if lean else plainly)
        torch.manual_seed(5)
        sampler.llm.reset_prefix_cache()
        with sampler.generation():
            seen.append(sampler.sample(requests))
    lean, plain = seen
    assert lean.token_ids == plain.token_ids and len({*map(len, lean.token_ids)}) > 1
    for prompt, ids, *both in zip(PROMPTS, lean.token_ids, lean.routing, plain.routing, strict=True):
        assert torch.equal(*both) and both[0][:, 0, 0].tolist() == [
            place % 200 for place in range(len(prompt) + len(ids) - 1)
        ]


@pytest.mark.parametrize("lora_sync", rest_is_long(["adapter", "merge"]))
def test_through_the_trainer(tmp_path, lora_sync):
    """Two runs, with and without lean sampling, have the same numbers in every metric."""
    model, logs = save_tiny(tmp_path / "model", dtype=torch.bfloat16), []
    for plain in (False, True):
        settings = {"use_vllm": True, "rollout_precision": "int8", "vllm_engine_kwargs": SMALL, "max_steps": 2}
        settings |= {"vllm_max_model_length": 512, "lora_sync": lora_sync}
        torch.manual_seed(0)
        args = config(QuantGRPOConfig, tmp_path / "out", vllm_mode="colocate", **settings)
        trainer = make(QuantGRPOTrainer, args, model=model, peft_config=lora())
        keep(trainer)
        if plain:
            trainer.vllm_generation.engine.sampling = plainly
        trainer.train()
        logs.append(metrics(trainer)[:2])
    assert logs[0] == logs[1] and logs[0][0]["mismatch/kl_k3"] > 0
