"""The sampling options that bias the ratio between trainer and sampler.

Both engines return the log-probability with which a token was sampled: vLLM returns `processed_logprobs`, the embedded
engine the result of all logits processors. The trainer scores the same token with the policy's own distribution at the
run's `temperature`, and applies no other option. An option that changes the sampler's distribution therefore changes

    w = exp(old_logps - rollout_logps)

as an error of the number format would. Where an engine returns what `top_p`, `top_k` and `min_p` have left, the trainer
scores over the same tokens ([`~policy.kept`]), so that these no longer change w. Options that only end a completion
(`stop`, `ignore_eos`, `max_tokens`) or seed the random numbers (`seed`) do not change it either.

A later call may go on with a completion, whose tokens so far then count as its prompt. Some options need to know which
tokens were sampled, and where the completion began: see [`breaks_when_continued`].
"""

from collections.abc import Mapping
from numbers import Integral


# Option -> the values with which it has no effect. `None` and empty values never have an effect.
BOTH = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}
TRUNCATING = ("top_p", "top_k", "min_p")  # they leave out unlikely tokens
VLLM = BOTH | {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "trace_decode_token_ids": (),
    "logits_processors": (),  # from `vllm_engine_kwargs`; their effect is unknown
}
TRANSFORMERS = BOTH | {
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}
# Options that act otherwise on the rest of a completion than on a whole one -> values with which they have no effect.
# `max_tokens`, `min_tokens` and `min_new_tokens` do not: the engines subtract the tokens so far.
FROM_THE_START = {
    # vLLM's
    "presence_penalty": (0,),  # they count the sampled tokens
    "frequency_penalty": (0,),
    "bad_words": (),  # the beginning of a word is looked for among the sampled tokens
    "stop": (),  # so is that of a string
    "repetition_detection": (),  # and that of a repeated pattern
    "structured_outputs": (),  # the grammar begins with the first sampled token
    "thinking_token_budget": (-1,),
    "trace_decode_token_ids": (),
    "seed": (),  # the random numbers begin again
    "logits_processors": (),  # from `vllm_engine_kwargs`; what they read is unknown, as are their arguments
    "extra_args": (),
    "vllm_xargs": (),
    # transformers'
    "encoder_repetition_penalty": (1,),  # they read the prompt
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),  # the unconditional model reads what follows the prompt's last token
    "min_length": (0,),  # it counts the padding
    "begin_suppress_tokens": (),  # they count from the first sampled token
    "exponential_decay_length_penalty": (),
    "forced_eos_token_id": (),  # it comes where the longest rest of a batch ends
}
FIELDS = ("temperature", *BOTH)  # fields of TRL's configuration that `generation_kwargs` override
# Options that the embedded engine refuses, because transformers applies them after our log-probabilities are taken,
# does not sample with them, or returns another form of output. vLLM has none of these options.
UNSUPPORTED_GENERATION_KWARGS = {
    "assistant_early_exit": (),
    "constraints": (),
    "diversity_penalty": (0,),
    "do_sample": (True,),
    "dola_layers": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "force_words_ids": (),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (),
    "prompt_lookup_num_tokens": (),
    "return_dict_in_generate": (False,),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
# transformers' options -> the type of their values. transformers itself fails only while it samples
INTEGERS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size", "pad_token_id")
LISTS = {
    "eos_token_id": (Integral, "a token's number, or a list of them"),
    "forced_eos_token_id": (Integral, "a token's number, or a list of them"),
    "suppress_tokens": (Integral, "a token's number, or a list of them"),
    "begin_suppress_tokens": (Integral, "a token's number, or a list of them"),
    "stop_strings": (str, "a string, or a list of them"),
    "bad_words_ids": (list, "a list of lists of tokens' numbers"),
}
# transformers' name of an option -> vLLM's name
TWINS = {
    "bad_words_ids": "bad_words",
    "eos_token_id": "stop_token_ids",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
}


def biasing_options(args) -> dict[str, object]:
    """
    Returns the sampling options of a run that bias the ratio. `generation_kwargs` override the fields of the same name,
    as in the engine.

    Args:
        args ([`~config.QuantGRPOConfig`]): The run's configuration.

    Returns:
        `dict`: option -> value, for each option that has an effect; `temperature` if the sampler's differs from the
        trainer's.
    """
    given = {name: value for name, value in (args.generation_kwargs or {}).items() if value is not None}
    options = {name: getattr(args, name) for name in FIELDS} | given
    if args.vllm_structured_outputs_regex is not None:
        options["structured_outputs"] = args.vllm_structured_outputs_regex
    if args.vllm_engine_kwargs is not None:
        options["logits_processors"] = args.vllm_engine_kwargs.get("logits_processors")
    neutral = (VLLM if args.use_vllm else TRANSFORMERS) | {"temperature": (args.temperature,)}
    return {name: options[name] for name in neutral if name in options and acts(options[name], neutral[name])}


def truncating(options: Mapping[str, object]) -> dict[str, object]:
    """Returns those of an engine's options by which it leaves out unlikely tokens."""
    return {name: options[name] for name in TRUNCATING if name in options and acts(options[name], BOTH[name])}


def breaks_when_continued(
    generation_kwargs: Mapping[str, object] | None, regex: str | None = None, logits_processors=None
) -> list[str]:
    """
    Returns the sampling options with which a later call samples the rest of a completion otherwise than one call would
    have sampled the whole.

    Args:
        generation_kwargs (`Mapping` or `None`): The options by the engine's names.
        regex (`str`, *optional*): The regular expression that completions match.
        logits_processors (`list`, *optional*): vLLM's, from `vllm_engine_kwargs`.
    """
    options = {**(generation_kwargs or {}), "logits_processors": logits_processors}
    if regex is not None:
        options["structured_outputs"] = regex
    return [name for name, neutral in FROM_THE_START.items() if acts(options.get(name), neutral)]


def check_supported(generation_kwargs: dict) -> None:
    """Raises `ValueError` for `generation_kwargs` that the embedded engine cannot sample with."""
    known = UNSUPPORTED_GENERATION_KWARGS
    refused = [name for name, value in generation_kwargs.items() if name in known and acts(value, known[name])]
    if refused:
        raise ValueError(
            f"`generation_kwargs` has {refused}, which the embedded engine cannot sample with: it must know the "
            "probability with which each token is sampled. vLLM has none of these options either. Remove them."
        )


def check_option_types(generation_kwargs: dict) -> None:
    """Raises `ValueError` for `generation_kwargs` of a type that transformers' `generate` does not take."""
    allowed = dict.fromkeys(INTEGERS, (Integral, "an integer")) | LISTS
    for name in filter(allowed.get, generation_kwargs):
        value, (kind, described) = generation_kwargs[name], allowed[name]
        values = value if name in LISTS and isinstance(value, list | tuple) else [value]
        if not all(isinstance(one, kind) and not isinstance(one, bool) for one in values):
            raise ValueError(f"`generation_kwargs[{name!r}]`={value!r} must be {described}.")


def not_taken(engine: str, names, known) -> str:
    """Returns the error message for options that an engine lacks, with the engine's own names of such options."""
    twins = TWINS | {vllm: transformers for transformers, vllm in TWINS.items()}
    described = []
    for name in names:
        twin = twins.get(name)
        described.append(f"{name!r} (there it is {twin!r})" if twin in known else repr(name))
    return (
        f"`generation_kwargs` has {', '.join(described)}, which {engine} does not take. Allowed are "
        f"{', '.join(sorted(known))}."
    )


def acts(value, neutral: tuple) -> bool:
    """Whether an option has an effect with `value`; with one of the `neutral` values it has none."""
    is_empty = isinstance(value, str | list | tuple | dict) and not value
    return value is not None and not is_empty and value not in neutral
