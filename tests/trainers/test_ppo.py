"""`QuantPPOTrainer`: the gradients of policy and critic under each correction, and what a run of it does.

The reference scores each row by itself, without padding, and multiplies the slow loops of `reference.py` and
`reference_ppo.py`.
"""

import math

import pytest
import reference_ppo as slow
import torch
import transformers
from peft import get_peft_model
from reference import DROPPING, OBJECTIVES, diagnostics
from tiny import save_tiny, tiny_model
from training import UnevenLengths, config, dataset, lora, make, metrics, parameters, spread
from transformers import AutoModelForTokenClassification

from trl_quant import QuantPPOConfig, QuantPPOTrainer
from trl_quant.corrections import CORRECTIONS
from trl_quant.trainers.ppo.critic import load_critic


pytestmark = pytest.mark.isa

LOW, HIGH = 0.2, 0.3
CAPS = {"tis": {"is_cap": 1.05}, "acr": {"is_cap": 1.05}, "ais": {"is_cap": 1.5, "ais_gamma": 0.8}} | DROPPING
GAE = {"gamma": 0.95, "lam": 0.8, "cliprange_value": 0.02}


class Uneven(UnevenLengths, QuantPPOTrainer):
    """Completions of several lengths."""


class WithTools(Uneven):
    """The same, in which a tool wrote the third token of each."""

    def correct(self, batch):
        batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
        batch["tool_mask"][:, 2] = 0
        batch["num_items_in_batch"] = (batch["completion_mask"] * batch["tool_mask"]).sum()
        super().correct(batch)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """A policy, and a critic whose value head is not zero."""
    path = tmp_path_factory.mktemp("models")
    policy = save_tiny(path / "policy", seed=3)
    critic = AutoModelForTokenClassification.from_pretrained(policy, num_labels=1)
    with torch.no_grad():
        critic.score.weight.copy_(torch.randn(1, 128, generator=torch.Generator().manual_seed(1)) / 8)
        critic.score.bias.fill_(0.25)
    critic.save_pretrained(path / "critic")
    return {"policy": policy, "critic": str(path / "critic")}


def ppo(path, models, kind=QuantPPOTrainer, given=None, **settings):
    settings = {"rollout_precision": "int4", "max_steps": 2, "value_learning_rate": 1e-3} | settings
    args = config(QuantPPOConfig, path / "out", **{"num_generations": 1} | settings)
    return make(kind, args, model=models["policy"], **given or {})


def scored(trainer, prompts=8) -> dict:
    """The scored batch that the next losses get."""
    trainer.model.train()
    trainer.state.max_steps = trainer.args.max_steps
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([{"prompt": prompt} for prompt in dataset(prompts)["prompt"]])


def reference_critic(models):
    return AutoModelForTokenClassification.from_pretrained(models["critic"]).eval()


def gradient_of(loss, *models, **options) -> list[torch.Tensor]:
    for model in models:
        model.zero_grad()
    loss.backward(**options)
    return [torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]).double() for m in models]


def move(model, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator), alpha=size)


def set_head(trainer) -> None:
    """Gives a value head on the policy's layers values that differ."""
    score = trainer.critic.model.score
    with torch.no_grad():
        score.weight.copy_(torch.randn(1, 128, generator=torch.Generator().manual_seed(1)) / 8)
        score.bias.fill_(0.25)


def hyperparameters(name: str) -> dict:
    return {{"is_cap": "cap"}.get(field, field.removeprefix(f"{name}_")): value for field, value in CAPS[name].items()}


def distance(left, right) -> float:
    return ((left - right).norm() / right.norm()).item()


def text_scores(trainer, batch) -> torch.Tensor:
    """What `spread` says of each completion."""
    tokenizer, rows = trainer.processing_class, zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    texts = [tokenizer.decode(ids[mask == 1], skip_special_tokens=True) for ids, mask in rows]
    return torch.tensor(spread(texts))


# The gradients


def test_the_critics_loss_is_divided_by_a_steps_share_of_the_generation(tmp_path, models):
    """Of a generation that serves two steps of two micro-batches; a mean over the generation would be half as large."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 2}
    trainer = ppo(tmp_path, models, Uneven, value_model_name_or_path=models["critic"], **settings, **GAE)
    batch = scored(trainer)
    trainer.current_gradient_accumulation_steps = 2
    rows = {name: value for name, value in batch.items() if torch.is_tensor(value) and value.ndim > 0}
    parts = [{name: value[2 * i : 2 * i + 2] for name, value in rows.items()} for i in range(4)]
    losses = [trainer.value_step.loss(batch | part).item() for part in parts]
    critic = reference_critic(models)
    with torch.no_grad():
        values = slow.values(critic, batch)
        advantages = slow.advantages(text_scores(trainer, batch), values, batch["completion_mask"], 0.95, 0.8)
        mean, _ = slow.value_loss(values, values, values + advantages, batch["completion_mask"], 0.02)
    assert len({part["completion_mask"].sum().item() for part in parts}) > 1
    assert sum(losses) == pytest.approx(2 * mean.item(), rel=1e-4)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_gradients_of_policy_and_critic(tmp_path, models, correction):
    """After both have moved, on a batch with tools and uneven lengths; no shortcut has them."""
    settings = {"is_correction": correction, "num_iterations": 2, "epsilon": LOW, "epsilon_high": HIGH} | GAE
    settings |= CAPS.get(correction, {}) | {"loss_type": "dapo", "value_model_name_or_path": models["critic"]}
    trainer = ppo(tmp_path, models, WithTools, **settings)
    batch = scored(trainer)
    before, critic = tiny_model(seed=3), reference_critic(models)
    mask = batch["completion_mask"] * batch["tool_mask"]
    with torch.no_grad():
        old, old_values = slow.logps(before, batch), slow.values(critic, batch)
    scores = text_scores(trainer, batch)
    advantages = slow.advantages(scores, old_values, mask, 0.95, 0.8)
    returns = advantages + old_values

    for model, seed, size in ((before, 5, 0.004), (trainer.model, 5, 0.004)):
        move(model, seed, size)
    for model in (critic, trainer.critic.model):
        move(model, 6, 0.002)
    loss = trainer._compute_loss(trainer.model, dict(batch))
    trained, criticised = gradient_of(loss, trainer.model, trainer.critic.model)

    def objective(advantages, mask=mask, name=correction, old=old):
        logps = slow.logps(before, batch)
        proximal = logps.detach() if name in ("trm", "dppo") else old  # they compare with the current policy
        given = logps, proximal, batch["sampling_per_token_logps"], advantages, mask, LOW, HIGH
        hyper = hyperparameters(name) if name in CAPS else {}
        return -OBJECTIVES[name](*given, **hyper)

    policy_loss = objective(slow.whitened(advantages, mask))
    values = slow.values(critic, batch)
    value_loss, clips = slow.value_loss(values, old_values, returns, mask, 0.02)
    assert loss.item() == pytest.approx(policy_loss.item() + value_loss.item(), rel=1e-4, abs=1e-5)
    (right,), (right_critic,) = gradient_of(policy_loss, before), gradient_of(value_loss, critic)
    assert distance(trained, right) < 1e-4 and distance(criticised, right_critic) < 1e-4

    shortcuts = {
        "no whitening": objective(advantages),
        "tools act": objective(slow.whitened(advantages, batch["completion_mask"]), batch["completion_mask"]),
        "reward to go": objective(slow.whitened(scores[:, None] * mask.double(), mask)),
    }
    for name, shortcut in shortcuts.items():
        assert distance(gradient_of(shortcut, before)[0], right) > 1e-2, name
    assert 0.05 < clips < 0.95
    for name, (mask_, clip) in {"no clip": (mask, None), "tools": (batch["completion_mask"], 0.02)}.items():
        shortcut, _ = slow.value_loss(slow.values(critic, batch), old_values, returns, mask_, clip)
        assert distance(gradient_of(shortcut, critic)[0], right_critic) > 1e-2, name
    if correction != "none":
        uncorrected = objective(slow.whitened(advantages, mask), name="none")
        assert distance(gradient_of(uncorrected, before)[0], right) > 1e-3


SHARED = {
    "packed": {},
    "groups": {"num_generations": 4},  # whose prompt is computed once
    "padded": {"pack_sequences": False},
    "checkpointed": {},
    "lora": {},
}


@pytest.mark.parametrize("option", SHARED)
def test_the_gradients_of_shared_layers(tmp_path, models, option):
    """Both losses reach the policy's layers or its adapter, after they and the head have moved; no shortcut does so."""
    settings = {"is_correction": "acr", "num_iterations": 2, "epsilon": LOW, "epsilon_high": HIGH, "is_cap": 1.05} | GAE
    settings |= {"loss_type": "dapo", "vf_share_layers": True, "vf_coef": 0.7}
    given = {"peft_config": lora()} if option == "lora" else {}
    trainer = ppo(tmp_path, models, WithTools, given, **settings | SHARED[option])
    assert trainer.packs is (option != "padded")
    if option == "checkpointed":
        trainer.model.gradient_checkpointing_enable()
    before = get_peft_model(tiny_model(seed=3), lora()) if option == "lora" else tiny_model(seed=3)
    before.load_state_dict(trainer.model.state_dict())
    set_head(trainer)
    head = torch.nn.Linear(128, 1)
    head.load_state_dict(trainer.critic.model.score.state_dict())
    batch = scored(trainer)
    mask = batch["completion_mask"] * batch["tool_mask"]
    with torch.no_grad():
        old, old_values = slow.logps(before, batch), slow.shared_values(before, head, batch)
    torch.testing.assert_close(batch["values"][mask == 1], old_values[mask == 1], rtol=1e-4, atol=1e-4)
    advantages = slow.advantages(text_scores(trainer, batch), old_values, mask, 0.95, 0.8)
    returns = advantages + old_values
    for model in (before, trainer.model):
        move(model, 5, 0.004)
    for model in (head, trainer.critic.model):
        move(model, 6, 0.002)

    loss = trainer._compute_loss(trainer.model, dict(batch))
    trained, of_head = gradient_of(loss, trainer.model, trainer.critic.model)
    logps, rows = slow.logps(before, batch), (batch["sampling_per_token_logps"], slow.whitened(advantages, mask))
    policy_loss = -OBJECTIVES["acr"](logps, old, *rows, mask, LOW, HIGH, **hyperparameters("acr"))

    def value_loss(detached=False, mask=mask):
        values = slow.shared_values(before, head, batch, detached)
        return slow.value_loss(values, old_values, returns, mask, 0.02)[0]

    expected = policy_loss + 0.7 * value_loss()
    right, right_head = gradient_of(expected, before, head, retain_graph=True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    assert distance(trained, right) < 1e-4 and distance(of_head, right_head) < 1e-4
    shortcuts = {
        "detached": 0.7 * value_loss(detached=True),
        "not scaled": value_loss(),
        "tools": 0.7 * value_loss(mask=batch["completion_mask"]),
    }
    for name, shortcut in shortcuts.items():
        assert distance(gradient_of(policy_loss + shortcut, before, retain_graph=True)[0], right) > 1e-2, name


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"is_correction": "tis"}, 1),  # one update: TRL does not score the old policy, so the values need a pass
        ({"is_correction": "tis", "num_iterations": 2}, 1),  # TRL's pass has them
        ({"is_correction": "tis", "num_iterations": 2, "beta": 0.1}, 2),  # the reference computes on the same layers
        ({"is_correction": "tis", "beta": 0.1}, 2),
        ({"is_correction": "tis", "num_iterations": 2, "per_device_train_batch_size": 2, "steps_per_generation": 4}, 4),
    ],
)
def test_old_values_of_shared_layers_share_trls_pass(tmp_path, models, settings, passes):
    """The values are those of the policy with its adapter, in every case."""
    trainer = ppo(tmp_path, models, Uneven, {"peft_config": lora()}, vf_share_layers=True, **settings)
    set_head(trainer)
    policy = get_peft_model(tiny_model(seed=3), lora())
    policy.load_state_dict(trainer.model.state_dict())
    computed = []
    trainer.critic.decoder.register_forward_hook(lambda *args: computed.append(1))
    batch = scored(trainer)
    with torch.no_grad():
        values = slow.shared_values(policy, trainer.critic.model.score, batch)
        with policy.disable_adapter():
            base = slow.shared_values(policy, trainer.critic.model.score, batch)
    mask = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["values"][mask], values[mask], rtol=1e-4, atol=1e-4)
    assert (base - values)[mask].abs().max() > 0.05
    assert len(computed) == passes + 1 and trainer.critic.passes == []  # one more checks the copy that samples


def test_what_is_logged_of_a_generation(tmp_path, models):
    """Values, returns, and the variance that the values explain, against slow loops; the mismatch as with GRPO."""
    trainer = ppo(tmp_path, models, WithTools, value_model_name_or_path=models["critic"], num_iterations=2, **GAE)
    batch, log = scored(trainer), trainer._metrics["train"]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    with torch.no_grad():
        values, old = slow.values(reference_critic(models), batch), slow.logps(tiny_model(seed=3), batch)
    advantages = slow.advantages(text_scores(trainer, batch), values, mask, 0.95, 0.8)
    returns = (values + advantages)[mask]
    torch.testing.assert_close(batch["values"][mask], values[mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch["returns"][mask], returns.float(), rtol=1e-4, atol=1e-5)
    assert log["value/mean"] == [pytest.approx(values[mask].mean().item(), rel=1e-4)]
    assert log["value/return_mean"] == [pytest.approx(returns.mean().item(), rel=1e-4)]
    explained = 1 - (advantages[mask].var() / returns.var()).item()
    assert log["value/explained_variance"] == [pytest.approx(explained, rel=1e-3)]
    expected = diagnostics(batch["sampling_per_token_logps"], old, mask, 2.0)
    assert log["mismatch/kl_k3"] == [pytest.approx(expected["mismatch/kl_k3"], rel=1e-3)]
    assert "frac_reward_zero_std" not in log
    means = [(row * m).sum().item() / m.sum().item() for row, m in zip(batch["advantages"], mask, strict=True)]
    assert list(trainer._logs["advantages"]) == pytest.approx(means, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("reward", [0.1, 3.0])
def test_equal_rewards_explain_nothing(tmp_path, models, reward):
    """With gamma = lam = 1 each return is the reward, up to rounding: there is no variance to explain."""
    given = {"reward_funcs": lambda completions, **kwargs: [reward] * len(completions)}
    settings = {"value_model_name_or_path": models["critic"], "gamma": 1.0, "lam": 1.0}
    trainer = ppo(tmp_path, models, WithTools, given, **settings)
    batch = scored(trainer)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    torch.testing.assert_close(batch["returns"][mask], torch.full((mask.sum(),), reward))
    assert batch["values"][mask].std() > 0.05
    log = trainer._metrics["train"]
    assert "value/explained_variance" not in log and log["value/return_mean"] == [pytest.approx(reward)]


@pytest.mark.parametrize("prompts", [2, 8])
def test_the_table_of_an_evaluation(tmp_path, models, prompts):
    """Of a batch smaller or larger than a generation, whose size the table has. Its last rows are the batch's."""
    settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": prompts}
    trainer = ppo(tmp_path, models, Uneven, value_model_name_or_path=models["critic"], **settings, **GAE)
    earlier = scored(trainer, prompts=4)
    trainer.model.eval()
    batch = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in dataset(prompts)["prompt"]])
    expected = [
        (row * mask).sum().item() / mask.sum().item()
        for found in (earlier, batch)
        for row, mask in zip(found["advantages"], found["completion_mask"], strict=True)
    ]
    assert list(trainer._logs["advantages"]) == pytest.approx(expected[-4:], rel=1e-4, abs=1e-6)
    assert len({round(value, 4) for value in expected[-4:]}) == 4


def test_packed_rows_have_the_padded_rows_values(tmp_path, models):
    found = []
    for packs in (True, False):
        trainer = ppo(tmp_path, models, Uneven, value_model_name_or_path=models["critic"], pack_sequences=packs)
        assert trainer.critic.packs is packs
        batch = found[0] if found else scored(trainer)
        with torch.no_grad():
            values = trainer.critic.values(batch)
        found = [batch, *found[1:], values * batch["completion_mask"]]
    assert batch["prompt_mask"].sum(1).unique().numel() > 2 and batch["completion_mask"].sum(1).unique().numel() > 2
    torch.testing.assert_close(found[1], found[2], rtol=1e-4, atol=1e-5)
    assert found[1].std() > 0.05


def test_a_new_value_head_is_zero(tmp_path, models):
    """So the first advantages are the whitened rewards."""
    trainer = ppo(tmp_path, models, Uneven)
    batch = scored(trainer)
    mask = batch["completion_mask"]
    assert torch.equal(batch["values"], torch.zeros(batch["values"].shape)) and trainer.critic.model.training
    expected = slow.whitened((text_scores(trainer, batch)[:, None] * mask).double(), mask)
    torch.testing.assert_close(batch["advantages"].double(), expected, rtol=1e-4, atol=1e-5)
    assert batch["advantages"].std() > 0.3


NOISY = {
    "attention": (transformers.Qwen3Config, {"attention_dropout": 0.3, "head_dim": 16}),
    "attention, from the config": (transformers.PersimmonConfig, {"attention_dropout": 0.3}),
    "attention, from a module": (transformers.BertConfig, {"attention_probs_dropout_prob": 0.3}),
    "modules": (transformers.GPT2Config, {"resid_pdrop": 0.3}),
    "head": (transformers.LlamaConfig, {}),  # 0.1 where the config has no dropout of the head
    "router": (transformers.MixtralConfig, {"router_jitter_noise": 0.3, "num_local_experts": 4}),
}


@pytest.mark.parametrize("noise", NOISY)
def test_a_critic_has_no_dropout(tmp_path, noise):
    """Nor the noise of a router. In training it computes what it does in evaluation; transformers' does not."""
    (kind, settings), ids = NOISY[noise], torch.arange(48)[None]
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_labels": 1}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    AutoModelForTokenClassification.from_config(kind(**sizes | settings)).save_pretrained(tmp_path / "critic")
    args = config(QuantPPOConfig, tmp_path, num_generations=1)
    critic = load_critic(str(tmp_path / "critic"), args).train()
    usual = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    with torch.no_grad():
        values = usual.eval()(ids).logits
        assert torch.equal(critic(ids).logits, values) and values.std() > 1e-3
        assert not torch.equal(usual.train()(ids).logits, values)


def test_the_first_update_clips_no_value(tmp_path, models):
    """Of a critic whose attention has dropout in its checkpoint: the values are the old ones, which it then leaves."""
    critic = AutoModelForTokenClassification.from_pretrained(models["critic"], attention_dropout=0.3)
    critic.save_pretrained(tmp_path / "critic")
    settings = {"num_iterations": 2, "cliprange_value": 0.01, "max_steps": 2}
    trainer = ppo(tmp_path, models, Uneven, value_model_name_or_path=str(tmp_path / "critic"), **settings)
    assert trainer.critic.packs
    trainer.train()
    clipped = [entry["value/clip_fraction"] for entry in metrics(trainer) if "value/clip_fraction" in entry]
    assert clipped[0] == 0 < clipped[1]


def test_completions_without_a_reward_teach_nothing(tmp_path, models):
    def sometimes(completions, **kwargs):
        return [None if i % 4 == 0 else value for i, value in enumerate(spread(completions))]

    trainer = ppo(tmp_path, models, given={"reward_funcs": sometimes}, value_model_name_or_path=models["critic"])
    batch = scored(trainer)
    assert (batch["advantages"][::4] == 0).all() and torch.equal(batch["returns"][::4], batch["values"][::4])
    kept = batch["advantages"][[1, 2, 3, 5, 6, 7]]
    assert kept.mean().abs() < 1e-5 and kept.std().item() == pytest.approx(1, rel=1e-4)

    move(trainer.critic.model, 6, 0.002)  # as after an update, when the values are no longer the old ones
    rows = {name: value for name, value in batch.items() if torch.is_tensor(value) and value.ndim > 0}
    losses = [trainer.value_step.loss(batch | {k: v[i : i + 1] for k, v in rows.items()}).item() for i in range(8)]
    assert losses[0] == losses[4] == 0 and min(losses[i] for i in (1, 2, 3, 5, 6, 7)) > 0
    logged = {}
    trainer.log(logged)  # the mean over the micro-batches that have a reward
    sums, lengths = torch.tensor(losses) * batch["num_items_in_batch"], batch["completion_mask"].sum(1)
    assert logged["value/loss"] == pytest.approx((sums / lengths).sum().item() / 6, rel=1e-4)


def test_rewards_have_weights(tmp_path, models):
    """Of two functions, of which one does not always apply."""

    def second(completions, **kwargs):
        return [None if i == 2 else 1.0 for i in range(len(completions))]

    settings = {"reward_weights": [2.0, -0.5], "value_model_name_or_path": models["critic"]}
    trainer = ppo(tmp_path, models, given={"reward_funcs": [spread, second]}, **settings)
    batch = scored(trainer)
    expected = 2 * text_scores(trainer, batch) - 0.5
    expected[2] += 0.5
    torch.testing.assert_close(batch["returns"][:, 0], expected, rtol=1e-4, atol=1e-5)  # gamma = lam = 1


# Runs


@pytest.mark.parametrize("shares", [False, True])
def test_minibatches_and_iterations_add_up(tmp_path, models, shares):
    """Four micro-batches in one update end where one does; the same in four updates does not."""
    ends = []
    for size, accumulated in ((8, 1), (2, 4), (2, 1)):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        settings |= {"steps_per_generation": 8 // size, "max_steps": 8 // size // accumulated}
        settings |= {"optim": "sgd", "learning_rate": 0.1, "value_learning_rate": 0.1, "max_grad_norm": 0.0}
        settings |= {"lr_scheduler_type": "constant", "vf_share_layers": shares, "loss_type": "dapo"}
        settings |= {} if shares else {"value_model_name_or_path": models["critic"]}
        trainer = ppo(tmp_path / str(len(ends)), models, Uneven, is_correction="decoupled", **settings)
        if shares:
            set_head(trainer)
        starts = flat(parameters(trainer)), flat(dict(trainer.critic.model.named_parameters()))
        trainer.train()
        ends.append([flat(parameters(trainer)), flat(dict(trainer.critic.model.named_parameters()))])
    for one, four, updates, begun in zip(*ends, starts, strict=True):
        assert distance(four - begun, one - begun) < 1e-3
        assert distance(updates - begun, one - begun) > 1e-2


def flat(tensors) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in tensors.values()]).double()


def rates_of(trainer) -> tuple[list[float], list[float]]:
    """The learning rates of critic and policy in a training."""
    rates = []
    trainer.critic.optimizer.optimizer.register_step_pre_hook(
        lambda optimizer, *args: rates.append([group["lr"] for group in optimizer.param_groups])
    )
    trainer.train()
    assert all(rate == other for rate, other in rates)
    return [rate for rate, _ in rates], [entry["learning_rate"] for entry in metrics(trainer) if "loss" in entry]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("linear", {}),
        ("cosine_with_min_lr", {"min_lr": 2e-4}),
        ("polynomial", {"lr_end": 5e-4}),
        ("polynomial", {}),
        ("warmup_stable_decay", {"num_decay_steps": 2}),
    ],
)
@pytest.mark.parametrize("height", [3e-3, 1e-5, 0.0])
def test_the_critics_rate_follows_the_policys(tmp_path, models, schedule, options, height):
    """Also where the schedule ends at a rate that is given, which is the policy's."""
    settings = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": options, "warmup_steps": 1, "max_steps": 4}
    rates, policys = rates_of(ppo(tmp_path, models, value_learning_rate=height, vf_share_layers=True, **settings))
    assert rates == pytest.approx([height / 1e-3 * rate for rate in policys], rel=1e-6, abs=0)
    assert policys[0] == 0 < policys[3] < policys[1] == 1e-3


def test_the_critic_learns_beside_a_policy_that_does_not(tmp_path, models):
    rates, policys = rates_of(ppo(tmp_path, models, learning_rate=0.0, value_learning_rate=1e-3, max_steps=4))
    assert policys == [0] * 4 and rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_the_critics_gradient_is_clipped_by_itself(tmp_path, models):
    norms = []
    trainer = ppo(tmp_path, models, max_steps=4, value_learning_rate=3e-3, max_grad_norm=0.05)
    critic = trainer.critic
    critic.optimizer.optimizer.register_step_pre_hook(
        lambda *args: norms.append(torch.stack([p.grad.norm() for p in critic.model.parameters()]).norm().item())
    )
    trainer.train()
    assert norms == pytest.approx([0.05] * 4, rel=1e-3)
    assert min(entry["value/grad_norm"] for entry in metrics(trainer) if "loss" in entry) > 0.05


COMPOSED = {
    "iterations": {"num_iterations": 2, "is_correction": "acr"},
    "steps_per_generation": {"per_device_train_batch_size": 2, "steps_per_generation": 4, "is_correction": "ais"},
    "groups": {"num_generations": 4},
    "reference": {"beta": 0.1, "is_correction": "coupled", "use_bias_correction_kl": False},
    "truncated": {"mask_truncated_completions": True},
    "multiple": {"pad_to_multiple_of": 5},
    "padded": {"pack_sequences": False},
    "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2},
    "mixed_precision": {"bf16": True, "gradient_checkpointing": True},
    "bf16_weights": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "uaq": {"uaq_scale": 1.5},
    "trained": {"rollout_precision": None, "train_precision": "int8"},
    "unquantized": {"rollout_precision": None},
    "unclipped": {"cliprange_value": None},
    "lora": {"rollout_precision": "nf4"},
    "frozen": {"rollout_precision": None, "train_precision": "nvfp4"},
    "shared_eval": {"vf_share_layers": True, "eval_strategy": "steps", "eval_steps": 1},
    "shared_mixed_precision": {"vf_share_layers": True, "bf16": True, "gradient_checkpointing": True},
    "shared_frozen": {"vf_share_layers": True, "rollout_precision": None, "train_precision": "nvfp4"},
    "shared_trained": {"vf_share_layers": True, "rollout_precision": None, "train_precision": "int8"},
}


@pytest.mark.parametrize("option", COMPOSED)
def test_composes_with_trl(tmp_path, models, option):
    adapted, evaluates = option.endswith(("lora", "frozen")), option.endswith("eval")
    given = {"peft_config": lora() if adapted else None, "eval_dataset": dataset(2) if evaluates else None}
    trainer = ppo(tmp_path, models, given=given, **{"rollout_precision": "int8"} | COMPOSED[option])
    before, critic = parameters(trainer), flat(dict(trainer.critic.model.named_parameters()))
    trainer.train()
    logs = [entry for entry in metrics(trainer) if "loss" in entry]
    assert len(logs) == 2 and all(math.isfinite(entry["loss"]) for entry in logs)
    if option != "truncated":  # every completion of a random model is cut, and then nothing counts
        moved = {name for name, value in parameters(trainer).items() if not torch.equal(value, before[name])}
        assert moved and all("lora_" in name for name in moved) == adapted
        assert not torch.equal(flat(dict(trainer.critic.model.named_parameters())), critic)
        assert all(entry["value/loss"] > 0 and entry["value/grad_norm"] > 0 for entry in logs)
        assert ("value/clip_fraction" in logs[0]) == (option != "unclipped")
    if evaluates:
        assert any(entry.get("eval_value/loss", 0) > 0 for entry in metrics(trainer))
    assert ("mismatch/kl_k3" in logs[0]) == (option != "unquantized")


def test_it_learns(tmp_path, models):
    """To write the first 64 tokens, of 320."""

    def low(completions, completion_ids, **kwargs):
        return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]

    settings = {"max_steps": 24, "learning_rate": 3e-3, "value_learning_rate": 3e-3, "per_device_train_batch_size": 16}
    settings |= {"max_completion_length": 4, "lr_scheduler_type": "constant", "rollout_precision": "int8"}
    given = {"reward_funcs": low, "train_dataset": dataset(32)}
    trainer = ppo(tmp_path, models, given=given, steps_per_generation=2, is_correction="acr", **settings)
    trainer.train()
    rewards = [entry["reward"] for entry in metrics(trainer) if "reward" in entry]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25  # from 0.2 to 0.8


def test_shared_layers_learn_what_a_prompt_is_worth(tmp_path, models):
    """A reward that the prompt's length decides."""

    def long(prompts, **kwargs):
        return [float(len(prompt) > 10) for prompt in prompts]

    settings = {"max_steps": 24, "learning_rate": 3e-3, "value_learning_rate": 1e-2, "per_device_train_batch_size": 16}
    settings |= {"max_completion_length": 4, "lr_scheduler_type": "constant", "rollout_precision": "int8"}
    settings |= {"vf_share_layers": True, "vf_coef": 1.0, "cliprange_value": None, "steps_per_generation": 2}
    trainer = ppo(tmp_path, models, given={"reward_funcs": long, "train_dataset": dataset(64)}, **settings)
    trainer.train()
    found = [entry["value/explained_variance"] for entry in metrics(trainer) if "value/explained_variance" in entry]
    assert found[0] == 0 and sum(found[-3:]) / 3 > 0.25  # 0.6
