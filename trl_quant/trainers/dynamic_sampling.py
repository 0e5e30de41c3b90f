r"""Dynamic sampling (DAPO, section 3.2, eq. 11): groups that teach nothing are replaced before the batch is trained on.

    max_theta J(theta)   s.t.   0 < |{ o_i : is_equivalent(a, o_i) }| < G                                   eq. 11

A group is the G completions of one prompt. Where all of them are right, or all wrong, every advantage is 0, and the
batch is smaller than it looks. Such groups give way to groups of fresh prompts, sampled in further rounds: each round
samples no more groups than are missing, and there are at most `dynamic_sampling_rounds` of them.

| paper | here |
|---|---|
| `G` | `num_generations` |
| `0 < \|{...}\| < G`, for rewards of 0 and 1 | [`informative`]: the rewards of the group differ |
| the dynamic sampling buffer | the generation batch, whose groups are replaced in place |

**Choice** The paper samples until the batch is full. Here the budget ends it, and a group that is still without a
replacement stays, with the advantages of 0 that TRL gives it. **Choice** What must differ is the reward as TRL sums it:
with a reward for overlong completions, a group of wrong answers of different lengths teaches something, and stays.

Fresh prompts depend on the seed, the step and the prompts of the batch alone, so a resumed run draws what the unbroken
one drew. The order of the epoch stays as it is: a drawn prompt also comes when its turn comes.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..trl_seams import exchanged


def informative(rewards: Tensor, weights: Tensor, num_generations: int, apart: bool = False) -> Tensor:
    """
    Which groups have rewards that differ, by more than float32 rounds.

    Args:
        rewards (`torch.Tensor` of shape `(groups * num_generations, reward functions)`): NaN where a function has none.
        weights (`torch.Tensor` of shape `(reward functions,)`): Of the sum that a completion's reward is.
        num_generations (`int`): Completions of a group.
        apart (`bool`): Whether each function's rewards are normalised before the sum (TRL's
            `multi_objective_aggregation="normalize_then_sum"`): one that differs is then enough.

    Returns:
        `torch.Tensor` of shape `(groups,)`: Booleans. A completion without any reward counts for nothing.
    """
    weighted = rewards * weights
    if not apart:
        unscored = rewards.isnan().all(1, keepdim=True)
        weighted = weighted.nansum(1, keepdim=True).masked_fill(unscored, math.nan)
    groups = weighted.unflatten(0, (-1, num_generations))
    high, low = groups.nan_to_num(nan=-math.inf).amax(1), groups.nan_to_num(nan=math.inf).amin(1)
    return ((high > low) & ~torch.isclose(high, low, rtol=1e-6)).any(1)


def replacements(kept: Tensor, fresh: Tensor) -> dict[int, int]:
    """
    Which group of a further round takes which place of the batch: informative ones, in order, while there is place.

    Args:
        kept (`torch.Tensor` of shape `(groups,)`): Which groups of the batch stay.
        fresh (`torch.Tensor` of shape `(sampled groups,)`): Which groups of the round are informative.
    """
    return dict(zip((~kept).nonzero().flatten().tolist(), fresh.nonzero().flatten().tolist(), strict=False))


def groups_to_sample(missing: int, num_generations: int, ranks: int) -> int:
    """The fewest groups, at least `missing`, whose completions all ranks sample in equal numbers."""
    step = ranks // math.gcd(ranks, num_generations)
    return math.ceil(missing / step) * step


def fresh_rows(dataset, used: Iterable, key: str) -> Iterator[dict[str, Any]]:
    """
    Rows of `dataset` in a random order that depends on `key` alone, each prompt once and none of those `used`. Drawing
    them leaves the global random state unchanged.
    """
    seen = set(map(str, used))  # of a conversation, which cannot be hashed, its text
    digest = hashlib.sha256(key.encode()).digest()  # Python's `hash` differs between processes
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    for index in torch.randperm(len(dataset), generator=generator).tolist():
        row = dataset[index]
        if (prompt := str(row["prompt"])) not in seen:
            seen.add(prompt)
            yield row


class Sample(NamedTuple):
    """A completion as it was sampled, with what the reward functions logged of it."""

    prompt_length: int
    completion_ids: list[int]
    logps: list[float] | None
    extra: dict[str, Any]


class Batch:
    """
    One generation batch, from its first round on. Groups lie in a row over all ranks, and may begin on one rank and end
    on the next, so a replacement travels to wherever its place is.

    Attributes:
        inputs (`list[dict]`), samples (`list[Sample]`): Of this rank, a row for each completion.
        rewards (`torch.Tensor` of shape `(completions, reward functions)`): Of all ranks, as TRL gathers them.
        useful (`torch.Tensor` of shape `(groups,)`): Which groups are informative, of all ranks.
        thrown (`list[Sample]`): What this rank sampled in vain.
        metrics (`dict[str, float]`): What to log.
    """

    def __init__(self, trainer, inputs: list[dict]):
        self.trainer, self.inputs = trainer, list(inputs)
        self.num_generations = trainer.num_generations
        self.rank, self.ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
        self.thrown: list[Sample] = []
        self.samples, self.rewards, self.useful = self.sampled(self.inputs)
        self.metrics = {"dynamic_sampling/uninformative_fraction": (~self.useful).float().mean().item()}

    def sampled(self, inputs: list[dict]) -> tuple[list[Sample], Tensor, Tensor]:
        """Samples a completion for each row, on every rank; the rewards, and which groups are informative, of all."""
        trainer, prompts = self.trainer, [row["prompt"] for row in inputs]
        prompt_ids, completion_ids, _, completions, logps, *_ = trainer._generate(prompts)
        rewards = trainer._calculate_rewards(inputs, prompts, completions, completion_ids)
        columns = dict(trainer._pending_extra_logs)
        trainer._pending_extra_logs.clear()
        extra = [{name: values[i] for name, values in columns.items() if i < len(values)} for i in range(len(inputs))]
        logps = logps or [None] * len(inputs)
        samples = [Sample(len(ids), *rest) for ids, *rest in zip(prompt_ids, completion_ids, logps, extra, strict=True)]
        apart = trainer.multi_objective_aggregation == "normalize_then_sum"
        weights = trainer.reward_weights.to(rewards.device)
        return samples, rewards, informative(rewards, weights, self.num_generations, apart).cpu()

    def refill(self, rounds: int) -> None:
        """Further rounds, until every group is informative, no prompt is left or `rounds` of them are over."""
        uninformative, done, fresh = self.missing, 0, None
        while self.missing and done < rounds:
            fresh = fresh or self.fresh()
            rows = list(islice(fresh, groups_to_sample(self.missing, self.num_generations, self.ranks)))
            rows = rows[: len(rows) - len(rows) % groups_to_sample(1, self.num_generations, self.ranks)]
            if not rows:
                break
            self.round(rows)
            done += 1
        self.metrics |= {
            "dynamic_sampling/rounds": float(done),
            "dynamic_sampling/replaced_groups": float(uninformative - self.missing),
            "dynamic_sampling/remaining_fraction": (~self.useful).float().mean().item(),
        }

    @property
    def missing(self) -> int:
        return int((~self.useful).sum())

    def fresh(self) -> Iterator[dict[str, Any]]:
        """The batch's own prompts tell the generations of one step apart: nobody has to count them."""
        prompts = gather_object([row["prompt"] for row in self.inputs])[:: self.num_generations]
        key = f"{self.trainer.args.seed}/{self.trainer.state.global_step}/{prompts}"
        for row in fresh_rows(self.trainer.train_dataset, prompts, key):
            yield {name: row[name] for name in self.inputs[0]}  # the columns that the sampler's rows have

    def round(self, rows: list[dict]) -> None:
        """Samples a group of each prompt and puts those that are informative where one is missing."""
        size = len(rows) * self.num_generations // self.ranks  # completions of a rank
        indices = range(self.rank * size, (self.rank + 1) * size)
        samples, rewards, fresh = self.sampled([dict(rows[i // self.num_generations]) for i in indices])
        places = replacements(self.useful, fresh)
        taken = set(places.values())
        mine = dict(zip(indices, samples, strict=True))
        self.thrown += [sample for i, sample in mine.items() if i // self.num_generations not in taken]
        found = dict(gather_object([(i, s) for i, s in mine.items() if i // self.num_generations in taken]))
        for place, group in places.items():
            for k in range(self.num_generations):
                here, there = place * self.num_generations + k, group * self.num_generations + k
                self.rewards[here] = rewards[there]
                if (i := here - self.rank * len(self.inputs)) in range(len(self.inputs)):
                    self.thrown.append(self.samples[i])
                    self.inputs[i], self.samples[i] = dict(rows[group]), found[there]
            self.useful[place] = True

    def wasted(self) -> tuple[int, int]:
        """Tokens of prompts and of completions that were sampled in vain, on all ranks."""
        lengths = [[sample.prompt_length, len(sample.completion_ids)] for sample in self.thrown]
        device = self.trainer.accelerator.device
        total = torch.tensor(lengths, dtype=torch.long, device=device).view(-1, 2).sum(0)
        return tuple(self.trainer.accelerator.gather(total).view(-1, 2).sum(0).tolist())


@contextmanager
def dynamically_sampled(trainer, inputs: list[dict]) -> Iterator[list[dict]]:
    """
    Context in which TRL's `_generate_and_score_completions` finds the completions and rewards of the rows that it
    yields already there. TRL then pads, scores and logs them, and computes the advantages, of the final batch alone;
    `num_tokens` counts all that was sampled. What reward functions log as metrics is that of every round, since it
    belongs to a call. Without `dynamic_sampling_rounds`, and in an evaluation, nothing happens.
    """
    rounds = trainer.args.dynamic_sampling_rounds
    if not rounds or not trainer.model.training:
        yield inputs
        return
    state, seen = trainer.state, trainer.state.num_input_tokens_seen
    with exchanged(trainer, _metrics={"train": defaultdict(list)}):
        batch = Batch(trainer, inputs)
        batch.refill(rounds)
    prompt_tokens, completion_tokens = batch.wasted()
    state.num_input_tokens_seen = seen + prompt_tokens + completion_tokens  # TRL adds those of the final batch
    for name, value in (batch.metrics | {"dynamic_sampling/wasted_tokens": float(completion_tokens)}).items():
        trainer._metrics["train"][name].append(value)
    for name in sorted({name for sample in batch.samples for name in sample.extra}):
        trainer._pending_extra_logs[name] = [sample.extra.get(name) for sample in batch.samples]
    completion_ids, logps = [sample.completion_ids for sample in batch.samples], [s.logps for s in batch.samples]
    sampled = completion_ids, None if logps[0] is None else logps
    with exchanged(
        trainer,
        generation=nullcontext,  # nothing is sampled
        _generate_single_turn=lambda *args, **kwargs: sampled,
        _calculate_rewards=lambda *args, **kwargs: batch.rewards,
    ):
        yield batch.inputs
