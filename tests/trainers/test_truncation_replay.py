"""
Truncated sampling: the policy is scored over the tokens that `top_p`, `top_k` and `min_p` left its sampler.

The sampler computes what the policy does, in FP32, so every weight must be 1. As a script, one of two ranks.
"""

import copy
import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from long_tests import rest_is_long
from tiny import save_tiny, tiny_model
from training import (
    assert_same_run,
    config,
    dataset,
    generation,
    gradient_of,
    killed_and_resumed,
    killing,
    metrics,
    parameters,
    trainer_for,
)

from trl_quant import QuantAsyncGRPOConfig, QuantGRPOConfig, QuantGRPOTrainer, QuantPPOTrainer, QuantRLOOTrainer
from trl_quant.config.truncation import replays, why_not_replayed
from trl_quant.policy.kept import KEPT
from trl_quant.rollout import TransformersEngine
from trl_quant.rollout.kept import Kept
from trl_quant.rollout.trl_face import Turn


class Same(TransformersEngine):
    """An engine that computes what the policy does."""

    def build_copy(self, policy):
        return copy.deepcopy(policy).requires_grad_(False).eval()

    def prepare(self):
        self.ensure_ready()

    def sync(self):
        self.copy.load_state_dict(self.weights.base_model.state_dict())
        self.mark_current()


def sampling_alike(kind: type) -> type:
    class Alike(kind):
        def build_engine(self, spec, model, accelerator, processing_class, **settings):
            given = {"precision": spec.precision, "returns_kept": spec.returns_kept}
            return Same(model, accelerator, processing_class, **given, **settings)

    Alike.__name__ = kind.__name__
    return Alike


RUN = {"rollout_precision": "bf16", "is_correction": "tis", "max_completion_length": 24, "top_p": 0.9, "max_steps": 2}
# Options, and which tokens they leave by probabilities (V,) in descending order: a number
OPTIONS = {
    "top_p": ({"top_p": 0.9}, lambda p: int((p.cumsum() < 0.9).sum()) + 1),
    "top_k": ({"top_k": 7, "top_p": 1.0}, lambda p: 7),
    "min_p": ({"min_p": 0.2, "top_p": 1.0}, lambda p: int((p >= 0.2 * p[0]).sum())),
}


def alike(path, kind=QuantGRPOTrainer, model=None, **given):
    return trainer_for(path, model or tiny_model(seed=3), sampling_alike(kind), kind.config_class, **RUN | given)


@torch.no_grad()
def probabilities(model, ids: list[int]) -> np.ndarray:
    """For each token of a row but the first, (tokens, V)."""
    return model(torch.tensor([ids])).logits[0, :-1].double().softmax(-1).numpy()


def is_nucleus(ids: list[int], p: np.ndarray) -> bool:
    """Whether these tokens are the likeliest ones that hold 0.9, and no more; FP32 decides on the edge."""
    inside = np.isin(np.arange(len(p)), ids)
    least, sums = p[inside].min(), p[inside].sum()
    return p[~inside].max() < least + 1e-6 and sums > 0.9 - 1e-5 and sums - least < 0.9 + 1e-5


def left_by(model, ids: list[int], option: str) -> list[set[int]]:
    """For each token of a row but the first, the tokens that were left: from whole logits."""
    found = []
    for p in probabilities(model, ids):
        order = np.argsort(-p, kind="stable")
        found.append(set(order[: OPTIONS[option][1](p[order])].tolist()))
    return found


def rows_of(batch) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of each row, without padding."""
    masks = [(batch[f"{part}_ids"], batch[f"{part}_mask"].bool()) for part in ("prompt", "completion")]
    return [tuple(ids[row][mask[row]].tolist() for ids, mask in masks) for row in range(len(batch["prompt_ids"]))]


def differences(trainer, names=("mismatch/abs_logp_diff", "mismatch/weight_mean")) -> list[list[float]]:
    return [[log[name] for name in names] for log in metrics(trainer) if names[0] in log]


@pytest.mark.parametrize("kind", rest_is_long([QuantGRPOTrainer, QuantRLOOTrainer, QuantPPOTrainer]))
def test_weights_are_1_and_without_replay_they_are_not(tmp_path, kind, policy):
    for packs in (True, False):
        trainer = alike(tmp_path / f"{packs}", kind, policy, pack_sequences=packs)
        trainer.train()
        for log in differences(trainer):
            assert log[0] < 1e-5 and log[1] == pytest.approx(1, abs=1e-5)
        kept = differences(trainer, ("truncation/kept_mass", "truncation/unreplayed"))
        assert len(kept) == 2 and all(0.9 < log[0] < 0.91 and log[1] == 0 for log in kept)
    trainer = alike(tmp_path / "without", kind, policy, truncation_replay=False)
    trainer.train()
    assert all(log[0] > 0.09 and log[1] < 0.91 for log in differences(trainer))
    assert not any("truncation/kept_mass" in log for log in metrics(trainer))


@pytest.mark.parametrize("packs", rest_is_long([True, False]))
@pytest.mark.parametrize("option", OPTIONS)
def test_scores_and_gradients_are_those_of_whole_logits(tmp_path, option, packs):
    """Of each token of each row, over what a loop finds that was left; and far from those over all tokens."""
    given = {"pack_sequences": packs, "temperature": 0.7 if option == "top_k" else 1.0, **OPTIONS[option][0]}
    trainer = alike(tmp_path, **given)
    batch = generation(trainer)
    ids, mask = (
        torch.cat([batch[f"{part}_{kind}"] for part in ("prompt", "completion")], 1) for kind in ("ids", "mask")
    )
    completion, found = batch["completion_mask"].bool(), {}
    along = torch.randn(completion.shape, generator=torch.Generator().manual_seed(0)) * completion
    for name in ("over", "all"):
        opened = batch if name == "over" else {key: value for key, value in batch.items() if key != KEPT}
        with trainer.truncation.during_loss(dict(opened)):
            score = trainer._get_per_token_logps_and_entropies
            logps, entropies, *_ = score(trainer.model, ids, mask, completion.shape[1], compute_entropy=True)
        found[name] = logps.detach(), entropies.detach(), gradient_of((logps * along).sum(), trainer.model)
    expected = torch.zeros_like(logps)
    for row, (prompt, sampled) in enumerate(rows_of(batch)):
        logits = trainer.model(torch.tensor([prompt + sampled])).logits[0] / given["temperature"]
        if option == "min_p" or given["temperature"] == 1.0:
            left = left_by(trainer.model, prompt + sampled, option)[len(prompt) - 1 :]
        else:  # the likeliest ones are the same at any temperature
            left = left_by(trainer.model, prompt + sampled, "top_k")[len(prompt) - 1 :]
        for place, token in enumerate(sampled):
            z = logits[len(prompt) + place - 1]
            assert token in left[place]
            expected[row, place] = z[token] - z[sorted(left[place])].logsumexp(0)
    assert (found["over"][0] - expected).abs().max() < 2e-5
    assert (found["all"][0] - expected)[completion].abs().mean() > 0.05
    slow = gradient_of((expected * along).sum(), trainer.model)
    assert (found["over"][2] - slow).norm() < 1e-4 * slow.norm()
    assert (found["all"][2] - slow).norm() > 1e-2 * slow.norm()
    assert torch.allclose(found["over"][1], found["all"][1], atol=1e-5)  # entropies are over all tokens


def test_the_reference_is_scored_over_the_same_tokens(tmp_path):
    """So the KL divergence of a policy from itself is 0."""
    trainer = alike(tmp_path / "out", model=save_tiny(tmp_path / "model", seed=3), beta=0.1, max_steps=1)
    trainer.train()
    (log,) = [log for log in metrics(trainer) if "kl" in log]
    assert abs(log["kl"]) < 1e-6


class Remembers:
    """The probabilities of each token that an engine draws, by the tokens before it: from the weights of that time."""

    def __init__(self, trainer):
        self.probabilities: dict[tuple, list[np.ndarray]] = {}
        self.rows, self.trainer = 0, trainer
        engine = trainer.vllm_generation.engine
        draw, compute = engine.draw, trainer._compute_loss

        def drawing(requests, *args, **kwargs):
            samples = draw(requests, *args, **kwargs)
            for request, ids in zip(requests, samples.token_ids, strict=True):
                row = request.given + ids
                for place, p in enumerate(probabilities(engine.copy, row), 1):
                    if place >= len(request.given):
                        self.probabilities.setdefault(tuple(row[:place]), []).append(p)
            return samples

        def computing(model, inputs):
            self.check(inputs)
            return compute(model, inputs)

        engine.draw, trainer._compute_loss = drawing, computing

    def check(self, batch) -> None:
        for (prompt, sampled), fields in zip(rows_of(batch), batch[KEPT], strict=True):
            ids = Kept(*fields).ids()
            assert len(ids) == len(sampled)
            for place, found in enumerate(ids):
                assert any(is_nucleus(found, p) for p in self.probabilities[tuple(prompt + sampled[:place])])
            self.rows += 1


def long_enough(completions, **kwargs) -> list[float]:
    return [float(len(text) > 20) for text in completions]


ROADS = {
    "several updates": {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "in flight": {"rollouts_in_flight": 2.0, "max_steps": 4}
    | {"generation_kwargs": {"eos_token_id": list(range(0, 320, 9))}},
    "dynamic sampling": {"dynamic_sampling_rounds": 2, "reward_funcs": long_enough},
}


@pytest.mark.parametrize("road", ROADS)
def test_what_was_left_travels_with_its_tokens(tmp_path, road):
    given = {"max_steps": 3, "learning_rate": 1e-2, "train_dataset": dataset(32)} | ROADS[road]
    trainer = alike(tmp_path, **given)
    remembers = Remembers(trainer)
    trainer.train()
    assert remembers.rows >= 24
    assert all(log["truncation/unreplayed"] == 0 for log in metrics(trainer) if "loss" in log)
    if road == "in flight":
        assert sum(log.get("rollouts/carried", 0) for log in metrics(trainer)) > 0
        assert all(log["mismatch/by_age/0"] < 1e-8 for log in metrics(trainer) if "mismatch/by_age/0" in log)


@pytest.mark.parametrize(
    "given", rest_is_long([{"rollouts_in_flight": 2.0, "save_steps": 1}, {"num_iterations": 2, "save_steps": 3}])
)
def test_a_resumed_run_scores_over_the_same_tokens(tmp_path, given):
    """With completions in flight, and inside a generation."""

    def build(path, kill_at=None):
        settings = given | {"save_strategy": "steps", "max_steps": 5, "train_dataset": dataset(32)}
        return alike(path, **settings, reward_funcs=killing(kill_at))

    whole, resumed = killed_and_resumed(build, tmp_path, kill_at=3)
    for one in (whole, resumed):
        assert "train_loss" in one.state.log_history.pop()
    assert_same_run(whole, resumed)
    assert all(log["truncation/unreplayed"] == 0 for log in metrics(resumed) if "loss" in log)


def test_an_evaluation_is_scored_alike(tmp_path):
    trainer = alike(tmp_path, eval_dataset=dataset(4), per_device_eval_batch_size=4, max_steps=1)
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_mismatch/abs_logp_diff"] < 1e-5 and found["eval_truncation/kept_mass"] > 0.9


def test_tokens_of_tools_have_none():
    """A later turn goes on after them. What an engine did not say of a row is not known."""
    from trl_quant.trainers.kept import KeptStep, truncation_of

    def kept(*left):
        return Kept.of([np.array(ids) for ids in left], 64)

    step = KeptStep(None)
    turns = [
        Turn([[1], [2]], [[0.0, 0.0], [0.0]], kept=[kept([5, 6], [7, 8]), kept([9, 3])]),
        Turn([[1, 5, 7, 60, 61]], [[0.0]], kept=[kept([4, 2])]),
    ]
    step.take(turns, [[1], [2]], [[5, 7, 60, 61, 4], [9]])
    first, second = (Kept(*fields) for fields in step.padded(None))
    assert first.counts.tolist() == [2, 2, -1, -1, 2]  # 2 words: two ids, or a bit mask of 64 tokens
    assert [set(ids.tolist()) for place, ids in enumerate(first.ids()) if place not in (2, 3)] == [
        {5, 6},
        {7, 8},
        {2, 4},
    ]
    assert set(second.ids()[0].tolist()) == {9, 3}
    labels = torch.tensor([[-100, 5, 7, 60, 61, 4], [-100, 9, -100, -100, -100, -100]])
    found = truncation_of([tuple(first), tuple(second)], labels)
    assert found.places.tolist() == [[-1, 0, 1, -1, -1, 4], [-1, 5, -1, -1, -1, -1]]
    allowed = replace(found, places=found.places.flatten()).allowed(slice(0, 12), 64)
    assert [set(row.nonzero()[:, 0].tolist()) for row in allowed[[1, 2, 5, 7]]] == [{5, 6}, {7, 8}, {2, 4}, {9, 3}]
    assert allowed[[0, 3, 4, 6]].all()


def planted(trainer, change) -> None:
    """Changes what the trainer's engine says that was left for each token: a function of the ids and of the token."""
    engine = trainer.vllm_generation.engine
    sample = engine.sample

    def changed(*args, **kwargs):
        samples = sample(*args, **kwargs)
        kept = [
            Kept.of([change(ids, token) for ids, token in zip(one.ids(), sampled, strict=True)], one.vocabulary)
            for one, sampled in zip(samples.kept, samples.token_ids, strict=True)
        ]
        return replace(samples, kept=kept)

    engine.sample = changed


def test_planted_faults_are_found(tmp_path):
    """Ids without the drawn token end the run. Others with it make weights that are not 1."""
    trainer = alike(tmp_path / "lost")
    planted(trainer, lambda ids, token: ids[ids != token])
    with pytest.raises(RuntimeError, match="is not among those that were left"):
        trainer.train()
    trainer = alike(tmp_path / "more")
    planted(trainer, lambda ids, token: np.union1d(ids, np.arange(40)))
    trainer.train()
    assert all(log[0] > 1e-3 for log in differences(trainer))


class SaysNothing(Same):
    """An engine that does not return what was left."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.returns_kept = False


@pytest.mark.parametrize("replay", [None, True])
def test_an_engine_that_says_nothing(tmp_path, monkeypatch, caplog, replay):
    """The run is told that its ratio is biased; one that must replay is refused."""
    monkeypatch.setitem(globals(), "Same", SaysNothing)
    if replay:
        with pytest.raises(ValueError, match="`truncation_replay`=True cannot act: the SaysNothing"):
            alike(tmp_path, truncation_replay=True)
        return
    with caplog.at_level(logging.WARNING):
        trainer = alike(tmp_path)
    assert "`top_p`=0.9: the sampler draws from another distribution" in caplog.text and trainer.truncation is None
    trainer.train()
    assert all(log[0] > 0.09 for log in differences(trainer))


@pytest.mark.slow
def test_what_was_left_travels_between_ranks(tmp_path, monkeypatch):
    """Groups of four lie on both ranks; where completions are carried, one engine samples each."""
    from ranks import on_two_ranks, results

    monkeypatch.setattr("ranks.__file__", __file__)
    printed = on_two_ranks("cpu", tmp_path, *RANKS)
    for case in RANKS:
        first, second = results(tmp_path, case, printed)
        assert first["logs"] == second["logs"] and first["weights"] == second["weights"]
        for log in first["logs"]:
            assert log["truncation/unreplayed"] == 0 and 0.85 < log["truncation/kept_mass"] < 0.95
            assert log.get("mismatch/by_age/0", log["mismatch/kl_k3"]) < 1e-8


RANKS = {"at-once": {}, "in-flight": ROADS["in flight"]}


def run_rank(path: Path, case: str) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    given = {"per_device_train_batch_size": 6, "train_dataset": dataset(32), "max_steps": 3} | RANKS[case]
    trainer = alike(path / case / "out", **given)
    trainer.train()
    weights = {name: value.double().sum().item() for name, value in parameters(trainer).items()}
    found = {"logs": [log for log in metrics(trainer) if "loss" in log], "weights": weights}
    (path / case).mkdir(exist_ok=True)
    (path / case / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        run_rank(Path(sys.argv[1]), name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch_compile", "in a compiled model"),
        ("use_liger_kernel", "without the head's scores"),
        ("exact_rollouts", "with the engine's own head"),
    ],
)
def test_settings_that_score_otherwise_replay_nothing(tmp_path, name, reason):
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", top_p=0.9)
    assert replays(args) and why_not_replayed(args) is None
    setattr(args, name, True)
    assert reason in why_not_replayed(args) and not replays(args)


def test_an_asynchronous_trainer_replays_nothing(tmp_path):
    """Its log warns of truncated samples, as elsewhere where they bias the ratio."""
    options = {"output_dir": str(tmp_path), "use_vllm": False, "rollout_precision": "int8", "use_cpu": True}
    args = QuantAsyncGRPOConfig(**options, top_p=0.9)
    assert "asynchronous trainer" in why_not_replayed(args) and not replays(args)
