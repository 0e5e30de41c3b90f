"""Short runs of `QuantPPOTrainer` for the tests."""

from training import config, killing, make

from trl_quant import QuantPPOConfig, QuantPPOTrainer


def ppo(path, policy, kill_at=None, given=None, **settings) -> QuantPPOTrainer:
    """Four updates on each of two generations, saved after each generation."""
    settings = {
        "rollout_precision": "int4",
        "is_correction": "acr",
        "num_generations": 1,
        "per_device_train_batch_size": 2,
        "steps_per_generation": 4,
        "max_steps": 8,
        "value_learning_rate": 3e-3,
        "save_strategy": "steps",
        "save_steps": 4,
    } | settings
    given = {"reward_funcs": killing(kill_at)} | (given or {})
    return make(QuantPPOTrainer, config(QuantPPOConfig, path, **settings), model=policy, **given)
