"""
What goes with what: one table for each pair of ideas, made from the rules in [`~config.checks`].

A cell says whether a run can have both values. It is sought among the runs of GRPO under DDP (or of the table's own
trainer and sharding) with every engine, precision and adapter; only rules that need neither a model's config nor a
machine are asked. `python -m trl_quant.config.pairs` prints docs/combinations.md.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from types import SimpleNamespace

from peft import LoraConfig

from ..precisions import PRECISIONS, train_precisions
from .async_grpo import QuantAsyncGRPOConfig
from .checks import RULES
from .diffusion import DiffusionGRPOConfig
from .distillation import QuantDistillationConfig
from .fields import QuantFields
from .given import Given
from .grpo import QuantGRPOConfig
from .ppo import QuantPPOConfig
from .rloo import QuantRLOOConfig


UNSET = "not set"
# The rules that are asked, in their order
PAIR_RULES = [
    rule
    for rules in RULES.values()
    for rule in rules
    if rule.needs in ("fields", "arguments") and rule.error is not None
]
# idea -> the name of a value -> what a run with that value is built with
IDEAS: dict[str, dict[str, dict]] = {
    "trainer": {
        "GRPO": {"config_class": QuantGRPOConfig},
        "RLOO": {"config_class": QuantRLOOConfig},
        "PPO": {"config_class": QuantPPOConfig},
        "distillation": {"config_class": QuantDistillationConfig},
        "masked diffusion": {"config_class": DiffusionGRPOConfig},
        "asynchronous GRPO": {"config_class": QuantAsyncGRPOConfig},
    },
    "engine": {
        "embedded": {"use_vllm": False},
        "vLLM": {"use_vllm": True, "vllm_mode": "colocate"},
        "vLLM server": {"use_vllm": True, "vllm_mode": "server"},
    },
    "`rollout_precision`": {name: {"rollout_precision": name} for name in PRECISIONS},
    "`train_precision`": {
        UNSET: {"train_precision": None},
        **{name: {"train_precision": name} for name in train_precisions()},
    },
    "sharding": {
        "DDP": {},
        "FSDP1": {"fsdp_plugin_args": {"fsdp_version": 1}},
        "FSDP2": {"fsdp_plugin_args": {"fsdp_version": 2}},
        "ZeRO-2": {"deepspeed_plugin": SimpleNamespace(zero_stage=2)},
        "ZeRO-3": {"deepspeed_plugin": SimpleNamespace(zero_stage=3)},
    },
    "adapter": {
        "none": {"is_adapted": False},
        **{f"LoRA, `lora_sync={way!r}`": {"is_adapted": True, "lora_sync": way} for way in ("merge", "adapter")},
    },
}
OTHERWISE_FIXED = {"trainer": ["GRPO"], "sharding": ["DDP"]}  # the values of a run in tables of other ideas
INTRODUCTION = """# What goes with what

Each table pairs two ideas, and each cell says whether a run can have both: ✓, or the number of the rule against it.
The rules stand below their table, each with its message for the first cell that has its number. A table without a
trainer is about GRPO, and a table without sharding about DDP. The tables leave out what depends on the model (its
family, its experts, its positions) and on the machine: `trl-quant plan` and `--dry_run true` check a run with both.
This page is made from the rules in `trl_quant/config/checks`:
`python -m trl_quant.config.pairs > docs/combinations.md`.
"""


@cache
def _plain(config_class: type[QuantFields]) -> QuantFields:
    """Returns a config with nothing set."""
    needed = {"scale_rewards": "none"} if config_class is QuantPPOConfig else {}
    return config_class(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **needed)


def run_with(values: dict[str, str]) -> Given:
    """Returns the run that has these values, idea -> the name of a value, unchecked."""
    chosen = {}
    for idea, value in values.items():
        chosen |= IDEAS[idea][value]
    args = _plain(chosen.pop("config_class")).having(**chosen)
    return Given(args, "policy", {"peft_config": LoraConfig() if args.is_adapted else None})


@cache
def broken(*values: tuple[str, str]) -> tuple[int, str] | None:
    """
    Returns the first rule that a run with these pairs of idea and value breaks, as its number and its message; `None`
    if the run can be started.
    """
    run = run_with(dict(values))
    for number, rule in enumerate(PAIR_RULES):
        message = rule.broken(run)
        if message is not None:
            return number, message
    return None


def runs_with(pair: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yields the values of all runs that have two values, the plainest first."""
    values = [[pair[idea]] if idea in pair else OTHERWISE_FIXED.get(idea, IDEAS[idea]) for idea in IDEAS]
    yield from (dict(zip(IDEAS, chosen, strict=True)) for chosen in product(*values))


def against(pair: dict[str, str]) -> tuple[int, str] | None:
    """
    Returns what is against two values: the rule at which that run ends that gets furthest, as its number and its
    message. Returns `None` if a run can be started.
    """
    furthest = None
    for values in runs_with(pair):
        found = broken(*values.items())
        if found is None:
            return None
        if furthest is None or found[0] > furthest[0]:
            furthest = found
    return furthest


def table(first: str, second: str) -> str:
    """Returns the table of two ideas, and below it the messages of the rules that its numbers name."""
    cells = {
        (row, column): against({first: row, second: column}) for row, column in product(IDEAS[first], IDEAS[second])
    }
    title = f"## {first[0].upper()}{first[1:]} and {second}"
    if not any(cells.values()):
        return f"{title}\n\nAll go together.\n"
    messages: dict[int, str] = {}  # rule -> the message of its first cell
    for found in filter(None, cells.values()):
        messages.setdefault(*found)
    marks = {rule: str(number) for number, rule in enumerate(messages, 1)}
    lines = [title, "", "| | " + " | ".join(IDEAS[second]) + " |", "|---" * (1 + len(IDEAS[second])) + "|"]
    for row in IDEAS[first]:
        found = [cells[row, column] for column in IDEAS[second]]
        lines.append(f"| {row} | " + " | ".join("✓" if one is None else marks[one[0]] for one in found) + " |")
    return "\n".join([*lines, "", *(f"{marks[rule]}. {message}" for rule, message in messages.items()), ""])


def markdown() -> str:
    """Returns docs/combinations.md."""
    return "\n".join([INTRODUCTION, *(table(*pair) for pair in combinations(IDEAS, 2))])


if __name__ == "__main__":
    print(markdown(), end="")
