"""Engines that sample with transformers, in the trainer's process."""
