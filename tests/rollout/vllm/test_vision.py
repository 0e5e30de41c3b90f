"""Vision-language models in vLLM: the language model is quantized, and nothing else."""

import re

import pytest
import torch
from long_tests import rest_is_long
from tiny import save_tiny_vision
from transformers import AutoProcessor, Blip2ForConditionalGeneration


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import SMALL, engine, fp8_block_anywhere, greedy, keep, update

from trl_quant.models.linears import linears
from trl_quant.precisions import PRECISIONS
from trl_quant.rollout.vllm import support
from trl_quant.rollout.vllm.adapter import linear_layers
from trl_quant.rollout.vllm.serving import serve_command
from trl_quant.rollout.vllm.transfer import WorkerExtension


pytestmark = pytest.mark.vllm
DECODER = "language_model.model.decoder.layers."
PROMPTS = [[(7 * i + 3) % 250 for i in range(20)], [5, 6, 7]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_vision(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def model(path, monkeypatch):
    fp8_block_anywhere(monkeypatch)
    return Blip2ForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16)


def methods(llm) -> dict[str, str]:
    """The class that computes each of vLLM's linear layers."""

    def named(model):
        layers = linear_layers(model).items()
        return {name: type(getattr(layer, "scheme", None) or layer.quant_method).__name__ for name, layer in layers}

    return llm.apply_model(named)[0]


@pytest.mark.parametrize("precision", rest_is_long(["fp8_block", "int8", "bf16"], "fp8_block", "int8"))
def test_the_language_model_alone_is_quantized(tmp_path, model, precision):
    """From the start on and after syncs, which reach the language model and the tower."""
    sampler = engine(model, precision, max_model_length=256)
    found = methods(sampler.llm)
    inside = {method for name, method in found.items() if name.startswith(DECODER)}
    outside = {name: method for name, method in found.items() if not name.startswith(DECODER)}
    assert len(inside) == 1 and inside <= set(PRECISIONS[precision].vllm.methods)
    assert len(outside) == 8 and set(outside.values()) == {"UnquantizedLinearMethod"}

    before, tower_before = greedy(sampler.llm, PROMPTS, n=4), in_tower(sampler.llm)
    update(model, seed=1)
    sampler.sync()
    after = greedy(sampler.llm, PROMPTS, n=4)
    AutoProcessor.from_pretrained(model.name_or_path).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    model.name_or_path = str(tmp_path)
    again = engine(model, precision, max_model_length=256)
    assert before != after == greedy(again.llm, PROMPTS, n=4) and methods(again.llm) == found
    tower = in_tower(sampler.llm)
    assert torch.equal(tower, in_tower(again.llm)) and not torch.allclose(tower, tower_before, atol=0.1)
    expected = model.vision_model.encoder.layers[0].mlp.fc1(inputs())
    torch.testing.assert_close(tower, expected, rtol=2**-7, atol=2**-7)


def inputs() -> torch.Tensor:
    return torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


@torch.no_grad()
def in_tower(llm) -> torch.Tensor:
    """What a layer of vLLM's tower makes of some inputs. On a CPU its weight itself is packed."""
    return llm.apply_model(lambda model: model.vision_model.encoder.layers[0].mlp.fc1(inputs())[0])[0]


@pytest.mark.parametrize("precision", ["fp8_block", "int8"])
def test_a_quantized_tower_is_refused(model, precision, monkeypatch):
    monkeypatch.setattr("trl_quant.rollout.vllm.engine.outside_decoder", lambda *args: [])
    with pytest.raises(RuntimeError, match=r"quantizes only the language model.* 8 linear layers outside.*fc1"):
        engine(model, precision, max_model_length=256)


def test_a_server_is_told_and_asked(path, model, monkeypatch):
    """Its command names what stays as it is; its workers name what is quantized all the same."""
    from vllm import LLM

    (pattern,) = support.outside_decoder(model, model.config.architectures, "auto")
    ignored = re.compile(pattern.removeprefix("re:"))
    assert ignored.match(".encoder.layers.0.mlp.fc1") and not ignored.match(f"{DECODER}0.fc1")
    command = serve_command(path, "fp8", outside=[pattern])
    assert """ --quantization fp8_per_channel --quantization-config '{"ignore": ["re:(?!language_model""" in command
    assert "--quantization-config" not in serve_command(path, "fp8") + serve_command(path, "bf16", outside=[pattern])

    layers = [layer.name for layer in linears(model).values()]
    for ignore in ([], [pattern]):
        settings = {"quantization": "fp8_per_block", "quantization_config": {"ignore": ignore}, "max_model_len": 256}
        llm = LLM(path, dtype="bfloat16", **settings, **SMALL)
        keep(llm)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        found = WorkerExtension.quantized_outside(worker, layers)
        assert len(found) == (0 if ignore else 8) and all("Fp8PerBlockOnline" in name for name in found)


def test_a_language_model_needs_no_patterns(tmp_path):
    from vllm_engines import policy

    model = policy(tmp_path / "policy", with_lora=True)
    assert support.outside_decoder(model.get_base_model(), ["Qwen3ForCausalLM"], "auto") == []
