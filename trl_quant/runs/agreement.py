"""What the ranks of a run must agree on: one rank's error ends all of them, and all have the same settings."""

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import gather_object

from ..config.given import name_of
from ..rollout.address import without_password


# Fields that may differ between the ranks of a run
OF_A_RANK = ("local_rank", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name")
OF_A_HOST = ("output_dir", "logging_dir")  # between hosts


def joined_answers(by_rank: list[str | None]) -> str:
    """Joins the ranks' answers for a message. Equal answers appear once, with the first rank that gave them."""
    first_rank = {}
    for rank, answer in enumerate(by_rank):
        if answer is not None:
            first_rank.setdefault(answer, rank)
    return "; ".join(f"{answer} (rank {rank})" for answer, rank in first_rank.items())


@contextmanager
def on_every_rank() -> Iterator[None]:
    """
    Context that raises one rank's `ValueError`, `OSError` or `RuntimeError` on all ranks, which would otherwise wait
    for that rank. The others raise `RuntimeError` for the last kind, else `ValueError`. All ranks must call it, and
    inside of it none waits for another.
    """
    fault = None
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        fault = error
    faults = gather_object([fault and (isinstance(fault, RuntimeError), str(fault))])
    if fault is not None:
        raise fault
    for rank, other in enumerate(faults):
        if other is not None:
            is_runtimes, message = other
            raise (RuntimeError if is_runtimes else ValueError)(f"Rank {rank}: {message}")


def check_same_settings(args, model, peft_config=None, train_dataset=None, reward_funcs=None, **others) -> None:
    """
    Raises `ValueError`, on every rank, with the name of a field or an argument that differs between the ranks of a run,
    which would otherwise train different models or wait for each other for ever. All ranks must call it.
    """
    settings = {name: _plain(value) for name, value in args.to_dict().items() if name not in OF_A_RANK}
    settings["model"] = name_of(model)
    settings["peft_config"] = _plain(peft_config and peft_config.to_dict())
    settings["train_dataset"] = f"{len(train_dataset)} rows" if hasattr(train_dataset, "__len__") else "a stream"
    rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    settings["reward_funcs"] = str([getattr(reward, "__name__", type(reward).__name__) for reward in rewards])
    found = gather_object([(platform.node(), settings)])
    host, first = found[0]
    for rank, (other_host, other) in enumerate(found):
        for name in {**first, **other}:
            may_differ = host != other_host and name in OF_A_HOST
            if first.get(name) != other.get(name) and not may_differ:
                told = f"{first.get(name)} on rank 0, {other.get(name)} on rank {rank}"
                raise ValueError(
                    f"`{name}` differs between the ranks of this run: {without_password(told)}. Start all ranks with "
                    "the same settings."
                )


def _plain(value) -> str:
    """Returns a setting as text that is the same in all processes: without addresses, and with sets in order."""
    if isinstance(value, dict):
        return str({key: _plain(inner) for key, inner in value.items()})
    text = str(sorted(value, key=str) if isinstance(value, set | frozenset) else value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)
