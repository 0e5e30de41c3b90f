"""Tokens with one context are all above the entropy quantile or all below it, also where rounding tells them apart."""

import pytest
import torch
from tiny import save_tiny
from training import UnevenLengths, config, make, step_and_batch

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.policy.packed import PackedRows
from trl_quant.trainers import grpo, packing
from trl_quant.trainers.ties import contexts, tied


def padded_batch(rows: list[tuple[list[int], list[int]]], prompt: int, completion: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left with a token that is also a word, completions on the right."""
    batch = {name: [] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    for question, answer in rows:
        left, right = prompt - len(question), completion - len(answer)
        batch["prompt_ids"].append([5] * left + question)
        batch["prompt_mask"].append([0] * left + [1] * len(question))
        batch["completion_ids"].append(answer + [5] * right)
        batch["completion_mask"].append([1] * len(answer) + [0] * right)
    return {name: torch.tensor(values) for name, values in batch.items()}


# Equal prompts, equal beginnings, a prompt that is another with the first word of its completion, a word moved by one
ROWS = [
    ([7, 5, 9], [1, 2, 3, 4]),
    ([7, 5, 9], [1, 2, 5]),
    ([7, 5, 9], [2, 1]),
    ([7, 5, 9, 1], [2, 3, 4]),
    ([5, 9], [1, 2, 3, 4]),
    ([5, 7, 9], [1, 2]),
    ([8], [1]),
    ([8], [1, 1, 1, 1]),
]


def words_before(rows) -> list[tuple[int, ...]]:
    """The context of each token, row by row."""
    return [tuple(question + answer[:place]) for question, answer in rows for place in range(len(answer))]


@pytest.mark.parametrize(("prompt", "completion"), [(4, 4), (9, 6)])
def test_equal_numbers_are_equal_contexts(prompt, completion):
    batch = padded_batch(ROWS, prompt, completion)
    numbers = contexts(batch)[batch["completion_mask"].bool()].tolist()
    words = words_before(ROWS)
    assert len(set(words)) < len(words) - 5
    assert [[a == b for b in numbers] for a in numbers] == [[a == b for b in words] for a in words]


def test_many_contexts_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (2048, 66), generator=generator)  # of few words, which sums of plain numbers confuse
    ones = torch.ones_like(ids)
    batch = {"prompt_ids": ids[:, :1], "completion_ids": ids[:, 1:]}
    batch |= {"prompt_mask": ones[:, :1], "completion_mask": ones[:, 1:]}
    words = {tuple(row[: place + 1]) for row in ids.tolist() for place in range(65)}
    assert len(contexts(batch).unique()) == len(words) > 100_000


class Ranks:
    """An accelerator of one of two ranks, which knows what the other one gathers."""

    num_processes = 2

    def __init__(self, rank: int, others: list[torch.Tensor]):
        self.process_index, self.others = rank, iter(others)

    def pad_across_processes(self, x, pad_index=0):
        self.other = next(self.others)
        width = max(len(x), len(self.other))
        self.other = torch.nn.functional.pad(self.other, (0, width - len(self.other)), value=pad_index)
        return torch.nn.functional.pad(x, (0, width - len(x)), value=pad_index)

    def gather(self, x):
        return torch.cat([x, self.other] if self.process_index == 0 else [self.other, x])


def test_ties_over_all_ranks():
    """Each token gets the smallest entropy of its context, of either rank; no other number changes."""
    parts, entropies = [ROWS[:3], ROWS[3:]], []
    batches = [padded_batch(rows, 4 + rank, 4) for rank, rows in enumerate(parts)]
    for rank, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(rank)
        entropies.append(torch.rand(batch["completion_mask"].shape, generator=generator))
    masks = [batch["completion_mask"] for batch in batches]
    smallest: dict[tuple[int, ...], float] = {}
    for rows, values, mask in zip(parts, entropies, masks, strict=True):
        for words, value in zip(words_before(rows), values[mask.bool()].tolist(), strict=True):
            smallest[words] = min(value, smallest.get(words, value))
    for rank in (0, 1):
        other = 1 - rank
        gathered = [x[masks[other].bool()] for x in (entropies[other], contexts(batches[other]))]
        found = tied(entropies[rank], masks[rank], batches[rank], Ranks(rank, gathered))
        is_counted = masks[rank].bool()
        assert found[is_counted].tolist() == [smallest[words] for words in words_before(parts[rank])]
        assert torch.equal(found[~is_counted], entropies[rank][~is_counted])
        assert not torch.equal(found, entropies[rank])


# In a training


class Noting(UnevenLengths, QuantGRPOTrainer):
    """Notes the entropies that the quantile is of."""

    def get_high_entropy_mask(self, entropies, mask, threshold):
        self.noted = entropies[mask.bool()].sort().values.tolist()
        return super().get_high_entropy_mask(entropies, mask, threshold)


class Rounding(PackedRows):
    """Its entropies have the rounding of packed rows on any kind of CPU."""

    def __call__(self, *args, **kwargs):
        output = super().__call__(*args, **kwargs)
        if output.get("entropy") is not None:
            generator = torch.Generator().manual_seed(0)
            output["entropy"] = output["entropy"] * (
                1 + 1e-6 * torch.rand(output["entropy"].shape, generator=generator)
            )
        return output


@pytest.mark.parametrize("group", [0, 1])
def test_a_quantile_at_a_tie_has_the_padded_rows_gradient(tmp_path, monkeypatch, group):
    """
    The quantile lies among the four equal entropies at the start of a prompt's completions. With a bonus, the gradient
    of the entropies counts too.
    """
    model = save_tiny(tmp_path / "model", seed=3)
    monkeypatch.setattr(packing, "PackedRows", Rounding)
    settings = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    settings |= {"rollout_precision": "int8", "max_steps": 1, "entropy_coef": 0.1 * group}

    def step(packs: bool, share: float) -> tuple[torch.Tensor, list[float]]:
        args = config(QuantGRPOConfig, tmp_path, pack_sequences=packs, top_entropy_quantile=share, **settings)
        trainer = make(Noting, args, model=model)
        return step_and_batch(trainer)[0], trainer.noted

    _, entropies = step(False, 0.5)
    starts = [place for place in range(len(entropies) - 3) if entropies[place + 3] - entropies[place] < 1e-5]
    assert len(starts) >= 2
    share = 1 - (starts[group] + 1.5) / (len(entropies) - 1)
    padded, _ = step(False, share)
    packed, _ = step(True, share)
    assert (packed - padded).norm() < 1e-4 * padded.norm()
    monkeypatch.setattr(grpo, "tied", lambda entropies, *others: entropies)
    split, _ = step(True, share)
    assert (split - padded).norm() > 0.02 * padded.norm()
