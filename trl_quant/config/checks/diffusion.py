"""Rules of masked diffusion: the schedule, the masks, and fields without effect."""

from typing import Any

from ...policy.masked import check_bidirectional, mask_token_of
from ...rollout.sampling_options import BOTH, acts
from ...rollout.tokenizer import id_list
from ..given import Given
from ..saving import read_generation_config
from .rule import Rule, check_rules, refusal


FROM_LEFT_TO_RIGHT = (
    *("use_vllm", "exact_rollouts", "pack_sequences", "generation_kwargs", "cache_implementation"),
    "use_transformers_continuous_batching",
)


def _without_effect(run: Given) -> str:
    """Lists the fields that were set and act only where tokens are sampled from left to right."""
    is_set = {name: getattr(run.args, name) for name in FROM_LEFT_TO_RIGHT}
    is_set |= {name: acts(getattr(run.args, name), neutral) for name, neutral in BOTH.items()}
    return " and ".join(f"`{name}`={getattr(run.args, name)!r}" for name, value in is_set.items() if value)


def _turns(run: Given) -> str:
    """Lists the arguments that give a completion several turns."""
    names = ("tools", "rollout_func", "environment_factory")
    return " and ".join(f"`{name}`" for name in names if run.others.get(name))


def _check_mask_token(run: Given) -> None:
    if run.processing_class is not None or run.args.mask_token_id is not None:
        ends = id_list(read_generation_config(run.model, run.args).eos_token_id)
        mask_token_of(run.args.mask_token_id, run.processing_class, run.config, ends)


BLOCKS = (
    Rule(
        ("max_completion_length", "block_length"),
        when=lambda run: run.args.max_completion_length is None,
        message="`max_completion_length`=None: a canvas needs a length. Set a multiple of "
        "`block_length`={args.block_length}.",
    ),
    Rule(
        ("max_completion_length", "block_length"),
        when=lambda run: run.args.max_completion_length % run.args.block_length,
        message="`block_length`={args.block_length} does not divide `max_completion_length`="
        "{args.max_completion_length}. The canvas of that many tokens is denoised in whole blocks: change one of the "
        "two.",
    ),
    Rule(
        ("block_length", "tokens_per_step"),
        when=lambda run: run.args.block_length % run.args.tokens_per_step,
        message="`tokens_per_step`={args.tokens_per_step} does not divide `block_length`={args.block_length}. Each "
        "step of a block writes the same number of tokens: change one of the two.",
    ),
    Rule(
        ("cache_finished_blocks", "block_length", "tokens_per_step"),
        when=lambda run: run.args.cache_finished_blocks and run.args.block_length == run.args.tokens_per_step,
        message="`cache_finished_blocks`=True acts only between the steps of a block, and with `tokens_per_step`="
        "`block_length`={args.block_length} a block has one step. Switch it off, or write fewer tokens per step.",
    ),
)

RULES = (
    *BLOCKS,
    Rule(
        ("prompt_mask_draws", "num_iterations"),
        when=lambda run: run.args.mask_draws > run.args.num_iterations,
        message="`prompt_mask_draws`={args.prompt_mask_draws} is more than `num_iterations`={args.num_iterations}, so "
        "that some masks would never be trained on. It must be at most that.",
    ),
    Rule(
        ("prompt_mask_draws", "prompt_mask_probability"),
        when=lambda run: run.args.mask_draws > 1 and run.args.prompt_mask_probability in (0, 1),
        message="`prompt_mask_draws`={args.prompt_mask_draws} with `prompt_mask_probability`="
        "{args.prompt_mask_probability}: all masks are the same, so one is enough. Leave `prompt_mask_draws` unset, or "
        "use a probability between 0 and 1.",
    ),
    Rule(
        ("prompt_mask_draws", "is_correction"),
        when=lambda run: run.args.correction_class.applied_by_trl and run.args.mask_draws > 1,
        message="`is_correction`={args.is_correction!r} is TRL's own, which scores the sampler once, and each "
        "completion here has {args.mask_draws} masks. Set `prompt_mask_draws=1`, or use another correction, such as "
        "'tis'.",
    ),
    Rule(
        ("block_length", *FROM_LEFT_TO_RIGHT, *BOTH),
        when=_without_effect,
        message="{found}: a masked diffusion model is denoised by an embedded copy of the policy, in blocks, with "
        "`temperature` as its only sampling option. Leave the field unset.",
    ),
    Rule(
        ("block_length",),
        when=_turns,
        message="{found} with a masked diffusion model, whose completions have one turn. Leave it out.",
        needs="model",
    ),
    Rule(
        ("block_length",),
        when=lambda run: refusal(check_bidirectional, run.config),
        message="{found}",
        needs="model",
    ),
    Rule(("mask_token_id",), when=lambda run: refusal(_check_mask_token, run), message="{found}", needs="model"),
)


def check_schedule(options: Any) -> None:
    """Raises `ValueError` if blocks do not fill the completion, steps do not fill a block, or a cache cannot act."""
    check_rules(BLOCKS, Given(options))
