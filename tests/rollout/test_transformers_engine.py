"""The embedded engine: its copy is the policy on a format's grid; its log-probabilities are those it sampled with."""

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from drawing import generated
from embedded import PROMPTS, engine, reference
from long_tests import rest_is_long
from made_up_engine import MadeUp
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tiny_tokenizer
from training import lora
from transformers import DynamicCache, StaticCache

from trl_quant.formats import FORMATS, fake_quantize_activation, quantize
from trl_quant.layers import EngineLinear
from trl_quant.noise import norm_noise
from trl_quant.rollout import EngineSpec, RolloutNoise
from trl_quant.rollout.base import WeightDrift
from trl_quant.rollout.engine import requests_for
from trl_quant.rollout.trl_face import QuantGeneration, presented
from trl_quant.rollout.weights import PolicyWeights


pytestmark = pytest.mark.isa

PRECISIONS = ["bf16", *FORMATS]


def logps_of(model, prompt, completion):
    """Log-probabilities (completion length, vocabulary), one token at a time, as in sampling."""
    rows, cache, ids = [], None, torch.tensor([prompt])
    with torch.no_grad():
        for token in completion:
            output = model(ids, past_key_values=cache, use_cache=True)
            rows.append(output.logits[0, -1].float().log_softmax(-1))
            cache, ids = output.past_key_values, torch.tensor([[token]])
    return torch.stack(rows)


def test_the_cache_is_the_given_one():
    """It changes no sample, and no log-probability but by the rounding of sums."""
    samples = {}
    for name, kind in ((None, DynamicCache), ("static", StaticCache)):
        made, caches = engine(tiny_model(seed=1), "nf4", cache_implementation=name), set()
        made.sync()

        def see(module, args, inputs, caches=caches):
            caches.add(type(inputs.get("cache", inputs.get("past_key_values"))))  # transformers 5.24 renamed it

        made.copy.register_forward_pre_hook(see, with_kwargs=True)
        torch.manual_seed(0)
        samples[name] = made.sample(requests_for(PROMPTS))
        assert caches == {kind}
    assert samples["static"].token_ids == samples[None].token_ids
    for mine, expected in zip(samples["static"].logps, samples[None].logps, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", rest_is_long(PRECISIONS, "bf16", "fp8_tensor", "int8", "nvfp4", "nf4"))
def test_logps_are_those_of_the_quantized_policy(precision):
    policy = tiny_model(seed=1)
    copy = engine(policy, precision)
    torch.manual_seed(0)
    # one prompt at a time: fp8_tensor has one scale for all tokens in a batch
    outputs = [generated(copy, [prompt]) for prompt in PROMPTS]
    prompt_ids, completions, logprobs, tokens = ([rows[0] for rows in parts] for parts in zip(*outputs))
    assert prompt_ids == PROMPTS
    quantized, clean = reference(tiny_model(seed=1), precision), tiny_model(seed=1)
    worst, mismatch = 0.0, 0.0
    for prompt, ids, row, row_tokens in zip(PROMPTS, completions, logprobs, tokens):
        assert [t[0] for t in row_tokens] == ids and 1 <= len(ids) <= 12
        got = torch.tensor([x[0] for x in row])
        index = torch.arange(len(ids)), torch.tensor(ids)
        worst = max(worst, (got - logps_of(quantized, prompt, ids)[index]).abs().max().item())
        mismatch = max(mismatch, (got - logps_of(clean, prompt, ids)[index]).abs().max().item())
    # a last-bit difference can flip an activation's code, so the error may exceed float32 rounding
    assert worst < (1e-4 if FORMATS.get(precision) is None or FORMATS[precision].activations is None else 3e-2)
    assert mismatch > 10 * min(worst, 1e-3) and mismatch > 1e-3  # and it is not the trained policy


@pytest.mark.long
def test_mismatch_grows_as_bits_fall():
    policy, gap = tiny_model(seed=1), {}
    for precision in ("bf16", "int8", "int4"):
        copy = engine(policy, precision, max_completion_length=24)
        torch.manual_seed(0)
        _, completions, logprobs, _ = generated(copy, PROMPTS * 8)
        differences = [
            (torch.tensor([x[0] for x in row]) - logps_of(policy, p, ids)[range(len(ids)), ids]).abs().mean()
            for p, ids, row in zip(PROMPTS * 8, completions, logprobs)
        ]
        gap[precision] = torch.stack(differences).mean().item()
    assert 0 < 3 * gap["bf16"] < gap["int8"] and 3 * gap["int8"] < gap["int4"]


@pytest.mark.parametrize(
    "sampling",
    [
        *rest_is_long([{"min_p": 0.2}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.6}]),
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9},
    ],
)
def test_logps_follow_temperature_and_truncation(sampling):
    """Against a slow sort-based reference, over many draws: every token has the probability reported for it."""
    policy = tiny_model(seed=1)
    copy = engine(policy, "int4", max_completion_length=1, **sampling)
    torch.manual_seed(0)
    n = 4000
    _, completions, logprobs, _ = generated(copy, [PROMPTS[0]] * n)
    logits = copy.copy(torch.tensor([PROMPTS[0]])).logits[0, -1].float() / sampling.get("temperature", 1.0)
    order = logits.argsort(descending=True)
    probs = logits.softmax(-1)[order]
    keep = torch.ones_like(probs, dtype=torch.bool)
    if "top_k" in sampling:
        keep[sampling["top_k"] :] = False
        probs = torch.where(keep, probs, 0.0) / probs[keep].sum()
    if "top_p" in sampling:
        keep &= probs.cumsum(-1) - probs < sampling["top_p"]
    if "min_p" in sampling:
        keep &= probs >= sampling["min_p"] * probs[0]
    expected = torch.zeros_like(probs)
    expected[order] = torch.where(keep, probs, 0.0) / probs[keep].sum()

    drawn = torch.tensor([ids[0] for ids in completions])
    got = torch.tensor([row[0][0] for row in logprobs]).exp()
    torch.testing.assert_close(got, expected[drawn], rtol=1e-4, atol=1e-6)
    frequency = torch.bincount(drawn, minlength=len(expected)) / n
    assert (frequency - expected).abs().max() < 5 * (0.25 / n) ** 0.5
    plain = copy.copy(torch.tensor([PROMPTS[0]])).logits[0, -1].float().softmax(-1)[drawn]
    assert (got - plain).abs().max() > 0.01  # the shortcut: probabilities before temperature and truncation


def test_completions_end_at_eos_and_padding_changes_nothing():
    policy = tiny_model(seed=1)
    policy.lm_head.weight.data[257] *= 3  # make the end of text likely
    policy.generation_config.eos_token_id = [257, 100]
    copy = engine(policy, "int8", max_completion_length=30)
    torch.manual_seed(0)
    _, completions, logprobs, _ = generated(copy, PROMPTS * 20)
    ended = 0
    for ids, row in zip(completions, logprobs):
        assert len(ids) == len(row)
        assert not {257, 100} & set(ids[:-1])
        ended += ids[-1] in (257, 100)
        assert len(ids) == 30 or ids[-1] in (257, 100)
    assert ended > 0


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_sync_follows_the_policy_and_equals_a_fresh_copy(precision):
    policy = tiny_model(seed=1)
    copy = engine(policy, precision)
    copy.sync()
    ids = torch.tensor([PROMPTS[1]])
    before = copy.copy(ids).logits
    for step in range(3):
        with torch.no_grad():
            for param in policy.parameters():
                param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(step)), alpha=0.02)
        stale = copy.copy(ids).logits
        copy.sync()
        fresh = engine(policy, precision)
        fresh.sync()
        assert torch.equal(copy.copy(ids).logits, fresh.copy(ids).logits)
        assert not torch.equal(stale, copy.copy(ids).logits)
    copy.sync()
    assert copy.sync_metrics["weights/normalized_update"] == 0.0
    assert not torch.equal(before, copy.copy(ids).logits)


def test_sync_metrics_are_the_papers_norms():
    policy = tiny_model(seed=1)
    copy = engine(policy, "int4")
    copy.sync()
    assert "weights/normalized_update" not in copy.sync_metrics
    names = [n for n, _ in policy.named_parameters() if n.endswith("proj.weight")]
    old = {n: policy.get_parameter(n).detach().clone() for n in names}
    with torch.no_grad():
        for n in names:
            policy.get_parameter(n).add_(torch.randn_like(old[n]), alpha=1e-3)
    copy.sync()
    new = {n: policy.get_parameter(n).detach() for n in names}
    norm = sum(w.square().sum() for w in new.values()).sqrt()
    update = sum((new[n] - old[n]).square().sum() for n in names).sqrt() / norm
    error = sum((quantize(w, "int4").dequantize() - w).square().sum() for w in new.values()).sqrt() / norm
    assert copy.sync_metrics["weights/normalized_update"] == pytest.approx(update.item(), rel=1e-4)
    assert copy.sync_metrics["weights/normalized_quantization_error"] == pytest.approx(error.item(), rel=1e-4)
    assert error > 10 * update


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_merged_out_of_place(dtype):
    base = tiny_model(seed=1, dtype=dtype)
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, bias="none")
    )
    frozen = {n: p.detach().clone() for n, p in model.named_parameters()}
    copy = engine(model, "int8")
    copy.sync()
    for _ in range(3):
        copy.sync()
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters())
    assert not any(module.merged for module in model.modules() if hasattr(module, "merged_adapters"))
    merged = get_peft_model(
        tiny_model(seed=1, dtype=dtype),
        LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False),
    )
    merged.load_state_dict(model.state_dict())
    fresh = engine(merged.merge_and_unload(), "int8")
    fresh.sync()
    base_only = engine(tiny_model(seed=1, dtype=dtype), "int8")
    base_only.sync()
    ids = torch.tensor([PROMPTS[1]])
    assert torch.equal(copy.copy(ids).logits, fresh.copy(ids).logits)
    assert not torch.equal(copy.copy(ids).logits, base_only.copy(ids).logits)


def test_a_parameter_is_streamed_without_a_look_at_the_whole_model(monkeypatch):
    """Whether PEFT wraps a policy is found out once: accelerate walks through all modules for it."""
    policy = get_peft_model(tiny_model(seed=3), lora())
    weights, asked = PolicyWeights(policy, Accelerator(cpu=True)), []
    monkeypatch.setattr("trl_quant.rollout.weights.is_peft_model", lambda model: asked.append(model) or True)
    names = [name for name, _ in weights]
    assert (
        not asked and not any("lora" in name for name in names) and len(names) == len(list(tiny_model().parameters()))
    )


def test_only_some_layers_adapted_and_a_saved_head():
    config = LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    model = get_peft_model(tiny_model(seed=1, tied=False), config)
    copy = engine(model, "int4")
    copy.sync()
    expected = engine(model.merge_and_unload(), "int4")
    expected.sync()
    ids = torch.tensor([PROMPTS[1]])
    assert torch.equal(copy.copy(ids).logits, expected.copy(ids).logits)


def test_noise_goes_on_clean_norms_and_comes_off():
    policy = tiny_model(seed=1)
    copy = engine(policy, "bf16")
    torch.manual_seed(0)
    clean = generated(copy, PROMPTS)
    norms = {n: p.detach().clone() for n, p in copy.copy.named_parameters() if "norm" in n}
    noise = RolloutNoise(0.05, seed=3, step=7)
    for _ in range(2):  # the second time like the first: noise does not accumulate
        copy.noise = noise
        torch.manual_seed(0)
        noisy = generated(copy, PROMPTS)
        for name, param in copy.copy.named_parameters():
            if name not in norms:
                continue
            feeds = "input_layernorm" in name or "post_attention_layernorm" in name
            expected = norm_noise(norms[name], 0.05, 3, 7, name) if feeds else norms[name]
            assert torch.equal(param, expected) and feeds != torch.equal(param, norms[name])
        copy.noise = RolloutNoise(0.05, seed=3, step=8)
        generated(copy, PROMPTS)
    assert noisy[1:3] != clean[1:3]
    copy.noise = RolloutNoise()
    torch.manual_seed(0)
    assert generated(copy, PROMPTS) == clean
    assert all(torch.equal(p, norms[n]) for n, p in copy.copy.named_parameters() if n in norms)
    copy.noise = noise
    copy.sync()
    assert all(torch.equal(p, norms[n]) for n, p in copy.copy.named_parameters() if n in norms)
    torch.manual_seed(0)
    assert generated(copy, PROMPTS) == noisy


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma3", "phi3"])
def test_other_families(name):
    policy = tiny_model(name, seed=1)
    copy = engine(policy, "int8")
    torch.manual_seed(0)
    _, completions, logprobs, _ = generated(copy, PROMPTS)
    quantized = reference(tiny_model(name, seed=1), "int8")
    for prompt, ids, row in zip(PROMPTS, completions, logprobs):
        expected = logps_of(quantized, prompt, ids)[range(len(ids)), ids]
        torch.testing.assert_close(torch.tensor([x[0] for x in row]), expected, rtol=0, atol=3e-2)


def test_what_the_processor_made_of_images_reaches_the_copy_from_trls_face():
    made, seen = engine(tiny_model(seed=1), "bf16"), {}
    made.sync()
    generate = made.copy.generate

    def see(ids, pixel_values, token_type_ids, **given):
        seen.update(pixels=pixel_values, types=token_type_ids)
        return generate(ids, **given)

    made.copy.generate = see
    face = QuantGeneration(made, made.model, made.accelerator, made.processing_class, **vars(made.settings))
    pixels, images = torch.rand(1, 3, 2, 2), [[object()], None, None]
    face.multimodal_fields = {"pixel_values": pixels, "token_type_ids": [[1, 1, 2], [3] * 6, [4]]}
    face.generate(PROMPTS, images, 1)
    assert torch.equal(seen["pixels"], pixels)
    assert seen["types"].tolist() == [[0, 0, 0, 1, 1, 2], [3] * 6, [0, 0, 0, 0, 0, 4]]
    assert not hasattr(made, "multimodal_fields")


def test_an_engine_that_reads_images_by_itself_gets_requests_alone():
    """As those of vLLM and of users do."""
    engine_of_a_user = MadeUp()
    given = {"model": tiny_model(seed=1), "accelerator": Accelerator(cpu=True), "processing_class": tiny_tokenizer()}
    face = presented(engine_of_a_user, EngineSpec("embedded", "bf16"), **given)
    face.multimodal_fields = {"pixel_values": torch.ones(1)}
    assert face.generate(PROMPTS, [[object()], None, None], 1)[1] == MadeUp().sample(PROMPTS).token_ids


def test_refusals():
    policy = tiny_model(seed=1)
    for kwargs in ({"num_beams": 4}, {"typical_p": 0.9}, {"do_sample": False}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            engine(policy, "int8", generation_kwargs=kwargs)
    with pytest.raises(ValueError, match="images"):
        generated(engine(policy, "int8"), PROMPTS, images=[[object()], None, None])
    broken = tiny_model(seed=1)
    broken.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        engine(broken, "int8").sync()


def test_products_are_exact_under_autocast():
    """In BF16 the codes are multiplied, then scaled; the shortcut rounds dequantized values to BF16 first."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 128, bias=False)
    x = torch.randn(64, 256)
    layer = EngineLinear(linear, "int8", torch.bfloat16)
    layer.load(linear.weight.detach())
    exact = F.linear(
        fake_quantize_activation(x, "int8").double(), quantize(linear.weight.detach(), "int8").dequantize().double()
    )
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
        shortcut = F.linear(fake_quantize_activation(x, "int8"), quantize(linear.weight.detach(), "int8").dequantize())
    assert got.dtype == x.dtype
    bound = exact.abs().clamp(min=1e-2) * 2**-8  # the sum is rounded to BF16 once, nothing else is
    assert ((got - exact).abs() <= bound).all()
    assert not ((shortcut - exact).abs() <= bound).all()


def test_weights_in_blocks_are_not_rounded_to_bf16():
    """A kernel multiplies codes, and sums with their scales in FP32, whatever the weight's type was."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    x, weight = torch.randn(64, 256), quantize(linear.weight.detach(), "fp8_block")
    layer = EngineLinear(linear, "fp8_block", torch.bfloat16)
    returned = layer.load(linear.weight.detach())
    inputs = fake_quantize_activation(x, "fp8_block").double()
    exact = inputs @ weight.dequantize(torch.float64).T
    bound = 1e-5 * exact.abs().max()
    assert (layer(x) - exact).abs().max() <= bound
    assert (inputs @ weight.dequantize().double().T - exact).abs().max() > bound, "the values in the weight's type"
    assert torch.equal(returned, weight.dequantize())


def test_fp16_under_autocast_is_computed_in_its_type():
    """Autocast joins tensors of its own type and of FP32 alone, and the rotary embedding joins halves of an output."""
    linear = tiny_model(dtype=torch.float16).model.layers[0].self_attn.q_proj
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).half()
    layer = EngineLinear(linear, "int8", torch.bfloat16)
    layer.load(linear.weight.detach())
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
    assert torch.equal(got, layer(x.bfloat16())) and got.dtype == torch.bfloat16
    assert layer(x).dtype == torch.float16


def test_the_only_adapted_layer_is_measured():
    """One of 70 layers, which is left out when all are trained."""
    policy = tiny_model(num_hidden_layers=10)
    names = [f"{name}.weight" for name, module in policy.named_modules() if isinstance(module, torch.nn.Linear)]
    skipped = next(name for name in names if name not in WeightDrift(names, "int8").names).removesuffix(".weight")
    config = LoraConfig(r=2, target_modules=[skipped], init_lora_weights=False)
    model = get_peft_model(policy, config)
    sampler = engine(model, "int8")
    sampler.sync()
    layer = model.base_model.model.get_submodule(skipped)
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(1.5)
    moved = layer.get_delta_weight("default") * (1 - 1 / 1.5)
    weight = layer.base_layer.weight + layer.get_delta_weight("default")
    sampler.sync()
    expected = (moved.norm() / weight.norm()).item()
    assert expected > 1e-3 and sampler.sync_metrics["weights/normalized_update"] == pytest.approx(expected, rel=1e-3)
