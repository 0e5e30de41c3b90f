"""
Norms, rotary embeddings, attention and log-probabilities with an engine's kernels (`policy/exact`), here by
stand-ins in torch: what they compute, their gradients, and how a policy comes to use them. That those of vLLM give its
bits is shown on a GPU, in `gpu/test_exact_gpu.py`.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from drawing import generated
from exact_layers import EXACT_FAMILIES, TEMPERATURE, attend, batch, rotate, scored, stand_ins
from frozen_layers import gradients
from tiny import save_tiny, tiny_model
from training import config, make
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trl.trainer.utils import add_fused_lm_head

from trl_quant import QuantGRPOConfig, QuantPPOConfig, QuantPPOTrainer
from trl_quant.config.trained import check_not_compiled
from trl_quant.layers.norm import FusedRMSNorm, rms_norm
from trl_quant.layers.packed import Packed
from trl_quant.policy.exact.attention import ExactAttention, Unrotated
from trl_quant.policy.exact.head import log_probs, log_softmax
from trl_quant.policy.exact.model import compute_exactly
from trl_quant.policy.unified import unify
from trl_quant.rollout.vllm.attention import check_exact


@pytest.mark.parametrize("family", EXACT_FAMILIES)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_policy_is_the_same_function(family, padded, checkpointing):
    """In FP32, where all kernels agree: log-probabilities and gradients are those of the plain model."""
    plain = tiny_model(family)
    plain.set_attn_implementation("eager")
    exact = copy.deepcopy(plain)
    for model in (plain, exact):
        add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    names = [name for name, _ in exact.named_parameters()]
    compute_exactly(exact, stand_ins(exact))
    assert [name for name, _ in exact.named_parameters()] == names
    if checkpointing:
        exact.train().gradient_checkpointing_enable()
    inputs = batch()
    if not padded:
        inputs = {name: x[:, 8:14] for name, x in inputs.items()}
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        inputs["labels"] = inputs["input_ids"]
    found = []
    for model in (plain, exact):
        logps = scored(model, inputs)
        (logps * torch.linspace(-1, 2, logps.shape[1])).sum().backward()
        found.append((logps.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (expected, gradients), (logps, own) = found
    counted = inputs["labels"][:, 1:] != -100
    assert counted.any()
    torch.testing.assert_close(logps[:, : counted.shape[1]][counted], expected[:, : counted.shape[1]][counted])
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.abs().max() > 0, name
        torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item(), msg=name)


@pytest.mark.parametrize("packs", [True, False])
def test_a_value_head_reads_the_same_hidden_states(tmp_path, packs):
    """PPO's critic on the layers of such a policy, in FP32."""
    args = config(QuantPPOConfig, tmp_path, num_generations=1, vf_share_layers=True, pack_sequences=packs)
    trainer, found = make(QuantPPOTrainer, args), []
    torch.nn.init.normal_(trainer.critic.model.score.weight, generator=torch.Generator().manual_seed(0))
    inputs = batch()
    for _ in range(2):
        trainer._get_per_token_logps_and_entropies(trainer.model, inputs["input_ids"], inputs["attention_mask"], 12)
        found.append(trainer.critic.values({}) * inputs["attention_mask"][:, 8:])
        compute_exactly(trainer.model, stand_ins(trainer.model))
    assert any(hasattr(module, "exact_attention") for module in trainer.model.modules()) and found[0].std() > 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_sliding_windows():
    plain = tiny_model("mistral", sliding_window=4)
    plain.set_attn_implementation("eager")
    exact = copy.deepcopy(plain)
    compute_exactly(exact, stand_ins(exact))
    inputs = batch() | {"labels": None}
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, whole = plain(**inputs).logits[kept], tiny_model("mistral")(**inputs).logits[kept]
        logits = exact(**inputs).logits[kept]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (whole - expected).abs().max() > 1e-2


def test_what_is_saved_loads_anywhere(tmp_path):
    """The checkpoint is that of the plain model: names, numbers, and no word of the exchange."""
    plain = tiny_model("qwen3")
    exact = copy.deepcopy(plain)
    compute_exactly(exact, stand_ins(exact))
    for name, model in (("plain", plain), ("exact", exact)):
        model.save_pretrained(tmp_path / name)
    files = {name: sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "exact")}
    assert files["plain"] == files["exact"]
    for file in files["plain"]:
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "exact" / file).read_bytes(), file


def test_cached_generation_is_refused():
    model = tiny_model("qwen3")
    compute_exactly(model, stand_ins(model))
    with pytest.raises(ValueError, match="generate with its engine"):
        model.generate(torch.arange(5, 12)[None], max_new_tokens=3)


def test_padding_changes_no_bit():
    """In BF16, where left padding moves the positions, and so the bits, of the plain model."""
    plain = tiny_model("qwen3", dtype=torch.bfloat16)
    exact = copy.deepcopy(plain)
    compute_exactly(exact, stand_ins(exact, torch.bfloat16))
    ids = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    padded, mask = F.pad(ids, (5, 3)), F.pad(torch.ones_like(ids), (5, 3))

    def both(model):
        with torch.no_grad():
            return model(ids).logits, model(padded, attention_mask=mask).logits[:, 5:-3]

    alone, beside_padding = both(exact)
    assert torch.equal(alone, beside_padding)
    assert not torch.equal(*both(plain))


def test_the_residual_stream_is_in_bf16():
    """With master weights in FP32 under autocast, where transformers adds in FP32, as no engine does."""
    plain = tiny_model("qwen3")
    exact = copy.deepcopy(plain)
    compute_exactly(exact, stand_ins(exact, torch.bfloat16))
    seen = {}
    for name, model in (("plain", plain), ("exact", exact)):
        model.get_decoder().norm.register_forward_pre_hook(
            lambda m, args, name=name: seen.update({name: args[0].dtype})
        )
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(torch.arange(5, 20)[None])
    assert seen == {"plain": torch.float32, "exact": torch.bfloat16}


def test_log_probs_are_those_of_a_whole_row():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (70, 5000))
    targets = torch.randint(5000, (70,), generator=generator)
    logits = (hidden @ weight.t()).float() / torch.tensor(TEMPERATURE)
    expected = logits.log_softmax(-1)[torch.arange(70), targets]
    assert torch.equal(log_probs(hidden, weight, None, targets, TEMPERATURE, log_softmax), expected)
    assert torch.equal(log_probs(hidden, weight, None, targets, TEMPERATURE, log_softmax, rows=7), expected)
    assert not torch.equal(log_probs(hidden, weight, None, targets, 1.0, log_softmax), expected)
    rounded = logits.bfloat16().log_softmax(-1)[torch.arange(70), targets]
    assert (rounded.float() - expected).abs().max() > 1e-3  # what to compare in BF16 would cost
    assert len(log_probs(hidden[:0], weight, None, targets[:0], TEMPERATURE, log_softmax)) == 0


def test_trls_head_returns_them_with_its_own_gradients():
    """The values are those of `log_probs`, the gradients TRL's; a model that was not exchanged keeps TRL's values."""
    plain = tiny_model("qwen3", dtype=torch.bfloat16)
    exact = copy.deepcopy(plain)
    for model in (plain, exact):
        add_fused_lm_head(model, temperature=TEMPERATURE)
    compute_exactly(exact, stand_ins(exact, torch.bfloat16))
    inputs = batch()
    logps = scored(exact, inputs)
    hidden = exact.get_decoder()(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    counted = inputs["labels"][:, 1:] != -100
    expected = log_probs(
        hidden[:, :-1][counted], exact.lm_head.weight, None, inputs["labels"][:, 1:][counted], TEMPERATURE, log_softmax
    )
    assert torch.equal(logps[:, : counted.shape[1]][counted], expected)
    logps.sum().backward()
    scored(plain, inputs).sum().backward()
    ours, trls = (model.lm_head.weight.grad.float() for model in (exact, plain))
    assert F.cosine_similarity(ours.flatten(), trls.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", [96, 128])
def test_norms(dtype, features):
    generator = torch.Generator().manual_seed(0)
    x, r, w = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((9, features), (9, features), (features,))
    )
    y, total = rms_norm(x, w, 1e-5, r)
    assert torch.equal(total, x + r)
    wide = (x + r).double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)
    torch.testing.assert_close(y, normed * w, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=0)
    alone, same = rms_norm(x + r, w, 1e-5)
    assert torch.equal(alone, y) and torch.equal(same, total)
    norm = LlamaRMSNorm(features, 1e-5)
    norm.weight.data = w.clone()
    found = [gradients(each, x, norm.weight) for each in (FusedRMSNorm(norm), norm)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert torch.equal(found[0][0], rms_norm(x, w, 1e-5)[0])


def test_frozen_weights_get_no_gradient():
    norm = torch.nn.RMSNorm(8)
    norm.variance_epsilon = 1e-6
    exact = FusedRMSNorm(norm.requires_grad_(False))
    x = torch.randn(3, 8, requires_grad=True)
    exact(x).sum().backward()
    assert norm.weight.grad is None and x.grad.abs().sum() > 0


def test_packing():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 0, 0]])
    packed = Packed.of(mask, 3, 5, torch.device("cpu"))
    assert packed.rows.tolist() == [2, 3, 4, 5, 6, 7, 8, 11, 12]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert packed.starts.tolist() == [0, 3, 7, 9] and packed.longest == 4
    filled, tokens = packed.filled_up(8), torch.arange(1, 17)
    assert filled.padded(tokens).tolist() == [[0, 0, 1, 2, 3], [4, 5, 6, 7, 0], [0, 8, 9, 0, 0]]
    assert torch.equal(filled.padded(tokens[:, None].float())[..., 0], packed.padded(tokens[:9]).float())
    whole = Packed.of(None, 2, 3, torch.device("cpu"))
    assert whole.rows is None and whole.positions.tolist() == [0, 1, 2] * 2 and whole.starts.tolist() == [0, 3, 6]


def test_a_mask_is_packed_once_for_all_layers(monkeypatch):
    attention, calls = ExactAttention(stand_ins(tiny_model("qwen3"))), []
    monkeypatch.setattr(Packed, "of", classmethod(lambda cls, *args, of=Packed.of: calls.append(args) or of(*args)))
    q, k = torch.randn(2, 4, 6, 32), torch.randn(2, 2, 6, 32)
    mask = torch.ones(2, 6, dtype=torch.bool)
    first = attention(q, k, k, mask, 0.1, None)
    assert torch.equal(attention(q, k, k, mask, 0.1, None), first) and len(calls) == 1
    other = mask.clone()
    other[0, 0] = False
    assert not torch.equal(attention(q, k, k, other, 0.1, None), first) and len(calls) == 2
    attention(q[:, :, :5], k[:, :, :5], k[:, :, :5], None, 0.1, None)
    assert attention(q, k, k, None, 0.1, None).shape == (2, 6, 4, 32) and len(calls) == 4


CONFIG = {"train_precision": "int8", "use_vllm": True, "vllm_mode": "colocate", "bf16": False, "use_cpu": True}


def test_the_config_takes_it(tmp_path):
    assert QuantGRPOConfig(str(tmp_path), exact_rollouts=True, **CONFIG).exact_rollouts
    assert not QuantGRPOConfig(str(tmp_path), **CONFIG).exact_rollouts
    sizes = {"compilation_config": {"cudagraph_capture_sizes": [1]}, "disable_cascade_attn": True}
    assert QuantGRPOConfig(str(tmp_path), exact_rollouts=True, vllm_engine_kwargs=sizes, **CONFIG).exact_rollouts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_precision": "fp8"}, "needs `train_precision` '?\"?int8.*fp8_block"),
        ({"train_precision": None, "rollout_precision": "int8"}, "needs `train_precision`"),
        ({"rollout_precision": "bf16"}, "sampling in the `train_precision`"),
        ({"use_vllm": False, "vllm_mode": "server"}, "`use_vllm=True`; `vllm_mode='colocate'`"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=1"),
        ({"lora_sync": "adapter"}, "`lora_sync='merge'`"),
        ({"noise_schedule": "exponential"}, "no `noise_schedule`"),
        ({"torch_compile": True}, "no `torch_compile`"),
        ({"use_liger_kernel": True}, "no `use_liger_kernel`"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=False"),
        ({"vllm_model_impl": "transformers"}, "vllm_model_impl"),
        ({"vllm_engine_kwargs": {"enforce_eager": True}}, "'enforce_eager'=True"),
        ({"vllm_engine_kwargs": {"speculative_config": {"method": "ngram"}}}, "no 'speculative_config'"),
        ({"vllm_engine_kwargs": {"kv_cache_dtype": "fp8"}}, "'kv_cache_dtype'='fp8'"),
        ({"vllm_engine_kwargs": {"compilation_config": {"mode": 3}}}, "'compilation_config'=.'mode': 3"),
        ({"vllm_engine_kwargs": {"attention_config": {"backend": "TRITON_ATTN"}}}, "'attention_config'="),
        ({"vllm_engine_kwargs": {"disable_cascade_attn": False}}, "'disable_cascade_attn'=False"),
    ],
)
def test_what_would_move_bits_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=f"exact_rollouts.*{message}|{message}.*exact_rollouts"):
        QuantGRPOConfig(str(tmp_path), exact_rollouts=True, **CONFIG | change)


@pytest.mark.parametrize(
    ("capability", "family", "shape", "message"),
    [
        (None, "qwen3", {"head_dim": 128}, "compute capability 9.0.*a CPU"),
        ((8, 0), "qwen3", {"head_dim": 128}, "compute capability 8.0"),
        ((9, 0), "gemma3", {"head_dim": 128}, "not of gemma3_text"),
        ((9, 0), "falcon_h1", {"head_dim": 128}, "not of falcon_h1"),
        ((9, 0), "qwen2", {}, "heads of 128.*have 32"),
        ((9, 0), "qwen3", {"head_dim": 128, "attention_dropout": 0.1}, "attention_dropout.=0.1"),
        ((9, 0), "qwen3", {"head_dim": 128}, None),
    ],
)
def test_devices_and_models(monkeypatch, capability, family, shape, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = tiny_model(family, **shape).config
    if message is None:
        return check_exact(config)
    with pytest.raises(ValueError, match=message):
        check_exact(config)


def test_a_compiled_model_is_refused():
    model = tiny_model()
    check_not_compiled(model)
    with pytest.raises(ValueError, match="own in the policy"):
        check_not_compiled(torch.compile(model))
    model.model.layers[1].compile()
    with pytest.raises(ValueError, match=r"own in model\.layers\.1\. Load"):
        check_not_compiled(model)


@pytest.mark.vllm
def test_vllm_gets_the_norm(tmp_path, monkeypatch):
    """Each of its norms computes `rms_norm`, reloads included; other norms, and other attention, are refused."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import PROMPTS, engine, policy

    from trl_quant.rollout.vllm import exact

    given = {"compilation_config": {"mode": 3, "cudagraph_capture_sizes": [1]}, "attention_config": {"x": 1}}
    arguments = exact.exact_arguments(given)
    assert arguments["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1]}
    assert arguments["attention_config"]["flash_attn_max_num_splits_for_cuda_graph"] == 1
    assert arguments["disable_cascade_attn"] and given["compilation_config"]["mode"] == 3

    model, one_part = policy(tmp_path / "policy", tied=False), exact.attend_in_one_part
    unify(model, "int8")
    monkeypatch.setattr(exact, "exact_arguments", lambda given: {})
    monkeypatch.setattr(exact, "attend_in_one_part", lambda worker: None)
    sampler = engine(model, "int8", exact=True)
    assert sampler.kernels.dtype == torch.bfloat16 and sampler.kernels.rotated == 32
    with pytest.raises(ValueError, match="needs FlashAttention 3"):
        sampler.llm.collective_rpc(one_part)
    sampler.sync()
    seen = []
    monkeypatch.setattr(exact, "rms_norm", lambda *args: seen.append(rms_norm(*args)) or seen[-1])
    generated(sampler, PROMPTS)
    forwards, layers = len(seen) / (4 * model.config.num_hidden_layers + 1), model.config.num_hidden_layers
    assert layers and forwards == int(forwards) > 1  # two a layer, q's and k's, and the last
    (module,) = sampler.llm.apply_model(lambda vllms: vllms.model.norm)
    x, residual = torch.randn(2, 5, model.config.hidden_size).bfloat16()
    weight = model.get_decoder().norm.weight
    for ours, theirs in zip(module(x, residual), rms_norm(x, weight, module.variance_epsilon, residual), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(type(module).forward_native(module, x.clone(), residual.clone())[0], module(x, residual)[0])
    module.forward = type(module).forward
    module.__class__ = type("OtherRMSNorm", (type(module),), {})
    with pytest.raises(ValueError, match=r"norms of vLLM's Qwen3ForCausalLM.*OtherRMSNorm"):
        sampler.llm.apply_model(exact.hold_exact_norms)


@pytest.mark.vllm
def test_a_trainer_follows_its_engine(tmp_path, monkeypatch):
    """Policy and reference policy compute with the engine's kernels before the first step, or the KL would not be 0."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from dataclasses import replace

    from training import config, make, metrics
    from vllm_engines import SMALL, keep

    from trl_quant import QuantGRPOTrainer
    from trl_quant.config.checks import exact as checks
    from trl_quant.rollout.vllm import exact

    monkeypatch.setattr(checks, "check_exact", lambda config: None)
    monkeypatch.setattr(exact, "exact_arguments", lambda given: {"enforce_eager": True})
    monkeypatch.setattr(exact, "attend_in_one_part", lambda worker: None)
    own = exact.kernels

    def without_inverse(worker):  # nor attention without a cache: vLLM has neither on a CPU
        kernels = own(worker)
        turned = {name: kernels.rotate.keywords[name] for name in ("cache", "size")}
        return replace(kernels, attend=attend, rotate=partial(rotate, **turned))

    monkeypatch.setattr(exact, "kernels", without_inverse)
    small = {name: value for name, value in SMALL.items() if name != "enforce_eager"}
    path = save_tiny(tmp_path / "model", dtype=torch.bfloat16, head_dim=128)
    args = config(
        QuantGRPOConfig, tmp_path / "run", **CONFIG | {"bf16": True}, exact_rollouts=True, vllm_engine_kwargs=small,
        max_steps=2, beta=0.1, vllm_max_model_length=512, sync_check_steps=0,
    )  # fmt: skip
    trainer = make(QuantGRPOTrainer, args, model=path)
    keep(trainer)
    for model in (trainer.model, trainer.ref_model):
        decoder = model.get_decoder()
        assert isinstance(decoder.norm, FusedRMSNorm) and isinstance(decoder.rotary_emb, Unrotated)
    trainer.train()
    first, second = (entry for entry in metrics(trainer) if "kl" in entry)
    assert first["kl"] == 0 < second["kl"] and first["grad_norm"] > 0
