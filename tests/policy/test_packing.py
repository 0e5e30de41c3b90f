"""Packed rows, with each prompt once, have the log-probabilities and gradients of padded rows."""

import dataclasses
import random

import pytest
import torch
from long_tests import rest_is_long
from packed_rows import CAN_PACK, PROMPT, assert_as_near, batch, gradients, model_of
from tiny import save_tiny, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import PROMPTS, UnevenLengths, config, lora, make, parameters

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantRLOOTrainer
from trl_quant.config.values import CLIPPED_LOSSES
from trl_quant.layers.packed import PACKED, Packed
from trl_quant.layers.products import TOKENS
from trl_quant.policy import packed as policy_packed
from trl_quant.policy.packed import PackedRows, accept_packed_rows
from trl_quant.precisions import frozen_bases
from trl_quant.trainers import packing
from trl_quant.trainers.packing import balanced


LOSSES = [*CLIPPED_LOSSES, "cispo", "sapo", "vespo"]


class UnevenGRPOTrainer(UnevenLengths, QuantGRPOTrainer):
    pass


class UnevenRLOOTrainer(UnevenLengths, QuantRLOOTrainer):
    pass


@pytest.mark.parametrize(
    ("family", "checkpointing", "shares"),
    [(family, (i + shares) % 2 > 0, shares) for i, family in enumerate(CAN_PACK) for shares in (False, True)],
)
def test_packed_rows_are_padded_ones(family, checkpointing, shares):
    model = model_of(family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    given = batch()
    padded = gradients(model, model, given)
    accept_packed_rows(model)
    again = gradients(model, model, given)
    assert all(torch.equal(again[2][name], grad) for name, grad in padded[2].items())  # padded rows: the same bits
    packed = gradients(model, PackedRows(model, PROMPT, shares), given)
    for mine, theirs in zip(packed[:2], padded[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for name, grad in padded[2].items():
        assert (packed[2][name] - grad).norm() < 3e-5 * grad.norm(), name


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("completion", [40, 47, 60])
def test_rows_are_whole_tiles(completion, shares):
    """The products copy no input to pad it, and the tokens that fill a row have no part in the loss."""
    model, given, lengths = model_of("qwen2"), batch(completion=completion), []
    accept_packed_rows(model)
    model.model.register_forward_pre_hook(lambda _, args, kwargs: lengths.append(kwargs), with_kwargs=True)
    PackedRows(model, PROMPT, shares)(**given, fused_lm_head=True).log_probs.sum().backward()
    (seen,) = lengths
    tokens, packed = seen["input_ids"].shape[1], seen[PACKED]
    assert tokens % TOKENS == 0 and tokens == packed.starts[-1] == len(packed.rows)
    unfilled = (
        Packed.sharing(given["attention_mask"], given["input_ids"], PROMPT)
        if shares
        else Packed.of(given["attention_mask"], *given["attention_mask"].shape, given["input_ids"].device)
    )
    assert 0 <= tokens - len(unfilled.rows) < TOKENS


@pytest.mark.parametrize("family", CAN_PACK)
def test_autocast(family):
    assert_as_near(model_of(family), batch())


# In a trainer


def both(tmp_path, trainer_class=QuantGRPOTrainer, tools=False, seed=3, **settings) -> dict[bool, tuple[float, dict]]:
    """The loss and the gradients of the first micro-batch of a run, by whether its rows are packed."""
    found, model = {}, save_tiny(tmp_path / f"model-{seed}", seed=seed)
    peft_config = settings.pop("peft_config", None)
    for packs in (False, True):
        config_class = trainer_class.config_class
        args = config(config_class, tmp_path, pack_sequences=packs, max_completion_length=24, **settings)
        trainer = make(trainer_class, args, model=model, peft_config=peft_config)
        torch.manual_seed(0)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = trainer._generate_and_score_completions([{"prompt": text} for text in PROMPTS[:2] for _ in range(4)])
        cut = torch.tensor([24, 1, 3, 9, 17, 2, 24, 5])
        batch["completion_mask"] = (torch.arange(batch["completion_ids"].shape[1]) < cut.unsqueeze(1)).long()
        batch["completion_ids"] *= batch["completion_mask"]
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        if tools:  # some tokens are the answers of a tool
            batch["tool_mask"] = (batch["completion_ids"] % 3 > 0).long()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        found[packs] = loss.item(), {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return found


def worst(found, other=None) -> float:
    padded, packed = found[False][1], (other or found)[True][1]
    assert padded.keys() == packed.keys() and padded
    return max(((packed[name] - grad).norm() / grad.norm().clamp(min=1e-9)).item() for name, grad in padded.items())


@pytest.mark.parametrize("loss_type", rest_is_long(LOSSES, "grpo", "dapo", "luspo", "vespo"))
def test_every_loss(tmp_path, loss_type):
    found = both(tmp_path, rollout_precision="int4", loss_type=loss_type, beta=0.1)
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-5)
    assert worst(found) < 1e-4


# Each way in which a correction acts: another proximal policy, weights, clip bounds, weights of a whole batch, dropped
# sequences, each update
@pytest.mark.parametrize(
    "correction", rest_is_long(["coupled", "tis", "acr", "ais", "geometric", "dppo"], "acr", "geometric", "dppo")
)
def test_every_correction(tmp_path, correction):
    found = both(tmp_path, rollout_precision="int4", is_correction=correction)
    assert worst(found) < 1e-4


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_tokens_of_tools(tmp_path, loss_type):
    found = both(tmp_path, rollout_precision="int4", loss_type=loss_type, tools=True)
    assert worst(found) < 1e-4
    assert worst(found, other=both(tmp_path, rollout_precision="int4", loss_type=loss_type)) > 0.05


# Of a prompt that several rows share, "fp8" rounds the sum of the gradients. The groups of dW in "fp8_block" have other
# tokens in packed rows.
WITHIN = {
    ("int8", True): 1e-4,
    ("int8", False): 1e-4,
    ("fp8", True): 0.1,
    ("fp8", False): 1e-4,
    ("fp8_block", True): 0.1,
}


def packed_from_padded(tmp_path, monkeypatch, precision: str, shares: bool, adapted: bool, seed: int = 3) -> float:
    """How far the gradients of packed rows are from those of padded ones, in a `train_precision`."""
    if not shares:
        monkeypatch.setattr(packing, "shares_prompts", lambda model: False)
    with sdpa_kernel(SDPBackend.MATH):  # flash attention on a CPU with AVX2 alone moves codes of FP8 too
        return worst(both(tmp_path, train_precision=precision, peft_config=lora() if adapted else None, seed=seed))


@pytest.mark.parametrize(
    ("precision", "shares", "adapted"),
    rest_is_long(
        [
            *(("int8", True, False), ("int8", False, True)),
            *((precision, True, adapted) for precision in ("fp8", "fp8_block") for adapted in (False, True)),
        ],
        *(("int8", False, True), ("fp8", True, True), ("fp8_block", True, False)),
    ),
)
def test_every_training_precision(tmp_path, monkeypatch, precision, shares, adapted):
    """Another attention kernel may move an activation to the next code."""
    assert packed_from_padded(tmp_path, monkeypatch, precision, shares, adapted) < WITHIN[precision, shares]


@pytest.mark.parametrize("adapted", [False, True])
def test_fp8_without_shared_prompts(tmp_path, monkeypatch, adapted):
    """
    Products and sums of packed rows have other shapes, which changes last bits. Such a bit moves a value to the next
    code of FP8 in some models, and the versions and the CPU decide in which. A fault of the packing would be in all.
    """
    found = []
    for seed in (3, 1, 2):
        found.append(packed_from_padded(tmp_path, monkeypatch, "fp8", False, adapted, seed))
        if found[-1] < WITHIN["fp8", False]:
            break
    assert min(found) < WITHIN["fp8", False] and max(found) < WITHIN["fp8", True]


@pytest.mark.parametrize("precision", rest_is_long(frozen_bases()))
def test_a_4_bit_base(tmp_path, precision):
    found = both(tmp_path, train_precision=precision, peft_config=lora())
    assert worst(found) < (1e-2 if precision == "nf4" else 1e-4)  # bitsandbytes computes in BF16


# Micro-batches of a step


def trained(tmp_path, trainer_class=UnevenGRPOTrainer, **settings):
    """
    A trainer after two updates on one generation of 16 rows, each in four micro-batches. Plain SGD moves the weights by
    the gradients.
    """
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_completion_length": 24} | settings
    settings = {"max_steps": 2, "num_iterations": 2, "rollout_precision": "int4"} | settings
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4} | settings
    args = config(trainer_class.config_class, tmp_path, **settings)
    trainer = make(trainer_class, args, model=save_tiny(tmp_path / "model", seed=3))
    trainer.start, trainer.computed = parameters(trainer), []
    record = trainer.model.forward

    def forward(input_ids, **given):
        trainer.computed.append(input_ids.numel())
        return record(input_ids=input_ids, **given)

    trainer.model.forward = forward
    trainer.train()
    return trainer


def apart(left, right) -> float:
    """The distance of two ends, in lengths of the way to the second."""
    left, right, start = parameters(left), parameters(right), right.start
    gaps = torch.stack([(left[name] - right[name]).norm() for name in right]).norm()
    ways = torch.stack([(start[name] - right[name]).norm() for name in right]).norm()
    return (gaps / ways).item()


@pytest.mark.parametrize(
    "loss_type", rest_is_long(["grpo", "dr_grpo", "dapo", "luspo"], "dr_grpo", "luspo")
)  # what TRL divides by; "bnpo" is below
def test_a_step_stays_the_same_in_other_micro_batches(tmp_path, loss_type):
    padded = trained(tmp_path, pack_sequences=False, loss_type=loss_type)
    packed = trained(tmp_path, loss_type=loss_type)
    assert apart(packed, padded) < 1e-4
    assert sum(packed.computed[1:]) < 0.7 * sum(padded.computed[1:])  # the first is the check of the copy


@pytest.mark.parametrize("options", rest_is_long([{"loss_type": "bnpo"}, {"entropy_coef": 0.5}]))
def test_what_depends_on_the_micro_batch(tmp_path, monkeypatch, options):
    """Its rows stay where they are; moved, they would train another policy."""
    padded = trained(tmp_path, pack_sequences=False, **options)
    assert apart(trained(tmp_path, **options), padded) < 1e-4
    monkeypatch.setattr(packing, "terms_are_independent", lambda trainer: True)
    assert apart(trained(tmp_path, **options), padded) > 0.01


def test_rows_of_a_prompt_come_together(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_packed, "TOKENS", 1)  # rows of tokens alone
    together = trained(tmp_path)
    monkeypatch.setattr(packing, "terms_are_independent", lambda trainer: False)
    alone = trained(tmp_path)
    assert sum(together.computed) < sum(alone.computed)
    widths = together.computed[-4:], alone.computed[-4:]  # of the last update
    assert max(widths[0]) < max(widths[1])


def test_rloo(tmp_path):
    ends = [trained(tmp_path, UnevenRLOOTrainer, beta=0.1, pack_sequences=packs) for packs in (True, False)]
    assert apart(*ends) < 1e-4
    assert sum(ends[0].computed) < 0.7 * sum(ends[1].computed)


def test_without_a_rollout_precision_it_is_trl(tmp_path):
    ends = [
        trained(tmp_path, rollout_precision=None, is_correction="none", pack_sequences=packs)
        for packs in (None, False, True)
    ]
    assert ends[0].computed == ends[1].computed and apart(*ends[:2]) == 0
    assert ends[2].computed != ends[1].computed and 0 < apart(*ends[1:]) < 1e-4


# Runs that cannot


def dropping(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


CANNOT = {
    "gemma2": (lambda: tiny_model("gemma2"), "attn_logit_softcapping"),
    "dropout": (lambda: tiny_model(attention_dropout=0.1), "attention_dropout"),
    "dropout of modules": (lambda: dropping(tiny_model()), "attention_dropout"),
    "eager": (lambda: tiny_model(attn_implementation="eager"), "attn_implementation"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_a_run_that_cannot_says_so(tmp_path, caplog, case):
    build, name = CANNOT[case]
    with pytest.raises(ValueError, match=f"`pack_sequences`=True cannot act: .*{name}"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, pack_sequences=True), model=build())
    ends = []
    for packs in (None, False):
        args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", pack_sequences=packs, max_steps=1)
        torch.manual_seed(0)
        trainer = make(QuantGRPOTrainer, args, model=build())
        trainer.train()
        ends.append(parameters(trainer))
        assert ("computes padding too" in caplog.text) == (packs is None)
        caplog.clear()
    assert all(torch.equal(values, ends[1][name]) for name, values in ends[0].items())


def test_noise_that_depends_on_the_length_of_a_row_is_not_packed(tmp_path, caplog):
    """NEFTune divides its noise by the root of the row's length, and a packed row has the length of several."""
    args = config(QuantGRPOConfig, tmp_path, pack_sequences=True, neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match=r"`pack_sequences`=True cannot act: `neftune_noise_alpha`=5.0"):
        make(QuantGRPOTrainer, args)
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", neftune_noise_alpha=5.0)
    assert not make(QuantGRPOTrainer, args).packs and "computes padding too" in caplog.text
    for alpha in (0.0, None):
        args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", neftune_noise_alpha=alpha)
        assert make(QuantGRPOTrainer, args).packs


def test_it_is_refused_before_weights_are_read(tmp_path):
    tiny_model("gemma2").config.save_pretrained(tmp_path / "model")  # no weights
    with pytest.raises(ValueError, match=r"`pack_sequences`=True cannot act: .*attn_logit_softcapping"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, pack_sequences=True), model=str(tmp_path / "model"))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("prompts", [1, 3, 8, 10**6])
def test_balanced_batches(seed, prompts):
    generator = random.Random(seed)
    parts, size = generator.choice([2, 4, 8]), generator.choice([2, 4, 16])
    names = [generator.randrange(prompts) for _ in range(parts * size)]
    lengths = {name: generator.randrange(1, 300) for name in names}
    own = [1 + int(generator.lognormvariate(6, 0.8)) for _ in names]
    batches = balanced(names, [lengths[name] for name in names], own, parts)
    assert sorted(row for rows in batches for row in rows) == list(range(len(names)))
    assert {len(rows) for rows in batches} == {size}

    def computed(rows) -> int:
        return sum(own[row] for row in rows) + sum(lengths[name] for name in {names[row] for row in rows})

    tokens = [computed(rows) for rows in batches]
    as_given = [computed(range(first, first + size)) for first in range(0, len(names), size)]
    assert tokens[0] == max(tokens) and sum(tokens) <= sum(as_given)
    if prompts in (1, 10**6):  # nothing is gained by keeping rows together
        assert max(tokens) <= max(as_given)


# Mistakes


MISTAKES = {
    # a shift of all positions would change nothing, since rotary embeddings are relative
    "positions": lambda packed: {"positions": packed.positions // 2},
    "borders": lambda packed: {
        "starts": packed.starts[[0, -1]],
        "key_starts": packed.starts[[0, -1]],
        "longest": len(packed.positions),
        "longest_keys": len(packed.positions),
        "key_rows": None,
    },
    "one token": lambda packed: {"starts": shifted(packed.starts), "key_starts": shifted(packed.key_starts)},
    "another prompt": lambda packed: {"key_rows": packed.key_rows.roll(1)},
    "no prompt": lambda packed: {
        "key_rows": None,
        "key_starts": packed.starts,
        "longest_keys": packed.longest,
    },
}


def shifted(starts):
    return torch.cat([starts[:1], starts[1:-1] + 1, starts[-1:]])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_in_the_gradient(monkeypatch, mistake):
    model, given = model_of("qwen3"), batch()
    padded = gradients(model, model, given)
    accept_packed_rows(model)
    pack = Packed.sharing

    def mistaken(*args):
        packed = pack(*args)
        return dataclasses.replace(packed, **MISTAKES[mistake](packed))

    monkeypatch.setattr(Packed, "sharing", mistaken)
    packed = gradients(model, PackedRows(model, PROMPT, shares=True), given)
    assert max((packed[2][n] - grad).norm() / grad.norm() for n, grad in padded[2].items()) > 0.01
