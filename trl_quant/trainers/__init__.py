"""TRL's trainers with quantized rollouts, and the modules that they share."""
