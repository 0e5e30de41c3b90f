r"""The size of the noise at each step (QeRL, section 3.3, eq. 8, algorithm 1 line 5-7, fig. 15).

Training is divided into K equal stages. Stage 0 has quantization noise only; from stage 1 to stage K-1, sigma decays
from `sigma_start` to `sigma_end`.

| paper | here |
|---|---|
| `K`, number of stages | `stages`, >= 3 |
| `k`, current stage | `stage(step, total_steps, stages)`, 0 to K-1 |
| `M`, total steps; `step`, counted from 1 | `total_steps`; `step`, counted from 0 |
| `sigma_start`, `sigma_end` | the same |

With `t = (k - 1) / (K - 2)`, from 0 to 1:

    exponential   sigma_start * (sigma_end / sigma_start)^t
    linear        sigma_start + (sigma_end - sigma_start) * t
    cosine        sigma_start + (sigma_end - sigma_start) * (1 - cos(pi t)) / 2
    logarithmic   sigma_start + (sigma_end - sigma_start) * log(k) / log(K - 1)

The paper's exponent is `(k - 1) / (K - 1)`, so its last stage would stop short of `sigma_end`; its text says that the
last stage reaches it, as it does here. Only the exponential has a formula in the paper; the other three follow their
names and their curves in fig. 15.
"""

import math


def exponential(k: int, stages: int, start: float, end: float) -> float:
    t = (k - 1) / (stages - 2)
    return start ** (1 - t) * end**t  # = start (end / start)^t, exact at both ends


def linear(k: int, stages: int, start: float, end: float) -> float:
    return _blend(start, end, (k - 1) / (stages - 2))


def cosine(k: int, stages: int, start: float, end: float) -> float:
    return _blend(start, end, (1 - math.cos(math.pi * (k - 1) / (stages - 2))) / 2)


def logarithmic(k: int, stages: int, start: float, end: float) -> float:
    return _blend(start, end, math.log(k) / math.log(stages - 1))


LEAST_STAGES = 3  # without noise, at `sigma_start`, at `sigma_end`
SCHEDULES = {"exponential": exponential, "linear": linear, "cosine": cosine, "logarithmic": logarithmic}


def stage(step: int, total_steps: int, stages: int) -> int:
    """
    Returns the stage of `step`, from 0 to `stages - 1`. Steps from `total_steps` on stay in the last stage. Raises
    `ValueError` for a negative `step`, or a `total_steps` below 1.
    """
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}.")
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}.")
    return min(step * stages // total_steps, stages - 1)


def sigma(step: int, total_steps: int, schedule: str, stages: int, sigma_start: float, sigma_end: float) -> float:
    """
    Returns the standard deviation of the noise at a training step.

    Args:
        step (`int`): Optimizer step, from 0.
        total_steps (`int`): Number of optimizer steps in the training.
        schedule (`str`): A key of [`SCHEDULES`].
        stages (`int`): Number of equal stages, at least 3; the paper uses 10.
        sigma_start (`float`): Standard deviation in stage 1; the paper uses 1e-2.
        sigma_end (`float`): Standard deviation in the last stage, at most `sigma_start`; the paper uses 5e-4.

    Returns:
        `float`: 0 in stage 0, then the schedule's value, constant within a stage.

    Raises:
        `ValueError`: for a value outside these ranges.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.")
    if stages < LEAST_STAGES:
        raise ValueError(f"stages must be at least {LEAST_STAGES}, got {stages}.")
    if not sigma_end >= 0 or (schedule == "exponential" and sigma_end == 0):  # exponential decay never reaches 0
        allowed = "> 0" if schedule == "exponential" else ">= 0"
        raise ValueError(f"sigma_end must be {allowed} with schedule {schedule!r}, got {sigma_end}.")
    if not sigma_end <= sigma_start < math.inf:
        raise ValueError(f"sigma_start must be finite and at least sigma_end={sigma_end}, got {sigma_start}.")
    k = stage(step, total_steps, stages)
    return SCHEDULES[schedule](k, stages, sigma_start, sigma_end) if k else 0.0


def _blend(start: float, end: float, t: float) -> float:
    return start * (1 - t) + end * t  # exact at both ends
