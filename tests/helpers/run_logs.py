"""Logs of made-up runs, in the forms in which trainers leave them."""

import json
from pathlib import Path


WEIGHT = "sampling/importance_sampling_ratio"


def entries(n: int, offset: float = 0.0) -> list[dict]:
    return [
        {
            "step": i + 1,
            "reward": i / 10 + offset,
            "mismatch/kl_k3": 0.001 * (i + 1),
            f"{WEIGHT}/min": 0.5,
            f"{WEIGHT}/mean": 0.9,
            f"{WEIGHT}/max": 2.0,
        }
        for i in range(n)
    ]


def log(n: int = 40, **metrics) -> list[dict]:
    """`n` entries; a metric is a number, or a function of the step. `__` in a name stands for a slash."""
    return [
        {"step": i}
        | {name.replace("__", "/"): value(i) if callable(value) else value for name, value in metrics.items()}
        for i in range(1, n + 1)
    ]


def write_jsonl(directory: Path, rows: list[dict], settings: dict | None = None) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings is not None:
        (directory / "settings.json").write_text(json.dumps(settings))
    return directory


def write_state(directory: Path, rows: list[dict], **state) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "trainer_state.json").write_text(json.dumps({"log_history": rows} | state))


def climbing(start: float, end: float, at: int = 20):
    """Stays at `start` until step `at`, then goes to `end` at step 40."""
    return lambda step: start + (end - start) * max(0, step - at) / (40 - at)


def noisy(mean, size: float):
    """Numbers around `mean`, up and down in turn."""
    return lambda step: (mean(step) if callable(mean) else mean) + (size if step % 2 else -size)
