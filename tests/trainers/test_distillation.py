"""`QuantDistillationTrainer`: the gradient that each correction trains with, what is logged and refused, and TRL's own.

The reference adds up divergences and weights one place at a time, from the logits of a plain forward pass.
"""

import itertools

import pytest
import torch
import trl.trainer.distillation_trainer as distillation_trainer
from distilling import distil, drawn_logps, logits_of, slow_loss, teacher, weights_of
from reference import diagnostics
from tiny import save_tiny, tiny_model
from training import MadeUpSampler, UnevenLengths, assert_same_run, dataset, lora, metrics, parameters, step_and_batch
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer

from trl_quant import QuantDistillationConfig, QuantDistillationTrainer
from trl_quant.config.checks import RULES
from trl_quant.corrections import CORRECTIONS, CorrectionInputs
from trl_quant.layers import FrozenLinear
from trl_quant.rollout import TransformersEngine
from trl_quant.trainers.sampling import QuantSampling


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
    trainer = distil(tmp_path, Uneven, is_correction=correction, beta=beta, **settings, **BOUNDS.get(correction, {}))
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


def test_weights_of_one_change_no_bit(tmp_path):
    """The loss equals that of the mixin alone, with `none` and with samples of the student itself."""

    class Uncorrected(QuantSampling, DistillationTrainer):
        """Quantized rollouts alone, on padded rows."""

    path, ends = save_tiny(tmp_path / "model", seed=3), []
    for kind in (Uncorrected, QuantDistillationTrainer):
        trainer = distil(tmp_path, kind, model=path, pack_sequences=False)
        trainer.train()
        ends.append(parameters(trainer))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    weighted = distil(tmp_path, model=path, is_correction="tis", pack_sequences=False)
    weighted.train()
    assert any(not torch.equal(value, ends[0][name]) for name, value in parameters(weighted).items())


def test_packed_rows_have_the_step_of_padded_ones(tmp_path):
    """Of student and teacher; a teacher that cannot pack is said."""
    steps = {}
    for packs, rows in ((True, [1, 1]), (False, [8, 8])):
        seen = []

        def note(module, args, kwargs, seen=seen):
            seen.append(len(kwargs["input_ids"]))

        trainer = distil(tmp_path, Uneven, is_correction="tis", pack_sequences=packs, **SGD)
        hooks = [m.model.register_forward_pre_hook(note, with_kwargs=True) for m in (trainer.model, teacher())]
        steps[packs], _ = step_and_batch(trainer)
        assert seen[-2:] == rows  # before them, the copy that samples is compared with the student
        for hook in hooks:
            hook.remove()
    assert (steps[True] - steps[False]).norm() < 5e-5 * steps[False].norm()
    strange = {"teacher_model": tiny_model("gemma2", seed=3)}
    with pytest.raises(ValueError, match=r"`pack_sequences`=True cannot act: the teacher's attention caps logits"):
        distil(tmp_path, pack_sequences=True, options=strange)


def test_tokens_that_the_sampler_did_not_score_weigh_one(tmp_path):
    trainer = distil(tmp_path, is_correction="decoupled", **SGD)
    generate = trainer.vllm_generation.generate

    def holes(*args, **kwargs):
        samples = generate(*args, **kwargs)
        (turn,) = trainer.vllm_generation.turns
        turn.logps[0][1], turn.logps[1][0] = None, float("-inf")
        return samples

    trainer.vllm_generation.generate = holes
    step, batch = step_and_batch(trainer)
    mask, sampled = batch["completion_mask"], batch["sampling_per_token_logps"]
    assert sampled.isnan().sum() == 1 and sampled.isinf().sum() == 1
    model = tiny_model(seed=3)
    logits = logits_of(model, batch)
    weights = weights_of("decoupled", drawn_logps(logits, batch).detach(), sampled, mask)
    slow_loss(logits, logits_of(teacher(), batch).detach(), weights, mask, beta=1.0).backward()
    expected = -torch.cat([param.grad.flatten() for param in model.parameters()]).double()
    assert (step - expected).norm() < 5e-5 * step.norm()
    assert metrics(trainer)[0]["mismatch/unscored_fraction"] == pytest.approx(2 / mask.sum().item())


# What is logged


def test_the_mismatch_is_that_of_the_generation(tmp_path):
    """Against slow loops, over two micro-batches. The largest weight is that of a prefix."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **SGD}
    trainer = distil(tmp_path, is_correction="tis", is_cap=1.05, **settings)
    _, batch = step_and_batch(trainer)
    with torch.no_grad():
        pi = drawn_logps(logits_of(tiny_model(seed=3), batch), batch)
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


COMPOSED = {
    "forward": {"beta": 0.0, "is_correction": "icepop"},
    "multiple": {"pad_to_multiple_of": 5, "is_correction": "tis"},
    "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "is_correction": "tis"},
    "mixed_precision": {"bf16": True, "gradient_checkpointing": True, "is_correction": "decoupled"},
    "uaq": {"uaq_scale": 1.5},
    "trained": {"rollout_precision": None, "train_precision": "int8"},
    "lora": {"rollout_precision": "nf4", "is_correction": "tis"},
    "frozen": {"rollout_precision": None, "train_precision": "nvfp4", "teacher_precision": "mxfp4"},
}


@pytest.mark.parametrize("option", COMPOSED)
def test_composes_with_trl(tmp_path, option):
    options = {"peft_config": lora() if option in ("lora", "frozen") else None}
    options["eval_dataset"] = dataset(4) if option == "eval" else None
    if option == "frozen":
        options["teacher_model"] = save_tiny(tmp_path / "teacher", seed=4)
    path = save_tiny(tmp_path / "model", seed=3)
    trainer = distil(tmp_path, model=path, options=options, **{"rollout_precision": "int8"} | COMPOSED[option])
    before = parameters(trainer)
    trainer.train()
    logs = [entry for entry in metrics(trainer) if "loss" in entry]
    assert len(logs) == 2 and all(0 < entry["loss"] < 20 for entry in logs)
    moved = {name for name, value in parameters(trainer).items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved) == (option in ("lora", "frozen"))
    assert all(0 <= entry["mismatch/kl_k3"] < 0.5 for entry in logs)
    assert logs[0]["mismatch/kl_k3"] > (-1 if option in ("frozen", "trained") else 0)
    if option == "eval":
        assert any(entry.get("eval_mismatch/kl_k3", 0) > 0 for entry in metrics(trainer))


# The teacher


def test_a_quantized_teacher_is_the_one_that_the_student_learns_from(tmp_path):
    """The student takes the step that a teacher with rounded weights causes, and not the 16-bit teacher's."""
    path, steps = save_tiny(tmp_path / "teacher", seed=4, dtype=torch.bfloat16), {}
    for precision in (None, "nvfp4"):
        options, wide = {"teacher_model": path}, {"dtype": "float32"}
        trainer = distil(tmp_path, teacher_precision=precision, teacher_model_init_kwargs=wide, options=options, **SGD)
        layers = [module for module in trainer.teacher_model.modules() if isinstance(module, FrozenLinear)]
        assert len(layers) == (14 if precision else 0)
        assert trainer.args.teacher_model_init_kwargs == wide  # TRL's constructor alone finds more in it
        dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for name, module in trainer.teacher_model.named_modules():
            if isinstance(module, FrozenLinear):
                dense.get_submodule(name).weight.data = module.dequantize().float()
        step, batch = step_and_batch(trainer)
        model = tiny_model(seed=3)
        ones = [[1.0] * batch["completion_mask"].shape[1] for _ in batch["completion_mask"]]
        other = logits_of(dense, batch).detach()
        slow_loss(logits_of(model, batch), other, ones, batch["completion_mask"], beta=1.0).backward()
        expected = -torch.cat([param.grad.flatten() for param in model.parameters()]).double()
        assert (step - expected).norm() < 1e-4 * step.norm()
        steps[precision] = step
    assert (steps["nvfp4"] - steps[None]).norm() > 1e-2 * steps[None].norm()


# The bits of TRL, of a resumed run, and of a fresh engine


def test_without_a_precision_it_is_trls(tmp_path):
    path, runs = save_tiny(tmp_path / "model", seed=3), []
    for kind, arguments in (
        (DistillationTrainer, DistillationConfig),
        (QuantDistillationTrainer, DistillationConfig),
        (QuantDistillationTrainer, QuantDistillationConfig),
    ):
        settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "beta": 0.5}
        settings |= {"rollout_precision": None} if arguments is QuantDistillationConfig else {}
        runs.append(distil(tmp_path, kind, arguments, path, options={"eval_dataset": dataset(4)}, **settings))
        runs[-1].train()
    assert_same_run(*runs[:2])
    assert_same_run(*runs[1:])
    assert not any("mismatch" in name for entry in metrics(runs[2]) for name in entry)


def test_trls_own_sampler_can_be_corrected_too(tmp_path, monkeypatch):
    """TRL asks for no log-probabilities; a run with a correction does."""
    monkeypatch.setattr(distillation_trainer, "VLLMGeneration", MadeUpSampler)
    monkeypatch.setattr(distillation_trainer, "is_vllm_available", lambda: True)
    monkeypatch.setitem(RULES, "machine", ())
    ends = {}
    for correction in (None, "none", "tis"):
        trainer = distil(tmp_path, use_vllm=True, rollout_precision=None, is_correction=correction)
        assert trainer.vllm_generation.asked_when_built == (None if correction is None else 0)
        assert trainer.vllm_generation.logprobs == (None if correction is None else 0)
        trainer.train()
        assert ("mismatch/kl_k1" in metrics(trainer)[0]) == (correction is not None)
        ends[correction] = parameters(trainer)
    same = [torch.equal(value, ends[None][name]) for name, value in ends["none"].items()]
    assert all(same) and any(not torch.equal(value, ends[None][name]) for name, value in ends["tis"].items())


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


def test_noise_checkpoints_and_a_resume(tmp_path):
    """A resumed run is the unbroken one."""
    path = save_tiny(tmp_path / "model", seed=3)
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "noise_schedule": "linear"}
    settings |= {"noise_stages": 3, "rollout_precision": "int8", "is_correction": "tis"}
    whole = distil(tmp_path, model=path, **settings)
    whole.train()
    assert any(entry.get("noise/effective_sigma", 0) > 0 for entry in metrics(whole))
    resumed = distil(tmp_path, model=path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert metrics(resumed)[:4] == metrics(whole)[:4]
    mine, theirs = parameters(resumed), parameters(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for other in ({"rollout_precision": "fp8"}, {"teacher_precision": "nvfp4"}, {"is_correction": "decoupled"}):
        options = {"teacher_model": save_tiny(tmp_path / "teacher", seed=4)}
        with pytest.raises(ValueError, match=next(iter(other))):
            distil(tmp_path, model=path, options=options, **settings | other).train(
                resume_from_checkpoint=str(tmp_path / "out/checkpoint-2")
            )


def test_it_samples_from_the_embedded_copy(tmp_path):
    """INT4 samples other tokens from the same seed than BF16, so the engine's numbers reach the samples."""
    losses = []
    for precision in ("bf16", "int4"):
        trainer = distil(tmp_path / precision, rollout_precision=precision, max_steps=1)
        assert (
            isinstance(trainer.vllm_generation.engine, TransformersEngine)
            and trainer.vllm_generation.engine.precision == precision
        )
        trainer.train()
        losses.append(metrics(trainer)[0]["loss"])
    assert losses[0] != losses[1]


@pytest.mark.vllm
def test_vllm_ends_as_a_fresh_engine(tmp_path):
    """Three steps with a correction, in INT8; the log-probabilities that TRL leaves out arrive."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import SMALL, fresh, greedy, keep

    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_engine_kwargs": SMALL}
    settings = {"rollout_precision": "int8", "max_steps": 3, "sync_check_steps": 2, **vllm}
    trainer = distil(tmp_path, model=model, is_correction="tis", is_cap=1.1, **settings)
    keep(trainer)
    before = greedy(trainer.vllm_generation.llm)
    trainer.train()
    logs = metrics(trainer)[:3]
    assert all(log["mismatch/kl_k3"] > 0 and log["mismatch/unscored_fraction"] == 0 for log in logs)
    assert all(log["sampling/importance_sampling_ratio/max"] <= 1.1 + 1e-6 for log in logs)
    assert [log["step"] for log in logs if "sync_check/bound" in log] == [1, 3]
    trainer.check_sync()
    after = greedy(trainer.vllm_generation.llm)
    assert before != after == greedy(fresh(trainer.model, "int8", tmp_path / "fresh"))
