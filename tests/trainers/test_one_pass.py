"""
No scoring pass where nothing needs it, and the same run: the loss's own forward yields the old log-probabilities, or
the sampler has their bits.
"""

from itertools import cycle

import pytest
import torch
from long_tests import rest_is_long
from reference import DROPPING
from tiny import save_tiny, tiny_model
from training import config, dataset, lora, make, metrics, parameters
from trl.trainer.utils import pad

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.corrections import CORRECTIONS


LOCAL = [name for name, correction in CORRECTIONS.items() if not getattr(correction, "whole_batch", False)]


class SameBits(QuantGRPOTrainer):
    """Its sampler has the log-probabilities of the trainer's own pass, as an exact engine, plus `error`."""

    error = 0.0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        prompts, answers = ([torch.tensor(ids) for ids in rows] for rows in (prompt_ids, completions))
        sides = (prompts, "left"), (answers, "right")
        ids, mask = (
            torch.cat([pad(function(rows), padding_side=side) for rows, side in sides], 1)
            for function in (list, lambda rows: [torch.ones_like(row) for row in rows])
        )
        longest, size = max(map(len, answers)), self.args.per_device_train_batch_size
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, mask, longest, batch_size=size)
        return completions, [(row[: len(answer)] + self.error).tolist() for row, answer in zip(logps, answers)]


def trained(path, two_passes=False, peft=False, model=None, kind=QuantGRPOTrainer, same_bits=False, **settings):
    """A run, and the number of passes without gradients in its training, one for each generation at most."""
    settings = {"rollout_precision": "int4", "max_steps": 2, "is_correction": "tis"} | settings
    settings |= DROPPING.get(settings["is_correction"], {})
    trainer = make(
        kind,
        config(QuantGRPOConfig, path, **settings),
        model=model if model is not None else save_tiny(path / "model", seed=3),
        peft_config=lora() if peft else None,
        eval_dataset=dataset(2) if "eval_strategy" in settings else None,
    )
    trainer.one_pass = trainer.one_pass and not two_passes
    trainer.correction_step.same_bits = same_bits
    score, passes = trainer._get_per_token_logps_and_entropies, []

    def counted(*args, **kwargs):
        is_saved = trainer.correction_step.saves_pass()
        if trainer.model.training and not torch.is_grad_enabled() and not is_saved:
            passes.append(trainer.state.global_step)
        return score(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted
    trainer.train()
    return trainer, len(passes)


def assert_same_numbers(one, two):
    """Parameters bit for bit. Metrics are sums over the same tokens, in the order of another shuffle."""
    for left, right in zip(metrics(one), metrics(two), strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert value == pytest.approx(right[name], rel=1e-4, abs=1e-6), name
    mine, theirs = parameters(one), parameters(two)
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


OPTIONS = {
    "lora": {"peft": True},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "several_generations_a_step": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
    },
    "iterations_within_a_step": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
        "num_iterations": 2,
    },
    "sequences": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "reference": {"beta": 0.1, "use_bias_correction_kl": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
    "off_policy_mask": {"off_policy_mask_threshold": 0.01},
    "vespo": {"loss_type": "vespo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "mixed_precision": {"bf16": True, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("correction", rest_is_long(LOCAL, "coupled", "acr", "geometric"))
def test_every_correction_trains_as_with_two_passes(tmp_path, correction):
    one, none = trained(tmp_path / "one", is_correction=correction)
    two, passes = trained(tmp_path / "two", two_passes=True, is_correction=correction)
    assert (none, passes) == (0, 2)
    assert_same_numbers(one, two)
    assert metrics(one)[0]["mismatch/kl_k3"] > 1e-4
    assert {"sampling/sampling_logp_difference/max", "mismatch/entropy", "entropy"} <= metrics(one)[0].keys()


@pytest.mark.parametrize("option", rest_is_long(OPTIONS, "several_generations_a_step", "off_policy_mask", "sequences"))
def test_every_option_trains_as_with_two_passes(tmp_path, option):
    settings = OPTIONS[option]
    one, passes = trained(tmp_path / "one", **settings)
    two, more = trained(tmp_path / "two", two_passes=True, **settings)
    generations = 4 if option == "several_generations_a_step" else 2
    reference = generations if option == "reference" else 0
    assert (passes, more) == (reference, reference + generations)
    assert_same_numbers(one, two)


@pytest.mark.parametrize("correction", rest_is_long(["coupled", "dppo"]))
def test_a_resumed_run_is_the_unbroken_one(tmp_path, correction):
    settings = {"is_correction": correction, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    settings |= DROPPING.get(correction, {})
    whole, _ = trained(tmp_path / "whole", **settings)
    args = config(QuantGRPOConfig, tmp_path / "whole", rollout_precision="int4", **settings)
    resumed = make(QuantGRPOTrainer, args, model=str(tmp_path / "whole" / "model"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert metrics(resumed)[:4] == metrics(whole)[:4]  # the last entry averages over the steps of one process
    mine, theirs = parameters(resumed), parameters(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_weights_act(tmp_path):
    """The runs above would agree, too, if no weight reached the loss."""
    runs = {
        name: trained(tmp_path / name, is_correction=name, max_steps=1)[0] for name in ("none", "decoupled", "coupled")
    }
    ends = {name: torch.cat([p.flatten() for p in parameters(run).values()]) for name, run in runs.items()}
    assert not torch.equal(ends["none"], ends["decoupled"]) and not torch.equal(ends["none"], ends["coupled"])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 2, "max_steps": 4},
        {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4},
        {"is_correction": "ais"},
        {"is_correction": "trl"},
    ],
    ids=["iterations", "steps_per_generation", "ais", "trl"],
)
def test_the_pass_stays_where_something_needs_it(tmp_path, settings):
    trainer, passes = trained(tmp_path, **settings)
    assert passes == 2 and not trainer.one_pass


SEVERAL_UPDATES = {
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "steps": {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4},
    "steps_of_two_micro_batches": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "max_steps": 4,
    },
}
EVERY_UPDATE = [name for name, correction in CORRECTIONS.items() if correction.every_update]


@pytest.mark.parametrize(
    ("updates", "correction"), zip(cycle(["iterations", "steps_of_two_micro_batches"]), EVERY_UPDATE)
)
def test_corrections_of_every_update_need_no_pass(tmp_path, monkeypatch, correction, updates):
    """Trained as with TRL's pass, whose result no loss reads."""
    settings = SEVERAL_UPDATES[updates] | {"is_correction": correction, "beta": 0.1}
    one, passes = trained(tmp_path / "one", **settings)
    monkeypatch.delattr(QuantGRPOTrainer, "_generate")  # the correction is then told nothing of the samples
    two, more = trained(tmp_path / "two", **settings)
    assert (passes, more) == (2, 4)  # of the reference, and of the policy too
    assert_same_numbers(one, two)


@pytest.mark.parametrize(
    ("updates", "correction"),
    rest_is_long(
        [(updates, "tis") for updates in SEVERAL_UPDATES]
        + [("steps_of_two_micro_batches", name) for name in ("coupled", "acr", "ais", "icepop")],
        *(("iterations", "tis"), ("steps_of_two_micro_batches", "tis"), ("steps_of_two_micro_batches", "acr")),
    ),
)
def test_a_sampler_with_the_trainers_bits_needs_no_pass(tmp_path, correction, updates):
    """The same parameters to the bit. With each loss's own log-probabilities for the old ones they would differ."""
    settings = SEVERAL_UPDATES[updates] | {"is_correction": correction, "beta": 0.1, "kind": SameBits}
    one, passes = trained(tmp_path / "one", same_bits=True, **settings)
    two, more = trained(tmp_path / "two", **settings)
    sampled = 2  # each generation is scored once by its sampler
    assert (passes - sampled, more - sampled) == (2, 4)
    mine, theirs = parameters(one), parameters(two)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_its_mismatch_is_measured_in_the_first_update(tmp_path):
    """A sampler that only claims to have the trainer's bits is found out."""
    settings = SEVERAL_UPDATES["steps_of_two_micro_batches"] | {"kind": SameBits, "same_bits": True}
    found = []
    for error in (0.0, 0.25):
        kind = type("Sampler", (SameBits,), {"error": error})
        trainer, _ = trained(tmp_path / str(error), **settings | {"kind": kind})
        first, second, third, fourth = metrics(trainer)[:4]
        names = ("mismatch/kl_k1", "sampling/sampling_logp_difference/mean")
        assert all(name in first and name in third for name in names)
        assert not any(name in log for log in (second, fourth) for name in names)  # of the generation's later update
        found += [[log[name] for log in (first, third)] for name in names]
    exact_kl, exact_difference, kl, difference = found
    assert max(map(abs, exact_kl + exact_difference)) < 1e-5
    assert kl == pytest.approx([0.25, 0.25], abs=1e-4) and difference == pytest.approx([0.25, 0.25], abs=1e-4)


@pytest.mark.parametrize("rows", [4, 8])
def test_an_evaluation_measures_each_of_its_generations(tmp_path, rows):
    """Such a sampler's mismatch is told whether one batch is evaluated, which is one generation, or two."""
    kind = type("Sampler", (SameBits,), {"error": 0.25})
    settings = SEVERAL_UPDATES["steps_of_two_micro_batches"] | {"per_device_eval_batch_size": rows}
    trainer, _ = trained(tmp_path, kind=kind, same_bits=True, **settings)
    for batches in (1, 2):
        logs = trainer.evaluate(trainer.train_dataset.select(range(batches * rows // trainer.num_generations_eval)))
        assert logs["eval_mismatch/kl_k1"] == pytest.approx(0.25, abs=1e-4)
        assert trainer.correction_step.awaited["eval"] == 0 and not trainer.correction_step.seen["eval"]


def test_a_sampler_that_scores_all_tokens_but_one_needs_the_pass(tmp_path):
    trainer, _ = trained(tmp_path, kind=SameBits, same_bits=True, **SEVERAL_UPDATES["iterations"])
    step = trainer.correction_step
    step.take_samples([[-1.0, -2.0], [-3.0]])
    assert step.saves_pass()
    assert step.take_old_logps().tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert not step.saves_pass()  # the next pass of TRL is the reference's
    step.take_samples([[-1.0, None], [-3.0]])
    assert not step.saves_pass()


def test_dropout_leaves_the_ratio_at_one(tmp_path):
    """Two forwards draw two masks, whose noise is in their ratio; with one pass it is 1 and nothing clips."""

    def dropping():
        model = tiny_model(seed=3)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        return model

    tight = {"epsilon": 1e-4, "loss_type": "grpo"}
    one, _ = trained(tmp_path / "one", model=dropping(), **tight)
    two, _ = trained(tmp_path / "two", two_passes=True, model=dropping(), **tight)
    assert all(entry["clip_ratio/region_mean"] == 0 for entry in metrics(one)[:2])
    assert any(entry["clip_ratio/region_mean"] > 0.1 for entry in metrics(two)[:2])


def test_unscored_tokens_weigh_one(tmp_path):
    """As with two passes, in each of the places where a correction reads them."""
    runs = []
    for two_passes in (False, True):
        settings = {"is_correction": "coupled", "rollout_precision": "int4", "max_steps": 2}
        args = config(QuantGRPOConfig, tmp_path / str(two_passes), **settings)
        trainer = make(QuantGRPOTrainer, args, model=save_tiny(tmp_path / "model", seed=3))
        trainer.one_pass = not two_passes
        generate = trainer.vllm_generation.generate

        def holes(*args, generate=generate, **kwargs):
            prompts, completions, logprobs, tokens = generate(*args, **kwargs)
            logprobs[0][1], logprobs[1][0] = [None], [float("-inf")]
            return prompts, completions, logprobs, tokens

        trainer.vllm_generation.generate = holes
        trainer.train()
        runs.append(trainer)
    assert_same_numbers(*runs)
    assert metrics(runs[0])[0]["mismatch/unscored_fraction"] > 0
