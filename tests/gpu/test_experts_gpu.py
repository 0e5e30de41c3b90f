"""
Mixtures of experts in vLLM on a GPU, in every precision: live equals fresh, also after sleep, and the self-check finds
each expert and router that is not the policy's.

    python3 -m pytest -m gpu -s tests/gpu/test_experts_gpu.py

Engines of one process share the memory in which vLLM computes experts, and a new one replaces it: an engine samples
only until the next one starts.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import MIXTURES


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import SLEEPING, engine, fresh, greedy, mixture, update

from trl_quant.precisions import PRECISIONS, with_experts
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.vllm.experts import AS_LOADED, backend_of, expert_layers
from trl_quant.rollout.vllm.support import supported_precisions
from trl_quant.storage.experts import NamesOnDisk


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
ATTENTION = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


def of_expert(tensors, expert: int) -> list[str]:
    found = [name for name in tensors if ".layers.1." in name and f".experts.{expert}." in name]
    assert len(found) == 3
    return found


def faults(sampler) -> dict:
    """Changes of the stream by the name of what the self-check must find."""
    before = dict(NamesOnDisk(sampler.model).stream((n, p.data.clone()) for n, p in sampler.model.named_parameters()))
    router = next(name for name in before if ".layers.1." in name and name.endswith(".gate.weight"))

    def exchanged(tensors):
        pairs = list(zip(of_expert(tensors, 1), of_expert(tensors, 3), strict=True))
        return tensors | {a: tensors[b] for pair in pairs for a, b in (pair, pair[::-1])}

    return {
        "zeroed[2]": lambda tensors: tensors | {name: tensors[name] * 0 for name in of_expert(tensors, 2)},
        "exchanged[1]": exchanged,
        "stale[0]": lambda tensors: tensors | {name: before[name] for name in of_expert(tensors, 0)},
        "router gate": lambda tensors: tensors | {router: tensors[router].to(torch.float8_e4m3fn).to(tensors[router])},
    }


@pytest.mark.parametrize("precision", with_experts())
@pytest.mark.parametrize("family", MIXTURES)
def test_live_equals_fresh_and_faults_are_found(family, precision, tmp_path, monkeypatch):
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    model = mixture(tmp_path / "model", family)
    sampler = engine(model, precision, engine_kwargs=SLEEPING, enable_sleep_mode=True)
    backends = sampler.llm.apply_model(lambda vllms: {backend_of(layer) for layer in expert_layers(vllms).values()})
    print(family, precision, backends)
    seen, copies = [], []
    for seed in range(3):
        update(model, seed=seed)
        sampler.sync()
        sampler.check_sync()
        seen.append(greedy(sampler.llm))
        copies.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        sampler.rest()
        sampler.ensure_ready()
        assert greedy(sampler.llm) == seen[-1]
    assert len({str(samples) for samples in seen}) == 3
    stale = faults(sampler)
    update(model, seed=3)
    right = NamesOnDisk.stream
    for name, change in stale.items():
        with monkeypatch.context() as patched:
            patched.setattr(NamesOnDisk, "stream", lambda self, w, change=change: change(dict(right(self, w))).items())
            sampler.sync()
        found = sampler.differing_weight()
        assert found is not None and found.startswith("model.layers.1.mlp.")
        assert name.endswith("gate") == (".experts" not in found)
        assert name.endswith("gate") or found.endswith(name[name.index("[") :])
    sampler.sync()
    assert sampler.differing_weight() is None
    codes = {"prepared": PRECISIONS[precision].format is not None, "device": "cuda"}
    for number, (state, samples) in enumerate(zip(copies, seen, strict=True)):
        model.load_state_dict(state)
        assert greedy(fresh(model, precision, tmp_path / f"checkpoint-{number}", **codes)) == samples
    torch.cuda.empty_cache()


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_an_adapter_beside_its_base_and_noise(family, precision, tmp_path):
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    model = get_peft_model(mixture(tmp_path / "model", family), ATTENTION)
    sampler = engine(model, precision, lora_sync="adapter", wide_norms=True)
    seen = []
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync()
        sampler.check_sync()
        seen.append(greedy(sampler.llm))
    sampler.lay_noise(RolloutNoise(3e-2, 3, 7))
    noisy = greedy(sampler.llm)
    assert sampler.effective_sigma == pytest.approx(3e-2, rel=0.05)
    sampler.lay_noise(RolloutNoise())
    assert greedy(sampler.llm) == seen[-1]
    assert len({str(samples) for samples in (*seen, noisy)}) == 3


@pytest.mark.parametrize("precision", [name for name in with_experts() if PRECISIONS[name].vllm.inputs])
def test_codes_are_written_in_place(precision, tmp_path):
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    sampler = engine(mixture(tmp_path / "model", "qwen3_moe"), precision)
    update(sampler.model, seed=0)
    sampler.sync()
    (layers,) = sampler.llm.apply_model(expert_layers)
    if all(backend_of(layer) in AS_LOADED for layer in layers.values()) and precision != "fp8_block":
        assert sampler.destinations  # whether block-scaled linear layers are held as they are sent depends on the GPU
    assert sampler.differing_weight() is None
    sampler.check_sync()
