"""
A head that does not train under `exact_rollouts` (`policy/exact/head.frozen_head`): its log-probabilities, gradients
and entropies, and how often it is multiplied.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from exact_layers import TEMPERATURE, batch, scored, stand_ins
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import add_fused_lm_head

from trl_quant.policy.exact.head import frozen_head, log_probs, log_softmax
from trl_quant.policy.exact.model import compute_exactly
from trl_quant.trl_seams import exact_log_probs


N, FEATURES, VOCABULARY = 50, 24, 301
MULTIPLIES = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.addmm_,
    torch.ops.aten.bmm,
    torch.ops.aten.matmul,
    torch.ops.aten.linear,
}


class Products(TorchDispatchMode):
    """Counts matrix products with an operand of the vocabulary's size."""

    def __init__(self, vocabulary: int = VOCABULARY):
        super().__init__()
        self.vocabulary, self.count = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in MULTIPLIES:
            self.count += any(torch.is_tensor(x) and x.ndim == 2 and self.vocabulary in x.shape for x in args)
        return function(*args, **kwargs or {})


def rounding_score(logits, ids, temperature):
    """As vLLM's second model runner: tempered in place, in the type of the logits."""
    logits.copy_(logits.float() / temperature)
    return logits.float().log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1), logits


def head(bias: bool, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, FEATURES, generator=generator).to(dtype) for n in (N, VOCABULARY))
    b = torch.randn(VOCABULARY, generator=generator).to(dtype) if bias else None
    ids = torch.randint(VOCABULARY, (N,), generator=generator)
    ids[:5] = (hidden[:5].float() @ weight.float().t()).argmax(1)
    return hidden.requires_grad_(), weight, b, ids


def reference(hidden, weight, bias, ids, temperature):
    """Log-probabilities and entropies in FP64, by autograd."""
    z = F.linear(hidden, weight.double(), None if bias is None else bias.double()) / temperature
    logp = z.log_softmax(1)
    return logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(1)


DLOGP, DENTROPY = torch.linspace(-1, 2, N), torch.linspace(3, -1, N)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
@pytest.mark.parametrize("rows", [7, 1024])
@pytest.mark.parametrize("uses", ["log-probabilities", "entropies", "both"])
@pytest.mark.parametrize("score", [log_softmax, rounding_score])
def test_gradients_are_those_of_fp64(bias, temperature, rows, uses, score):
    hidden, *others = head(bias)

    def gradient(x, logp, entropy):
        loss = (uses != "entropies") * (logp * DLOGP).sum()
        return torch.autograd.grad(loss + (entropy * DENTROPY).sum() if uses != "log-probabilities" else loss, x)[0]

    found = frozen_head(hidden, *others, temperature, score, entropies=True, rows=rows)
    wide = hidden.detach().double().requires_grad_()
    expected = reference(wide, *others, temperature)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)
    right = gradient(wide, *expected)
    assert (gradient(hidden, *found) - right).norm() < 5e-6 * right.norm()


@pytest.mark.parametrize("score", [log_softmax, rounding_score])
@pytest.mark.parametrize("bias", [False, True])
def test_in_bf16_they_are_trls_but_for_rounding(score, bias):
    """Against FP64 of the same 16-bit numbers, the error is at most 1.5 of TRL's where only TRL rounds the same."""
    hidden, weight, b, ids = head(bias, torch.bfloat16)
    given = weight, b, ids, TEMPERATURE
    assert torch.equal(frozen_head(hidden, *given, score)[0], log_probs(hidden, *given, score, rows=9))
    wide = hidden.detach().double().requires_grad_()
    (right,) = torch.autograd.grad((reference(wide, *given)[0] * DLOGP).sum(), wide)
    errors = []
    for logp in (
        frozen_head(hidden, *given, score)[0],
        ChunkedLogProbFunction.apply(hidden, *given, 128, None, 1.0, ())[0],
    ):
        (dx,) = torch.autograd.grad((logp * DLOGP).sum(), hidden)
        assert dx.dtype == hidden.dtype
        errors.append(((dx - right).norm() / right.norm()).item())
    assert errors[0] < (1.5 * errors[1] if score is log_softmax else 2**-6) and errors[1] < 2**-6, errors


def test_the_softmax_is_that_of_the_log_probabilities():
    """Where the engine rounds the tempered logits, which moves the large ones by more than FP32's softmax would."""
    hidden, weight, _, ids = head(False, torch.bfloat16)
    hidden = (8 * hidden.detach()).requires_grad_()
    z = F.linear(hidden.detach(), weight).float().div(TEMPERATURE).bfloat16()
    p = z.double().softmax(1)
    right = (torch.eye(VOCABULARY).double()[ids] - p) @ weight.double() / TEMPERATURE
    (dx,) = torch.autograd.grad(frozen_head(hidden, weight, None, ids, TEMPERATURE, rounding_score)[0].sum(), hidden)
    (other,) = torch.autograd.grad(frozen_head(hidden, weight, None, ids, TEMPERATURE, log_softmax)[0].sum(), hidden)
    assert (dx - right).norm() < 2**-7 * right.norm() < (other - right).norm()


def test_an_empty_batch():
    hidden, weight, _, ids = head(False)
    empty = hidden.detach()[:0].requires_grad_()
    logp, entropy = frozen_head(empty, weight, None, ids[:0], 1.0, log_softmax, entropies=True)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,) and empty.grad.shape == empty.shape


@pytest.mark.parametrize(
    ("trains", "outputs", "uses", "products"),
    [
        ("hidden", ("log_probs",), "log-probabilities", 2),
        ("hidden", ("log_probs", "entropy"), "log-probabilities", 2),
        ("hidden", ("log_probs", "entropy"), "entropies", 4),
        ("head", ("log_probs", "entropy"), "log-probabilities", 5),  # TRL's gradients
        ("nothing", ("log_probs", "entropy"), None, 1),
        ("nothing", ("log_probs",), None, 1),
        ("nothing", ("log_probs", "is_top1"), None, 2),
    ],
)
def test_how_often_the_head_is_multiplied(trains, outputs, uses, products):
    hidden, weight, _, ids = head(False)
    weight.requires_grad_(trains != "hidden")
    with Products() as counted, torch.set_grad_enabled(trains != "nothing"):
        chunk = 1 << 20  # TRL's, of the vocabulary: one
        scored_by = (partial(function, score=log_softmax) for function in (log_probs, frozen_head))
        found = exact_log_probs(*scored_by).apply(hidden, weight, None, ids, TEMPERATURE, chunk, None, 1.0, outputs)
        if uses:
            (found[0] if uses == "log-probabilities" else found[0] + found[1]).sum().backward()
    assert counted.count == products
    trl = ChunkedLogProbFunction.apply(hidden, weight, None, ids, TEMPERATURE, 128, None, 1.0, outputs)
    for ours, theirs in zip(found, trl, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (weight.grad is not None) == (trains == "head")


@pytest.mark.parametrize("autocast", [False, True])
def test_a_policy_with_a_frozen_head(autocast):
    """Through TRL's fused head, with padding: values, entropies and gradients are those of the head that trains."""
    trained = tiny_model("qwen3", dtype=torch.float32 if autocast else torch.bfloat16, tie_word_embeddings=False)
    add_fused_lm_head(trained, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    frozen = copy.deepcopy(trained)
    frozen.lm_head.requires_grad_(False)
    inputs, found = batch(), []
    for model in (trained, frozen):
        add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
        compute_exactly(model, stand_ins(model, torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logps = scored(model, inputs)
            entropy = model(**inputs, fused_lm_head=True).entropy
        (logps * torch.linspace(-1, 2, logps.shape[1])).sum().backward()
        gradients = [p.grad.float().flatten() for p in model.get_decoder().parameters()]
        found.append((logps, entropy, torch.cat(gradients)))
    (values, entropies, right), (ours, own, gradient) = found
    assert torch.equal(values, ours) and frozen.lm_head.weight.grad is None
    torch.testing.assert_close(own, entropies, rtol=1e-3, atol=1e-3)
    assert (gradient - right).norm() < 0.02 * right.norm()
