"""
Routing replay on a GPU: vLLM returns the experts that it used, and a trainer replays them.

    python3 -m pytest -m gpu -s tests/gpu/test_routing_gpu.py
"""

import copy
from dataclasses import replace

import pytest
import torch
from drawing import set_options
from slow_routing import as_sets, chosen_again
from tiny import MIXTURES
from training import config, make, metrics


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import GPU_RUN, PROMPTS, SMALL, engine, keep, mixture
from vllm_sampling import plainly

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.rollout.engine import requests_for


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.mark.parametrize("family", MIXTURES)
def test_vllm_returns_its_routing(family, tmp_path, monkeypatch):
    """
    With lean sampling, with vLLM's own, and for requests that go on: a row for each token but the last, of all layers.
    The sets of experts are the policy's but for rounding; two of four experts that were drawn would differ for 83%.
    """
    model = mixture(tmp_path / "model", family)
    sampler = engine(model, "bf16", returns_routing=True)
    sampler.sync()
    set_options(sampler, ignore_eos=True, seed=5)  # of each request: torch's does not fix samples on a GPU
    requests, seen = requests_for(PROMPTS), []
    for lean in (True, False):
        monkeypatch.setattr(sampler, "sampling", sampler.sampling if lean else plainly)
        sampler.llm.reset_prefix_cache()
        seen.append(sampler.draw(requests))
    lean, plain = seen
    assert lean.token_ids == plain.token_ids
    assert all(map(torch.equal, lean.routing, plain.routing))
    for request, ids in zip(requests, lean.token_ids, strict=True):
        request.sampled.extend(ids[:3])
    set_options(sampler, ignore_eos=True)  # without a seed, which acts on whole completions
    went_on = sampler.draw(requests)
    differs = []
    for samples, given in (lean, PROMPTS), (went_on, [request.given for request in requests]):
        for prompt, ids, routing in zip(given, samples.token_ids, samples.routing, strict=True):
            assert routing.shape == (len(prompt) + len(ids) - 1, model.config.num_hidden_layers, 2)
            for layer, sets in chosen_again(model, family, prompt + ids).items():
                differs.append((as_sets(routing, layer) != sets[:-1]).any(1).float().mean())
    assert torch.stack(differs).mean() < 0.1


@pytest.mark.parametrize("family", MIXTURES)
def test_a_trainer_replays_vllms_routing(family, tmp_path, monkeypatch):
    """
    Early and late tokens alike: rows that were shifted would differ like drawn ones. Of the same samples and weights,
    in the first step, the trainer is nearer to the sampler with replay. Unless told not to, a run replays.
    """
    mixture(tmp_path / "model", family)
    found, first = {}, []
    for replays in (None, False):
        given = {"rollout_precision": "bf16", "vllm_engine_kwargs": SMALL, "max_completion_length": 64, "max_steps": 3}
        given |= {"router_replay": replays, "is_correction": "tis"}
        args = config(QuantGRPOConfig, tmp_path / str(replays), **GPU_RUN | given)
        trainer = make(QuantGRPOTrainer, args, model=str(tmp_path / "model"))
        keep(trainer)
        draw = trainer.vllm_generation.engine.draw

        def of_the_first(*args, trainer=trainer, draw=draw, **kwargs):
            samples = draw(*args, **kwargs)
            if samples.routing is None:  # of the run without replay, which samples others from the same seed
                return copy.deepcopy(first[0]) if trainer.state.global_step == 0 else samples
            first.append(replace(samples, routing=None))
            return samples

        monkeypatch.setattr(trainer.vllm_generation.engine, "draw", of_the_first)
        trainer.train()
        found[replays] = [log for log in metrics(trainer) if "mismatch/kl_k3" in log]
    assert all(log["routing/differs"] < 0.1 and log["routing/unreplayed"] == 0 for log in found[None])
    assert not any("routing/differs" in log for log in found[False])  # vLLM was not asked for it
    print(family, {name: [log["mismatch/kl_k3"] for log in logs] for name, logs in found.items()})
    assert found[None][0]["reward"] == found[False][0]["reward"]
    for name in ("mismatch/kl_k3", "sampling/sampling_logp_difference/mean"):
        assert found[None][0][name] < found[False][0][name]
