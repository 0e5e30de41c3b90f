"""What is a stale token worth? One file per answer, all pure torch.

A quantized sampler draws tokens from `exp(rollout_logps)`; the trainer scores them with `exp(old_logps)`. Every
correction maps the same inputs to per-token weights and, where needed, to clip bounds or another proximal policy. The
loss becomes

    w_t * min(R_t A_t, clip(R_t, clip_low_t, clip_high_t) A_t),    R_t = exp(logps_t - old_logps_t)

Example:

```python
>>> from trl_quant.corrections import CORRECTIONS, CorrectionInputs
>>> correction = CORRECTIONS["tis"](cap=2.0)
>>> output = correction(CorrectionInputs(rollout_logps, old_logps, advantages, mask))
>>> loss = -(output.weights * torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))
```
"""

from .acr import ACR
from .ais import AIS
from .base import CorrectionInputs, CorrectionOutput
from .coupled import Coupled
from .decoupled import Decoupled
from .none import NoCorrection
from .tis import TIS


CORRECTIONS = {
    "none": NoCorrection,
    "coupled": Coupled,
    "decoupled": Decoupled,
    "tis": TIS,
    "acr": ACR,
    "ais": AIS,
}

__all__ = [
    "ACR",
    "AIS",
    "CORRECTIONS",
    "TIS",
    "CorrectionInputs",
    "CorrectionOutput",
    "Coupled",
    "Decoupled",
    "NoCorrection",
]
