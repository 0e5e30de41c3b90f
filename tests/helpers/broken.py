"""Steps that are not finite, for the tests of what a run does then."""

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback


class Broken(TrainerCallback):
    """Puts `value` into a gradient of one step, or after it into a weight or the optimizer."""

    def __init__(self, step: int, value: float = torch.nan, place: str = "gradient"):
        self.step, self.value, self.place, self.handle = step, value, place, None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.place == "gradient" and state.global_step + 1 == self.step:
            weight = model.get_input_embeddings().weight
            self.handle = weight.register_hook(lambda grad: torch.full_like(grad, self.value))

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if self.handle is not None:
            self.handle.remove()
        if state.global_step == self.step and self.place == "weight":
            weight = model.get_input_embeddings().weight
            part = weight.to_local() if isinstance(weight, DTensor) else getattr(weight, "ds_tensor", weight)
            part.detach().view(-1)[0] = self.value
        if state.global_step == self.step and self.place == "optimizer":
            next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = self.value
