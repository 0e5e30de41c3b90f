"""
The asynchronous trainer: TRL's without a precision, corrections against slow references at any age, ages, and the
load-balancing loss.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from asynchronous import Given, asynchronous, given_samples, gradient_of_batch, logps_of, policy_gradient
from long_tests import rest_is_long
from slow_routing import blocks_of
from tiny import save_tiny, tiny_model
from training import assert_same_run, fields_of, generation, gradient_of, lora, parameters, trainer_for
from trl import GRPOConfig
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from trl_quant import QuantAsyncGRPOConfig
from trl_quant.corrections import CORRECTIONS
from trl_quant.storage.run_checkpoints import read_rollout_state


OF_THE_CLOCK = ("perf/", "sample/time", "sample/rollout_queue")
# Those whose weight compares the sampler with a proximal policy
PROXIMAL = [name for name, kind in CORRECTIONS.items() if not (kind.every_update or kind.clips_sampler)]
ACTING = reference.ACTING | {"ais": {"ais_beta_var": 0.1}}  # with its default, alpha is 0 at the mismatch of age 3
# Fields of TRL's synchronous config that TRL's asynchronous trainer would not read
ABSENT = {"beta", "num_iterations", "loss_type", "scale_rewards", "importance_sampling_level", "reward_weights"}
ABSENT |= {"mask_truncated_completions", "generation_kwargs", "generation_batch_size", "steps_per_generation"}


def without_times(trainer):
    """The trainer's log without what a clock or the state of a queue decides."""
    logged = trainer.state.log_history
    history = [{k: v for k, v in entry.items() if not k.startswith(OF_THE_CLOCK)} for entry in logged]
    return SimpleNamespace(model=trainer.model, state=SimpleNamespace(log_history=history))


@pytest.mark.parametrize("budget", [0, 60])
def test_without_a_precision_it_is_trls(tmp_path, budget):
    """Bit for bit, with the same attention and the same samples; a warm-up of the version makes their ages 0 to 4."""
    runs = []
    for kind in (AsyncGRPOTrainer, None):
        given = {"kind": kind} if kind else {}
        trainer = asynchronous(tmp_path, given_samples(24), token_budget=budget, max_steps=4, **given)
        trainer.train()
        runs.append(trainer)
    theirs, ours = runs
    assert_same_run(without_times(theirs), without_times(ours))
    assert ours.rollout_worker.sent == theirs.rollout_worker.sent and len(ours.rollout_worker.sent) == 5
    begun = tiny_model(seed=3).state_dict()
    assert not all(torch.equal(begun[name], value) for name, value in parameters(ours).items())


# The loss


def padded(rows) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def slow_gradient(trainer, samples, name, old=None, **hyperparameters) -> torch.Tensor:
    """The gradient of the paper's objective, token by token, by default with the policy itself as the proximal one."""
    logps = padded(logps_of(trainer, samples))
    mask = padded([torch.ones(int(sample.completion_mask.sum())) for sample in samples])
    sampled = [torch.tensor(s.old_log_probs[s.completion_mask > 0]) for s in samples]
    advantages = torch.tensor([sample.advantage for sample in samples])
    old = logps.detach() if old is None else padded(old)
    given = (old, padded(sampled), advantages, mask)
    return -gradient_of(reference.OBJECTIVES[name](logps, *given, 0.2, 0.2, **hyperparameters), trainer.model)


def near(samples, scored) -> None:
    """Brings what sampled to these scores, nearer in some samples than in others."""
    generator = torch.Generator().manual_seed(2)
    for i, (sample, logps) in enumerate(zip(samples, scored, strict=True)):
        noise = torch.randn(logps.shape, generator=generator) * (0.02, 0.1, 0.4, 1.0)[i % 4]
        sample.old_log_probs[sample.completion_mask > 0] = (logps + noise).detach().numpy()


def move(model, seed: int = 0) -> None:
    """Moves all weights, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.data.add_(0.02 * torch.randn(param.shape, generator=generator))


def scored_by_versions(trainer, samples, age: int) -> list[torch.Tensor]:
    """
    Moves the weights from version 2 to version 2 + `age`, and returns the log-probabilities that each token had under
    its own version: the first two of a sample are of version 2, the next two of version 3, and so on.
    """
    for sample in samples:
        drawn = sample.completion_mask > 0
        sample.versions[drawn] = 2 + np.minimum(np.arange(drawn.sum()) // 2, age)
    scored = [logps.detach() for logps in logps_of(trainer, samples)]
    for version in range(3, 3 + age):
        move(trainer.model, version)
        for sample, kept, logps in zip(samples, scored, logps_of(trainer, samples), strict=True):
            later = torch.tensor(sample.versions[sample.completion_mask > 0]) >= version
            kept[later] = logps.detach()[later]
    trainer.model_version = 2 + age
    return scored


def queued(path, samples, name, **given):
    """A trainer with these samples on its queue. An engine of ours alone has advantages as `ais` needs them."""
    if name != "ais":
        return asynchronous(path, samples, is_correction=name, **given)
    trainer = asynchronous(path, use_vllm=False, is_correction=name, **given)
    for sample in samples:
        trainer.rollout_queue.put(sample)
    return trainer


class OfTRL(Given, AsyncRolloutWorker):
    """Samples that are given, as those of TRL's own worker, whose place TRL writes into checkpoints."""

    def __init__(self, samples):
        Given.__init__(self, samples)
        self._loop_kwargs = {"dataset_start_index": 0}

    check_health, update_model_version = Given.check_health, Given.update_model_version
    start, stop = Given.start, Given.stop


@pytest.mark.parametrize("given", [{"is_correction": "tis"}, {}])
def test_a_run_of_trls_worker_resumes(tmp_path, monkeypatch, given):
    """Its checkpoint holds TRL's place in the data beside the record of the run."""
    monkeypatch.setattr("asynchronous.Given", OfTRL)
    saving = given | {"save_strategy": "steps", "save_steps": 2}
    first = asynchronous(tmp_path, given_samples(8), max_steps=2, **saving)
    first.train()
    state, place = read_rollout_state(tmp_path / "checkpoint-2"), 4 if given else 6  # TRL fetches one ahead
    assert state["prompt_index"] == place and state["runs"] == first.runs and state["settings"]
    again = asynchronous(tmp_path, given_samples(8, version=4), model=first.model.name_or_path, max_steps=3, **saving)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3 and again.rollout_worker._loop_kwargs["dataset_start_index"] == place
    with pytest.raises(ValueError, match="holds no place in the data for TRL's worker"):
        again.load_sampling_state("checkpoint", {"runs": []})
    # That of TRL's own trainer holds no more than the place, and is one of the same settings as the defaults
    (tmp_path / "checkpoint-2" / "rollout_state.json").write_text('{"prompt_index": 4, "model_version": 3}')
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    again = asynchronous(tmp_path, given_samples(8, version=4), model=first.model.name_or_path, max_steps=3, **saving)
    with pytest.raises(ValueError, match=r"'trl' -> 'tis'\.") if given else nullcontext():
        again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")


@pytest.mark.parametrize("age", rest_is_long([0, 1, 3], 0, 3))
@pytest.mark.parametrize("name", CORRECTIONS)
def test_gradients_are_those_of_a_slow_loop(tmp_path, name, age):
    """Of samples whose tokens have ages from 0 to `age`, each sampled near the weights of its version."""
    samples, fields = given_samples(2, version=2), ACTING.get(name, {})
    trainer, hyperparameters = queued(tmp_path, samples, name, **fields), reference.hyperparameters(name, fields)
    scored = scored_by_versions(trainer, samples, age)
    near(samples, scored)
    found, expected = policy_gradient(trainer), slow_gradient(trainer, samples, name, **hyperparameters)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    if name != "none":
        unweighted = slow_gradient(trainer, samples, "none")
        assert (found - unweighted).norm() > 1e-2 * unweighted.norm()
    if age and name in PROXIMAL:  # the policy that is trained is the proximal one, not the version that sampled
        of_versions = slow_gradient(trainer, samples, name, old=scored, **hyperparameters)
        assert (found - of_versions).norm() > 1e-2 * of_versions.norm()
    ages = np.concatenate([2 + age - sample.versions[sample.completion_mask > 0] for sample in samples])
    logged = trainer._metrics["train"]
    assert logged["rollouts/age"] == [(ages.sum(), len(ages))] and logged["rollouts/age_max"] == [age]
    now = torch.cat(logps_of(trainer, samples)).detach().numpy()
    log_w = now - np.concatenate([sample.old_log_probs[sample.completion_mask > 0] for sample in samples])
    for of_age, bucket in enumerate(("0", "1", "2", "3-4")[: age + 1]):
        k3 = (np.expm1(log_w) - log_w)[ages == of_age].mean()
        assert logged[f"mismatch/by_age/{bucket}"] == [pytest.approx(k3, rel=1e-3)]


def test_coupled_is_trls_loss(tmp_path):
    """Its ratio to the sampler, clipped. The mismatch is measured beside it."""
    ours = asynchronous(tmp_path, given_samples(2), is_correction="coupled")
    theirs = asynchronous(tmp_path, given_samples(4))  # TRL's loader fetches a micro-batch ahead
    assert torch.equal(policy_gradient(ours), policy_gradient(theirs))
    metrics = ours._metrics["train"]
    assert metrics["mismatch/kl_k3"][0] > 0.05 and metrics["clip_ratio/region_mean"][0] > 0.1
    assert "mismatch/kl_k3" not in theirs._metrics["train"]


def test_ratios_of_one_are_not_logged(tmp_path):
    trainer = asynchronous(tmp_path, given_samples(2), is_correction="tis")
    policy_gradient(trainer)
    logged = trainer._metrics["train"]
    assert not [name for name in logged if name in ("ratio", "kl") or name.startswith("clip_ratio")]
    assert logged["sampling/importance_sampling_ratio/max"] == [2.0] and logged["entropy"][0] > 1


def test_ais_takes_the_micro_batch(tmp_path):
    """With advantages as they are, and one alpha for all its tokens."""
    samples = given_samples(2)
    trainer = queued(tmp_path, samples, "ais")
    trainer.model_version = 1
    found, expected = policy_gradient(trainer), slow_gradient(trainer, samples, "ais")
    assert (found - expected).norm() < 1e-4 * expected.norm()
    tis = slow_gradient(trainer, samples, "tis", cap=5.0)
    assert (found - tis).norm() > 1e-2 * tis.norm()
    assert 0 < trainer._metrics["train"]["ais/alpha"][0] < 1


@pytest.mark.parametrize("name", CORRECTIONS)
def test_at_age_0_it_is_the_synchronous_trainers(tmp_path, name):
    """The same samples, advantages and correction, in one micro-batch with `loss_type='bnpo'`."""
    model, fields = tiny_model(seed=3), reference.ACTING.get(name, {})
    given = {"rollout_precision": "bf16", "is_correction": name, "loss_type": "bnpo", "scale_rewards": "none"}
    synchronous = trainer_for(tmp_path, model=model, **given, **fields)
    blur(synchronous.vllm_generation.engine)
    batch = generation(synchronous)
    expected = gradient_of(synchronous._compute_loss(synchronous.model, batch), synchronous.model)

    samples = as_samples(batch)
    trainer = queued(tmp_path, samples, name, **fields)
    trainer.model_version = 1
    found = policy_gradient(trainer)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    if name != "none":
        unweighted = slow_gradient(trainer, samples, "none")
        assert (found - unweighted).norm() > 1e-2 * unweighted.norm()


def blur(engine) -> None:
    """Whatever an engine samples gets other log-probabilities."""
    sample, generator = engine.sample, torch.Generator().manual_seed(1)

    def blurred(*args, **given):
        samples = sample(*args, **given)
        noised = [torch.tensor(row) + 0.5 * torch.randn(len(row), generator=generator) for row in samples.logps]
        return replace(samples, logps=[row.tolist() for row in noised])

    engine.sample = blurred


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
def test_a_frozen_base_trains_as_in_the_synchronous_trainer(tmp_path, precision):
    """The gradients of the adapter, on the same codes; on a base in 32 bits they are others."""
    model = save_tiny(tmp_path / "model", seed=3)
    given = {"peft_config": lora(), "train_precision": precision, "is_correction": "tis", "use_vllm": False}
    of_loss = {"loss_type": "bnpo", "scale_rewards": "none"}
    synchronous = trainer_for(tmp_path, model=model, **given, **of_loss)
    batch = generation(synchronous)
    expected = gradient_of(synchronous._compute_loss(synchronous.model, batch), synchronous.model)
    found = {}
    for training in (precision, None):
        settings = given | {"train_precision": training, "rollout_precision": precision}
        trainer = asynchronous(tmp_path, model=model, **settings)
        adapter = synchronous.model.named_parameters()
        trainer.model.load_state_dict({name: p for name, p in adapter if p.requires_grad}, strict=False)
        for sample in as_samples(batch):
            trainer.rollout_queue.put(sample)
        trainer.model_version = 1
        found[training] = policy_gradient(trainer)
    assert (found[precision] - expected).norm() < 1e-4 * expected.norm()
    assert (found[None] - expected).norm() > 1e-2 * expected.norm()


def as_samples(batch) -> list:
    """The rows of a synchronous trainer's generation, for the queue."""
    samples = given_samples(2)
    for i, sample in enumerate(samples):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i] > 0].numpy()
        counted = batch["completion_mask"][i] > 0
        ids, logps = batch["completion_ids"][i][counted].numpy(), batch["sampling_per_token_logps"][i][counted].numpy()
        mask = [0] * len(prompt) + [1] * len(ids)
        sample.input_ids = torch.tensor([*prompt, *ids]).numpy()
        sample.completion_mask, sample.versions = torch.tensor(mask).numpy(), torch.tensor(mask).numpy()
        sample.old_log_probs = torch.tensor([0.0] * len(prompt) + [*logps]).numpy()
        sample.advantage = batch["advantages"][i].item()
    return samples


@pytest.mark.parametrize("name", rest_is_long(PROXIMAL, "none", "tis", "ais"))
def test_a_proximal_pass_keeps_the_policy_of_the_sync(tmp_path, name):
    """Two updates between two syncs: in the second, R compares with the policy that both were scored with."""
    fields = reference.ACTING.get(name, {})
    given = {"proximal_pass": True, "weight_sync_steps": 2, "is_correction": name, "use_vllm": False, **fields}
    trainer, samples = asynchronous(tmp_path, **given), given_samples(4)
    near(samples, logps_of(trainer, samples))
    for sample in samples:
        trainer.rollout_queue.put(sample)
    trainer.model_version = 1
    batches = iter(trainer.get_train_dataloader())
    synced = [logps.detach() for logps in logps_of(trainer, samples)]
    first, logged = next(batches), trainer._metrics["train"]
    assert not trainer.rollout_queue.qsize() and trainer._trained_groups == {0, 1} and len(logged["rollouts/age"]) == 1
    found, hyperparameters = gradient_of_batch(trainer, first), reference.hyperparameters(name, fields)
    expected = slow_gradient(trainer, samples[:8], name, **hyperparameters)
    assert logged["ratio"] == [1.0] and (found - expected).norm() < 1e-4 * expected.norm()

    move(trainer.model)
    found = gradient_of_batch(trainer, next(batches))
    assert trainer._trained_groups == {0, 1, 2, 3} and len(logged["rollouts/age"]) == 2
    expected = slow_gradient(trainer, samples[8:], name, old=synced[8:], **hyperparameters)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    own = slow_gradient(trainer, samples[8:], name, **hyperparameters)
    assert (found - own).norm() > 0.1 * own.norm()
    assert logged["clip_ratio/region_mean"][1] > 0.1 and abs(logged["ratio"][1] - 1) > 1e-3
    if name == "acr":
        assert logged["mismatch/rescued_fraction"][1] > 0


@pytest.mark.parametrize(("step", "max_steps", "updates"), [(0, 9, 3), (1, 9, 2), (3, 4, 1)])
def test_a_proximal_pass_takes_what_is_trained_on_until_the_next_sync(tmp_path, step, max_steps, updates):
    """A run that resumes between two syncs begins with one, and the last updates need no more than they train on."""
    settings = {"proximal_pass": True, "weight_sync_steps": 3, "gradient_accumulation_steps": 2, "max_steps": max_steps}
    trainer = asynchronous(tmp_path, given_samples(16), is_correction="tis", per_device_train_batch_size=4, **settings)
    trainer.model_version, trainer.state.global_step = 1, step
    next(iter(trainer.get_train_dataloader()))
    assert trainer.rollout_queue.qsize() == 64 - 8 * updates


def test_a_sampler_that_is_the_policy_weighs_nothing(tmp_path):
    samples = given_samples(2)
    trainer = asynchronous(tmp_path, samples, is_correction="decoupled")
    for sample, logps in zip(samples, logps_of(trainer, samples), strict=True):
        sample.old_log_probs[sample.completion_mask > 0] = logps.detach().numpy()
    assert math.isclose(policy_gradient(trainer).norm(), slow_gradient(trainer, samples, "none").norm(), rel_tol=1e-5)


# Mixtures of experts


def slow_load_balancing(trainer, samples, shares: bool = True) -> torch.Tensor:
    """
    E sum_e f_e P_e, with f_e the share of tokens whose choices have expert e, and P_e the mean of its probabilities,
    both over all layers. If it `shares`, a token counts once where samples agree on it, on what is before it and on
    what is next.
    """
    counted, routed = set(), []
    gates = [block.gate for block in blocks_of(trainer.model).values()]
    hooks = [gate.register_forward_pre_hook(lambda gate, args: routed.append((gate, args[0]))) for gate in gates]
    chosen, probabilities, tokens = torch.zeros(4), torch.zeros(4), 0
    for number, sample in enumerate(samples):
        routed.clear()
        trainer.model(torch.tensor(sample.input_ids)[None])
        ids = [*sample.input_ids.tolist(), None]
        for t in range(len(ids) - 1):
            node = (shares or number, *ids[: t + 2])
            if node in counted:
                continue
            counted.add(node)
            for gate, hidden in routed:
                scores = (gate.weight @ hidden.flatten(0, -2)[t]).softmax(-1)
                chosen[scores.detach().topk(2).indices] += 1
                probabilities, tokens = probabilities + scores, tokens + 1
    for hook in hooks:
        hook.remove()
    return 4 * (chosen / tokens * probabilities / tokens).sum()


def test_the_load_balancing_loss_is_added(tmp_path):
    """That of the tokens which are computed. No weight of a correction acts on it."""
    model, samples = save_tiny(tmp_path / "model", family="qwen3_moe", seed=3), given_samples(2)
    trainer = asynchronous(tmp_path, samples, model=model, router_aux_loss_coef=0.5, is_correction="tis")
    trainer.model_version = 1
    found, policy = policy_gradient(trainer), slow_gradient(trainer, samples, "tis")
    trainer.model.zero_grad(set_to_none=False)
    balance = slow_load_balancing(trainer, samples)
    balance.backward()
    added = 0.5 * torch.cat([param.grad.flatten() for param in trainer.model.parameters()]).double()
    assert (found - policy - added).norm() < 1e-4 * found.norm() and added.norm() > 1e-2 * found.norm()
    assert trainer._metrics["train"]["aux_loss"] == [pytest.approx(balance.item(), rel=1e-4)]
    assert slow_load_balancing(trainer, samples, shares=False).item() != pytest.approx(balance.item(), rel=1e-3)


def test_fields_that_the_trainer_has_not_are_refused_by_name(tmp_path):
    """TRL would read none of them."""
    absent = fields_of(GRPOConfig) - fields_of(QuantAsyncGRPOConfig)
    assert absent >= ABSENT
    for name in absent:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            QuantAsyncGRPOConfig(str(tmp_path), **{name: getattr(GRPOConfig, name, None)})
    with pytest.raises(ValueError, match="`args` is a GRPOConfig"):
        QuantAsyncGRPOConfig.from_trl(GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))
