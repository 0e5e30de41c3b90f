"""`QuantRLOOTrainer`: the gradient that each correction trains with, what is logged, and TRL's own trainer.

The loss takes no weights and its value has none in it, so these tests compare gradients. The reference multiplies the
slow loops of `reference.py`, one number at a time, with the gradients of a plain forward pass of another model.
"""

import math

import pytest
import torch
import trl.trainer.rloo_trainer as rloo_trainer
from reference import DROPPING, diagnostics, rloo_gradient
from rloo import quantized
from tiny import save_tiny, tiny_model
from training import MadeUpSampler, assert_same_run, config, dataset, lora, make, metrics, parameters
from trl import RLOOConfig, RLOOTrainer

from trl_quant import QuantRLOOConfig, QuantRLOOTrainer
from trl_quant.config.checks import RULES
from trl_quant.corrections import CORRECTIONS
from trl_quant.rollout import TransformersEngine
from trl_quant.rollout.engine import Samples
from trl_quant.trainers.sampling import QuantSampling


pytestmark = pytest.mark.isa

USABLE = [name for name, kind in CORRECTIONS.items() if not kind.moves_clip_bounds]
LOW, HIGH = 0.2, 0.3
EVEN = {"tis": {"is_cap": 1.05}, "ais": {"is_cap": 1.5, "ais_gamma": 0.8}} | DROPPING  # caps that int4 reaches


def rows() -> list[dict]:
    return [{"prompt": prompt} for prompt in dataset(2)["prompt"] for _ in range(4)]


def scored(trainer) -> dict[str, torch.Tensor]:
    """The scored batch that the next step trains on, with what the engine itself returned."""
    trainer.model.train()
    trainer.state.max_steps = trainer.args.max_steps
    trainer.current_gradient_accumulation_steps = 1
    generate, samples = trainer.vllm_generation.generate, []
    trainer.vllm_generation.generate = lambda *args, **kwargs: samples.append(generate(*args, **kwargs)) or samples[-1]
    batch = trainer._generate_and_score_completions(rows())
    del trainer.vllm_generation.generate
    _, completions, logps, _ = samples[0]
    sampled = torch.full(batch["completion_ids"].shape, math.nan)
    for row, (ids, drawn) in enumerate(zip(completions, logps, strict=True)):
        assert batch["completion_ids"][row, : len(ids)].tolist() == list(ids)
        sampled[row, : len(ids)] = torch.tensor([logp for (logp,) in drawn])
    return batch, sampled


def plain_logps(model, batch) -> torch.Tensor:
    """Log-probabilities of the completions' tokens from transformers' own head, with their gradient."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    keep = batch["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    return logits[:, -keep - 1 : -1].log_softmax(-1).gather(2, batch["completion_ids"][..., None]).squeeze(2)


def gradient_of(loss, model) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def move(model) -> None:
    """Moves the policy, as updates would, so that some completions are clipped."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator), alpha=0.004)


def hyperparameters(name: str) -> dict:
    fields = {"is_cap": "cap"}
    return {fields.get(field, field.removeprefix(f"{name}_")): value for field, value in EVEN.get(name, {}).items()}


# The gradient


EVERY = [*((name, "token") for name in USABLE), ("tis", "sequence"), ("decoupled", "sequence")]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """By correction and level, the expected gradient and its factors on each log-probability; and their batch."""
    batch, rollout = scored(quantized(tmp_path_factory.mktemp("everything"), is_correction="none"))
    before, other, results = tiny_model(seed=3), tiny_model(seed=3), {}
    move(other)
    for name, level in EVERY:
        logps = plain_logps(other, batch)
        inputs = logps.detach(), plain_logps(before, batch).detach(), rollout
        of_batch = batch["advantages"], batch["completion_mask"], LOW, HIGH
        factors = rloo_gradient(name, *inputs, *of_batch, level=level, **hyperparameters(name))
        results[name, level] = gradient_of(-(factors * logps).sum(), other), factors
    return results, batch


@pytest.mark.parametrize(("correction", "level"), EVERY)
def test_the_gradient_is_the_weighted_one(tmp_path, everything, correction, level):
    """After the policy has moved, on a real batch; it is no other correction's, and not that of weighted losses."""
    given = EVEN.get(correction, {}) | ({"importance_sampling_level": level} if level == "sequence" else {})
    given |= {"num_iterations": 2}  # a later update, whose policy has moved
    trainer = quantized(tmp_path, is_correction=correction, epsilon=LOW, epsilon_high=HIGH, **given)
    batch, rollout = scored(trainer)
    with torch.no_grad():
        old = plain_logps(tiny_model(seed=3), batch)
    move(trainer.model)
    loss = trainer._compute_loss(trainer.model, dict(batch))
    trained = gradient_of(loss, trainer.model)

    results, expected = everything
    assert torch.equal(batch["completion_ids"], expected["completion_ids"])
    other, a, mask = tiny_model(seed=3), batch["advantages"], batch["completion_mask"]
    move(other)
    logps = plain_logps(other, batch)

    def distance(gradient):
        return ((trained - gradient).norm() / trained.norm()).item()

    right, factors = results[correction, level]
    assert distance(right) < 2e-5
    assert min(distance(gradient) for key, (gradient, _) in results.items() if key != (correction, level)) > 1e-3
    if correction not in ("trm", "dppo"):  # whose ratio is 1
        clipped = (factors == 0).all(1) & (results["none", "token"][1] == 0).all(1)
        assert 0 < clipped.sum() < len(clipped)

    # The shortcut: the mean weight of its tokens on each completion's loss
    means = factors.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    shortcut = gradient_of(-(means * mask * logps).sum(), other)
    if level == "token" and correction not in ("none", "coupled", "geometric"):
        assert distance(shortcut) > 1e-3
    # The value is RLOO's, without a weight
    proximal = {"coupled": rollout, "trm": logps.detach(), "dppo": logps.detach()}.get(correction, old)
    ratio = ((logps.detach() - proximal) * mask).nan_to_num().sum(1).exp()
    value = -torch.min(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a).mean()
    assert loss.item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5)


def test_weights_move_with_their_rows(tmp_path):
    """Two micro-batches of a shuffled generation add up to the step of one."""
    ends = []
    for size in (8, 4):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        settings |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 1}
        trainer = quantized(tmp_path / str(size), is_correction="decoupled", **settings)
        trainer.train()
        ends.append(torch.cat([value.flatten() for value in parameters(trainer).values()]))
    start = torch.cat([value.detach().flatten() for value in tiny_model(seed=3).parameters()])
    assert (ends[0] - ends[1]).norm() < 1e-4 * (ends[0] - start).norm()


def test_without_a_mismatch_nothing_is_weighted(tmp_path):
    """Weights of 1 leave every bit where it was: `none` trains as the mixin without any correction."""

    class Uncorrected(QuantSampling, RLOOTrainer):
        """Quantized rollouts alone."""

    path = save_tiny(tmp_path / "model", seed=3)
    ends = []
    for kind in (Uncorrected, QuantRLOOTrainer):
        args = config(QuantRLOOConfig, tmp_path, rollout_precision="int4", is_correction="none", max_steps=2)
        trainer = make(kind, args, model=path)
        trainer.train()
        ends.append(parameters(trainer))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    corrected = quantized(tmp_path, path, is_correction="tis")
    corrected.train()
    assert any(not torch.equal(value, ends[0][name]) for name, value in parameters(corrected).items())


def test_tokens_that_the_sampler_did_not_score_weigh_one(tmp_path):
    trainer = quantized(tmp_path, is_correction="decoupled", num_iterations=2)  # scored before the first loss
    generate = trainer.vllm_generation.generate

    def holes(*args, **kwargs):
        samples = generate(*args, **kwargs)
        (turn,) = trainer.vllm_generation.turns
        turn.logps[0][1], turn.logps[1][0] = None, float("-inf")
        return samples

    trainer.vllm_generation.generate = holes
    trainer.model.train()
    batch = trainer._generate_and_score_completions(rows())
    weights = batch["importance_sampling_ratio"]
    assert weights[0, 1] == weights[1, 0] == 1 != weights[0, 0] and weights.isfinite().all()
    unscored = trainer._metrics["train"]["mismatch/unscored_fraction"][-1]
    assert unscored == pytest.approx(2 / batch["completion_mask"].sum().item())
    trainer.vllm_generation.generate = generate

    class Silent:
        def sync(self): ...

        def sample(self, requests):
            return Samples([[70, 71, 72] for _ in requests])

    class FromSilence(QuantRLOOTrainer):
        def build_engine(self, *args, **settings):
            return Silent()

    silent = make(FromSilence, config(QuantRLOOConfig, tmp_path, rollout_precision="bf16", max_steps=1, beta=0.0))
    silent.train()
    assert metrics(silent)[0]["mismatch/unscored_fraction"] == 1.0


# What is logged


@pytest.mark.parametrize("correction", ["tis", "trm"])
def test_the_mismatch_is_that_of_the_generation(tmp_path, correction):
    """Against slow loops; `trm` measures in the losses, of two micro-batches here."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "is_cap": 1.05}
    settings = settings if correction == "tis" else settings | {"is_cap": None, "trm_delta": 0.5}
    trainer = quantized(tmp_path, is_correction=correction, max_steps=1, **settings)
    batches, score = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(score(inputs)) or batches[-1]
    trainer.train()
    (log, *_), (batch,) = metrics(trainer), batches
    with torch.no_grad():
        old = plain_logps(tiny_model(seed=3), batch)
    cap = 1.05 if correction == "tis" else math.inf
    expected = diagnostics(batch["sampling_per_token_logps"], old, batch["completion_mask"], cap)
    del expected["mismatch/same_fraction"]  # of bits, which two forward passes do not share
    for name, value in expected.items():
        assert log[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert log["mismatch/kl_k3"] > 1e-3
    assert ("mismatch/dropped_fraction" in log) == (correction == "trm")
    assert log["sampling/sampling_logp_difference/mean"] == pytest.approx(expected["mismatch/abs_logp_diff"], rel=1e-3)
    least = 0 if correction == "trm" else log["sampling/importance_sampling_ratio/min"]
    assert log["sampling/importance_sampling_ratio/min"] == least < 1
    assert log["weights/normalized_quantization_error"] > 0 and "profiling/sync_weights" in trainer.state.log_history[0]


COMPOSED = {
    "iterations": {"num_iterations": 2, "is_correction": "dppo"},
    "steps_per_generation": {"per_device_train_batch_size": 4, "steps_per_generation": 2, "is_correction": "ais"},
    "reference": {"beta": 0.1, "is_correction": "coupled"},
    "normalized": {"normalize_advantages": True, "reward_clip_range": (0.1, 0.9)},
    "truncated": {"mask_truncated_completions": True},
    "multiple": {"pad_to_multiple_of": 5},
    "padded": {"pack_sequences": False},
    "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "mixed_precision": {"bf16": True, "gradient_checkpointing": True},
    "uaq": {"uaq_scale": 1.5},
    "trained": {"rollout_precision": None, "train_precision": "int8"},
    "lora": {"rollout_precision": "nf4"},
    "frozen": {"rollout_precision": None, "train_precision": "nvfp4"},
}


@pytest.mark.parametrize("option", COMPOSED)
def test_composes_with_trl(tmp_path, option):
    settings = {"rollout_precision": "int8", "max_steps": 2, "num_generations": 2} | COMPOSED[option]
    trainer = make(
        QuantRLOOTrainer,
        config(QuantRLOOConfig, tmp_path / "out", **settings),
        model=save_tiny(tmp_path / "model", seed=3),
        peft_config=lora() if option in ("lora", "frozen") else None,
        eval_dataset=dataset(2) if option == "eval" else None,
    )
    before = parameters(trainer)
    trainer.train()
    logs = [entry for entry in metrics(trainer) if "loss" in entry]
    assert len(logs) == 2 and all(math.isfinite(entry["loss"]) for entry in logs)
    if option != "truncated":  # every completion of a random model is cut, and then nothing counts
        moved = {name for name, value in parameters(trainer).items() if not torch.equal(value, before[name])}
        assert moved and all("lora_" in name for name in moved) == (option in ("lora", "frozen"))
        assert all(entry["mismatch/abs_logp_diff"] >= 0 for entry in logs if "mismatch/kl_k3" in entry)
        assert "mismatch/kl_k3" in logs[0] and (logs[0]["mismatch/kl_k3"] > 0 or option in ("frozen", "trained"))
    if option == "eval":
        assert any(entry.get("eval_mismatch/kl_k3", 0) > 0 for entry in metrics(trainer))


# The bits of TRL, of a sampler with the same numbers, and of a resumed run


def test_without_a_precision_it_is_trls(tmp_path):
    path = save_tiny(tmp_path / "model", seed=3)
    settings = {"max_steps": 2, "num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1}
    runs = []
    for kind, arguments in (
        (RLOOTrainer, RLOOConfig),
        (QuantRLOOTrainer, RLOOConfig),
        (QuantRLOOTrainer, QuantRLOOConfig),
    ):
        args = config(arguments, tmp_path, per_device_eval_batch_size=4, **settings)
        runs.append(make(kind, args, model=path, eval_dataset=dataset(2)))
        runs[-1].train()
    assert_same_run(*runs[:2])
    assert_same_run(*runs[1:])
    assert not any("mismatch" in name for entry in metrics(runs[2]) for name in entry)


def test_trls_own_sampler_can_be_corrected_too(tmp_path, monkeypatch):
    """TRL asks for no log-probabilities; a run with a correction does."""
    monkeypatch.setattr(rloo_trainer, "VLLMGeneration", MadeUpSampler)
    monkeypatch.setitem(RULES, "machine", ())
    ends = {}
    for correction in (None, "none", "tis"):
        args = config(QuantRLOOConfig, tmp_path, use_vllm=True, is_correction=correction, max_steps=2, beta=0.0)
        trainer = make(QuantRLOOTrainer, args)
        assert trainer.vllm_generation.asked_when_built == (None if correction is None else 0)
        assert trainer.vllm_generation.logprobs == (None if correction is None else 0)
        trainer.train()
        assert ("mismatch/kl_k1" in metrics(trainer)[0]) == (correction is not None)
        ends[correction] = parameters(trainer)
    same = [torch.equal(value, ends[None][name]) for name, value in ends["none"].items()]
    assert all(same) and any(not torch.equal(value, ends[None][name]) for name, value in ends["tis"].items())


class SameBits(QuantRLOOTrainer):
    """Its sampler has the log-probabilities of the policy, as an exact engine. It notes passes without gradients."""

    def __init__(self, *args, same_bits: bool, **kwargs):
        self.passes = []
        super().__init__(*args, **kwargs)
        self.correction_step.same_bits = same_bits

    def _generate(self, prompts):
        generated = super()._generate(prompts)
        logps = []
        for prompt, completion in zip(*generated[:2], strict=True):
            parts = {"prompt": torch.tensor([prompt]), "completion": torch.tensor([completion])}
            ids = {f"{name}_ids": part for name, part in parts.items()}
            with torch.no_grad():
                logps += plain_logps(
                    self.model, ids | {f"{name}_mask": torch.ones_like(part) for name, part in parts.items()}
                )
        self.correction_step.samples = [row.tolist() for row in logps]
        return generated

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if not torch.is_grad_enabled() and not self.correction_step.saves_pass():
            self.passes.append(self.state.global_step)
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@pytest.mark.parametrize("correction", ["decoupled", "trm"])
def test_a_sampler_with_the_trainers_bits_saves_the_scoring_pass(tmp_path, correction):
    """Its log-probabilities are the old policy's, also in the KL term of the rewards; the reference's pass stays."""
    path, runs = save_tiny(tmp_path / "model", seed=3), []
    for same_bits in (False, True):
        settings = {"rollout_precision": "int4", "num_iterations": 2, "max_steps": 2, "beta": 0.1, "optim": "sgd"}
        args = config(QuantRLOOConfig, tmp_path, is_correction=correction, pack_sequences=False, **settings)
        runs.append(make(SameBits, args, model=path, same_bits=same_bits))
        runs[-1].train()
    two, one = runs
    assert two.passes == [0, 0] and one.passes == [0]
    for left, right in zip(metrics(one)[:2], metrics(two)[:2], strict=True):
        assert left.keys() == right.keys()
        for name in {"loss", "reward", "kl", "mismatch/kl_k3", "mismatch/weight_mean"} & left.keys():
            assert left[name] == pytest.approx(right[name], rel=1e-3, abs=1e-5), name
    theirs = parameters(two)
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in parameters(one).items())


def test_noise_checkpoints_and_a_resume(tmp_path):
    """A resumed run is the unbroken one."""
    path = save_tiny(tmp_path / "model", seed=3)
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "noise_schedule": "linear"}
    settings |= {"noise_stages": 3, "rollout_precision": "int8", "is_correction": "ais"}
    whole = quantized(tmp_path, path, **settings)
    whole.train()
    assert any(entry.get("noise/effective_sigma", 0) > 0 for entry in metrics(whole))
    resumed = quantized(tmp_path, path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert metrics(resumed)[:4] == metrics(whole)[:4] and metrics(whole)[3]["ais/alpha"] > 0
    mine, theirs = parameters(resumed), parameters(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for other in ({"rollout_precision": "fp8"}, {"importance_sampling_level": "sequence"}):
        with pytest.raises(ValueError, match=next(iter(other))):
            quantized(tmp_path, path, **settings | other).train(
                resume_from_checkpoint=str(tmp_path / "out/checkpoint-2")
            )


# The engine


def test_it_samples_from_the_embedded_copy(tmp_path):
    """INT4 samples other tokens from the same seed than BF16, so the engine's numbers reach the samples."""
    rewards = []
    for precision in ("bf16", "int4"):
        trainer = quantized(tmp_path / precision, rollout_precision=precision, max_steps=1)
        engine = trainer.vllm_generation.engine
        assert isinstance(engine, TransformersEngine) and engine.precision == precision
        trainer.train()
        rewards.append(metrics(trainer)[0]["reward"])
    assert rewards[0] != rewards[1]


@pytest.mark.vllm
def test_vllm_ends_as_a_fresh_engine(tmp_path):
    """Three steps with a correction, in INT8; the log-probabilities that TRL leaves out arrive."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import SMALL, fresh, greedy, keep

    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_engine_kwargs": SMALL}
    trainer = quantized(tmp_path, model, rollout_precision="int8", max_steps=3, is_cap=1.1, sync_check_steps=2, **vllm)
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
