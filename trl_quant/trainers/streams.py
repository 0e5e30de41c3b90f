"""Guards rows that are known only when they are drawn: those of a stream, and of a dataset that computes its rows.

[`~config.before_loading`] checks the rows of a `Dataset` before a model is loaded. Here each generation's rows are
checked in the same way, and a stream that ends:

| a stream ends | what happens |
|---|---|
| before the first step | `train` raises `ValueError`: nothing was trained |
| after some of `max_steps` steps | transformers reads it again from its beginning, and a warning says so |
| within the steps that a resumed run skips | the same; an unbroken run would be further |
| after some of `max_steps` steps, but it gives no rows a second time | transformers ends the training and warns |
| before an evaluation has drawn a row | `evaluate` raises `ValueError` |

Rows that do not fill a generation at the end of a stream are not trained on. The thread that samples beside an
asynchronous training reads by itself ([`DrawnRows.endless`]): it uses all rows, begins again with the same warning, and
raises `ValueError` where a stream has no rows, at its beginning or a second time.
"""

import logging
from collections.abc import Iterator
from itertools import chain, repeat

from datasets import IterableDataset
from torch.nn import Module
from transformers import TrainerCallback

from ..tasks.data import check_conversation, check_row
from ..tasks.rewards import check_reward


logger = logging.getLogger(__name__)


class DrawnRows(TrainerCallback):
    """
    Checks the rows that a trainer draws.

    Args:
        trainer: The trainer, whose constructor has ended.
        given (`dict`): The arguments of TRL's trainer.

    Attributes:
        environments: The `environment_factory`, from which prompts may come, or `None`.
        rewards (`list[Callable]`): The `reward_funcs` that are functions.
        more_columns (`bool`): Whether environments or a `rollout_func` may add columns that rewards read.
        count (`int`): Generations drawn so far, in training and evaluation.
        start (`int`): The step at which the training began.
        passes (`int`): How often the training has begun to read its dataset.
    """

    def __init__(self, trainer, given: dict):
        self.trainer, self.environments = trainer, given.get("environment_factory")
        self.has_turns = bool(given.get("tools")) or self.environments is not None
        rewards = given.get("reward_funcs")
        rewards = rewards if isinstance(rewards, list) else [rewards]
        self.rewards = [reward for reward in rewards if callable(reward) and not isinstance(reward, Module)]
        self.more_columns = self.environments is not None or given.get("rollout_func") is not None
        self.count = self.start = self.passes = 0
        trainer.add_callback(self)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.trainer.train_dataset, IterableDataset)

    def on_train_begin(self, args, state, control, **kwargs):
        self.start, self.passes = state.global_step, 0

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.passes += 1
        if self.is_stream and self.passes == 2 and state.global_step > self.start:
            self._tell_end()
        elif self.is_stream and self.passes == 2 and self.start:
            logger.warning(
                "The stream `train_dataset` ended within the %d steps that this resumed run has behind it. It is read "
                "again from its beginning, so the next prompts are not those of an unbroken run.",
                self.start,
            )

    def _tell_end(self) -> None:
        logger.warning(
            "The stream `train_dataset` ended after step %d of `max_steps`=%d. It is read again from its beginning. "
            "This warning comes once.",
            self.trainer.state.global_step,
            self.trainer.state.max_steps,
        )

    def endless(self, first: int) -> Iterator[dict]:
        """
        Yields the rows of the training's dataset one by one, each checked as in [`check`], from the one whose number is
        `first` on, and then again and again from the beginning. Raises `ValueError` if there are none.
        """
        passes = repeat(self.trainer.train_dataset)
        if not self.is_stream:
            dataset = next(passes)
            passes, first = chain([dataset.select(range(first % len(dataset), len(dataset)))], passes), 0
        for number, rows in enumerate(passes):
            is_empty = True
            for row in rows:
                is_empty = False
                if first:
                    first -= 1
                    continue
                self.check([row], "train_dataset")
                yield row
            if is_empty:
                again = " a second time. It may give its rows only once" if number else ""
                raise ValueError(f"The stream `train_dataset` gives no rows{again}.")
            if self.is_stream and not number:
                self._tell_end()

    def check(self, rows: list[dict], name: str | None = None) -> None:
        """
        Raises `ValueError` for a generation's row without a prompt, or without a column that a reward reads. The error
        calls the dataset `name`; without it, `eval_dataset` while the policy is being evaluated.
        """
        trainer = self.trainer
        self.count += 1
        name = name or ("train_dataset" if trainer.model.training else "eval_dataset")
        where = f"`{name}`, at step {trainer.state.global_step}"
        for row in rows if self.environments is None else ():
            check_row(where, row, rows[0])
        if self.has_turns:
            check_conversation(f"{where},", rows[0])
        if self.more_columns:
            return
        for reward in self.rewards:
            check_reward(reward, [*rows[0]], name, trainer.args.is_asynchronous)

    def check_trained(self) -> None:
        """Raises `ValueError` after a training that took no step, because its dataset gave no whole generation."""
        args, state = self.trainer.args, self.trainer.state
        if state.global_step > self.start or state.global_step >= state.max_steps or not self.is_stream:
            return
        prompts = args.generation_batch_size // args.num_generations
        raise ValueError(
            f"`train_dataset` ended before a step: the run took none of its {state.max_steps - self.start} steps, and "
            f"nothing was trained. A generation takes {prompts} prompts (`generation_batch_size`="
            f"{args.generation_batch_size} / `num_generations`={args.num_generations}), and a step "
            f"`gradient_accumulation_steps`={args.gradient_accumulation_steps} micro-batches. If the stream was read "
            "before, it may give its rows only once."
        )
