"""Runs with dynamic sampling for the tests: all that is sampled, and what is trained on."""

from collections import Counter

import torch
from training import config, dataset, make, spread

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer


DULL = ("1+1=", "hello", "x", "count: one two")  # half of the prompts


def half(prompts, completions, **kwargs) -> list[float]:
    """A reward that differs within the groups of every other prompt."""
    return [0.5 if p.strip() in DULL else r for p, r in zip(prompts, spread(completions), strict=True)]


def trainer_of(
    path, reward=half, rounds=8, n=32, kind=QuantGRPOTrainer, model=None, reward_processing_classes=None, **overrides
):
    given = {"rollout_precision": "int4", "per_device_train_batch_size": 16, "max_steps": 3, "max_completion_length": 6}
    args = config(QuantGRPOConfig, path, **given | overrides)
    args.dynamic_sampling_rounds = rounds
    eval_dataset = dataset(2) if "eval_strategy" in overrides else None
    options = {"reward_funcs": reward, "reward_processing_classes": reward_processing_classes, "model": model}
    return make(kind, args, train_dataset=dataset(n), eval_dataset=eval_dataset, **options)


class Record:
    """Everything that a trainer samples, by generation, and what it then trains on."""

    def __init__(self, path, reward=half, **options):
        self.calls: list[list[tuple]] = []  # (prompt, completion ids, reward), a list for each call of the reward
        self.generations: list[dict] = []
        self.trainer = trainer_of(path, reward=self.recorded(reward), **options)
        self.score = self.trainer._generate_and_score_completions
        self.trainer._generate_and_score_completions = self.kept

    def recorded(self, reward):
        def recorded(prompts, completions, completion_ids, **kwargs):
            rewards = reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **kwargs)
            self.calls.append([*zip(prompts, map(tuple, completion_ids), rewards, strict=True)])
            return rewards

        return recorded

    def kept(self, inputs):
        self.calls = []
        output = self.score(inputs)
        decode, rows = self.trainer.processing_class.decode, []
        for i, advantage in enumerate(output["advantages"].tolist()):
            prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()]
            ids = output["completion_ids"][i][output["completion_mask"][i].bool()]
            logps = output["sampling_per_token_logps"][i].tolist() if "sampling_per_token_logps" in output else []
            rows.append((decode(prompt), tuple(ids.tolist()), advantage, logps[: len(ids)]))
        self.generations.append({"calls": self.calls, "trained": rows})
        return output


def check_generation(calls, trained, num_generations: int, once: bool = True) -> None:
    """
    What is trained on was sampled, a prompt a group; the first round's informative groups stayed where they were, and
    no other did where there was something better. `calls` and `trained` are those of all ranks, in their order. With
    `once`, no prompt is in a generation twice.
    """
    sampled = Counter((prompt, ids) for call in calls for prompt, ids, _ in call)
    rewards = {(prompt, ids): reward for call in calls for prompt, ids, reward in call}
    assert not Counter((prompt, ids) for prompt, ids, _, _ in trained) - sampled

    def groups(rows):
        return [rows[i : i + num_generations] for i in range(0, len(rows), num_generations)]

    first, final = groups(calls[0]), groups(trained)
    prompts = [{prompt for prompt, *_ in group} for group in final]
    assert all(len(names) == 1 for names in prompts) and (not once or len(set().union(*prompts)) == len(final))
    spare = sum(len({r for *_, r in group}) > 1 for call in calls[1:] for group in groups(call))
    for before, after in zip(first, final, strict=True):
        differ = len({reward for *_, reward in before}) > 1
        stayed = [row[:2] for row in before] == [row[:2] for row in after]
        assert stayed or not differ
        spare -= not stayed
        values = torch.tensor([rewards[prompt, ids] for prompt, ids, _, _ in after])
        expected = (values - values.mean()) / (values.std() + 1e-4)
        torch.testing.assert_close(torch.tensor([row[2] for row in after]), expected, atol=1e-5, rtol=1e-4)
    dull = sum(len({rewards[row[:2]] for row in group}) == 1 for group in final)
    assert not (spare and dull)


def tokens(rows) -> int:
    return sum(len(row[1]) for row in rows)
