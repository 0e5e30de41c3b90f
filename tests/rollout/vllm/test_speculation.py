"""Speculative decoding is taken where its log-probabilities are right, and refused with numbers where they are not."""

import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from drawing import generated, set_options
from ended_early import at_least
from long_tests import rest_is_long
from safetensors.torch import load_file
from tiny import save_tiny
from training import config, make, metrics


pytest.importorskip("vllm", reason="vLLM is not installed")
from pictured import PICTURES
from speculating import DRAFTING, NGRAM, drafted_by, mend
from vllm.v1.sample import rejection_sampler
from vllm_engines import SMALL, engine, keep, policy, update
from vllm_sampling import PROMPTS, cached, drawn, is_lean, reasons, sampled

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout.engine import Request, requests_for
from trl_quant.rollout.settings import SamplingSettings
from trl_quant.rollout.verify import speculation
from trl_quant.rollout.verify.self_check import self_check
from trl_quant.rollout.verify.speculation import (
    check_speculation,
    compared,
    drawn_as,
    drawn_scores,
    random_states_kept,
    repeating_rows,
)
from trl_quant.rollout.vllm import sampling
from trl_quant.rollout.vllm.speculation import Drafts
from trl_quant.rollout.vllm.trial import Trial, build


pytestmark = pytest.mark.vllm
REFUSED = "has 'speculative_config'={'method': 'ngram'"


def speculating(path, precision="bf16", **options):
    given = {"engine_kwargs": DRAFTING, "max_completion_length": 40, "max_num_seqs": 16} | options
    built = engine(policy(path, num_hidden_layers=1), precision, **given)
    built.sync()
    return built


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    return speculating(tmp_path_factory.mktemp("policy"), sync_check_steps=50)


@pytest.fixture(scope="module")
def guessing(tmp_path_factory):
    """An engine whose drafts are samples of the policy itself, so that it accepts most of them."""
    path = tmp_path_factory.mktemp("policy")
    return speculating(path, engine_kwargs=drafted_by(path))


SETTINGS = {
    "temperature 1": {},
    "top_p": {"top_p": 0.8},
    "both": {"top_p": 0.9, "top_k": 50, "temperature": 1.3},
    "generation_kwargs": {"generation_kwargs": {"temperature": 0.8, "top_k": 40, "stop_token_ids": [3]}},
}


@pytest.fixture(params=rest_is_long(SETTINGS))
def settings(request, sampler, monkeypatch):
    monkeypatch.setattr(sampler, "settings", replace(sampler.settings, **SETTINGS[request.param]))
    return sampler.settings


# Real engines


def test_a_right_engine_passes(sampler, settings, monkeypatch):
    mend(monkeypatch)
    found = check_speculation(sampler)
    assert 0 < found["sync_check/speculation_difference"] < 0.6 * found["sync_check/speculation_bound"] < 0.1
    assert sampler.settings is settings and sampler.drafts == Drafts() and cached(sampler) == 0


@pytest.mark.long
def test_an_int8_engine_passes(tmp_path, monkeypatch):
    mend(monkeypatch)
    sampler = speculating(tmp_path, "int8")
    for updates in range(2):
        if updates:
            update(sampler.model, seed=0)
            sampler.sync()
        found = sampler.check_sync()
        assert 0 < found["sync_check/speculation_difference"] < found["sync_check/speculation_bound"]


def test_an_engine_whose_drafts_are_good_passes(guessing, monkeypatch):
    mend(monkeypatch)
    found = check_speculation(guessing)
    assert 0 < found["sync_check/speculation_difference"] < 0.6 * found["sync_check/speculation_bound"] < 0.1


def test_a_model_that_drafts_does_not_spoil_scores(guessing, monkeypatch):
    """On a GPU it runs before vLLM scores prompts, and writes over the hidden states that the scores are made of."""
    mend(monkeypatch)
    (runner,) = guessing.llm.collective_rpc(lambda worker: worker.model_runner)
    propose, drafts = runner.propose_draft_token_ids, []

    def spoil(scheduled, sampled, metadata, hidden_states, *others):
        found = propose(scheduled, sampled, metadata, hidden_states, *others)
        drafts.append(len(hidden_states))
        hidden_states.zero_()
        return found

    monkeypatch.setattr(runner, "propose_draft_token_ids", spoil)
    found = self_check(guessing)
    assert 0 < found["sync_check/logp_difference"] < found["sync_check/bound"] and drafts
    monkeypatch.setattr(sampling, "nothing_drafted", lambda llm: nullcontext())
    monkeypatch.setattr(guessing, "last_check", None)
    with pytest.raises(RuntimeError, match="corrupted: "):
        self_check(guessing)


def test_a_model_that_drafts_is_loaded_as_it_is(tmp_path, monkeypatch):
    """Not quantized, and without the policy's FP32 norms: it is another model, with heads of another size."""
    mend(monkeypatch)
    drafter = save_tiny(tmp_path / "drafter", num_hidden_layers=1, head_dim=64, dtype=torch.bfloat16)
    sampler = speculating(tmp_path / "policy", "int8", engine_kwargs=drafted_by(drafter), wide_norms=True)
    found = sampler.check_sync()
    assert 0 < found["sync_check/speculation_difference"] < found["sync_check/speculation_bound"]
    held = sampler.llm.collective_rpc(lambda worker: dict(worker.model_runner.drafter.model.named_parameters()))[0]
    assert {param.dtype for param in held.values()} == {torch.bfloat16}
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    same = [name for name, tensor in stored.items() if name in held and torch.equal(held[name], tensor)]
    assert len(same) >= 4 and "model.layers.0.self_attn.q_norm.weight" in same


def test_a_wrong_engine_that_speculates_is_told_what_else_it_may_be(sampler, monkeypatch):
    logps = sampler.logps

    def off(*given):
        sequences, found = logps(*given)
        return sequences, [each - 5 for each in found]

    monkeypatch.setattr(sampler, "logps", off)
    monkeypatch.setattr(sampler, "last_check", None)
    with pytest.raises(RuntimeError, match=r"corrupted: .*try without 'speculative_config'\. Its log-probabilities"):
        self_check(sampler)
    monkeypatch.setattr(sampler, "drafts", None)
    monkeypatch.setattr(sampler, "last_check", None)  # else it is stale, as it computes the same again
    with pytest.raises(RuntimeError, match="corrupted: ") as refused:
        self_check(sampler)
    assert "speculat" not in str(refused.value)


needs_the_fault = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM is right on GPUs")


@needs_the_fault
def test_vllm_on_a_cpu_is_refused(sampler, settings):
    """Wrong memory stands in for temperatures: NaN, values that are nats away, or an error; or vLLM has been mended."""
    with pytest.raises(RuntimeError, match=REFUSED) as refused:
        check_speculation(sampler)
    message = str(refused.value)
    print(message)
    assert message.endswith("Leave 'speculative_config' out.")
    assert ("of 512 sampled tokens" in message and "(NaN)" in message) or "vLLM failed while it sampled" in message
    assert sampler.settings is settings and sampler.drafts == Drafts()
    assert not sampler.llm.llm_engine.has_unfinished_requests()


@needs_the_fault
def test_greedy_tokens_do_not_show_it(sampler, monkeypatch):
    """So a run at temperature 0 is checked at 1."""
    greedy = replace(sampler.settings, temperature=0.0)
    monkeypatch.setattr(sampler, "settings", greedy)
    with pytest.raises(RuntimeError, match="At temperature 1, of 512"):
        check_speculation(sampler)
    monkeypatch.setattr(speculation, "drawn_as", lambda settings: replace(drawn_as(settings), temperature=0.0))
    monkeypatch.setattr(speculation, "UNLIKELY", torch.inf)  # greedy tokens are no samples
    check_speculation(sampler)


@pytest.mark.long
@needs_the_fault
def test_no_sample_before_the_check(tmp_path):
    """Also where the other self-checks are off; nor after it."""
    sampler = speculating(tmp_path, sync_check_steps=0)
    for steps in (0, 0, 50, 50):
        sampler.sync_check_steps = steps
        with pytest.raises(RuntimeError, match=REFUSED):
            sampler.draw(requests_for(PROMPTS[:2]))


def test_an_engine_that_drafts_nothing_is_refused(tmp_path, monkeypatch):
    mend(monkeypatch)
    rare = NGRAM | {"prompt_lookup_max": 100, "prompt_lookup_min": 100}
    sampler = speculating(tmp_path, engine_kwargs=SMALL | {"speculative_config": rare})
    with pytest.raises(RuntimeError, match=r"drafted no token in 8 prompts.*nothing is known"):
        sampler.check_sync()


def test_images_are_refused(sampler):
    """Those of a stream, which nobody reads before the engine starts."""
    with pytest.raises(ValueError, match="which vLLM refuses beside speculative decoding"):
        sampler.draw([Request(PROMPTS[0], PICTURES)])


def test_an_engine_with_short_rows(tmp_path, monkeypatch):
    mend(monkeypatch)
    sampler = speculating(tmp_path, max_model_length=40, max_completion_length=8)
    assert "sync_check/speculation_bound" in sampler.check_sync()


def test_when_it_runs(sampler, monkeypatch):
    """With each full self-check: after the first sync, then every `sync_check_steps` syncs. Without them, once."""
    seen = []
    monkeypatch.setattr(speculation, "check_speculation", lambda engine: seen.append(1) or {})
    monkeypatch.setattr(sampler, "settings", replace(sampler.settings, max_completion_length=1))
    for steps, expected in ((2, [1, 1, 2, 2, 3]), (0, [1, 1, 1, 1, 1])):
        seen.clear()
        monkeypatch.setattr(sampler, "sync_check_steps", steps)
        monkeypatch.setattr(sampler, "syncs_to_check", 1)
        monkeypatch.setattr(sampler, "has_checked_drafts", False)
        counts = []
        for _ in expected:
            sampler.sync()
            generated(sampler, [[1, 2, 3]])
            generated(sampler, [[1, 2, 3]])
            counts.append(len(seen))
        assert counts == expected
    seen.clear()
    monkeypatch.setattr(sampler, "sleep_level", 1)
    for quick in (False, True):
        sampler.check_sync(quick)
        assert seen == [1]


# Random states


def test_a_run_samples_as_without_the_check(sampler, monkeypatch):
    """
    The same tokens and log-probabilities follow, and the states of torch, numpy and Python are as before, also where
    vLLM draws for greedy requests, as its second model runner does.
    """
    mend(monkeypatch)
    logps = sampler.logps
    monkeypatch.setattr(sampler, "logps", lambda *args: (np.random.rand(), torch.rand(1), logps(*args))[-1])
    set_options(sampler, ignore_eos=True)
    found = []
    for checks in (False, True):
        torch.manual_seed(5)
        sampler.llm.reset_prefix_cache()
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        if checks:
            sampler.check_sync()
            assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
            assert torch.equal(torch.get_rng_state(), states[2])
        found.append(generated(sampler, PROMPTS, copies=4))
    assert found[0] == found[1] != generated(sampler, PROMPTS, copies=4)


def test_all_random_states_are_kept():
    """Also if an error ends the context. vLLM's second model runner seeds its requests from numpy."""
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(KeyError), random_states_kept(torch.device("cpu")):
        random.random(), np.random.rand(), torch.rand(1)
        raise KeyError
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


# Planted faults


def one_token_off(sampler, monkeypatch, wrong):
    """Changes the log-probability of one token that the engine returns."""
    sample = type(sampler).sample.__get__(sampler)

    def changed(requests, enough=None):
        samples = sample(requests, enough)
        samples.logps[5][40] = wrong(samples.logps[5][40])
        return samples

    monkeypatch.setattr(sampler, "sample", changed)


FAULTS = {
    "a nat more": (lambda logp: logp + 1, "0 have no log-probability (NaN), and 1 have one that is more than 0."),
    "a nat less": (lambda logp: logp - 1, "0 have no log-probability (NaN), and 1 have one that is more than 0."),
    "none": (lambda logp: None, "1 have no log-probability (NaN), and 0 have one that is more than 0."),
}


def test_one_wrong_token_is_found(sampler, monkeypatch):
    mend(monkeypatch)
    one_token_off(sampler, monkeypatch, lambda logp: logp)
    check_speculation(sampler)
    for wrong, words in FAULTS.values():
        one_token_off(sampler, monkeypatch, wrong)
        with pytest.raises(RuntimeError, match=REFUSED) as refused:
            check_speculation(sampler)
        assert f"of 512 sampled tokens {words}" in str(refused.value)


def test_wrong_bonus_tokens_are_found(guessing, monkeypatch):
    """vLLM draws the token after accepted drafts apart, and scores it apart."""
    mend(monkeypatch)
    forward = rejection_sampler.Sampler.forward

    def cooler(self, *args, predict_bonus_token=False, **kwargs):
        output = forward(self, *args, predict_bonus_token=predict_bonus_token, **kwargs)
        if predict_bonus_token:
            output.logprobs_tensors.logprobs.mul_(1.3)
        return output

    monkeypatch.setattr(rejection_sampler.Sampler, "forward", cooler)
    with pytest.raises(RuntimeError, match=r"0 have no log-probability \(NaN\), and \d+ have one that is more"):
        check_speculation(guessing)


def test_drafts_that_are_always_accepted_are_found(sampler, monkeypatch):
    """All log-probabilities are the policy's, but the tokens are not drawn from it."""
    mend(monkeypatch)

    def accepting(drafts, counts, most, cumulated, draft_probs, logits, bonus, metadata, **options):
        rows, start = torch.full((len(counts), most + 1), -1, dtype=torch.int32), 0
        for row, count, last in zip(rows, counts, bonus.flatten().tolist(), strict=True):
            row[:count], row[count] = drafts[start : start + count], last
            start += count
        return rows

    # At 0.4 and above the tokens of so small a model vary too much for 512 of them to show it each time
    monkeypatch.setattr(sampler, "settings", replace(sampler.settings, temperature=0.2))
    check_speculation(sampler)
    monkeypatch.setattr(rejection_sampler, "rejection_sample", accepting)
    with pytest.raises(RuntimeError, match=r"log-probabilities of 512 sampled tokens are the policy's, but the tokens"):
        check_speculation(sampler)


def test_compared():
    """Each bound by itself, with the differences of a pass as the unit."""
    torch.manual_seed(0)
    logps = -3 * torch.rand(8, 64)
    expected = torch.stack([logps, logps.mean().expand_as(logps), torch.ones_like(logps)], -1)
    jitter = 0.02 * torch.rand(8, 64)
    fault, found = compared(logps + 0.02, expected, jitter)
    assert fault is None and found["sync_check/speculation_difference"] == pytest.approx(0.02, abs=1e-5)
    assert found["sync_check/speculation_bound"] == pytest.approx(0.042, abs=2e-3)
    assert "differ by 0.050 nats on average" in compared(logps - 0.05, expected, jitter)[0]  # a bias of every token
    assert "512 have no log" in compared(torch.full_like(logps, torch.nan), expected, jitter)[0]
    assert "differ by nan nats" in compared(logps, expected * torch.nan, jitter * torch.nan)[0]
    surprising = torch.stack([logps, expected[..., 1] + 0.4, expected[..., 2]], -1)
    assert "but the tokens are not" in compared(logps, surprising, jitter)[0]
    assert compared(logps, torch.stack([logps, expected[..., 1] + 0.2, expected[..., 2]], -1), jitter)[0] is None


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (-1, 1.0), (7, 1.0), (0, 0.7), (30, 0.5), (1, 1.0)])
def test_scores_are_those_of_loops(top_k, top_p):
    torch.manual_seed(0)
    logits, tokens = 2 * torch.randn(40, 50), torch.randint(50, (40, 1))
    found = drawn_scores(logits, tokens, SamplingSettings(0.7, top_p, top_k))
    for row, (token,), (logp, mean, variance) in zip(logits / 0.7, tokens.tolist(), found.tolist()):
        order = row.argsort(descending=True)
        order = order[:top_k] if top_k > 0 else order
        p, kept, before = row[order].softmax(0), [], 0.0
        for i, one in enumerate(order.tolist()):
            if before < top_p:
                kept.append(one)
            before += p[i].item()
        kept = sorted({*kept, token})
        logps = row[kept].log_softmax(0)
        assert logp == pytest.approx(logps[kept.index(token)].item(), abs=1e-4)
        assert mean == pytest.approx((logps.exp() * logps).sum().item(), abs=1e-4)
        assert variance == pytest.approx((logps.exp() * logps.square()).sum().item() - mean**2, abs=1e-3)


def test_rows_repeat_pieces():
    rows = repeating_rows([list(range(100)), list(range(100, 150))], 60)
    assert [row[0] for row in rows] == [0, 24, 48, 72, 96, 120, 144, 18]
    assert all(len(row) == 60 and row[:24] == row[24:48] and row[48:] == row[:12] for row in rows)


# Lean sampling


LEAN = {
    "truncated": {"top_p": 0.8, "top_k": 20, "ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": list(range(0, 250, 17))},  # some end inside of a step
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeds": {"seed": 3, "ignore_eos": True},
}


# A model's drafts go through the same code where completions end early or have seeds
@pytest.mark.parametrize(
    ("option", "drafts"),
    rest_is_long(
        [*((option, "n-grams") for option in LEAN), ("truncated", "a model"), ("greedy", "a model")],
        *((option, "n-grams") for option in LEAN),
    ),
)
def test_lean_samples_are_vllms(sampler, guessing, monkeypatch, option, drafts):
    mend(monkeypatch)
    sampler, kwargs = guessing if drafts == "a model" else sampler, LEAN[option]
    monkeypatch.setattr(sampler, "sync_check_steps", 0)
    monkeypatch.setattr(sampler, "has_checked_drafts", True)
    sampler.drafts = Drafts()
    lean, ends = sampled(sampler, **kwargs)
    counts = replace(sampler.drafts)
    blocks = cached(sampler)
    plain, plain_ends = sampled(sampler, plain=True, **kwargs)
    assert is_lean(ends) and not is_lean(plain_ends)
    assert lean == plain and len(lean[1]) == len(PROMPTS)
    assert blocks == cached(sampler) > 0
    assert reasons(ends) == reasons(plain_ends)
    assert counts.drafted > 0 and 2 * counts.accepted == sampler.drafts.accepted
    if kwargs.get("ignore_eos") and drafts == "a model":
        assert counts.accepted > 0


def test_unfinished_completions_go_on(sampler, monkeypatch):
    mend(monkeypatch)
    monkeypatch.setattr(sampler, "sync_check_steps", 0)
    monkeypatch.setattr(sampler, "has_checked_drafts", True)
    apart = [[token + i for token in prompt] for i, prompt in enumerate(PROMPTS)]
    options = {"temperature": 0, "stop_token_ids": list(range(0, 250, 17)), "ignore_eos": True}
    whole = drawn(sampler, requests_for(apart), **options)
    early = drawn(sampler, requests_for(apart), at_least(3), **options)
    assert 3 <= sum(early.ended) < len(apart)
    rows = zip(early.token_ids, early.logps, early.ended, whole.token_ids, whole.logps, strict=True)
    for ids, logps, ended, all_ids, all_logps in rows:
        assert ids == all_ids[: len(ids)] and logps == all_logps[: len(ids)] and (not ended or ids == all_ids)
    left = [(ids, found) for ids, found, ended in zip(apart, early.token_ids, early.ended, strict=True) if not ended]
    rest = drawn(sampler, [Request(ids, sampled=found) for ids, found in left], **options)
    lengths = [len(found) + len(ids) for (_, found), ids in zip(left, rest.token_ids, strict=True)]
    assert len(lengths) == early.ended.count(False) > 0 and max(lengths) <= 40


# Counts


def test_counts_are_vllms(tmp_path, monkeypatch):
    """vLLM counts for itself where it keeps statistics."""
    mend(monkeypatch)
    sampler = speculating(tmp_path, engine_kwargs=DRAFTING | {"disable_log_stats": False}, max_completion_length=40)
    monkeypatch.setattr(sampler, "has_checked_drafts", True)
    ids = sampled(sampler, stop_token_ids=list(range(0, 250, 17)))[0][1]
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    theirs = {metric.name: metric.value for metric in sampler.llm.get_metrics() if metric.name in names}
    found = sampler.drafts
    assert theirs[names[0]] == found.drafted > 100
    assert theirs[names[1]] == found.accepted
    assert found.steps + found.accepted >= sum(map(len, ids))  # a step may go on behind a stop token


def test_metrics_of_counts(sampler):
    counts = Drafts(10, 8, 4)
    assert counts.take(sampler.accelerator) == {"rollouts/accepted_tokens": 0.4, "rollouts/accepted_share": 0.5}
    assert counts == Drafts() and counts.take(sampler.accelerator) == {}
    assert Drafts(10, 0, 0).take(sampler.accelerator) == {"rollouts/accepted_tokens": 0.0}


def test_through_the_trainer(tmp_path, monkeypatch):
    """Each step logs how many drafted tokens were accepted; a self-check logs how far samples were from the policy."""
    mend(monkeypatch)
    settings = {"use_vllm": True, "rollout_precision": "bf16", "vllm_engine_kwargs": DRAFTING, "max_steps": 2}
    settings |= {"vllm_max_model_length": 512, "max_completion_length": 32, "vllm_mode": "colocate"}
    args = config(QuantGRPOConfig, tmp_path / "out", **settings)
    trainer = make(QuantGRPOTrainer, args, model=save_tiny(tmp_path / "model", dtype=torch.bfloat16))
    keep(trainer)
    trainer.train()
    logged = metrics(trainer)
    for entry in logged[:2]:
        assert 0 <= entry["rollouts/accepted_tokens"] < 3 and 0 <= entry["rollouts/accepted_share"] <= 1
        assert entry["mismatch/unscored_fraction"] == 0
    first = logged[0]
    assert 0 < first["sync_check/speculation_difference"] < first["sync_check/speculation_bound"]


def test_a_trial_does_not_speculate(tmp_path):
    """The policies of trials have random weights, which accept other drafts."""
    model = policy(tmp_path)
    engine_of_run = {"max_model_length": 64, "max_num_seqs": 4, "max_completion_length": 8, "engine_kwargs": DRAFTING}
    given = engine_of_run | {"gpu_memory_utilization": 0.2}
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    built = build(Trial.of(model, accelerator, given), "bf16")
    keep(built)
    assert built.drafts is None and built.engine_kwargs == SMALL and "speculative_config" in DRAFTING
