"""Sampling options that bias the ratio between trainer and sampler: which they are, and which of them a run sets.

Both engines return the log-probability that a token was drawn with: vLLM its `processed_logprobs`, the embedded engine
what is left after all logits processors. The trainer scores the same token with the policy's own distribution, at the
run's `temperature` and with nothing else. An option that changes the sampler's distribution is therefore in the ratio
w = exp(old_logps - rollout_logps), as if it were an error of the format. Options that only end a completion (`stop`,
`ignore_eos`, `max_tokens`) or choose the random numbers (`seed`) leave the ratio alone.
"""

# Option -> values with which it does nothing, beside None and what is empty
BOTH = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}
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
    "logits_processors": (),  # of `vllm_engine_kwargs`: what they compute cannot be known
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
FIELDS = ("temperature", *BOTH)  # of TRL's configuration, which `generation_kwargs` override
# What the embedded engine cannot sample with: transformers applies it after our log-probabilities are taken, or it is
# no sampling at all, or another form of output. vLLM has none of these.
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
# What transformers calls it -> what vLLM does
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
    The sampling options of a run that bias the ratio, as its engine merges them.

    Args:
        args ([`~config.QuantGRPOConfig`]): The run's.

    Returns:
        `dict`: option -> its value, where that acts; `temperature` where the sampler's is not the trainer's.
    """
    given = {name: value for name, value in (args.generation_kwargs or {}).items() if value is not None}
    options = {name: getattr(args, name) for name in FIELDS} | given
    if args.vllm_structured_outputs_regex is not None:
        options["structured_outputs"] = args.vllm_structured_outputs_regex
    if args.vllm_engine_kwargs is not None:
        options["logits_processors"] = args.vllm_engine_kwargs.get("logits_processors")
    neutral = (VLLM if args.use_vllm else TRANSFORMERS) | {"temperature": (args.temperature,)}
    return {name: options[name] for name in neutral if name in options and acts(options[name], neutral[name])}


def check_supported(generation_kwargs: dict) -> None:
    """Raises `ValueError` for those that the embedded engine cannot sample with."""
    known = UNSUPPORTED_GENERATION_KWARGS
    refused = [name for name, value in generation_kwargs.items() if name in known and acts(value, known[name])]
    if refused:
        raise ValueError(
            f"`generation_kwargs` has {refused}, which the embedded engine cannot sample with: it must know the "
            "probability that each token is drawn with. vLLM has none of these options either. Remove them."
        )


def not_taken(engine: str, names, known) -> str:
    """What is said of options that an engine lacks, with what it calls them where another engine has them."""
    twins = TWINS | {own: other for other, own in TWINS.items()}
    named = [f"{name!r}" + (f" (there it is {twins[name]!r})" if twins.get(name) in known else "") for name in names]
    return (
        f"`generation_kwargs` has {', '.join(named)}, which {engine} does not take. Allowed are "
        f"{', '.join(sorted(known))}."
    )


def acts(value, neutral: tuple) -> bool:
    """Whether an option of this value does something, where it does nothing with the `neutral` ones."""
    is_empty = isinstance(value, str | list | tuple | dict) and not value
    return value is not None and not is_empty and value not in neutral
