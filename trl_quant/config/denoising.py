"""The second stage of validation for masked diffusion: the schedule, the masks, and fields without effect."""

from ..rollout.sampling_options import BOTH, acts


def check_schedule(args) -> None:
    """Raises `ValueError` if blocks do not fill the completion, steps do not fill a block, or a cache cannot act."""
    length, block = args.max_completion_length, args.block_length
    if length is None:
        raise ValueError(
            f"`max_completion_length`=None: a canvas needs a length. Set a multiple of `block_length`={block}."
        )
    if length % block:
        raise ValueError(
            f"`block_length`={block} does not divide `max_completion_length`={length}. The canvas of that many tokens "
            "is denoised in whole blocks: change one of the two."
        )
    if block % args.tokens_per_step:
        raise ValueError(
            f"`tokens_per_step`={args.tokens_per_step} does not divide `block_length`={block}. Each step of a block "
            "writes the same number of tokens: change one of the two."
        )
    if args.cache_finished_blocks and block == args.tokens_per_step:
        raise ValueError(
            f"`cache_finished_blocks`=True acts only between the steps of a block, and with `tokens_per_step`="
            f"`block_length`={block} a block has one step. Switch it off, or write fewer tokens per step."
        )


def check_denoising(args) -> None:
    """
    Checks the fields of masked diffusion. Raises `ValueError` for a schedule that does not fill the canvas, and for
    fields that act only where tokens are sampled from left to right.
    """
    check_schedule(args)
    if args.mask_draws > args.num_iterations:
        raise ValueError(
            f"`prompt_mask_draws`={args.prompt_mask_draws} is more than `num_iterations`={args.num_iterations}, so "
            "that some masks would never be trained on. It must be at most that."
        )
    if args.mask_draws > 1 and args.prompt_mask_probability in (0, 1):
        raise ValueError(
            f"`prompt_mask_draws`={args.prompt_mask_draws} with `prompt_mask_probability`="
            f"{args.prompt_mask_probability}: all masks are the same, so one is enough. Leave `prompt_mask_draws` "
            "unset, or use a probability between 0 and 1."
        )
    if args.correction_class.applied_by_trl and args.mask_draws > 1:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} is TRL's own, which scores the sampler once, and each completion "
            f"here has {args.mask_draws} masks. Set `prompt_mask_draws=1`, or use another correction, such as 'tis'."
        )
    only_from_left_to_right = {
        "use_vllm": args.use_vllm,
        "exact_rollouts": args.exact_rollouts,
        "pack_sequences": args.pack_sequences,
        "generation_kwargs": args.generation_kwargs,
        "cache_implementation": args.cache_implementation,
        "use_transformers_continuous_batching": args.use_transformers_continuous_batching,
        **{name: acts(getattr(args, name), neutral) for name, neutral in BOTH.items()},
    }
    refused = [f"`{name}`={getattr(args, name)!r}" for name, is_set in only_from_left_to_right.items() if is_set]
    if refused:
        raise ValueError(
            f"{' and '.join(refused)}: a masked diffusion model is denoised by an embedded copy of the policy, in "
            "blocks, with `temperature` as its only sampling option. Leave the field unset."
        )
