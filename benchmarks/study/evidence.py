"""What the stored runs say of each piece of advice and of each claim of the papers: the tables of docs/evidence.md.

python benchmarks/study/evidence.py      # writes them into the page
"""

import re
from functools import cache
from math import sqrt
from pathlib import Path

from cells import QUESTIONS
from paired import critical, difference, differences
from table import stored

from trl_quant.report.runs import Group, Run
from trl_quant.storage.whole import write_whole


STUDY = Path(__file__).parents[1] / "results" / "study"
DOCS = Path(__file__).parents[2] / "docs" / "evidence.md"
LEVEL = 0.05
U1, U4 = "one update a generation", "four updates a generation"
OUTLIERS = "INT8, outliers in the activations"
TEXT = "MXFP4, text"

# Where -> question, cell, and the cell that it is compared with
Rows = dict[str, tuple[str, str, str]]


def against_tis(name: str) -> Rows:
    """The designed comparisons of a correction with `tis`, in each question that has them."""
    rows = {
        f"{precision.upper()}, {where}": ("stage_1", f"{precision} {name} u{updates}", f"{precision} tis u{updates}")
        for precision in ("fp8", "int4")
        for updates, where in ((1, U1), (4, U4))
        if (name, updates) != ("acr", 1)  # where it is `tis`
    }
    rows[f"INT4, {U4}, more seeds"] = ("stage_2", f"int4 {name} u4", "int4 tis u4")
    rows[OUTLIERS] = ("stage_3_outliers", f"int8 {name}", "int8 tis")
    rows[TEXT] = ("stage_3_text", f"mxfp4 {name}", "mxfp4 tis")
    rows["INT4, asynchronous, age 3"] = ("asynchronous", f"int4 {name} a3", "int4 tis a3")
    return {where: row for where, row in rows.items() if row in designed()}


@cache
def designed() -> dict[tuple[str, str, str], dict]:
    """All comparisons that were designed before they ran: question, cell and the other -> `paired.differences`."""
    return {
        (name, row["cell"], row["against"]): row
        for name, question in QUESTIONS.items()
        if question.compared and (STUDY / f"{name}.json.xz").exists()
        for row in differences(question, groups_of(name))
    }


@cache
def groups_of(question: str) -> list[Group]:
    return stored(STUDY / f"{question}.json.xz")[1]


def ended(run: Run) -> float:
    """Returns the accuracy at a run's end: over several draws where there are some, else of the last evaluation."""
    return (run.values("final_accuracy") or run.values("eval_accuracy"))[-1]


def compared(row: tuple[str, str, str]) -> dict:
    """Returns the difference; it has `holm` where the comparison was designed."""
    if row in designed():
        return designed()[row]
    question, cell, against = row
    values = {group.name: {run.settings["seed"]: ended(run) for run in group.runs} for group in groups_of(question)}
    return difference(values[cell], values[against])


def seen_from(found: dict) -> float:
    """Returns the difference that such pairs find with a probability of about 80%, by one comparison alone."""
    df = found["pairs"] - 1
    return (critical(df) + critical(df, 0.6)) * found["sd"] / sqrt(found["pairs"])


def is_apart(found: dict) -> bool:
    return found.get("holm", 1) < LEVEL


def judged(found: dict) -> str:
    if "holm" not in found:
        return "one model"
    return f"**told apart**, p {found['holm']:.2g}" if is_apart(found) else "not told apart"


def table(first: str, rows: dict[str, Rows]) -> str:
    lines = [f"| {first} | where | stored as | pairs | difference, 95% | 80% from | |", "|" + "---|" * 7]
    for text, of_text in rows.items():
        for where, row in of_text.items():
            found = compared(row)
            numbers = "{pairs} | {mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**found)
            question, cell, against = row
            names = f"{question}: {cell} - {against}"
            lines.append(f"| {text} | {where} | {names} | {numbers} | {seen_from(found):.3f} | {judged(found)} |")
            text = ""
    return "\n".join(lines) + "\n"


def outcome(sign: int, rows: Rows) -> str:
    """Returns what the designed comparisons say of a claim that a difference is above 0 (1), or below it (-1)."""
    found = [compared(row) for row in rows.values()]
    apart = [each for each in found if is_apart(each)]
    for_it = sum(each["mean"] * sign > 0 for each in apart)
    told = [f"holds in {for_it}"] * bool(for_it) + [f"is contradicted in {len(apart) - for_it}"] * (for_it < len(apart))
    return f"**{' and '.join(told).capitalize()} of {len(found)} settings.**" if told else "**Cannot be told.**"


FLIGHT = {
    f"{precision.upper()}, factor {factor}": ("in_flight", f"{precision} tis x{factor}", f"{precision} tis x1")
    for precision in ("bf16", "int4")
    for factor in (2, 3)
}
FLIGHT["BF16, factor 3, `ais` against `tis`"] = ("in_flight", "bf16 ais x3", "bf16 tis x3")
AGE = {
    f"{precision.upper()}, age {age}": ("asynchronous", f"{precision} tis a{age}", f"{precision} tis a0")
    for precision in ("bf16", "int8", "int4")
    for age in (1, 3)
}
REPLAY = {
    f"mixture, {precision.upper()}": ("routing", f"{precision} replay", f"{precision} no replay")
    for precision in ("bf16", "int8", "fp8", "int4")
}
FULL = {
    **{
        f"{precision.upper()}, {where}": ("stage_1", f"{precision} tis u{updates}", f"full precision u{updates}")
        for precision in ("fp8", "int4")
        for updates, where in ((1, U1), (4, U4))
    },
    f"INT4, {U4}, more seeds": ("stage_2", "int4 tis u4", "full precision u4"),
    TEXT: ("stage_3_text", "mxfp4 tis", "full precision"),
    OUTLIERS: ("stage_3_outliers", "int8 tis", "full precision"),
}
SEQUENCES = {
    f"INT4, {U4}": ("stage_2", "int4 tis, sequences, u4", "int4 tis u4"),
    f"INT4, {U4}, against full precision": ("stage_2", "int4 tis, sequences, u4", "full precision u4"),
    OUTLIERS: ("stage_3_outliers", "int8 tis, sequences", "int8 tis"),
}
SCALED = {f"INT4, {U4}": ("stage_2", "int4 tis, scaled steps, u4", "int4 tis u4")}
FEW = "INT8, AdamW, few codes change"
SCALES = {
    FEW: ("scales", "int8 s=1.5", "int8"),
    f"{FEW}, scaled by 2": ("scales", "int8 s=2", "int8"),
    f"{FEW}, 1.5 times the learning rate instead": ("scales", "int8 faster", "int8"),
    f"{FEW}, scaled by 1.5, against that": ("scales", "int8 s=1.5", "int8 faster"),
    f"{FEW}, scaled by 2, against that": ("scales", "int8 s=2", "int8 faster"),
    "full precision, 1.5 times the learning rate": ("scales", "full precision faster", "full precision"),
}
UAQ = {
    FEW: SCALES[FEW],
    **{
        f"{precision.upper()}, {optimizer}": ("uaq", f"{precision} {name} s=1.5", f"{precision} {name} s=1")
        for precision in ("int8", "fp8")
        for name, optimizer in (("adamw", "AdamW"), ("sgd", "SGD"))
    },
}
NOISE = {
    "NVFP4 base, from 0.01": ("noisy_base", "nvfp4 noise 0.01", "nvfp4"),
    "NVFP4 base, from 0.05": ("noisy_base", "nvfp4 noise 0.05", "nvfp4"),
    "NVFP4, no correction": ("noise", "nvfp4 none exponential", "nvfp4 none silent"),
    "NVFP4, `acr`": ("noise", "nvfp4 acr exponential", "nvfp4 acr silent"),
}
UNIFIED = {
    "FP8, completions of 34 tokens": ("unified", "fp8 unified", "fp8 tis"),
    "INT8, completions of 34 tokens": ("unified", "int8 unified", "int8 tis"),
    "FP8 by blocks, 1030 tokens": ("rollouts", "fp8_block unified", "fp8_block none"),
    "INT8, outliers, 900 steps": ("endurance", "int8 unified", "int8 tis"),
}
EXPERTS = {
    f"mixture, INT4, {where}": ("stage_3_experts", f"int4 cis {where}", f"int4 tis {where}")
    for where in ("replay", "no replay")
}
REUSED = "MXFP4, 99 tokens, four updates, a large learning rate"
ADVICE = {
    "`coupled` is no choice in 4 bits, nor where activations have outliers": against_tis("coupled"),
    "`tis` stays the default. `acr` is not shown to be better": against_tis("acr"),
    "Nor is `ais`": against_tis("ais"),
    "Nor is `icepop`": against_tis("icepop"),
    "Nor is `cis`": against_tis("cis") | EXPERTS,
    "Nor is `none`, and in 4 bits with several updates it is worse": against_tis("none"),
    "Weights of whole sequences stay off: with several updates a run ends below full precision": SEQUENCES,
    "`ess_step_scaling` stays off": SCALED,
    "`uaq_scale` stays off: where it gains, a larger learning rate gains too": SCALES,
    "What quantized samples cost with the default": FULL,
    "What `rollouts_in_flight` costs, with the default": FLIGHT,
    "What the age of samples costs in asynchronous training, with the default": AGE,
    "`router_replay` stays on for its mismatch. A gain in accuracy is not shown": REPLAY,
    "`train_precision` is for speed. A gain or a loss in accuracy is not shown": UNIFIED,
}
# What is claimed -> the sign of the difference that it asks for, and where it was looked for
CLAIMS = {
    "QuRL: with the sampler as the old policy (`coupled`) a run learns less": (-1, against_tis("coupled")),
    "QuRL: with `acr` it learns more than with `tis`": (
        1,
        {
            **against_tis("acr"),
            REUSED: ("reuse", "mxfp4 acr", "mxfp4 tis"),
            "PPO, MXFP4": ("ppo", "mxfp4 acr", "mxfp4 tis"),
        },
    ),
    "QuRL: scaled by 1.5 (`uaq_scale`) it learns more": (1, UAQ),
    "QuRL: and more than with a larger learning rate": (
        1,
        {where: row for where, row in SCALES.items() if row[2] == "int8 faster"},
    ),
    "QuRL: with a larger scale, 2, or learning rate it learns less": (
        -1,
        {where: row for where, row in SCALES.items() if row[1:] in (("int8 s=2", "int8"), ("int8 faster", "int8"))},
    ),
    "AIS: from FP8 samples without a correction it learns less than from full precision": (
        -1,
        {
            "text": ("words", "fp8 none", "full precision"),
            "12 digits": ("length", "fp8 none 12 digits", "full precision 12 digits"),
        },
    ),
    "AIS: with `ais` it learns more than with `tis`": (
        1,
        {
            **against_tis("ais"),
            REUSED: ("reuse", "mxfp4 ais", "mxfp4 tis"),
            "masked diffusion, INT8, outliers": ("diffusion", "int8 ais, outliers", "int8 tis, outliers"),
        },
    ),
    "QeRL: LoRA learns more on an NVFP4 base": (
        1,
        {
            "NVFP4, the sampler shares the base": ("noisy_base", "nvfp4", "full precision"),
            "NVFP4, sampled beside the base": ("adapter", "nvfp4 beside tis", "full precision"),
            "NVFP4, trained on the base too": ("qat", "nvfp4 frozen base", "full precision, adapter"),
        },
    ),
    "QeRL: with noise in the sampler's norms it learns more": (1, NOISE),
    "Jet-RL: trained in the sampler's FP8 it learns more than from FP8 samples alone": (
        1,
        {where: row for where, row in UNIFIED.items() if "FP8" in where},
    ),
    "CIS: with `cis` it learns more than with `tis`": (1, against_tis("cis") | EXPERTS),
    "VCPO: with smaller steps where the effective sample size is small (`ess_step_scaling`) it learns more": (
        1,
        SCALED,
    ),
}


def rewritten(page: str) -> str:
    """Returns the page with its two tables as the stored runs have them."""
    claims = {f"{text}. {outcome(sign, rows)}": rows for text, (sign, rows) in CLAIMS.items()}
    for first, rows in (("advice", ADVICE), ("claim", claims)):
        page = re.sub(rf"(?m)^\| {first} \|.*\n(\|.*\n)+", table(first, rows), page)
    return page


if __name__ == "__main__":
    write_whole(DOCS, rewritten(DOCS.read_text("utf-8")).encode())
