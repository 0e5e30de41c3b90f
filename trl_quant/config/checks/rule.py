"""
A rule says what may not go together in a run, and what to do instead.

    Rule(
        fields=("sync_ref_model", "beta"),
        when=lambda run: run.args.sync_ref_model and not run.args.needs_reference,
        message="`sync_ref_model`=True with `beta`={args.beta!r}: there is no reference model to sync.",
    )

`when` gets what is known of the run, a [`~config.given.Given`], and returns something true where the run breaks the
rule. The message is a template: it may name `args`, `run`, and `found`, which is what `when` has returned.

A rule is checked as soon as what it `needs` is known:

| `needs` | reads |
|---|---|
| `"fields"` | the config alone, which is checked while it is built |
| `"arguments"` | the trainer's other arguments too: the adapter, `quantization_config`, `rollout_func` |
| `"machine"` | the libraries and devices of this machine |
| `"model"` | the configs of the models |
| `"start"` | the policy's config and this machine, on which vLLM starts |
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from ...run_spec import INDEPENDENT
from ..given import Given


logger = logging.getLogger(__name__)

NEEDS = ("fields", "arguments", "machine", "model", "start")


@dataclass(frozen=True)
class Rule:
    """
    What may not go together.

    Parameters:
        fields (`tuple[str, ...]`):
            The fields that the rule is about. It holds only for configs that have all of them.
        when (`Callable`):
            Takes a [`~config.given.Given`]. Returns something true where the run breaks the rule.
        message (`str`):
            The error, as a template of `args`, `run` and `found`.
        needs (`str`, *optional*, defaults to `"fields"`):
            What must be known, one of [`NEEDS`].
        error (`type[Exception]` or `None`, *optional*, defaults to `ValueError`):
            What is raised; `None` for a rule that only warns.
    """

    fields: tuple[str, ...]
    when: Callable[[Given], Any]
    message: str
    needs: str = "fields"
    error: type[Exception] | None = ValueError

    def broken(self, run: Given) -> str | None:
        """Returns the message for a run that breaks the rule; `None` for any other."""
        if not all(hasattr(run.args, name) for name in self.fields):
            return None
        found = self.when(run)
        return self.message.format(args=run.args, run=run, found=found) if found else None

    def check(self, run: Given) -> None:
        """Raises the rule's error for a run that breaks it, or warns."""
        message = self.broken(run)
        if message is None:
            return
        if self.error is not None:
            raise self.error(message)
        logger.warning("%s", message)


def check_rules(rules: Iterable[Rule], run: Given) -> None:
    """Checks rules in their order, so that the first one that the run breaks is reported."""
    for rule in rules:
        rule.check(run)


def assigned(args, names: Iterable[str]) -> str:
    """
    Returns those of some fields that have another value than their default, as "`a`=1 and `b`=2"; empty if there are
    none. A default that follows from other fields does not count as assigned.
    """
    default = {f.name: f.default for f in fields(args)} | INDEPENDENT
    given = [name for name in names if name in default and name not in args.derived]  # others are a class's constants
    found = [name for name in given if getattr(args, name) not in (default[name], {})]
    return " and ".join(f"`{name}`={getattr(args, name)!r}" for name in found)


def acts_only(names: tuple[str, ...], needed: str, where: Callable[[Given], Any], needs: str = "fields") -> Rule:
    """
    Returns the rule for fields that would do nothing in some runs.

    Args:
        names (`tuple[str, ...]`): The fields.
        needed (`str`): What they act with, for the message; a template like a rule's.
        where (`Callable`): Takes a [`~config.given.Given`]. Returns whether the fields act.
        needs (`str`, *optional*, defaults to `"fields"`): What must be known, one of [`NEEDS`].
    """
    return Rule(
        fields=names,
        when=lambda run: not where(run) and assigned(run.args, names),
        message="{found} acts only with " + needed + ".",
        needs=needs,
    )


def refusal(check: Callable, *given, error: type[Exception] = ValueError) -> str | None:
    """Returns what a check, which others call too, says against its arguments; `None` if it accepts them."""
    try:
        check(*given)
    except error as refused:
        return str(refused)
    return None
