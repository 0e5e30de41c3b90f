"""Rules of corrections: what a trainer's loss can be weighed with, and at which level."""

from numbers import Real

from ...corrections import ALL_CORRECTIONS
from ..given import Given
from ..hyperparameters import setting_fields
from ..values import CLIPPED_LOSSES, listed
from .rule import Rule, acts_only, assigned


WITHOUT_BOUNDS = [name for name, kind in ALL_CORRECTIONS.items() if not kind.moves_clip_bounds]
OF_SEQUENCES = [name for name, kind in ALL_CORRECTIONS.items() if not kind.token_only]


def _usable(args) -> list[str]:
    """Returns the corrections that a trainer's loss can take."""
    usable = {name: kind for name, kind in ALL_CORRECTIONS.items() if args.corrected_by_trl or not kind.applied_by_trl}
    if args.clips_completions:
        usable = {name: kind for name, kind in usable.items() if not kind.moves_clip_bounds}
    if not args.has_rewards:
        usable = {name: kind for name, kind in usable.items() if kind.ignores_sampler or kind.weighs_prefixes}
    if not args.has_correction:
        usable = {name: kind for name, kind in ALL_CORRECTIONS.items() if kind.ignores_sampler}
    return list(usable)


def _is_plain(run: Given) -> bool:
    """Whether everything is left to TRL."""
    return run.args.correction_class.applied_by_trl and run.spec.sampler is None


def _without_correction(run: Given) -> str | None:
    """Returns the usable corrections, where a trainer's loss takes no weights and the run asks for some."""
    args = run.args
    if args.has_correction or args.correction_class.ignores_sampler or _is_plain(run):
        return None
    return listed(_usable(args))


def _without_trls(run: Given) -> tuple[str, str] | None:
    """Returns the method and the usable corrections, where TRL's own is asked for and TRL's trainer has none."""
    args = run.args
    if args.corrected_by_trl or not args.correction_class.applied_by_trl or _is_plain(run):
        return None
    return args.trl_config.__name__.replace("Config", "Trainer"), listed(_usable(args))


def _of_completions(run: Given) -> str | None:
    args = run.args
    return listed(_usable(args)) if args.clips_completions and args.correction_class.moves_clip_bounds else None


def _of_divergences(run: Given) -> str | None:
    args = run.args
    is_ours = not args.has_rewards and not args.correction_class.applied_by_trl
    return listed(_usable(args)) if is_ours and args.is_correction not in _usable(args) else None


def _of_others(run: Given) -> str | None:
    """Returns what is wrong with a hyperparameter of another correction than the run's."""
    args = run.args
    corrections = {}  # field -> the corrections of which it sets a hyperparameter
    for correction in ALL_CORRECTIONS:
        for name in setting_fields(correction, type(args)).values():
            if name not in args.trl_config.__dataclass_fields__:
                corrections.setdefault(name, []).append(correction)
    for name, allowed in corrections.items():
        given = assigned(args, [name])
        if given and args.is_correction not in allowed:
            return f"{given} acts only with `is_correction` {listed(allowed)}, and it is {args.is_correction!r}."
    return None


def _are_bounds(value) -> bool:
    """Whether `value` is a lower and an upper bound. Either may be infinite."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(isinstance(bound, Real) for bound in value) and value[0] < value[1]


def _has_levels(run: Given) -> bool:
    """Whether the level of the ratios acts. Where the loss clips completions, it is the correction's alone."""
    kind = run.args.correction_class
    return not run.args.clips_completions or (kind.has_levels and not kind.applied_by_trl)


def _weighs_sequences(run: Given) -> bool:
    return run.args.importance_sampling_level != "token" and not run.args.correction_class.applied_by_trl


def _is_uncompared(run: Given) -> bool:
    """Whether TRL does not compare the sampler with the trainer, though the run's correction needs that."""
    compares = run.args.vllm_importance_sampling_correction
    return run.spec.has_sampler and not compares and not run.args.correction_class.applied_by_trl


def _trls_fields(run: Given) -> str:
    """Lists the fields of TRL's own correction that were set and are ignored."""
    args = run.args
    if args.correction_class.applied_by_trl or not run.spec.has_sampler:
        return ""
    trls = [name for name, kind in ALL_CORRECTIONS.items() if kind.applied_by_trl]
    names = [field for name in trls for field in setting_fields(name, type(args)).values()]
    changed = [name for name in names if getattr(args, name) != args.__dataclass_fields__[name].default]
    return " and ".join(f"`{name}`" for name in changed)


def _weighs_by_trl(run: Given) -> bool:
    """Whether TRL's own correction acts."""
    is_trls = run.args.correction_class.applied_by_trl
    return run.spec.has_sampler and is_trls and run.args.vllm_importance_sampling_correction


def _ignored_by_loss(run: Given) -> bool:
    """Whether a correction has no sampler to correct for."""
    kind = run.args.correction_class
    return not (kind.applied_by_trl or kind.ignores_sampler or run.spec.has_sampler)


def _never_weighs(run: Given) -> bool:
    """Whether the weight of every completion is 1 in every step."""
    return run.args.samples_same_bits and run.args.one_update_per_generation


def _steps_itself(run: Given) -> bool:
    """Whether the optimizer steps inside the backward pass, before anything can set the step's learning rate."""
    return "lomo" in run.args.optim or "layerwise" in run.args.optim


RULES = (
    Rule(
        ("is_correction",),
        when=_without_correction,
        message="`is_correction`={args.is_correction!r} acts only with a trainer whose loss takes the weights of a "
        "correction, such as QuantGRPOTrainer, and this is a {args.__class__.__name__}. Leave it unset, or use "
        "{found}.",
    ),
    Rule(
        ("is_correction",),
        when=_without_trls,
        message="`is_correction`={args.is_correction!r} is TRL's own, and TRL's {found[0]} has none. Use {found[1]}.",
    ),
    Rule(("is_correction",), when=_of_others, message="{found}"),
    Rule(
        ("is_correction", "delta"),
        when=lambda run: run.args.correction_class.moves_clip_bounds and run.args.delta is not None,
        message="`is_correction`={args.is_correction!r} moves the upper clip bound, and `delta`={args.delta!r} cuts "
        f"the ratio before it. Unset `delta`, or use `is_correction` {listed(WITHOUT_BOUNDS)}.",
    ),
    Rule(
        ("is_correction", "loss_type"),
        when=lambda run: run.args.correction_class.moves_clip_bounds and run.args.loss_type not in CLIPPED_LOSSES,
        message="`is_correction`={args.is_correction!r} moves the upper clip bound of the policy ratio, and "
        f"`loss_type`={{args.loss_type!r}} has none. Use `is_correction` {listed(WITHOUT_BOUNDS)}, or a loss that "
        f"clips: {', '.join(CLIPPED_LOSSES)}.",
    ),
    Rule(
        ("is_correction",),
        when=_of_completions,
        message="`is_correction`={args.is_correction!r} moves the upper clip bound of a token, and RLOO clips the "
        "ratio of a whole completion. Use {found}.",
    ),
    Rule(
        ("is_correction",),
        when=_of_divergences,
        message="`is_correction`={args.is_correction!r} acts on advantages, on a clipped ratio, or on single tokens "
        "and whole completions. Distillation has a divergence for each token, which depends on the tokens before it: "
        "only their weight corrects it. Use {found}.",
    ),
    acts_only(
        ("importance_sampling_level",),
        "a correction whose weights differ between the levels, and `is_correction` is {args.is_correction!r}",
        where=_has_levels,
    ),
    Rule(
        ("is_correction", "importance_sampling_level"),
        when=lambda run: run.args.importance_sampling_level != "token" and run.args.correction_class.token_only,
        message="`is_correction`={args.is_correction!r} judges the ratio of each token, but "
        "`importance_sampling_level`={args.importance_sampling_level!r} has one ratio for a whole sequence. Use "
        f"{listed(OF_SEQUENCES)}.",
    ),
    Rule(
        ("loss_type", "importance_sampling_level"),
        when=lambda run: run.args.loss_type == "vespo" and _weighs_sequences(run),
        message="`loss_type`='vespo' with `importance_sampling_level`={args.importance_sampling_level!r}: VESPO "
        "multiplies the weights of a sequence's T tokens itself. Here each of these weights is their product already, "
        "and VESPO would raise it to the power T: for a product of 1.9 over 64 tokens its factor phi would be 0.0 and "
        "not 0.24. Use `importance_sampling_level`='token', with which VESPO forms the sequence's ratio from its "
        "tokens, or another `loss_type`.",
    ),
    Rule(
        ("is_correction", "vllm_importance_sampling_correction"),
        when=lambda run: _is_uncompared(run) and run.args.correction_class.ignores_sampler,
        message="`is_correction`={args.is_correction!r} compares the sampler with the trainer, which "
        "`vllm_importance_sampling_correction=False` switches off. Leave that at True: the comparison is only logged "
        "(`mismatch/*`), and the loss ignores the sampler.",
    ),
    Rule(
        ("is_correction", "vllm_importance_sampling_correction"),
        when=_is_uncompared,
        message="`is_correction`={args.is_correction!r} compares the sampler with the trainer, which "
        "`vllm_importance_sampling_correction=False` switches off. Leave that at True, and use `is_correction='none'` "
        "to ignore the sampler.",
    ),
    Rule(
        ("is_correction", "vllm_importance_sampling_correction"),
        when=_trls_fields,
        message="{found} only act with `is_correction='trl'`; they are ignored with "
        "is_correction={args.is_correction!r}.",
        error=None,
    ),
    Rule(
        ("loss_type", "vllm_importance_sampling_mode"),
        when=lambda run: (
            run.args.loss_type == "vespo"
            and _weighs_by_trl(run)
            and not run.args.vllm_importance_sampling_mode.startswith("token_")
        ),
        message="`vllm_importance_sampling_mode`={args.vllm_importance_sampling_mode!r} with `loss_type`='vespo', for "
        "which TRL's own correction must weigh tokens. Use 'token_truncate' or 'token_mask', or another "
        "`is_correction`.",
    ),
    Rule(
        ("is_correction", "vllm_importance_sampling_correction"),
        when=lambda run: (
            run.spec.sampler is not None
            and run.args.correction_class.applied_by_trl
            and not run.args.vllm_importance_sampling_correction
        ),
        message="`vllm_importance_sampling_correction=False` with `is_correction='trl'`: the mismatch between sampler "
        "and trainer is neither corrected nor measured.",
        error=None,
    ),
    Rule(
        ("is_correction", "num_iterations"),
        when=lambda run: (
            run.spec.has_sampler and run.args.correction_class.moves_clip_bounds and run.args.one_update_per_generation
        ),
        message="With one update per generation no clip bound acts, and `is_correction='acr'` is 'tis', bit for bit. "
        "They differ where a generation serves several updates (`num_iterations`, `steps_per_generation`).",
        error=None,
    ),
    Rule(
        ("ess_step_scaling", "rollout_precision"),
        when=lambda run: run.args.ess_step_scaling and run.spec.sampler is None,
        message="`ess_step_scaling`=True needs an engine of this package, but `rollout_precision` is not set. Set "
        "`rollout_precision='bf16'` for one without quantization.",
    ),
    Rule(
        ("ess_step_scaling",),
        when=lambda run: (
            run.args.ess_step_scaling
            and (run.args.is_asynchronous or not (run.args.has_correction and run.args.has_rewards))
        ),
        message="`ess_step_scaling`=True scales the steps of a loss that weighs the rewards of whole completions, such "
        "as QuantGRPOTrainer's, and this is a {args.__class__.__name__}. Leave it unset.",
    ),
    Rule(
        ("ess_step_scaling",),
        when=lambda run: run.args.ess_step_scaling and run.args.denoises,
        message="`ess_step_scaling`=True needs the probability of a whole completion. A masked diffusion model has "
        "one-step estimates of single tokens, whose product is not that probability. Leave it unset.",
    ),
    Rule(
        ("ess_step_scaling", "vllm_importance_sampling_correction"),
        when=lambda run: run.args.ess_step_scaling and not run.args.vllm_importance_sampling_correction,
        message="`ess_step_scaling`=True compares the sampler with the trainer, which "
        "`vllm_importance_sampling_correction=False` switches off. Leave that at True.",
    ),
    Rule(
        ("ess_step_scaling", "exact_rollouts"),
        when=lambda run: run.args.ess_step_scaling and _never_weighs(run),
        message="`ess_step_scaling`=True with `exact_rollouts`=True and one update per generation: sampler and trainer "
        "have the same bits at each step, so every weight is 1 and no step is scaled. Unset one of the two.",
    ),
    Rule(
        ("ess_step_scaling", "optim"),
        when=lambda run: run.args.ess_step_scaling and _steps_itself(run),
        message="`ess_step_scaling`=True with `optim`={args.optim!r}, which steps during the backward pass, before the "
        "weights of a step are known. Use another optimizer.",
    ),
    Rule(
        ("ess_step_scaling",),
        when=lambda run: run.args.ess_step_scaling and run.args.deepspeed_plugin is not None,
        message="`ess_step_scaling`=True with DeepSpeed, whose engine steps inside the backward pass, before the "
        "weights of a step are known. Use DDP or FSDP2.",
        needs="arguments",
    ),
    Rule(
        ("reward_clip_range",),
        when=lambda run: run.args.reward_clip_range is not None and not _are_bounds(run.args.reward_clip_range),
        message="`reward_clip_range`={args.reward_clip_range!r} must be None or two numbers, of which the first is "
        "lower.",
    ),
    Rule(
        ("is_correction",),
        when=lambda run: _ignored_by_loss(run) and run.others.get("rollout_func") is not None,
        message="`is_correction`={args.is_correction!r} with a `rollout_func` needs `use_vllm=True`: without it TRL's "
        "loss takes no weights. Set `is_correction='none'`, or `use_vllm=True`.",
        needs="arguments",
    ),
    Rule(
        ("is_correction",),
        when=_ignored_by_loss,
        message="`is_correction`={args.is_correction!r} does nothing in this run, whose samples come from the policy "
        "itself. Set `rollout_precision` or `use_vllm=True`.",
        needs="arguments",
        error=None,
    ),
)
