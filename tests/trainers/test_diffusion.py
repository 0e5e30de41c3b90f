"""`DiffusionGRPOTrainer`: the one-step estimate, its masks, and its gradient, against slow loops and between runs."""

import copy
from collections import Counter

import pytest
import torch
from changes import move
from long_tests import rest_is_long
from masked_policy import LENGTH, MASK_ID, canvases, policy, tokenizer, trainer, uneven_rows
from reference import DROPPING, OBJECTIVES, ais_alpha, clipped, objective
from reference_diffusion import one_step_logps
from training import dataset, killed_and_resumed, killing, lora, metrics, parameters

from trl_quant.corrections import CORRECTIONS
from trl_quant.layers import quantized
from trl_quant.policy.masked import PromptMasks, mask_token_of
from trl_quant.trainers.diffusion import PER_DRAW


@pytest.fixture
def unrounded(monkeypatch):
    """The copy of an FP32 policy in "bf16" is in FP32: its weights are not rounded."""
    monkeypatch.setattr(
        quantized, "engine_weight", lambda weight, format, dtype: (quantized.EngineWeight(weight.to(dtype)), weight)
    )


def ending(path, **settings):
    """A trainer whose completions end at an eighth of all tokens, so that their lengths differ."""
    return trainer(path, model=policy(ends=range(40)), **settings)


def as_it_is(model):
    """A copy that keeps its weights. TRL's head would call the first model's forward."""
    kept = copy.deepcopy(model)
    vars(kept).pop("forward")
    return kept


def is_step(entry):
    return "loss" in entry


# The masks of the prompts


def test_a_mask_depends_on_row_generation_and_draw_alone():
    prompt, completion, masks = list(range(200)), [1, 2, 3], PromptMasks(0.15, seed=1, step=2, generation=3)
    torch.manual_seed(0)
    first, state = masks.of(prompt, completion, 0), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, PromptMasks(0.15, 1, 2, 3).of(tuple(prompt), tuple(completion), 0))
    others = [
        masks.of(prompt, completion, 1),
        masks.of(prompt, [1, 2, 4], 0),
        masks.of([*prompt[:-1], 7], completion, 0),
        *(PromptMasks(0.15, *place).of(prompt, completion, 0) for place in [(0, 2, 3), (1, 0, 3), (1, 2, 0)]),
    ]
    assert all(not torch.equal(first, other) for other in others)
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())  # the global random state is left alone


def test_the_share_of_masked_tokens_is_the_probability():
    for probability, low, high in [(0.15, 2800, 3200), (0.0, 0, 0), (1.0, 20000, 20000)]:  # 4 standard deviations
        assert low <= PromptMasks(probability).of(list(range(20000)), [], 0).sum() <= high


def test_the_mask_token_is_found():
    config = policy().config
    assert mask_token_of(5, tokenizer(), config, ends=[257]) == 5
    assert mask_token_of(5, None, config, ends=[]) == 5
    assert mask_token_of(None, tokenizer(), config, ends=[257]) == MASK_ID
    with pytest.raises(ValueError, match=rf"`mask_token_id`={MASK_ID} ends a completion \(`eos_token_id`=\[257, "):
        mask_token_of(None, tokenizer(), config, ends=[257, MASK_ID])
    config.mask_token_id = 77
    plain = tokenizer()
    plain.mask_token = None
    assert mask_token_of(None, plain, config, ends=[]) == 77


# The estimate


def scored(made, prompts, completions, extra=(0, 0), draw=0, masks=None, **kwargs):
    """What TRL gets for rows that are padded as it pads them, and by `extra` columns more."""
    width, length = (max(map(len, rows)) + more for rows, more in zip((prompts, completions), extra, strict=True))
    ids, mask = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = width - len(prompt), length - len(completion)
        ids.append([256] * left + prompt + completion + [256] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    draws = made.prompt_masks
    draws.masks[draws.mode] = masks or PromptMasks(0.3)
    draws.in_loss = draw
    arguments = made.model, torch.tensor(ids), torch.tensor(mask), length
    logps, entropies, _ = made._get_per_token_logps_and_entropies(*arguments, compute_entropy=True, **kwargs)
    draws.in_loss = None
    return logps, entropies


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_estimate_is_that_of_slow_loops(tmp_path, family):
    """In place and not shifted, on a canvas of one length, under each row's mask; gemma caps its logits."""
    made, (prompts, completions) = trainer(tmp_path, model=policy(family), temperature=0.7), uneven_rows()
    logps, entropies = scored(made, prompts, completions, draw=1)
    shorter = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        is_masked = PromptMasks(0.3).of(prompt, completion, 1).tolist()
        expected = one_step_logps(made.model, prompt, is_masked, completion, LENGTH, MASK_ID, 0.7)
        assert torch.allclose(logps[row, : len(completion)], expected, atol=2e-5)
        assert (logps[row, len(completion) :] == 0).all() and (entropies[row, : len(completion)] > 0.1).all()
        other = one_step_logps(made.model, prompt, is_masked, completion, len(completion), MASK_ID, 0.7)
        shorter.append((other - expected).abs().max().item())
    assert max(shorter) > 0.01  # the length of the canvas is seen


def test_padding_is_neutral(tmp_path):
    """On the left, on the right and beyond the canvas, in one batch or in several."""
    made, rows = trainer(tmp_path), uneven_rows()
    logps, _ = scored(made, *rows)
    columns = logps.shape[1]
    for extra, options in (((5, 0), {}), ((0, 9), {}), ((3, 2), {"batch_size": 2})):
        other, _ = scored(made, *rows, extra=extra, **options)
        assert torch.allclose(other[:, :columns], logps, atol=1e-5) and (other[:, columns:] == 0).all()
    assert not torch.allclose(scored(made, *rows, draw=1)[0], logps, atol=1e-2)  # another mask is no padding


# The same masks everywhere


def runs_of(tmp_path, **settings):
    """A run, and the canvases that copy and policy computed: (tokens, draw) by model and training pass."""
    made = ending(tmp_path, rollout_precision="int4", **settings)
    with canvases() as seen:
        made.train()
    of_copy = Counter((row, draw) for model, draw, row in seen if model is made.vllm_generation.engine.copy)
    of_policy = Counter((row, draw) for model, draw, row in seen if model is not made.vllm_generation.engine.copy)
    return made, of_copy, of_policy


@pytest.mark.parametrize(("rows", "parts", "correction"), [(8, 1, "tis"), (4, 2, "ais"), (2, 4, "tis")])
def test_trainer_and_copy_see_the_same_rows_under_the_same_masks(tmp_path, rows, parts, correction):
    """Shuffled and accumulated: the copy once in each draw, the policy in scoring and in the loss."""
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts, "num_iterations": 2}
    _, of_copy, of_policy = runs_of(tmp_path, is_correction=correction, max_steps=4, **settings)
    assert {draw for _, draw in of_copy} == {0, 1}
    assert sum(of_copy.values()) == 2 * 2 * 8  # generations, draws, rows
    assert of_policy == {row: 2 * times for row, times in of_copy.items()}
    canvas = (MASK_ID,) * LENGTH
    assert all(row[-LENGTH:] == canvas for row, _ in of_policy)
    assert any(MASK_ID in row[:-LENGTH] for row, _ in of_policy)


def test_micro_batches_do_not_matter(tmp_path):
    """The first generation's canvases are the same in any division into micro-batches, and so is its step."""
    found = []
    for rows, parts in ((8, 1), (4, 2)):
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts, "max_steps": 1}
        made, of_copy, of_policy = runs_of(tmp_path, loss_type="grpo", **settings)
        found.append((of_copy, of_policy, parameters(made)))
    assert found[0][:2] == found[1][:2]
    for name, value in found[0][2].items():
        assert torch.allclose(value, found[1][2][name], atol=1e-3 * 0.05)  # Adam: a step of 1e-3


def test_dynamic_sampling_keeps_the_masks(tmp_path):
    def coarse(completions, **kwargs):
        return [float(len(text) > 3) for text in completions]

    settings = {"rollout_precision": "int4", "dynamic_sampling_rounds": 2, "is_correction": "ais", "num_iterations": 2}
    given = {"reward_funcs": coarse, "train_dataset": dataset(16)}
    made = ending(tmp_path, given=given, **settings)
    with canvases() as seen:
        made.train()
    of_copy = {(row, draw) for model, draw, row in seen if model is made.vllm_generation.engine.copy}
    of_policy = {(row, draw) for model, draw, row in seen if model is not made.vllm_generation.engine.copy}
    assert of_policy <= of_copy and len(of_policy) > 8
    assert all("dynamic_sampling/rounds" in entry for entry in metrics(made)[:1])


@pytest.mark.parametrize(
    "options",
    [{"num_iterations": 2, "prompt_mask_draws": 2}, {"num_iterations": 3}],
    ids=["between generations", "inside a generation"],
)
def test_killed_and_resumed_equals_unbroken(tmp_path, options):
    """The masks go on too: without them the log-probabilities would differ."""

    def started(path, kill_at=None):
        settings = {"rollout_precision": "int4", "save_strategy": "steps", "save_steps": 2, "is_correction": "ais"}
        given = {"reward_funcs": killing(kill_at)}
        return trainer(path, given=given, max_steps=4, **settings | options)

    whole, resumed = killed_and_resumed(started, tmp_path, kill_at=2)
    assert [e for e in metrics(resumed) if is_step(e)] == [e for e in metrics(whole) if is_step(e)]
    mine, theirs = parameters(resumed), parameters(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(ValueError, match=r"`block_length`: 4 -> 8"):
        trainer(tmp_path / "broken", max_steps=4, rollout_precision="int4", is_correction="ais", block_length=8).train(
            resume_from_checkpoint=True
        )


def test_an_evaluation_does_not_disturb_the_generation_that_is_trained_on(tmp_path):
    made = ending(tmp_path, rollout_precision="int4", num_iterations=2, given={"eval_dataset": dataset(2)})
    batch = generation(made)
    before = loss_and_gradient(made, batch, iteration=1)
    made.evaluate()
    made.model.train()
    after = loss_and_gradient(made, batch, iteration=1)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


# An exact copy


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "max_steps": 4}, {"beta": 0.1}])
def test_with_an_exact_copy_every_weight_is_one_and_ais_is_plain_grpo(tmp_path, unrounded, options):
    """Bit for bit, after updates and under every mask."""
    options, runs = {"loss_type": "grpo", "scale_rewards": "none", **options}, {}
    policy(ends=range(40)).save_pretrained(tmp_path / "model")  # from which TRL loads the reference
    for name in ("ais", "none"):
        runs[name] = trainer(tmp_path, model=str(tmp_path / "model"), is_correction=name, **options)
        runs[name].train()
    logged = [entry for entry in metrics(runs["ais"]) if "mismatch/same_fraction" in entry]
    assert len(logged) == 2
    for entry in logged:
        assert entry["mismatch/same_fraction"] == 1.0 and entry["ais/alpha"] == 0.0
        assert entry["sampling/importance_sampling_ratio/min"] == entry["sampling/importance_sampling_ratio/max"] == 1
    mine, theirs = parameters(runs["ais"]), parameters(runs["none"])
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("precision", ["int8", "nvfp4"])
def test_a_policy_trained_in_the_samplers_precision_has_the_samplers_bits(tmp_path, precision):
    given = {"peft_config": lora()}
    made = trainer(tmp_path, train_precision=precision, is_correction="ais", given=given, num_iterations=2)
    before = parameters(made)
    made.train()
    logged = [entry["mismatch/same_fraction"] for entry in metrics(made) if "mismatch/same_fraction" in entry]
    assert logged == [1.0]
    assert any(not torch.equal(before[name], now) for name, now in parameters(made).items())


@pytest.mark.isa
def test_with_a_quantized_copy_the_weights_act(tmp_path):
    runs = {}
    for name in ("ais", "none"):
        runs[name] = trainer(
            tmp_path, rollout_precision="int4", is_correction=name, loss_type="grpo", scale_rewards="none"
        )
        runs[name].train()
    entry = metrics(runs["ais"])[0]
    assert entry["mismatch/same_fraction"] < 0.1 and entry["mismatch/kl_k3"] > 0.01 and entry["ais/alpha"] > 0.1
    assert entry["sampling/importance_sampling_ratio/max"] > 1.1
    mine, theirs = parameters(runs["ais"]), parameters(runs["none"])
    assert any(not torch.equal(mine[name], theirs[name]) for name in theirs)


# Gradients


def generation(made):
    """One generation, as `_prepare_inputs` makes it."""
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    rows = [dict(made.train_dataset[index // 4]) for index in range(8)]
    return made._generate_and_score_completions(rows)


def loss_and_gradient(made, batch, iteration=0):
    made._step = iteration * made.args.steps_per_generation
    made.model.zero_grad()
    loss = made._compute_loss(made.model, batch)
    loss.backward()
    return loss.detach(), gradient(made.model)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def estimates(model, batch, masks, draw):
    """The estimates (B, T) of a generation's rows in slow loops."""
    rows = torch.zeros(batch["completion_ids"].shape)
    rows = list(rows)
    for row in range(len(rows)):
        prompt, completion = (
            batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()].tolist() for part in ("prompt", "completion")
        )
        if completion:
            found = one_step_logps(model, prompt, masks.of(prompt, completion, draw), completion, LENGTH, MASK_ID)
            rows[row] = torch.cat([found, torch.zeros(len(rows[row]) - len(found))])
    return torch.stack(rows)


def expected_loss(made, batch, old, draw, name, draws):
    """The loss of the papers' equations, over the tokens of a batch, with a gradient."""
    masks, mask, advantages = made.prompt_masks.masks["train"], batch["completion_mask"], batch["advantages"]
    clip = (made.epsilon_low, made.epsilon_high)
    logps = estimates(made.model, batch, masks, draw)
    with torch.no_grad():
        before = [estimates(old, batch, masks, each) for each in range(draws)]
        sampler = [estimates(made.vllm_generation.engine.copy, batch, masks, each) for each in range(draws)]
    given = {"cap": 1.1} if name in ("tis", "acr") else {}
    if name != "ais":
        return -OBJECTIVES[name](logps, before[draw], sampler[draw], advantages, mask, *clip, **given)
    together = torch.cat(sampler), torch.cat(before), advantages.repeat(draws), mask.repeat(draws, 1)
    alpha = ais_alpha(*together)["ais/alpha"]  # of all draws

    def term(ratio, ratio_q, w, a, low, high):
        return (1 + alpha * (min(w, 5.0) - 1)) * clipped(ratio, a, low, high)

    return -objective(term, logps, before[draw], sampler[draw], advantages, mask, *clip)


@pytest.mark.parametrize("name", rest_is_long(["none", "coupled", "tis", "acr", "ais"], "coupled", "tis", "ais"))
def test_the_gradient_is_that_of_slow_loops(tmp_path, name):
    """At the first update and at the second, whose policy has moved and whose mask is another one."""
    settings = {"is_cap": 1.1} if name in ("tis", "acr") else {}
    settings |= {"is_correction": name, "num_iterations": 2, "loss_type": "bnpo"}
    made = ending(tmp_path, rollout_precision="int4", **settings)
    batch, old = generation(made), as_it_is(made.model)
    lengths = batch["completion_mask"].sum(1)
    assert lengths.min() < lengths.max() and all(batch[n].shape[1] == 2 for n in PER_DRAW if n in batch)
    found = {}
    for iteration in (0, 1):
        if iteration:
            move(made.model, 0.02)
        loss, trained = loss_and_gradient(made, batch, iteration)
        for draw in (0, 1):
            made.model.zero_grad()
            expected = expected_loss(made, batch, old, draw, name, draws=2)
            expected.backward()
            exact = gradient(made.model)
            found[iteration, draw] = ((trained - exact).norm() / exact.norm()).item()
            if draw == iteration:
                assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert found[0, 0] < 1e-4 and found[1, 1] < 1e-4
    assert found[0, 1] > 0.05 and found[1, 0] > 0.05  # another draw would show


def test_the_kl_term_compares_under_the_same_mask(tmp_path):
    settings = {"beta": 0.5, "use_bias_correction_kl": False, "is_correction": "none", "loss_type": "bnpo"}
    given = {"peft_config": lora()}
    made = ending(tmp_path, rollout_precision="int8", num_iterations=2, given=given, **settings)
    batch = generation(made)
    masks, mask = made.prompt_masks.masks["train"], batch["completion_mask"]
    for draw in (0, 1):
        _, trained = loss_and_gradient(made, batch, iteration=draw)
        made.model.zero_grad()
        logps = estimates(made.model, batch, masks, draw)
        with torch.no_grad(), made.model.disable_adapter():
            reference = estimates(made.model, batch, masks, draw)
        kl = torch.exp(reference - logps) - (reference - logps) - 1
        ratio = torch.exp(logps - logps.detach())
        terms = -ratio * batch["advantages"][:, None] + 0.5 * kl
        ((terms * mask).sum() / mask.sum()).backward()
        exact = gradient(made.model)
        assert (trained - exact).norm() < 1e-4 * exact.norm()


def test_truncated_completions_are_left_out(tmp_path):
    settings = {"mask_truncated_completions": True, "is_correction": "decoupled", "loss_type": "bnpo"}
    made = ending(tmp_path, rollout_precision="int4", num_iterations=2, **settings)
    batch, old = generation(made), as_it_is(made.model)
    kept = batch["completion_mask"].sum(1) > 0
    assert 0 < kept.sum() < 8
    for draw in (0, 1):
        _, trained = loss_and_gradient(made, batch, iteration=draw)
        made.model.zero_grad()
        expected_loss(made, batch, old, draw, "decoupled", draws=2).backward()
        exact = gradient(made.model)
        assert (trained - exact).norm() < 1e-4 * exact.norm()


# Whole runs


@pytest.mark.isa
@pytest.mark.parametrize(
    ("name", "level"),
    rest_is_long(
        [*((name, "token") for name in CORRECTIONS), *((name, "sequence") for name in ("decoupled", "ais", "icepop"))],
        *(("ais", "token"), ("trm", "token"), ("acr", "token"), ("decoupled", "sequence")),
    ),
)
def test_every_correction_runs_under_several_masks(tmp_path, name, level):
    settings = {"rollout_precision": "int4", "is_correction": name, "num_iterations": 2, "max_steps": 4}
    settings |= DROPPING.get(name, {})  # not all
    settings["importance_sampling_level"] = level
    made = trainer(tmp_path, **settings)
    before = parameters(made)
    made.train()
    steps = [entry for entry in metrics(made) if is_step(entry)]
    logged = [entry for entry in steps if "mismatch/kl_k3" in entry]
    assert len(steps) == 4 and len(logged) == (4 if CORRECTIONS[name].every_update else 2)
    assert all(entry["mismatch/kl_k3"] > 0.01 for entry in logged)
    assert not any("by_position" in key for entry in steps for key in entry)
    assert any(not torch.equal(before[key], value) for key, value in parameters(made).items())


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
        {"is_correction": "trl"},
        {"noise_schedule": "linear", "noise_stages": 3, "max_steps": 3},
        {"uaq_scale": 1.5},
        {"off_policy_mask_threshold": 0.1, "num_iterations": 2, "prompt_mask_draws": 1},
        {"top_entropy_quantile": 0.5, "gradient_checkpointing": True},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_what_trl_does_with_log_probabilities_works(tmp_path, settings):
    made = trainer(tmp_path, **{"rollout_precision": "int4"} | settings)
    made.train()
    steps = [entry for entry in metrics(made) if is_step(entry)]
    assert all(entry["grad_norm"] > 0 for entry in steps)
    ratios = [entry.get("sampling/importance_sampling_ratio/max", 1.0) for entry in steps]
    assert ratios[0] != 1.0
    if "noise_stages" in settings:
        assert steps[-1]["noise/effective_sigma"] > 0


def test_the_run_says_what_it_does(tmp_path, capsys):
    numerics, fast = "numerics only, no speed-up", "in low precision on a GPU"
    for precision, name, says in [("int4", "INT4", numerics), ("fp8_tensor", "FP8-tensor", fast)]:
        trainer(tmp_path, rollout_precision=precision, is_correction="ais")
        assert f"Sampling: {name}, embedded, by denoising ({says})" in capsys.readouterr().out


@pytest.mark.isa
def test_it_learns(tmp_path):
    """A reward for one token, which the policy comes to write more often, from an INT8 copy's samples."""

    def wanted(completion_ids, **kwargs):
        return [sum(token < 64 for token in ids) / LENGTH for ids in completion_ids]

    settings = {"rollout_precision": "int8", "is_correction": "ais", "learning_rate": 3e-3, "max_steps": 12}
    made = trainer(tmp_path, given={"reward_funcs": wanted, "train_dataset": dataset(64)}, **settings)
    made.train()
    rewards = [entry["reward"] for entry in metrics(made) if is_step(entry)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
