"""Sampling options that bias the ratio: engines show it in what they return, and a run that sets one is warned."""

import ast
import inspect
import textwrap

import pytest
import torch
from accelerate import Accelerator
from drawing import generated
from long_tests import rest_is_long
from tiny import tiny_model, tiny_tokenizer
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from trl_quant import QuantGRPOConfig
from trl_quant.corrections import CORRECTIONS, CorrectionInputs
from trl_quant.rollout import TransformersEngine
from trl_quant.rollout.sampling_options import (
    BOTH,
    FROM_THE_START,
    TRANSFORMERS,
    TRUNCATING,
    TWINS,
    UNSUPPORTED_GENERATION_KWARGS,
    VLLM,
    biasing_options,
)


PROMPT = [1, 2, 3, 4, 5, 6]
LENGTH = 12
# For each option a value that acts on a tiny model
ACTING = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.3,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "min_length": len(PROMPT) + LENGTH,
    "min_new_tokens": LENGTH,
    "bad_words_ids": [[token] for token in range(30)],
    "suppress_tokens": list(range(30)),
    "begin_suppress_tokens": list(range(150)),
    "sequence_bias": {(7,): 4.0},
    "guidance_scale": 1.5,
    "exponential_decay_length_penalty": (1, 1.5),
    "forced_eos_token_id": 257,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": LENGTH,
    "logit_bias": {7: 4.0},
    "allowed_token_ids": list(range(30, 257)),
    "bad_words": ["a", "b", "c", "d", "e", "f", "g"],
    "temperature": 0.7,
}
HARMLESS = {
    "embedded": {"stop_strings": ["x"], "max_new_tokens": 5, "eos_token_id": 3, "pad_token_id": 0, "num_beams": 1},
    "vllm": {"stop": ["x"], "max_tokens": 5, "ignore_eos": True},
    "server": {"stop": ["x"], "max_tokens": 5, "ignore_eos": True, "seed": 3},
}
HARMLESS["trl"] = HARMLESS["vllm"]


def build(**kwargs):
    return QuantGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **kwargs)


def policy():
    """A model that often samples the end token, so that options which forbid it act, with weights that BF16 holds."""
    model = tiny_model(seed=1, tied=False)
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    model.lm_head.weight.data[257] *= 2
    return model


def sampled(generation_kwargs: dict | None = None, batch: int = 64, **fields) -> CorrectionInputs:
    """Samples of the embedded engine in BF16 at temperature 1, with its log-probabilities and the policy's."""
    options = {"max_completion_length": LENGTH, "generation_kwargs": generation_kwargs} | fields
    model = policy()
    engine = TransformersEngine(model, Accelerator(cpu=True), tiny_tokenizer(), precision="bf16", **options)
    torch.manual_seed(0)
    _, completions, logprobs, _ = generated(engine, [PROMPT] * batch)
    rollout, old, mask = torch.zeros(3, batch, LENGTH)
    with torch.no_grad():
        padded = torch.tensor([PROMPT + ids + [0] * (LENGTH - len(ids)) for ids in completions])
        scores = model(padded).logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, (ids, logps) in enumerate(zip(completions, logprobs)):
        old[row, : len(ids)] = scores[row, range(len(ids)), ids]
        rollout[row, : len(ids)] = torch.tensor(logps)[:, 0]
        mask[row, : len(ids)] = 1
    return CorrectionInputs(rollout, old, torch.ones(batch), mask)


def mismatch(inputs: CorrectionInputs) -> dict[str, float]:
    return CORRECTIONS["ais"]()(inputs).metrics


@pytest.fixture(scope="module")
def plain() -> float:
    """Mean size of log w where sampler and policy are the same."""
    return mismatch(sampled())["mismatch/abs_logp_diff"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    rest_is_long(
        [name for name in TRANSFORMERS if name != "forced_bos_token_id"] + ["temperature"],
        *("top_p", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"),
        *("sequence_bias", "guidance_scale", "temperature"),
    ),
)
def test_each_option_biases_the_ratio_of_the_embedded_engine(name, plain):
    field = name in BOTH
    found = mismatch(sampled(**{name: ACTING[name]}) if field else sampled({name: ACTING[name]}))
    assert found["mismatch/abs_logp_diff"] > 3e-3 > 1000 * plain
    (neutral, *_) = TRANSFORMERS.get(name, (1.0,)) or (None,)
    still = mismatch(sampled({name: neutral}))["mismatch/abs_logp_diff"]
    assert still == plain


def test_what_is_told_of_the_repetition_penalty():
    """AIS corrects in full, though nothing is quantized: the size of log w exceeds its delta, 0.02."""
    found = mismatch(sampled(repetition_penalty=1.3))
    assert found["mismatch/abs_logp_diff"] > 0.02 and found["ais/alpha_mis"] == 1


def is_told(caplog, **kwargs) -> bool:
    caplog.clear()
    build(**kwargs)
    return "and not from `rollout_precision`" in caplog.text


SAMPLERS = {
    "embedded": ({"rollout_precision": "int8"}, TRANSFORMERS),
    "vllm": ({"rollout_precision": "int8", "use_vllm": True, "vllm_mode": "colocate"}, VLLM),
    "server": ({"rollout_precision": "int8", "use_vllm": True, "vllm_mode": "server"}, VLLM),
    "trl": ({"use_vllm": True, "vllm_mode": "colocate"}, VLLM),  # TRL's own sampler
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_run_that_biases_the_ratio_is_told(sampler, caplog):
    settings, known = SAMPLERS[sampler]
    assert not is_told(caplog, **settings)
    if sampler == "embedded":  # which returns what they left, so that the trainer renormalises
        for name in TRUNCATING:
            assert not is_told(caplog, **settings, **{name: ACTING[name]}), name
            assert not is_told(caplog, **settings, generation_kwargs={name: ACTING[name]}), name
    settings = settings | {"truncation_replay": False}
    assert not is_told(caplog, **settings, temperature=0.6)  # the trainer scores at this temperature too
    for name in known.keys() & ACTING.keys() | {"temperature"}:
        assert is_told(caplog, **settings, generation_kwargs={name: ACTING[name]}), name
        assert f"`{name}`={ACTING[name]!r}" in caplog.text
    for name in BOTH:
        assert is_told(caplog, **settings, **{name: ACTING[name]}), name
        (off, *_) = BOTH[name]
        assert not is_told(caplog, **settings, **{name: ACTING[name]}, generation_kwargs={name: off}), name
    for name, neutral in known.items():
        for value in (None, *neutral):
            assert not is_told(caplog, **settings, generation_kwargs={name: value}), (name, value)
    assert not is_told(caplog, **settings, generation_kwargs=HARMLESS[sampler])


def test_without_a_sampler_of_another_kind_nothing_is_told(caplog):
    assert not is_told(caplog, top_p=0.9, generation_kwargs={"repetition_penalty": 1.3})


def test_what_is_set_elsewhere():
    vllm = {"rollout_precision": "int8", "use_vllm": True}
    assert biasing_options(build(**vllm, vllm_structured_outputs_regex="[0-9]+")) == {"structured_outputs": "[0-9]+"}
    given = {"logits_processors": ["mine.Processor"]}
    assert biasing_options(build(**vllm, vllm_engine_kwargs=given)) == given
    assert biasing_options(build(**vllm, temperature=0.7, generation_kwargs={"temperature": 0.7})) == {}
    assert biasing_options(build(**vllm, generation_kwargs={"repetition_penalty": 1.0, "bad_words": []})) == {}


# An engine refuses an option that it lacks, and names its own option of the same meaning

EMBEDDED, COLOCATED, SERVED, TRLS = (SAMPLERS[name][0] for name in ("embedded", "vllm", "server", "trl"))
REFUSED = [  # settings, generation_kwargs -> what the message says
    (EMBEDDED, {"min_tokens": 3}, "'min_tokens' (there it is 'min_new_tokens')"),
    (EMBEDDED, {"stop": ["x"]}, "'stop' (there it is 'stop_strings')"),
    (EMBEDDED, {"n": 2}, "has 'n', which transformers' `generate`"),
    (EMBEDDED, {"seed": 1}, "has 'seed', which transformers'"),
    (EMBEDDED, {"logprobs": 3}, "has 'logprobs', which transformers'"),
    ({}, {"max_tokens": 3}, "'max_tokens' (there it is 'max_new_tokens')"),
    (EMBEDDED, {"num_beams": 2}, "vLLM has none of these options either"),
    (EMBEDDED, {"penalty_alpha": 0.6}, "['penalty_alpha']"),
    (EMBEDDED, {"token_healing": True}, "['token_healing']"),
    (EMBEDDED, {"return_dict_in_generate": True}, "['return_dict_in_generate']"),
    (EMBEDDED, {"do_sample": False}, "['do_sample']"),
    (EMBEDDED, {"temperature": "0.7"}, "`generation_kwargs['temperature']`='0.7' must be a finite number"),
    (EMBEDDED, {"top_p": 1.5}, "`generation_kwargs['top_p']`=1.5 is out of range. It must be <= 1"),
    (EMBEDDED, {"min_p": -1}, "`generation_kwargs['min_p']`=-1 is out of range"),
    (COLOCATED, {"top_k": 2.5}, "`generation_kwargs['top_k']`=2.5 must be an integer"),
    (COLOCATED, {"temperature": -1}, "`generation_kwargs['temperature']`=-1 is out of range"),
    (EMBEDDED, {"eos_token_id": "x"}, "`generation_kwargs['eos_token_id']`='x' must be a token's number, or a list"),
    (EMBEDDED, {"eos_token_id": [1, "x"]}, "`generation_kwargs['eos_token_id']`=[1, 'x'] must be a token's number"),
    (EMBEDDED, {"max_new_tokens": "8"}, "`generation_kwargs['max_new_tokens']`='8' must be an integer"),
    (EMBEDDED, {"suppress_tokens": "a"}, "`generation_kwargs['suppress_tokens']`='a' must be a token's number"),
    (EMBEDDED, {"stop_strings": 5}, "`generation_kwargs['stop_strings']`=5 must be a string, or a list of them"),
    (EMBEDDED, {"bad_words_ids": [1]}, "`generation_kwargs['bad_words_ids']`=[1] must be a list of lists"),
    ({}, {"no_repeat_ngram_size": "x"}, "`generation_kwargs['no_repeat_ngram_size']`='x' must be an integer"),
    (EMBEDDED, [1], "`generation_kwargs`=[1] must be a dict"),
    (TRLS, "top_k", "`generation_kwargs`='top_k' must be a dict"),
    (COLOCATED, {"n": 2}, "must not hold 'n': TRL samples `num_generations`"),
    (SERVED, {"logprobs": 5}, "must not hold 'logprobs'"),
    (COLOCATED, {"seed": 3}, "a group would be one completion"),
]
REFUSED_BY_VLLM = [
    (
        COLOCATED,
        {"min_new_tokens": 3},
        "'min_new_tokens' (there it is 'min_tokens'), which vLLM in `vllm_mode`='colocate'",
    ),
    (SERVED, {"min_new_tokens": 3}, "'min_new_tokens' (there it is 'min_tokens'), which vLLM in `vllm_mode`='server'"),
    (TRLS, {"min_new_tokens": 3}, "'min_tokens'"),
    (COLOCATED, {"num_beams": 2}, "has 'num_beams', which vLLM"),
    (COLOCATED, {"eos_token_id": 3}, "(there it is 'stop_token_ids')"),
    (SERVED, {"detokenize": False}, "has 'detokenize', which vLLM in `vllm_mode`='server'"),
    (COLOCATED, {"min_tokens": 9999}, "min_tokens must be less than or equal to max_tokens"),
    (COLOCATED, {"stop": 3}, "`generation_kwargs`={'stop': 3} are refused by vLLM"),
]


def refuses(settings, given, says):
    with pytest.raises(ValueError) as error:
        build(**settings, generation_kwargs=given)
    assert says in str(error.value)


@pytest.mark.parametrize(("settings", "given", "says"), REFUSED, ids=str)
def test_what_an_engine_does_not_take_is_refused(settings, given, says):
    refuses(settings, given, says)


@pytest.mark.vllm
@pytest.mark.parametrize(("settings", "given", "says"), REFUSED_BY_VLLM, ids=str)
def test_what_vllm_does_not_take_is_refused(settings, given, says):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    refuses(settings, given, says)


def test_their_neighbours_are_accepted():
    assert TWINS.keys() <= vars(GenerationConfig()).keys()
    for name, neutral in UNSUPPORTED_GENERATION_KWARGS.items():
        for value in (None, *neutral):
            build(**EMBEDDED, generation_kwargs={name: value})
    build(**EMBEDDED, generation_kwargs={"temperature": 0, "top_k": -1, "max_time": 60, "use_cache": False})
    build(**EMBEDDED, generation_kwargs={"eos_token_id": [1, 2], "bad_words_ids": [[1]], "stop_strings": ["a"]})
    build(**EMBEDDED, generation_kwargs={"eos_token_id": 1, "max_new_tokens": 4, "stop_strings": "a"})
    build(**COLOCATED, generation_kwargs={"temperature": 0, "min_tokens": 200, "structured_outputs": {"regex": "a"}})
    build(**SERVED, generation_kwargs='{"min_tokens": 3, "vllm_xargs": {"a": 1}}')
    build(generation_kwargs={"num_beams": 2})  # allowed: TRL's own sampling reads no log-probabilities


def test_a_regular_expression_acts_in_vllm_alone():
    with pytest.raises(ValueError, match="`vllm_structured_outputs_regex`='a' acts only with vLLM"):
        build(**EMBEDDED, vllm_structured_outputs_regex="a")


# The options that the embedded engine takes act as in TRL without vLLM


def drawn(generation_kwargs: dict) -> list[list[int]]:
    engine = TransformersEngine(
        policy(),
        Accelerator(cpu=True),
        tiny_tokenizer(),
        precision="bf16",
        max_completion_length=LENGTH,
        generation_kwargs=generation_kwargs,
    )
    torch.manual_seed(0)
    _, completions, logps, _ = generated(engine, [PROMPT] * 64)
    assert [len(ids) for ids in completions] == [len(row) for row in logps]
    return completions


@pytest.mark.slow
def test_special_tokens_in_generation_kwargs():
    """Another end token cuts completions that have it and changes no others. Padding is part of no completion."""
    plain = drawn({})
    for given in ({"pad_token_id": 3}, {"bos_token_id": 4}, {"do_sample": True}, {"top_k": -1}, {"top_p": None}):
        assert drawn(given) == plain
    end = plain[0][1]
    assert any(257 in ids for ids in cut(plain, end))  # the usual end token acts as well
    for given in (end, [end]):
        assert drawn({"eos_token_id": given, "pad_token_id": 3}) == cut(plain, end) != plain


def test_a_stop_string_ends_a_completion_and_nothing_follows():
    plain, tokenizer = drawn({}), tiny_tokenizer()
    tokens = [token for ids in plain for token in ids[1:-1]]
    letter = next(token for token in tokens if "A" <= tokenizer.decode([token]) <= "Z")  # not in a special token
    assert drawn({"stop_strings": [tokenizer.decode([letter])]}) == cut(plain, letter) != plain


def cut(completions: list[list[int]], token: int) -> list[list[int]]:
    """Each completion up to the first `token`."""
    return [ids[: ids.index(token) + 1] if token in ids else ids for ids in completions]


# Each option of the libraries is known here, so an option of a new version fails


def test_every_logits_processor_of_transformers_is_judged():
    """Each option that `generate` makes a processor of biases the ratio, is refused, or leaves the ratio alone."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(GenerationMixin._get_logits_processor)))
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "generation_config"
    }
    # They are read beside other options, turn NaN into a number, or add a constant to all logits
    harmless = {"_eos_token_tensor", "do_sample", "max_length", "use_cache", "remove_invalid_values"}
    harmless |= {"renormalize_logits"}
    judged = {*TRANSFORMERS, "temperature", *UNSUPPORTED_GENERATION_KWARGS, *harmless}
    assert len(names) > 20 and names - judged == set()
    assert TRANSFORMERS.keys() - vars(GenerationConfig()).keys() == set()


@pytest.mark.vllm
def test_every_sampling_parameter_of_vllm_is_judged():
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    # They set how many completions there are, when they end, the random state, or what is returned and how. Custom
    # processors read `extra_args`.
    harmless = """n seed stop stop_token_ids ignore_eos max_tokens repetition_detection watermarking extra_args
        logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs
        detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
        stream_interval skip_clone skip_reading_prefix_cache routed_experts_prompt_start output_text_buffer_length"""
    fields = {name for name in vllm.SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields - {*VLLM, "temperature", *harmless.split()} == set()
    newer = {"thinking_token_budget", "trace_decode_token_ids"}  # than the oldest vLLM
    assert VLLM.keys() - fields - {"logits_processors"} <= newer
    # These look at no token before the next, or count those of the prompt too; limits are reduced by the tokens so far
    right = """n repetition_penalty temperature top_p top_k min_p stop_token_ids ignore_eos max_tokens min_tokens
        logit_bias allowed_token_ids logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
        logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
        include_stop_str_in_output output_kind stream_interval skip_clone skip_reading_prefix_cache
        routed_experts_prompt_start output_text_buffer_length watermarking"""
    assert fields - FROM_THE_START.keys() == fields & {*right.split()}
