"""
The embedded engine with models that read images: their tokens have the positions of TRL's own pass, the language model
alone is quantized, and each family trains with images, also with an adapter, with noise and with scaled norms.
"""

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from long_tests import rest_is_long
from peft import LoraConfig
from readers import READERS, load_reader, picture, processed, reader, save_reader
from tiny import tiny_model, tiny_tokenizer
from torch import nn
from training import metrics, trainer_for
from transformers import AutoProcessor

from trl_quant.layers import EngineLinear
from trl_quant.models.norms import feeding_norms
from trl_quant.rollout import TransformersEngine
from trl_quant.rollout.engine import requests_for
from trl_quant.scaling import apply_uaq


pytestmark = pytest.mark.isa
ALL = {"suppress_tokens": []}  # image tokens too, as in TRL's scoring pass
# family -> linear layers of its text: q, k, v, o and gate, up, down; one of Qwen3.5's layers has linear attention
TEXT_LAYERS = {"qwen2_5_vl": 14, "qwen3_vl": 21, "qwen3_5": 13, "gemma3": 14}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Checkpoints in FP32, by family."""
    root = tmp_path_factory.mktemp("readers")
    return {family: save_reader(root / family, family, torch.float32) for family in READERS}


def data(rows: int = 8) -> Dataset:
    """Conversations of different lengths with one image or two, of different sizes."""
    prompts = [[{"role": "user", "content": "look" * (1 + i % 3)}] for i in range(rows)]
    images = [[picture(i + 10 * k, 40 + 16 * (i % 3), 64) for k in range(1 + i % 2)] for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "images": images})


def reward(completions, **kwargs) -> list[float]:
    return [float(sum(map(ord, str(one))) % 11) for one in completions]


def trainer_of(path, output, **given):
    settings = {"rollout_precision": "int8", "max_steps": 2, "max_completion_length": 12, "train_dataset": data()}
    settings |= {"processing_class": AutoProcessor.from_pretrained(path), "reward_funcs": reward}
    return trainer_for(output, path, **settings | given)


def in_fp32(engine) -> None:
    """Gives the copy layers that compute in the policy's numbers."""
    for name, layer in [*engine.copy.named_modules()]:
        if isinstance(layer, EngineLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            engine.copy.set_submodule(name, linear.requires_grad_(False))


@pytest.mark.parametrize("family", READERS)
def test_sampled_log_probabilities_are_those_of_trls_scoring_pass(paths, family, tmp_path):
    """Within rounding, on rows of other lengths with images of other sizes; not if images were placed as text is."""
    trainer = trainer_of(paths[family], tmp_path, rollout_precision="bf16", generation_kwargs=ALL, learning_rate=0.0)
    engine = trainer.vllm_generation.engine
    layers = {name for name, layer in engine.copy.named_modules() if isinstance(layer, EngineLinear)}
    assert len(layers) == TEXT_LAYERS[family] and all(name.startswith("model.language_model.") for name in layers)
    in_fp32(engine)
    sample, kinds = engine.sample, "token_type_ids" if family == "gemma3" else "mm_token_type_ids"

    def second_misplaced(requests, processed=None, **kwargs):
        if trainer.state.global_step == 1:
            processed = processed | {kinds: [[0] * len(row) for row in processed[kinds]]}
        return sample(requests, processed=processed, **kwargs)

    engine.sample = second_misplaced
    trainer.train()
    right, wrong = (entry["mismatch/abs_logp_diff"] for entry in metrics(trainer) if "loss" in entry)
    assert right < 3e-6 and wrong > 1e-3


@pytest.mark.parametrize("family", rest_is_long(READERS, "gemma3", "qwen3_5"))
def test_an_adapter_trains_with_images_and_noise(paths, family, tmp_path):
    """In INT8, with LoRA on the language model. Noise is laid on the norms of the text."""
    adapter = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|in_proj_qkv|down_proj)")
    noise = {"noise_schedule": "exponential", "noise_stages": 3, "max_steps": 3}
    trainer = trainer_of(paths[family], tmp_path, peft_config=adapter, **noise)
    start = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    logged = [entry for entry in metrics(trainer) if "loss" in entry]
    norms = 2 * trainer.model.config.get_text_config().num_hidden_layers
    assert [entry["noise/norms"] for entry in logged] == [0, norms, norms]
    assert all(e["noise/effective_sigma"] == pytest.approx(e["noise/sigma"], rel=0.2) for e in logged)
    assert all(5e-3 < entry["mismatch/abs_logp_diff"] < 0.3 for entry in logged)
    moved = {name for name, param in trainer.model.named_parameters() if not torch.equal(param, start[name])}
    assert moved == {name for name in start if ".lora_" in name}


@pytest.mark.parametrize("family", READERS)
def test_scaling_keeps_the_function(paths, family):
    """UAQ changes no output beyond rounding, with images too; the norms alone would change it."""
    model, processor = load_reader(paths[family], torch.float32)
    given = processed(processor, [picture(1)], "What?")

    @torch.no_grad()
    def outputs():
        return model(**given).logits

    before, norms = (
        outputs(),
        [*feeding_norms(model.config.get_text_config().model_type, dict(model.named_parameters()))],
    )
    assert len(norms) == 2 * model.config.get_text_config().num_hidden_layers
    assert all(".language_model.layers." in name for name in norms)
    plain = {name: model.get_parameter(name).clone() for name in norms}
    assert apply_uaq(model, 1.5) == len(norms)
    assert (outputs() - before).abs().max() < 1e-4 * before.abs().max()
    with torch.no_grad():
        for name in norms:
            assert not torch.equal(model.get_parameter(name), plain[name])
            model.get_parameter(name).copy_(plain[name])
    assert (outputs() - before).abs().max() > 1e-2 * before.abs().max()


@pytest.mark.parametrize("family", rest_is_long(READERS, "gemma3", "qwen3_5"))
def test_training_in_the_samplers_numbers(paths, family, tmp_path):
    """In INT8 the trainer computes what the sampler does, images included; the tower stays in the policy's type."""
    trainer = trainer_of(paths[family], tmp_path, rollout_precision=None, train_precision="int8", generation_kwargs=ALL)
    start = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    assert all(entry["mismatch/abs_logp_diff"] < 2e-3 for entry in metrics(trainer) if "loss" in entry)
    moved = {name for name, param in trainer.model.named_parameters() if not torch.equal(param, start[name])}
    assert {name for name in start if name.startswith("model.") and name.endswith("weight")} <= moved


def test_a_policy_of_text_with_a_processor():
    """It has no image token whose samples would be prevented, and samples what it does with a tokenizer."""
    samples = []
    for given in (reader("gemma3")[1], tiny_tokenizer()):
        made = TransformersEngine(tiny_model(), Accelerator(cpu=True), given, precision="bf16", max_completion_length=6)
        made.sync()
        torch.manual_seed(0)
        samples.append(made.sample(requests_for([[1, 2, 3]])).token_ids)
    assert samples[0] == samples[1]
