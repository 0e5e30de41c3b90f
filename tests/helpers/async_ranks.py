"""Asynchronous training by one process or by one of several ranks: on given samples, or with an engine in a thread."""

import os
from itertools import cycle
from pathlib import Path

import numpy as np
from ppo_ranks import sums_of, whole
from torch.distributed.tensor import DTensor


SETTINGS = {"max_grad_norm": 0.0, "adam_epsilon": 1.0, "learning_rate": 0.1, "max_staleness": 4}
# What is trained with an engine in a thread: samples of one version, weighed by the statistics of all ranks; or an
# adapter, on samples of two updates a sync
FRESH = {"max_staleness": 0, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
THREADS = {
    "full": FRESH | {"is_correction": "ais"},
    "lora": FRESH | {"is_correction": "acr", "proximal_pass": True, "weight_sync_steps": 2, "save_steps": 3},
}


def trained(case: str, path: Path, ranks: int = 1, resume: str | None = None):
    """A training of a case, "async-", a correction or a precision, and a tuning, on eight samples an update."""
    from asynchronous import asynchronous, given_samples
    from conversing import ANSWER, Chosen, add, asking, speaking
    from training import dataset, lora, spread

    _, kind, tuning = case.split("-")
    settings, model = SETTINGS | {"per_device_train_batch_size": 8 // ranks}, str(path.parent / "model")
    if kind == "tis":
        samples = given_samples(6)
        for sample in samples:  # of ages that differ in each micro-batch
            sample.versions = np.where(sample.completion_mask, 1 - np.arange(len(sample.versions)) % 3, 0)
        trainer = asynchronous(path, samples, model=model, max_steps=3, is_correction=kind, **settings)
    elif kind == "server":
        trainer = asynchronous(path, model=model, max_steps=4, **server_of_a_test(), **settings)
    elif kind == "tools":
        given = {"model": model, "data": asking(1), "max_completion_length": 60}
        trainer = speaking(path, tools=[add], **given, **settings | THREADS[tuning])
        # Groups of four, whose members add different numbers
        calls = cycle(f'add({{"a": 1, "b": {b}}})' for b in (2, 30, 4, 500))
        Chosen(trainer, lambda turn: ANSWER if turn else next(calls))
    elif kind == "broken":
        trainer = asynchronous(path, model=model, max_steps=20, rewards=breaks_later(), **settings)
    else:
        # One prompt, because a clock decides which groups are too old
        given = {"rewards": spread, "data": dataset(1), "rollout_precision": kind}
        given |= {"peft_config": lora()} if tuning == "lora" else {}
        trainer = asynchronous(path, model=model, **given, **settings | THREADS[tuning])
        draw_chosen(trainer)
    trainer.begun = sums_of(whole(trainer.model))
    trainer.train(resume)
    return trainer


def server_of_a_test() -> dict:
    """Settings of a run with the INT8 server of a test in another process."""
    settings = {"use_vllm": True, "vllm_server_base_url": os.environ["SERVER"], "rollout_precision": "int8"}
    return settings | {"token_budget": 0, "dtype": "bfloat16", "sync_check_steps": 0, "max_completion_length": 60}


def draw_chosen(trainer) -> None:
    """Makes the thread draw given tokens for each group. Their log-probabilities are those of the engine's copy."""
    engine, draw = trainer.sampling_thread.engine, np.random.default_rng(0)
    chosen = [draw.integers(64, 90, length).tolist() for length in (3, 5, 8, 6)]

    def sample(requests, enough=None):
        from trl_quant.rollout.engine import Samples

        ids = [chosen[i % len(chosen)] for i in range(len(requests))]
        scored = engine.score([request.prompt + row for request, row in zip(requests, ids, strict=True)])
        return Samples(ids, [logps[-len(row) :] for logps, row in zip(scored, ids, strict=True)])

    engine.sample = sample


def breaks_later():
    """A reward that a thread can use three times."""
    calls = []

    def broken(completions, **columns):
        calls.append(1)
        return [float("inf") if len(calls) > 3 else float(i) for i in range(len(completions))]

    return broken


def log(trainer) -> list[dict]:
    kept = ("loss", "rollouts/age", "rollouts/age_max", "mismatch/kl_k3", "entropy", "batch/samples_per_step", "reward")
    kept += ("mismatch/by_age/0", "mismatch/by_age/2", "ais/alpha", "ratio", "mismatch/rescued_fraction")
    kept += ("tools/call_frequency", "rollout/turns_mean", "mismatch/by_turn/1")
    history = [entry for entry in trainer.state.log_history if "rollouts/age" in entry]
    return [{name: entry[name] for name in kept if name in entry} for entry in history]


def train(case: str, path: Path) -> dict:
    """One rank."""
    if "broken" in case:
        try:
            trained(case, path, ranks=2)
        except RuntimeError as error:
            return {"error": str(error)}
    trainer = trained(case, path, ranks=2)
    thread = trainer.sampling_thread
    found = {"weights": sums_of(whole(trainer.model)), "log": log(trainer), "start": trainer.begun}
    found["sharded"] = any(isinstance(param, DTensor) for param in trainer.model.parameters())
    if thread is not None:
        found["samples"] = thread.started > 0
    if "server" in case:
        trainer.save_model(path / "trained")
    elif thread is not None:
        saved = path / f"checkpoint-{THREADS[case.split('-')[2]]['save_steps']}"
        resumed = trained(case, path, ranks=2, resume=str(saved))
        found["resumed"] = sums_of(whole(resumed.model))
        found["versions"] = [trainer.model_version, resumed.model_version]
    return found
