"""
Stops a run at a step whose loss or gradient is not finite, and does not save that step.

One NaN in a gradient makes every weight NaN, and a checkpoint of such weights would replace a good one. So each step is
checked before the optimizer takes it. Since NaN has other causes too, the weights are checked before each checkpoint
and at the end of training:

| time of the check | checked tensors | where good weights remain |
|---|---|---|
| before the optimizer's step | the losses of the micro-batches, the norm of the gradient | in the model |
| after it under DeepSpeed, whose engine takes it earlier | the same | in the last checkpoint |
| before a checkpoint, and when training ends | trained weights, the optimizer's state | in the last checkpoint |

Under FP16 the loss scaler skips steps whose gradients overflow, so steps are not checked there. The check of a step
moves one number from the device to the host.
"""

from collections.abc import Iterator

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer

from ..rollout.tensors import is_finite, local_part
from ..storage.run_checkpoints import how_to_go_on


class FiniteSteps:
    """
    Stops a trainer before its optimizer takes a step that is not finite.

    | TRL's call | here |
    |---|---|
    | `train` begins | [`begin`] drops the losses of a step that an earlier `train` interrupted |
    | `training_step` ends, for each micro-batch | [`add_loss`] adds its loss to those of the step |
    | `_get_grad_norm` ends, before the optimizer's step | [`check_and_forget`] checks the losses and the gradient |

    Args:
        trainer ([`~transformers.Trainer`]): The trainer.

    Attributes:
        loss (`torch.Tensor` or `float`): Sum of the step's losses so far, on this rank.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.loss: Tensor | float = 0.0

    def begin(self) -> None:
        """Resets the sum of losses when a training begins."""
        self.loss = 0.0

    def add_loss(self, loss: Tensor) -> None:
        """Adds the loss, of shape (), of a micro-batch."""
        self.loss = self.loss + loss

    def check_and_forget(self, norm: Tensor | float | None) -> None:
        """Checks the step with [`check_step`], and resets the sum of losses. All ranks must call it."""
        loss, self.loss = self.loss, 0.0
        check_step(self.trainer, loss, norm)


def check_step(trainer: Trainer, loss: Tensor, norm: Tensor | float | None, whose: str = "") -> None:
    """
    Raises `RuntimeError`, on all ranks, if a step's loss or gradient is not finite. All ranks must call it.

    Args:
        trainer ([`~transformers.Trainer`]): The trainer.
        loss (`torch.Tensor`): Sum of this rank's losses in this step, shape ().
        norm (`torch.Tensor`, `float` or `None`): Norm of the whole gradient.
        whose (`str`, *optional*): Inserted after the step in the message, such as `"of the critic "`.
    """
    accelerator = trainer.accelerator
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if accelerator.scaler is not None or (deepspeed and accelerator.mixed_precision == "fp16"):
        return
    if deepspeed and accelerator.optimizer_step_was_skipped:
        norm = torch.nan
    elif isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = torch.as_tensor(0.0 if norm is None else norm, device=loss.device)
    bad = ~(loss + norm).isfinite() | (norm < 0)  # DeepSpeed returns -1 for a norm that is not finite
    if accelerator.reduce(bad.float(), "sum").item() > 0:
        raise RuntimeError(
            f"Step {trainer.state.global_step + 1} {whose}is not finite: its loss is {loss.item():g}, the norm of its "
            f"gradient {norm.item():g}. The run stops here, and no checkpoint holds this step. "
            f"{how_to_go_on(trainer.args.output_dir)} A resumed run trains on the same batch: look at its rewards and "
            "advantages, lower `learning_rate`, or choose an `is_correction` with bounds."
        )


def check_trained(trainer: Trainer) -> None:
    """
    Raises `RuntimeError`, on all ranks, if a trained weight or the optimizer's state is not finite. All ranks must call
    it.
    """
    mine = [name for name, tensor in _trained(trainer) if not is_finite(tensor)]
    found = [name for names in gather_object([mine]) for name in names]
    if not found:
        return
    others = f", nor are {len(found) - 1} other tensors" if len(found) > 1 else ""
    raise RuntimeError(
        f"{found[0]} is not finite after step {trainer.state.global_step}{others}. The run stops here and does not "
        f"save it. {how_to_go_on(trainer.args.output_dir)}"
    )


def _trained(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's part of the trained weights and of the optimizer's state, with names for a message."""
    for name, param in trainer.model.named_parameters():
        if param.requires_grad:
            yield f"`{name}`", local_part(param)
    yield from _moments(trainer.optimizer, "the optimizer's")
    critic = getattr(trainer, "critic", None)  # only PPO has one
    if critic is not None:
        for name, param in critic.model.named_parameters():
            yield f"the critic's `{name}`", local_part(param)
        yield from _moments(critic.optimizer, "the critic's optimizer's")


def _moments(optimizer: torch.optim.Optimizer | None, whose: str) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's part of an optimizer's state, with names for a message that begin with `whose`."""
    states = optimizer.state.values() if optimizer is not None else ()  # none before the first training
    for i, state in enumerate(states):
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield f"{whose} {name!r} of parameter {i}", local_part(value)
