"""The papers' equations in slow loops, one scalar at a time, as a reference for the package, which this file does not
import. Equation numbers: QuRL (quantized RL, ACR, UAQ), AIS (adaptive importance sampling), QeRL (noise). IcePop,
Geo-Mask (`geometric`), TRM and DPPO are cited by name.

    OBJECTIVES[name](logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, **hyperparameters)

is a paper's objective, to be maximised, as a mean over the unmasked tokens; `logps` may carry a gradient.
`diagnostics` and `ais_alpha` give the metrics. A token without a rollout log-probability has ratio 1 and is left out
of every statistic.
"""

import itertools
import math

import torch


def unmasked(mask):
    return [(b, t) for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t]]


def scored(rollout_logps, mask):
    return [(b, t) for b, t in unmasked(mask) if math.isfinite(rollout_logps[b, t])]


def advantage(advantages, b, t):
    if advantages.dim() == 1:
        return advantages[b].item()
    return advantages[b, 0 if advantages.shape[1] == 1 else t].item()


def weight(rollout_logps, old_logps, b, t):
    """w = pi_prox / pi_behav for one token."""
    if not math.isfinite(rollout_logps[b, t]):
        return 1.0
    return math.exp(old_logps[b, t].item() - rollout_logps[b, t].item())


def mean(xs):
    return sum(xs) / len(xs)


def std(xs):
    """Sample standard deviation."""
    if len(xs) < 2:
        return 0.0
    m = mean(xs)
    return math.sqrt(sum((x - m) ** 2 for x in xs) / (len(xs) - 1))


# Objectives


def clipped(ratio, a, low, high):
    """min(R A, clip(R, low, high) A) for one token; `ratio` is a scalar tensor."""
    if ratio.item() < low:
        return torch.minimum(ratio * a, torch.tensor(low * a, dtype=ratio.dtype))
    if ratio.item() > high:
        return torch.minimum(ratio * a, torch.tensor(high * a, dtype=ratio.dtype))
    return ratio * a


def objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, drops=None, cap=None):
    """
    Mean over the unmasked tokens of `term(R, Rq, w, A, 1 - e_lo, 1 + e_hi)`, 0 for those that `drops(b, t)`, with w at
    most `cap(b, t)`.
    """
    terms = []
    for b, t in unmasked(mask):
        ratio = torch.exp(logps[b, t] - old_logps[b, t])
        known = math.isfinite(rollout_logps[b, t])
        ratio_q = torch.exp(logps[b, t] - rollout_logps[b, t]) if known else ratio
        w = weight(rollout_logps, old_logps, b, t)
        w = w if cap is None else min(w, cap(b, t))
        value = term(ratio, ratio_q, w, advantage(advantages, b, t), 1 - epsilon_low, 1 + epsilon_high)
        terms.append(0 * value if drops is not None and drops(b, t) else value)
    return sum(terms) / len(terms)


def none(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high):
    """QuRL eq. 1, with the full-precision old actor in the denominator."""

    def term(ratio, ratio_q, w, a, low, high):
        return clipped(ratio, a, low, high)

    return objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high)


def coupled(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high):
    """QuRL eq. 3."""

    def term(ratio, ratio_q, w, a, low, high):
        return clipped(ratio_q, a, low, high)

    return objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high)


def decoupled(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high):
    """QuRL eq. 4."""

    def term(ratio, ratio_q, w, a, low, high):
        return w * clipped(ratio, a, low, high)

    return objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high)


def tis(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, cap=2.0):
    """QuRL eq. 5."""

    def term(ratio, ratio_q, w, a, low, high):
        return min(w, cap) * clipped(ratio, a, low, high)

    return objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high)


def acr(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, cap=2.0):
    """QuRL eq. 9, with eq. 6 taken literally: pi_trunc = max(pi_behav, pi_prox / C), r = pi_behav / pi_trunc."""

    def term(ratio, ratio_q, w, a, low, high):
        behaviour, proximal = 1.0, w  # up to a common factor
        truncated = max(behaviour, proximal / cap)
        r = behaviour / truncated
        return proximal / truncated * clipped(ratio, a, low, high / r)

    return objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high)


def ais(
    logps,
    old_logps,
    rollout_logps,
    advantages,
    mask,
    epsilon_low,
    epsilon_high,
    cap=5.0,
    delta=0.02,
    gamma=1.2,
    beta_var=1.0,
    eps=1e-6,
):
    """AIS eq. 19."""
    alpha = ais_alpha(rollout_logps, old_logps, advantages, mask, cap, delta, gamma, beta_var, eps)["ais/alpha"]

    def term(ratio, ratio_q, w, a, low, high):
        return (1 + alpha * (min(w, cap) - 1)) * clipped(ratio, a, low, high)

    return objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high)


def cis_cap(pi, lam=2.3, kappa=5e-3):
    return lambda b, t: 1 + lam * max(1 - math.exp(pi[b, t].item()), kappa)


def cis(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, lam=2.3, kappa=5e-3):
    """CIS: the trainer's probability decides the cap."""

    def term(ratio, ratio_q, w, a, low, high):
        return w * clipped(ratio, a, low, high)

    given = logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high
    return objective(term, *given, cap=cis_cap(old_logps, lam, kappa))


def icepop(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, low=0.5, high=5.0):
    """IcePop: M(k; alpha, beta) before GRPO's clipped term, with k of the old policies."""

    def term(ratio, ratio_q, w, a, clip_low, clip_high):
        return w * clipped(ratio, a, clip_low, clip_high)

    drops = icepop_drops(old_logps, rollout_logps, advantages, mask, low, high)
    return objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, drops)


def geometric(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, epsilon=0.01):
    """Geo-Mask: I[C_low <= rho_geo <= C_high] before the clipped term, with rho of the old policies and no weight."""

    def term(ratio, ratio_q, w, a, low, high):
        return clipped(ratio, a, low, high)

    drops = geometric_drops(old_logps, rollout_logps, advantages, mask, epsilon)
    return objective(term, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, drops)


def trm(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, delta=0.05):
    """TRM: L_masked = E[M(x, y) A sum_t rho_t], of the current policy and the sampler alone."""

    def term(ratio, ratio_q, w, a, low, high):
        return ratio_q * a

    now = logps.detach()
    drops = trm_drops(now, rollout_logps, advantages, mask, delta)
    return objective(term, logps, now, rollout_logps, advantages, mask, epsilon_low, epsilon_high, drops)


def dppo(logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, delta=0.15, cap=10.0):
    """DPPO-Binary-TV: E[M_t r_t A], of the current policy and the sampler alone; the bound on r_t has no gradient."""

    def term(ratio, ratio_q, w, a, low, high):
        return (ratio_q if ratio_q.item() <= cap else cap * ratio) * a  # ratio: 1, with the gradient of log pi

    now = logps.detach()
    drops = dppo_drops(now, rollout_logps, advantages, mask, delta)
    return objective(term, logps, now, rollout_logps, advantages, mask, epsilon_low, epsilon_high, drops)


OBJECTIVES = {"none": none, "coupled": coupled, "decoupled": decoupled, "tis": tis, "acr": acr, "ais": ais}
OBJECTIVES |= {"cis": cis, "icepop": icepop, "geometric": geometric, "trm": trm, "dppo": dppo}
# What the tests give a correction where its defaults would not act on a small batch
HYPERPARAMETERS = {
    "tis": {"cap": 1.5},
    "acr": {"cap": 1.5, "epsilon_low": 0.1, "epsilon_high": 0.3},
    "ais": {"cap": 1.5, "delta": 0.6, "gamma": 0.8, "beta_var": 0.5},
    "cis": {"lam": 0.7, "kappa": 0.3},
    "icepop": {"low": 0.25, "high": 3.5},
    "geometric": {"epsilon": 0.15},
    "trm": {"delta": 0.9},
    "dppo": {"delta": 0.05, "cap": 1.5},
}


# RLOO: the ratio of a whole completion, and weights of tokens or of sequences


def rloo_gradient(
    name, logps, old_logps, rollout_logps, advantages, mask, epsilon_low, epsilon_high, level="token", **hyperparameters
):
    """
    The gradient of RLOO's objective, to be maximised, with respect to each `logps[b, t]`: R A w_t / B, where `min(R A,
    clip(R) A)` is not clipped, with R = exp(sum_t (logps - proximal)); 0 on clipped completions and on masked tokens.
    """
    pi = logps if name in ("trm", "dppo") else old_logps  # these two compare the sampler with the current policy
    gradient = torch.zeros_like(logps)
    for b in range(mask.shape[0]):
        tokens = [t for row, t in unmasked(mask) if row == b]
        log_ratio = 0.0
        for t in tokens:
            proximal = rollout_logps if name == "coupled" and math.isfinite(rollout_logps[b, t]) else pi
            log_ratio += logps[b, t].item() - proximal[b, t].item()
        ratio, a = math.exp(log_ratio), advantages[b].item()
        clipped = min(max(ratio, 1 - epsilon_low), 1 + epsilon_high)
        if clipped * a < ratio * a:
            continue
        for t in tokens:
            w = rloo_weight(name, pi, rollout_logps, advantages, mask, b, t, level, **hyperparameters)
            gradient[b, t] = ratio * a * w / mask.shape[0]
    return gradient


def rloo_weight(name, pi, rollout_logps, advantages, mask, b, t, level, **hyperparameters):
    """The weight of one token, from its ratio, or at the level of sequences from the product of all ratios."""
    w = weight(rollout_logps, pi, b, t)
    if level == "sequence":
        w = math.exp(sum(log_ratios(pi, rollout_logps, mask, b)))
    if name in DROPS and DROPS[name](pi, rollout_logps, advantages, mask, **hyperparameters)(b, t):
        return 0.0
    if name in ("none", "coupled", "geometric"):
        return 1.0
    cap = hyperparameters.get("cap", {"tis": 2.0, "ais": 5.0, "dppo": 10.0}.get(name, math.inf))
    if name == "cis":
        cap = cis_cap(pi, **hyperparameters)(b, t)
    if name == "ais":
        return 1 + ais_alpha(rollout_logps, pi, advantages, mask, **hyperparameters)["ais/alpha"] * (min(w, cap) - 1)
    return min(w, cap)


# What is dropped: whether a method drops token (b, t), for a policy `pi` against the sampler


def log_ratios(pi, rollout_logps, mask, b):
    return [math.log(weight(rollout_logps, pi, b, t)) for row, t in scored(rollout_logps, mask) if row == b]


def icepop_drops(pi, rollout_logps, advantages, mask, low=0.5, high=5.0):
    return lambda b, t: not low <= weight(rollout_logps, pi, b, t) <= high


def geometric_drops(pi, rollout_logps, advantages, mask, epsilon=0.01):
    def drops(b, t):
        logs = log_ratios(pi, rollout_logps, mask, b)
        return bool(logs) and not 1 - epsilon <= math.exp(mean(logs)) <= 1 + epsilon

    return drops


def trm_drops(pi, rollout_logps, advantages, mask, delta=0.05):
    """The maximum over a sequence of k2, the paper's estimate from samples."""
    return lambda b, t: max((x**2 / 2 for x in log_ratios(pi, rollout_logps, mask, b)), default=0) > delta


def dppo_drops(pi, rollout_logps, advantages, mask, delta=0.15, cap=10.0):
    def drops(b, t):
        if not math.isfinite(rollout_logps[b, t]):
            return False
        moved = math.exp(pi[b, t].item()) - math.exp(rollout_logps[b, t].item())
        a = advantage(advantages, b, t)
        return (a > 0 and moved > delta) or (a < 0 and -moved > delta)

    return drops


DROPS = {"icepop": icepop_drops, "geometric": geometric_drops, "trm": trm_drops, "dppo": dppo_drops}
# Bounds that drop some of what a tiny model's int4 copy samples, and not all, by correction
DROPPING = {
    "icepop": {"icepop_low": 0.6, "icepop_high": 1.6},
    "geometric": {"geometric_epsilon": 0.1},
    "trm": {"trm_delta": 0.5},
    "dppo": {"dppo_delta": 0.003},
}
# The same for caps that depend on the token
ACTING = DROPPING | {"cis": {"cis_lam": 0.3}}


def hyperparameters(name: str, fields: dict) -> dict:
    """The arguments of a correction in this file, from the fields of a config."""
    return {{"is_cap": "cap"}.get(field, field.removeprefix(f"{name}_")): value for field, value in fields.items()}


def dropped(name, pi, rollout_logps, advantages, mask, **hyperparameters):
    """Share of the scored tokens that a method drops, and of the sequences with such a token; {} if it never drops."""
    if name not in DROPS:
        return {}
    drops = DROPS[name](pi, rollout_logps, advantages, mask, **hyperparameters)
    tokens = {(b, t): drops(b, t) for b, t in scored(rollout_logps, mask)}
    rows = {b: any(gone for (row, _), gone in tokens.items() if row == b) for b, _ in tokens}
    return {
        "mismatch/dropped_fraction": mean([float(gone) for gone in tokens.values()] or [0.0]),
        "mismatch/dropped_sequence_fraction": mean([float(gone) for gone in rows.values()] or [0.0]),
    }


# Statistics


def ais_alpha(rollout_logps, old_logps, advantages, mask, cap=5.0, delta=0.02, gamma=1.2, beta_var=1.0, eps=1e-6):
    """AIS eq. 12-17."""
    tokens = scored(rollout_logps, mask)
    wb = [min(weight(rollout_logps, old_logps, b, t), cap) for b, t in tokens]
    a = [advantage(advantages, b, t) for b, t in tokens]
    d = [abs(old_logps[b, t].item() - rollout_logps[b, t].item()) for b, t in tokens]
    cv = std(wb) / mean(wb) if tokens else 0.0
    alpha_ess = 1 / math.sqrt(1 + cv**2)  # eq. 12
    alpha_mis = min(1.0, mean(d) / delta) if tokens else 0.0  # eq. 13, 14
    ds = std([x * y for x, y in zip(a, wb)]) / (std(a) + eps)  # eq. 15
    alpha_var = max(0.0, (ds - gamma) / gamma)  # eq. 16
    alpha = min(max(alpha_ess - beta_var * alpha_var, 0.0), 1.0) * alpha_mis  # eq. 17
    return {
        "ais/alpha": alpha,
        "ais/alpha_ess": alpha_ess,
        "ais/alpha_mis": alpha_mis,
        "ais/alpha_var": alpha_var,
    }


def diagnostics(rollout_logps, old_logps, mask, cap=math.inf):
    """Every `mismatch/` metric: expectations over tokens that the behaviour policy drew. `cap` may be a function."""
    tokens = scored(rollout_logps, mask)
    caps = [cap(b, t) if callable(cap) else cap for b, t in tokens] or [math.inf]
    q = [rollout_logps[b, t].item() for b, t in tokens]  # behaviour
    p = [old_logps[b, t].item() for b, t in tokens]  # proximal
    w = [math.exp(y - x) for x, y in zip(q, p)] or [1.0]
    if not tokens:
        q = p = [0.0]
    everything = len(unmasked(mask))
    return {
        "mismatch/kl_k1": mean([x - y for x, y in zip(q, p)]),
        "mismatch/kl_k3": mean([math.exp(y - x) - 1 - (y - x) for x, y in zip(q, p)]),
        "mismatch/abs_logp_diff": mean([abs(x - y) for x, y in zip(q, p)]),
        "mismatch/abs_prob_diff": mean([abs(math.exp(x) - math.exp(y)) for x, y in zip(q, p)]),
        "mismatch/weight_mean": mean(w),
        "mismatch/max_weight": max(w),
        "mismatch/ess_ratio": sum(w) ** 2 / (len(w) * sum(x * x for x in w)),
        "mismatch/chi_square": mean([(x - 1) ** 2 for x in w]),
        "mismatch/entropy": mean([-x for x in q]),
        "mismatch/cap_fraction": mean([float(x > most) for x, most in zip(w, caps)]),
        "mismatch/same_fraction": mean([float(x == y) for x, y in zip(q, p)]),
        "mismatch/unscored_fraction": (everything - len(tokens)) / everything if everything else 0.0,
        **by_position(tokens, w),
        **by_turn(tokens, w, mask),
    }


def by_position(tokens, w):
    """The k3 estimate of the tokens between two powers of 4, from the first 16 on."""
    edges, found = [0, 16, 64, 256, 1024, 4096, 16384, math.inf], {}
    for first, end in itertools.pairwise(edges):
        inside = [x - 1 - math.log(x) for (_, t), x in zip(tokens, w) if first <= t < end]
        if inside:
            found[f"mismatch/by_position/{first}-{'' if end == math.inf else end - 1}"] = mean(inside)
    return found


def by_turn(tokens, w, mask):
    """The k3 estimate of the turns, which masked tokens part, where any completion has a second one."""
    turn_of = {}
    for b in range(mask.shape[0]):
        turn, before = 0, False
        for t in range(mask.shape[1]):
            turn += bool(mask[b, t]) and not before
            before = bool(mask[b, t])
            turn_of[b, t] = turn
    edges, found = [1, 2, 3, 5, 9, 17, 33, math.inf], {}
    for first, end in itertools.pairwise(edges):
        inside = [x - 1 - math.log(x) for place, x in zip(tokens, w) if first <= turn_of[place] < end]
        if inside:
            last = "" if end == math.inf else end - 1
            found[f"mismatch/by_turn/{first}" if first == last else f"mismatch/by_turn/{first}-{last}"] = mean(inside)
    return found if len(found) > 1 else {}


# Noise (QeRL algorithm 1) and scaling (QuRL eq. 11)


def noise_sigma(step, total_steps, schedule, stages, start, end):
    """QeRL algorithm 1, line 5-7, for `total_steps` divisible by `stages`; `step` counted from 0."""
    steps_per_stage = total_steps // stages
    k = step // steps_per_stage
    if k == 0:
        return 0.0
    last = stages - 1
    if schedule == "exponential":
        return start * (end / start) ** ((k - 1) / (last - 1))
    if schedule == "linear":
        return start - (start - end) * (k - 1) / (last - 1)
    if schedule == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * (k - 1) / (last - 1))) / 2
    return start - (start - end) * math.log(k, last)  # logarithmic: to the base of the last stage


def scaled_layer(norm_weight, linear_weights, scale, offset):
    """QuRL eq. 11, one number at a time, in double precision: W X = (W / s) (s X)."""
    gain = [scale * (1 + w) - 1 if offset else scale * w for w in norm_weight.double().tolist()]
    weights = [[[v / scale for v in row] for row in weight.double().tolist()] for weight in linear_weights]
    return torch.tensor(gain, dtype=torch.float64), [torch.tensor(weight, dtype=torch.float64) for weight in weights]
