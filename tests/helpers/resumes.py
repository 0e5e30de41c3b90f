"""Runs that are killed and go on, for the tests."""

from training import dataset, killing, lora, trainer_for
from training import metrics as all_metrics


SETTINGS = {
    "rollout_precision": "int4",
    "noise_schedule": "exponential",
    "noise_stages": 3,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
}


def metrics(trainer):
    """All but the final summary: transformers averages its `train_loss` over the steps of this process only."""
    return [entry for entry in all_metrics(trainer) if "train_loss" not in entry]


def trainer_of(path, kill_at=None, peft=False, prompts=8, model=None, **given):
    given = {"reward_funcs": killing(kill_at), "peft_config": lora() if peft else None} | given
    return trainer_for(path, model, train_dataset=dataset(prompts), **SETTINGS | given)
