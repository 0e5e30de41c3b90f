"""UAQ as an llmcompressor modifier, to combine in a recipe with llmcompressor's own (QuRL, section 4.3).

```python
>>> from llmcompressor import oneshot
>>> from llmcompressor.modifiers.quantization import QuantizationModifier
>>> from trl_quant.scaling import UpdateAwareQuantizationModifier

>>> recipe = [
...     UpdateAwareQuantizationModifier(scale=1.5),
...     QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
... ]
>>> oneshot(model=model, recipe=recipe)
```
"""

from llmcompressor.core import State
from llmcompressor.modeling.offset_norm import NormCalibrationModule
from llmcompressor.modifiers import Modifier, ModifierFactory
from pydantic import field_validator

from .uaq import check_scale, scale_norms


class UpdateAwareQuantizationModifier(Modifier):
    """
    Scales the model once, when the recipe is initialized, before any modifier observes or quantizes.

    Args:
        scale (`float`, *optional*, defaults to `1.5`): Factor `s`, greater than 0.
    """

    scale: float = 1.5

    @field_validator("scale")
    @classmethod
    def _positive(cls, scale: float) -> float:
        check_scale(scale)
        return scale

    def on_initialize(self, state: State, **kwargs) -> bool:
        # During `oneshot`, llmcompressor replaces norms that store the gain minus one with norms that store the gain.
        scale_norms(state.model, self.scale, folded=(NormCalibrationModule,))
        return True


# YAML recipes refer to modifiers by name.
ModifierFactory.register("UpdateAwareQuantizationModifier", UpdateAwareQuantizationModifier)
