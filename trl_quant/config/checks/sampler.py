"""Rules of sampling: where samples come from, in which precision, with which options and noise."""

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from ...models.families import families_with, is_tested
from ...policy.masked import is_bidirectional
from ...precisions import in_vllm
from ...rollout.sampling_options import (
    TRUNCATING,
    UNSUPPORTED_GENERATION_KWARGS,
    biasing_options,
    breaks_when_continued,
    check_option_types,
    check_supported,
    not_taken,
)
from ..given import Given
from ..truncation import replays, truncating_options, why_not_replayed
from ..values import check_choice, listed
from .rule import Rule, acts_only, refusal


def _samples(run: Given) -> bool:
    """Whether an engine of ours samples."""
    return run.spec.sampler is not None


def _samples_without_vllm(run: Given) -> bool:
    return _samples(run) and not run.args.use_vllm


def given_options(run: Given) -> dict:
    """Returns the `generation_kwargs` that are not `None`."""
    return {name: value for name, value in (run.args.generation_kwargs or {}).items() if value is not None}


def _unknown_options(run: Given) -> str | None:
    """Returns why transformers' `generate` does not take the `generation_kwargs`."""
    if run.args.use_vllm:
        return None
    given = given_options(run)
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    if _samples(run):
        known -= UNSUPPORTED_GENERATION_KWARGS.keys() - given.keys()
    unknown = [name for name in given if name not in known]
    return not_taken("transformers' `generate`, which samples without vLLM,", unknown, known) if unknown else None


def _unknown_cache(run: Given) -> str | None:
    cache = given_options(run).get("cache_implementation", run.args.cache_implementation)
    return refusal(check_choice, "cache_implementation", cache, ALL_CACHE_IMPLEMENTATIONS)


def _bias(run: Given) -> str:
    """Lists the sampling options that bias the ratio of a sampler and its trainer."""
    biasing = biasing_options(run.args) if run.spec.has_sampler else {}
    if replays(run.args):
        biasing = {name: value for name, value in biasing.items() if name not in TRUNCATING}
    return " and ".join(f"`{name}`={value!r}" for name, value in biasing.items())


def _why_not_generating(run: Given) -> str | None:
    """Returns the class of a policy without a head that predicts the next token."""
    model_class = run.model_class
    return model_class.__name__ if model_class is not None and not model_class.can_generate() else None


def _is_known_mixture(run: Given) -> bool:
    """Whether the embedded engine computes the policy's experts."""
    return run.config.model_type in families_with("mixture")


def _is_divided(run: Given) -> bool:
    """Whether no rank holds the whole policy."""
    plugin = run.args.deepspeed_plugin
    return run.args.fsdp_version is not None or (plugin is not None and plugin.zero_stage == 3)


def _is_partial(run: Given) -> bool:
    """Whether a generation may leave completions unfinished."""
    return run.args.rollouts_in_flight > 1


def _broken_by_carrying(run: Given) -> list[str]:
    """Returns the sampling options that act otherwise on a completion that goes on in a later generation."""
    args = run.args
    processors = (args.vllm_engine_kwargs or {}).get("logits_processors")
    return breaks_when_continued(
        args.generation_kwargs, getattr(args, "vllm_structured_outputs_regex", None), processors
    )


def _speakers(run: Given) -> str:
    """Names the arguments of a run that give a completion several turns."""
    given = [name for name in ("tools", "rollout_func", "environment_factory") if run.others.get(name)]
    return " and ".join(f"`{name}`" for name in given)


RULES = (
    Rule(
        ("rollout_precision",),
        when=lambda run: _samples(run) and run.args.fsdp_version == 1,
        message="`rollout_precision`={args.rollout_precision!r} with FSDP1, which joins the weights of many layers "
        "into one. Use FSDP2 (`fsdp_version: 2` in accelerate's config file, `version: 2` in `fsdp_config`).",
    ),
    Rule(
        ("rollout_precision", "use_transformers_continuous_batching"),
        when=lambda run: _samples(run) and run.args.use_transformers_continuous_batching,
        message="`rollout_precision`={args.rollout_precision!r} cannot be combined with "
        "`use_transformers_continuous_batching=True`, which samples from the full-precision policy and returns no "
        "log-probabilities. Unset one of the two.",
    ),
    Rule(
        ("rollout_precision", "use_vllm"),
        when=lambda run: _samples(run) and run.args.use_vllm and run.spec.sampled_in not in in_vllm(),
        message="`rollout_precision`={args.rollout_precision!r} is not available with `use_vllm=True`. Allowed there: "
        f"{listed(in_vllm())}. With `use_vllm=False` it runs in the embedded engine.",
    ),
    acts_only(
        ("transformers_continuous_batching_config",),
        "`use_transformers_continuous_batching=True`",
        where=lambda run: run.args.use_transformers_continuous_batching,
    ),
    acts_only(
        ("dynamic_sampling_rounds",),
        "a trainer that has dynamic sampling, such as QuantGRPOTrainer",
        where=lambda run: run.args.has_dynamic_sampling,
    ),
    Rule(
        ("rollouts_in_flight", "rollout_precision"),
        when=lambda run: _is_partial(run) and not _samples(run),
        message="`rollouts_in_flight`={args.rollouts_in_flight!r} needs an engine of this package, but "
        "`rollout_precision` is not set. Set `rollout_precision='bf16'` for one without quantization.",
    ),
    Rule(
        ("rollouts_in_flight", "max_staleness"),
        when=lambda run: run.args.rollouts_in_flight > run.args.max_staleness + 1,
        message="`rollouts_in_flight`={args.rollouts_in_flight!r} with `max_staleness`={args.max_staleness!r}: a group "
        "in flight would return at a greater age. The factor may be at most `max_staleness` + 1.",
    ),
    Rule(
        ("rollouts_in_flight",),
        when=lambda run: _is_partial(run) and run.args.denoises,
        message="`rollouts_in_flight`={args.rollouts_in_flight!r}: a masked diffusion model denoises all completions "
        "together, and none ends before the others. Leave it at 1.",
    ),
    Rule(
        ("rollouts_in_flight", "generation_kwargs"),
        when=lambda run: _is_partial(run) and _broken_by_carrying(run),
        message="`rollouts_in_flight`={args.rollouts_in_flight!r} cannot be combined with the sampling options "
        "{found}, which count from the start of a completion: an engine that goes on with one would not know of its "
        "first tokens. Remove them, or set it to 1.",
    ),
    Rule(
        ("rollouts_in_flight",),
        when=lambda run: _is_partial(run) and _speakers(run),
        message="`rollouts_in_flight`={args.rollouts_in_flight!r} carries unfinished completions of a single turn, and "
        "cannot be combined with {found}, whose turns have a state of their own. Leave it at 1.",
        needs="arguments",
    ),
    acts_only(
        ("max_staleness",),
        "`rollouts_in_flight` above 1",
        where=lambda run: _is_partial(run) or run.args.is_asynchronous,
    ),
    Rule(
        ("noise_sigma_start", "noise_sigma_end"),
        when=lambda run: not run.args.noise_sigma_start >= run.args.noise_sigma_end,
        message="`noise_sigma_start`={args.noise_sigma_start!r} is below `noise_sigma_end`={args.noise_sigma_end!r}. "
        "The noise decays: it must start at least as large as it ends.",
    ),
    Rule(
        ("noise_schedule", "rollout_precision"),
        when=lambda run: run.args.noise_schedule is not None and not _samples(run),
        message="`noise_schedule`={args.noise_schedule!r} needs a copy of the policy to add noise to, but "
        "`rollout_precision` is not set. Set `rollout_precision='bf16'` for noise without quantization.",
    ),
    acts_only(
        ("noise_sigma_start", "noise_sigma_end", "noise_stages"),
        "a `noise_schedule`",
        where=lambda run: run.args.noise_schedule is not None,
    ),
    Rule(
        ("generation_kwargs",),
        when=lambda run: _samples_without_vllm(run) and refusal(check_supported, given_options(run)),
        message="{found}",
    ),
    Rule(
        ("cache_implementation",),
        when=lambda run: _samples_without_vllm(run) and _unknown_cache(run),
        message="{found}",
    ),
    Rule(("generation_kwargs",), when=_unknown_options, message="{found}"),
    Rule(
        ("generation_kwargs",),
        when=lambda run: not run.args.use_vllm and refusal(check_option_types, given_options(run)),
        message="{found}",
    ),
    Rule(
        ("temperature", "generation_kwargs"),
        when=_bias,
        message="{found}: the sampler draws from another distribution than the trainer scores with, and returns "
        "log-probabilities under its own. Part of `mismatch/*`, and of what the correction acts on, then comes from "
        "the sampling options and not from `rollout_precision`. Without any quantization, the mean weight is 0.9 with "
        "top_p=0.9, and the mean size of log w is 0.02 with repetition_penalty=1.3.",
        error=None,
    ),
    Rule(
        ("truncation_replay",),
        when=lambda run: run.args.truncation_replay and not truncating_options(run.args),
        message="`truncation_replay`=True acts only with `top_p`, `top_k` or `min_p`, which leave out unlikely tokens.",
    ),
    Rule(
        ("truncation_replay",),
        when=lambda run: run.args.truncation_replay and why_not_replayed(run.args, run.others),
        message="`truncation_replay`=True cannot act: {found}. Leave it unset.",
        needs="arguments",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _samples(run) and _why_not_generating(run),
        message="The policy is a {found}, which generates no text. Load it with `AutoModelForCausalLM`, or train "
        "another checkpoint.",
        needs="model",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _samples(run) and not run.args.denoises and is_bidirectional(run.config),
        message="The policy attends in both directions (`is_causal=False` in its config), so it is a masked diffusion "
        "model. Train it with `DiffusionGRPOTrainer`; examples/ais_llada.py has a command line for it.",
        needs="model",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _samples(run) and not _is_known_mixture(run) and run.experts,
        message="`rollout_precision`={args.rollout_precision!r}, but the policy is a mixture of {found} experts, and "
        f"engines here know the experts of {', '.join(families_with('mixture'))} alone. Leave `rollout_precision` "
        "unset: TRL generates.",
        needs="model",
    ),
    Rule(
        ("rollout_precision", "use_vllm"),
        when=lambda run: _samples_without_vllm(run) and _is_divided(run) and not is_tested(run.config),
        message="`rollout_precision`={args.rollout_precision!r} with `use_vllm=False`: `model_type`="
        "{run.config.model_type!r} is not among the families that docs/models.md lists, and the embedded engine cannot "
        "compare itself with a policy that the ranks divide. Set `use_vllm=True`, or train with DDP or ZeRO-2.",
        needs="model",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _samples(run) and run.config.is_encoder_decoder,
        message="`rollout_precision`={args.rollout_precision!r}, but {run.config.model_type} is an encoder with a "
        "decoder. The engines run only decoders: train a decoder-only model.",
        needs="model",
    ),
)
