"""What truncation left for each drawn token: both forms of an entry, how completions go on, and faults."""

import numpy as np
import pytest
import torch

from trl_quant.policy.kept import words_of_mask
from trl_quant.rollout.kept import NOT_KNOWN, Kept, fault_of_kept, then


VOCABULARY = 77  # 3 words of 32 bits


def drawn(seed: int, tokens: int = 9) -> list[np.ndarray]:
    """What was left for some tokens: few ids, many, and all."""
    random = np.random.default_rng(seed)
    sizes = [1, 2, 3, 4, 76, 77, *random.integers(1, 78, tokens)][:tokens]
    return [np.sort(random.permutation(VOCABULARY)[:size]) for size in sizes]


def test_entries_are_read_as_they_were_written():
    left = drawn(0)
    kept = Kept.of(left, VOCABULARY)
    assert [ids.tolist() for ids in kept.ids()] == [ids.tolist() for ids in left]
    assert kept.counts.tolist()[:6] == [1, 2, 3, 3, 3, 0]  # ids, a bit mask from three on, and nothing for all
    assert kept.counts.max() == words_of_mask(VOCABULARY) == 3 and len(kept.words) == kept.counts.sum()
    for place, ids in enumerate(left):
        for token in range(VOCABULARY):
            tokens = [int(one[0]) for one in left]
            tokens[place] = token
            assert kept.holds(tokens)[place] == (token in ids)


def test_completions_go_on_and_are_cut():
    first, second = drawn(1, 5), drawn(2, 4)
    kept = then(Kept.of(first, VOCABULARY), Kept.of(second, VOCABULARY), so_far=7)  # a tool wrote two tokens
    assert kept.counts.tolist()[5:7] == [NOT_KNOWN] * 2
    expected = [*first, np.arange(VOCABULARY), np.arange(VOCABULARY), *second]
    assert [ids.tolist() for ids in kept.ids()] == [ids.tolist() for ids in expected]
    cut = then(kept.first(3), Kept.of(second, VOCABULARY), so_far=2)
    assert [ids.tolist() for ids in cut.ids()] == [ids.tolist() for ids in [*first[:2], *second]]
    late = then(None, Kept.of(second, VOCABULARY), so_far=1)  # an earlier engine did not say
    assert late.counts.tolist()[0] == NOT_KNOWN and len(late.counts) == 5


def test_faults_are_found():
    left = [drawn(3), drawn(4)]
    tokens = [[int(ids[-1]) for ids in row] for row in left]
    kept = [Kept.of(row, VOCABULARY) for row in left]
    assert (
        fault_of_kept(kept, tokens, VOCABULARY) is None and fault_of_kept([None, kept[1]], tokens, VOCABULARY) is None
    )
    assert fault_of_kept(kept, tokens, VOCABULARY + 3) is None  # a head with rows that no token has
    for place in (1, 3):  # in ids, and in a bit mask
        others = [*left[0]]
        others[place] = left[0][place][:-1]
        found = fault_of_kept([Kept.of(others, VOCABULARY), kept[1]], tokens, VOCABULARY)
        assert f"token {place} of completion 0" in found and "is not among" in found
    assert "9 tokens, and what was left is known for 8" in fault_of_kept(
        [kept[0], kept[1].first(8)], tokens, VOCABULARY
    )
    assert "completions" in fault_of_kept(kept[:1], tokens, VOCABULARY)
    assert "is of 77 tokens, and the policy has 70" in fault_of_kept(kept, tokens, 70)


@pytest.mark.parametrize("tokens", [0, 1])
def test_short_completions(tokens):
    kept = Kept.of(drawn(0, tokens), VOCABULARY)
    assert len(kept.counts) == len(kept.holds([0] * tokens)) == tokens and kept.first(5).counts.equal(kept.counts)
    assert kept.words.dtype == kept.counts.dtype == torch.int32
