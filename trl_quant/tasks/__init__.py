"""Tasks: what to ask, and how an answer is scored."""

from .countdown import countdown_reward
from .data import load_prompts
from .rewards import REWARDS, arithmetic_reward, format_reward, gsm8k_reward, sheet_reward
from .sudoku import sudoku_reward


__all__ = [
    "REWARDS",
    "arithmetic_reward",
    "countdown_reward",
    "format_reward",
    "gsm8k_reward",
    "load_prompts",
    "sheet_reward",
    "sudoku_reward",
]
