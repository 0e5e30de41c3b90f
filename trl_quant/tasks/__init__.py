"""Tasks: what to ask, and how an answer is scored."""

from .data import load_prompts
from .rewards import REWARDS, arithmetic_reward, format_reward, gsm8k_reward


__all__ = ["REWARDS", "arithmetic_reward", "format_reward", "gsm8k_reward", "load_prompts"]
