"""The findings of `trl-quant report`: each is said where its metrics call for it, and only there."""

import inspect
import math

import pytest
from places import ROOT
from run_logs import climbing, log, noisy

from trl_quant.corrections import CORRECTIONS
from trl_quant.precisions import PRECISIONS
from trl_quant.report import findings
from trl_quant.report.runs import Group, Run


WEIGHT = "sampling/importance_sampling_ratio"


POSITIONS = {"mismatch__by_position__0-15": 1e-3, "mismatch__by_position__16-63": 2e-3}
SYNC = {"sync_check__bound": 0.1, "sync_check__logp_difference": 0.09}
WEIGHTS = {"weights__normalized_update": 1e-3, "weights__normalized_quantization_error": 0.09}
# finding, logs in which it says nothing, a log in which it says ...
CASES = [
    (
        findings.not_a_number,
        [{"loss": 0.1}, {"loss": None}],
        {"loss": lambda i: math.nan if i > 38 else 0.1},
        "loss is not a finite number at step 39 (2 such",
    ),
    (
        findings.reward_fell,
        [
            {"reward": climbing(0.2, 0.8)},
            {"reward": noisy(0.5, 0.2)},
            {"reward": lambda i: 0.2 + 0.03 * min(i, 20) - 0.01 * max(0, i - 20)},  # a third is lost
        ],
        {
            "reward": lambda i: 0.2 + 0.03 * min(i, 20) - 0.035 * max(0, i - 20),
            "mismatch__kl_k3": climbing(1e-3, 12e-3),
        },
        "fell from 0.72 around step 24 to 0.26 while the KL grew 6 times.",
    ),
    (findings.reward_fell, [], {"reward": climbing(-1.0, -3.2)}, "fell from -1 around step 5 to -2.7."),
    (
        findings.engine_off,
        [SYNC],
        SYNC | {"sync_check__logp_difference": climbing(0.09, 0.3)},
        "At step 21 the engine was 0.1 nats",
    ),
    (
        findings.kl_grew,
        [{"mismatch__kl_k3": climbing(1e-3, 3e-3)}, {"mismatch__kl_k3": climbing(1e-9, 9e-5)}],
        {"mismatch__kl_k3": climbing(1e-3, 1e-2)},
        "grew 8 times, from 0.001 to 0.008, rising since step 25",
    ),
    (
        findings.later_tokens_worse,
        [POSITIONS, {"mismatch__by_position__0-15": 1e-3}, dict(zip(POSITIONS, (1e-6, 9e-5), strict=True))],
        POSITIONS | {"mismatch__by_position__256-": 6e-3},
        "Tokens from 256 on have 6 times the KL of the first 16",
    ),
    (
        findings.weights_off_one,
        [{"mismatch__weight_mean": 1.04}, {"mismatch__weight_mean": 0.96}],
        {"mismatch__weight_mean": 0.9},
        "mean weight is 0.90",
    ),
    (
        findings.few_effective_samples,
        [{"mismatch__ess_ratio": 0.951}],
        {"mismatch__ess_ratio": climbing(0.99, 0.6)},
        "Only 69% of the samples",
    ),
    (
        findings.heavy_weight,
        [{"mismatch__max_weight": 99.0}],
        {"mismatch__max_weight": lambda i: 500.0 if i in (7, 9) else 2.0},
        "500 at step 7, and 2 of 40",
    ),
    (
        findings.capped,
        [{"mismatch__cap_fraction": 0.0099}, {"mismatch__cap_fraction": lambda i: 0.09 * (i == 20)}],
        {"mismatch__cap_fraction": climbing(0.001, 0.04)},
        "1 token in 32 at the cap, rising since step 25",
    ),
    (
        findings.capped,
        [],
        {"mismatch__cap_fraction": lambda i: 0.125 * (i < 20)},
        "1 token in 8 was at the cap around step 5; at the end 0 of them",
    ),
    (
        findings.dropped,
        [{"mismatch__dropped_fraction": 0.049}],
        {"mismatch__dropped_fraction": 0.5},
        "50% of the tokens dropped by the correction: take",
    ),
    (
        findings.dropped,
        [],
        {"mismatch__dropped_fraction": lambda i: 0.6 * (i < 20)},
        "60% of the tokens were dropped by the correction around step 5; at the end 0 of them",
    ),
    (
        findings.clipped,
        [{"clip_ratio__region_mean": 0.19}],
        {"clip_ratio__region_mean": 0.25},
        "1 token in 4 clipped by the loss: ",
    ),
    (
        findings.unscored,
        [{"mismatch__unscored_fraction": 0.0}],
        {"mismatch__unscored_fraction": 0.001},
        "1 token in 1000 around step 5",
    ),
    (
        findings.entropy_gone,
        [{"entropy": climbing(1.0, 0.2)}],
        {"entropy": climbing(1.0, -0.2, at=20)},
        "fell from 1 to",
    ),
    (findings.entropy_gone, [], {"entropy": 0.0}, "The entropy is 0 nats: the policy explores nothing."),
    (findings.same_rewards, [{"frac_reward_zero_std": 0.79}], {"frac_reward_zero_std": 0.9}, "In 90% of the groups"),
    (
        findings.cut_off,
        [{"completions__clipped_ratio": 0.24}],
        {"completions__clipped_ratio": 0.4},
        "40% of the completions",
    ),
    (findings.alpha_full, [{"ais__alpha": 0.94}], {"ais__alpha": 1.0}, "(alpha 1.00)"),
    (
        findings.noise_lost,
        [
            {"noise__sigma": 1e-2, "noise__effective_sigma": 0.85e-2},
            {"noise__sigma": 0.0, "noise__effective_sigma": 0.0},
        ],
        {
            "noise__sigma": climbing(1e-2, 5e-4),
            "noise__effective_sigma": lambda i: 1e-4 if i == 40 else climbing(1e-2, 5e-4)(i),
        },
        "sigma 0.0005 was asked for, 0.0001 arrived: norms in BF16 swallow it",
    ),
    (
        findings.noise_lost,
        [],
        {"noise__sigma": 1e-3, "noise__effective_sigma": 2e-3},
        "0.002 arrived: norms in BF16 round it up",
    ),
    (
        findings.update_buried,
        [WEIGHTS, WEIGHTS | {"weights__codes_changed": 0.0011}, WEIGHTS | {"weights__normalized_update": 0.0}],
        WEIGHTS | {"weights__codes_changed": 0.0009},
        "by 0.001 of their size, the format rounds by 0.09, and 0.1% of the codes change",
    ),
    (
        findings.update_buried,
        [],
        WEIGHTS | {"weights__normalized_update": 8e-4},
        "by 0.0008 of their size, the format rounds by 0.09: the",
    ),
]


CASES += [
    (
        findings.left_reference,
        [
            {"kl": climbing(1e-4, 0.9)},  # a policy that learns leaves its reference slowly
            {"kl": climbing(3.0, 12.0)},  # as large from the start
            {"kl": lambda i: 0.0 if i < 30 else 0.5},
        ],
        {"kl": lambda i: 249.0 if i == 33 else 0.02},
        "reached 249 at step 33, where 0.02 was usual, and passed 1 at 1 of 40 logged steps: try a lower",
    ),
    (findings.left_reference, [], {"kl": climbing(0.0, 60.0)}, "reached 60 at step 40"),
    (
        findings.gradient_exploded,
        [{"grad_norm": noisy(0.3, 0.25)}, {"grad_norm": lambda i: 0.9 if i == 7 else 0.05}, {"grad_norm": 61.0}],
        {"grad_norm": lambda i: 61.0 if i in (9, 12) else 1.5},
        "reached 61 at step 9, where 1.5 was usual, and passed 15 at 2 of 40",
    ),
]


@pytest.mark.parametrize(("finding", "well", "sick", "says"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_finding_is_there_where_it_should_be_and_only_there(finding, well, sick, says):
    assert says in finding(Run("sick", log(**sick)))
    for metrics in [{}, *well]:
        assert finding(Run("well", log(**metrics))) is None
    if finding not in (findings.not_a_number, findings.heavy_weight, findings.engine_off, findings.noise_lost):
        assert finding(Run("short", log(**sick)[:4])) is None  # too little to judge


def test_every_finding_has_its_case():
    assert {case[0] for case in CASES} | {findings.unfit_correction} == set(findings.FINDINGS)


def test_another_correction_is_advised_before_another_scale():
    """For every pair of a precision of 4 bits and a correction that fails there, and for no other one."""
    buried = log(**WEIGHTS | {"weights__codes_changed": 1e-4})
    for precision in PRECISIONS:
        for name, correction in CORRECTIONS.items():
            run = Run("run", buried, settings={"rollout_precision": precision, "is_correction": name})
            told = findings.findings(Group("run", [run]))
            advised = any("take another correction" in line.lower() for line in told)
            assert advised == (correction.unfit_for_few_bits and precision in ("int4", "nf4", "nvfp4", "mxfp4"))
            assert any("`uaq_scale`" in line for line in told) != advised
    assert [name for name, correction in CORRECTIONS.items() if correction.unfit_for_few_bits] == ["coupled"]
    assert findings.unfit_correction(Run("run", buried, settings={"rollout_precision": "int4"})) is None


def test_a_run_that_explodes_is_not_well():
    """Whatever else is; its sound twin is."""
    exploded = {"kl": lambda i: 249.0 if i > 35 else 0.02, "grad_norm": lambda i: 61.0 if i == 33 else 0.6}
    sound = LEARNING | MISMATCH | {"kl": 0.02, "grad_norm": 0.6}
    assert said(log(**sound)) == "All well."
    assert [line.partition(" reached")[0] for line in said(log(**sound | exploded))] == [
        "The KL to the reference model",
        "The gradient norm",
    ]


@pytest.mark.parametrize("n", [*range(5, 15), 15, 20, 40])
def test_no_step_is_part_of_both_ends(n):
    """Or a change of a short run would be told as a smaller one, or not at all."""
    half = Run("run", log(n, mismatch__kl_k3=lambda i: 1e-3 if i <= n // 2 else 1e-2))
    assert findings.ends(half, "mismatch/kl_k3") == pytest.approx((1e-3, 1e-2) if n != 15 else (1e-3, 8.2e-3))
    assert findings.kl_grew(half) and findings.kl_grew(Run("run", log(n, mismatch__kl_k3=1e-3))) is None


def test_the_docs_and_findings_have_the_same_thresholds():
    lines = (ROOT / "docs/metrics.md").read_text().splitlines()
    rows = {row.split("`")[1]: row for row in lines if row.startswith("| `")}
    said = {
        ("mismatch/ess_ratio", findings.few_effective_samples): "below {below:g}",
        ("mismatch/max_weight", findings.heavy_weight): "above {above:g}",
        ("mismatch/cap_fraction", findings.capped): "above {above:g}",
        ("mismatch/dropped_fraction", findings.dropped): "above {above:g}",
        ("weights/normalized_update", findings.update_buried): "{times:g} times below",
    }
    for (metric, finding), words in said.items():
        thresholds = {name: p.default for name, p in inspect.signature(finding).parameters.items() if name != "run"}
        assert words.format(**thresholds) in rows[metric]


def test_a_rise_begins_where_it_began():
    steps = list(range(100))
    flat_then_up = [1.0] * 60 + [1.0 + i for i in range(1, 41)]
    assert findings.rising(steps, flat_then_up) == ", rising since step 63"  # 4 of 40 is a tenth of the way
    assert findings.rising(steps, [1.0 + 0.004 * i for i in steps]) == ""
    assert findings.rising(steps, flat_then_up[::-1]) == ""


LEARNING = {"reward": 0.5, "entropy": 1.0, "frac_reward_zero_std": 0.1, "completions__clipped_ratio": 0.0}
MISMATCH = {"mismatch__weight_mean": 1.0, "mismatch__ess_ratio": 1.0, "mismatch__max_weight": 1.1}
MISMATCH |= {"mismatch__kl_k3": 1e-3, "mismatch__unscored_fraction": 0.0}


def said(*logs) -> list[str] | str:
    """What the report says of a group of runs."""
    group = Group("g", [Run(f"run{i}", rows) for i, rows in enumerate(logs)])
    return findings.findings(group) or findings.verdict(group)


def without(metrics: dict, *names: str) -> dict:
    return {name: value for name, value in metrics.items() if name not in names}


def test_all_well_is_said_only_where_it_is_so():
    learning, seen = LEARNING, LEARNING | MISMATCH
    well = log(**seen)
    assert said(well) == "All well."
    assert said(log(**learning)) == (
        "All well in what was logged. The mismatch was not logged: without a `rollout_precision` there is none to "
        "measure."
    )
    for name in seen.keys() - {"reward"}:
        unseen = log(**without(seen, name))
        for runs in ((unseen,), (well, unseen), (well, [*unseen[:-1], *well[-1:]])):  # at no step, and at one
            found = said(*runs)
            assert found.startswith("Nothing stands out") and found.endswith(f": {name.replace('__', '/')}."), found
    assert "The mismatch was not logged" in said(log(reward=0.5)) and "All well" not in said(log(reward=0.5))
    assert "Nor was entropy, frac_reward_zero_std and completions/clipped_ratio" in said(log(reward=0.5))
    assert said(well[:4]) == "Too little to judge: the reward was logged at 4 steps."
    assert said(well, well[:1]) == "Too little to judge: the reward was logged at 1 step."
    assert said([]) == "Too little to judge: the reward was logged at 0 steps."
    assert said(log(reward=lambda i: None, loss=0.1)) == "Too little to judge: the reward was logged at 0 steps."
    sick = log(reward=0.5, mismatch__kl_k3=climbing(1e-3, 1e-2))
    (line,) = said(well, sick, sick)
    assert line.startswith("The mismatch KL grew 8 times") and line.endswith("(run1; 2 of 3 runs)")
    assert said(sick) == [line.removesuffix(" (run1; 2 of 3 runs)")]


def test_ppo_needs_no_groups_of_rewards():
    """Its critic stands in for them. All else that it logs is needed, and GRPO's groups still are."""
    seen = without(LEARNING | MISMATCH, "frac_reward_zero_std")
    assert said(log(**seen, value__loss=0.1)) == "All well."
    assert said(log(**seen)).endswith(": frac_reward_zero_std.")
    assert said(log(**seen, value__loss=0.1), log(**seen)).endswith(": frac_reward_zero_std.")
    assert said(log(**without(seen, "entropy"), value__loss=0.1)).endswith(": entropy.")


def test_distillation_is_judged_without_rewards():
    """By the steps with a loss, or with a mismatch alone. One run with a reward makes the group one with rewards."""
    seen = without(LEARNING | MISMATCH, "reward", "frac_reward_zero_std")
    none = "No reward was logged, so none was judged."
    distilled = log(**seen, loss=0.1)
    assert said(distilled) == said(log(**seen)) == f"All well. {none}"
    assert said(distilled[:4]) == f"Too little to judge: the loss was logged at 4 steps. {none}"
    assert said(distilled, distilled[:1]) == f"Too little to judge: the loss was logged at 1 step. {none}"
    assert said(log(**seen)[:4]) == f"Too little to judge: the mismatch KL was logged at 4 steps. {none}"
    assert said(log(**without(seen, "entropy"), loss=0.1)).endswith(f": entropy. {none}")
    assert said(distilled, log(**LEARNING)) == "Too little to judge: the reward was logged at 0 steps."
    (line,) = said(log(**seen | {"mismatch__kl_k3": climbing(1e-3, 1e-2)}, loss=0.1))
    assert line.startswith("The mismatch KL grew 8 times")
