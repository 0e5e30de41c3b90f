"""Attention to a quantized KV cache, against vLLM's own kernel and against attention written out in loops."""

import math
from itertools import product

import pytest
import torch
from long_tests import rest_is_long
from tiny import FAMILIES, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_quant.rollout.verify.kv_cache import CACHE_FORMATS, KVCache, attending_to


NAMES = ("_q_scale", "_k_scale", "_v_scale")
WINDOW = 7
TOKENS = torch.tensor([[(7 * i + 3) % 250 for i in range(20)], [(i * i) % 251 for i in range(20)]])


def cache(format="fp8", in_fp8=False, truncates=False, **scales) -> KVCache:
    return KVCache(format, dict.fromkeys(NAMES, 1.0) | scales, in_fp8, truncates)


@pytest.mark.vllm
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has no kernel for it without AVX-512")
@pytest.mark.parametrize("scale", [1.0, 0.25, 4.0])
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_it_holds_what_vllm_stores(format, scale):
    """Bit for bit, on all numbers of BF16: vLLM's kernel for CPUs drops the bits that do not fit."""
    ops = pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed")
    numbers = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    numbers = torch.where(numbers.isfinite(), numbers, 0).reshape(1024, 2, 32)  # tokens, heads, head_dim
    keys, values = torch.zeros(8, 2, 256, 32, dtype=torch.uint8).chunk(2, dim=2)  # blocks, heads, tokens, head_dim
    ops.cpu_attn_reshape_and_cache(
        numbers, numbers, keys, values, torch.arange(1024), "vec", k_scale=scale, v_scale=scale, kv_cache_dtype=format
    )
    held = values.transpose(1, 2).reshape(numbers.shape).view(CACHE_FORMATS[format]).float() * scale
    assert torch.equal(cache(format, truncates=True, _v_scale=scale).stored(numbers.float(), "_v_scale"), held)
    nearest = cache(format, _v_scale=scale).stored(numbers.float(), "_v_scale")
    assert (nearest.abs() >= held.abs()).all()
    assert (nearest.abs() > held.abs()).sum() > 1000  # half of those between the format's least and its largest


def test_it_saturates_and_rounds_from_bf16():
    x = torch.tensor([1e30, -1e30, 1.0625 + 2**-12, 0.0])
    assert cache().stored(x, "_k_scale").tolist() == [448.0, -448.0, 1.0, 0.0]  # a tie in BF16, above it in FP32
    assert cache(_k_scale=0.5).stored(x, "_k_scale").tolist() == [224.0, -224.0, 1.0, 0.0]
    assert cache("fp8_e5m2").stored(x, "_v_scale").tolist() == [57344.0, -57344.0, 1.0, 0.0]


def rounded(x, format, scale):
    """One number at a time."""
    dtype = CACHE_FORMATS[format]
    return torch.tensor(
        [(v / scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float() * scale for v in x]
    )


def slow(caches):
    """Causal attention in loops, with queries, keys and values as `caches` hold them."""

    def attention(module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, **kwargs):
        held, window = caches[module.layer_idx], sliding_window or math.inf
        group, output = query.shape[1] // key.shape[1], torch.zeros_like(query)

        def vector(x, name):
            if name == "_q_scale" and not held.in_fp8:
                return x
            return rounded(x.bfloat16().float(), held.format, held.scales[name])

        held_keys, held_values = (
            {place: vector(x[place], name) for place in product(*map(range, x.shape[:3]))}
            for x, name in ((key, "_k_scale"), (value, "_v_scale"))
        )
        for b, h, t in product(*map(range, query.shape[:3])):
            seen = [s for s in range(t + 1) if t - s < window]
            q = vector(query[b, h, t], "_q_scale")
            scores = torch.stack([q @ held_keys[b, h // group, s] for s in seen]) * scaling
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            seen_values = torch.stack([held_values[b, h // group, s] for s in seen])
            output[b, h, t] = scores.softmax(-1) @ seen_values
        return output.transpose(1, 2), None

    return attention


@pytest.mark.parametrize("implementation", rest_is_long(["eager", "sdpa"], "sdpa"))
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_attention_equals_loops(family, implementation, monkeypatch):
    softcap = {"attn_logit_softcapping": 2.0 if implementation == "eager" else None} if family == "gemma2" else {}
    windows = {"sliding_window": WINDOW} if family in ("mistral", "gemma2", "gemma3", "phi3") else {}
    model = tiny_model(family, **softcap, **windows)
    if implementation == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"transformers computes no attention of {family} with SDPA")  # Gemma 2's from 5.21 on
    model.set_attn_implementation(implementation)
    tokens = TOKENS[:1, :12]
    plain = model(tokens).logits
    for in_fp8 in (False, True):
        caches = {0: cache(in_fp8=in_fp8, _k_scale=0.3, _q_scale=0.5), 1: cache("fp8_e5m2", in_fp8, _v_scale=3.0)}
        with monkeypatch.context() as patched:
            patched.setitem(ALL_ATTENTION_FUNCTIONS, implementation, slow(caches))
            expected = model(tokens).logits
        with attending_to(caches, model.modules(), None):
            found = model(tokens).logits
        error, moved = (found - expected).abs().mean(), (found - plain).abs().mean()
        assert error < 1e-5 and moved > 1000 * error, (in_fp8, error, moved)


@torch.no_grad()
def test_it_ends_where_it_should():
    """Layers without a quantized cache, modules outside, and everything afterwards are as before, bit for bit."""
    model, other = tiny_model(), tiny_model(seed=1)
    expected, others = model(TOKENS).logits, other(TOKENS).logits
    before = dict(ALL_ATTENTION_FUNCTIONS)
    with attending_to({}, model.modules(), None):
        assert dict(ALL_ATTENTION_FUNCTIONS) == before

    def standing_in(*args, **kwargs):
        return before["sdpa"](*args, **kwargs)

    for is_exchanged in (False, True):  # as it is; with another function in place of transformers' own
        if is_exchanged:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = standing_in
        outputs = []
        for caches in ({0: cache()}, {1: cache()}, {0: cache(), 1: cache()}):
            with attending_to(caches, model.modules(), None):
                outputs.append(model(TOKENS).logits)
                assert torch.equal(other(TOKENS).logits, others)
        assert len({output.sum().item() for output in [expected, *outputs]}) == 4
        assert torch.equal(model(TOKENS).logits, expected)
        if not is_exchanged:
            assert dict(ALL_ATTENTION_FUNCTIONS) == before
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is standing_in
    del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert dict(ALL_ATTENTION_FUNCTIONS) == before and "eager" not in before
    with pytest.raises(ZeroDivisionError), attending_to({0: cache()}, model.modules(), None):
        _ = 1 / 0
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


@torch.no_grad()
def test_eager_attention_of_a_class_made_elsewhere():
    """As FSDP2 makes one of each module that it shards."""
    model, outputs = tiny_model(), []
    model.set_attn_implementation("eager")
    for attention in (None, *(layer.self_attn for layer in model.model.layers)):
        if attention is not None:
            attention.__class__ = type("Sharded", (type(attention),), {})
        with attending_to({0: cache(), 1: cache()}, model.modules(), None):
            outputs.append(model(TOKENS).logits)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_attention_of_another_kind_is_refused():
    model = tiny_model()
    refusal = pytest.raises(RuntimeError, match=r"'fp8_e5m2' for layer 7.*none of transformers' attention functions")
    with refusal, attending_to({0: cache(), 7: cache("fp8_e5m2")}, model.modules(), None):
        model(TOKENS)


@torch.no_grad()
def test_attention_weights_are_rounded_by_as_much_as_said():
    """Where products run in FP8, the jitter is as large as what rounding softmax's outputs to E4M3 does."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(512, 64, generator=generator)
    model, seen = tiny_model(), []
    with attending_to({0: cache(in_fp8=True)}, model.modules(), lambda y, error: seen.append((y.shape, error)) or y):
        model(TOKENS)
    ((shape, stated),) = seen
    assert shape == (2, 20, 4, 32)  # relative to each head's
    for sharpness in (0.3, 1.0, 3.0):
        scores = sharpness * torch.randn(256, 512, generator=generator)
        weights = (scores - scores.amax(-1, keepdim=True)).exp() * 256  # as FlashAttention 3 scales them
        sums = weights.sum(-1, keepdim=True)
        exact, low = weights @ values / sums, weights.to(torch.float8_e4m3fn).float() @ values / sums
        error = (low - exact).norm() / exact.norm()
        assert error < 1.2 * stated and (error > stated / 1.2 or sharpness > 1)  # a weight of 1 is exact
