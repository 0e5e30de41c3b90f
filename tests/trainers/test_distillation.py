"""`QuantDistillationTrainer`: the gradient that each correction trains with, what is logged, and a quantized teacher.

The reference adds up divergences and weights one place at a time, from the logits of a plain forward pass.
"""

import itertools

import pytest
import torch
import trl.trainer.distillation_trainer as distillation_trainer
from distilling import distil, slow_loss, weights_of
from plain import drawn_logps, logits_of, plain_logps
from reference import diagnostics
from tiny import save_tiny, tiny_model
from training import UnevenLengths, gradient_of, leave_holes, metrics, step_and_batch, teacher
from transformers import AutoModelForCausalLM

from trl_quant import QuantDistillationTrainer
from trl_quant.config.checks import RULES
from trl_quant.corrections import CORRECTIONS, CorrectionInputs
from trl_quant.layers import FrozenLinear
from trl_quant.rollout import TransformersEngine


pytestmark = pytest.mark.isa

BOUNDS = {"tis": {"is_cap": 1.05}, "icepop": {"icepop_low": 0.7, "icepop_high": 1.4}}  # which int4 reaches
SGD = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "max_steps": 1}


def bounds_of(name: str) -> dict:
    return {field.removeprefix("is_").removeprefix("icepop_"): value for field, value in BOUNDS.get(name, {}).items()}


# The gradient


def test_only_the_weight_of_the_prefix_is_right():
    """
    All completions of three tokens out of three, with their probabilities: the mean over the sampler's completions,
    with the product of the ratios before each place, is the mean over the student's. A token's own ratio changes
    nothing in the mean, and the ratio of the whole completion is right too, but varies more.
    """
    generator = torch.Generator().manual_seed(0)
    length, pi, mu, value = 3, {}, {}, {}
    for t in range(length):
        for prefix in itertools.product(range(3), repeat=t):
            pi[prefix] = torch.randn(3, generator=generator).double().log_softmax(0)
            mu[prefix] = (pi[prefix] + 0.5 * torch.randn(3, generator=generator)).log_softmax(0)
            value[prefix] = torch.rand((), generator=generator).item()  # of what each place adds to the gradient
    rows = [*itertools.product(range(3), repeat=length)]

    def table(of) -> torch.Tensor:
        return torch.tensor([[of(row, t) for t in range(length)] for row in rows], dtype=torch.float64)

    logps, drawn = (table(lambda row, t, p=p: p[row[:t]][row[t]].item()) for p in (pi, mu))
    values = table(lambda row, t: value[row[:t]])
    by_student, by_sampler = logps.sum(1).exp(), drawn.sum(1).exp()
    right = (by_student[:, None] * values).sum().item()

    def moments(level: str, name: str = "decoupled") -> tuple[float, float]:
        inputs = CorrectionInputs(drawn, logps, torch.zeros(len(rows)), torch.ones_like(logps), level)
        of_row = (CORRECTIONS[name]()(inputs).weights * values).sum(1)
        mean = (by_sampler * of_row).sum().item()
        return mean, (by_sampler * of_row**2).sum().item() - mean**2

    uncorrected, own, prefix, whole = moments("token", "none"), moments("token"), moments("prefix"), moments("sequence")
    assert prefix[0] == pytest.approx(right, rel=1e-12) and whole[0] == pytest.approx(right, rel=1e-12)
    assert own[0] == pytest.approx(uncorrected[0], rel=1e-12)
    assert abs(uncorrected[0] - right) > 0.01 * right
    assert own[1] > 1.5 * uncorrected[1] and whole[1] > 1.5 * prefix[1]


class Uneven(UnevenLengths, QuantDistillationTrainer):
    pass


CASES = [(name, 1.0, False) for name in ("none", "decoupled", "tis", "icepop")]
CASES += [("decoupled", 0.0, False), ("decoupled", 0.3, False), ("none", 0.3, True), ("tis", 1.0, True)]


@pytest.mark.parametrize(("correction", "beta", "compact"), CASES)
def test_the_gradient_is_the_weighted_one(tmp_path, monkeypatch, correction, beta, compact):
    """
    In both directions: the step of two micro-batches, of completions of several lengths, is the slow reference's; with
    the weights of another correction, with a token's own ratio, with that ratio in its prefix, or with the
    completion's, it is not. `compact`: TRL hands over the places that count alone, as on a GPU.
    """
    monkeypatch.setattr(distillation_trainer, "_use_triton", lambda device: compact)
    settings = SGD | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "temperature": 0.8}
    trainer = distil(
        tmp_path, kind=Uneven, is_correction=correction, beta=beta, **settings, **BOUNDS.get(correction, {})
    )
    step, batch = step_and_batch(trainer)
    assert len(set(batch["completion_mask"].sum(1).tolist())) > 3
    model, mask, sampled = tiny_model(seed=3), batch["completion_mask"], batch["sampling_per_token_logps"]
    logits, given = logits_of(model, batch), bounds_of(correction)
    with torch.no_grad():
        other, pi = logits_of(teacher(), batch), drawn_logps(logits / 0.8, batch)

    def distance(name, before="prefix", with_bounds=given) -> float:
        weights = weights_of(name, pi, sampled, mask, before, **with_bounds)
        loss = slow_loss(logits, other, weights, mask, beta, temperature=0.8)
        gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        expected = -torch.cat([gradient.flatten() for gradient in gradients]).double()
        return ((step - expected).norm() / step.norm()).item(), loss.item()

    error, loss = distance(correction)
    assert error < 5e-5 and metrics(trainer)[0]["loss"] == pytest.approx(loss, rel=1e-5)
    if correction == "none":
        assert distance("decoupled", with_bounds={})[0] > 1e-2
    else:
        wrong = [("none", "prefix"), *((correction, before) for before in ("token", "inclusive", "sequence"))]
        assert min(distance(*one)[0] for one in wrong) > 1e-2


def test_packed_rows_have_the_step_of_padded_ones(tmp_path):
    """Of student and teacher; a teacher that cannot pack is said."""
    steps = {}
    for packs, rows in ((True, [1, 1]), (False, [8, 8])):
        seen = []

        def note(module, args, kwargs, seen=seen):
            seen.append(len(kwargs["input_ids"]))

        trainer = distil(tmp_path, kind=Uneven, is_correction="tis", pack_sequences=packs, **SGD)
        hooks = [m.model.register_forward_pre_hook(note, with_kwargs=True) for m in (trainer.model, teacher())]
        steps[packs], _ = step_and_batch(trainer)
        assert seen[-2:] == rows  # before them, the copy that samples is compared with the student
        for hook in hooks:
            hook.remove()
    assert (steps[True] - steps[False]).norm() < 5e-5 * steps[False].norm()
    with pytest.raises(ValueError, match=r"`pack_sequences`=True cannot act: the teacher's attention caps logits"):
        distil(tmp_path, pack_sequences=True, teacher_model=tiny_model("gemma2", seed=3))


def test_tokens_that_the_sampler_did_not_score_weigh_one(tmp_path):
    trainer = distil(tmp_path, is_correction="decoupled", **SGD)
    leave_holes(trainer)
    step, batch = step_and_batch(trainer)
    mask, sampled = batch["completion_mask"], batch["sampling_per_token_logps"]
    assert sampled.isnan().sum() == 1 and sampled.isinf().sum() == 1
    model = tiny_model(seed=3)
    logits = logits_of(model, batch)
    weights = weights_of("decoupled", drawn_logps(logits, batch).detach(), sampled, mask)
    expected = -gradient_of(slow_loss(logits, logits_of(teacher(), batch).detach(), weights, mask, beta=1.0), model)
    assert (step - expected).norm() < 5e-5 * step.norm()
    assert metrics(trainer)[0]["mismatch/unscored_fraction"] == pytest.approx(2 / mask.sum().item())


# What is logged


def test_the_mismatch_is_that_of_the_generation(tmp_path):
    """Against slow loops, over two micro-batches. The largest weight is that of a prefix."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **SGD}
    trainer = distil(tmp_path, is_correction="tis", is_cap=1.05, **settings)
    _, batch = step_and_batch(trainer)
    with torch.no_grad():
        pi = plain_logps(tiny_model(seed=3), batch)
    mask, sampled, log = batch["completion_mask"], batch["sampling_per_token_logps"], metrics(trainer)[0]
    expected = diagnostics(sampled, pi, mask)
    weights = [w for row in weights_of("decoupled", pi, sampled, mask) for w in row if w]
    expected["mismatch/cap_fraction"] = sum(w > 1.05 for w in weights) / len(weights)
    del expected["mismatch/same_fraction"]  # of bits, which two forward passes do not share
    for name, value in expected.items():
        assert log[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert log["mismatch/kl_k3"] > 1e-3 and 0 < log["mismatch/cap_fraction"] < 1
    assert log["sampling/importance_sampling_ratio/min"] == pytest.approx(min(weights), rel=1e-3)
    assert log["sampling/importance_sampling_ratio/max"] == pytest.approx(1.05, rel=1e-6)
    assert log["weights/normalized_quantization_error"] > 0 and "profiling/sync_weights" in trainer.state.log_history[0]


# The teacher


def test_a_quantized_teacher_is_the_one_that_the_student_learns_from(tmp_path):
    """The student takes the step that a teacher with rounded weights causes, and not the 16-bit teacher's."""
    path, steps = save_tiny(tmp_path / "teacher", seed=4, dtype=torch.bfloat16), {}
    for precision in (None, "nvfp4"):
        given = {"teacher_model": path, "teacher_model_init_kwargs": {"dtype": "float32"}}
        trainer = distil(tmp_path, teacher_precision=precision, **given, **SGD)
        layers = [module for module in trainer.teacher_model.modules() if isinstance(module, FrozenLinear)]
        assert len(layers) == (14 if precision else 0)
        assert trainer.args.teacher_model_init_kwargs == {
            "dtype": "float32"
        }  # TRL's constructor alone finds more in it
        dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for name, module in trainer.teacher_model.named_modules():
            if isinstance(module, FrozenLinear):
                dense.get_submodule(name).weight.data = module.dequantize().float()
        step, batch = step_and_batch(trainer)
        model = tiny_model(seed=3)
        ones = [[1.0] * batch["completion_mask"].shape[1] for _ in batch["completion_mask"]]
        other = logits_of(dense, batch).detach()
        loss = slow_loss(logits_of(model, batch), other, ones, batch["completion_mask"], beta=1.0)
        expected = -gradient_of(loss, model)
        assert (step - expected).norm() < 1e-4 * step.norm()
        steps[precision] = step
    assert (steps["nvfp4"] - steps[None]).norm() > 1e-2 * steps[None].norm()


# The engine


def test_the_embedded_engine_needs_no_vllm(tmp_path, monkeypatch):
    """TRL's constructor asks for vLLM when a sampler is on. It still does for its own sampler."""
    monkeypatch.setattr(distillation_trainer, "is_vllm_available", lambda: False)
    trainer = distil(tmp_path)
    trainer.train()
    assert isinstance(trainer.vllm_generation.engine, TransformersEngine) and "mismatch/kl_k1" in metrics(trainer)[0]
    assert not distillation_trainer.is_vllm_available()
    monkeypatch.setitem(RULES, "machine", ())
    with pytest.raises(ImportError, match="vLLM is not available"):
        distil(tmp_path, use_vllm=True, rollout_precision=None)
