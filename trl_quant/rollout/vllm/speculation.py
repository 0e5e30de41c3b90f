"""
Counts what becomes of the tokens that vLLM drafts with speculative decoding, and keeps drafts away from scores.

vLLM counts drafts itself only while it keeps statistics, which a run leaves out. Here the scheduler's method that reads
the results of a step is replaced for one call, and calls that method.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from operator import attrgetter

import torch
from accelerate import Accelerator

from ...trl_seams import exchanged


@dataclass
class Drafts:
    """
    Drafted tokens since the last [`take`].

    Attributes:
        steps (`int`): Number of decode steps, each of one completion.
        drafted (`int`): Number of drafted tokens that the policy has judged in them.
        accepted (`int`): Number of those that it has accepted. A step samples one token more than it accepts.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, scheduled, output) -> None:
        """Adds one step of vLLM: its `SchedulerOutput` and its `ModelRunnerOutput`."""
        if not output.sampled_token_ids:
            return
        for request, place in output.req_id_to_index.items():
            sampled = len(output.sampled_token_ids[place])
            if sampled:  # part of a long prompt samples nothing
                self.steps += 1
                self.drafted += len(scheduled.scheduled_spec_decode_tokens.get(request, ()))
                self.accepted += sampled - 1

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns the metrics of all ranks, and counts from 0 again. All ranks must call it."""
        counts = torch.tensor(astuple(self), dtype=torch.float64, device=accelerator.device)
        steps, drafted, accepted = accelerator.reduce(counts, "sum").tolist()
        self.steps, self.drafted, self.accepted = 0, 0, 0
        metrics = {}
        if steps:
            metrics["rollouts/accepted_tokens"] = accepted / steps
        if drafted:
            metrics["rollouts/accepted_share"] = accepted / drafted
        return metrics


@contextmanager
def counting_drafts(llm, drafts: Drafts | None) -> Iterator[None]:
    """Context in which the steps of vLLM's `llm` are added to `drafts`, if it is given."""
    if drafts is None:
        yield
        return
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def counted(scheduled, output):
        drafts.add(scheduled, output)
        return update(scheduled, output)

    with exchanged(scheduler, update_from_output=counted):
        yield


@contextmanager
def nothing_drafted(llm) -> Iterator[None]:
    """
    Context in which vLLM's `llm` drafts nothing, so that it scores prompts right.

    A model that drafts runs before the prompts of a step are scored. Its CUDA graphs share memory with the policy's,
    and write over the hidden states from which the scores are computed. Samples are drawn before, and are right.
    """
    (runner,) = llm.collective_rpc(attrgetter("model_runner"))
    if not hasattr(runner, "effective_drafter_max_model_len"):  # vLLM does not speculate, or this runner scores first
        yield
        return
    with exchanged(runner, effective_drafter_max_model_len=0):  # nothing is drafted for sequences beyond it
        yield
