"""The score of one completion."""

from trl_quant.tasks import arithmetic_reward, gsm8k_reward


def gsm8k(completion, answer, **kwargs):
    return gsm8k_reward(completions=[completion], answer=[answer], **kwargs)[0]


def arithmetic(completion, answer, **kwargs):
    return arithmetic_reward(completions=[completion], answer=[answer], **kwargs)[0]
