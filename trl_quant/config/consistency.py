"""What a configuration's fields say: each in its range, and which of them cannot act with others.

Everything here is checked when the configuration is built, before any model is loaded.
"""

import logging
from dataclasses import fields

from transformers import GenerationConfig

from ..corrections import CORRECTIONS
from ..corrections.trl import TRL
from ..noise import SCHEDULES
from ..precisions import PRECISIONS, exact_flows, in_vllm, train_precisions
from ..rollout import VLLM_MODES
from ..rollout.sampling_options import (
    FIELDS,
    UNSUPPORTED_GENERATION_KWARGS,
    biasing_options,
    check_supported,
    not_taken,
)
from ..rollout.verify.kv_cache import UNQUANTIZED
from ..rollout.vllm.support import check_engine_kwargs, check_sampling_parameters
from ..scaling import check_scale
from .values import BOUNDS, CHOICES, CLIPPED_LOSSES, check_at_least, check_bounds, check_choice, check_type, listed


logger = logging.getLogger(__name__)

MODEL_IMPLS = ("vllm", "transformers", "auto")
LORA_SYNCS = ("merge", "adapter")
EXACT_ATTENTION_FIELDS = (
    "backend",
    "flash_attn_max_num_splits_for_cuda_graph",
)  # what `exact_rollouts` sets of vLLM's attention
VLLM_FIELDS = ("vllm_engine_kwargs", "vllm_sleep_level", "lora_sync")  # of the colocated engine


def check_values(args) -> None:
    """Raises `ValueError` for a field that is out of range, whatever this machine has."""
    check_choice("train_precision", args.train_precision, train_precisions())
    check_choice("rollout_precision", args.rollout_precision, (*PRECISIONS, "auto"))
    check_choice("lora_sync", args.lora_sync, LORA_SYNCS)
    check_choice("vllm_sleep_level", args.vllm_sleep_level, (1, 2))
    check_choice("is_correction", args.is_correction, ("trl", *CORRECTIONS))
    check_choice("noise_schedule", args.noise_schedule, SCHEDULES)
    check_choice("vllm_mode", args.vllm_mode, VLLM_MODES)
    check_at_least("is_cap", args.is_cap, 1.0)
    check_at_least("ais_delta", args.ais_delta, 0.0, strict=True)
    check_at_least("ais_gamma", args.ais_gamma, 0.0, strict=True)
    check_at_least("ais_beta_var", args.ais_beta_var, 0.0)
    check_at_least("noise_sigma_end", args.noise_sigma_end, 0.0, strict=True)
    check_at_least("noise_stages", args.noise_stages, 3)
    check_at_least("sync_check_steps", args.sync_check_steps, 0)
    check_at_least("dynamic_sampling_rounds", args.dynamic_sampling_rounds, 0)
    for name in BOUNDS:
        check_bounds(name, getattr(args, name))
    if args.uaq_scale is not None:
        check_scale(args.uaq_scale, "uaq_scale")
    if not args.noise_sigma_start >= args.noise_sigma_end:
        raise ValueError(
            f"`noise_sigma_start`={args.noise_sigma_start!r} is below `noise_sigma_end`={args.noise_sigma_end!r}. "
            "The noise decays: it must start at least as large as it ends."
        )


def check_consistent(args) -> None:
    """Raises `ValueError` for fields that do not fit together; warns of those that do little."""
    for name, allowed in CHOICES.items():
        check_choice(name, getattr(args, name), allowed)
    if args.holds_frozen_base and args.uaq_scale is not None:
        raise ValueError(
            f"`uaq_scale`={args.uaq_scale!r} scales 16-bit weights, and `train_precision`={args.train_precision!r} "
            "holds none. Scale and save the model first (`trl_quant.scaling.apply_uaq`), or unset one of the two."
        )
    if args.rollout_precision is not None:
        _check_rollout(args)
    else:
        _check_no_rollout(args)
    if args.exact_rollouts:
        _check_exact(args)
    _check_hyperparameters(args)
    if args.is_correction == "acr":
        _check_acr(args)
    if args.importance_sampling_level != "token":
        _check_level(args)
        _check_vespo(args)
    if args.is_correction != "trl":
        _check_trl_correction(args)
    _check_generation_kwargs(args)
    if args.use_vllm or args.rollout_precision is not None:
        _check_sampler(args)


def _check_hyperparameters(args):
    """Those of another correction, or of a noise that there is not, are refused."""
    taken = {f.name for f in fields(CORRECTIONS[args.is_correction])} if args.is_correction != "trl" else set()
    for correction in CORRECTIONS:
        names = [name for name in args.__dataclass_fields__ if name.startswith(f"{correction}_")]
        if correction != args.is_correction:
            _refuse_set(args, names, f"`is_correction`={correction!r}, and it is {args.is_correction!r}")
    if "cap" not in taken:
        capped = listed(name for name, kind in CORRECTIONS.items() if "cap" in kind.__dataclass_fields__)
        _refuse_set(args, ("is_cap",), f"`is_correction` {capped}, and it is {args.is_correction!r}")
    if args.noise_schedule is None:
        _refuse_set(args, ("noise_sigma_start", "noise_sigma_end", "noise_stages"), "a `noise_schedule`")
    if args.uaq_scale is not None and args.sync_ref_model:
        raise ValueError(
            f"`uaq_scale`={args.uaq_scale!r} cannot be combined with `sync_ref_model=True`, which would mix scaled "
            "weights with the reference model's unscaled ones. Unset one of the two."
        )


def _check_generation_kwargs(args):
    """What `generation_kwargs` hold must be an option of the engine that samples, of a value that it takes."""
    check_type("generation_kwargs", args.generation_kwargs or {}, dict)
    given = {name: value for name, value in (args.generation_kwargs or {}).items() if value is not None}
    for name in (name for name in FIELDS if name in given):
        called = f"generation_kwargs[{name!r}]"
        check_type(called, given[name], int if name == "top_k" else float)
        if name in BOUNDS and (name, given[name]) != ("temperature", 0):  # which takes the likeliest token
            check_bounds(name, given[name], called)
    if args.use_vllm:
        return check_sampling_parameters(given, args.vllm_mode, args.max_completion_length)
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    if args.rollout_precision is not None:
        check_supported(given)
        known -= UNSUPPORTED_GENERATION_KWARGS.keys() - given.keys()
    if unknown := [name for name in given if name not in known]:
        raise ValueError(not_taken("transformers' `generate`, which samples without vLLM,", unknown, known))


def _check_sampler(args):
    """What is said of a run whose samples are compared with the trainer."""
    if biasing := biasing_options(args):
        logger.warning(
            "%s: the sampler draws from another distribution than the trainer scores with, and its log-probabilities "
            "are of that. Part of `mismatch/*`, and of what corrections act on, then comes from the sampling options "
            "and not from `rollout_precision`: without any quantization the mean weight is 0.9 with top_p=0.9, and the "
            "mean size of log w is 0.02 with repetition_penalty=1.3.",
            " and ".join(f"`{name}`={value!r}" for name, value in biasing.items()),
        )
    if args.is_correction == "trl" and args.rollout_precision and not args.vllm_importance_sampling_correction:
        logger.warning(
            "`vllm_importance_sampling_correction=False` with `is_correction='trl'`: the mismatch between sampler "
            "and trainer is neither corrected nor measured."
        )
    if args.is_correction == "acr" and args.one_update_per_generation:
        logger.warning(
            "With one update per generation no clip bound acts, and `is_correction='acr'` is 'tis', bit for bit. "
            "They part where a generation serves several updates (`num_iterations`, `steps_per_generation`)."
        )


def _check_no_rollout(args):
    _refuse_set(args, (*VLLM_FIELDS, "sync_check_steps"), "a `rollout_precision`, which is not set")
    if args.noise_schedule is not None:
        raise ValueError(
            f"`noise_schedule`={args.noise_schedule!r} needs a copy of the policy to add noise to, but "
            "`rollout_precision` is not set. Set `rollout_precision='bf16'` for noise without quantization."
        )


def _check_rollout(args):
    if args.use_transformers_continuous_batching:
        raise ValueError(
            f"`rollout_precision`={args.rollout_precision!r} cannot be combined with "
            "`use_transformers_continuous_batching=True`, which samples from the full-precision policy and returns "
            "no log-probabilities. Unset one of the two."
        )
    if args.rollout_precision == "auto" and not (args.use_vllm and args.vllm_mode == "colocate"):
        raise ValueError(
            "`rollout_precision`='auto' measures the engines of vLLM: set `use_vllm=True` and "
            "`vllm_mode='colocate'` (a server runs in the precision that it was started in), or name a precision."
        )
    if args.rollout_precision == "auto" and args.train_precision is not None and not args.holds_frozen_base:
        raise ValueError(
            f"`rollout_precision`='auto' may choose another precision than `train_precision`={args.train_precision!r}, "
            "and the sampler would no longer compute what is trained. Leave it unset to sample in that, or name one."
        )
    if args.use_vllm and args.rollout_precision not in (*in_vllm(), "auto"):
        raise ValueError(
            f"`rollout_precision`={args.rollout_precision!r} is not available with `use_vllm=True`. Allowed there: "
            f"{listed(in_vllm())}; with `use_vllm=False` it runs in the embedded engine."
        )
    behind_server = args.samples_as_trained and args.use_vllm and args.vllm_mode == "server"
    if behind_server and (settings := in_vllm()[args.rollout_precision].as_given):
        raise ValueError(
            f"`train_precision`={args.train_precision!r} with `vllm_mode='server'`: unless it was started with "
            f"{' '.join(f'{name}={value}' for name, value in settings.items())}, which cannot be seen from here, a "
            "server changes the weights that it is given. Use `vllm_mode='colocate'`, or another precision."
        )
    _check_vllm(args)


def _check_vllm(args):
    if not args.use_vllm:
        _refuse_set(args, ("vllm_structured_outputs_regex",), "vLLM, and `use_vllm=False`")
        return _refuse_set(args, (*VLLM_FIELDS, "sync_check_steps"), "vLLM, and `use_vllm=False`")
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
        _refuse_set(args, VLLM_FIELDS, instead)
    if args.lora_sync == "adapter" and args.train_precision is not None and not args.samples_as_trained:
        raise ValueError(
            f"`lora_sync`='adapter' leaves vLLM the base in {args.rollout_precision!r} (`rollout_precision`), and the "
            f"adapter is trained on that in {args.train_precision!r} (`train_precision`). Use one for both, or "
            "`lora_sync='merge'`."
        )
    if args.lora_sync == "adapter" and args.vllm_enable_sleep_mode and args.vllm_sleep_level == 2:
        raise ValueError(
            "`lora_sync`='adapter' cannot be combined with `vllm_sleep_level`=2, which discards the engine's base "
            "weights: no sync brings them back. Set `vllm_sleep_level=1`, or `lora_sync='merge'`."
        )


def _check_exact(args):
    """Trainer and sampler get the same bits where both compute the same, by kernels that no batch changes."""
    needed = {
        f"`train_precision` {listed(exact_flows())}": args.train_precision in exact_flows(),
        "sampling in that (`rollout_precision` unset)": args.samples_as_trained,
        "`use_vllm=True`": args.use_vllm,
        "`vllm_mode='colocate'`": args.vllm_mode == "colocate",
        "`vllm_tensor_parallel_size=1`, whose ranks would add up in another order": args.vllm_tensor_parallel_size == 1,
        "`vllm_model_impl` 'vllm' or 'auto'": args.vllm_model_impl != "transformers",
        "`lora_sync='merge'`: an adapter beside the base is multiplied in BF16": args.lora_sync == "merge",
        "no `noise_schedule`, which makes the sampler another policy": args.noise_schedule is None,
        "computing in BF16 (`fp16=False`)": not args.fp16,
        "weights that each rank holds whole: no FSDP": args.fsdp_version is None,
        "no `torch_compile`, whose kernels are its own": not args.torch_compile,
        "no `use_liger_kernel`, the same": not args.use_liger_kernel,
        "the head in BF16, as the engine has it (`cast_lm_head_to_fp32=False`)": not args.cast_lm_head_to_fp32,
    }
    if missing := [what for what, given in needed.items() if not given]:
        raise ValueError(f"`exact_rollouts`=True needs {'; '.join(missing)}.")
    given = args.vllm_engine_kwargs or {}
    compiled, attention = (given.get(name) or {} for name in ("compilation_config", "attention_config"))
    moves = {
        "kv_cache_dtype": given.get("kv_cache_dtype", "auto") not in UNQUANTIZED,
        "enforce_eager": given.get("enforce_eager"),
        "compilation_config": not isinstance(compiled, dict) or compiled.keys() & {"mode", "cudagraph_mode"},
        "attention_config": not isinstance(attention, dict) or attention.keys() & set(EXACT_ATTENTION_FIELDS),
        "attention_backend": given.get("attention_backend"),
        "disable_cascade_attn": given.get("disable_cascade_attn") is False,
    }
    for name in (name for name, sets in moves.items() if sets):
        raise ValueError(
            f"`vllm_engine_kwargs` has {name!r}={given[name]!r}, and `exact_rollouts`=True settles cache, compilation, "
            "CUDA graphs and attention itself. Leave it out."
        )


def _refuse_set(args, names, reason: str):
    """Raises `ValueError` for fields that were set but do not act."""
    # What they are by now, if they were not set
    default = {f.name: f.default for f in fields(args)} | {"lora_sync": "merge", "vllm_sleep_level": 2}
    given = [f"`{name}`={getattr(args, name)!r}" for name in names if getattr(args, name) not in (default[name], {})]
    if given:
        raise ValueError(f"{' and '.join(given)} acts only with {reason}.")


def _check_acr(args):
    others = "`is_correction` 'tis', 'ais', 'decoupled', 'none' or 'trl'"
    if args.delta is not None:
        raise ValueError(
            f"`is_correction`='acr' widens the upper clip bound without limit, and `delta`={args.delta!r} cuts the "
            f"ratio before it. Unset `delta`, or use {others}."
        )
    if args.loss_type not in CLIPPED_LOSSES:
        raise ValueError(
            f"`is_correction`='acr' widens the upper clip bound of the policy ratio, and `loss_type`="
            f"{args.loss_type!r} has none. Use {others}, or a loss that clips: {', '.join(CLIPPED_LOSSES)}."
        )


def _check_level(args):
    takes = [name for name, kind in CORRECTIONS.items() if not getattr(kind, "token_only", False)] + ["trl"]
    if args.is_correction not in takes:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} judges the ratio of each token, but `importance_sampling_level`="
            f"{args.importance_sampling_level!r} has one ratio for a whole sequence. Use {listed(takes)}."
        )


def _check_vespo(args):
    """VESPO multiplies the weights of a sequence's tokens; TRL's own are those of tokens, whatever the level."""
    if args.loss_type == "vespo" and args.is_correction != "trl":
        raise ValueError(
            f"`loss_type`='vespo' with `importance_sampling_level`={args.importance_sampling_level!r}: VESPO "
            "multiplies the weights of a sequence's T tokens itself. Weights that are their product already would be "
            "raised to the power T: for a product of 1.9 over 64 tokens VESPO's factor phi would be 0.0 and not 0.24. "
            "Use `importance_sampling_level`='token': VESPO then forms the sequence's ratio from its tokens. Or use "
            "another `loss_type`."
        )


def _check_trl_correction(args):
    has_sampler = args.use_vllm or args.rollout_precision is not None
    if has_sampler and not args.vllm_importance_sampling_correction:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} compares the sampler with the trainer, which "
            "`vllm_importance_sampling_correction=False` switches off. Leave that at True, and use "
            "`is_correction='none'` to ignore the sampler."
        )
    default = {f.name: f.default for f in fields(args)}
    names = [f"vllm_importance_sampling_{f.name}" for f in fields(TRL)]
    changed = [name for name in names if has_sampler and getattr(args, name) != default[name]]
    if changed:
        logger.warning(
            "%s only act with `is_correction='trl'`; they are ignored with is_correction=%r.",
            " and ".join(f"`{name}`" for name in changed),
            args.is_correction,
        )
