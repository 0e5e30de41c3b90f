"""The critic of PPO that shares the policy's trunk: a value head on the hidden states that the output head reads.

One forward pass of the policy serves both losses. TRL's fused head reads the decoder's output and never calls the
output head. So a hook on the decoder computes the values while TRL computes the log-probabilities. One backward pass
carries both losses to the policy's layers or its adapter. The value head is kept apart from the policy, so checkpoints
and engines still see a plain language model.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers import Trainer
from transformers.utils import SAFE_WEIGHTS_NAME

from ...layers.packed import PACKED
from .critic import Critic


class ValueHead(nn.Module):
    """
    A linear layer to one number, in float32. It starts at zero, so the critic first predicts 0 everywhere.

    Args:
        size (`int`): The size H of the hidden states.
        device (`torch.device`): The device of the head.
    """

    def __init__(self, size: int, device: torch.device):
        super().__init__()
        self.score = skip_init(nn.Linear, size, 1, device=device, dtype=torch.float32)
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states `(..., H)` of any type to values `(...)` in float32."""
        weight = self.score.weight
        with torch.autocast(weight.device.type, enabled=False):
            return self.score(hidden.to(weight.device, weight.dtype)).squeeze(-1)


class SharedCritic(Critic):
    """
    A critic that shares the policy's layers. In these layers the gradients of both losses add up; the policy's
    optimizer clips the sum and learns at `learning_rate`. The head has an optimizer of its own, which learns at
    `value_learning_rate`.

    Every rank has the whole head, and [`join_gradients`] averages its gradient. So neither DDP nor FSDP2 wraps it.

    Args:
        trainer ([`QuantPPOTrainer`]): The trainer. Its policy is loaded.

    Attributes:
        passes (`list[tuple[Tensor, Tensor]]`): The log-probabilities and the values, both `(B, T)`, of the policy's
            forward passes since the values were last taken.
    """

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        self.coefficient = trainer.args.vf_coef
        size = trainer.model.get_output_embeddings().weight.shape[1]
        self.model = ValueHead(size, self.accelerator.device)
        self.optimizer = self.accelerator.prepare_optimizer(self.new_optimizer(self.model))
        self.passes: list[tuple[Tensor, Tensor]] = []

    @property
    def decoder(self) -> nn.Module:
        """The policy without its output head."""
        policy = self.accelerator.unwrap_model(self.trainer.model)
        return (policy.get_base_model() if is_peft_model(policy) else policy).base_model

    def reading(self, score: Callable[[], tuple]) -> tuple:
        """As [`Critic.reading`]. If the policy computed that pass, appends its values to [`passes`]."""
        parts = []  # the values of each chunk of the rows, since TRL may run the forward pass in chunks

        def read(decoder, args, inputs, output):
            values, packed = self.model(output.last_hidden_state), inputs.get(PACKED)
            parts.append(values if packed is None else packed.padded(values.squeeze(0)))

        hook = self.decoder.register_forward_hook(read, with_kwargs=True)
        try:
            scored = score()
        finally:
            hook.remove()
        if parts:
            logps = scored[0]
            # The hidden state of a token's predecessor gives the value of the state before the token
            self.passes.append((logps, torch.cat(parts)[:, -logps.shape[1] - 1 : -1]))
        return scored

    def values(self, batch: dict[str, Tensor]) -> Tensor:
        """As [`Critic.values`]: the values that the policy's loss on this batch has computed."""
        (_, values), self.passes = self.passes[-1], []
        return values

    @torch.no_grad()
    def old_values(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """As [`Critic.old_values`]. Where TRL has scored the old policy, takes the values from that pass."""
        old_logps = batch.get("old_per_token_logps")
        of_old_policy = [values for logps, values in self.passes if logps is old_logps]
        if of_old_policy:
            self.passes = []
            return of_old_policy[0]
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        length = batch["completion_ids"].shape[1]
        self.trainer._get_per_token_logps_and_entropies(self.trainer.model, ids, mask, length, batch_size=rows)
        return self.values(batch)

    def write(self, directory: Path, weights: dict[str, Tensor]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(weights, directory / SAFE_WEIGHTS_NAME)

    def join_gradients(self) -> None:
        for param in self.model.parameters():
            param.grad.copy_(self.accelerator.reduce(param.grad, "mean"))
