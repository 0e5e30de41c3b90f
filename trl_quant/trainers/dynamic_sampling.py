r"""Dynamic sampling (DAPO, section 3.2, eq. 11): replaces groups that teach nothing before the batch is trained on.

    max_theta J(theta)   s.t.   0 < |{ o_i : is_equivalent(a, o_i) }| < G                                   eq. 11

A group is the G completions of one prompt. If all of them are right, or all are wrong, every advantage is 0 and the
batch is smaller than it looks. Further rounds replace such groups by groups of fresh prompts. Each round samples as
many groups as are missing, and there are at most `dynamic_sampling_rounds` rounds.

| paper | here |
|---|---|
| `G` | `num_generations` |
| `0 < \|{...}\| < G`, for rewards of 0 and 1 | [`informative`]: the rewards of the group differ |
| the dynamic sampling buffer | the generation batch, whose groups are replaced in place |

**Choice** The paper samples until the batch is full. Here the number of rounds is limited, and a group without a
replacement stays, with the advantages of 0 that TRL gives it. **Choice** A group is informative if its rewards differ
as TRL sums them: with a reward for overlong completions, wrong answers of different lengths teach something and stay.

Fresh prompts depend only on the seed, the step and the prompts of the batch, so a resumed run draws the same ones as an
unbroken run. The order of the epoch does not change: a drawn prompt comes again when its turn comes.
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
    Finds the groups whose rewards differ by more than float32 rounding.

    Args:
        rewards (`torch.Tensor` of shape `(groups * num_generations, reward functions)`): NaN where a function has none.
        weights (`torch.Tensor` of shape `(reward functions,)`): Of the sum that a completion's reward is.
        num_generations (`int`): Completions of a group.
        apart (`bool`): Whether TRL normalises the rewards of each function before the sum
            (`multi_objective_aggregation="normalize_then_sum"`). Then it is enough that those of one function differ.

    Returns:
        `torch.Tensor` of shape `(groups,)`: Booleans. Completions without any reward are left out.
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
    Assigns the informative groups of a further round, in order, to the free places of the batch: place -> group.

    Args:
        kept (`torch.Tensor` of shape `(groups,)`): Which groups of the batch stay.
        fresh (`torch.Tensor` of shape `(sampled groups,)`): Which groups of the round are informative.
    """
    return dict(zip((~kept).nonzero().flatten().tolist(), fresh.nonzero().flatten().tolist(), strict=False))


def groups_to_sample(missing: int, num_generations: int, ranks: int) -> int:
    """The smallest number of groups, at least `missing`, whose completions can be divided equally among the ranks."""
    step = ranks // math.gcd(ranks, num_generations)
    return math.ceil(missing / step) * step


def fresh_rows(dataset, used: Iterable, key: str) -> Iterator[dict[str, Any]]:
    """
    Rows of `dataset` in a random order that depends on `key` alone, each prompt once and without those in `used`. The
    global random state stays unchanged.
    """
    seen = set(map(str, used))  # as text, since conversations cannot be hashed
    digest = hashlib.sha256(key.encode()).digest()  # Python's `hash` differs between processes
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    for index in torch.randperm(len(dataset), generator=generator).tolist():
        row = dataset[index]
        prompt = str(row["prompt"])
        if prompt not in seen:
            seen.add(prompt)
            yield row


class Sample(NamedTuple):
    """A completion as it was sampled, with the extra columns that reward functions logged for it."""

    prompt_length: int
    completion_ids: list[int]
    logps: list[float] | None
    extra: dict[str, Any]


class Batch:
    """
    One generation batch, from its first round on. Groups are laid out over the ranks one after the other and may begin
    on one rank and end on the next, so a replacement travels to the rank that has its place.

    Attributes:
        inputs (`list[dict]`), samples (`list[Sample]`): One for each completion of this rank.
        rewards (`torch.Tensor` of shape `(completions, reward functions)`): Of all ranks, as TRL gathers them.
        useful (`torch.Tensor` of shape `(groups,)`): Which groups are informative, of all ranks.
        thrown (`list[Sample]`): Samples of this rank that are not trained on.
        metrics (`dict[str, float]`): To be logged.
    """

    def __init__(self, trainer, inputs: list[dict]):
        self.trainer, self.inputs = trainer, list(inputs)
        self.num_generations = trainer.num_generations
        self.rank, self.ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
        self.thrown: list[Sample] = []
        self.samples, self.rewards, self.useful = self.sampled(self.inputs)
        self.metrics = {"dynamic_sampling/uninformative_fraction": (~self.useful).float().mean().item()}

    def sampled(self, inputs: list[dict]) -> tuple[list[Sample], Tensor, Tensor]:
        """Samples a completion for each row of this rank; also returns all rewards and which groups are informative."""
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
        """Runs further rounds until every group is informative, no prompt is left, or `rounds` rounds are over."""
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
        """Fresh rows for this batch. Its own prompts, which differ between the generations of a step, make the key."""
        prompts = gather_object([row["prompt"] for row in self.inputs])[:: self.num_generations]
        key = f"{self.trainer.args.seed}/{self.trainer.state.global_step}/{prompts}"
        for row in fresh_rows(self.trainer.train_dataset, prompts, key):
            yield {name: row[name] for name in self.inputs[0]}  # the columns of the batch's rows

    def round(self, rows: list[dict]) -> None:
        """Samples a group for each prompt and puts the informative ones into the free places."""
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
                i = here - self.rank * len(self.inputs)
                if i in range(len(self.inputs)):
                    self.thrown.append(self.samples[i])
                    self.inputs[i], self.samples[i] = dict(rows[group]), found[there]
            self.useful[place] = True

    def wasted(self) -> tuple[int, int]:
        """Tokens of the prompts and of the completions that are not trained on, on all ranks."""
        lengths = [[sample.prompt_length, len(sample.completion_ids)] for sample in self.thrown]
        device = self.trainer.accelerator.device
        total = torch.tensor(lengths, dtype=torch.long, device=device).view(-1, 2).sum(0)
        return tuple(self.trainer.accelerator.gather(total).view(-1, 2).sum(0).tolist())


@contextmanager
def dynamically_sampled(trainer, inputs: list[dict]) -> Iterator[list[dict]]:
    """
    Context of TRL's `_generate_and_score_completions`, which must be given the rows that this yields: it finds their
    completions and rewards without sampling. So TRL pads, scores and logs the final batch alone, and `num_tokens`
    counts all that was sampled. Metrics that reward functions log come from every round, since each call logs its own.
    Without `dynamic_sampling_rounds`, and in an evaluation, the context does nothing.
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
