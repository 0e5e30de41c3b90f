"""
Counts the decode steps of a generation by the number of completions that are still sampled, for factors in flight.

    python benchmarks/in_flight.py
    python benchmarks/in_flight.py --factors 1 2 3 --picture docs/in_flight.png

Nothing is measured: lengths are those of `step.py --completions 64x4096:lognormal`, and generations end by the pool's
own rule. All completions of a generation decode together, one token a step. vLLM starts some a step or two later, so
that now and then another group finishes first. The table has means over the last 16 generations:

| column | is |
|---|---|
| steps | decode steps of a generation |
| few | those with at most 16 completions left |
| mean | completions in flight, averaged over the decode steps |
| again | tokens that are computed again |
| length | mean length of the completions that return |
| limit | the least seconds for sampling on the card, computing again included (see `limits.py`) |
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import step
from engines import BANDWIDTH, of_card
from limits import cache_bytes, rate_of, weight_bytes, weights_of
from step_runs import FULL

from trl_quant.precisions import in_vllm
from trl_quant.trainers.pool import may_end


FEW = 16


class Generation(NamedTuple):
    """
    Attributes:
        active (`list[int]`): Number of completions in flight at each decode step.
        tokens (`list[int]`): Number of their tokens so far, prompts included, at each decode step.
        again (`int`): Number of tokens that are computed again, prompts of carried groups included.
        returned (`list[int]`): Lengths of the completions that return.
    """

    active: list[int]
    tokens: list[int]
    again: int
    returned: list[int]


class Flying:
    """A group in flight: when it began, and for each completion its length and how many tokens it has."""

    def __init__(self, began: int, lengths: list[int]):
        self.began, self.lengths, self.have = began, lengths, [0] * len(lengths)

    def left(self) -> list[int]:
        return [length - have for length, have in zip(self.lengths, self.have) if have < length]


def generations(
    drawn: list[list[int]], factor: float, each: int, prompt: int, max_staleness: int = 4
) -> Iterator[Generation]:
    """
    Yields the generations of a run.

    Args:
        drawn (`list[list[int]]`): Lengths of the completions of each step, in the order in which groups start.
        factor (`float`): `rollouts_in_flight`.
        each (`int`): Completions of a group.
        prompt (`int`): Tokens of a prompt.
        max_staleness (`int`): Largest age of a group that returns, in generations.
    """
    waiting = iter([lengths[i : i + each] for lengths in drawn for i in range(0, len(lengths), each)])
    wanted, groups = len(drawn[0]) // each, []
    for number in range(len(drawn)):
        in_flight = min(math.ceil(factor * wanted), (len(drawn) - number) * wanted)
        carried = [sum(have for have, length in zip(g.have, g.lengths) if 0 < have < length) for g in groups]
        again = sum(tokens + prompt for tokens in carried if tokens)
        groups += [Flying(number, next(waiting)) for _ in range(in_flight - len(groups))]
        began, active, tokens = [group.began for group in groups], [], []
        while not may_end(began, [not group.left() for group in groups], wanted, number, max_staleness):
            unfinished = sum(len(group.left()) for group in groups)
            so_far = sum(h for g in groups for h, length in zip(g.have, g.lengths) if h < length) + prompt * unfinished
            steps = min(left for group in groups for left in group.left())  # until the next one ends
            active += [unfinished] * steps
            tokens += [so_far + unfinished * step for step in range(steps)]
            for group in groups:
                group.have = [min(have + steps, length) for have, length in zip(group.have, group.lengths)]
        finished = [group for group in groups if not group.left()][:wanted]
        groups = [group for group in groups if group not in finished]
        yield Generation(active, tokens, again, [length for group in finished for length in group.lengths])


def limit(generation: Generation, size: str, machine: str, precision: str) -> float:
    """Returns the least seconds for sampling a generation, without the prompts of groups that start."""
    layers, head = weights_of(size)
    bandwidth, rate, rate_16 = of_card(BANDWIDTH, machine), rate_of(precision, machine), rate_of("bf16", machine)
    seconds = 2 * layers * generation.again / rate
    for active, tokens in zip(generation.active, generation.tokens, strict=True):
        read = weight_bytes(size, precision, active) + tokens * cache_bytes(size)
        seconds += max(read / bandwidth, 2 * active * (layers / rate + head / rate_16))
    return seconds


def draw(by_factor: dict[float, list[Generation]], path: Path) -> None:
    """Draws how many decode steps of a generation have at least so many completions in flight."""
    from matplotlib.figure import Figure
    from palette import save_picture

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for factor, found in by_factor.items():
        most = max(max(generation.active) for generation in found if generation.active)
        numbers = list(range(1, most + 1))
        steps = [sum(sum(a >= number for a in g.active) for g in found) / len(found) for number in numbers]
        axes.step(
            [*steps, 0],
            [*numbers, most],
            where="pre",
            label=f"rollouts_in_flight={factor:g}",
        )
    axes.set_xlabel("decode steps of a generation")
    axes.set_ylabel("completions in flight")
    axes.set_ylim(0)
    axes.set_xlim(0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--completions", type=step.shape_of, default=step.shape_of("64x4096:lognormal"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--median", type=float, default=900)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--size", default="7b")
    parser.add_argument("--precision", default="fp8", choices=in_vllm())
    parser.add_argument("--card", default="H200", choices=BANDWIDTH)
    parser.add_argument("--picture", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    drawn, by_factor = step.draw_lengths(args, *args.completions), {}
    print(f"{'factor':>6}{'steps':>8}{'few':>8}{'mean':>8}{'again':>8}{'length':>8}{'limit':>8}")
    for factor in args.factors:
        found = by_factor[factor] = [*generations(drawn, factor, args.generations, args.prompt)][-FULL:]
        steps = [len(each.active) for each in found]
        few = sum(active <= FEW for each in found for active in each.active) / len(found)
        mean = sum(sum(each.active) for each in found) / sum(steps)
        length = fmean(length for each in found for length in each.returned)
        seconds = fmean(limit(each, args.size, args.card, args.precision) for each in found)
        again = fmean(each.again for each in found)
        print(f"{factor:>6g}{fmean(steps):>8.0f}{few:>8.0f}{mean:>8.1f}{again:>8.0f}{length:>8.0f}{seconds:>8.2f}")
    if args.picture:
        draw(by_factor, args.picture)


if __name__ == "__main__":
    main()
