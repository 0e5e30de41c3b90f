"""
Mixtures of experts in vLLM on a GPU: live equals fresh, also after sleep, the self-check reads stored experts, and vLLM
returns the routing that a trainer replays.

    python3 -m pytest -m gpu -s tests/gpu/test_experts_gpu.py

In BF16 through our engine. The other precisions are refused with a mixture; of them the file tests vLLM's own reload
with our stream, which is what must hold before they can be allowed.
"""

import pytest
import torch
from drawing import set_options
from slow_routing import as_sets, chosen_again
from tiny import MIXTURES
from training import config, make, metrics


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import GPU_RUN, PROMPTS, SLEEPING, SMALL, engine, fresh, greedy, keep, policy, update
from vllm_sampling import plainly

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.precisions import PRECISIONS
from trl_quant.rollout.engine import requests_for
from trl_quant.rollout.experts import NamesOnDisk
from trl_quant.rollout.vllm import worker
from trl_quant.rollout.vllm.support import supported_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
WIDTHS = {"hidden_size": 512, "moe_intermediate_size": 256, "intermediate_size": 512}


def mixture(path, family: str):
    widths = {name: size for name, size in WIDTHS.items() if family != "mixtral" or not name.startswith("moe")}
    return policy(path, family=family, tied=False, **widths).cuda()


@pytest.mark.parametrize("family", MIXTURES)
def test_live_equals_fresh_through_sleep(family, tmp_path):
    model = mixture(tmp_path / "model", family)
    sampler = engine(model, "bf16", engine_kwargs=SLEEPING, enable_sleep_mode=True)
    seen = []
    for seed in range(3):
        update(model, seed=seed)
        sampler.sync()
        sampler.check_sync()
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(model, "bf16", tmp_path / f"checkpoint-{seed}"))
        sampler.rest()
        sampler.ensure_ready()
        assert greedy(sampler.llm) == seen[-1]
    assert len({str(samples) for samples in seen}) == 3


@pytest.mark.parametrize("family", MIXTURES)
def test_a_zeroed_expert_is_found(family, tmp_path, monkeypatch):
    sampler = engine(mixture(tmp_path / "model", family), "bf16")
    right = NamesOnDisk.stream

    def zeroed(self, weights):
        for name, tensor in right(self, weights):
            yield name, tensor * (".layers.1." not in name or ".experts.2." not in name)

    monkeypatch.setattr(NamesOnDisk, "stream", zeroed)
    sampler.sync()
    assert sampler.differing_weight().endswith("experts.gate_up_proj[2]")
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()


@pytest.mark.parametrize("precision", ["fp8", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("family", MIXTURES)
def test_vllm_reloads_experts_in_lower_precisions(family, precision, tmp_path):
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    model = mixture(tmp_path / "model", family)
    live = fresh(model, precision, tmp_path / "start")
    online = PRECISIONS[precision].vllm.online
    assert live.llm_engine.vllm_config.model_config.quantization == online
    names = NamesOnDisk(model)
    for seed in range(2):
        update(model, seed=seed)
        weights = ((name, param.data) for name, param in model.named_parameters())
        live.collective_rpc(worker.reload, kwargs={"stream": names.stream(weights)})
        live.reset_prefix_cache()
        assert greedy(live) == greedy(fresh(model, precision, tmp_path / f"checkpoint-{seed}"))
    torch.cuda.empty_cache()


@pytest.mark.parametrize("family", MIXTURES)
def test_vllm_returns_its_routing(family, tmp_path, monkeypatch):
    """
    With lean sampling, with vLLM's own, and for requests that go on: a row for each token but the last, of all layers.
    The sets of experts are the policy's but for rounding; two of four experts that were drawn would differ for 83%.
    """
    model = mixture(tmp_path / "model", family)
    sampler = engine(model, "bf16", returns_routing=True)
    sampler.sync()
    set_options(sampler, ignore_eos=True)
    requests, seen = requests_for(PROMPTS), []
    for lean in (True, False):
        monkeypatch.setattr(sampler, "sampling", sampler.sampling if lean else plainly)
        torch.manual_seed(5)
        sampler.llm.reset_prefix_cache()
        seen.append(sampler.draw(requests))
    lean, plain = seen
    assert lean.token_ids == plain.token_ids
    assert all(map(torch.equal, lean.routing, plain.routing))
    for request, ids in zip(requests, lean.token_ids, strict=True):
        request.sampled.extend(ids[:3])
    went_on = sampler.draw(requests)
    differs = []
    for samples, given in (lean, PROMPTS), (went_on, [request.given for request in requests]):
        for prompt, ids, routing in zip(given, samples.token_ids, samples.routing, strict=True):
            assert routing.shape == (len(prompt) + len(ids) - 1, model.config.num_hidden_layers, 2)
            for layer, sets in chosen_again(model, family, prompt + ids).items():
                differs.append((as_sets(routing, layer) != sets[:-1]).any(1).float().mean())
    assert torch.stack(differs).mean() < 0.1


@pytest.mark.parametrize("family", MIXTURES)
def test_a_trainer_replays_vllms_routing(family, tmp_path):
    """Early and late tokens alike: rows that were shifted would differ like drawn ones."""
    mixture(tmp_path / "model", family)
    found = {}
    for replays in (True, False):
        given = {"rollout_precision": "bf16", "vllm_engine_kwargs": SMALL, "max_completion_length": 64, "max_steps": 3}
        given |= {"router_replay": replays, "is_correction": "tis"}
        args = config(QuantGRPOConfig, tmp_path / str(replays), **GPU_RUN | given)
        trainer = make(QuantGRPOTrainer, args, model=str(tmp_path / "model"))
        keep(trainer)
        trainer.train()
        found[replays] = [log for log in metrics(trainer) if "mismatch/kl_k3" in log]
    assert all(log["routing/differs"] < 0.1 and log["routing/unreplayed"] == 0 for log in found[True])
    assert not any("routing/differs" in log for log in found[False])  # vLLM was not asked for it
    assert all(log["mismatch/kl_k3"] < 0.01 for logs in found.values() for log in logs)
