"""
Ties at the entropy quantile: tokens with the same context get the same entropy.

With `top_entropy_quantile`, TRL trains on the tokens whose entropy reaches a quantile of all entropies. The completions
of a prompt have the same first context, and those that begin alike further ones, so many entropies tie. In padded rows
equal contexts stand in equal places and get equal bits. In a packed row they stand in different places of the matrix
products, and rounding would decide which of them reach a quantile that lies at the tie.

[`tied`] gives all tokens of a context the smallest of their entropies, before TRL computes the quantile.
"""

import torch
from accelerate import Accelerator
from torch import Tensor


# Odd factors of 64 bits, as two's complement: SplitMix64's increment and its two multipliers
STEP, FACTORS = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def contexts(batch: dict[str, Tensor]) -> Tensor:
    """
    Numbers the contexts of a scored batch: equal numbers for equal tokens before a token, whatever the padding.

    Args:
        batch (`dict`): Prompts `(B, P)` with P of at least 1, completions `(B, T)`, and the masks of both.

    Returns:
        `torch.Tensor` of shape `(B, T)`: 64-bit sums of one hash for each token and its position. Different contexts
        have different numbers, except with a probability of 2^-64.
    """
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1).long()
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).long()
    x = ids + (mask.cumsum(1) << 32)
    x = x * STEP
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x = (x ^ (x >> shift)) * factor
    x = (x ^ (x >> 31)) * mask
    first = batch["prompt_ids"].shape[1] - 1
    return x.cumsum(1)[:, first:-1]


def tied(entropies: Tensor, mask: Tensor, batch: dict[str, Tensor], accelerator: Accelerator) -> Tensor:
    """
    Gives tokens with the same context the same entropy, over all ranks. All ranks must call it.

    Args:
        entropies, mask (`torch.Tensor` of shape `(B, T)`): Entropies in nats, and 1 on the tokens that count.
        batch (`dict`): The batch that the entropies belong to, as in [`contexts`].
        accelerator ([`~accelerate.Accelerator`]): Gathers the entropies of all ranks.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The equal entropies, with the gradients of `entropies`.
    """
    is_counted = mask.bool()
    own, numbers = entropies.detach()[is_counted], contexts(batch)[is_counted]
    every = accelerator.gather(accelerator.pad_across_processes(own, pad_index=torch.inf))
    every_number = accelerator.gather(accelerator.pad_across_processes(numbers))
    names = torch.unique(every_number, return_inverse=True)[1]
    smallest = every.new_full((len(names),), torch.inf).scatter_reduce(0, names, every, "amin")[names]
    first = accelerator.process_index * (len(every) // accelerator.num_processes)
    equal = entropies.detach().clone()
    equal[is_counted] = smallest[first : first + len(own)]
    return equal + (entropies - entropies.detach())
