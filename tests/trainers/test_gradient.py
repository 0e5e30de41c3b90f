"""Two experiments: does training follow the on-policy gradient?

In the first, completions have one token, so that a sum over the vocabulary gives the on-policy gradient exactly:

    g* = sum_a pi(a) (r(a) - b) grad log pi(a)

The trainer samples from the quantized copy mu instead. Uncorrected (`none`), a large batch estimates
sum_a mu(a) (r(a) - b) grad log pi(a), which is biased; with weights pi / mu (`decoupled`, no cap) it estimates g*.

In the second, completions have two tokens, and a sum over all pairs gives what an endless batch would train with:

    g = sum_ab mu(a) mu(b|a) (r(a, b) - b) (w_1 grad log pi(a) + w_2 grad log pi(b|a))

The weights of tokens, w_1 = pi(a) / mu(a) and w_2 = pi(b|a) / mu(b|a), no longer give g*: each token's term also
needs the other token's ratio. The weight of the sequence, w_1 w_2 for both, does.
"""

import copy

import pytest
import torch
from datasets import Dataset
from long_tests import rest_is_long
from tiny import tiny_model, tiny_tokenizer
from training import config, gradient_of, make
from trl import GRPOTrainer

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.corrections import CORRECTIONS, CorrectionInputs
from trl_quant.formats import quantize


pytestmark = pytest.mark.isa

PROMPT = "12+30="
SAMPLES = 8192
REWARDS = torch.randn(320, generator=torch.Generator().manual_seed(0)).tolist()


def by_token(completions, completion_ids, **kwargs):
    return [REWARDS[ids[0]] for ids in completion_ids]


@pytest.fixture
def sampled_once(monkeypatch):
    """TRL samples and scores one batch, for the first trainer; those after it get the same, before any correction."""
    sample, batches = GRPOTrainer._generate_and_score_completions, []

    def once(self, inputs):
        if not batches:
            batches.append((sample(self, inputs), copy.deepcopy(self._metrics)))
        batch, self._metrics = copy.deepcopy(batches[0])
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", once)


def experiment(output_dir, precision, correction):
    """Relative error of the gradient that is trained with, and the logged mismatch KL."""
    args = config(
        QuantGRPOConfig,
        output_dir,
        rollout_precision=precision,
        is_correction=correction,
        loss_type="bnpo",
        scale_rewards="none",
        max_completion_length=1,
        per_device_train_batch_size=SAMPLES,
        num_generations=SAMPLES,
    )
    trainer = make(
        QuantGRPOTrainer,
        args,
        model=tiny_model(seed=3),
        reward_funcs=by_token,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT]}),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([{"prompt": PROMPT}] * SAMPLES)
    trained = gradient_of(trainer._compute_loss(trainer.model, batch), trainer.model)

    logps = trainer.model(batch["prompt_ids"][:1]).logits[0, -1].log_softmax(-1)
    rewards = torch.tensor(REWARDS)
    baseline = (logps.exp() * rewards).sum().detach()
    exact = gradient_of(-(logps.exp().detach() * (rewards - baseline) * logps).sum(), trainer.model)
    error = ((trained - exact).norm() / exact.norm()).item()
    return error, trainer._metrics["train"]["mismatch/kl_k3"][-1]


@pytest.mark.long
def test_the_corrected_gradient_is_closer_to_the_on_policy_one(tmp_path, sampled_once, record_property):
    error, kl = {}, {}
    for correction in ("none", "decoupled"):
        error[correction], kl[correction] = experiment(tmp_path, "int4", correction)
    print(f"relative gradient error {error}, mismatch KL {kl['none']:.3g}")
    record_property("relative_gradient_error", error)
    assert kl["none"] > 0.02  # the sampler is clearly not the policy
    assert error["none"] > 2 * error["decoupled"]
    assert error["decoupled"] < 0.2


# Two tokens


def quantized_copy(model, precision):
    """The model with the linear layers of its decoder rounded; their inputs stay as they are in 4-bit formats."""
    sampler = copy.deepcopy(model)
    for module in sampler.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = quantize(module.weight.data.float(), precision).dequantize().double()
    return sampler


def all_completions(model, tokens):
    """Log-probabilities of each token of every completion of `PROMPT`, a row each, in the order of the vocabulary."""
    size = model.config.vocab_size
    prompt = torch.tensor(tiny_tokenizer()(PROMPT)["input_ids"]).expand(size, -1)
    logps = model(torch.cat([prompt, torch.arange(size)[:, None]], 1)).logits[:, -2:].log_softmax(-1)
    first, second = logps[0, 0], logps[:, 1]
    if tokens == 1:
        return first[:, None]
    return torch.stack([first[:, None].expand(size, size), second], -1).flatten(0, 1)


def expected_errors(precision, tokens):
    """Relative error of the gradient that an endless batch of completions trains with, by correction and level."""
    model = tiny_model(seed=3).double().eval()
    logps = all_completions(model, tokens)
    with torch.no_grad():
        rollout_logps = all_completions(quantized_copy(model, precision), tokens)
    policy, sampler = logps.detach().sum(1).exp(), rollout_logps.sum(1).exp()
    rewards = torch.randn(len(policy), generator=torch.Generator().manual_seed(0)).double()

    def gradient(shares, weights):
        advantages = rewards - (shares * rewards).sum()
        model.zero_grad()
        (-(shares * advantages)[:, None] * weights * logps).sum().backward(retain_graph=True)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact, errors = gradient(policy, torch.ones_like(logps)), {}
    for name, level in [("none", "token"), ("decoupled", "token"), ("decoupled", "sequence"), ("tis", "sequence")]:
        inputs = CorrectionInputs(rollout_logps, logps.detach(), rewards, torch.ones_like(logps), level)
        trained = gradient(sampler, CORRECTIONS[name]()(inputs).weights.double())
        errors[f"{name} of {level}s"] = ((trained - exact).norm() / exact.norm()).item()
    return errors


@pytest.mark.parametrize("precision", rest_is_long(["int4", "nvfp4"]))
def test_weights_of_tokens_repair_one_token_and_not_two(precision, record_property):
    one, two = (expected_errors(precision, tokens) for tokens in (1, 2))
    print(f"{precision}: expected relative gradient error of one token {one}, of two {two}")
    record_property("expected_relative_gradient_error", two)
    assert one["none of tokens"] > 0.1
    assert one["decoupled of tokens"] < 1e-9 and one["decoupled of sequences"] < 1e-9
    assert two["decoupled of sequences"] < 1e-9
    assert two["none of tokens"] > 1.2 * two["decoupled of tokens"]
    assert two["decoupled of tokens"] > 1.2 * two["tis of sequences"] > 0.01
