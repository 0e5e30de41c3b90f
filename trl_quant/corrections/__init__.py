"""What is a stale token worth? Each file has one answer, in pure torch.

A quantized sampler draws tokens from `exp(rollout_logps)`, and the trainer scores them with `exp(old_logps)`. Every
correction maps the same inputs to a weight for each token. Some also return clip bounds or another proximal policy. The
loss becomes

    w_t * min(R_t A_t, clip(R_t, clip_low_t, clip_high_t) A_t),    R_t = exp(logps_t - old_logps_t)

A correction is a frozen dataclass of its hyperparameters. Each hyperparameter's type states its range. Class variables
describe the correction further:

| variable | meaning |
|---|---|
| `whole_batch` | the weights depend on all tokens of a generation, which must be scored before the first update |
| `every_update` | the correction judges the current policy, whose `old_logps` each update computes; `R` is 1 |
| `token_only` | the correction needs the ratio of each token (`importance_sampling_level="token"`) |
| `settings` | the GRPO settings that the method asks for, by TRL's names |
| `aliases` | hyperparameter -> the config's field that sets it, where that is not `<correction>_<hyperparameter>` |

TRL adds its KL term (`beta`) after the weights, so they never reach it. TRL's `use_bias_correction_kl`, which is on by
default, multiplies the term by `R`. With `coupled`, `R` has the sampler in its denominator. Under `every_update`, the
value of `R` is 1.

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
from .dppo import DPPO
from .geometric import Geometric
from .icepop import IcePop
from .none import NoCorrection
from .tis import TIS
from .trm import TRM


CORRECTIONS = {
    "none": NoCorrection,
    "coupled": Coupled,
    "decoupled": Decoupled,
    "tis": TIS,
    "acr": ACR,
    "ais": AIS,
    "icepop": IcePop,
    "geometric": Geometric,
    "trm": TRM,
    "dppo": DPPO,
}

__all__ = [
    "ACR",
    "AIS",
    "CORRECTIONS",
    "DPPO",
    "TIS",
    "TRM",
    "CorrectionInputs",
    "CorrectionOutput",
    "Coupled",
    "Decoupled",
    "Geometric",
    "IcePop",
    "NoCorrection",
]
