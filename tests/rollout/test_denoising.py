"""The engine of masked diffusion: schedule, confidence and noise against slow loops; ends, batches and scores."""

import copy
import io
import math
from dataclasses import replace

import pytest
import torch
from masked_policy import LENGTH, MASK_ID, policy, tokenizer, trainer, uneven_rows
from reference_diffusion import denoised, one_step_logps, prefix_held, under_lladas_names
from tiny import FAMILIES
from tqdm import tqdm
from transformers import DynamicCache

from trl_quant.formats import quantize
from trl_quant.layers import SampledLinear
from trl_quant.layers.quantizers import quantize_input
from trl_quant.models.linears import linears
from trl_quant.policy.masked import PromptMasks
from trl_quant.policy.unified import unify
from trl_quant.precisions import unified_flows, with_products
from trl_quant.rollout import DiffusionEngine, SharedDiffusionEngine
from trl_quant.rollout.embedded.diffusion import CHUNK, Schedule, denoise, sampled, surest
from trl_quant.rollout.engine import requests_for


PROMPTS = [[72, 101, 108], [49, 43, 49, 61, 32], [120]]


def padded(prompts, extra=0):
    width = max(map(len, prompts)) + extra
    ids = torch.tensor([[256] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return ids, mask


def written(model, prompts, schedule, seed=0, ends=(), extra=0):
    torch.manual_seed(seed)
    return denoise(model, *padded(prompts, extra), schedule, MASK_ID, list(ends)).tolist()


@pytest.fixture(scope="module")
def exact():
    """In double precision, so that padding cannot move a choice."""
    return policy(dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.4])
@pytest.mark.parametrize(("block", "step"), [(4, 2), (8, 1), (4, 4)])
def test_the_schedule_is_that_of_slow_loops(exact, block, step, temperature):
    """Blocks from left to right, the surest tokens first; rows of any length beside each other."""
    expected, steps = denoised(exact, PROMPTS, LENGTH, block, step, MASK_ID, temperature)
    assert written(exact, PROMPTS, Schedule(LENGTH, block, step, temperature)) == expected
    order = [number for row in steps for number in row]
    assert order != sorted(order) or block == step  # confidence, not the place, decides the order in a block


def test_schedules_and_temperatures_differ(exact):
    """So that the comparison above could fail."""
    found = [written(exact, PROMPTS, Schedule(LENGTH, *rest)) for rest in [(4, 2, 0.0), (8, 2, 0.0), (4, 2, 1.0)]]
    assert found[0] != found[1] and found[0] != found[2]


def test_padding_and_the_batch_change_nothing(exact):
    schedule = Schedule(LENGTH, 4, 2, 0.0)
    together = written(exact, PROMPTS, schedule)
    assert together == written(exact, PROMPTS, schedule, extra=5)
    assert together == [written(exact, [prompt], schedule)[0] for prompt in PROMPTS]


def test_the_mask_token_is_never_written():
    """Not even by a model that finds it likeliest everywhere."""
    model = policy()
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    head.weight = torch.nn.Parameter(embeddings.weight.detach().clone())
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)).index_fill(0, torch.tensor([MASK_ID]), 50.0))
    for temperature in (0.0, 1.0):
        texts = written(model, PROMPTS, Schedule(LENGTH, 4, 2, temperature))
        assert all(MASK_ID not in text for text in texts)


def test_confidence_has_no_temperature_and_no_noise():
    """It is the probability of the drawn token; the token itself is a draw from the softmax at the temperature."""
    logits, draws = torch.tensor([2.0, 0.0, 1.0, -1.0]), 4000
    torch.manual_seed(0)
    tokens, confidence = sampled(logits.expand(draws, 4), 0.5)
    probabilities = [math.exp(x) / sum(map(math.exp, logits.tolist())) for x in logits.tolist()]
    assert torch.allclose(confidence, torch.tensor(probabilities, dtype=torch.float64)[tokens], atol=1e-12)
    found = torch.bincount(tokens, minlength=4)

    def chi_square(temperature):
        expected = (logits.double() / temperature).softmax(-1) * draws
        return ((found - expected) ** 2 / expected).sum().item()

    assert chi_square(0.5) < 16.3  # of 3 degrees of freedom, exceeded once in a thousand
    assert chi_square(1.0) > 100  # another temperature would show


def test_the_surest_places_are_those_not_written():
    confidence = torch.tensor([[0.9, 0.2, 0.5, 0.4], [0.1, 0.8, 0.3, 0.7]])
    is_written = torch.tensor([[True, False, False, False], [False, True, False, False]])
    assert surest(confidence, is_written, 2).tolist() == [[2, 3], [3, 2]]


def test_chunks_change_nothing(exact, monkeypatch):
    """Whatever number of rows is drawn at a time, the tokens are the same."""
    schedule = Schedule(LENGTH, 4, 2, 1.0)
    whole = written(exact, PROMPTS, schedule)
    monkeypatch.setattr("trl_quant.rollout.embedded.diffusion.CHUNK", 2 * 4 * exact.config.vocab_size)
    assert 2 * 4 * exact.config.vocab_size < CHUNK and written(exact, PROMPTS, schedule) == whole


def test_denoising_stops_where_every_text_has_ended(exact):
    """What was written until then is what all blocks would have."""
    schedule, calls = Schedule(LENGTH, 2, 1, 0.0), []
    whole = written(exact, PROMPTS, schedule)
    counter = exact.register_forward_pre_hook(lambda *args: calls.append(1))
    assert written(exact, PROMPTS, schedule) == whole and len(calls) == LENGTH
    first_block = {text[0] for text in whole}  # each text has one of these in its first block
    calls.clear()
    stopped = written(exact, PROMPTS, schedule, ends=first_block)
    assert len(calls) == 2
    assert [text[:2] for text in stopped] == [text[:2] for text in whole]
    counter.remove()


# A cache


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_blocks_are_those_of_slow_loops(exact, temperature):
    """The keys and values before a block are those of its first step; without the cache other tokens are written."""
    lengths = LENGTH, 4, 1
    slow = prefix_held(*under_lladas_names(exact.state_dict(), exact.config.to_dict()))
    expected, _ = denoised(exact, PROMPTS, *lengths, MASK_ID, temperature, logits_of=slow)
    assert written(exact, PROMPTS, Schedule(*lengths, temperature, cache_finished_blocks=True)) == expected
    assert written(exact, PROMPTS, Schedule(*lengths, temperature)) != expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_its_cache(family):
    """A block's first step alone computes the columns before it. What has not changed since then changes no logit."""
    model, widths = policy(family, dtype=torch.float64), []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    for cached in (False, True):
        schedule = Schedule(LENGTH, 4, 2, 0.0, cache_finished_blocks=cached)
        found = written(model, PROMPTS, schedule)
        columns = 5 + LENGTH
        assert widths == ([columns, LENGTH, columns, LENGTH - 4] if cached else [columns] * 4)
        widths.clear()
    ids, mask = padded(PROMPTS)
    canvas = torch.cat([ids, torch.tensor(found)], 1)
    mask, cache = torch.cat([mask, torch.ones(3, LENGTH, dtype=torch.long)], 1), DynamicCache()
    with torch.no_grad():
        whole = model(input_ids=canvas, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        cache.crop(-LENGTH)
        suffix = model(input_ids=canvas[:, -LENGTH:], attention_mask=mask, past_key_values=cache).logits
    assert torch.allclose(suffix, whole[:, -LENGTH:], atol=1e-9)


def test_an_engine_caches_where_it_is_told_to(tmp_path):
    """Completions differ, and their scores are computed without a cache."""
    found = {}
    for cached in (False, True):
        made = trainer(tmp_path, rollout_precision="int4", cache_finished_blocks=cached, tokens_per_step=1)
        engine = made.vllm_generation.engine
        engine.sync()
        torch.manual_seed(0)
        found[cached] = engine.sample(requests_for(PROMPTS))
        assert found[cached].logps == engine.estimate(PROMPTS, found[cached].token_ids)
    assert found[True].token_ids != found[False].token_ids


# The engine


@pytest.fixture
def run(tmp_path):
    """A trainer whose engine is synced."""
    made = trainer(tmp_path, rollout_precision="int4", temperature=0.7)
    made.vllm_generation.engine.sync()
    return made


def test_it_ends_completions_at_the_first_end_and_scores_what_is_left(run):
    """The scores are estimates in the copy's own numbers, and the policy's differ."""
    engine = run.vllm_generation.engine
    assert type(engine) is DiffusionEngine
    torch.manual_seed(1)
    canvas = engine.sample(requests_for(PROMPTS)).token_ids
    assert [len(ids) for ids in canvas] == [LENGTH] * 3
    end = canvas[0][3]
    run.model.generation_config.eos_token_id = end
    torch.manual_seed(1)
    samples = engine.sample(requests_for(PROMPTS))
    for ids, whole, logps in zip(samples.token_ids, canvas, samples.logps, strict=True):
        length = whole.index(end) + 1 if end in whole else LENGTH
        assert ids == whole[:length] and len(logps) == length
    assert len(samples.token_ids[0]) <= 4

    for name, model in (("copy", engine.copy), ("policy", run.model)):
        errors = []
        for prompt, ids, logps in zip(PROMPTS, samples.token_ids, samples.logps, strict=True):
            is_masked = engine.masks.of(prompt, ids, 0).tolist()
            expected = one_step_logps(model, prompt, is_masked, ids, LENGTH, MASK_ID, 0.7)
            errors.append((expected.detach() - torch.tensor(logps)).abs().max().item())
        assert max(errors) < 1e-4 if name == "copy" else max(errors) > 0.05


def test_estimates_are_the_same_in_batches_of_any_size(run):
    engine, (prompts, completions) = run.vllm_generation.engine, uneven_rows()
    whole = engine.estimate(prompts, completions, draw=1)
    for rows in (1, 2, 5):
        engine.rows_at_once = rows
        for one, other in zip(whole, engine.estimate(prompts, completions, draw=1), strict=True):
            assert one == pytest.approx(other, abs=1e-5)
    assert [len(row) for row in whole] == [len(ids) for ids in completions]
    engine.masks = PromptMasks(0.5)
    assert engine.estimate(prompts, completions, draw=1) != engine.estimate(prompts, completions, draw=2)
    with pytest.raises(NotImplementedError, match="`estimate`"):
        engine.score(prompts)


def test_a_batch_of_any_size_is_denoised_in_parts(run, monkeypatch):
    """No forward pass has more than the bound; each part's completions are those that it would get by itself."""
    engine, widths = run.vllm_generation.engine, []
    prompts = [PROMPTS[0]] * 3 + PROMPTS * 2
    engine.schedule = replace(engine.schedule, temperature=0.0)
    whole = engine.sample(requests_for(prompts))
    monkeypatch.setattr("trl_quant.rollout.embedded.diffusion.TOKENS_AT_ONCE", 4 * (5 + LENGTH) + 1)
    engine.copy.get_input_embeddings().register_forward_pre_hook(lambda module, args: widths.append(args[0].shape))
    parts = engine.sample(requests_for(prompts))
    assert parts.token_ids == whole.token_ids
    for one, other in zip(parts.logps, whole.logps, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    steps = LENGTH // 2
    assert [rows for rows, _ in widths] == [4] * steps + [4] * steps + [1] * steps + [4, 4, 1]
    monkeypatch.setattr("trl_quant.rollout.embedded.diffusion.TOKENS_AT_ONCE", 1)
    assert engine.sample(requests_for(prompts)).token_ids == whole.token_ids  # a row at least


class Bar(tqdm):
    """A bar that draws where nobody looks, and remembers."""

    made: list = []

    def __init__(self, *args, disable, **kwargs):
        self.given = disable
        super().__init__(*args, file=io.StringIO(), disable=bool(disable), **kwargs)
        Bar.made.append(self)


def test_the_steps_are_shown(tmp_path, monkeypatch):
    """By a bar of all parts' steps, on the main process and unless `disable_tqdm`, and only in a terminal."""
    monkeypatch.setattr("trl_quant.rollout.embedded.diffusion.tqdm", Bar)
    monkeypatch.setattr("trl_quant.rollout.embedded.diffusion.TOKENS_AT_ONCE", 1)
    monkeypatch.setattr(Bar, "made", [])
    for settings, shown in [({"disable_tqdm": False}, True), ({"disable_tqdm": True}, False)]:
        engine = trainer(tmp_path, rollout_precision="int4", **settings).vllm_generation.engine
        engine.sync()
        engine.sample(requests_for(PROMPTS))
        bar = Bar.made.pop()
        assert bar.given is (None if shown else True) and bar.total == 3 * LENGTH // 2
        assert bar.n == (bar.total if shown else 0)
        with monkeypatch.context() as other_rank:
            other_rank.setattr(type(engine.accelerator), "is_main_process", False)
            engine.sample(requests_for(PROMPTS[:1]))
        assert Bar.made.pop().given is True


@pytest.mark.parametrize("precision", with_products())
def test_where_a_gpu_multiplies_codes_the_copy_does_too(tmp_path, monkeypatch, precision):
    """
    Here with the products' reference in torch. The copy holds codes alone, and a layer's output is their product. It
    samples and scores as a policy that is trained in that precision does.
    """
    plain = trainer(tmp_path, rollout_precision=precision).vllm_generation.engine
    assert not any(isinstance(layer, SampledLinear) for layer in plain.copy.modules())
    monkeypatch.setattr("trl_quant.rollout.embedded.diffusion.multiplies", lambda format, device: True)
    made = trainer(tmp_path, rollout_precision=precision)
    engine, policy_layers, seen = made.vllm_generation.engine, dict(made.model.named_modules()), []
    engine.sync()
    layers = {name: layer for name, layer in engine.copy.named_modules() if isinstance(layer, SampledLinear)}
    assert len(layers) == len(linears(made.model)) and all(l.weight.values.itemsize == 1 for l in layers.values())
    for name, layer in layers.items():
        layer.register_forward_hook(lambda module, args, y, name=name: seen.append((name, args[0], y)))
    prompts, completions = uneven_rows()
    scored = engine.estimate(prompts, completions)
    assert {name for name, *_ in seen} == set(layers)
    for name, x, y in seen:
        weight = policy_layers[name].weight.detach()
        exact = quantize_input(x.flatten(0, 1), precision).dequantize().double()
        expected = (exact @ quantize(weight, precision).dequantize().double().T).view_as(y)
        unquantized = x.double() @ weight.double().T
        assert torch.allclose(y.double(), expected, atol=1e-5 * expected.abs().max().item())
        assert (unquantized - expected).norm() > 1e-3 * expected.norm()

    if precision not in unified_flows():  # and each product is checked above
        return
    trained = copy.deepcopy(made.model)
    vars(trained).pop("forward")  # TRL's head, which would call the first model
    unify(trained, precision)
    for prompt, ids, logps in zip(prompts, completions, scored, strict=True):
        is_masked = engine.masks.of(prompt, ids, 0).tolist()
        expected = one_step_logps(trained, prompt, is_masked, ids, LENGTH, MASK_ID)
        assert torch.allclose(torch.tensor(logps), expected.detach(), atol=1e-4)
    seen.clear()
    engine.sample(requests_for(prompts))
    assert len(seen) == len(layers) * (LENGTH // 2 + 1)  # two tokens a step, and the scoring pass


def test_a_policy_in_the_engines_precision_is_shared(tmp_path):
    made = trainer(tmp_path, train_precision="int8")
    assert type(made.vllm_generation.engine) is SharedDiffusionEngine
    assert made.vllm_generation.engine.mask_token_id == tokenizer().mask_token_id == MASK_ID


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_attends_in_both_directions(family):
    """Padded or not, the first token sees the last; with the causal mask it does not."""
    ids = torch.tensor([[40, 41, 42, 43], [256, 50, 51, 52]])
    mask = (ids != 256).long()
    other = ids.clone()
    other[:, -1] = 99
    for is_causal in (False, True):
        model = policy(family, is_causal=is_causal)
        with torch.no_grad():
            for batch, changed, kept in ((ids, other, mask), (ids[:1], other[:1], mask[:1])):
                moved = [model(input_ids=x, attention_mask=kept).logits[:, 1] for x in (batch, changed)]
                difference = (moved[0] - moved[1]).abs().amax(-1)
                assert (difference == 0).all() if is_causal else (difference > 0.1).all()
