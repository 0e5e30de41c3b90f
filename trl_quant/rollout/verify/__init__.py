"""Compares what an engine computes with what the policy computes: log-probabilities, keys and values, activations."""
