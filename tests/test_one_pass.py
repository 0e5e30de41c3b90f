"""No scoring pass where nothing needs it: the loss's own forward yields the old log-probabilities, and the same run."""

import pytest
import torch
from reference import DROPPING
from tiny import save_tiny, tiny_model
from training import config, dataset, lora, make, metrics, parameters

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.corrections import CORRECTIONS


LOCAL = [name for name, correction in CORRECTIONS.items() if not getattr(correction, "whole_batch", False)]
WEIGHTING = [name for name in LOCAL if name not in DROPPING]


def trained(path, two_passes=False, peft=False, model=None, **settings):
    """A run, and the number of passes without gradients in its training, one for each generation at most."""
    settings = {"rollout_precision": "int4", "max_steps": 3, "is_correction": "tis"} | settings
    settings |= DROPPING.get(settings["is_correction"], {})
    trainer = make(
        QuantGRPOTrainer,
        config(QuantGRPOConfig, path, **settings),
        model=model if model is not None else save_tiny(path / "model", seed=3),
        peft_config=lora() if peft else None,
        eval_dataset=dataset(2) if "eval_strategy" in settings else None,
    )
    trainer.one_pass = trainer.one_pass and not two_passes
    score, passes = trainer._get_per_token_logps_and_entropies, []

    def counted(*args, **kwargs):
        if trainer.model.training and not torch.is_grad_enabled():
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
    "plain": {},
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


@pytest.mark.parametrize(
    ("correction", "peft"), [(name, False) for name in LOCAL] + [(name, True) for name in WEIGHTING]
)
def test_every_correction_trains_as_with_two_passes(tmp_path, correction, peft):
    one, none = trained(tmp_path / "one", is_correction=correction, peft=peft)
    two, three = trained(tmp_path / "two", two_passes=True, is_correction=correction, peft=peft)
    assert (none, three) == (0, 3)
    assert_same_numbers(one, two)
    assert metrics(one)[0]["mismatch/kl_k3"] > 1e-4
    assert {"sampling/sampling_logp_difference/max", "mismatch/entropy", "entropy"} <= metrics(one)[0].keys()


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_as_with_two_passes(tmp_path, option):
    settings = OPTIONS[option]
    one, passes = trained(tmp_path / "one", **settings)
    two, more = trained(tmp_path / "two", two_passes=True, **settings)
    generations = 6 if option == "several_generations_a_step" else 3
    reference = generations if option == "reference" else 0
    assert (passes, more) == (reference, reference + generations)
    assert_same_numbers(one, two)


@pytest.mark.parametrize("correction", [*WEIGHTING, "dppo"])
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
    runs = {name: trained(tmp_path / name, is_correction=name)[0] for name in ("none", "decoupled", "coupled")}
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
    generations = 2 if settings.get("max_steps") == 4 else 3
    assert passes == generations and not trainer.one_pass


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
    assert all(entry["clip_ratio/region_mean"] == 0 for entry in metrics(one)[:3])
    assert any(entry["clip_ratio/region_mean"] > 0.1 for entry in metrics(two)[:3])


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
