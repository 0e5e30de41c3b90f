"""Linear layers that compute in low precision as an engine does. Engines, the self-check and training use them."""

from .experts import EngineExperts, UnheldExperts
from .frozen import FrozenLinear
from .frozen_experts import FrozenExperts
from .linear import QuantLinear
from .quantized import EngineLinear, EngineWeight, engine_weight, held_vllm_linear, quantized_linear, vllm_linear
from .unified import SampledLinear, UnifiedLinear, share_scale
from .unified_experts import QuantExperts, SampledExperts, UnifiedExperts


__all__ = [
    "EngineExperts",
    "EngineLinear",
    "EngineWeight",
    "FrozenExperts",
    "FrozenLinear",
    "QuantExperts",
    "QuantLinear",
    "SampledExperts",
    "SampledLinear",
    "UnheldExperts",
    "UnifiedExperts",
    "UnifiedLinear",
    "engine_weight",
    "held_vllm_linear",
    "quantized_linear",
    "share_scale",
    "vllm_linear",
]
