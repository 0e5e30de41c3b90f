"""TRL's trainers with quantized rollouts, and what they share."""
