"""The second stage of validation: refuses fields that contradict each other, and fields that would have no effect."""

import logging
from dataclasses import fields
from numbers import Real

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from ..corrections import ALL_CORRECTIONS, CORRECTIONS
from ..precisions import exact_flows, in_vllm
from ..rollout.sampling_options import (
    FIELDS,
    UNSUPPORTED_GENERATION_KWARGS,
    biasing_options,
    check_option_types,
    check_supported,
    not_taken,
)
from ..rollout.verify.kv_cache import UNQUANTIZED
from ..rollout.vllm.support import check_engine_kwargs, check_sampling_parameters
from ..run_spec import INDEPENDENT
from .hyperparameters import setting_fields
from .values import CLIPPED_LOSSES, TRL_RANGES, check_choice, check_range, check_type, listed


logger = logging.getLogger(__name__)

MODEL_IMPLS = ("vllm", "transformers", "auto")
EXACT_ATTENTION = ("backend", "flash_attn_max_num_splits_for_cuda_graph")  # options that `exact_rollouts` sets
COLOCATED_FIELDS = ("vllm_engine_kwargs", "vllm_sleep_level", "lora_sync")  # they act only on a colocated engine


def check_consistent(args) -> None:
    """
    Checks the fields that every trainer has. Raises `ValueError` if some of them contradict each other or would have no
    effect, and warns of choices that make the run's results hard to read.
    """
    if not args.noise_sigma_start >= args.noise_sigma_end:
        raise ValueError(
            f"`noise_sigma_start`={args.noise_sigma_start!r} is below `noise_sigma_end`={args.noise_sigma_end!r}. "
            "The noise decays: it must start at least as large as it ends."
        )
    if args.rollout_precision is not None:
        _check_rollout(args)
    else:
        _check_no_rollout(args)
    if args.exact_rollouts:
        _check_exact(args)
    _check_trainer_has(args)
    _check_unused(args)
    if args.sync_ref_model and not args.needs_reference:
        raise ValueError(
            f"`sync_ref_model`=True with `beta`={args.beta!r}: without a KL term there is no reference model to sync. "
            "Unset `sync_ref_model`, or set a `beta` above 0."
        )
    acting = {"ref_model_mixup_alpha": "sync_ref_model", "ref_model_sync_steps": "sync_ref_model"}
    acting |= {"transformers_continuous_batching_config": "use_transformers_continuous_batching"}
    for name, switch in acting.items():
        if name in args.__dataclass_fields__ and not getattr(args, switch):
            _refuse_set(args, [name], f"`{switch}=True`")
    if args.uaq_scale is not None and args.sync_ref_model:
        raise ValueError(
            f"`uaq_scale`={args.uaq_scale!r} cannot be combined with `sync_ref_model=True`, which would mix scaled "
            "weights with the reference model's unscaled ones. Unset one of the two."
        )
    _check_generation_kwargs(args)
    if args.spec.has_sampler:
        _warn_of_sampler(args)


def check_grpo(args) -> None:
    """
    As [`check_consistent`], for the fields that only GRPO has: the loss, the level of its ratios, and TRL's own
    correction.
    """
    if args.correction_class.moves_clip_bounds:
        _check_clip_bounds(args)
    if args.loss_type == "dr_grpo" and args.max_completion_length is None:
        raise ValueError(
            "`max_completion_length`=None with `loss_type`='dr_grpo', which divides the loss by that length. Set it, "
            "or use another `loss_type`."
        )
    if args.importance_sampling_level != "token":
        _check_level(args)
        _check_vespo(args)
    if not args.correction_class.applied_by_trl:
        _check_trl_correction(args)
        return
    corrects = args.spec.has_sampler and args.vllm_importance_sampling_correction
    if args.loss_type == "vespo" and corrects and not args.vllm_importance_sampling_mode.startswith("token_"):
        raise ValueError(
            f"`vllm_importance_sampling_mode`={args.vllm_importance_sampling_mode!r} with `loss_type`='vespo', for "
            "which TRL's own correction must weigh tokens. Use 'token_truncate' or 'token_mask', or another "
            "`is_correction`."
        )
    if args.rollout_precision and not args.vllm_importance_sampling_correction:
        logger.warning(
            "`vllm_importance_sampling_correction=False` with `is_correction='trl'`: the mismatch between sampler "
            "and trainer is neither corrected nor measured."
        )


def check_ppo(args) -> None:
    """
    As [`check_consistent`], for the fields that only PPO has. Each token has an advantage, from a critic; the loss
    clips the ratio of each token; and the critic is trained under DDP or FSDP2.
    """
    losses = [name for name in CLIPPED_LOSSES if name != "luspo"]
    takes = {
        "scale_rewards": ("none",),
        "loss_type": losses,
        "importance_sampling_level": ("token",),
        "multi_objective_aggregation": ("sum_then_normalize",),
    }
    reasons = {
        "scale_rewards": "compares the completions of a prompt or a batch, and PPO's advantages come from a critic",
        "loss_type": "does not clip the ratio of each token, as PPO does",
        "importance_sampling_level": "has one ratio for a completion, and PPO has one for each token",
        "multi_objective_aggregation": "compares the completions of a prompt, and PPO's advantages come from a critic",
    }
    for name, allowed in takes.items():
        if getattr(args, name) not in allowed:
            raise ValueError(f"`{name}`={getattr(args, name)!r} {reasons[name]}. Use {listed(allowed)}.")
    refused = {
        "DeepSpeed, whose engine holds a single model": args.deepspeed_plugin is not None,
        "FSDP1": args.fsdp_version == 1,
        "`fp16`": args.fp16,
        f"`optim`={args.optim.value!r}, which is built around one model": args.optim_target_modules is not None
        or args.optim.value.partition("_")[0] in ("lomo", "adalomo"),
        f"`optim`={args.optim.value!r}, which transformers puts into training mode for the policy alone": (
            args.optim.value.startswith("schedule_free")
        ),
        f"`lr_scheduler_type`={args.lr_scheduler_type!r}, which reads a metric": args.lr_scheduler_type
        in ("reduce_lr_on_plateau", "greedy"),
    }
    for what, is_set in refused.items():
        if is_set:
            raise ValueError(f"PPO's critic cannot be trained with {what}. Use DDP or FSDP2, in BF16 or FP32.")
    if not args.vf_share_layers:
        return _refuse_set(args, ["vf_coef"], "`vf_share_layers=True`: a critic of its own has `value_learning_rate`")
    if args.value_model_name_or_path is not None:
        raise ValueError(
            f"`value_model_name_or_path`={args.value_model_name_or_path!r} is a critic of its own, and with "
            "`vf_share_layers`=True the critic is a value head on the policy's layers. Unset one of the two."
        )
    if args.torch_compile:
        raise ValueError(
            "`vf_share_layers`=True reads the hidden states of the policy, and a policy compiled with "
            "`torch_compile` does not expose them. Unset one of the two."
        )


def check_rloo(args) -> None:
    """
    As [`check_consistent`], for the fields that only RLOO has. RLOO clips the ratio of a whole completion, and TRL's
    trainer has no correction of its own.
    """
    kind = args.correction_class
    usable = [name for name, k in ALL_CORRECTIONS.items() if not k.moves_clip_bounds and not k.applied_by_trl]
    if kind.moves_clip_bounds:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} moves the upper clip bound of a token, and RLOO clips the ratio "
            f"of a whole completion. Use {listed(usable)}."
        )
    if kind.applied_by_trl and args.rollout_precision is not None:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} is TRL's own, and TRL's RLOO has none. Use {listed(usable)}."
        )
    clip = args.reward_clip_range
    if clip is not None and not _are_bounds(clip):
        raise ValueError(f"`reward_clip_range`={clip!r} must be None or two numbers, of which the first is lower.")
    if kind.applied_by_trl or not kind.has_levels:
        reason = f"a correction whose weights differ between the levels, and `is_correction` is {args.is_correction!r}"
        _refuse_set(args, ["importance_sampling_level"], reason)
    elif args.importance_sampling_level != "token":
        _check_level(args)


def _are_bounds(value) -> bool:
    """Whether `value` is a lower and an upper bound. Either may be infinite."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(isinstance(bound, Real) for bound in value) and value[0] < value[1]


def check_distillation(args) -> None:
    """
    As [`check_consistent`], for the fields that only distillation has. A token's divergence depends only on the tokens
    before it, so a correction must weigh that prefix, and may use neither advantages, nor a clipped ratio, nor later
    tokens.
    """
    usable = [name for name, kind in CORRECTIONS.items() if kind.ignores_sampler or kind.weighs_prefixes]
    kind = args.correction_class
    if kind.applied_by_trl and args.rollout_precision is not None:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} is TRL's own, and TRL's distillation has none. Use "
            f"{listed(usable)}."
        )
    if not kind.applied_by_trl and args.is_correction not in usable:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} acts on advantages, on a clipped ratio, or on single tokens and "
            "whole completions. Distillation has a divergence for each token, which depends on the tokens before it: "
            f"only their weight corrects it. Use {listed(usable)}."
        )
    if args.exact_rollouts:
        raise ValueError(
            "`exact_rollouts`=True makes sampler and trainer agree on the drawn tokens bit for bit, but distillation "
            "compares whole distributions with a teacher's. Leave it unset."
        )
    given = [name for name in ("quantization_config", "config") if name in (args.teacher_model_init_kwargs or {})]
    if args.teacher_precision is not None and given:
        raise ValueError(
            f"`teacher_precision`={args.teacher_precision!r} and {given[0]!r} in `teacher_model_init_kwargs` both set "
            "the teacher's format. Unset one of the two."
        )


def _check_trainer_has(args):
    """Refuses a correction, and dynamic sampling, where the trainer of this config has none."""
    if not args.has_dynamic_sampling:
        _refuse_set(args, ["dynamic_sampling_rounds"], "a trainer that has dynamic sampling, such as QuantGRPOTrainer")
    kind = args.correction_class
    is_plain = kind.applied_by_trl and args.rollout_precision is None  # the default, which leaves everything to TRL
    if args.has_correction or kind.ignores_sampler or is_plain:
        return
    allowed = [name for name, kind in ALL_CORRECTIONS.items() if kind.ignores_sampler]
    raise ValueError(
        f"`is_correction`={args.is_correction!r} acts only with a trainer whose loss takes the weights of a "
        f"correction, such as QuantGRPOTrainer, and this is a {type(args).__name__}. Leave it unset, or use "
        f"{listed(allowed)}."
    )


def _check_unused(args):
    """Refuses hyperparameters of other corrections, and those of a noise that is switched off."""
    corrections = {}  # field -> the corrections of which it sets a hyperparameter
    for correction in ALL_CORRECTIONS:
        for name in setting_fields(correction, type(args)).values():
            if name not in args.trl_config.__dataclass_fields__:
                corrections.setdefault(name, []).append(correction)
    for name, allowed in corrections.items():
        if args.is_correction not in allowed:
            _refuse_set(args, [name], f"`is_correction` {listed(allowed)}, and it is {args.is_correction!r}")
    if args.noise_schedule is None:
        _refuse_set(args, ("noise_sigma_start", "noise_sigma_end", "noise_stages"), "a `noise_schedule`")


def _check_generation_kwargs(args):
    """Refuses `generation_kwargs` that the sampling engine does not have, or whose values it does not take."""
    given = {name: value for name, value in (args.generation_kwargs or {}).items() if value is not None}
    for name in FIELDS:
        if name not in given:
            continue
        called = f"generation_kwargs[{name!r}]"
        check_type(called, given[name], int if name == "top_k" else float)
        is_greedy = name == "temperature" and given[name] == 0
        if name in TRL_RANGES and not is_greedy:
            check_range(called, given[name], TRL_RANGES[name])
    if args.use_vllm:
        return check_sampling_parameters(given, args.vllm_mode, args.max_completion_length)
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    if args.rollout_precision is not None:
        check_supported(given)
        cache = given.get("cache_implementation", args.cache_implementation)
        check_choice("cache_implementation", cache, ALL_CACHE_IMPLEMENTATIONS)
        known -= UNSUPPORTED_GENERATION_KWARGS.keys() - given.keys()
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(not_taken("transformers' `generate`, which samples without vLLM,", unknown, known))
    check_option_types(given)


def _warn_of_sampler(args):
    """Warns of sampling options that bias the ratio, and of a correction that equals another in this run."""
    biasing = biasing_options(args)
    if biasing:
        logger.warning(
            "%s: the sampler draws from another distribution than the trainer scores with, and returns "
            "log-probabilities under its own. Part of `mismatch/*`, and of what the correction acts on, then comes "
            "from the sampling options and not from `rollout_precision`. Without any quantization, the mean weight is "
            "0.9 with top_p=0.9, and the mean size of log w is 0.02 with repetition_penalty=1.3.",
            " and ".join(f"`{name}`={value!r}" for name, value in biasing.items()),
        )
    if args.correction_class.moves_clip_bounds and args.one_update_per_generation:
        logger.warning(
            "With one update per generation no clip bound acts, and `is_correction='acr'` is 'tis', bit for bit. "
            "They differ where a generation serves several updates (`num_iterations`, `steps_per_generation`)."
        )


def _check_no_rollout(args):
    """Refuses fields that act only on a rollout copy, in a run without one."""
    _refuse_set(args, (*COLOCATED_FIELDS, "sync_check_steps"), "a `rollout_precision`, which is not set")
    if args.noise_schedule is not None:
        raise ValueError(
            f"`noise_schedule`={args.noise_schedule!r} needs a copy of the policy to add noise to, but "
            "`rollout_precision` is not set. Set `rollout_precision='bf16'` for noise without quantization."
        )


def _check_rollout(args):
    """Refuses a `rollout_precision` that the chosen sampler, or the sharding, does not have."""
    if args.fsdp_version == 1:
        raise ValueError(
            f"`rollout_precision`={args.rollout_precision!r} with FSDP1, which joins the weights of many layers into "
            "one. Use FSDP2 (`fsdp_version: 2` in accelerate's config file, `version: 2` in `fsdp_config`)."
        )
    if args.use_transformers_continuous_batching:
        raise ValueError(
            f"`rollout_precision`={args.rollout_precision!r} cannot be combined with "
            "`use_transformers_continuous_batching=True`, which samples from the full-precision policy and returns "
            "no log-probabilities. Unset one of the two."
        )
    if args.use_vllm and args.rollout_precision not in in_vllm():
        raise ValueError(
            f"`rollout_precision`={args.rollout_precision!r} is not available with `use_vllm=True`. Allowed there: "
            f"{listed(in_vllm())}. With `use_vllm=False` it runs in the embedded engine."
        )
    behind_server = args.spec.samples_as_trained and args.spec.source == "server"
    settings = in_vllm()[args.rollout_precision].as_given if behind_server else {}
    if settings:
        needed = " ".join(f"{name}={value}" for name, value in settings.items())
        raise ValueError(
            f"`train_precision`={args.train_precision!r} with `vllm_mode='server'`: a server changes the weights that "
            f"it is given unless it was started with {needed}, which cannot be seen from here. Use "
            "`vllm_mode='colocate'`, or another precision."
        )
    _check_vllm(args)


def _check_vllm(args):
    """Refuses vLLM's fields in a run without vLLM, and those that vLLM does not take together."""
    if not args.use_vllm:
        names = ("vllm_structured_outputs_regex", "vllm_max_model_length", *COLOCATED_FIELDS, "sync_check_steps")
        return _refuse_set(args, names, "vLLM, and `use_vllm=False`")
    _refuse_set(args, ["cache_implementation"], "transformers' `generate`, and `use_vllm=True`")
    check_choice("vllm_model_impl", args.vllm_model_impl, MODEL_IMPLS)
    length = args.vllm_max_model_length
    if length is not None and args.max_completion_length is not None and length <= args.max_completion_length:
        raise ValueError(
            f"`vllm_max_model_length`={length} leaves no room for a prompt beside `max_completion_length`="
            f"{args.max_completion_length}. It must be greater."
        )
    check_engine_kwargs(args.vllm_engine_kwargs or {})
    if args.vllm_mode == "server":
        instead = "`vllm_mode='colocate'`: a server takes its arguments when it is started, and merged weights"
        _refuse_set(args, COLOCATED_FIELDS, instead)
    if args.lora_sync == "adapter" and args.train_precision is not None and not args.spec.samples_as_trained:
        raise ValueError(
            f"`lora_sync`='adapter' leaves vLLM's base in {args.rollout_precision!r} (`rollout_precision`), and the "
            f"adapter is trained on a base in {args.train_precision!r} (`train_precision`). Use one precision for "
            "both, or `lora_sync='merge'`."
        )
    if args.lora_sync == "adapter" and args.vllm_enable_sleep_mode and args.vllm_sleep_level == 2:
        raise ValueError(
            "`lora_sync`='adapter' cannot be combined with `vllm_sleep_level`=2, which discards the engine's base "
            "weights: no sync brings them back. Set `vllm_sleep_level=1`, or `lora_sync='merge'`."
        )


def _check_exact(args):
    """
    Refuses `exact_rollouts` where trainer and sampler could get different bits: both must run the same computation,
    with kernels whose results do not depend on the batch.
    """
    needed = {
        f"`train_precision` {listed(exact_flows())}": args.train_precision in exact_flows(),
        "sampling in the `train_precision` (`rollout_precision` unset)": args.spec.samples_as_trained,
        "`use_vllm=True`": args.use_vllm,
        "`vllm_mode='colocate'`": args.vllm_mode == "colocate",
        "`vllm_tensor_parallel_size=1`, since ranks add up in another order": args.vllm_tensor_parallel_size == 1,
        "`vllm_model_impl` 'vllm' or 'auto'": args.vllm_model_impl != "transformers",
        "`lora_sync='merge'`, since an adapter beside the base is multiplied in BF16": args.lora_sync == "merge",
        "no `noise_schedule`, which makes the sampler another policy": args.noise_schedule is None,
        "computing in BF16 (`fp16=False`)": not args.fp16,
        "weights that each rank holds whole (no FSDP)": args.fsdp_version is None,
        "no `torch_compile`, which has kernels of its own": not args.torch_compile,
        "no `use_liger_kernel`, which has kernels of its own": not args.use_liger_kernel,
        # Only GRPO's config has this field
        "the head in BF16, as the engine has it (`cast_lm_head_to_fp32=False`)": not getattr(
            args, "cast_lm_head_to_fp32", False
        ),
    }
    missing = [condition for condition, is_met in needed.items() if not is_met]
    if missing:
        raise ValueError(f"`exact_rollouts`=True needs {'; '.join(missing)}.")
    given = args.vllm_engine_kwargs or {}
    compiled, attention = (given.get(name) or {} for name in ("compilation_config", "attention_config"))
    overrides = {
        "kv_cache_dtype": given.get("kv_cache_dtype", "auto") not in UNQUANTIZED,
        "enforce_eager": given.get("enforce_eager"),
        "compilation_config": not isinstance(compiled, dict) or compiled.keys() & {"mode", "cudagraph_mode"},
        "attention_config": not isinstance(attention, dict) or attention.keys() & set(EXACT_ATTENTION),
        "attention_backend": given.get("attention_backend"),
        "disable_cascade_attn": given.get("disable_cascade_attn") is False,
    }
    overridden = [name for name, is_set in overrides.items() if is_set]
    if overridden:
        name = overridden[0]
        raise ValueError(
            f"`vllm_engine_kwargs` has {name!r}={given[name]!r}, and `exact_rollouts`=True sets cache, compilation, "
            "CUDA graphs and attention itself. Leave it out."
        )


def _refuse_set(args, names, reason: str):
    """Raises `ValueError` for fields that were set but cannot act. Never names a field that the user left open."""
    default = {f.name: f.default for f in fields(args)} | INDEPENDENT
    is_set = [name for name in names if name not in args.derived and getattr(args, name) not in (default[name], {})]
    given = [f"`{name}`={getattr(args, name)!r}" for name in is_set]
    if given:
        raise ValueError(f"{' and '.join(given)} acts only with {reason}.")


def _check_clip_bounds(args):
    """Refuses a correction that moves clip bounds where the loss has none, or truncates the ratio before them."""
    others = f"`is_correction` {listed(name for name, kind in ALL_CORRECTIONS.items() if not kind.moves_clip_bounds)}"
    if args.delta is not None:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} moves the upper clip bound, and `delta`={args.delta!r} cuts the "
            f"ratio before it. Unset `delta`, or use {others}."
        )
    if args.loss_type not in CLIPPED_LOSSES:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} moves the upper clip bound of the policy ratio, and `loss_type`="
            f"{args.loss_type!r} has none. Use {others}, or a loss that clips: {', '.join(CLIPPED_LOSSES)}."
        )


def _check_level(args):
    """Refuses a correction of single tokens where a whole sequence has one ratio."""
    takes = [name for name, kind in ALL_CORRECTIONS.items() if not kind.token_only]
    if args.correction_class.token_only:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} judges the ratio of each token, but `importance_sampling_level`="
            f"{args.importance_sampling_level!r} has one ratio for a whole sequence. Use {listed(takes)}."
        )


def _check_vespo(args):
    """
    Refuses VESPO with weights of sequences, because VESPO multiplies a sequence's weights itself. TRL's own weights
    belong to tokens at either level.
    """
    if args.loss_type == "vespo" and not args.correction_class.applied_by_trl:
        raise ValueError(
            f"`loss_type`='vespo' with `importance_sampling_level`={args.importance_sampling_level!r}: VESPO "
            "multiplies the weights of a sequence's T tokens itself. Here each of these weights is their product "
            "already, and VESPO would raise it to the power T: for a product of 1.9 over 64 tokens its factor phi "
            "would be 0.0 and not 0.24. Use `importance_sampling_level`='token', with which VESPO forms the sequence's "
            "ratio from its tokens, or another `loss_type`."
        )


def _check_trl_correction(args):
    """Refuses our corrections if TRL does not compare sampler and trainer; warns of TRL's fields without effect."""
    has_sampler = args.spec.has_sampler
    if has_sampler and not args.vllm_importance_sampling_correction:
        why = (
            f"`is_correction`={args.is_correction!r} compares the sampler with the trainer, which "
            "`vllm_importance_sampling_correction=False` switches off. Leave that at True"
        )
        if args.correction_class.ignores_sampler:
            raise ValueError(f"{why}: the comparison is only logged (`mismatch/*`), and the loss ignores the sampler.")
        raise ValueError(f"{why}, and use `is_correction='none'` to ignore the sampler.")
    defaults = {f.name: f.default for f in fields(args)}
    trls = [name for name, kind in ALL_CORRECTIONS.items() if kind.applied_by_trl]
    names = [field for name in trls for field in setting_fields(name, type(args)).values()]
    changed = [name for name in names if has_sampler and getattr(args, name) != defaults[name]]
    if changed:
        logger.warning(
            "%s only act with `is_correction='trl'`; they are ignored with is_correction=%r.",
            " and ".join(f"`{name}`" for name in changed),
            args.is_correction,
        )
