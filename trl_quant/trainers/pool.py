r"""Partial rollouts (Kimi k1.5, section 2.6.2; APRIL): unfinished completions go on in the next generation.

Most decode steps of a generation wait for a few long completions. With `rollouts_in_flight` = f, a generation that
returns n groups keeps f n in flight, and ends with the n-th that finishes:

    generation         0            1            2
    group 0        ========|
    group 1        =================|========|            | the generation ends: 1 of 2 groups has finished
    group 2                     ========|

**Between two generations an engine holds nothing.** The [`RolloutPool`] holds each completion's token ids and their
log-probabilities. The next generation gives prompt and tokens so far as a prompt, with the rest of the length. So each
token t was sampled by one known version v(t) of the policy: the weights and the noise of one generation. Tokens so far
are computed again under the new weights, and the tokens after them are the new version's. In a mixture of experts, the
pool holds the experts of each token as well, from when it was first computed: those that it was sampled with.

| symbol | here | meaning |
|---|---|---|
| `n` | `RolloutPool.wanted` | groups that a generation returns |
| `f` | `rollouts_in_flight` | groups in flight when a generation starts, divided by n |
| `M` | `max_staleness` | age, in generations, that a returned group may have |
| `v(t)` | `Completion.versions` | the generation that sampled token t |
| `g - v(t)` | `ages` | the age of token t in generation g |

A token's log-probability is its version's, and a correction compares it with the policy that is trained: age and
precision are one ratio.

**Which groups return.** The oldest that have finished, n of them. A generation may end once these leave no group behind
that would become too old: of the groups that must return within the next j generations there may be at most j n left,
for each j from 0 to M ([`may_end`]). Since f n <= (M + 1) n, this holds at the latest when all have finished.

**Which engine samples a group.** Since engines hold nothing, groups are dealt to them anew in each generation, the
oldest first, in the proportions in which engines return groups ([`dealt`]). All ranks hold the same pool: after they
have sampled, each learns of all samples. No rank waits for another before.

**Choice** Groups start when a generation starts, not when another has finished: the engine holds fewer towards the end.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor

from ..reading import ANOTHER, reading
from ..rollout.base import RolloutEngine
from ..rollout.engine import Samples
from ..storage.run_checkpoints import POOL_NAME
from .groups import Completion, Group
from .pictures import requests_in_flight, with_images
from .prompt_order import PromptOrder


logger = logging.getLogger(__name__)


def may_end(began: list[int], have_finished: list[bool], wanted: int, generation: int, max_staleness: int) -> bool:
    """
    Says whether a generation may end: enough groups have finished, and those that it leaves can return in time.

    Args:
        began (`list[int]`): The generations in which the groups in flight started, oldest first.
        have_finished (`list[bool]`): Which of them have finished.
        wanted (`int`): Number of groups that each generation returns.
        generation (`int`): This generation.
        max_staleness (`int`): Largest age, in generations, at which a group may return.
    """
    finished = [start for start, has_finished in zip(began, have_finished, strict=True) if has_finished]
    if len(finished) < wanted:
        return False
    returned = finished[:wanted]
    for later in range(max_staleness + 1):
        newest = generation + later - max_staleness  # a group that began then must return `later` generations from now
        due = sum(start <= newest for start in began) - sum(start <= newest for start in returned)
        if due > later * wanted:
            return False
    return True


def shares(wanted: int, engines: int) -> list[int]:
    """Divides the groups that a generation returns among the engines, as evenly as whole groups allow."""
    ends = [(engine + 1) * wanted // engines for engine in range(engines)]
    return [end - start for start, end in zip([0, *ends], ends)]


def dealt(groups: list[Group], wanted: int, engines: int) -> list[list[Group]]:
    """
    Deals groups to engines: of each `wanted` consecutive ones, every engine gets its share.

    Args:
        groups (`list[Group]`): The groups, oldest first.
        wanted (`int`): Number of groups that a generation returns.
        engines (`int`): Number of engines.

    Returns:
        `list[list[Group]]`: The groups of each engine, oldest first.
    """
    turns = [engine for engine, share in enumerate(shares(wanted, engines)) for _ in range(share)]
    hands: list[list[Group]] = [[] for _ in range(engines)]
    for i, group in enumerate(groups):
        hands[turns[i % wanted]].append(group)
    return hands


class RolloutPool:
    """
    The groups of a run that have started and have not been returned. All ranks hold the same pool.

    A generation, in the order of its calls:

    1. [`returning`] begins, with the rows that TRL hands out. The engine gets the policy's weights and the noise.
    2. New groups start, up to f n.
    3. All unfinished completions are sampled, until [`may_end`].
    4. The n oldest finished groups leave the pool. With dynamic sampling, those without a signal are replaced: 2 to 4
       again, for as many groups as are missing (see [`~trainers.dynamic_sampling.DynamicPool`]).
    5. [`returning`] yields this rank's rows of them, in their order. TRL "generates" their completions: it gets those
       of the pool.

    Args:
        trainer: The trainer.
        sampler ([`~rollout.RolloutEngine`] or `None`): Its engine; `None` if TRL generates, which ends no call early.

    Attributes:
        groups (`list[Group]`): The groups in flight, and finished ones that wait, in the order of their start.
        started (`int`): Number of groups that have started.
        generation (`int`): Number of generations that have been returned.
        cohorts (`dict[int, list[int]]`): For each generation, of the groups that started in it: the tokens and the
            completions that have been returned, and the number of groups that have not.
        prompts (`list[list[int]]` or `None`), samples (`Samples` or `None`): The prompts of the rows that TRL gets at
            present, and the samples that it "generates" for them.
    """

    def __init__(self, trainer, sampler: RolloutEngine | None):
        args = trainer.args
        self.trainer, self.sampler = trainer, sampler
        self.factor, self.max_staleness = args.rollouts_in_flight, args.max_staleness
        self.groups: list[Group] = []
        self.started = self.generation = 0
        self.cohorts: dict[int, list[int]] = {}
        self.prompts: list[list[int]] | None = None
        self.samples: Samples | None = None
        self._columns: list[str] = []  # of the rows that TRL hands out
        self._recomputed_tokens = 0
        self._order: PromptOrder | None = None
        self._handed: list[Completion] = []  # the completions of `samples`, also after the context

    @property
    def order(self) -> PromptOrder:
        if self._order is None:
            self._order = PromptOrder(self.trainer)
        return self._order

    @property
    def wanted(self) -> int:
        """The number of groups that a generation returns, over all ranks."""
        return self.order.groups

    @property
    def left(self) -> int:
        """The number of generations that are left, with the one that begins."""
        steps, micro_batches = self.trainer.state.max_steps, self.trainer.args.gradient_accumulation_steps
        return max(self.order.generations_within(steps, micro_batches) - self.generation, 1)

    @property
    def ranks_of_engine(self) -> int:
        """The number of ranks that sample from one engine together. The first of them asks it for their samples."""
        source = self.trainer.spec.source
        if source == "server":
            return self.trainer.accelerator.num_processes
        return self.trainer.args.vllm_tensor_parallel_size if source == "colocate" else 1

    @property
    def engines(self) -> int:
        """The number of engines. Each samples whole groups."""
        return self.trainer.accelerator.num_processes // self.ranks_of_engine

    @property
    def finished(self) -> list[Group]:
        """The groups that have finished, oldest first."""
        return [group for group in self.groups if group.has_finished]

    # A generation

    @contextmanager
    def returning(self, inputs: list[dict]) -> Iterator[list[dict]]:
        """
        Context of TRL's `_generate_and_score_completions`, which must get the rows that this yields.

        Args:
            inputs (`list[dict]`): The rows that TRL hands out to this rank. Only their columns and their number count.
        """
        trainer = self.trainer
        trainer.meet_generation([row["prompt"] for row in inputs])
        self._columns = list(inputs[0])
        self._recomputed_tokens = 0
        carried = len([c for group in self.groups for c in group.completions if c.token_ids and not c.has_ended])
        returned, scores = self.choose()
        tokens = {"rollouts/carried": float(carried), "rollouts/recomputed_tokens": float(self._recomputed_tokens)}
        metrics = tokens | self._ages_of(returned) | self._lengths()
        if self.factor > 1:
            trainer.log_values(metrics)
        with scores, self.handing_out(returned) as rows:
            yield rows
        self.generation += 1

    def choose(self) -> tuple[list[Group], AbstractContextManager]:
        """
        Samples a generation and takes the groups that it returns out of the pool.

        Returns:
            `tuple`: the groups, and a context in which TRL gets what is known of their scores.
        """
        return self.next_groups(self.wanted), nullcontext()

    def next_groups(self, count: int) -> list[Group]:
        """
        Takes the `count` oldest finished groups out of the pool, and samples until there are as many. Within a
        generation it may be called again for further ones.
        """
        if count == self.wanted or len(self.finished) < count:
            with nullcontext() if self.sampler is None else self.trainer.generation():
                self._start(count)
                self._recomputed_tokens += self._recomputed()
                if self.sampler is None:
                    self._generate_whole()
                else:
                    self._sample(count)
        return self._take(count)

    @contextmanager
    def handing_out(self, groups: list[Group]) -> Iterator[list[dict]]:
        """Context in which TRL "generates" the completions of `groups`. Yields this rank's part of their rows."""
        rows = self._part(groups)
        self._handed = [completion for _, completion in rows]
        ids, logps = [c.token_ids for c in self._handed], [c.logps for c in self._handed]
        carried = [[c.routing for c in self._handed], [c.kept for c in self._handed]]
        routing, kept = (None if all(one is None for one in rows) else rows for rows in carried)
        samples = Samples(ids, logps, routing=routing, kept=kept)
        generated = nullcontext() if self.sampler is None else self.trainer.vllm_generation.returning(samples)
        self.prompts, self.samples = [group.prompt for group, _ in rows], samples
        try:
            with generated:
                yield [self._row(group) for group, _ in rows]
        finally:
            self.prompts = self.samples = None

    def _part(self, groups: list[Group]) -> list[tuple[Group, Completion]]:
        """Returns this rank's part of the completions of `groups`, each with its group."""
        rows = [(group, completion) for group in groups for completion in group.completions]
        rank, size = self.trainer.accelerator.process_index, len(rows) // self.trainer.accelerator.num_processes
        return rows[rank * size : (rank + 1) * size]

    def evenly(self, groups: list[Group]) -> list[Group]:
        """Repeats the first groups, if need be, until all completions divide equally among the ranks."""
        ranks = self.trainer.accelerator.num_processes
        unit = ranks // math.gcd(ranks, self.order.size)
        return list(islice(cycle(groups), math.ceil(len(groups) / unit) * unit))

    def _row(self, group: Group) -> dict:
        """Returns the row of the data that a group belongs to, with the columns that TRL hands out."""
        row = self.trainer.train_dataset[group.row]
        return {name: row[name] for name in self._columns}

    def _recomputed(self) -> int:
        """Counts the tokens that are computed again: of unfinished completions so far, and of their groups' prompts."""
        count = 0
        for group in self.groups:
            lengths = [len(c.token_ids) for c in group.completions if c.token_ids and not c.has_ended]
            count += sum(lengths) + (len(group.prompt) if lengths else 0)
        return count

    def _start(self, count: int) -> None:
        """
        Starts the groups of the next prompts, when `count` groups are still to return. It starts none that the rest of
        the run cannot return.
        """
        in_flight = min(math.ceil(self.factor * self.wanted), self.left * self.wanted) - (self.wanted - count)
        places = range(self.started, self.started + max(in_flight - len(self.groups), 0))
        if not places:
            return
        rows = [self.order[place] for place in places]
        prompts = [with_images(self.trainer.train_dataset[row]) for row in rows]
        tokenized, *_ = self.trainer._tokenize_prompts(prompts)
        for place, row, ids in zip(places, rows, tokenized, strict=True):
            completions = [Completion() for _ in range(self.order.size)]
            self.groups.append(Group(place, row, list(ids), self.generation, completions))
        self.started += len(places)
        self.cohorts.setdefault(self.generation, [0, 0, 0])[2] += len(places)

    def _sample(self, count: int) -> None:
        """Samples from this rank's engine until `count` groups have finished, and learns what others have sampled."""
        trainer = self.trainer
        engine, member = divmod(trainer.accelerator.process_index, self.ranks_of_engine)
        of_each = count if count == self.wanted else math.ceil(count / self.engines) * self.engines
        hands, share = dealt(self.groups, of_each, self.engines), shares(of_each, self.engines)[engine]
        asked = [[(group, c) for group in hand for c in group.completions if not c.has_ended] for hand in hands]
        mine = hands[engine]

        def enough(ended: list[bool]) -> bool:
            unfinished = {id(c) for (_, c), has_ended in zip(asked[engine], ended, strict=True) if not has_ended}
            finished = [all(id(c) not in unfinished for c in group.completions) for group in mine]
            if count < self.wanted:  # what the generation has returned before left nothing that is due
                return sum(finished) >= share
            began = [group.began for group in mine]
            return may_end(began, finished, share, self.generation, self.max_staleness)

        samples = Samples([], [])
        if asked[engine] and not enough([False] * len(asked[engine])):
            requests, processed = requests_in_flight(trainer, asked[engine] if member == 0 else [])
            samples = trainer.draw(requests, enough if self.factor > 1 else None, processed)
        found = gather_object([(engine, samples)] if member == 0 else [])
        for number, sampled in found:
            self._add([c for _, c in asked[number]], sampled)

    def _generate_whole(self) -> None:
        """Has TRL generate the completions of all groups that have not finished: on each rank as many."""
        waiting = [group for group in self.groups if not group.has_finished]
        part = self._part(self.evenly(waiting))
        prompts = [with_images(self.trainer.train_dataset[group.row]) for group, _ in part]
        _, images, processed = self.trainer._tokenize_prompts(prompts)
        prompts = [group.prompt for group, _ in part]
        token_ids, logps = self.trainer._generate_single_turn(prompts, images, processed, self.order.size)
        logps = logps or [[None] * len(ids) for ids in token_ids]
        completions = [completion for group in waiting for completion in group.completions]
        found = gather_object(list(zip(token_ids, logps, strict=True)))[: len(completions)]
        self._add(completions, Samples(*map(list, zip(*found, strict=True))))

    def _add(self, completions: list[Completion], samples: Samples) -> None:
        """Adds what a call has sampled to its completions."""
        if not samples.token_ids:
            return
        ended = samples.ended or [True] * len(completions)
        routing, kept = (rows or [None] * len(completions) for rows in (samples.routing, samples.kept))
        for i, completion in enumerate(completions):
            completion.add(samples.token_ids[i], samples.logps[i], self.generation, ended[i], routing[i], kept[i])

    def _take(self, count: int) -> list[Group]:
        """Takes the `count` oldest finished groups out of the pool."""
        taken = self.finished[:count]
        places = {group.place for group in taken}
        self.groups = [group for group in self.groups if group.place not in places]
        for group in taken:
            cohort = self.cohorts[group.began]
            cohort[0] += sum(len(completion.token_ids) for completion in group.completions)
            cohort[1] += len(group.completions)
            cohort[2] -= 1
        return taken

    def _lengths(self) -> dict[str, float]:
        """
        Returns the mean length, in tokens, of the completions that started in the newest generation of which all have
        returned: short completions return before long ones of their start.
        """
        whole = [self.cohorts.pop(began) for began, (_, _, left) in sorted(self.cohorts.items()) if not left]
        return {"rollouts/started_length": whole[-1][0] / whole[-1][1]} if whole else {}

    def _ages_of(self, groups: list[Group]) -> dict[str, float]:
        ages = [self.generation - version for group in groups for c in group.completions for version in c.versions]
        return {"rollouts/age": sum(ages) / max(len(ages), 1), "rollouts/age_max": float(max(ages, default=0))}

    def ages(self, like: Tensor) -> Tensor:
        """
        Returns the ages of this rank's returned tokens, in generations.

        Args:
            like (`torch.Tensor` of shape `(B, T)`): The token ids of the completions, as TRL pads them.

        Returns:
            `torch.Tensor` of shape `(B, T)`: The ages; 0 on padding.
        """
        rows = [self.generation - 1 - torch.tensor(c.versions, dtype=torch.long) for c in self._handed]
        return torch.stack([F.pad(row, (0, like.shape[1] - len(row))) for row in rows]).to(like.device)

    # Checkpoints and the end of a run

    def save(self, checkpoint: str | Path) -> None:
        """Saves the pool in a checkpoint."""
        groups = [
            {
                "place": group.place,
                "row": group.row,
                "prompt": group.prompt,
                "began": group.began,
                "completions": [completion.state_dict() for completion in group.completions],
            }
            for group in self.groups
        ]
        counts = {"started": self.started, "generation": self.generation, "cohorts": self.cohorts}
        state = {"groups": groups} | counts
        Path(checkpoint).mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(checkpoint, POOL_NAME))

    def load(self, checkpoint: str | Path, micro_batches: int) -> None:
        """
        Loads the pool of a checkpoint.

        Args:
            checkpoint (`str` or `Path`): The checkpoint.
            micro_batches (`int`): Number of micro-batches that its run has trained on.
        """
        path = Path(checkpoint, POOL_NAME)
        if not path.is_file():  # of a run that left nothing unfinished
            self.generation = math.ceil(micro_batches / self.order.repeats)
            self.started = self.generation * self.wanted
            return
        with reading(path, advice=ANOTHER):
            state = torch.load(path, map_location="cpu", weights_only=True)
        size = self.order.size
        self.started, self.generation, self.cohorts = (state[name] for name in ("started", "generation", "cohorts"))
        self.groups = []
        for group in state["groups"]:
            completions = [Completion.from_state_dict(one) for one in group.pop("completions")]
            if len(completions) != size:
                logger.warning(
                    "The group of prompt %d starts again: it has %d completions, and `num_generations` is %d.",
                    group["place"],
                    len(completions),
                    size,
                )
                completions = [Completion() for _ in range(size)]
            self.groups.append(Group(**group, completions=completions))

    def tell_unfinished(self) -> None:
        """Says which groups a run leaves unfinished that was stopped before its last step."""
        if self.groups:
            tokens = sum(len(c.token_ids) for group in self.groups for c in group.completions)
            logger.warning(
                "The run ended with %d groups in flight, whose %d tokens were not trained on. A checkpoint holds them, "
                "and a run that resumes it goes on with them.",
                len(self.groups),
                tokens,
            )
