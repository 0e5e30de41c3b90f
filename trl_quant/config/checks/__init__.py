"""
What may not go together in a run, as rules: a file an idea, in the order in which they are checked.

Checks of one value stand in [`~config.values`], checks of data and functions in [`~config.data`] and its neighbours;
[`~config.before_loading`] makes all of them in their order.
"""

from ..given import Given
from . import adapter, asynchronous, correction, critic, diffusion, exact, machine, sampler, teacher, training, vllm
from .rule import Rule, check_rules


# idea -> its rules
RULES: dict[str, tuple[Rule, ...]] = {
    "diffusion": diffusion.RULES,
    "machine": machine.RULES,
    "asynchronous": asynchronous.RULES,
    "sampler": sampler.RULES,
    "critic": critic.RULES,
    "teacher": teacher.RULES,
    "vllm": vllm.RULES,
    "adapter": adapter.RULES,
    "exact": exact.RULES,
    "correction": correction.RULES,
    "training": training.RULES,
}


def check_what(needs: str, run: Given) -> None:
    """
    Checks the rules that need just this to be known (see [`Rule`]).

    Raises:
        `ValueError` or `ImportError`: The run breaks a rule. The message says which, and what to do.
    """
    check_rules((rule for rules in RULES.values() for rule in rules if rule.needs == needs), run)
