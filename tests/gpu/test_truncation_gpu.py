"""
Truncated sampling on a GPU: vLLM returns what `top_p`, `top_k` and `min_p` left, and a trainer scores over it.

    python3 -m pytest -m gpu -s tests/gpu/test_truncation_gpu.py
"""

import pytest
import torch
from drawing import set_options
from tiny import save_tiny
from training import config, make, metrics


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm import EngineArgs
from vllm_engines import GPU_MODEL, GPU_RUN, PROMPTS, SMALL, engine, keep, policy
from vllm_sampling import plainly

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout.engine import requests_for


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
if not hasattr(EngineArgs, "return_sampling_mask"):
    pytestmark.append(pytest.mark.skip(reason="vLLM returns what truncation left from 0.28 on"))

OPTIONS = {"top_p": {"top_p": 0.9}, "top_k": {"top_k": 7}, "min_p": {"min_p": 0.1}}


@pytest.mark.parametrize("option", OPTIONS)
def test_vllm_returns_what_it_left(option, tmp_path, monkeypatch):
    """
    With lean sampling and with vLLM's own, and for requests that go on: the log-probability that vLLM returns is that
    of the drawn token among what it says was left, by the policy's logits, but for rounding.
    """
    model = policy(tmp_path / "model", **GPU_MODEL).cuda()
    sampler = engine(model, "bf16", returns_kept=True)
    sampler.sync()
    set_options(sampler, ignore_eos=True, seed=5, **OPTIONS[option])
    requests, seen = requests_for(PROMPTS), []
    for lean in (True, False):
        monkeypatch.setattr(sampler, "sampling", sampler.sampling if lean else plainly)
        sampler.llm.reset_prefix_cache()
        seen.append(sampler.draw(requests))
    lean, plain = seen
    assert lean.token_ids == plain.token_ids
    for ours, theirs in zip(lean.kept, plain.kept, strict=True):
        assert ours.counts.equal(theirs.counts) and ours.words.equal(theirs.words)
    for request, ids in zip(requests, lean.token_ids, strict=True):
        request.sampled.extend(ids[:3])
    set_options(sampler, ignore_eos=True, **OPTIONS[option])  # without a seed, which acts on whole completions
    went_on = sampler.draw(requests)
    for samples, given in (lean, PROMPTS), (went_on, [request.given for request in requests]):
        errors, all_errors = [], []
        for prompt, ids, logps, kept in zip(given, samples.token_ids, samples.logps, samples.kept, strict=True):
            with torch.no_grad():
                z = model(torch.tensor([prompt + ids], device=model.device)).logits[0, len(prompt) - 1 : -1].float()
            for scores, token, logp, left in zip(z, ids, logps, kept.ids(), strict=True):
                among = scores[torch.tensor(left, device=scores.device).long()]
                errors.append(abs((scores[token] - among.logsumexp(0)).item() - logp))
                all_errors.append(abs((scores[token] - scores.logsumexp(0)).item() - logp))
                assert option != "top_k" or len(left) == 7
        print(option, sum(errors) / len(errors), sum(all_errors) / len(all_errors))
        assert sum(errors) < 0.3 * sum(all_errors)


def test_vllm_still_checks_itself(tmp_path):
    """It takes no greedy request then; the self-check draws its tokens otherwise."""
    sampler = engine(policy(tmp_path / "model", **GPU_MODEL).cuda(), "bf16", returns_kept=True)
    sampler.sync()
    assert sampler.check_sync()["sync_check/logp_difference"] < 0.1


def test_a_trainer_scores_over_what_vllm_left(tmp_path):
    """The weights have a mean of 1, and 0.9 without replay."""
    save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    found = {}
    for replay in (True, None):
        given = {"rollout_precision": "bf16", "vllm_engine_kwargs": SMALL, "max_completion_length": 64, "max_steps": 3}
        given |= {"top_p": 0.9, "truncation_replay": replay, "is_correction": "tis"}
        args = config(QuantGRPOConfig, tmp_path / str(replay), **GPU_RUN | given)
        trainer = make(QuantGRPOTrainer, args, model=str(tmp_path / "model"))
        keep(trainer)
        trainer.train()
        found[replay] = [log for log in metrics(trainer) if "mismatch/weight_mean" in log]
    assert all(abs(log["mismatch/weight_mean"] - 1) < 0.02 for log in found[True])
    assert all(log["truncation/unreplayed"] == 0 and log["truncation/kept_mass"] > 0.88 for log in found[True])
    assert all(log["mismatch/weight_mean"] < 0.93 for log in found[None])
