"""Step scaling in a trainer (`ess_step_scaling`): from the losses of a step to the learning rate of its optimizer."""

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..corrections.batch import counted
from ..corrections.step_scaling import effective_share, sequence_log_weights, step_factor


class StepScaling(TrainerCallback):
    """
    Scales each step of the policy's optimizer ([`~corrections.step_scaling`]).

    | TRL's or transformers' call | here |
    |---|---|
    | a training begins | [`on_train_begin`] drops the completions of a step that an earlier training interrupted |
    | a loss has scored its micro-batch | [`add`] keeps the weights of its completions |
    | the gradient is clipped and checked, the optimizer is next | [`on_pre_optimizer_step`] scales its learning rate |
    | the optimizer has stepped, the schedule is next | [`on_optimizer_step`] restores the learning rate |

    So the schedule and the logged `learning_rate` never see the factor. The optimizer of PPO's critic is another one,
    and is left alone. An optimizer that decays weights by its learning rate, such as AdamW, scales the decay too.

    Args:
        trainer: The trainer.

    Attributes:
        first (`float` or `None`): `rho_0`, the `rho` of the run's first step; `None` before that step.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.first: float | None = None
        self._log_weights: list[Tensor] = []  # of the step's micro-batches on this rank
        self._rates: list = []  # of the optimizer's groups, while they are scaled

    def state_dict(self) -> dict:
        """Returns what a checkpoint records, in which `rho_0` keeps its bits."""
        return {"step_scaling_rho_0": self.first}

    def load_state_dict(self, state: dict) -> None:
        """Loads the result of [`state_dict`]; without one, the next step is the first."""
        self.first = state.get("step_scaling_rho_0")

    def add(self, batch: dict[str, Tensor], logps: Tensor) -> None:
        """
        Keeps the weights of a micro-batch in training.

        Args:
            batch (`dict[str, torch.Tensor]`): The micro-batch, with the sampler's log-probabilities.
            logps (`torch.Tensor` of shape `(B, T)`): Those of the current policy in nats, detached.
        """
        if self.trainer.model.training:
            found = sequence_log_weights(logps, batch["sampling_per_token_logps"], counted(batch))
            self._log_weights.append(found)

    def on_train_begin(self, args, state, control, **kwargs):
        self._log_weights = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        mine, self._log_weights = torch.cat(self._log_weights), []
        rho = effective_share(self.trainer.accelerator.gather(mine))
        self.first = rho if self.first is None else self.first
        factor = step_factor(rho, self.first)
        groups = self.trainer.optimizer.param_groups
        self._rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        values = {"step_scaling/rho": rho, "step_scaling/rho_0": self.first, "step_scaling/factor": factor}
        self.trainer.log_values(values)

    def on_optimizer_step(self, args, state, control, **kwargs):
        for group, rate in zip(self.trainer.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
