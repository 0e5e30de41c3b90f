"""Finds what stands out in a run, and says it in plain words.

Each finding is a function of a run, with its thresholds as defaults, that returns a sentence or `None`. Findings use
moving averages, so that a single odd step is not reported. A metric must be logged at `ENDS` steps or more.
docs/metrics.md tells users the same thresholds.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf
from statistics import fmean, median

from ..corrections import CORRECTIONS
from ..precisions import four_bits
from .runs import ENDS, KL, LARGEST, LOSS, REWARD, Group, Run, is_number


POSITION = "mismatch/by_position/"
REFERENCE_KL, GRADIENT = "kl", "grad_norm"  # TRL's and transformers' names
CRITIC = "value/"  # prefix of metrics that only PPO logs
SAME_REWARDS = "frac_reward_zero_std"
BUCKET = re.compile(re.escape(POSITION) + r"([0-9]{1,9})-([0-9]{0,9})")  # first and last token, if it has one
ROUNDING = 1e-4  # nats a token: the KL that BF16 rounding and a few flipped codes cause
MOST_ONE_IN = 0.4  # shares from here on are written in percent
RISE = 1.5  # smallest ratio of end to start that counts as a rise


# Helpers of several findings


def smooth(run: Run, metric: str) -> tuple[list[int], list[float]]:
    """Returns steps and moving averages, from the first step with `ENDS` values to average."""
    return run.series(metric)[0][ENDS - 1 :], run.averages(metric)[ENDS - 1 :]


def rising(steps: Sequence[int], values: Sequence[float]) -> str:
    """Returns a text such as `", rising since step 400"`, or `""`. A rise begins at the last step below a tenth of its
    height."""
    start, end = values[0], values[-1]
    if end <= RISE * start:
        return ""
    low = [step for step, value in zip(steps, values, strict=True) if value <= start + 0.1 * (end - start)]
    return f", rising since step {low[-1]}"


def worst(run: Run, metric: str, largest: bool = True) -> tuple[int, float, float] | None:
    """Returns the step and the value of the worst moving average, and the value of the last one."""
    steps, values = smooth(run, metric)
    if not values:
        return None
    value = max(values) if largest else min(values)
    return steps[values.index(value)], value, values[-1]


def one_in(share: float, what: str) -> str:
    """Writes a share as `1 token in 30`, or a large one as `62% of the tokens`."""
    return f"1 {what} in {1 / share:.0f}" if share < MOST_ONE_IN else f"{share:.0%} of the {what}s"


def now(value: float, last: float, unit: Callable[[float], str]) -> str:
    """Returns a text with the value at the end of a run that recovered, or `""`."""
    return "" if abs(last - value) <= 0.1 * abs(value) else f"; at the end {unit(last)}"


def short(value: float) -> str:
    return f"{value:.2g}"


def short_number(value: float) -> str:
    """Writes a large number without an exponent."""
    return f"{value:.0f}" if 10 <= value < 1e6 else short(value)


def ends(run: Run, metric: str) -> tuple[float, float] | None:
    """
    Returns the first and the last of the moving averages of [`smooth`], or, in a run so short that these have steps in
    common, the means of its halves' ends.
    """
    values = smooth(run, metric)[1]
    if not values:
        return None
    if len(run.values(metric)) >= 3 * ENDS:
        return values[0], values[-1]
    return run.first(metric, parts=2), run.last(metric, parts=2)


# Findings


def not_a_number(run: Run) -> str | None:
    """A logged value is NaN, infinite, or too large to compute with."""
    found = [
        (entry["step"], name, value)
        for entry in run.history
        for name, value in entry.items()
        if isinstance(value, int | float) and not is_number(value) and not isinstance(value, bool)
    ]
    if not found:
        return None
    step, name, value = found[0]
    wrong = f"beyond {LARGEST:g}" if LARGEST < abs(value) < inf else "not a finite number"
    others = f" ({len(found)} such values in all)" if len(found) > 1 else ""
    return f"{name} is {wrong} at step {step}{others}. What follows it may be worthless."


def reward_fell(run: Run, share: float = 0.5, errors: float = 6.0) -> str | None:
    """The reward lost `share` of what it had gained, by more than `errors` standard errors of a moving average."""
    steps, values = smooth(run, REWARD)
    if not values:
        return None
    best = max(values)
    step, lost = steps[values.index(best)], best - values[-1]
    raw = run.values(REWARD)
    # The variance of differences between neighbours is twice that of the noise, and contains hardly any trend
    noise = (fmean((b - a) ** 2 for a, b in pairwise(raw)) / 2 / (2 * ENDS)) ** 0.5
    if lost <= max(share * (best - values[0]), errors * noise, 1e-9):
        return None
    return f"The reward fell from {short(best)} around step {step} to {short(values[-1])}{_kl_since(run, step)}."


def _kl_since(run: Run, step: int) -> str:
    """Returns a text such as `" while the KL grew 10 times"`, or `""` if it did not."""
    steps, values = smooth(run, KL)
    before = [value for at, value in zip(steps, values, strict=True) if at <= step]
    if not before or values[-1] < 2 * before[-1] or not before[-1] > 0:
        return ""
    return f" while the KL grew {values[-1] / before[-1]:.0f} times"


def kl_grew(run: Run, times: float = 3.0, floor: float = ROUNDING) -> str | None:
    """The mismatch grew to `times` its start, and is above `floor`, which rounding explains."""
    found = ends(run, KL)
    if found is None or found[1] < max(times * found[0], floor):
        return None
    start, end = found
    factor = f" {end / start:.0f} times" if start > 0 else ""
    return f"The mismatch KL grew{factor}, from {short(start)} to {short(end)}{rising(*smooth(run, KL))}."


def left_reference(run: Run, times: float = 10.0, floor: float = 1.0) -> str | None:
    """The KL to the reference model, in nats a token, is above `floor` and `times` its usual size."""
    return _exploded(run, REFERENCE_KL, "The KL to the reference model", times, floor, "a larger `beta`")


def gradient_exploded(run: Run, times: float = 10.0, floor: float = 1.0) -> str | None:
    """The norm of the gradient is above `floor`, where it is clipped by default, and `times` its usual size."""
    return _exploded(run, GRADIENT, "The gradient norm", times, floor, "fewer updates of a generation")


def _exploded(run: Run, metric: str, name: str, times: float, floor: float, cure: str) -> str | None:
    """
    Describes a metric whose largest value is above `floor` and `times` the median of its values in the run's first
    half. Single steps count, because one is enough to ruin a policy. Zeros do not: some steps have no gradient.
    """
    steps, values = run.series(metric)
    if len(values) < ENDS:
        return None
    usual = median([value for value in values[: max(ENDS, len(values) // 2)] if value > 0] or [0.0])
    most = max(times * usual, floor)
    over = [value for value in values if value > most]
    if not over:
        return None
    step = steps[values.index(max(over))]
    return (
        f"{name} reached {short_number(max(over))} at step {step}, where {short(usual)} was usual, and passed "
        f"{short_number(most)} at {len(over)} of {len(values)} logged steps: try a lower `learning_rate` or {cure}."
    )


def weights_off_one(run: Run, distance: float = 0.05) -> str | None:
    """The mean weight is not 1, so k1 and k3 differ. It is 1 if the sampler can draw every token."""
    mean = _settled(run, "mismatch/weight_mean")
    if mean is None or abs(mean - 1) <= distance:
        return None
    return (
        f"The mean weight is {mean:.2f} and should be 1: k1 and k3 do not agree. The sampler leaves tokens out "
        "(top_p, top_k, min_p) or penalizes some, or its log-probabilities are not those that it drew with."
    )


def few_effective_samples(run: Run, below: float = 0.95) -> str | None:
    found = worst(run, "mismatch/ess_ratio", largest=False)
    if found is None or found[1] >= below:
        return None
    step, value, last = found
    end = now(value, last, "{:.0%}".format)
    return f"Only {value:.0%} of the samples were left after weighting (ESS) around step {step}{end}."


def heavy_weight(run: Run, above: float = 100.0) -> str | None:
    """A weight was very large. Single steps count, because one token is enough."""
    steps, values = run.series("mismatch/max_weight")
    if not values or max(values) <= above:
        return None
    over, step = sum(value > above for value in values), steps[values.index(max(values))]
    return (
        f"A weight reached {max(values):.0f} at step {step}, and {over} of {len(values)} logged steps had one above "
        f"{above:g}: never use `decoupled` here."
    )


def capped(run: Run, above: float = 0.01) -> str | None:
    return _share(run, "mismatch/cap_fraction", above, "at the cap", "the cap decides, and biases")


def dropped(run: Run, above: float = 0.05) -> str | None:
    return _share(run, "mismatch/dropped_fraction", above, "dropped by the correction", "take another one")


def clipped(run: Run, above: float = 0.2) -> str | None:
    metric = "clip_ratio/region_mean"
    return _share(run, metric, above, "clipped by the loss", "they teach nothing; fewer or smaller updates would")


def _share(run: Run, metric: str, above: float, where: str, so: str) -> str | None:
    found = worst(run, metric)
    if found is None or found[1] <= above:
        return None
    step, value, last = found
    if last <= above:
        were = "were" if value >= MOST_ONE_IN else "was"
        return f"{one_in(value, 'token')} {were} {where} around step {step}; at the end {short(last)} of them."
    return f"{one_in(last, 'token')} {where}{rising(*smooth(run, metric))}: {so}."


def unscored(run: Run, above: float = 0.0) -> str | None:
    found = worst(run, "mismatch/unscored_fraction")
    if found is None or found[1] <= above:
        return None
    return f"{one_in(found[1], 'token')} around step {found[0]} came without a log-probability: it is not corrected."


def entropy_gone(run: Run, share: float = 0.1) -> str | None:
    found = ends(run, "entropy")
    if found is None or found[1] > share * found[0]:
        return None
    start, end = found
    if end >= start:  # it is 0 from the start, so nothing fell
        return f"The entropy is {short(end)} nats: the policy explores nothing."
    return f"The entropy fell from {short(start)} to {short(end)} nats: the policy hardly explores any more."


def same_rewards(run: Run, above: float = 0.8) -> str | None:
    value = _settled(run, SAME_REWARDS)
    if value is None or value <= above:
        return None
    return f"In {value:.0%} of the groups all rewards are the same: those completions teach nothing."


def cut_off(run: Run, above: float = 0.25) -> str | None:
    value = _settled(run, "completions/clipped_ratio")
    if value is None or value <= above:
        return None
    return f"{value:.0%} of the completions end at `max_completion_length`, not where the model would."


def alpha_full(run: Run, above: float = 0.95) -> str | None:
    value = _settled(run, "ais/alpha")
    if value is None or value <= above:
        return None
    return f"AIS applies its whole correction (alpha {value:.2f}): the mismatch is larger than AIS is made for."


def later_tokens_worse(run: Run, times: float = 5.0, floor: float = ROUNDING) -> str | None:
    """The KL of late tokens in completions is much larger than that of the first tokens."""
    names = [name for name in buckets(run.names(POSITION)) if len(run.values(name)) >= ENDS]
    if len(names) < 2 or not BUCKET.fullmatch(names[0])[2]:
        return None
    early, late = run.last(names[0]), run.last(names[-1])
    if late < max(times * early, floor):
        return None
    factor = f"{late / early:.0f} times the KL" if early > 0 else f"a KL of {short(late)}, and none is"
    start, end = BUCKET.fullmatch(names[-1])[1], BUCKET.fullmatch(names[0])[2]
    return f"Tokens from {int(start)} on have {factor} of the first {int(end) + 1}: long completions are at risk."


def buckets(names: Iterable[str]) -> list[str]:
    """Returns the metrics of buckets by position, in their order."""
    matches = [match for match in map(BUCKET.fullmatch, names) if match is not None]
    return [name for _, name in sorted((int(match[1]), match[0]) for match in matches)]


def noise_lost(run: Run, share: float = 0.2) -> str | None:
    """The noise in the norms differs from the requested noise by more than `share`, at the worst sigma."""
    arrived: dict[float, list[float]] = {}
    held = dict(zip(*run.series("noise/effective_sigma"), strict=True))
    for step, sigma in zip(*run.series("noise/sigma"), strict=True):
        if sigma > 0 and step in held:
            arrived.setdefault(sigma, []).append(held[step] / sigma)
    ratios = {sigma: median(found) for sigma, found in arrived.items()}
    if not ratios:
        return None
    sigma = max(ratios, key=lambda sigma: abs(ratios[sigma] - 1))
    if abs(ratios[sigma] - 1) <= share:
        return None
    why = "swallow it" if ratios[sigma] < 1 else "round it up"
    return f"Noise of sigma {short(sigma)} was asked for, {short(sigma * ratios[sigma])} arrived: norms in BF16 {why}."


def update_buried(run: Run, times: float = 100.0, moved: float = 1e-3) -> str | None:
    """Updates hardly reach the sampler: they are far below the format's rounding, or hardly any code changes."""
    update, error = _settled(run, "weights/normalized_update"), _settled(run, "weights/normalized_quantization_error")
    changed = _settled(run, "weights/codes_changed")
    if update is None or error is None or not update > 0:
        return None
    if error < times * update and (changed is None or changed >= moved):
        return None
    first = "Try `uaq_scale`, or more bits." if unfit_correction(run) is None else "First take another correction."
    codes = "" if changed is None else f", and {changed:.1%} of the codes change"
    return (
        f"A sync moves the weights by {short(update)} of their size, the format rounds by {short(error)}{codes}: the "
        f"sampler hardly sees an update. {first}"
    )


def unfit_correction(run: Run) -> str | None:
    """The correction fails where the sampler has 4 bits, as the sampler of this run has."""
    precision, name = run.settings.get("rollout_precision"), run.settings.get("is_correction")
    correction = CORRECTIONS.get(name) if isinstance(name, str) else None
    if precision not in four_bits() or correction is None or not correction.unfit_for_few_bits:
        return None
    return f"`{name}` fails with samples in {precision.upper()}: take another correction, such as the default `tis`."


def engine_off(run: Run) -> str | None:
    """The self-check measured more than its bound, which stops a run."""
    bounds = dict(zip(*run.series("sync_check/bound"), strict=True))
    differences = zip(*run.series("sync_check/logp_difference"), strict=True)
    found = [(step, value) for step, value in differences if value > bounds.get(step, float("inf"))]
    if not found:
        return None
    step, value = found[0]
    return (
        f"At step {step} the engine was {short(value)} nats from the policy, more than the bound of "
        f"{short(bounds[step])}: its copy is stale or broken."
    )


def _settled(run: Run, metric: str) -> float | None:
    """Returns the mean over the last `ENDS` steps; `None` if fewer were logged."""
    return run.last(metric, parts=1) if len(run.values(metric)) >= ENDS else None


FINDINGS = (
    not_a_number,
    reward_fell,
    engine_off,
    unfit_correction,
    left_reference,
    gradient_exploded,
    kl_grew,
    later_tokens_worse,
    weights_off_one,
    few_effective_samples,
    heavy_weight,
    capped,
    dropped,
    unscored,
    clipped,
    alpha_full,
    entropy_gone,
    same_rewards,
    cut_off,
    noise_lost,
    update_buried,
)


def findings(group: Group) -> list[str]:
    """Returns a group's findings. Each names the first run that has it, and how many runs do."""
    lines = []
    for finding in FINDINGS:
        texts = [(run.name, finding(run)) for run in group.runs]
        texts = [(name, text) for name, text in texts if text]
        if texts:
            name, text = texts[0]
            lines.append(text if len(group.runs) == 1 else f"{text} ({name}; {len(texts)} of {len(group.runs)} runs)")
    return lines


# Metrics of findings that every run of a kind logs. Other findings need features of some runs: noise, a cap, AIS
IN_EVERY_RUN = ("entropy", SAME_REWARDS, "completions/clipped_ratio")
# Metrics of findings that a run with a copy of the policy logs as well
IN_EVERY_MISMATCH = (
    KL,
    "mismatch/weight_mean",
    "mismatch/ess_ratio",
    "mismatch/max_weight",
    "mismatch/unscored_fraction",
)
# Metrics that show that a run trains -> their names in a verdict. The reward comes first; distillation has none
PROGRESS = {REWARD: "reward", LOSS: "loss", KL: "mismatch KL"}


def verdict(group: Group) -> str:
    """Returns the verdict on a group without findings. All is well only if every finding had enough data."""
    names = {name for run in group.runs for entry in run.history for name in entry}
    metric = next((name for name in PROGRESS if name in names), REWARD)
    logged = min(len(run.values(metric)) for run in group.runs)
    no_reward = "" if metric == REWARD else " No reward was logged, so none was judged."
    if logged < ENDS:
        steps = f"{logged} step{'s' * (logged != 1)}"
        return f"Too little to judge: the {PROGRESS[metric]} was logged at {steps}.{no_reward}"
    return _judged(group) + no_reward


def _judged(group: Group) -> str:
    """Returns the verdict that the logged metrics allow on a group without findings."""
    unseen = [
        metric
        for metric in (*IN_EVERY_MISMATCH, *IN_EVERY_RUN)
        if any(len(run.values(metric)) < ENDS and _can_log(run, metric) for run in group.runs)
    ]
    if not unseen:
        return "All well."
    if not any(run.values(metric) for metric in IN_EVERY_MISMATCH for run in group.runs):
        reason = "The mismatch was not logged: without a `rollout_precision` there is none to measure."
        rest = [metric for metric in unseen if metric not in IN_EVERY_MISMATCH]
        if not rest:
            return f"All well in what was logged. {reason}"
        return f"Nothing stands out in what was logged. {reason} Nor was {_joined(rest)}, so that cannot be judged."
    return (
        f"Nothing stands out in what was logged. This cannot be judged, since it was logged at fewer than {ENDS} "
        f"steps: {_joined(unseen)}."
    )


def _can_log(run: Run, metric: str) -> bool:
    """Whether a run's trainer logs a metric: PPO compares no rewards in groups, and distillation has none."""
    return metric != SAME_REWARDS or (bool(run.values(REWARD)) and not run.names(CRITIC))


def _joined(names: Sequence[str]) -> str:
    """Writes names as `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
