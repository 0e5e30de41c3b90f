"""Corrections on a whole batch and on the rows of each of two ranks, whose processes import this file."""

import math

import torch
import torch.distributed as dist

from trl_quant.corrections import CORRECTIONS, CorrectionInputs


FIELDS = ("rollout_logps", "old_logps", "advantages", "mask")


def case(kind):
    """A whole batch, and the rows of each rank."""
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(5, 6, generator=g) * 3
    rollout = old + 0.4 * torch.randn(5, 6, generator=g)
    rollout[0, 0], rollout[4, 1] = math.nan, -math.inf
    advantages = torch.randn(5, generator=g)
    mask = (torch.rand(5, 6, generator=g) > 0.3).long()
    mask[4, 1] = 1
    rows = [[0, 1, 2, 3], [4]]  # uneven token counts
    if kind == "one rank masked":
        mask[rows[1]] = 0
    elif kind == "one rank unscored":
        rollout[rows[0]] = math.nan
    elif kind == "all masked":
        mask[:] = 0
    elif kind == "one token a rank":
        mask[:] = 0
        mask[1, 2] = mask[4, 3] = 1
    elif kind == "NaN on the other rank":
        old[4, 1] = math.nan
    return CorrectionInputs(rollout, old, advantages, mask), rows


CASES = ("uneven", "one rank masked", "one rank unscored", "all masked", "one token a rank")


def run(name, inputs):
    output = CORRECTIONS[name]()(inputs)
    tensors = {k: getattr(output, k) for k in ("weights", "clip_low", "clip_high", "old_logps")}
    return {k: v.tolist() for k, v in tensors.items() if v is not None}, output.metrics


def rank_of_two(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    outputs = {}
    for kind in (*CASES, "NaN on the other rank"):
        whole, rows = case(kind)
        mine = CorrectionInputs(*(getattr(whole, f)[rows[rank]] for f in FIELDS))
        for name in CORRECTIONS:
            try:
                outputs[kind, name] = run(name, mine)
            except ValueError as error:
                outputs[kind, name] = str(error)
    results.put((rank, outputs))
    dist.barrier()
    dist.destroy_process_group()
