"""Routing replay in the trainers: every pass of a row computes with the experts that sampled it."""

import pytest
import torch
from distilling import distil
from dynamic import trainer_of as dynamic
from long_tests import rest_is_long
from ppo_runs import ppo
from slow_routing import ALL_GATES, as_sets, chosen_again, compute_slowly, mixture_of
from tiny import tiny_model
from training import (
    UnevenLengths,
    dataset,
    generation,
    gradient_of,
    killed_and_resumed,
    killing,
    lora,
    metrics,
    parameters,
    trainer_for,
)
from turns import with_tools

from trl_quant import QuantGRPOTrainer, QuantRLOOTrainer
from trl_quant.policy.routing import ROUTED, takes_routing
from trl_quant.rollout.trl_face import Turn
from trl_quant.trainers.groups import Completion
from trl_quant.trainers.packing import terms_are_independent


pytestmark = pytest.mark.isa
INT4 = {"rollout_precision": "int4", "is_correction": "tis"}
UNEVEN = {"generation_kwargs": {"eos_token_id": list(range(0, 320, 9))}}  # one token of nine ends a completion


class UnevenGRPO(UnevenLengths, QuantGRPOTrainer):
    pass


class UnevenRLOO(UnevenLengths, QuantRLOOTrainer):
    pass


def on_disk(path, family="qwen3_moe", **settings) -> str:
    mixture_of(family, **settings).save_pretrained(path / "model")
    return str(path / "model")


def rows_of(batch):
    """The token ids of each row without padding, and their column of the routing."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool()
    return [(row[on].tolist(), experts[on]) for row, on, experts in zip(ids, mask, batch[ROUTED], strict=True)]


def watched(trainer, check) -> list[dict]:
    """The list to which the trainer adds each micro-batch that a loss gets, after `check` of its rows."""
    compute, seen = trainer._compute_loss, []

    def computed(model, inputs, *args):
        seen.append(inputs)
        for ids, experts in rows_of(inputs):
            check(ids, experts)
        return compute(model, inputs, *args)

    trainer._compute_loss = computed
    return seen


def is_samplers(trainer, family="qwen3_moe"):
    """Checks that a row has the experts that the engine, which has not been synced since, chooses for it."""

    def check(ids, experts):
        for layer, sets in chosen_again(trainer.vllm_generation.engine.copy, family, ids).items():
            assert torch.equal(as_sets(experts[:-1], layer), sets[:-1])

    return check


# What the passes compute


def trainer_of(kind, path, family, settings, packs):
    given = INT4 | {"num_iterations": 2, "beta": 0.1, "pack_sequences": packs, "router_replay": True}
    if family != "glm4_moe":  # which has no load-balancing loss; at its usual 0.001 the tolerance would not see it
        given["router_aux_loss_coef"] = 1.0
    return trainer_for(path / "run", on_disk(path, family, **settings), kind, **given)


def slowly(trainer, family, settings, batch) -> None:
    """Makes a trainer compute padded rows in loops over tokens and experts, with the experts of a batch."""
    for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        compute_slowly(model, family, settings, batch[ROUTED])
    trainer.routing, trainer.carrying = None, lambda rows, model, mask: model


def logps_of(trainer, model, batch):
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].shape[1])[0]


@pytest.mark.parametrize("packs", rest_is_long([True, False]))
@pytest.mark.parametrize(("family", "settings"), rest_is_long(ALL_GATES, *ALL_GATES[::2]), ids=str)
def test_scores_and_gradients_are_those_of_the_samplers_experts(tmp_path, family, settings, packs):
    """Old policy, reference, and update, against loops with the experts; without replay they are others."""
    trainer = trainer_of(UnevenGRPO, tmp_path, family, settings, packs)
    assert trainer.packs == packs and takes_routing(trainer.model) and takes_routing(trainer.ref_model)
    batch = generation(trainer)
    mask, model = batch["completion_mask"], trainer.model
    gradient = gradient_of(trainer._compute_loss(model, batch), model)
    trainer.routing = None
    without = gradient_of(trainer._compute_loss(model, batch), model)
    unreplayed = logps_of(trainer, model, batch)
    slowly(trainer, family, settings, batch)
    expected = gradient_of(trainer._compute_loss(model, batch), model)
    assert (gradient - expected).norm() < 1e-4 * expected.norm() < 1e-3 * (without - expected).norm()
    for name, one in {"old": model, "ref": trainer.ref_model}.items():
        slow = logps_of(trainer, one, batch)
        torch.testing.assert_close(batch[f"{name}_per_token_logps"] * mask, slow * mask, rtol=1e-4, atol=1e-5)
    assert ((unreplayed - batch["old_per_token_logps"]) * mask).abs().max() > 0.01


@pytest.mark.parametrize("packs", rest_is_long([True, False]))
def test_adapters_replay(tmp_path, packs):
    """Beside an adapter on attention. The reference is the policy without it, and a router may be trained whole."""
    given = INT4 | {"num_iterations": 2, "beta": 0.1, "pack_sequences": packs, "router_replay": True}
    found = []
    for whole in ({}, {"modules_to_save": ["gate"]}):
        adapter = lora(target_modules=["q_proj", "v_proj"], **whole)
        trainer = trainer_for(tmp_path, on_disk(tmp_path), UnevenGRPO, **given, peft_config=adapter)
        batch, model = generation(trainer), trainer.model
        found.append(gradient_of(trainer._compute_loss(model, batch), model))
        trainer.routing = None
        without = gradient_of(trainer._compute_loss(model, batch), model)
        assert (found[-1] - without).norm() > 0.05 * without.norm()
        if whole:
            assert len(found[1]) > len(found[0])
            continue
        slowly(trainer, "qwen3_moe", {}, batch)
        expected = gradient_of(trainer._compute_loss(model, batch), model)
        assert (found[-1] - expected).norm() < 1e-4 * expected.norm()
        with model.disable_adapter():
            reference = logps_of(trainer, model, batch)
        mask = batch["completion_mask"]
        torch.testing.assert_close(batch["ref_per_token_logps"] * mask, reference * mask, rtol=1e-4, atol=1e-5)


OTHERS = {
    "rloo": lambda path, model, **given: trainer_for(path, model, UnevenRLOO, **INT4, **given),
    "ppo": lambda path, model, **given: ppo(path, model, vf_share_layers=True, **INT4, **given),
    "distillation": lambda path, model, **given: distil(path, model, teacher_model=tiny_model(seed=4), **given),
    "distillation with an adapter": lambda path, model, **given: distil(
        path, model, teacher_model=tiny_model(seed=4), peft_config=lora(target_modules=["q_proj", "v_proj"]), **given
    ),
}


@pytest.mark.parametrize("packs", rest_is_long([True, False]))
@pytest.mark.parametrize("run", OTHERS)
def test_other_trainers_replay(tmp_path, run, packs):
    trainer = OTHERS[run](tmp_path, on_disk(tmp_path), pack_sequences=packs, router_replay=True)
    batch, others = generation(trainer), [None] if run.startswith("distillation") else []
    assert trainer.packs == packs
    found = []
    for change in (lambda: None, lambda: setattr(trainer, "routing", None), None):
        if change is None:
            slowly(trainer, "qwen3_moe", {}, batch)
        else:
            change()
        loss = trainer._compute_loss(trainer.model, dict(batch), *others)
        found.append(gradient_of(loss[0] if others else loss, trainer.model))
    gradient, without, expected = found
    assert (gradient - expected).norm() < 1e-4 * expected.norm() < 1e-3 * (without - expected).norm()


# Which rows get which routing

RUNS = {
    "several updates": lambda path, model: trainer_for(
        path, model, UnevenGRPO, **INT4, per_device_train_batch_size=4, steps_per_generation=2, num_iterations=2
    ),
    "accumulated": lambda path, model: trainer_for(
        *(path, model, UnevenGRPO), **INT4, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2
    ),
    "checkpointed": lambda path, model: trainer_for(
        *(path, model, UnevenGRPO), **INT4, gradient_checkpointing=True, max_steps=2
    ),
    "without a load to balance": lambda path, model: trainer_for(
        *(path, model, UnevenGRPO), **INT4, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2
    ),
    "rloo": lambda path, model: trainer_for(path, model, UnevenRLOO, **INT4, max_steps=2),
    "ppo": lambda path, model: ppo(path, model, max_steps=8, **INT4),
    "distillation": lambda path, model: distil(path, model, gradient_accumulation_steps=2, train_dataset=dataset(32)),
    "dynamic sampling": lambda path, model: dynamic(path, model=model, rounds=2, max_steps=2, is_correction="tis"),
    "tools": lambda path, model: with_tools(path, model, 3, **INT4, max_steps=1),
}


@pytest.mark.parametrize("run", rest_is_long(RUNS, "ppo", "rloo", "distillation", "several updates", "tools"))
def test_every_loss_has_the_routing_of_its_rows(tmp_path, run):
    """Shuffled, split and used again, of prompts padded on the left; and rows that are packed may move."""
    family = "glm4_moe" if run == "without a load to balance" else "qwen3_moe"
    trainer = RUNS[run](tmp_path / "run", on_disk(tmp_path, family))
    seen = watched(trainer, is_samplers(trainer, family))
    trainer.train()
    logs = [log for log in metrics(trainer) if "routing/differs" in log]
    assert seen and logs and all(0.02 < log["routing/differs"] < 0.9 for log in logs)
    assert run != "dynamic sampling" or sum(log["dynamic_sampling/replaced_groups"] for log in logs) > 0
    assert all(log["routing/unreplayed"] == 0 for log in logs)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_rows_stay_where_the_load_is_balanced(tmp_path, family):
    """Within a micro-batch; GLM-4 has no load-balancing loss, so its rows may move to another one."""
    trainer = trainer_for(tmp_path, mixture_of(family), **INT4)
    assert trainer.packs and trainer.aux_loss_enabled != terms_are_independent(trainer) == (family == "glm4_moe")


def test_an_evaluation_replays_its_own_samples(tmp_path):
    given = INT4 | {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset(2), "max_steps": 2}
    given |= {"per_device_eval_batch_size": 4}
    trainer = trainer_for(tmp_path / "run", on_disk(tmp_path), **given)
    watched(trainer, is_samplers(trainer))
    trainer.train()
    evaluated = [log for log in metrics(trainer) if "eval_routing/differs" in log]
    assert len(evaluated) == 2 and all(log["eval_routing/unreplayed"] == 0 for log in evaluated)


def test_carried_tokens_keep_the_experts_that_sampled_them(tmp_path):
    """The engine computes them again with newer weights, and chooses others for some."""
    given = INT4 | {"rollouts_in_flight": 3.0, "max_completion_length": 24, "num_generations": 2, "max_steps": 4}
    given |= {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "train_dataset": dataset(32)}
    given |= UNEVEN
    trainer = trainer_for(tmp_path / "run", on_disk(tmp_path), **given)
    sample, drawn = trainer.vllm_generation.engine.sample, {}  # tokens of a request -> the calls that computed them

    def recorded(requests, *args, **kwargs):
        samples = sample(requests, *args, **kwargs)
        for request, ids, routing in zip(requests, samples.token_ids, samples.routing, strict=True):
            drawn.setdefault(tuple(request.prompt), []).append((request.given + ids, len(request.given), routing))
        return samples

    trainer.vllm_generation.engine.sample = recorded
    moved = carried = 0

    def check(ids, experts):
        nonlocal moved, carried
        prompt = max((prompt for prompt in drawn if tuple(ids[: len(prompt)]) == prompt), key=len)
        calls = [call for call in drawn[prompt] if ids[: len(call[0])] == call[0]]  # in their order
        first, newest = calls[0][2], calls[-1][2]
        carried += len(calls) > 1
        expected = first
        for _, _, routing in calls[1:]:
            if len(routing) > len(expected):
                expected = torch.cat([expected, routing[len(expected) :]])
        assert torch.equal(experts[:-1], expected)
        moved += (newest.sort(-1).values != expected.sort(-1).values).any().item()

    watched(trainer, check)
    trainer.train()
    logs = [log for log in metrics(trainer) if "routing/differs" in log]
    assert carried and moved and all(log["routing/unreplayed"] == 0 for log in logs)


def test_a_completion_without_all_of_its_routing_is_not_replayed():
    """An engine may return none for requests that were ended, and later compute them again with newer weights."""

    def rows(count):
        return torch.zeros(count, 2, 2)

    kept, lost, late, waited = (Completion() for _ in range(4))
    kept.add([5, 6], [-1.0, -1.0], 0, False, rows(4))  # of a prompt of three tokens
    kept.add([], [], 1, False, None)
    kept.add([7], [-1.0], 2, True, rows(5) + 1)
    assert kept.routing[:, 0, 0].tolist() == [0, 0, 0, 0, 1] and kept.versions == [0, 0, 2]
    lost.add([5, 6], [-1.0, -1.0], 0, False, rows(4))
    lost.add([7], [-1.0], 1, False, None)
    late.add([5, 6, 7], [-1.0] * 3, 0, False, None)
    for one in (lost, late):
        one.add([8], [-1.0], 2, True, rows(6))
        assert one.routing is None and one.token_ids == [5, 6, 7, 8]
    waited.add([], [], 0, False, None)
    waited.add([5], [-1.0], 1, True, rows(3))
    assert len(waited.routing) == 3


RESUMES = {
    "in flight": UNEVEN | {"rollouts_in_flight": 2.0, "max_completion_length": 24},
    "inside a generation": {"num_iterations": 2, "save_steps": 3},
}


@pytest.mark.parametrize("settings", rest_is_long(RESUMES.values()), ids=RESUMES)
def test_a_resumed_run_replays_what_the_unbroken_one_does(tmp_path, settings):
    """A checkpoint holds the routing of completions in flight, and of a generation that it interrupts."""
    model = on_disk(tmp_path)

    def build(path, kill_at=None):
        given = INT4 | {"save_strategy": "steps", "save_steps": 1, "max_steps": 5} | settings
        return trainer_for(path, model, **given, reward_funcs=killing(kill_at), train_dataset=dataset(16))

    whole, resumed = killed_and_resumed(build, tmp_path, kill_at=3)
    assert metrics(whole)[:-1] == metrics(resumed)[:-1]  # the last has the mean loss of what the process has trained on
    mine, theirs = parameters(whole), parameters(resumed)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    logs = [log for log in metrics(whole) if "routing/differs" in log]
    assert logs and all(log["routing/unreplayed"] == 0 for log in logs)
    assert "num_iterations" in settings or sum(log["rollouts/carried"] for log in logs) > 0


def test_a_token_keeps_the_turn_that_sampled_it(tmp_path):
    """A later turn computes earlier tokens again. What was not computed by an engine has no routing."""
    trainer = trainer_for(tmp_path, mixture_of("qwen3_moe"), **INT4)

    def of(tokens, value):
        return torch.full((tokens, 2, 2), value, dtype=torch.int16)

    prompts, completions = [[1, 2], [3]], [[4, 5, 8, 9, 7], [6]]
    turns = [Turn(prompts, [[-1.0] * 2, [-1.0]], [of(3, 0), of(1, 1)])]
    turns.append(Turn([[1, 2, 4, 5, 8, 9]], [[-1.0]], [of(6, 3)]))
    trainer.routing.take(turns, prompts, completions)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]])
    padded = trainer.routing.padded(mask)[:, :, 1, 0].tolist()
    assert padded == [[0, 0, 0, 3, 3, 3, -1], [-1, 1, -1, -1, -1, -1, -1]]
    trainer.routing.replays, trainer.routing.samples = True, [None, None]
    assert (trainer.routing.padded(mask) == -1).all()


# Metrics


def test_what_differs_with_a_sampler_of_the_same_numbers_and_without_replay(tmp_path):
    """Zero with the policy's own numbers, and otherwise not. Without replay the same is compared."""
    found = {}
    for name, given in {
        "same": {"rollout_precision": "bf16", "learning_rate": 0.0},
        "int4": INT4,
        "compared": INT4 | {"router_replay": False},
    }.items():
        policy = mixture_of("qwen3_moe").bfloat16().float()  # the engine rounds to BF16, and these are rounded
        trainer = trainer_for(tmp_path / name, policy, **given, max_steps=2)
        trainer.train()
        found[name] = [log for log in metrics(trainer) if "routing/differs" in log]
    assert all(log["routing/differs"] == 0 for log in found["same"])
    for name, unreplayed in {"same": 0, "int4": 0, "compared": 1}.items():
        assert all(log["routing/unreplayed"] == unreplayed for log in found[name])
    for name in ("int4", "compared"):
        for log in found[name]:
            layers = [log["routing/by_layer/0"], log["routing/by_layer/1"]]
            assert log["routing/differs"] == pytest.approx(sum(layers) / 2) and min(layers) > 0.02
    assert found["compared"][0]["mismatch/kl_k3"] > found["int4"][0]["mismatch/kl_k3"]


# Refusals


class Silent:
    """An engine that does not return its routing."""

    def __init__(self, engine):
        self.sync, self.engine = engine.sync, engine

    def sample(self, requests):
        samples = self.engine.sample(requests)
        return type(samples)(samples.token_ids, samples.logps)


class Telling(Silent):
    """One that says it would."""

    returns_routing = True


def with_engine(kind):
    class Sampling(QuantGRPOTrainer):
        def build_engine(self, *args, **kwargs):
            engine = super().build_engine(*args, **kwargs)
            engine.is_current = True
            return kind(engine)

    return Sampling


def test_an_engine_without_routing_is_refused(tmp_path):
    given = INT4 | {"max_steps": 1}
    trainer = trainer_for(tmp_path, mixture_of("mixtral"), with_engine(Silent), **given)
    trainer.train()
    assert not any("routing/differs" in log for log in metrics(trainer))
    with pytest.raises(ValueError, match="the AdaptedEngine of this run does not return its routing"):
        trainer_for(tmp_path, mixture_of("mixtral"), with_engine(Silent), **given, router_replay=True)
    trainer = trainer_for(tmp_path, mixture_of("mixtral"), with_engine(Telling), **given, router_replay=True)
    with pytest.raises(ValueError, match="Sampling sampled without the routing that it replays"):
        trainer.train()


def test_rows_that_do_not_fit_their_routing_are_refused(tmp_path):
    trainer = trainer_for(tmp_path, mixture_of("mixtral"), **INT4)
    batch = generation(trainer)
    batch["prompt_ids"], batch["prompt_mask"] = (batch[name][:, 1:] for name in ("prompt_ids", "prompt_mask"))
    with pytest.raises(RuntimeError, match="`router_replay=False`"):
        trainer._compute_loss(trainer.model, batch)
