"""Checks that an engine computes what the policy does: log-probabilities, keys and values, activations."""
