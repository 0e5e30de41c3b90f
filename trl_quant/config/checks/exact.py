"""Rules of exact rollouts: trainer and sampler must run one computation, whose results do not depend on the batch."""

from ...precisions import exact_flows
from ...rollout.verify.kv_cache import UNQUANTIZED
from ...rollout.vllm.attention import check_exact
from ..given import Given
from ..values import listed
from .rule import Rule, refusal


EXACT_ATTENTION = ("backend", "flash_attn_max_num_splits_for_cuda_graph")  # options that `exact_rollouts` sets


def _missing(run: Given) -> str:
    """Lists the conditions that a run does not meet."""
    args = run.args
    needed = {
        f"`train_precision` {listed(exact_flows())}": args.train_precision in exact_flows(),
        "sampling in the `train_precision` (`rollout_precision` unset)": run.spec.samples_as_trained,
        "`use_vllm=True`": args.use_vllm,
        "`vllm_mode='colocate'`": args.vllm_mode == "colocate",
        "`vllm_tensor_parallel_size=1`, since ranks add up in another order": args.vllm_tensor_parallel_size == 1,
        "`vllm_model_impl` 'vllm' or 'auto'": args.vllm_model_impl != "transformers",
        "`lora_sync='merge'`, since an adapter beside the base is multiplied in BF16": args.lora_sync == "merge",
        "no `noise_schedule`, which makes the sampler another policy": args.noise_schedule is None,
        "computing in BF16 (`fp16=False`)": not args.fp16,
        "weights that each rank holds whole (no FSDP)": args.fsdp_version is None,
        "no 'speculative_config' in `vllm_engine_kwargs`, whose tokens are scored several at a time": (
            "speculative_config" not in (args.vllm_engine_kwargs or {})
        ),
        "no `torch_compile`, which has kernels of its own": not args.torch_compile,
        "no `use_liger_kernel`, which has kernels of its own": not args.use_liger_kernel,
        # Only GRPO's config has this field
        "the head in BF16, as the engine has it (`cast_lm_head_to_fp32=False`)": not getattr(
            args, "cast_lm_head_to_fp32", False
        ),
    }
    return "; ".join(condition for condition, is_met in needed.items() if not is_met)


def _overridden(run: Given) -> tuple | None:
    """Returns the first of vLLM's arguments that contradicts what exact rollouts set, and its value."""
    given = run.args.vllm_engine_kwargs or {}
    compiled, attention = (given.get(name) or {} for name in ("compilation_config", "attention_config"))
    overrides = {
        "kv_cache_dtype": given.get("kv_cache_dtype", "auto") not in UNQUANTIZED,
        "enforce_eager": given.get("enforce_eager"),
        "compilation_config": not isinstance(compiled, dict) or compiled.keys() & {"mode", "cudagraph_mode"},
        "attention_config": not isinstance(attention, dict) or attention.keys() & set(EXACT_ATTENTION),
        "attention_backend": given.get("attention_backend"),
        "disable_cascade_attn": given.get("disable_cascade_attn") is False,
    }
    return next(((name, given[name]) for name, is_set in overrides.items() if is_set), None)


RULES = (
    Rule(
        ("exact_rollouts",),
        when=lambda run: run.args.exact_rollouts and not run.args.has_rewards,
        message="`exact_rollouts`=True makes sampler and trainer agree on the drawn tokens bit for bit, but "
        "distillation compares whole distributions with a teacher's. Leave it unset.",
    ),
    Rule(
        ("exact_rollouts",),
        when=lambda run: run.args.exact_rollouts and _missing(run),
        message="`exact_rollouts`=True needs {found}.",
    ),
    Rule(
        ("exact_rollouts", "rollouts_in_flight", "is_correction"),
        when=lambda run: (
            run.args.exact_rollouts and run.args.rollouts_in_flight > 1 and run.args.correction_class.ignores_sampler
        ),
        message="`exact_rollouts`=True with `rollouts_in_flight`={args.rollouts_in_flight!r}: the sampler's bits are "
        "the trainer's only for tokens of the newest weights. Older ones need a correction: set `is_correction` to "
        "another than 'none'.",
    ),
    Rule(
        ("exact_rollouts", "vllm_engine_kwargs"),
        when=lambda run: run.args.exact_rollouts and _overridden(run),
        message="`vllm_engine_kwargs` has {found[0]!r}={found[1]!r}, and `exact_rollouts`=True sets cache, "
        "compilation, CUDA graphs and attention itself. Leave it out.",
    ),
    Rule(
        ("exact_rollouts",),
        when=lambda run: run.args.exact_rollouts and run.experts,
        message="`exact_rollouts`=True, but the policy is a mixture of {found} experts, and it was not shown that "
        "trainer and vLLM multiply those with the same bits. Leave it unset.",
        needs="model",
    ),
    Rule(
        ("exact_rollouts",),
        when=lambda run: run.args.exact_rollouts and refusal(check_exact, run.config),
        message="{found}",
        needs="start",
    ),
)
