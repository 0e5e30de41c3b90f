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
are computed again under the new weights, and the tokens after them are the new version's.

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor
from trl.extras.profiling import profiling_context
from trl.trainer.utils import RepeatSampler

from ..reading import ANOTHER, reading
from ..rollout.engine import Samples
from ..runs.checkpoints import same_after_resume
from ..storage.run_checkpoints import POOL_NAME
from . import phases
from .pictures import requests_in_flight, with_images


logger = logging.getLogger(__name__)


@dataclass
class Completion:
    """
    A completion, finished or not.

    Parameters:
        token_ids (`list[int]`): Its tokens so far.
        logps (`list[float | None]`): The log-probability, in nats, with which each was sampled; `None` if unknown.
        versions (`list[int]`): The generation that sampled each token.
        has_ended (`bool`): Whether the completion has finished.
    """

    token_ids: list[int] = field(default_factory=list)
    logps: list[float | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    has_ended: bool = False


@dataclass
class Group:
    """
    The completions of one prompt.

    Parameters:
        place (`int`): Its place, from 0, in the order in which the run's groups start.
        row (`int`): The row of the training data.
        prompt (`list[int]`): Token ids of the prompt.
        began (`int`): The generation in which it started.
        completions (`list[Completion]`): Its completions.
    """

    place: int
    row: int
    prompt: list[int]
    began: int
    completions: list[Completion]

    @property
    def has_finished(self) -> bool:
        return all(completion.has_ended for completion in self.completions)


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


class PromptOrder:
    """
    The rows of the training data, in the order in which TRL hands out their prompts, epoch after epoch.

    Args:
        trainer: The trainer, whose sampler is TRL's `RepeatSampler`.

    Attributes:
        size (`int`): Number of completions of a prompt.
        groups (`int`): Number of prompts of a generation, over all ranks.
        generations (`int`): Number of generations in an epoch.
        repeats (`int`): Number of micro-batches that a generation serves.
    """

    def __init__(self, trainer):
        sampler = trainer._get_train_sampler()
        self.size, self.repeats = sampler.mini_repeat_count, sampler.repeat_count
        self.groups = sampler.batch_size  # of a generation
        self.generations = len(sampler.data_source) // self.groups  # of an epoch
        given = {"batch_size": sampler.batch_size, "shuffle": sampler.shuffle, "seed": sampler.seed}
        self._once = same_after_resume(RepeatSampler(sampler.data_source, mini_repeat_count=1, **given))
        self._epoch, self._rows = -1, []

    def __getitem__(self, place: int) -> int:
        """Returns the row of the data whose prompt is at a place of the order, from 0."""
        epoch, place = divmod(place, self.generations * self.groups)
        if epoch != self._epoch:
            if self._once.shuffle:
                self._once.set_epoch(epoch)
            self._epoch, self._rows = epoch, list(self._once)
        return self._rows[place]

    def generations_within(self, steps: int, micro_batches: int) -> int:
        """
        Returns the number of generations in the first optimizer steps of a run.

        Args:
            steps (`int`): Number of optimizer steps.
            micro_batches (`int`): Micro-batches of a step; the last step of an epoch may have fewer.
        """
        of_epoch = self.generations * self.repeats  # micro-batches
        epochs, rest = divmod(steps, max(math.ceil(of_epoch / micro_batches), 1))
        started = math.ceil(min(rest * micro_batches, of_epoch) / self.repeats)
        return epochs * self.generations + started


class RolloutPool:
    """
    The groups of a run that have started and have not been returned. All ranks hold the same pool.

    A generation, in the order of its calls:

    1. [`returning`] begins, with the rows that TRL hands out. The engine gets the policy's weights and the noise.
    2. New groups start, up to f n.
    3. All unfinished completions are sampled, until [`may_end`].
    4. The n oldest finished groups leave the pool. [`returning`] yields this rank's rows of them, in their order. TRL
       "generates" their completions: `vllm_generation` returns those of the pool.

    Args:
        trainer: The trainer, with an engine.

    Attributes:
        groups (`list[Group]`): The groups in flight, and finished ones that wait, in the order of their start.
        started (`int`): Number of groups that have started.
        generation (`int`): Number of generations that have been returned.
        cohorts (`dict[int, list[int]]`): For each generation, of the groups that started in it: the tokens and the
            completions that have been returned, and the number of groups that have not.
        prompts (`list[list[int]]` or `None`): The prompts of the rows that TRL gets at present.
    """

    def __init__(self, trainer):
        args = trainer.args
        self.trainer, self.factor, self.max_staleness = trainer, args.rollouts_in_flight, args.max_staleness
        self.groups: list[Group] = []
        self.started = self.generation = 0
        self.cohorts: dict[int, list[int]] = {}
        self.prompts: list[list[int]] | None = None
        self._order: PromptOrder | None = None
        self._returned: list[Completion] = []  # this rank's, of the last generation

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
        with trainer.generation():
            self._start()
            carried = [c for group in self.groups for c in group.completions if c.token_ids and not c.has_ended]
            metrics = {
                "rollouts/carried": float(len(carried)),
                "rollouts/recomputed_tokens": float(self._recomputed()),
            }
            self._sample()
        returned = self._take()
        ages = [self.generation - version for group in returned for c in group.completions for version in c.versions]
        metrics |= {"rollouts/age": sum(ages) / max(len(ages), 1), "rollouts/age_max": float(max(ages, default=0))}
        trainer.log_values(metrics | self._lengths(returned))
        rows = [(group, completion) for group in returned for completion in group.completions]
        rank = trainer.accelerator.process_index
        rows = rows[rank * len(inputs) : (rank + 1) * len(inputs)]
        self._returned = [completion for _, completion in rows]
        self.prompts = [group.prompt for group, _ in rows]
        samples = Samples([c.token_ids for c in self._returned], [c.logps for c in self._returned])
        try:
            with trainer.vllm_generation.returning(samples):
                yield [self._row(group, inputs[0]) for group, _ in rows]
        finally:
            self.prompts = None
        self.generation += 1

    def _row(self, group: Group, columns: dict) -> dict:
        """Returns the row of the data that a group belongs to, with the columns that TRL hands out."""
        row = self.trainer.train_dataset[group.row]
        return {name: row[name] for name in columns}

    def _recomputed(self) -> int:
        """Counts the tokens that are computed again: of unfinished completions so far, and of their groups' prompts."""
        count = 0
        for group in self.groups:
            lengths = [len(c.token_ids) for c in group.completions if c.token_ids and not c.has_ended]
            count += sum(lengths) + (len(group.prompt) if lengths else 0)
        return count

    def _start(self) -> None:
        """Starts the groups of the next prompts. It starts none that the rest of the run cannot return."""
        in_flight = min(math.ceil(self.factor * self.wanted), self.left * self.wanted)
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
        self.cohorts[self.generation] = [0, 0, len(places)]

    def _sample(self) -> None:
        """Samples from this rank's engine until the generation may end, and learns what the others have sampled."""
        trainer = self.trainer
        engine, member = divmod(trainer.accelerator.process_index, self.ranks_of_engine)
        wanted, hands = shares(self.wanted, self.engines), dealt(self.groups, self.wanted, self.engines)
        asked = [[(group, c) for group in hand for c in group.completions if not c.has_ended] for hand in hands]
        mine = hands[engine]

        def enough(ended: list[bool]) -> bool:
            unfinished = {id(c) for (_, c), has_ended in zip(asked[engine], ended, strict=True) if not has_ended}
            finished = [all(id(c) not in unfinished for c in group.completions) for group in mine]
            began = [group.began for group in mine]
            return may_end(began, finished, wanted[engine], self.generation, self.max_staleness)

        samples = Samples([], [])
        if asked[engine] and not enough([False] * len(asked[engine])):
            requests, processed = requests_in_flight(trainer, asked[engine] if member == 0 else [])
            profiler = profiling_context(trainer, phases.IN_VLLM)
            samples = trainer.vllm_generation.sampler.draw(requests, profiler, enough, processed)
        found = gather_object([(engine, samples)] if member == 0 else [])
        for number, sampled in found:
            self._add([c for _, c in asked[number]], sampled)

    def _add(self, completions: list[Completion], samples: Samples) -> None:
        """Adds what a call has sampled to its completions."""
        if not samples.token_ids:
            return
        ended = samples.ended or [True] * len(completions)
        for completion, ids, logps, has_ended in zip(completions, samples.token_ids, samples.logps, ended, strict=True):
            completion.token_ids += ids
            completion.logps += logps
            completion.versions += [self.generation] * len(ids)
            completion.has_ended = has_ended

    def _take(self) -> list[Group]:
        """Takes the groups that the generation returns out of the pool: of each engine the oldest finished ones."""
        hands = dealt(self.groups, self.wanted, self.engines)
        taken = []
        for hand, share in zip(hands, shares(self.wanted, self.engines), strict=True):
            taken += [group for group in hand if group.has_finished][:share]
        places = {group.place for group in taken}
        self.groups = [group for group in self.groups if group.place not in places]
        return taken

    def _lengths(self, returned: list[Group]) -> dict[str, float]:
        """
        Counts what a generation returns. Returns the mean length, in tokens, of the completions that started in the
        newest generation of which this return is the last: short completions return before long ones of their start.
        """
        for group in returned:
            cohort = self.cohorts[group.began]
            cohort[0] += sum(len(completion.token_ids) for completion in group.completions)
            cohort[1] += len(group.completions)
            cohort[2] -= 1
        whole = [self.cohorts.pop(began) for began, (_, _, left) in sorted(self.cohorts.items()) if not left]
        return {"rollouts/started_length": whole[-1][0] / whole[-1][1]} if whole else {}

    def ages(self, like: Tensor) -> Tensor:
        """
        Returns the ages of this rank's returned tokens, in generations.

        Args:
            like (`torch.Tensor` of shape `(B, T)`): The token ids of the completions, as TRL pads them.

        Returns:
            `torch.Tensor` of shape `(B, T)`: The ages; 0 on padding.
        """
        rows = [self.generation - 1 - torch.tensor(c.versions, dtype=torch.long) for c in self._returned]
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
                "completions": [_packed(completion) for completion in group.completions],
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
            completions = [_unpacked(completion) for completion in group.pop("completions")]
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


def _packed(completion: Completion) -> dict:
    """Returns a completion as a checkpoint holds it."""
    logps = [math.nan if logp is None else logp for logp in completion.logps]
    return {
        "token_ids": torch.tensor(completion.token_ids, dtype=torch.int32),
        "logps": torch.tensor(logps, dtype=torch.float64),
        "versions": torch.tensor(completion.versions, dtype=torch.int32),
        "has_ended": completion.has_ended,
    }


def _unpacked(state: dict) -> Completion:
    """Returns the completion that [`_packed`] has packed."""
    logps = [None if math.isnan(logp) else logp for logp in state["logps"].tolist()]
    return Completion(state["token_ids"].tolist(), logps, state["versions"].tolist(), state["has_ended"])
