"""Linear layers that compute in low precision as an engine does. Engines, the self-check and training use them."""

from .frozen import FrozenLinear
from .frozen_unified import FrozenUnifiedLinear, frozen_layer
from .lora import frozen_lora_linear
from .qat import QATLinear, sampled_linear, share_scale, trained_linear
from .quantized import EngineWeight, QuantizedLinear, engine_weight, held_vllm_linear, quantized_linear, vllm_linear
from .unified import SampledLinear, UnifiedLinear


__all__ = [
    "EngineWeight",
    "FrozenLinear",
    "FrozenUnifiedLinear",
    "QATLinear",
    "QuantizedLinear",
    "SampledLinear",
    "UnifiedLinear",
    "engine_weight",
    "frozen_layer",
    "frozen_lora_linear",
    "held_vllm_linear",
    "quantized_linear",
    "sampled_linear",
    "share_scale",
    "trained_linear",
    "vllm_linear",
]
