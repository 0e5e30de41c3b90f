"""Dense families in vLLM: after a sync an engine samples what one does that starts on the policy's weights."""

import pytest
import torch
import transformers
from accelerate import Accelerator
from long_tests import rest_is_long
from packaging.version import Version
from tiny import FURTHER, SCALED, SIZES, tiny_tokenizer
from torch import nn


pytest.importorskip("vllm", reason="vLLM is not installed")
from noise_arrival import SIGMAS, arrivals, sampler_of
from vllm import __version__ as VLLM_VERSION
from vllm_engines import engine, fresh, greedy, policy, update

from trl_quant.models.families import FAMILIES
from trl_quant.rollout.vllm.server import VLLMServerEngine
from trl_quant.rollout.vllm.serving import BACKEND
from trl_quant.rollout.vllm.support import vllm_version


pytestmark = pytest.mark.vllm
# In vLLM these layers of Cohere 2 see one token more, so no row of a test is longer
OPTIONS = {"cohere2": {"sliding_window": 1024}, "ministral3": {"rope_parameters": SCALED}}
IN_VLLM = [family for family in FURTHER if FAMILIES[family].vllm]


@pytest.mark.parametrize("family", rest_is_long(IN_VLLM, "cohere2", "glm4", "olmo2"))
def test_live_equals_fresh(tmp_path, family):
    """In codes, in layers that vLLM fuses as the table says, of the class that it names."""
    model = policy(tmp_path / "model", family=family, **OPTIONS.get(family, {}))
    sampler = engine(model, "int8")
    sampler.sync()
    started = greedy(sampler.llm)
    update(model, seed=0)
    sampler.sync()
    assert greedy(sampler.llm) == greedy(fresh(model, "int8", tmp_path / "fresh")) != started
    found = sampler.check_sync()
    assert found["sync_check/logp_difference"] < found["sync_check/bound"]
    (name,) = sampler.llm.apply_model(lambda model: type(model).__name__)
    if VLLM_VERSION.startswith("0.31"):  # of which the table speaks
        assert (name == "TransformersForCausalLM") == (FAMILIES[family].vllm == "transformers")
    assert sampler.fused == {layer.name: layer.fused for layer in sampler.weights.linears().values()}
    # vLLM, which may run transformers' class, leaves the policy's as it was
    own = type(model.get_decoder())
    assert own.__call__ is nn.Module.__call__ and own.__init__.__module__ == own.__module__


@pytest.mark.parametrize("family", rest_is_long(["glm4", "cohere2", "olmo2", "starcoder2"]))
def test_live_equals_fresh_in_bf16(tmp_path, family):
    model = policy(tmp_path / "model", family=family, **OPTIONS.get(family, {}))
    sampler = engine(model, "bf16")
    update(model, seed=0)
    sampler.sync()
    assert greedy(sampler.llm) == greedy(fresh(model, "bf16", tmp_path / "fresh"))
    sampler.check_sync()


def test_an_earlier_engine_does_not_change_rotations(tmp_path):
    """vLLM's GLM switches its rotary embedding from halves to pairs, also for later engines that would share it."""
    for family in ("glm", "glm4_moe"):
        sampler = engine(policy(tmp_path / family, family=family, tied=False), "bf16")
        sampler.sync()
        sampler.check_sync()


def test_transformers_class_where_it_is_asked_for(tmp_path):
    """vLLM's own class is there, but `vllm_model_impl` says otherwise. The policy goes on as it was."""
    model = policy(tmp_path / "model", family="qwen3")
    sampler = engine(model, "int8", model_impl="transformers")
    sampler.sync()
    sampler.check_sync()
    assert sampler.llm.apply_model(lambda model: type(model).__name__) == ["TransformersForCausalLM"]
    assert type(model.get_decoder()).__call__ is nn.Module.__call__


def test_a_window_that_is_wider_in_vllm(tmp_path):
    """The reason for which rows beyond the window are refused."""
    if vllm_version() < Version("0.31"):
        pytest.skip("the window of vLLM 0.27 is not wider")
    sampler = engine(policy(tmp_path / "model", family="cohere2"), "bf16")
    sampler.sync()
    with pytest.raises(RuntimeError, match="does not sample from the policy"):
        sampler.check_sync()


def test_a_server_whose_window_would_be_wider(tmp_path, monkeypatch):
    """It is refused where a row can be longer than the policy's window."""
    monkeypatch.setattr(VLLMServerEngine, "start", lambda self: None)
    model = policy(tmp_path / "model", family="cohere2")
    sampler = VLLMServerEngine(model, Accelerator(cpu=True), tiny_tokenizer(), mode="server", precision="bf16")
    served = {"logprobs_mode": "processed_logprobs", "quantization": None, "dtype": "torch.bfloat16"}
    info = {"cache_config": {"cache_dtype": "auto"}, "weight_transfer_config": {"backend": BACKEND}}
    window = model.config.sliding_window
    info["model_config"] = served | {"max_model_len": window}
    assert sampler.unfit_options(info, model.config) == []
    info["model_config"]["max_model_len"] = window + 1
    (fault,) = sampler.unfit_options(info, model.config)
    assert fault.startswith(f"`--max-model-len {window + 1}`, and {window} or less is needed")


@pytest.mark.parametrize("family", rest_is_long(["cohere2", "smollm3"]))
def test_noise_arrives(tmp_path, family):
    """In LayerNorms, and in norms of transformers' classes."""
    sampler = sampler_of(tmp_path, "bf16", True, "cpu", family=family, **OPTIONS.get(family, {}))
    ((effective, slope),) = arrivals(sampler, SIGMAS[1:2])
    assert effective == pytest.approx(SIGMAS[1], rel=0.05) and 0.7 < slope < 1.3


# Outside the table


@pytest.fixture(scope="module")
def stablelm(tmp_path_factory):
    """An engine of a policy of a family that is not in the table, synced; its checks are switched off."""
    path = tmp_path_factory.mktemp("stablelm")
    torch.manual_seed(0)
    config = transformers.StableLmConfig(**SIZES | {"dtype": torch.bfloat16})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    sampler = engine(model, "bf16", sync_check_steps=0)
    sampler.sync()
    return sampler


FAULTS = {
    "a weight in the engine": ("corrupted", lambda sampler: sampler.llm.apply_model(_doubled)),
    "a hook in the policy": ("another function|corrupted", lambda sampler: _hooked(sampler)),
    "a weight of the policy": ("stale", lambda sampler: update(sampler.model, seed=3)),
}


def _doubled(model) -> None:
    model.get_parameter("model.layers.1.post_attention_layernorm.weight").data.mul_(2)


def _hooked(sampler):
    norm = sampler.model.model.layers[1].input_layernorm
    return norm.register_forward_hook(lambda module, args, output: -output)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_family_outside_the_table_are_found(stablelm, fault):
    """Before the first generation, though the checks are off."""
    words, plant = FAULTS[fault]
    planted = plant(stablelm)
    with pytest.raises(RuntimeError, match=words):
        stablelm.prepare()
    if fault == "a hook in the policy":
        planted.remove()
    stablelm.sync()


def test_a_family_outside_the_table_samples_after_the_check(stablelm, caplog):
    stablelm.prepare()
    stablelm.prepare()
    assert [line for line in caplog.messages if "`model_type`='stablelm' is not among" in line] == caplog.messages[:1]
    update(stablelm.model, seed=4)
    stablelm.sync()
    stablelm.prepare()  # checks are off
