"""Linear layers that compute in low precision: what an engine computes, for engines, self-check and training alike."""

from .quantized import EngineWeight, QuantizedLinear, engine_weight, quantized_linear, vllm_linear


__all__ = ["EngineWeight", "QuantizedLinear", "engine_weight", "quantized_linear", "vllm_linear"]
