"""
The rule on NaN and infinity: the run stops at the step whose loss or gradient is not finite, and saves nothing of it.

An optimizer that is given one NaN makes every weight NaN, and a checkpoint of those would take the place of a good one.
So each step is looked at before the optimizer takes its gradient, and the weights before each checkpoint and at the
end, since NaN can come by other ways:

| where | looks at | and then |
|---|---|---|
| before the optimizer's step | the losses of the micro-batches, the norm of the gradient | the weights are still good |
| the same under DeepSpeed, whose engine takes its step earlier | the same | the last checkpoint is still good |
| before a checkpoint, and when the training ends | trained weights, the optimizer's state | the same |

Under FP16 the loss scaler skips steps whose gradients overflow, as it should, so there the first of these is left out.
A step costs one number that the device hands to the host.
"""

from collections.abc import Iterator

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer

from ..rollout.stream import is_finite, local_part
from .checkpoints import how_to_go_on


def check_step(trainer: Trainer, loss: Tensor, norm: Tensor | float | None) -> None:
    """
    Raises `RuntimeError`, on all ranks, where a step must not be taken. Collective.

    Args:
        loss (`torch.Tensor`): Sum of this rank's losses in this step, shape ().
        norm (`torch.Tensor`, `float` or `None`): That of the whole gradient.
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
    bad = ~(loss + norm).isfinite() | (norm < 0)  # DeepSpeed has -1 for a norm that is not finite
    if accelerator.reduce(bad.float(), "sum").item() > 0:
        raise RuntimeError(
            f"Step {trainer.state.global_step + 1} is not finite: its loss is {loss.item():g}, the norm of its "
            f"gradient {norm.item():g}. The run stops here, and no checkpoint holds this step. "
            f"{how_to_go_on(trainer.args.output_dir)} A resume meets the same batch again: look at its rewards and "
            "advantages, lower `learning_rate`, or choose an `is_correction` with bounds."
        )


def check_trained(trainer: Trainer) -> None:
    """Raises `RuntimeError`, on all ranks, where a trained weight or optimizer state is not finite. Collective."""
    mine = [name for name, tensor in _trained(trainer) if not is_finite(tensor)]
    if found := [name for names in gather_object([mine]) for name in names]:
        others = f", as {len(found) - 1} other tensors" if len(found) > 1 else ""
        raise RuntimeError(
            f"{found[0]} is not finite after step {trainer.state.global_step}{others}. The run stops here and does not "
            f"save it. {how_to_go_on(trainer.args.output_dir)}"
        )


def _trained(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of the trained weights and of the optimizer's state, with their names."""
    for name, param in trainer.model.named_parameters():
        if param.requires_grad:
            yield f"`{name}`", local_part(param)
    states = trainer.optimizer.state.values() if trainer.optimizer is not None else ()  # none before the first training
    for i, state in enumerate(states):
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield f"the optimizer's {name!r} of parameter {i}", local_part(value)
