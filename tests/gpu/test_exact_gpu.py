"""
`exact_rollouts` on a GPU: the policy's log-probabilities of sampled tokens are the engine's, bit for bit.

    python3 -m pytest -m gpu -s tests/gpu/test_exact_gpu.py

`-s` shows the share of tokens with the same bits and the KL, of this policy and of one that only trains in the same
format.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model


pytest.importorskip("vllm", reason="vLLM is not installed")
from drawing import generated
from exact_layers import EXACT_FAMILIES, batch
from on_gpu import LORA
from torch.nn.utils.rnn import pad_sequence
from training import config, make, metrics
from trl.trainer.utils import add_fused_lm_head
from vllm_engines import GPU_MODEL, GPU_RUN, SLEEPING, SMALL, engine, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.layers.packed import Packed, flash_attention
from trl_quant.policy.exact import attention as exact_attention
from trl_quant.policy.exact.head import frozen_head, log_probs
from trl_quant.policy.exact.model import compute_exactly
from trl_quant.policy.packed import PackedRows
from trl_quant.policy.unified import unify
from trl_quant.precisions import exact_flows


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}  # of 128
TEMPERATURE = 0.8
every_precision = pytest.mark.parametrize("precision", exact_flows())


def shape(family: str) -> dict:
    return GPU_MODEL | HEADS | {"vocab_size": 32000} | ({"head_dim": 128} if family == "qwen3" else {})


def build(path, precision, family="qwen2", lora=False, dtype=torch.bfloat16, **shapes):
    model = policy(path, tied=False, family=family, dtype=dtype, **shape(family) | shapes).cuda()
    if lora:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(**LORA))
    unify(model, precision, lora)
    add_fused_lm_head(model.get_base_model() if lora else model, temperature=TEMPERATURE)
    return model


def scored(model, prompts, completions, packs: bool = False) -> torch.Tensor:
    """
    Log-probabilities of the completions' tokens, of a batch that is padded on both sides, as TRL's is, or of packed
    rows with each prompt once.
    """
    longest = max(map(len, prompts))
    ids = pad_sequence(
        [torch.tensor([0] * (longest - len(p)) + p + c) for p, c in zip(prompts, completions, strict=True)],
        batch_first=True,
    ).cuda()
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        mask[row, longest - len(p) : longest + len(c)] = 1
        labels[row, longest : longest + len(c)] = torch.tensor(c)
    if packs:
        model = PackedRows(model, longest, shares=True)
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return torch.cat([row[longest - 1 :][: len(c)].cpu() for row, c in zip(found, completions, strict=True)])


def compare(sampler, models: dict, lengths=(3, 30, 130, 700)) -> dict[str, tuple[float, float]]:
    """
    By name of each model, the share of sampled tokens with the same bits, and the KL k3 in nats a token. Models whose
    name begins with "packed" get packed rows. Each prompt has two completions in a batch.
    """
    prompts = [[(7 * i + 3 * n + j % 2) % 250 for i in range(n)] for n in lengths for j in range(4)]
    _, completions, found, _ = generated(sampler, prompts)
    theirs = [torch.tensor(each).flatten() for each in found]
    result = {}
    for name, model in models.items():
        parts = []
        for half in (slice(0, None, 2), slice(1, None, 2)):  # of prompts of all lengths
            ours = scored(model, prompts[half], completions[half], packs=name.startswith("packed"))
            parts.append(ours - torch.cat(theirs[half]))
        d = torch.cat(parts).double()
        result[name] = (d == 0).double().mean().item(), (d.exp() - 1 - d).mean().item()
    return result


def sampler_of(model, precision, **options):
    graphs = SMALL | {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
    given = {"max_completion_length": 300, "max_num_seqs": 16, "max_model_length": 1200, "temperature": TEMPERATURE}
    return engine(model, precision, exact=True, engine_kwargs=graphs, **given | options)


def assert_same_bits(model, precision, steps=2, **options):
    plain = copy.deepcopy(model)
    sampler = sampler_of(model, precision, **options)
    compute_exactly(model, sampler.kernels)
    for step in range(steps):
        if step:
            update(model, seed=step)
            update(plain, seed=step)
        sampler.sync()
        result = compare(sampler, {"same kernels": model, "packed": model, "same format": plain})
        print(f"\n{precision:>10}", {name: f"{same:.2%}, KL {kl:.1e}" for name, (same, kl) in result.items()})
        assert result["same kernels"] == result["packed"] == (1.0, 0.0)
        assert result["same format"][0] < 0.5 and result["same format"][1] > 1e-5


@every_precision
@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_the_same_bits(tmp_path, precision, family):
    assert_same_bits(build(tmp_path / "policy", precision, family), precision)


@every_precision
def test_the_same_bits_with_a_merged_adapter(tmp_path, precision):
    assert_same_bits(build(tmp_path / "policy", precision, lora=True), precision)


@every_precision
def test_the_same_bits_with_master_weights_in_fp32(tmp_path, precision):
    assert_same_bits(build(tmp_path / "policy", precision, dtype=torch.float32), precision)


@every_precision
def test_the_same_bits_in_shapes_of_7b(tmp_path, precision):
    """Where vLLM's own norms take other blocks of threads for many tokens than for few."""
    shapes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    assert_same_bits(build(tmp_path / "policy", precision, **shapes, **heads), precision, steps=1)


@every_precision
def test_gradients(tmp_path, precision):
    """Those of the policy with transformers' operators, but for what the formats make of their last bits."""
    exact = build(tmp_path / "policy", precision)
    plain = copy.deepcopy(exact)
    compute_exactly(exact, sampler_of(exact, precision).kernels)
    inputs, found = {name: x.cuda() for name, x in batch().items()}, []
    for model in (exact, plain):
        model.train().gradient_checkpointing_enable()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(**inputs, fused_lm_head=True).log_probs.sum().backward()
        found.append({name: p.grad.float().flatten() for name, p in model.named_parameters()})
    ours, theirs = found
    assert all(torch.cosine_similarity(ours[name], theirs[name], dim=0) > 0.9 for name in theirs)
    together = [torch.cat([gradients[name] for name in theirs]) for gradients in (ours, theirs)]
    assert torch.cosine_similarity(*together, dim=0) > 0.97


@every_precision
def test_a_frozen_head(tmp_path, precision):
    """Two products of the head give the hidden states the gradient that TRL's five do; the bits are the same."""
    model = build(tmp_path / "policy", precision, lora=True)
    compute_exactly(model, sampler_of(model, precision).kernels)
    inputs, read, found = {name: x.cuda() for name, x in batch().items()}, [], []
    head, decoder = model.get_base_model().lm_head, model.get_base_model().model
    decoder.register_forward_hook(lambda decoder, args, output: read.append(output.last_hidden_state))
    for trains in (False, True):
        head.requires_grad_(trains)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                unlearned = model(**inputs, fused_lm_head=True).log_probs
            logps = model(**inputs, fused_lm_head=True).log_probs
        assert torch.equal(unlearned, logps)
        loss = (logps * torch.linspace(-1, 2, logps.shape[1]).cuda()).sum()
        found.append((logps, *torch.autograd.grad(loss, read[-1])))
    (ours, gradient), (trls, right) = found
    gradient, right = gradient.float(), right.float()
    assert torch.equal(ours, trls) and (ours != 0).any() and right.norm() > 0
    print(f"\n{precision:>10}", f"{(gradient - right).norm() / right.norm():.1e}")
    assert (gradient - right).norm() < 2**-6 * right.norm()


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_heads_gradients(tmp_path, temperature, bias):
    """Those and entropies are, up to BF16's rounding of a product, FP64's for the logits that vLLM scored."""
    score = sampler_of(build(tmp_path / "policy", "int8"), "int8").kernels.score
    random = torch.Generator("cuda").manual_seed(0)
    shapes = (2500, 512), (32000, 512), (32000,)
    hidden, weight, b = (torch.randn(s, generator=random, device="cuda").bfloat16() for s in shapes)
    weight, b, hidden = weight / 8, b if bias else None, hidden.requires_grad_()
    ids = torch.randint(32000, (2500,), generator=random, device="cuda")
    with torch.no_grad():
        logits = [torch.nn.functional.linear(x, weight, b) for x in hidden.split(1024)]
        ids[:999] = logits[0][:999].argmax(1)
        parts = [score(x, i, temperature) for x, i in zip(logits, ids.split(1024), strict=True)]
    scored, z = (torch.cat(each) for each in zip(*parts, strict=True))
    z = z.double().requires_grad_()
    log_p = z.log_softmax(1)
    right = log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    given = weight, b, ids, temperature, score
    found = frozen_head(hidden, *given, entropies=True)
    assert torch.equal(found[0], scored) and torch.equal(log_probs(hidden, *given), scored)
    for ours, expected in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-4)
    scales = torch.randn(2, 2500, generator=random, device="cuda")
    for outputs in (1, 2):  # the log-probabilities alone, and with the entropies
        losses = [sum((x * dx).sum() for x, dx in zip(each[:outputs], scales, strict=False)) for each in (found, right)]
        dx, dz = (torch.autograd.grad(*pair, retain_graph=True)[0] for pair in zip(losses, (hidden, z), strict=True))
        expected = dz @ weight.double() / temperature
        assert (dx - expected).norm() < 2**-7 * expected.norm()


def test_attentions_gradients_need_no_second_forward(tmp_path, monkeypatch):
    """They come from the log-sum-exp of vLLM's kernel, shared prompts and sliding windows included."""
    kernel = sampler_of(build(tmp_path / "policy", "int8"), "int8").kernels.attend
    mask = torch.ones(4, 400, dtype=torch.long, device="cuda")
    mask[0, :70], mask[1, :70], mask[1, 150:], mask[3, 300:] = 0, 0, 0, 0
    ids = torch.arange(400, device="cuda").expand(4, -1) + torch.tensor([[0], [0], [7], [7]], device="cuda")
    packed = Packed.sharing(mask, ids, prompt=130)
    assert packed.key_rows is not None and packed.longest_keys > packed.longest
    random = torch.Generator("cuda").manual_seed(0)
    tokens, keys = len(packed.rows), len(packed.key_rows)
    shapes = (tokens, 8, 128), (keys, 2, 128), (keys, 2, 128), (tokens, 8, 128)
    *qkv, dy = (torch.randn(s, generator=random, device="cuda").to(torch.bfloat16) for s in shapes)
    for window in (None, 32):
        given = packed, 0.1, window
        expected = gradients(flash_attention, [x.float() for x in qkv], dy.float(), *given)
        with monkeypatch.context() as alone:
            alone.setattr(exact_attention, "flash_attention", None)  # the second forward
            found = gradients(exact_attention.attention, qkv, dy, *given, kernel)
        other = gradients(flash_attention, qkv, dy, packed, 0.1, 64 if window is None else None)
        for ours, right, wrong in zip(found, expected, other, strict=True):
            assert (ours.float() - right).norm() < 0.01 * right.norm()
            assert (wrong.float() - right).norm() > 0.1 * right.norm()


def gradients(function, inputs, dy, *given) -> tuple[torch.Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs, *given), inputs, dy)


@every_precision
def test_several_updates_need_no_scoring_pass(tmp_path, precision):
    """The sampler's log-probabilities are the old ones, and what is logged was measured in the first update."""
    model = policy(tmp_path / "policy", tied=True, family="qwen2", **shape("qwen2"))
    graphs = {key: value for key, value in SMALL.items() if key not in ("enforce_eager", "compilation_config")}
    args = config(
        QuantGRPOConfig, tmp_path / "run", **GPU_RUN, max_steps=4, num_iterations=2, learning_rate=1e-4,
        train_precision=precision, exact_rollouts=True, vllm_engine_kwargs=graphs, max_completion_length=64,
    )  # fmt: skip
    trainer = make(QuantGRPOTrainer, args, model)
    score, with_gradients = trainer._get_per_token_logps_and_entropies, []

    def watched(*given, **options):
        if not trainer.correction_step.saves_pass():
            with_gradients.append(torch.is_grad_enabled())
        return score(*given, **options)

    trainer._get_per_token_logps_and_entropies = watched
    trainer.train()
    assert with_gradients and all(with_gradients)
    found = [entry.get("sampling/sampling_logp_difference/max") for entry in metrics(trainer) if "loss" in entry]
    assert found == [0, None, 0, None]
    logged = [entry for entry in metrics(trainer) if "mismatch/same_fraction" in entry]
    assert [entry["mismatch/same_fraction"] for entry in logged] == [1, 1]


@every_precision
@pytest.mark.parametrize("sleeps", [False, True])
def test_a_run(tmp_path, precision, sleeps):
    """Through the trainer, over several steps and updates: no sampled token's log-probability differs by a bit."""
    model = policy(tmp_path / "policy", tied=True, family="qwen2", **shape("qwen2"))
    held = SLEEPING if sleeps else SMALL
    graphs = {key: value for key, value in held.items() if key not in ("enforce_eager", "compilation_config")}
    args = config(
        QuantGRPOConfig, tmp_path / "run", **GPU_RUN, max_steps=3, num_iterations=1, beta=0.01, learning_rate=1e-4,
        train_precision=precision, exact_rollouts=True, vllm_enable_sleep_mode=sleeps, vllm_engine_kwargs=graphs,
        gradient_checkpointing=True, max_completion_length=64, sync_check_steps=1,
    )  # fmt: skip
    trainer = make(QuantGRPOTrainer, args, model)
    trainer.train()
    logged = [entry for entry in metrics(trainer) if "sampling/sampling_logp_difference/max" in entry]
    assert len(logged) == 3
    for entry in logged:
        assert entry["sampling/sampling_logp_difference/max"] == 0 and entry["mismatch/same_fraction"] == 1
    assert logged[0]["kl"] == 0 < logged[2]["kl"]  # the reference policy computes with the same kernels
