"""Short runs of `QuantRLOOTrainer` for the tests."""

import torch
from training import trainer_for

from trl_quant import QuantRLOOTrainer


def quantized(path, model=None, kind=QuantRLOOTrainer, **given) -> QuantRLOOTrainer:
    given = {"rollout_precision": "int4", "max_steps": 2, "beta": 0.0} | given
    return trainer_for(path / "out", model, kind, **given)


class Counting(QuantRLOOTrainer):
    """Notes the steps of the passes of TRL without gradients."""

    def train(self, *args, **kwargs):
        self.passes = []
        return super().train(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if not torch.is_grad_enabled() and not self.correction_step.saves_pass():
            self.passes.append(self.state.global_step)
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)
