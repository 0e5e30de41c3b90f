r"""Dynamic sampling (DAPO, section 3.2, eq. 11): replaces groups without a learning signal before training.

    max_theta J(theta)   s.t.   0 < |{ o_i : is_equivalent(a, o_i) }| < G                                   eq. 11

A group is the G completions of one prompt. If all of them are right, or all are wrong, every advantage is 0, so the
group adds nothing to the gradient. Further rounds replace such groups by groups of fresh prompts. Each round samples as
many groups as are missing, and there are at most `dynamic_sampling_rounds` rounds.

| paper | here |
|---|---|
| `G` | `num_generations` |
| `0 < \|{...}\| < G`, for rewards of 0 and 1 | [`informative`]: the rewards of the group differ |
| the dynamic sampling buffer | the generation batch, whose groups are replaced in place |

**Choice** The paper samples until the batch is full. Here the number of rounds is limited, and a group without a
replacement stays, with the advantages of 0 that TRL gives it. **Choice** A group is informative if the rewards that TRL
sums differ. For example, with a punishment of overlong completions, a group of wrong answers of different lengths is
informative.

Fresh prompts depend only on the seed, the step and the prompts of the batch, so a resumed run draws the same ones as an
unbroken run. The order of the epoch does not change: a prompt drawn here comes again at its own place in the epoch.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..noise.gaussian import keyed_generator
from ..trl_seams import exchanged


def informative(rewards: Tensor, weights: Tensor, num_generations: int, apart: bool = False) -> Tensor:
    """
    Finds the groups whose rewards differ by more than float32 rounding.

    Args:
        rewards (`torch.Tensor` of shape `(groups * num_generations, reward functions)`):
            Rewards of each function; NaN where a function does not apply.
        weights (`torch.Tensor` of shape `(reward functions,)`):
            Weights of the sum that is a completion's reward.
        num_generations (`int`): Number of completions in a group.
        apart (`bool`): Whether TRL normalises the rewards of each function before the sum
            (`multi_objective_aggregation="normalize_then_sum"`). A group is then informative if the rewards of one
            function differ.

    Returns:
        `torch.Tensor` of shape `(groups,)`: Booleans. Completions without any reward are left out.
    """
    weighted = rewards * weights
    if not apart:
        unscored = rewards.isnan().all(1, keepdim=True)
        weighted = weighted.nansum(1, keepdim=True).masked_fill(unscored, math.nan)
    groups = weighted.unflatten(0, (-1, num_generations))
    high = groups.nan_to_num(nan=-math.inf).amax(1)
    low = groups.nan_to_num(nan=math.inf).amin(1)
    return ((high > low) & ~torch.isclose(high, low, rtol=1e-6)).any(1)


def replacements(kept: Tensor, fresh: Tensor) -> dict[int, int]:
    """
    Assigns the informative groups of a further round, in order, to the uninformative groups of the batch.

    Args:
        kept (`torch.Tensor` of shape `(groups,)`): Which groups of the batch stay.
        fresh (`torch.Tensor` of shape `(sampled groups,)`): Which groups of the round are informative.

    Returns:
        `dict[int, int]`: place in the batch -> group of the round.
    """
    places = (~kept).nonzero().flatten().tolist()
    groups = fresh.nonzero().flatten().tolist()
    return dict(zip(places, groups, strict=False))


def groups_to_sample(missing: int, num_generations: int, ranks: int) -> int:
    """Returns the smallest number of groups, at least `missing`, whose completions divide equally among the ranks."""
    step = ranks // math.gcd(ranks, num_generations)
    return math.ceil(missing / step) * step


def fresh_rows(dataset, used: Iterable, key: str) -> Iterator[dict[str, Any]]:
    """
    Yields rows of `dataset` in a random order that depends only on `key`: each prompt once, and none that is in `used`.
    The global random state does not change.
    """
    seen = set(map(str, used))  # as text, since conversations cannot be hashed
    for index in torch.randperm(len(dataset), generator=keyed_generator(key)).tolist():
        row = dataset[index]
        prompt = str(row["prompt"])
        if prompt not in seen:
            seen.add(prompt)
            yield row


class Sample(NamedTuple):
    """A sampled completion, with the extra columns that reward functions logged for it."""

    prompt_length: int
    completion_ids: list[int]
    logps: list[float] | None
    extra: dict[str, Any]


class Batch:
    """
    One generation batch and its rounds of sampling. The groups are laid out one after the other across all ranks, and a
    group may begin on one rank and end on the next. So a replacement is sent to the rank that needs it.

    Attributes:
        inputs (`list[dict]`), samples (`list[Sample]`): One entry for each completion of this rank.
        rewards (`torch.Tensor` of shape `(completions, reward functions)`): Rewards of all ranks, as TRL gathers them.
        useful (`torch.Tensor` of shape `(groups,)`): Which groups of all ranks are informative.
        thrown (`list[Sample]`): Samples of this rank that were replaced or not needed.
        metrics (`dict[str, float]`): Metrics to log.
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
        logps = logps or [None] * len(inputs)
        samples = []
        for i, (prompt, completion, its_logps) in enumerate(zip(prompt_ids, completion_ids, logps, strict=True)):
            extra = {name: values[i] for name, values in columns.items() if i < len(values)}
            samples.append(Sample(len(prompt), completion, its_logps, extra))
        apart = trainer.multi_objective_aggregation == "normalize_then_sum"
        weights = trainer.reward_weights.to(rewards.device)
        return samples, rewards, informative(rewards, weights, self.num_generations, apart).cpu()

    def refill(self, rounds: int) -> None:
        """Runs further rounds until every group is informative, no prompt is left, or `rounds` rounds have run."""
        uninformative, done, fresh = self.missing, 0, self.fresh()
        while self.missing and done < rounds:
            rows = list(islice(fresh, groups_to_sample(self.missing, self.num_generations, self.ranks)))
            # If too few prompts are left, samples only as many as divide equally among the ranks
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
        """The number of uninformative groups of the batch."""
        return int((~self.useful).sum())

    def fresh(self) -> Iterator[dict[str, Any]]:
        """
        Yields fresh rows for this batch. The key contains the batch's prompts, which differ between the generations of
        a step.
        """
        prompts = gather_object([row["prompt"] for row in self.inputs])[:: self.num_generations]
        key = f"{self.trainer.args.seed}/{self.trainer.state.global_step}/{prompts}"
        for row in fresh_rows(self.trainer.train_dataset, prompts, key):
            yield {name: row[name] for name in self.inputs[0]}  # the columns of the batch's rows

    def round(self, rows: list[dict]) -> None:
        """Samples a group for each prompt, and replaces uninformative groups of the batch by the informative ones."""
        size = len(rows) * self.num_generations // self.ranks  # completions of a rank
        indices = range(self.rank * size, (self.rank + 1) * size)  # this rank's among all completions
        samples, rewards, fresh = self.sampled([dict(rows[i // self.num_generations]) for i in indices])
        places = replacements(self.useful, fresh)
        taken = set(places.values())
        mine = dict(zip(indices, samples, strict=True))
        self.thrown += [sample for i, sample in mine.items() if i // self.num_generations not in taken]
        found = dict(gather_object([(i, s) for i, s in mine.items() if i // self.num_generations in taken]))
        for place, group in places.items():
            for k in range(self.num_generations):
                replaced, new = place * self.num_generations + k, group * self.num_generations + k
                self.rewards[replaced] = rewards[new]
                row = replaced - self.rank * len(self.inputs)
                if row in range(len(self.inputs)):  # this rank holds the completion
                    self.thrown.append(self.samples[row])
                    self.inputs[row], self.samples[row] = dict(rows[group]), found[new]
            self.useful[place] = True

    def wasted(self) -> tuple[int, int]:
        """Returns the number of prompt and of completion tokens that are not trained on, summed over all ranks."""
        lengths = [[sample.prompt_length, len(sample.completion_ids)] for sample in self.thrown]
        device = self.trainer.accelerator.device
        total = torch.tensor(lengths, dtype=torch.long, device=device).view(-1, 2).sum(0)
        return tuple(self.trainer.accelerator.gather(total).view(-1, 2).sum(0).tolist())


@contextmanager
def dynamically_sampled(trainer, inputs: list[dict]) -> Iterator[list[dict]]:
    """
    Context of TRL's `_generate_and_score_completions`, which must get the rows that this yields. TRL then takes their
    completions and rewards from here and does not sample again. So it pads, scores and logs only the final batch, while
    `num_tokens` counts everything that was sampled. Reward functions log their own metrics in every round. Without
    `dynamic_sampling_rounds`, and in an evaluation, the context does nothing.
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
    completion_ids = [sample.completion_ids for sample in batch.samples]
    logps = [sample.logps for sample in batch.samples]
    sampled = completion_ids, None if logps[0] is None else logps
    with exchanged(
        trainer,
        generation=nullcontext,  # nothing is sampled
        _tell_unused=lambda: None,
        _generate_single_turn=lambda *args, **kwargs: sampled,
        _calculate_rewards=lambda *args, **kwargs: batch.rewards,
    ):
        yield batch.inputs
