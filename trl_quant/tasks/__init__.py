"""Tasks: what to ask, and how an answer is scored."""

from .countdown import countdown_reward
from .data import load_prompts
from .rewards import REWARDS, arithmetic_reward, division_reward, format_reward, gsm8k_reward
from .sudoku import sudoku_reward


__all__ = [
    "REWARDS",
    "arithmetic_reward",
    "countdown_reward",
    "division_reward",
    "format_reward",
    "gsm8k_reward",
    "load_prompts",
    "sudoku_reward",
]
