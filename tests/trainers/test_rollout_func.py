"""Samples that are not the engine's: what a `rollout_func` or a subclass must return, and when a warning says so."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tiny import VOCAB_SIZE
from training import config, make
from turns import answer

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantRLOOTrainer


def without(name: str):
    return lambda prompts: {key: rows for key, rows in answer(prompts).items() if key != name}


BAD_ROLLOUTS = [  # what a `rollout_func` returns for its prompts, and what is said of it
    (lambda prompts: answer(prompts, logprobs=None), "`rollout_func` returned 'logprobs'=None"),
    (without("logprobs"), r"without \['logprobs'\]"),
    (without("prompt_ids"), r"without \['prompt_ids'\]"),
    (lambda prompts: [answer(prompts)], "returned a list. It must return a dict"),
    (lambda prompts: None, "returned a NoneType"),
    (lambda prompts: answer(prompts[1:]), "returned 3 entries in 'prompt_ids' for 4 prompts"),
    (lambda prompts: answer(prompts) | {"logprobs": [[-1.0, -1.0]]}, "returned 1 entries in 'logprobs' for 4 prompts"),
    (lambda prompts: answer(prompts, logprobs=[-1.0]), r"row 0 of 'logprobs' has the shape \(1,\)"),
    (lambda prompts: answer(prompts, logprobs=[[-1.0], [-1.0]]), r"row 0 of 'logprobs' has the shape \(2, 1\)"),
    (lambda prompts: answer(prompts, logprobs=[-1.0, None]), "row 0 of 'logprobs' does not hold numbers"),
    (lambda prompts: answer(prompts, logprobs=[-1.0, float("nan")]), "row 0 of 'logprobs' holds NaN"),
    (lambda prompts: answer(prompts, env_mask=[1, 0, 1]), r"row 0 of 'env_mask' has the shape \(3,\)"),
    (lambda prompts: answer(prompts) | {"completion_ids": 3}, "returned a int in 'completion_ids'"),
    (lambda prompts: answer(prompts) | {"completion_ids": None}, "returned a NoneType in 'completion_ids'"),
    (lambda prompts: answer(prompts, completion_ids=[], logprobs=[]), "row 0 of 'completion_ids' is empty"),
    (lambda prompts: answer(prompts, completion_ids=65, logprobs=[-1.0]), r"'completion_ids' has the shape \(\)"),
    (lambda prompts: answer(prompts, completion_ids=[[65], [257]]), r"'completion_ids' has the shape \(2, 1\)"),
    (lambda prompts: answer(prompts, completion_ids=["A", "B"]), "row 0 of 'completion_ids' does not hold integers"),
    (lambda prompts: answer(prompts, completion_ids=[65, None]), "row 0 of 'completion_ids' does not hold integers"),
    (lambda prompts: answer(prompts, completion_ids=[65.0, 257.0]), r"row 0 of 'completion_ids' holds 65\.0\. It must"),
    (lambda prompts: answer(prompts, completion_ids=[True, True]), "row 0 of 'completion_ids' holds True"),
    (lambda prompts: answer(prompts, completion_ids=[65, VOCAB_SIZE]), f"holds {VOCAB_SIZE}, which is not a token"),
    (lambda prompts: answer(prompts, completion_ids=[-1, 65]), f"holds -1, .* at least 0 and below {VOCAB_SIZE}"),
    (lambda prompts: answer(prompts, prompt_ids=[-1]), "row 0 of 'prompt_ids' holds -1, which is not a token"),
    (lambda prompts: answer(prompts, prompt_ids=[1.5]), r"row 0 of 'prompt_ids' holds 1\.5\. It must hold integers"),
    (lambda prompts: answer(prompts, logprobs=[-1.0, 3.0]), r"'logprobs' holds 3\. .* up to 0\.001 counts as rounding"),
    (lambda prompts: answer(prompts, logprobs=[-1.0, math.inf]), "row 0 of 'logprobs' holds inf"),
    (lambda prompts: answer(prompts, logprobs=[-1.0, -math.inf]), "row 0 of 'logprobs' holds -inf"),
    (lambda prompts: answer(prompts, logprobs=[-math.inf, -1.0], env_mask=[1, 0]), "row 0 of 'logprobs' holds -inf"),
    (lambda prompts: answer(prompts, logprobs=[0.0011, 0.0]), r"row 0 of 'logprobs' holds 0\.0011"),
    (lambda prompts: answer(prompts, env_mask=[1, 2]), "row 0 of 'env_mask' holds 2. It must hold 1 for each token"),
    (lambda prompts: answer(prompts, env_mask=[0.5, 1]), "row 0 of 'env_mask' holds 0.5"),
    (lambda prompts: answer(prompts, env_mask=[1, -1]), "row 0 of 'env_mask' holds -1"),
    (
        lambda prompts: answer(prompts) | {"env_mask": [[1, 1], [1, 1], [1, 3], [1, 1]]},
        "row 2 of 'env_mask' holds 3",
    ),
]


@pytest.mark.parametrize(("returned", "says"), BAD_ROLLOUTS, ids=[says for _, says in BAD_ROLLOUTS])
def test_a_rollout_func_that_returns_something_else_is_told(tmp_path, returned, says):
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", num_generations=4)
    trainer = make(QuantGRPOTrainer, args, rollout_func=lambda prompts, trainer: returned(prompts))
    with pytest.raises(ValueError, match=says):
        trainer._generate(["a"] * 4)


GOOD_ROLLOUTS = [
    {"completion_ids": [0, VOCAB_SIZE - 1], "logprobs": [0.0, 9e-4], "env_mask": [0, 1]},
    {"logprobs": [-1e30, -math.inf], "env_mask": [True, False]},
    {"completion_ids": np.array([65, 257]), "logprobs": np.array([-1.0, -2.0]), "env_mask": np.array([1, 0])},
    {"completion_ids": np.array([65, 257], dtype=np.uint32), "env_mask": np.array([True, False])},
    {"completion_ids": torch.tensor([65, 257]), "logprobs": torch.tensor([-1.0, -2.0]), "env_mask": torch.ones(2)},
    {"completion_ids": [np.int32(65), np.int64(257)], "logprobs": [np.float32(-1.0), -1]},
    {"env_mask": [0, 0]},
]


@pytest.mark.parametrize("returned", GOOD_ROLLOUTS, ids=str)
def test_what_a_rollout_func_may_return(tmp_path, returned):
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", num_generations=4)
    trainer = make(QuantGRPOTrainer, args, rollout_func=lambda prompts, trainer: answer(prompts, **returned))
    completions = trainer._generate(["a"] * 4)[1]
    assert [list(map(int, ids)) for ids in completions] == [list(returned.get("completion_ids", [65, 257]))] * 4


def test_a_rollout_func_that_samples_by_itself_is_told_once(tmp_path, caplog):
    """As a warning: also a function that asks the engine now and then is right."""

    def own(prompts, trainer):
        return answer(prompts, env_mask=[1, 0])

    def asks(prompts, trainer):
        ids, completions, logps, _ = trainer.vllm_generation.generate([[1, 2]] * len(prompts), None, 1)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[x for (x,) in row] for row in logps]}

    for rollout, told in ((asks, 0), (own, 1)):
        args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", max_steps=2)
        trainer = make(QuantGRPOTrainer, args, rollout_func=rollout)
        caplog.clear()
        trainer.train()
        assert caplog.text.count("A generation was not sampled from the rollout engine") == told


def test_without_an_engine_a_rollout_func_may_leave_logprobs_out(tmp_path, caplog):
    trainer = make(
        QuantGRPOTrainer,
        config(QuantGRPOConfig, tmp_path),
        rollout_func=lambda prompts, trainer: answer(prompts, logprobs=None),
    )
    assert trainer._generate(["a"] * 2)[1] == [[65, 257]] * 2
    assert "not sampled" not in caplog.text


@pytest.mark.parametrize("trainer_class", [QuantGRPOTrainer, QuantRLOOTrainer])
def test_a_subclass_that_samples_without_logprobs_is_refused(tmp_path, trainer_class):
    class Own(trainer_class):
        def _generate_single_turn(self, prompt_ids, *others):
            ids = [[65, 257]] * len(prompt_ids)
            return (ids, None) if trainer_class is QuantGRPOTrainer else ids

    for settings in ({}, {"is_correction": "none"}):
        trainer = make(Own, config(Own.config_class, tmp_path, rollout_precision="int8", beta=0.0, **settings))
        with pytest.raises(ValueError, match="Own sampled without the log-probabilities"):
            trainer.train()
    trainer = make(Own, config(Own.config_class, tmp_path, beta=0.0, max_steps=1))
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("asks", [False, True])
def test_a_subclass_that_samples_by_itself_is_told_once(tmp_path, caplog, asks):
    class Own(QuantGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *others):
            if asks:
                return super()._generate_single_turn(prompt_ids, *others)
            return [[65, 257]] * len(prompt_ids), [[-1.0, -1.0]] * len(prompt_ids)

    trainer = make(Own, config(QuantGRPOConfig, tmp_path, rollout_precision="int8", max_steps=3))
    trainer.train()
    assert caplog.text.count("A generation was not sampled from the rollout engine") == (not asks)
    assert trainer.state.global_step == 3
    # A pool has sampled before TRL asks
    for field in ({"rollouts_in_flight": 2.0}, {"dynamic_sampling_rounds": 1}):
        trainer = make(Own, config(QuantGRPOConfig, tmp_path, rollout_precision="int8", max_steps=1, **field))
        with (
            nullcontext() if asks else pytest.raises(ValueError, match="other completions than the engine had sampled")
        ):
            trainer.train()
        assert trainer.state.global_step == asks
