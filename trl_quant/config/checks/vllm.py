"""Rules of vLLM: its fields, its arguments, its sampling parameters, and the policies that it can run."""

from types import SimpleNamespace

from transformers import AutoConfig

from ...models.architecture import differences
from ...models.families import wider_window
from ...models.positions import LONGROPE, switching, why_vllm_differs
from ...precisions import in_vllm
from ...reading import reading
from ...rollout.sampling_options import biasing_options, not_taken
from ...rollout.verify.kv_cache import CACHE_FORMATS, UNQUANTIZED
from ...rollout.vllm.attention import check_cpu_kernels
from ...rollout.vllm.support import (
    RESERVED,
    SET_BY_TRL,
    check_architecture,
    check_experts_here,
    engine_arguments,
    refused_by_vllm,
    sampling_parameters,
)
from ...run_spec import DISCARDS
from ...storage.quantization import check_prepared
from ..given import Given
from .rule import Rule, acts_only, check_rules, refusal
from .sampler import given_options


MODEL_IMPLS = ("vllm", "transformers", "auto")
COLOCATED_FIELDS = ("vllm_engine_kwargs", "vllm_sleep_level", "lora_sync")  # they act only on a colocated engine
OF_ENGINES = (*COLOCATED_FIELDS, "sync_check_steps")
DRAFT_WITHOUT_MODEL = ("ngram", "[ngram]", "ngram_gpu", "suffix")  # vLLM's methods that load no weights to draft
BESIDE_DRAFTS = ("temperature", "top_p", "top_k")  # options that the check of speculative decoding computes
OF_EXPERTS = {  # arguments that change how experts are held or computed, with the values that may be given
    "enable_eplb": (False,),
    "enable_return_routed_experts": (False,),
    "moe_backend": ("auto", "triton", "cutlass"),  # the start is refused if the kernel does not fit the precision
    "kernel_config": (None,),
}
SAVE = (  # what to do about a policy on which vLLM cannot start
    "Save the model, without adapters, and its tokenizer, and name the directory in "
    "`vllm_engine_kwargs={{'model': ...}}`, or sample with `use_vllm=False`"
)


def _samples(run: Given) -> bool:
    """Whether an engine of ours samples in vLLM."""
    return run.spec.sampler is not None and run.spec.sampler.is_vllm


def _samples_here(run: Given) -> bool:
    """Whether an engine of ours samples in vLLM in the trainer's process."""
    return run.spec.sampler is not None and run.spec.source == "colocate"


def _arguments(run: Given) -> dict:
    return run.args.vllm_engine_kwargs or {}


def _drafting(run: Given) -> dict:
    """Returns vLLM's arguments of speculative decoding; empty without it."""
    given = _arguments(run).get("speculative_config")
    return given if isinstance(given, dict) else {}


def _beside_drafts(run: Given) -> str:
    """Lists the sampling options of a run that may not stand beside speculative decoding."""
    options = biasing_options(run.args) if _samples_here(run) and _drafting(run) else {}
    return " and ".join(f"`{name}`={value!r}" for name, value in options.items() if name not in BESIDE_DRAFTS)


def _drafter(run: Given) -> str | None:
    """Returns the method, or else the name, of a model that vLLM loads to draft; `None` if there is none."""
    drafting = _drafting(run)
    found = drafting.get("method") or drafting.get("model")
    return None if found in DRAFT_WITHOUT_MODEL else found


def _reserved_arguments(run: Given) -> str:
    return ", ".join(f"{name!r} (set by {RESERVED[name]})" for name in _arguments(run) if name in RESERVED)


def _unknown_arguments(run: Given) -> tuple[list[str], str] | None:
    """Returns the arguments that vLLM does not take, and those that it takes; `None` if vLLM is not installed."""
    known = engine_arguments() if _arguments(run) else set()  # to know them, vLLM is loaded
    unknown = [name for name in _arguments(run) if known and name not in known]
    return (unknown, ", ".join(sorted(known - RESERVED.keys()))) if unknown else None


def _changed_weights(run: Given) -> str:
    """Lists the environment variables without which a server changes the weights that it gets."""
    if not run.spec.samples_as_trained or run.spec.source != "server":
        return ""
    return " ".join(f"{name}={value}" for name, value in in_vllm()[run.spec.sampled_in].as_given.items())


def _no_room(run: Given) -> bool:
    length, completion = run.args.vllm_max_model_length, run.args.max_completion_length
    return _samples(run) and length is not None and completion is not None and length <= completion


def _unknown_parameters(run: Given) -> str | None:
    given = given_options(run)
    known = sampling_parameters(run.args.vllm_mode) if given else set()
    unknown = [name for name in given if known and name not in known]
    return not_taken(f"vLLM in `vllm_mode`={run.args.vllm_mode!r}", unknown, known) if unknown else None


def _other_positions(run: Given) -> tuple[str, str] | None:
    """Returns why vLLM would compute other positions than the trainer, and what to do; `None` if it would not."""
    context = run.args.vllm_max_model_length
    found = switching(run.config)
    why = None if found is None else why_vllm_differs(run.config, context, run.args.vllm_model_impl)
    if why is None:
        return None
    cure = f"Set `vllm_max_model_length` to {found.limit} or less"
    if found.rope_type in LONGROPE and run.args.vllm_model_impl != "transformers":
        cure = "Make the two factors equal in the model's config.json"
    return why, cure


def _names_start(run: Given) -> bool:
    """Whether the run names the checkpoint on which vLLM starts here, instead of the policy's own."""
    return _samples_here(run) and _arguments(run).get("model") is not None


def _starts_on_policy(run: Given) -> bool:
    return _samples_here(run) and not _names_start(run)


def _read_start(run: Given):
    """Reads the config that vLLM will find."""
    named = _arguments(run).get("model")
    start = run.config.name_or_path if named is None else named
    revision = getattr(run.config, "_commit_hash", None) if named is None else None
    with reading(start):
        return AutoConfig.from_pretrained(start, revision=revision, trust_remote_code=run.args.trust_remote_code)


def _reads_more(run: Given) -> tuple[str, str] | None:
    """Returns the classes of a policy of text alone and of the model with images that vLLM would start."""
    start, policy = _read_start(run), run.model_class
    kinds = start.architectures or []
    if start.get_text_config() is start or policy is None or not kinds or policy.__name__ in kinds:
        return None
    return policy.__name__, kinds[0]


def _samples_experts(run: Given) -> bool:
    """Whether an engine of ours samples in vLLM from a mixture of experts."""
    return _samples(run) and bool(run.experts)


def _of_experts(run: Given) -> str:
    """Lists arguments of experts with values that no test has shown."""
    given = _arguments(run).items()
    return ", ".join(f"{name!r}={value!r}" for name, value in given if value not in OF_EXPERTS.get(name, (value,)))


def _unreadable_start(run: Given) -> str | None:
    return refusal(_read_start, run, error=(OSError, ValueError, TypeError))


ARGUMENTS = (
    Rule(
        ("vllm_engine_kwargs",),
        when=_reserved_arguments,
        message="`vllm_engine_kwargs` must not hold {found}.",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _arguments(run).get("calculate_kv_scales"),
        message="`vllm_engine_kwargs` has 'calculate_kv_scales'=True: vLLM would take the scales of its KV cache from "
        "its first batch and keep them, so they would be stale after the first sync. Leave it out: the scales are then "
        "1, or those of the checkpoint.",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _drafting(run).get("rejection_sample_method") == "synthetic",
        message="`vllm_engine_kwargs` has 'speculative_config' with 'rejection_sample_method'='synthetic', with which "
        "vLLM accepts drafted tokens whatever the policy says. Leave it out.",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _arguments(run).get("kv_cache_dtype", "auto") not in (*UNQUANTIZED, *CACHE_FORMATS),
        message="`vllm_engine_kwargs` has 'kv_cache_dtype'={args.vllm_engine_kwargs[kv_cache_dtype]!r}, which the "
        f"self-check cannot compute. Allowed are {', '.join(map(repr, (*UNQUANTIZED, *CACHE_FORMATS)))}.",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=_unknown_arguments,
        message="`vllm_engine_kwargs` has {found[0]}, which vLLM does not take. Allowed are the fields of "
        "`vllm.EngineArgs`: {found[1]}.",
    ),
)

# Fields that may not stand beside a mixture of experts in vLLM, where they have a value that no test has shown there
BESIDE_EXPERTS = {
    "vllm_model_impl": (lambda run: run.args.vllm_model_impl == "transformers", "Use 'vllm'"),
    "vllm_engine_kwargs": (lambda run: _of_experts(run), "Leave {found} out"),
}

RULES = (
    acts_only(
        OF_ENGINES,
        "a `rollout_precision`, which is not set",
        where=lambda run: run.spec.sampler is not None,
    ),
    Rule(
        ("train_precision", "vllm_mode"),
        when=_changed_weights,
        message="`train_precision`={args.train_precision!r} with `vllm_mode='server'`: a server changes the weights "
        "that it is given unless it was started with {found}, which cannot be seen from here. Use "
        "`vllm_mode='colocate'`, or another precision.",
    ),
    *(
        acts_only(
            names,
            "vLLM, and `use_vllm=False`",
            where=lambda run: run.spec.sampler is None or run.args.use_vllm,
        )
        for names in (OF_ENGINES, ("vllm_structured_outputs_regex", "vllm_max_model_length"))
    ),
    acts_only(
        ("cache_implementation",),
        "transformers' `generate`, and `use_vllm=True`",
        where=lambda run: not _samples(run),
    ),
    Rule(
        ("vllm_model_impl",),
        when=lambda run: _samples(run) and run.args.vllm_model_impl not in MODEL_IMPLS,
        message="`vllm_model_impl`={args.vllm_model_impl!r} is unknown. Allowed: "
        f"{', '.join(map(repr, MODEL_IMPLS))}.",
    ),
    Rule(
        ("vllm_max_model_length", "max_completion_length"),
        when=_no_room,
        message="`vllm_max_model_length`={args.vllm_max_model_length} leaves no room for a prompt beside "
        "`max_completion_length`={args.max_completion_length}. It must be greater.",
    ),
    *ARGUMENTS,
    Rule(
        ("vllm_engine_kwargs", "generation_kwargs"),
        when=_beside_drafts,
        message="{found} with 'speculative_config' in `vllm_engine_kwargs`: vLLM ignores or refuses some sampling "
        "options where it speculates (`min_p`, `logit_bias`, `logits_processors`), and the self-check of its samples "
        f"computes only {', '.join(map(repr, BESIDE_DRAFTS))}. Leave one of the two out.",
    ),
    Rule(
        ("vllm_engine_kwargs", "vllm_sleep_level", "vllm_enable_sleep_mode"),
        when=lambda run: _samples_here(run) and run.spec.sampler.sleep_level == DISCARDS and _drafter(run),
        message="`vllm_engine_kwargs` has 'speculative_config' with {found!r}, and `vllm_sleep_level`=2 discards the "
        "weights of the model that drafts: no sync brings them back. Set `vllm_sleep_level=1`.",
    ),
    acts_only(
        COLOCATED_FIELDS,
        "`vllm_mode='colocate'`: a server takes its arguments when it is started, and merged weights",
        where=lambda run: run.spec.sampler is None or run.spec.source != "server",
    ),
    *(
        Rule(
            ("generation_kwargs", "use_vllm"),
            when=lambda run, name=name: run.args.use_vllm and name in given_options(run),
            message=f"`generation_kwargs` must not hold {name!r}: {instead}.",
        )
        for name, instead in SET_BY_TRL.items()
    ),
    Rule(
        ("generation_kwargs", "vllm_mode"),
        when=lambda run: run.spec.source == "colocate" and "seed" in given_options(run),
        message="`generation_kwargs` has 'seed'={args.generation_kwargs[seed]!r}, with which vLLM samples all "
        "completions of a prompt from the same random numbers, so that a group would be one completion. Set the run's "
        "`seed`.",
    ),
    Rule(
        ("generation_kwargs", "vllm_mode"),
        when=lambda run: run.args.use_vllm and _unknown_parameters(run),
        message="{found}",
    ),
    Rule(
        ("generation_kwargs", "max_completion_length"),
        when=lambda run: run.args.use_vllm and refused_by_vllm(given_options(run), run.args.max_completion_length),
        message="`generation_kwargs`={args.generation_kwargs!r} are refused by vLLM: {found}",
    ),
    Rule(
        ("vllm_max_model_length",),
        when=lambda run: _samples_here(run) and _other_positions(run),
        message="`vllm_max_model_length`={args.vllm_max_model_length}: {found[0]}. {found[1]}, sample with "
        "`use_vllm=False`, or leave `rollout_precision` unset.",
        needs="model",
    ),
    Rule(
        ("vllm_max_model_length",),
        when=lambda run: _samples_here(run) and wider_window(run.config, run.args.vllm_max_model_length),
        message="`vllm_max_model_length`={args.vllm_max_model_length}: some of the policy's layers see {found} tokens, "
        "and vLLM's, since 0.31 at the latest, one more. Set `vllm_max_model_length` to {found} or less, or sample "
        "with `use_vllm=False`.",
        needs="model",
    ),
    Rule(
        ("rollout_precision", "use_vllm"),
        when=lambda run: _samples_experts(run) and refusal(check_experts_here, run.spec.sampled_in),
        message="{found}",
        needs="model",
    ),
    Rule(
        ("rollout_precision", "vllm_engine_kwargs"),
        when=lambda run: _samples_experts(run) and _arguments(run).get("enable_expert_parallel"),
        message="`vllm_engine_kwargs` has 'enable_expert_parallel'=True, with which each rank holds some of the "
        "experts. On a CPU vLLM 0.31 looks for all of them on each rank and crashes; on a GPU this was not shown. "
        "Leave it out: with `vllm_tensor_parallel_size` each rank holds a part of each expert.",
        needs="model",
    ),
    *(
        Rule(
            ("rollout_precision", name),
            when=lambda run, is_set=is_set: _samples_experts(run) and is_set(run),
            message=f"`{name}`={{args.{name}!r}} was not shown yet where vLLM samples from a mixture of experts. "
            f"{instead}, or set `use_vllm=False`.",
            needs="model",
        )
        for name, (is_set, instead) in BESIDE_EXPERTS.items()
    ),
    Rule(
        ("use_vllm",),
        when=lambda run: _samples_here(run) and refusal(check_cpu_kernels, run.config),
        message="{found}",
        needs="start",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _starts_on_policy(run) and not run.config.name_or_path,
        message=f"The policy was built in memory, and vLLM starts from a directory. {SAVE}.",
        needs="start",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _starts_on_policy(run) and _unreadable_start(run),
        message="The policy was loaded from {run.config.name_or_path!r}, where vLLM finds no config: {found}. "
        f"{SAVE}.",
        needs="start",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _names_start(run) and _unreadable_start(run),
        message="`vllm_engine_kwargs` has 'model'={args.vllm_engine_kwargs[model]!r}, which cannot be read: {found}",
        needs="start",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _starts_on_policy(run) and differences(run.config, _read_start(run)),
        message="The policy differs from {run.config.name_or_path!r}, on which vLLM starts, in {found}. " + SAVE + ".",
        needs="start",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _starts_on_policy(run) and _reads_more(run),
        message="The policy is a {found[0]}, and vLLM would start a {found[1]} from {run.config.name_or_path!r}, whose "
        "weights have other names. " + SAVE + ".",
        needs="start",
    ),
    Rule(
        ("vllm_engine_kwargs",),
        when=lambda run: _names_start(run) and differences(run.config, _read_start(run)),
        message="`vllm_engine_kwargs` has 'model'={args.vllm_engine_kwargs[model]!r}, another model than the policy: "
        "{found}. Name a checkpoint of the policy.",
        needs="start",
    ),
    Rule(
        ("vllm_model_impl",),
        when=lambda run: _samples_here(run) and refusal(check_architecture, _read_start(run), run.args.vllm_model_impl),
        message="{found}",
        needs="start",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _samples_here(run) and refusal(check_prepared, _read_start(run), run.spec.sampled_in),
        message="{found}",
        needs="start",
    ),
)


def check_engine_kwargs(kwargs: dict) -> None:
    """Raises `ValueError` for arguments that vLLM lacks, that are set elsewhere, or that break the self-check."""
    check_rules(ARGUMENTS, Given(SimpleNamespace(vllm_engine_kwargs=kwargs)))
