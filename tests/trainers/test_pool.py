"""Which groups a generation waits for, returns and starts: the pool without a model, against slow references."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from trl_quant.runs.checkpoints import same_after_resume
from trl_quant.trainers.pool import Completion, Group, PromptOrder, dealt, may_end, shares


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(0, 4), st.integers(0, 6))
def test_a_generation_ends_once_the_rest_can_return_in_time(data, wanted, staleness, generation):
    """Against a schedule: if the rest returns as early as it can, oldest first, does each group return in time?"""
    count = data.draw(st.integers(0, 4 * wanted))
    starts = st.integers(max(generation - staleness, 0), generation)
    began = sorted(data.draw(st.lists(starts, min_size=count, max_size=count)))
    have_finished = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    returned = [i for i in range(count) if have_finished[i]][:wanted]
    rest = [start for i, start in enumerate(began) if i not in returned]
    in_time = all(generation + 1 + i // wanted - start <= staleness for i, start in enumerate(rest))
    expected = len(returned) == wanted and in_time
    assert may_end(began, have_finished, wanted, generation, staleness) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(1, 9), st.floats(0, 1)
)
def test_every_group_returns_once_and_in_time(seed, wanted, engines, staleness, generations, share):
    """Engines whose groups finish at random, for as many generations as a run has."""
    lots = random.Random(seed)
    in_flight = wanted + round(share * staleness * wanted)  # up to the largest factor
    groups, returned, started = [], [], 0
    for generation in range(generations):
        count = min(in_flight, (generations - generation) * wanted) - len(groups)
        groups += [Group(started + i, 0, [], generation, [Completion()]) for i in range(count)]
        started += count
        hands = dealt(groups, wanted, engines)
        assert sorted(group.place for hand in hands for group in hand) == [group.place for group in groups]
        for hand, due in zip(hands, shares(wanted, engines), strict=True):
            left = lots.sample(hand, len(hand))
            while True:
                began, finished = [g.began for g in hand], [g.has_finished for g in hand]
                if may_end(began, finished, due, generation, staleness):
                    break
                left.pop().completions[0].has_ended = True
            taken = [group for group in hand if group.has_finished][:due]
            assert all(generation - group.began <= staleness for group in taken)
            returned += [group.place for group in taken]
        groups = [group for group in groups if group.place not in returned]
    assert sorted(returned) == [*range(wanted * generations)] == [*range(started)] and not groups


def test_shares_are_whole_and_even():
    for wanted in range(1, 20):
        for engines in range(1, 9):
            parts = shares(wanted, engines)
            assert len(parts) == engines and sum(parts) == wanted and max(parts) - min(parts) <= 1


def handed_out(sampler, groups: int, each: int, repeats: int) -> list[int]:
    """The rows of an epoch's prompts, as TRL's dataloader hands them out: each micro-batch of a generation anew."""
    rows = list(sampler)
    generations = [rows[i : i + groups * each] for i in range(0, len(rows), groups * each)][::repeats]
    return [row for generation in generations for row in generation[::each]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_prompts_are_read_ahead_in_trls_order(shuffle):
    def sampler():
        made = RepeatSampler(range(11), mini_repeat_count=3, batch_size=4, repeat_count=2, shuffle=shuffle, seed=5)
        return same_after_resume(made)

    order = PromptOrder(SimpleNamespace(_get_train_sampler=sampler))
    trls, expected = sampler(), []
    for _ in range(3):  # epochs, one after the other
        expected += handed_out(trls, groups=4, each=3, repeats=2)
    assert len(expected) == 3 * 8 and (expected[:8] != expected[8:16]) == shuffle
    assert [order[place] for place in range(24)] == expected
    places = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    assert [order[place] for place in places] == [expected[place] for place in places]


@pytest.mark.parametrize(
    ("micro_batches", "steps", "expected"),
    # 2 generations of 2 micro-batches in an epoch
    [
        *[(2, 1, 1), (2, 2, 2), (2, 3, 3), (2, 8, 8), (4, 1, 2), (4, 3, 6)],
        *[(1, 1, 1), (1, 2, 1), (1, 3, 2), (1, 5, 3)],
        # an epoch ends with a step of one micro-batch
        *[(3, 1, 2), (3, 2, 2), (3, 3, 4), (3, 4, 4), (8, 1, 2), (8, 2, 4)],
    ],
)
def test_generations_of_a_run(micro_batches, steps, expected):
    made = RepeatSampler(range(8), mini_repeat_count=2, batch_size=4, repeat_count=2, seed=5)
    order = PromptOrder(SimpleNamespace(_get_train_sampler=lambda: made))
    # As transformers trains: step by step through the micro-batches of each epoch
    seen = done = 0
    while done < steps:
        for start in range(0, 4, micro_batches):
            if done < steps:
                batches = range(start, min(start + micro_batches, 4))
                seen += sum(batch % 2 == 0 for batch in batches)
                done += 1
    assert seen == expected
    assert order.generations_within(steps, micro_batches) == expected
