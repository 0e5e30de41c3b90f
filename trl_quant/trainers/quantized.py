"""The old path and name of [`~trainers.sampling.QuantSampling`], which other people's trainers inherit from."""

from .sampling import QuantSampling as QuantRollouts


__all__ = ["QuantRollouts"]
