"""`trl`: TRL's own importance sampling (`vllm_importance_sampling_mode`), which TRL applies and this file measures.

    token_truncate, token_mask         W = w
    sequence_truncate, sequence_mask   W = product of w over the sequence
    *_truncate                         weight min(max(W, C_min), C_max)
    *_mask                             weight W where C_min <= W <= C_max, else 0: token or sequence is dropped

| TRL | here |
|---|---|
| `vllm_importance_sampling_mode` | `mode` |
| `vllm_importance_sampling_clip_min`, `..._clip_max` | `clip_min`, `clip_max`; `None` for no bound |

The product drifts from 1 as the sequence grows. Over 100 tokens, it exceeds TRL's default cap of 3 when the mean log
ratio exceeds 0.011 nats per token.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import ClassVar
from weakref import WeakSet

import torch

from .base import CorrectionInputs, CorrectionOutput
from .diagnostics import diagnose, rollout_ratio, unit_weights
from .traits import Correction


logger = logging.getLogger(__name__)
_warned: WeakSet["TRL"] = WeakSet()  # the instances that have warned; each run has its own instance


@dataclass(frozen=True, eq=False)
class TRL(Correction):
    """Leaves TRL's weights in the loss and measures the mismatch. Warns once if TRL drops tokens."""

    mode: str = "sequence_mask"
    """One of the four modes above."""
    clip_max: float | None = 3.0
    """`C_max`, the largest weight. `None` for no bound."""
    clip_min: float | None = None
    """`C_min`, the smallest weight. `None` for no bound."""

    aliases: ClassVar[dict[str, str]] = {
        "mode": "vllm_importance_sampling_mode",
        "clip_max": "vllm_importance_sampling_clip_max",
        "clip_min": "vllm_importance_sampling_clip_min",
    }
    whole_batch: ClassVar[bool] = True  # TRL computes its weights before the first loss
    applied_by_trl: ClassVar[bool] = True

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        inputs = replace(inputs, level=self.mode.partition("_")[0])
        ratio = rollout_ratio(inputs)
        cap = math.inf if self.clip_max is None else self.clip_max
        w = unit_weights(inputs, ratio)
        outside = (w > cap) | (w < (self.clip_min or 0.0))
        dropped = outside if self.mode.endswith("mask") else torch.zeros_like(outside)
        metrics, _ = diagnose(inputs, ratio, cap, dropped=dropped)
        share = metrics["mismatch/dropped_fraction"]
        if share and self not in _warned:
            _warned.add(self)
            logger.warning(
                "TRL's `vllm_importance_sampling_mode`=%r drops %.1f%% of this batch's tokens, whose weight is beyond "
                "its bounds (`vllm_importance_sampling_clip_max`=%s). `mismatch/dropped_fraction` logs this share at "
                "every step. To drop fewer tokens, widen the bounds or choose a mode that truncates.",
                self.mode,
                100 * share,
                self.clip_max,
            )
        return CorrectionOutput(None, metrics=metrics)
