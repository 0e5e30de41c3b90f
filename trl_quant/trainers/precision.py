"""
Makes a trainer's models compute in its `train_precision`, as the engine that samples from them does. `policy/`, which
knows no trainer, changes the models.
"""

import logging

import torch
from accelerate.utils import broadcast
from torch import nn
from transformers import TrainerCallback

from ..layers.products import multiplies
from ..policy.adapters import UnifiedLoraLinear
from ..policy.exact import compute_exactly
from ..policy.unified import checkpoint_dtype, flow, unified_layers, unify
from ..precisions import PRECISIONS, frozen_bases, unified_flows


logger = logging.getLogger(__name__)


class WeightsMoved(TrainerCallback):
    """Makes the layers quantize their weights again after each optimizer step, however the optimizer wrote them."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.layers = unified_layers(model)
        self.merged = {m.base_layer for m in model.modules() if isinstance(m, UnifiedLoraLinear) and m.merges}
        for layer in self.layers:
            layer.forget()

    def on_optimizer_step(self, args, state, control, **kwargs):
        for layer in self.layers:
            if layer.weight.requires_grad or layer in self.merged:
                layer.forget()


def hand_out(model: nn.Module, device: torch.device) -> None:
    """Sends a model's weights from the first rank, which alone has them under `cpu_ram_efficient_loading`, to all."""
    for param in model.parameters():
        param.data = broadcast(param.data.to(device)).to(param.device)


def train_as_sampled(trainer) -> None:
    """Switches the loaded policy and reference of a trainer to its `train_precision`."""
    args, reference = trainer.args, getattr(trainer, "ref_model", None)
    if reference is not None and args.fsdp_version == 2:
        hand_out(reference, trainer.accelerator.device)  # accelerate does so for the policy only
    kind = trainer.spec.training.kind
    if kind == "none" or (kind == "frozen" and args.train_precision in frozen_bases()):
        return  # a frozen 4-bit base computes by itself
    merged, rounds_to = args.lora_sync == "merge", None
    if not merged:
        start = (args.vllm_engine_kwargs or {}).get("model", trainer.model.name_or_path)
        rounds_to = checkpoint_dtype(start, args.trust_remote_code)
    device = trainer.accelerator.device
    has_products = args.train_precision in unified_flows()
    if has_products and device.type == "cuda" and not multiplies(PRECISIONS[args.train_precision].format, device):
        logger.warning(
            "This device does not multiply in `train_precision`=%r, so the policy's layers multiply the rounded values "
            "in BF16. That is slower than without `train_precision`, and differs from what vLLM computes.",
            args.train_precision,
        )
    unify(trainer.model, args.train_precision, merged, rounds_to)
    trainer.add_callback(WeightsMoved())
    if reference is not None:
        unify(reference, args.train_precision)
        for layer in unified_layers(reference):
            layer.moves_unseen = args.sync_ref_model


def follow_engine(trainer, engine) -> None:
    """Under `exact_rollouts`, makes a trainer's policy and reference compute with its engine's kernels, in BF16."""
    if trainer.args.exact_rollouts:
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            if not trainer.args.bf16 and next(model.parameters()).dtype != engine.kernels.dtype:
                raise ValueError("`exact_rollouts`=True computes in BF16: set `bf16=True`, or load the model in BF16.")
            compute_exactly(model, engine.kernels)


def check_flow(trainer, before: set[tuple]) -> None:
    """Raises `ValueError` if another trainer changed how the policy computes: `before` is what [`flow`] returned."""
    if flow(trainer.model) != before:
        raise ValueError(
            f"`train_precision`={trainer.args.train_precision!r}, but a trainer that was built later on the same model "
            "changed how it computes. Build this trainer again, or load a model for each of the two."
        )
