"""The trained model's arithmetic: adapters, a frozen 4-bit base, training in FP8 or INT8, the engine's own kernels."""
