"""
Mixtures of experts in vLLM on a GPU: live equals fresh, also after sleep, and the self-check reads stored experts.

    python3 -m pytest -m gpu -s tests/gpu/test_experts_gpu.py

In BF16 through our engine. The other precisions are refused with a mixture; of them the file tests vLLM's own reload
with our stream, which is what must hold before they can be allowed.
"""

import pytest
import torch
from tiny import MIXTURES


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import SLEEPING, engine, fresh, greedy, policy, update

from trl_quant.precisions import PRECISIONS
from trl_quant.rollout.vllm import worker
from trl_quant.rollout.vllm.support import supported_precisions
from trl_quant.storage.experts import NamesOnDisk


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
