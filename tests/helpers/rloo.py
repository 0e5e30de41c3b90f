"""Short runs of `QuantRLOOTrainer` for the tests."""

from training import config, make

from trl_quant import QuantRLOOConfig, QuantRLOOTrainer


def quantized(path, model=None, **settings) -> QuantRLOOTrainer:
    settings = {"rollout_precision": "int4", "max_steps": 2, "beta": 0.0} | settings
    return make(QuantRLOOTrainer, config(QuantRLOOConfig, path / "out", **settings), model=model)
