"""Which sampling options act on the rest of a completion as on the whole one, in the embedded engine."""

from dataclasses import replace

import pytest
from accelerate import Accelerator
from long_tests import rest_is_long
from tiny import tiny_model, tiny_tokenizer

from trl_quant.rollout import TransformersEngine
from trl_quant.rollout.engine import Request
from trl_quant.rollout.sampling_options import FROM_THE_START, TRANSFORMERS, breaks_when_continued


pytestmark = pytest.mark.isa
PROMPTS = [[72, 101, 108, 3, 72], [50, 43, 50, 61, 32, 7], [9, 9, 9], [8, 17]]
MOST = 24
ENDS = {"eos_token_id": list(range(0, 320, 9))}
# The same with the rest as with the whole; all of them act on samples of temperature 0
RIGHT = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(0, 320, 2)]},
    "sequence_bias": {"sequence_bias": {(7,): 3.0, (7, 7): -6.0, (9,): 2.0}},
    "suppress_tokens": {"suppress_tokens": list(range(0, 320, 2))},
    "min_new_tokens": {"min_new_tokens": 18, **ENDS},
    "eos_token_id": ENDS,
}
WRONG = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "guidance_scale": {"guidance_scale": 3.0},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(1, 320)]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (6, 3.0)},
}
UNSHOWN = {"min_length", "forced_eos_token_id"}  # they go wrong in batches of rows with other lengths
HARMLESS = {"top_p", "top_k", "min_p", "forced_bos_token_id"}  # they look at no token, or at a first one alone


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    built = TransformersEngine(
        model=tiny_model(seed=1),
        accelerator=Accelerator(cpu=True),
        processing_class=tiny_tokenizer(),
        precision="bf16",
        temperature=0.0,
        max_completion_length=MOST,
    )
    built.sync()
    return built


def greedy_row(engine, request, **options) -> list[int]:
    """The tokens of one completion. The call is one that `draw` may refuse."""
    engine.settings = replace(engine.settings, generation_kwargs=options)
    (ids,) = engine.sample([request]).token_ids
    return ids


def continued(engine, options) -> list[bool]:
    """Whether the rest of each completion, from about its middle, is what one call sampled."""
    same = []
    for prompt in PROMPTS:
        whole = greedy_row(engine, Request(prompt), **options)
        cut = len(whole) // 2
        same.append(greedy_row(engine, Request(prompt, sampled=whole[:cut]), **options) == whole[cut:])
    return same


@pytest.mark.parametrize("name", rest_is_long(RIGHT, "repetition_penalty", "eos_token_id"))
def test_options_that_act_on_the_rest_as_on_the_whole(engine, name):
    options, others = RIGHT[name], {key: value for key, value in RIGHT[name].items() if key != name}
    assert breaks_when_continued(options) == []
    rows = [[greedy_row(engine, Request(prompt), **given) for prompt in PROMPTS] for given in (others, options)]
    assert rows[0] != rows[1]
    assert all(continued(engine, options))


@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not(engine, name):
    assert breaks_when_continued(WRONG[name]) == [name]
    assert not all(continued(engine, WRONG[name]))
    with pytest.raises(ValueError, match=rf"the options \['{name}'\] act on a completion from its start"):
        engine.draw([Request(PROMPTS[0], sampled=[5])])


def test_a_string_across_the_border_ends_the_completion(engine):
    plain = greedy_row(engine, Request(PROMPTS[0]))
    place = next(i for i in range(2, MOST - 1) if engine.tokenizer.decode(plain[i : i + 2]).isascii())
    options = {"stop_strings": [engine.tokenizer.decode(plain[place : place + 2])]}
    whole = greedy_row(engine, Request(PROMPTS[0]), **options)
    assert breaks_when_continued(options) == [] and len(whole) < MOST
    assert greedy_row(engine, Request(PROMPTS[0], sampled=whole[:-1]), **options) == whole[-1:]


def test_each_row_has_its_own_least_number_of_tokens(engine):
    """Rows of a batch have other numbers of tokens so far."""
    options = RIGHT["min_new_tokens"]
    whole = [greedy_row(engine, Request(prompt), **options) for prompt in PROMPTS]
    engine.settings = replace(engine.settings, generation_kwargs=options)
    requests = [Request(prompt, sampled=ids[: 5 * i]) for i, (prompt, ids) in enumerate(zip(PROMPTS, whole))]
    rest = engine.draw(requests).token_ids
    assert [5 * i + len(ids) for i, ids in enumerate(rest)] == [*map(len, whole)]
    assert min(map(len, whole)) >= 18 > min(len(greedy_row(engine, Request(p), **ENDS)) for p in PROMPTS)


def test_every_option_is_judged():
    assert TRANSFORMERS.keys() - FROM_THE_START.keys() == (RIGHT.keys() & TRANSFORMERS.keys()) | HARMLESS
    assert FROM_THE_START.keys() & TRANSFORMERS.keys() == WRONG.keys() | UNSHOWN


def test_options_that_are_off_are_not_named():
    assert breaks_when_continued(None) == breaks_when_continued({}) == []
    for name, neutral in FROM_THE_START.items():
        for value in (None, *neutral):
            assert breaks_when_continued({name: value}) == []
    assert breaks_when_continued({"stop": ["x"], "seed": 0}, "[ab]", ["mine.Processor"]) == [
        "stop",
        "structured_outputs",
        "seed",
        "logits_processors",
    ]
