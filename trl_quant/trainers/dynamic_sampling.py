r"""Dynamic sampling (DAPO, section 3.2, eq. 11): replaces groups without a learning signal before training.

    max_theta J(theta)   s.t.   0 < |{ o_i : is_equivalent(a, o_i) }| < G                                   eq. 11

A group is the G completions of one prompt. If all of them are right, or all are wrong, every advantage is 0, so the
group adds nothing to the gradient. Such groups are replaced by finished ones that wait, and then in further rounds.
Each round samples until as many groups have finished as are missing, and there are at most `dynamic_sampling_rounds`
rounds.

| paper | here |
|---|---|
| `G` | `num_generations` |
| `0 < \|{...}\| < G`, for rewards of 0 and 1 | [`informative`]: the rewards of the group differ |
| the dynamic sampling buffer | [`DynamicPool`], from which a generation takes further groups |

**Choice** The paper samples until the batch is full. Here the number of rounds is limited, and a group without a
replacement stays, with the advantages of 0 that TRL gives it. **Choice** A group is informative if the rewards that TRL
sums differ. For example, with a punishment of overlong completions, a group of wrong answers of different lengths is
informative.

The pool's order runs on: the next prompts of the epoch, and then those of the next epoch. A discarded prompt counts as
sampled. Groups are scored when they are taken, so the pool holds no rewards.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..trl_seams import exchanged
from .pictures import with_images
from .pool import Group, RolloutPool


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


@dataclass
class Scored:
    """
    A finished group, with its rewards.

    Parameters:
        group ([`~trainers.pool.Group`]): The group.
        rewards (`torch.Tensor` of shape `(num_generations, reward functions)`): The rewards of its completions.
        extra (`list[dict[str, Any]]`): The extra columns that reward functions logged for each completion.
        has_signal (`bool`): Whether the group is informative.
    """

    group: Group
    rewards: Tensor
    extra: list[dict[str, Any]]
    has_signal: bool

    @property
    def tokens(self) -> int:
        """The number of tokens that were sampled for it."""
        return sum(len(completion.token_ids) for completion in self.group.completions)


class DynamicPool(RolloutPool):
    """
    A [`~trainers.pool.RolloutPool`] whose generations return groups with a signal, as long as
    `dynamic_sampling_rounds` allow. Its arguments are those of `RolloutPool`.

    TRL gets the rewards with the groups, and does not compute them again. So it pads, scores and logs only what is
    trained on, while `num_tokens` counts everything that was sampled. Reward functions log their own metrics in every
    round.
    """

    def choose(self) -> tuple[list[Group], AbstractContextManager]:
        state, rounds = self.trainer.state, self.trainer.args.dynamic_sampling_rounds
        seen, done, thrown = state.num_input_tokens_seen, 0, []
        batch = self.scored(self.next_groups(self.wanted))
        places = uninformative = _without_signal(batch)
        while places:
            if len(self.finished) < len(places):
                if done == rounds:
                    break
                done += 1
            fresh = self.scored(self.next_groups(len(places)))
            useful = [new for new in fresh if new.has_signal]
            thrown += [new for new in fresh if not new.has_signal]
            for place, new in zip(places, useful, strict=False):
                thrown.append(batch[place])
                batch[place] = new
            places = _without_signal(batch)
        wasted = sum(one.tokens for one in thrown)
        # TRL adds the tokens of those that are trained on
        state.num_input_tokens_seen = seen + wasted + sum(len(one.group.prompt) * self.order.size for one in thrown)
        self.trainer.log_values(
            {
                "dynamic_sampling/uninformative_fraction": len(uninformative) / len(batch),
                "dynamic_sampling/rounds": float(done),
                "dynamic_sampling/replaced_groups": float(len(uninformative) - len(places)),
                "dynamic_sampling/remaining_fraction": len(places) / len(batch),
                "dynamic_sampling/wasted_tokens": float(wasted),
            }
        )
        return [one.group for one in batch], self._known(batch)

    def scored(self, groups: list[Group]) -> list[Scored]:
        """Computes the rewards of finished groups, as TRL computes them. Each rank scores as many completions."""
        trainer, size = self.trainer, self.order.size
        with exchanged(trainer, _metrics={"train": defaultdict(list)}), self.handing_out(self.evenly(groups)) as rows:
            prompts = [with_images(row) for row in rows]  # as TRL prepares them
            _, completion_ids, _, completions, *_ = trainer._generate(prompts)
            rewards = trainer._calculate_rewards(rows, prompts, completions, completion_ids)
        columns = dict(trainer._pending_extra_logs)
        trainer._pending_extra_logs.clear()
        extra = [{name: values[i] for name, values in columns.items() if i < len(values)} for i in range(len(rows))]
        extra = gather_object(extra)
        apart = trainer.multi_objective_aggregation == "normalize_then_sum"
        signals = informative(rewards, trainer.reward_weights.to(rewards.device), size, apart).tolist()
        found = []
        for i, group in enumerate(groups):  # without those that are repeated
            part = slice(i * size, (i + 1) * size)
            found.append(Scored(group, rewards[part], extra[part], signals[i]))
        return found

    @contextmanager
    def _known(self, batch: list[Scored]) -> Iterator[None]:
        """Context in which TRL gets the rewards of a generation and the columns that reward functions logged."""
        trainer, extra = self.trainer, [columns for one in batch for columns in one.extra]
        size = len(extra) // trainer.accelerator.num_processes
        mine = extra[trainer.accelerator.process_index * size :][:size]
        for name in sorted({name for columns in extra for name in columns}):
            trainer._pending_extra_logs[name] = [columns.get(name) for columns in mine]
        rewards = torch.cat([one.rewards for one in batch])
        with exchanged(trainer, _calculate_rewards=lambda *args, **kwargs: rewards):
            yield


def _without_signal(batch: list[Scored]) -> list[int]:
    """Returns the places of the groups that are to be replaced."""
    return [place for place, one in enumerate(batch) if not one.has_signal]
