"""
Models that read images, with their own processors, in vLLM: the language model alone is quantized, images reach vLLM at
the places that the trainer scores, a synced engine has the bits of a fresh one, and the self-check sees an image.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from readers import READERS, load_reader, picture, processed, reader, save_reader
from training import config, killing, metrics, trainer_for
from transformers import AutoConfig, AutoProcessor


pytest.importorskip("vllm", reason="vLLM is not installed")
from pictured import PICTURES, asked, greedy_pictured, methods, outside_of_text
from speculating import DRAFTING
from vllm_engines import SMALL, engine, keep, policy, require_kernels, update

from trl_quant import QuantGRPOConfig
from trl_quant.cli import main
from trl_quant.precisions import PRECISIONS
from trl_quant.report import plan
from trl_quant.rollout.engine import Request, RolloutNoise
from trl_quant.rollout.verify.rows import pictured_row
from trl_quant.rollout.verify.self_check import Reference
from trl_quant.rollout.vllm.images import placeholders
from trl_quant.rollout.vllm.serving import images_flag, serve_command, wait_for_server


pytestmark = pytest.mark.vllm
ENDS = [*range(0, 255, 9)]
WITH_IMAGES = [family for family in READERS if family != "gemma3"]  # vLLM's CPU attention does not fit Gemma 3's
# family -> the beginning of vLLM's names of layers that see images
SEES = dict.fromkeys(WITH_IMAGES, "visual.") | {"gemma3": "vision_tower."}


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    """Qwen3-VL in BF16, shared by the tests of this file that put its weights back."""
    model, processor = load_reader(save_reader(tmp_path_factory.mktemp("reader") / "model", "qwen3_vl"))
    built = engine(model, "bf16", processor)
    built.sync()
    return built


@pytest.mark.parametrize(
    ("family", "precision"),
    rest_is_long(
        [*((family, "int8") for family in READERS), ("qwen2_5_vl", "bf16")], ("qwen2_5_vl", "int8"), ("gemma3", "int8")
    ),
)
def test_live_equals_fresh_and_the_language_model_alone_is_quantized(tmp_path, family, precision):
    """Bit for bit after two syncs, with text and with images. Towers and what joins them keep BF16, and are synced."""
    model, processor = load_reader(save_reader(tmp_path / "model", family))
    sampler = engine(model, precision, processor)
    found = methods(sampler)
    outside = {name: found[name] for name in outside_of_text(found)}
    inside = {method for name, method in found.items() if name not in outside}
    gates = {"UnquantizedLinearMethod"} if family == "qwen3_5" else set()
    assert set() < inside - gates <= set(PRECISIONS[precision].vllm.methods)
    assert len(outside) >= 8 and all(name.startswith(SEES[family]) for name in outside)
    assert set(outside.values()) == {"UnquantizedLinearMethod"}

    requests = [asked(processor, [], "Say it."), *([asked(processor)] if family in WITH_IMAGES else [])]
    seen = []
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync()
        assert sampler.differing_weight() is None
        seen.append(greedy_pictured(sampler, requests))
    assert all(before != after for before, after in zip(*seen, strict=True))
    processor.save_pretrained(tmp_path / "updated")
    model.save_pretrained(tmp_path / "updated")
    again = copy.deepcopy(model)
    again.name_or_path = str(tmp_path / "updated")
    fresh = engine(again, precision, processor)
    assert greedy_pictured(fresh, requests) == seen[-1] and methods(fresh) == found


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_samples_have_the_policys_log_probabilities(tmp_path, family):
    """Of the tokens after two images of different sizes. Others, or these in another order, do not explain them."""
    model, processor = load_reader(save_reader(tmp_path / "model", family))
    sampler = engine(model, "bf16", processor, max_completion_length=40)
    samples = sampler.draw([asked(processor)] * 2)
    assert samples.token_ids[0] != samples.token_ids[1]
    assert not any(sampler.image_token in ids for ids in samples.token_ids)

    @torch.no_grad()
    def difference(images) -> float:
        total = []
        for ids, logps in zip(samples.token_ids, samples.logps, strict=True):
            fields = processed(processor, images, "What?")
            prompt = fields["input_ids"].shape[1]
            given = torch.cat([fields.pop("input_ids"), torch.tensor([ids])], 1)
            kinds = torch.nn.functional.pad(fields.pop("mm_token_type_ids"), (0, len(ids)))
            fields.pop("attention_mask")
            with torch.autocast("cpu", torch.bfloat16):
                scores = model(input_ids=given, mm_token_type_ids=kinds, **fields).logits[0, prompt - 1 : -1].float()
            scores[:, sampler.image_token] = -torch.inf
            total.append(scores.log_softmax(-1)[range(len(ids)), ids] - torch.tensor(logps))
        return torch.cat(total).abs().mean().item()

    own = difference(PICTURES)
    assert own < 0.03 and 2 * own < min(difference(PICTURES[::-1]), difference([picture(1), picture(3, 40, 40)]))


def test_places_of_features():
    """Also where an image's features are apart, or two images follow each other."""
    found = placeholders([5, 9, 9, 9, 6, 9, 7, 9], [2, 1, 2], 9)
    assert [(one.offset, one.length, one.get_num_embeds()) for one in found] == [(1, 2, 2), (3, 1, 1), (5, 3, 2)]
    assert found[2].is_embed.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="has 5 image tokens, and vLLM makes 4 features of its 2 images"):
        placeholders([5, 9, 9, 9, 6, 9, 7, 9], [2, 2], 9)


def test_another_number_of_features_is_refused(sampler):
    request = asked(sampler.processing_class)
    first = request.prompt.index(sampler.image_token)
    shorter = [*request.prompt[:first], *request.prompt[first + 1 :]]
    count = shorter.count(sampler.image_token)
    with pytest.raises(ValueError, match=f"has {count} image tokens, and vLLM makes {count + 1} features of its 2"):
        sampler.draw([Request(shorter, request.images)])


@pytest.mark.parametrize(
    "place",
    [
        "visual.merger",
        pytest.param("visual.deepstack_merger_list.0", marks=pytest.mark.long),
        pytest.param("visual.blocks.0.attn", marks=pytest.mark.long),
    ],
)
def test_the_check_finds_a_fault_that_text_does_not_show(sampler, place):
    """In the engine: a part of the tower, or of what joins it to the text, that computes something else."""
    clean = sampler.check_sync()
    assert 0 < clean["sync_check/image_logp_difference"] < clean["sync_check/image_bound"] / 2
    hooks = []

    def plant(model):
        module = model.get_submodule(place)
        hooks.append(module.register_forward_hook(lambda module, args, output: -output))

    sampler.llm.apply_model(plant)
    sampler.llm.llm_engine.reset_encoder_cache()
    try:
        with pytest.raises(RuntimeError, match="those of the policy for text, but not for an image"):
            sampler.check_sync()
    finally:
        hooks[0].remove()
        sampler.llm.llm_engine.reset_encoder_cache()
    sampler.check_sync()


def test_the_check_ends_at_an_image_token_that_was_sampled(sampler, monkeypatch):
    """No image belongs to it. transformers refuses such a row."""
    whole, logps = sampler.check_sync(), sampler.logps

    def drawn(prompts, new_tokens, images=None):
        sequences, scored = logps(prompts, new_tokens, images)
        if images:
            sequences[0][-20] = sampler.image_token
        return sequences, scored

    monkeypatch.setattr(sampler, "logps", drawn)
    found, key = sampler.check_sync(), "sync_check/image_logp_difference"
    assert 0 < found[key] < found["sync_check/image_bound"] / 2 and found[key] != whole[key]


def test_the_reference_rounds_the_tower(sampler):
    """Without that, the bound would be that of the language model alone."""
    row = pictured_row(sampler.processing_class, 400)
    sequences, _ = sampler.logps([row.prompt], 4, [row.images])
    reference, inside = Reference(sampler), []
    reference.other_layers, others = lambda: inside, reference.other_layers()
    assert len(others) == 1 + 12 + 6  # the head; three blocks of four, three mergers of two
    narrow = [reference.logps(sequences, jitter=jitter, pictured=row)[0] for jitter in (False, True)]
    inside.extend(others)
    wide = reference.logps(sequences, jitter=True, pictured=row)[0]
    assert (wide - narrow[0]).abs().mean() > 1.05 * (narrow[1] - narrow[0]).abs().mean() > 0


def test_images_whose_tokens_see_each_other_are_refused_on_a_cpu(tmp_path):
    """vLLM's CPU attention is causal everywhere. Text is sampled."""
    model, processor = load_reader(save_reader(tmp_path / "model", "gemma3"))
    sampler = engine(model, "bf16", processor)
    assert "sync_check/image_bound" not in sampler.check_sync()
    with pytest.raises(ValueError, match="tokens of an image see each other, and on a CPU vLLM's attention"):
        sampler.draw([asked(processor)])
    assert len(sampler.draw([asked(processor, [])]).token_ids) == 1
    with pytest.raises(ValueError, match=r"`train_dataset` has images\. In this policy the tokens of an image"):
        pictured_trainer(str(tmp_path / "model"), tmp_path / "out")


def test_a_policy_of_text_with_a_processor(tmp_path):
    """It has no image token whose samples would be prevented, and no image to be checked on."""
    _, processor = reader("gemma3")
    sampler = engine(policy(tmp_path / "model", family="qwen3"), "bf16", processor)
    assert sampler.image_token is None and len(sampler.draw([asked(processor, [])]).token_ids[0]) > 0
    metrics = sampler.check_sync()
    assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"]
    assert "sync_check/image_bound" not in metrics


def test_the_command_of_a_server_serves_images(tmp_path):
    """Also the one that a run shows before its model is loaded."""
    model, url = save_reader(tmp_path / "model", "qwen3_vl"), "http://127.0.0.1:9"
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 0.1}
    with pytest.raises(ConnectionError) as error:
        wait_for_server(config(QuantGRPOConfig, tmp_path / "out", rollout_precision="bf16", **settings), model)
    command = serve_command(model, "bf16", url, reads_images=True)
    assert str(error.value).endswith(f"Start it with:\n\n{command}\n")
    assert command == f"{serve_command(model, 'bf16', url)} {images_flag()}".rstrip()


def test_images_beside_speculative_decoding_are_refused(tmp_path):
    """vLLM takes no `logit_bias` there, without which a policy may sample a token that stands for an image."""
    path = save_reader(tmp_path / "model", "qwen2_5_vl")
    with pytest.raises(ValueError, match=r"`train_dataset` has images\. A policy that is given images must not sample"):
        pictured_trainer(str(path), tmp_path / "out", vllm_engine_kwargs=DRAFTING)


def test_a_plan_elsewhere_refuses_images_beside_speculative_decoding(tmp_path, monkeypatch):
    """It does not ask this machine's vLLM, which refuses Gemma 3's images by themselves. Text is planned."""

    def not_here(moment, run):
        raise ImportError("no vLLM here")

    monkeypatch.setattr(plan, "check_what", not_here)
    path = str(save_reader(tmp_path / "model", "gemma3"))
    settings = {"use_vllm": True, "vllm_mode": "colocate", "rollout_precision": "bf16", "vllm_max_model_length": 256}
    for drafts, images, refused in ((True, True, True), (True, False, False), (False, True, False)):
        args = config(QuantGRPOConfig, tmp_path / "out", **settings, vllm_engine_kwargs=DRAFTING if drafts else None)
        rows = data(4) if images else data(4).remove_columns("images")
        given = {"reward_funcs": killing(None), "processing_class": AutoProcessor.from_pretrained(path)}
        with pytest.raises(ValueError, match="has images") if refused else nullcontext():
            plan.make_plan(path, args, None, rows, **given)


def data(rows: int) -> Dataset:
    prompts = [[{"role": "user", "content": "look" * (1 + i % 2)}] for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "images": [PICTURES[: 1 + i % 2] for i in range(rows)]})


def pictured_trainer(path, output, **given):
    settings = {"use_vllm": True, "vllm_mode": "colocate", "rollout_precision": "bf16", "vllm_engine_kwargs": SMALL}
    settings |= {"vllm_max_model_length": 256, "sync_check_steps": 1, "reward_funcs": killing(None)}
    settings |= {"processing_class": AutoProcessor.from_pretrained(path), "train_dataset": data(4)}
    trainer = trainer_for(output, path, **settings | given)
    keep(trainer)
    return trainer


@pytest.mark.parametrize("family", rest_is_long(WITH_IMAGES, "qwen2_5_vl"))
def test_grpo_trains_with_images(tmp_path, family):
    """Each step is checked with an image; the gradient moves tower and text."""
    path = save_reader(tmp_path / "model", family)
    require_kernels(load_reader(path)[0])
    trainer = pictured_trainer(path, tmp_path / "out", max_steps=2)
    start = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    logged = [entry for entry in metrics(trainer) if "mismatch/abs_logp_diff" in entry]
    assert len(logged) == 2 and all(0 < entry["mismatch/abs_logp_diff"] < 0.03 for entry in logged)
    assert all(entry["sync_check/image_logp_difference"] < entry["sync_check/image_bound"] for entry in logged)
    moved = {name for name, param in trainer.model.named_parameters() if not torch.equal(param, start[name])}
    assert {name for name in start if ".visual." in name and "weight" in name} <= moved


@pytest.mark.long
@pytest.mark.parametrize("lora_sync", ["merge", "adapter"])
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_an_adapter_and_noise(tmp_path, family, lora_sync):
    """LoRA on the language model, merged or beside the base; noise is laid on the norms of the text and taken back."""
    model, processor = load_reader(save_reader(tmp_path / "model", family))
    torch.manual_seed(1)
    adapter = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|in_proj_qkv|down_proj)")
    model = get_peft_model(model, adapter)
    sampler = engine(model, "bf16", processor, lora_sync=lora_sync, wide_norms=True)
    requests, seen = [asked(processor, [], "Say it."), asked(processor)], []
    for seed in range(2):
        update(model, seed=seed, size=0.1)
        sampler.sync()
        check = sampler.check_sync()
        assert check["sync_check/image_logp_difference"] < check["sync_check/image_bound"] / 2
        seen.append(greedy_pictured(sampler, requests))
    sampler.lay_noise(RolloutNoise(0.05, 3, 7))
    assert sampler.effective_sigma == pytest.approx(0.05, rel=0.2)
    assert sampler.noise_metrics()["noise/norms"] == 2 * model.config.get_text_config().num_hidden_layers
    seen.append(greedy_pictured(sampler, requests))
    sampler.lay_noise(RolloutNoise())
    assert greedy_pictured(sampler, requests) == seen[1]
    assert all(len({str(samples[row]) for samples in seen}) == 3 for row in range(2))


@pytest.mark.long
def test_unfinished_completions_go_on_with_their_images(tmp_path):
    """In BF16, new tokens differ from the policy by rounding alone; with other images they would not."""
    path = save_reader(tmp_path / "model", "qwen3_vl")
    given = {"rollouts_in_flight": 2.0, "max_completion_length": 24, "max_steps": 4, "learning_rate": 1e-5}
    given |= {"per_device_train_batch_size": 4, "num_generations": 2, "generation_kwargs": {"stop_token_ids": ENDS}}
    trainer = pictured_trainer(path, tmp_path / "out", train_dataset=data(8), **given)
    requests, draw = [], trainer.vllm_generation.sampler.draw

    def recorded(given, *args, **kwargs):
        requests.extend(given)
        return draw(given, *args, **kwargs)

    trainer.vllm_generation.sampler.draw = recorded
    trainer.train()
    logged = [entry for entry in metrics(trainer) if "loss" in entry]
    assert sum(entry["rollouts/carried"] for entry in logged) > 0
    assert any(one.sampled and one.images for one in requests) and all(one.images for one in requests)
    assert all(entry["mismatch/abs_logp_diff"] < 0.03 for entry in logged)


@pytest.mark.parametrize("family", rest_is_long(["qwen2_5_vl", "gemma3"]))
def test_a_prepared_checkpoint_keeps_what_sees_images(tmp_path, family):
    """On disk it has other names than in the policy. vLLM starts on the same bits that a sync sends."""
    path = save_reader(tmp_path / "model", family)
    model, processor = load_reader(path)
    main(["prepare", "--model", path, "--format", "int8", "--output", str(tmp_path / "int8")])
    prepared = engine(model, "int8", processor, engine_kwargs=SMALL | {"model": str(tmp_path / "int8")})
    found = methods(prepared)
    assert {found[name] for name in outside_of_text(found)} == {"UnquantizedLinearMethod"}
    requests = [asked(processor, [], "Say it."), *([asked(processor)] if family in WITH_IMAGES else [])]
    loaded = greedy_pictured(prepared, requests)
    prepared.sync()
    assert greedy_pictured(prepared, requests) == loaded
    prepared.check_sync()


def test_transformers_still_builds_the_policys_family(tmp_path):
    """vLLM has a config of its own for Qwen3.5, which transformers' models cannot be built from."""
    model, processor = load_reader(save_reader(tmp_path / "model", "qwen3_5"))
    engine(model, "bf16", processor)
    assert type(AutoConfig.from_pretrained(tmp_path / "model")) is type(model.config)
    load_reader(str(tmp_path / "model"))
