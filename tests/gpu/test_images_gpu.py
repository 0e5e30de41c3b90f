"""
Models that read images in vLLM on a GPU: the tower keeps BF16 in each precision, live equals fresh with images, the
self-check sees an image, trainer and sampler agree as they do on text, and in Gemma 3 the tokens of an image see each
other.

    python3 -m pytest -m gpu -s tests/gpu/test_images_gpu.py
"""

import copy
from importlib.util import find_spec

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from readers import READERS, load_reader, picture, processed, save_reader
from training import make


pytest.importorskip("vllm", reason="vLLM is not installed")
from pictured import PICTURES, asked, greedy_pictured, methods, outside_of_text
from vllm_engines import GPU_RUN, SLEEPING, SMALL, engine, keep, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.precisions import PRECISIONS
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.vllm.adapter import linear_layers
from trl_quant.rollout.vllm.support import supported_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
# vLLM's own choice for Qwen3.5 on Hopper is flashinfer's kernel, and it does not look whether that is installed
GIVEN = {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}
LORA = r".*language_model.*\.(q_proj|in_proj_qkv|down_proj)"


def loaded(path, family: str):
    model, processor = load_reader(save_reader(path, family, wide=True))
    return model.cuda(), processor


def require(precision: str) -> None:
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)


def types(sampler) -> set[torch.dtype]:
    """The types of the weights of vLLM's layers outside of the text."""

    def found(model):
        layers = linear_layers(model)
        return {layers[name].weight.dtype for name in outside_of_text(layers)}

    return sampler.llm.apply_model(found)[0]


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_block", "int8", "nvfp4"])
@pytest.mark.parametrize("family", READERS)
def test_live_equals_fresh_with_images(family, precision, tmp_path):
    """Three syncs, each after a sleep that discards the weights; then an engine that starts on the last ones."""
    require(precision)
    model, processor = loaded(tmp_path / "model", family)
    sampler = engine(model, precision, processor, engine_kwargs=SLEEPING | GIVEN, enable_sleep_mode=True)
    found = methods(sampler)
    outside = {found[name] for name in outside_of_text(found)}
    gates = {"UnquantizedLinearMethod"} if family == "qwen3_5" else set()
    inside = {method for name, method in found.items() if name not in outside_of_text(found)}
    assert outside == {"UnquantizedLinearMethod"} and inside - gates <= set(PRECISIONS[precision].vllm.methods)
    requests, seen = [asked(processor, [], "Say it."), asked(processor)], []
    for seed in range(3):
        update(model, seed=seed)
        sampler.sync()
        check = sampler.check_sync()
        print(family, precision, check)
        assert 0 < check["sync_check/image_logp_difference"] < check["sync_check/image_bound"]
        assert sampler.differing_weight() is None and types(sampler) == {torch.bfloat16}
        seen.append(greedy_pictured(sampler, requests))
        sampler.rest()
        sampler.ensure_ready()
        assert greedy_pictured(sampler, requests) == seen[-1]
    assert all(len({str(samples[row]) for samples in seen}) == 3 for row in range(2))
    processor.save_pretrained(tmp_path / "updated")
    model.save_pretrained(tmp_path / "updated")
    again = copy.deepcopy(model)
    again.name_or_path = str(tmp_path / "updated")
    fresh = engine(again, precision, processor, engine_kwargs=SMALL | GIVEN)
    assert greedy_pictured(fresh, requests) == seen[-1] and methods(fresh) == found
    torch.cuda.empty_cache()


@torch.no_grad()
def difference(model, processor, samples, images, token: int, whole: bool = True) -> float:
    """
    How far the samples are from the policy that sees `images`, in nats a token; in Gemma 3 `whole` ones or token by
    token.
    """
    total = []
    for ids, logps in zip(samples.token_ids, samples.logps, strict=True):
        fields = processed(processor, images, "What?").to("cuda")
        given = torch.cat([fields.pop("input_ids"), torch.tensor([ids], device="cuda")], 1)
        fields.pop("attention_mask")
        for name in {"mm_token_type_ids", "token_type_ids"} & fields.keys():
            fields[name] = torch.nn.functional.pad(fields[name], (0, len(ids))) * whole
        scores = model(input_ids=given, **fields).logits[0, -len(ids) - 1 : -1].float()
        scores[:, token] = -torch.inf
        total.append(scores.log_softmax(-1)[range(len(ids)), ids].cpu() - torch.tensor(logps))
    return torch.cat(total).abs().mean().item()


@pytest.mark.parametrize("family", READERS)
def test_samples_have_the_policys_log_probabilities(family, tmp_path):
    model, processor = loaded(tmp_path / "model", family)
    sampler = engine(model, "bf16", processor, max_completion_length=64, engine_kwargs=SMALL | GIVEN)
    samples = sampler.draw([asked(processor)] * 4)
    others = [picture(11), picture(12, 40, 40)]
    own, other = (difference(model, processor, samples, seen, sampler.image_token) for seen in (PICTURES, others))
    print(family, own, other)
    assert own < 0.05 and 2 * own < other


def test_the_tokens_of_an_image_see_each_other(tmp_path):
    """In Gemma 3. A policy in which they see only those before them is farther from the samples."""
    model, processor = loaded(tmp_path / "model", "gemma3")
    sampler = engine(model, "bf16", processor, max_completion_length=64, engine_kwargs=SMALL | GIVEN)
    samples = sampler.draw([asked(processor)] * 4)
    whole, causal = (difference(model, processor, samples, PICTURES, sampler.image_token, one) for one in (True, False))
    print(whole, causal)
    assert 2 * whole < causal


@pytest.mark.parametrize("family", READERS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_an_adapter_beside_its_base_and_noise(family, precision, tmp_path):
    require(precision)
    model, processor = loaded(tmp_path / "model", family)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=LORA))
    sampler = engine(model, precision, processor, lora_sync="adapter", wide_norms=True, engine_kwargs=SMALL | GIVEN)
    seen = []
    requests = [asked(processor, [], "Say it."), asked(processor)]
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync()
        sampler.check_sync()
        seen.append(greedy_pictured(sampler, requests))
    sampler.lay_noise(RolloutNoise(3e-2, 3, 7))
    noisy = greedy_pictured(sampler, requests)
    assert sampler.effective_sigma == pytest.approx(3e-2, rel=0.05)
    sampler.lay_noise(RolloutNoise())
    assert greedy_pictured(sampler, requests) == seen[-1]
    assert len({str(samples) for samples in (*seen, noisy)}) == 3


@pytest.mark.parametrize("family", READERS)
@pytest.mark.parametrize("settings", [{"rollout_precision": "fp8"}, {"train_precision": "fp8"}], ids=str)
def test_trainer_and_sampler_agree_as_on_text(family, settings, tmp_path):
    """Three steps with images and three with text alone; each sync is checked with an image."""
    path, apart = save_reader(tmp_path / "model", family, wide=True), {}
    for kind, images in {"images": [PICTURES[: 1 + i % 2] for i in range(8)], "text": [[]] * 8}.items():
        prompts = [[{"role": "user", "content": "look" * (1 + i % 3)}] for i in range(8)]
        args = QuantGRPOConfig(
            output_dir=str(tmp_path / kind),
            vllm_engine_kwargs=SMALL | GIVEN,
            max_steps=3,
            max_completion_length=64,
            learning_rate=1e-4,
            logging_steps=1,
            report_to="none",
            num_generations=4,
            per_device_train_batch_size=8,
            sync_check_steps=1,
            **GPU_RUN | settings,
        )
        columns = {"prompt": prompts} | ({"images": images} if kind == "images" else {})
        processor = load_reader(path)[1]
        given = {"processing_class": processor, "train_dataset": Dataset.from_dict(columns)}
        trainer = make(QuantGRPOTrainer, args, model=path, reward_funcs=ends, **given)
        keep(trainer)
        start = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "mismatch/abs_logp_diff" in entry]
        assert len(logged) == 3
        assert all(entry["sync_check/image_logp_difference"] < entry["sync_check/image_bound"] for entry in logged)
        moved = {name for name, param in trainer.model.named_parameters() if not torch.equal(param, start[name])}
        saw = any("vis" in name for name in moved)
        apart[kind] = [entry["mismatch/abs_logp_diff"] for entry in logged]
        assert saw == (kind == "images")
    print(family, settings, apart)
    assert 0 < max(apart["images"]) < 1.5 * max(apart["text"])


def ends(completions, **kwargs) -> list[float]:
    return [float(sum(map(ord, str(one))) % 11) for one in completions]
