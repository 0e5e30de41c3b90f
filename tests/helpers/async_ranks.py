"""Asynchronous training on given samples, by one process or by one of several ranks."""

from pathlib import Path

from ppo_ranks import sums_of, whole


def trained(correction: str, path: Path, ranks: int = 1):
    """Three updates on eight samples each, of ages 0 to 2."""
    from asynchronous import asynchronous, given_samples

    settings = {"per_device_train_batch_size": 8 // ranks, "max_steps": 3, "max_grad_norm": 0.0, "adam_epsilon": 1.0}
    settings |= {"is_correction": correction, "learning_rate": 0.1}
    trainer = asynchronous(path, given_samples(6), model=str(path.parent / "model"), **settings)
    trainer.begun = sums_of(whole(trainer.model))
    trainer.train()
    return trainer


def log(trainer) -> list[dict]:
    kept = ("loss", "rollouts/age", "rollouts/age_max", "mismatch/kl_k3", "entropy", "batch/samples_per_step")
    history = [entry for entry in trainer.state.log_history if "rollouts/age" in entry]
    return [{name: entry[name] for name in kept} for entry in history]


def train(correction: str, path: Path) -> dict:
    """One rank."""
    trainer = trained(correction, path, ranks=2)
    return {"weights": sums_of(whole(trainer.model)), "log": log(trainer), "start": trainer.begun}
