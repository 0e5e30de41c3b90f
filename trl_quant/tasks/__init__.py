"""Tasks: questions, and rewards that score their answers."""

from .countdown import countdown_reward
from .data import load_prompts
from .mathematics import lenient_math_reward, math_reward, strict_math_reward
from .rewards import (
    REWARDS,
    arithmetic_reward,
    division_reward,
    format_reward,
    gsm8k_reward,
    think_answer_reward,
)
from .sudoku import sudoku_reward


__all__ = [
    "REWARDS",
    "arithmetic_reward",
    "countdown_reward",
    "division_reward",
    "format_reward",
    "gsm8k_reward",
    "lenient_math_reward",
    "load_prompts",
    "math_reward",
    "strict_math_reward",
    "sudoku_reward",
    "think_answer_reward",
]
