"""`QuantPPOTrainer`: the gradients of policy and critic under each correction, and what is logged of a generation.

The reference scores each row by itself, without padding, and multiplies the slow loops of `reference.py` and
`reference_ppo.py`.
"""

from functools import partial

import pytest
import reference_ppo as slow
import torch
import transformers
from changes import move
from long_tests import rest_is_long
from peft import get_peft_model
from ppo_gradients import Uneven, distance, ppo, set_head
from reference import DROPPING, OBJECTIVES, diagnostics, hyperparameters
from tiny import tiny_model
from training import config, dataset, generation, lora, metrics, spread
from transformers import AutoModelForTokenClassification

from trl_quant import QuantPPOConfig
from trl_quant.corrections import CORRECTIONS
from trl_quant.trainers.ppo.critic import load_critic


pytestmark = pytest.mark.isa

LOW, HIGH = 0.2, 0.3
CAPS = {"tis": {"is_cap": 1.05}, "acr": {"is_cap": 1.05}, "ais": {"is_cap": 1.5, "ais_gamma": 0.8}} | DROPPING
GAE = {"gamma": 0.95, "lam": 0.8, "cliprange_value": 0.02}

scored = partial(generation, prompts=8, each=1)


class WithTools(Uneven):
    """The same, in which a tool wrote the third token of each."""

    def correct(self, batch):
        batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
        batch["tool_mask"][:, 2] = 0
        batch["num_items_in_batch"] = (batch["completion_mask"] * batch["tool_mask"]).sum()
        super().correct(batch)


def reference_critic(models):
    return AutoModelForTokenClassification.from_pretrained(models["critic"]).eval()


def gradient_of(loss, *models, **options) -> list[torch.Tensor]:
    for model in models:
        model.zero_grad()
    loss.backward(**options)
    return [torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]).double() for m in models]


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


@pytest.mark.parametrize("correction", rest_is_long(CORRECTIONS, "coupled", "acr", "ais", "geometric"))
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
        move(model, size, seed)
    for model in (critic, trainer.critic.model):
        move(model, 0.002, 6)
    loss = trainer._compute_loss(trainer.model, dict(batch))
    trained, criticised = gradient_of(loss, trainer.model, trainer.critic.model)

    def objective(advantages, mask=mask, name=correction, old=old):
        logps = slow.logps(before, batch)
        proximal = logps.detach() if name in ("trm", "dppo") else old  # they compare with the current policy
        given = logps, proximal, batch["sampling_per_token_logps"], advantages, mask, LOW, HIGH
        hyper = hyperparameters(name, CAPS.get(name, {}))
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


@pytest.mark.parametrize("option", rest_is_long(SHARED, "packed", "groups", "padded"))
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
        move(model, 0.004, 5)
    for model in (head, trainer.critic.model):
        move(model, 0.002, 6)

    loss = trainer._compute_loss(trainer.model, dict(batch))
    trained, of_head = gradient_of(loss, trainer.model, trainer.critic.model)
    logps, rows = slow.logps(before, batch), (batch["sampling_per_token_logps"], slow.whitened(advantages, mask))
    policy_loss = -OBJECTIVES["acr"](logps, old, *rows, mask, LOW, HIGH, **hyperparameters("acr", CAPS["acr"]))

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

    move(trainer.critic.model, 0.002, 6)  # as after an update, when the values are no longer the old ones
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
