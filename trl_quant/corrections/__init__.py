"""Corrections for the mismatch between sampler and trainer, in pure torch, one method in each file.

A quantized sampler draws tokens from `exp(rollout_logps)`, and the trainer scores them with `exp(old_logps)`. Every
correction maps the same inputs to a weight for each token. Some also return clip bounds or another proximal policy. The
loss becomes

    w_t * min(R_t A_t, clip(R_t, clip_low_t, clip_high_t) A_t),    R_t = exp(logps_t - old_logps_t)

A correction is a frozen dataclass of its hyperparameters. Each hyperparameter's type states its range. A correction's
traits are class variables, which [`~corrections.traits.Correction`] lists.

TRL adds its KL term (`beta`) after it applies the weights, so the weights never multiply that term. TRL's
`use_bias_correction_kl`, which is on by default, multiplies the term by `R`. With `coupled`, the denominator of `R` is
the sampler's probability. For corrections with `every_update`, the value of `R` is 1.

Example:

```python
>>> from trl_quant.corrections import CORRECTIONS, CorrectionInputs
>>> correction = CORRECTIONS["tis"](cap=2.0)
>>> output = correction(CorrectionInputs(rollout_logps, old_logps, advantages, mask))
>>> loss = -(output.weights * torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))
```
"""

from collections import ChainMap

from .acr import ACR
from .ais import AIS
from .base import CorrectionInputs, CorrectionOutput
from .cis import CIS
from .coupled import Coupled
from .decoupled import Decoupled
from .dppo import DPPO
from .geometric import Geometric
from .icepop import IcePop
from .none import NoCorrection
from .tis import TIS
from .traits import Correction
from .trl import TRL
from .trm import TRM


CORRECTIONS = {
    "none": NoCorrection,
    "coupled": Coupled,
    "decoupled": Decoupled,
    "tis": TIS,
    "acr": ACR,
    "ais": AIS,
    "cis": CIS,
    "icepop": IcePop,
    "geometric": Geometric,
    "trm": TRM,
    "dppo": DPPO,
}
# The values of `is_correction`: the methods above, and TRL's own, which TRL applies to its loss
ALL_CORRECTIONS = ChainMap({"trl": TRL}, CORRECTIONS)

__all__ = [
    "ACR",
    "AIS",
    "ALL_CORRECTIONS",
    "CIS",
    "CORRECTIONS",
    "DPPO",
    "TIS",
    "TRM",
    "Correction",
    "CorrectionInputs",
    "CorrectionOutput",
    "Coupled",
    "Decoupled",
    "Geometric",
    "IcePop",
    "NoCorrection",
]
