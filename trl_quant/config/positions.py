"""The check of [`preflight`] on positions that depend on the rest of a batch."""

from ..models.positions import LONGROPE, switching, why_vllm_differs


def check_positions(config, args) -> None:
    """
    Raises `ValueError` where one choice of positions for trainer and sampler is impossible. A server's context is
    known only when the trainer connects, and is checked there.

    Args:
        config ([`~transformers.PreTrainedConfig`]): The policy's config.
        args ([`QuantGRPOConfig`]): The run's configuration, with a `rollout_precision`.
    """
    found = switching(config)
    if found is None or not args.use_vllm or args.vllm_mode != "colocate":
        return
    context = args.vllm_max_model_length
    why_not = why_vllm_differs(config, context, args.vllm_model_impl)
    if why_not is None:
        return
    cure = f"Set `vllm_max_model_length` to {found.limit} or less"
    if found.rope_type in LONGROPE and args.vllm_model_impl != "transformers":
        cure = "Make the two factors equal in the model's config.json"
    raise ValueError(
        f"`vllm_max_model_length`={context}: {why_not}. {cure}, sample with `use_vllm=False`, or leave "
        "`rollout_precision` unset."
    )


def why_not_packed(args, config, whose: str) -> str | None:
    """
    Returns why packed rows would get other positions than padded ones, or `None` if they would not. The text calls the
    model `whose`.
    """
    found = switching(config)
    if found is None or args.rollout_precision is not None:
        return None
    return f"the {whose} has {found}, and a packed row is longer or shorter than the padded rows of its batch"
