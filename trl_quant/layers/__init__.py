"""Linear layers that compute in low precision as an engine does. Engines, the self-check and training use them."""

from .frozen import FrozenLinear, frozen_precisions
from .lora import frozen_lora_linear
from .qat import QATLinear, sampled_linear, share_scale, trained_linear
from .quantized import EngineWeight, QuantizedLinear, engine_weight, quantized_linear, vllm_linear
from .unified import SampledLinear, UnifiedLinear


__all__ = [
    "EngineWeight",
    "FrozenLinear",
    "QATLinear",
    "QuantizedLinear",
    "SampledLinear",
    "UnifiedLinear",
    "engine_weight",
    "frozen_lora_linear",
    "frozen_precisions",
    "quantized_linear",
    "sampled_linear",
    "share_scale",
    "trained_linear",
    "vllm_linear",
]
