"""The prompts of a run in TRL's order, read ahead of it."""

import math

from trl.trainer.utils import RepeatSampler

from ..runs.checkpoints import same_after_resume


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
