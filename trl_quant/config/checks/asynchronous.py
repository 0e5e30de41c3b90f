"""Rules of the trainer that samples while it trains: what samples beside it, and which policies it can pack."""

from ...policy.trees import why_no_tree
from ..given import Given
from .rule import Rule, acts_only


OF_THE_SERVER = ("vllm_server_base_url", "vllm_server_timeout")
# Fields of TRL's that reach its worker and its weight transfer
OF_TRLS_WORKER = ("request_timeout", "weight_sync_timeout", "log_completions", "num_completions_to_print")
OF_TURNS = ("max_tool_calling_iterations", "fork_threshold_tokens")
LOADED_BY_TRL = ("attn_implementation", "device_map")  # arguments of `from_pretrained`


def _samples(run: Given) -> bool:
    """Whether an engine of ours samples beside the training."""
    return run.args.is_asynchronous and run.spec.sampler is not None


def _own_proximal(run: Given) -> str | None:
    """Names the proximal policy of a correction that fixes it."""
    kind = run.args.correction_class
    if kind.applied_by_trl or kind.clips_sampler:
        return "the sampler, as in TRL's loss"
    return "the trained one at each update" if kind.every_update else None


def _clips(run: Given) -> bool:
    """Whether the ratio that TRL's loss clips can differ from 1."""
    kind = run.args.correction_class
    return kind.applied_by_trl or kind.clips_sampler or run.args.proximal_pass


def _injected(run: Given) -> str:
    """Names the arguments of a run that replace what samples in it."""
    given = [name for name in ("rollout_worker", "weight_transfer") if run.others.get(name) is not None]
    return " and ".join(f"`{name}`" for name in given)


def _has_turns(run: Given) -> bool:
    """Whether others speak in a completion too."""
    return any(run.others.get(name) for name in ("tools", "environment_factory"))


def _redrawn_dropout(run: Given) -> str:
    """Names the dropout that a recomputation would draw anew, while a thread draws from the same random numbers."""
    if not _samples(run) or run.args.use_vllm or not run.args.gradient_checkpointing:
        return ""
    fields = [vars(config) for config in (run.config.get_text_config(), run.peft_config) if config is not None]
    given = {name: value for found in fields for name, value in found.items() if name.endswith("dropout") and value}
    return " and ".join(f"`{name}`={value!r}" for name, value in given.items())


def _loaded_otherwise(run: Given) -> str:
    """Names the `model_init_kwargs` that TRL's trainer sets itself."""
    given = run.args.model_init_kwargs or {}
    return " and ".join(f"`{name}`={given[name]!r}" for name in LOADED_BY_TRL if given.get(name) is not None)


RULES = (
    Rule(
        ("eval_strategy",),
        when=lambda run: run.args.is_asynchronous and run.args.eval_strategy != "no",
        message="`eval_strategy`={args.eval_strategy.value!r}: TRL's asynchronous trainer does not evaluate. Leave it "
        "unset, and evaluate checkpoints with `trl-quant eval`.",
    ),
    Rule(
        ("model_init_kwargs",),
        when=lambda run: run.args.is_asynchronous and _loaded_otherwise(run),
        message="{found}: TRL's asynchronous trainer loads the policy with an attention of its own, and leaves its "
        "place to accelerate. Leave it out.",
        needs="arguments",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: (
            run.args.is_asynchronous
            and run.spec.training.freezes_base
            and run.spec.samples_as_trained
            and run.spec.source == "server"
        ),
        message="`train_precision`={args.train_precision!r} freezes a base in codes, and a server takes merged "
        "weights: each sync would round the sum of base and adapter to codes again, which erases small changes. Set "
        "`use_vllm=False`, or another `rollout_precision`.",
        needs="arguments",
    ),
    Rule(
        ("pack_sequences",),
        when=lambda run: run.args.is_asynchronous and run.args.pack_sequences,
        message="`pack_sequences`=True: TRL's asynchronous trainer packs its samples by itself, in a trie of what they "
        "share. Leave it unset.",
    ),
    Rule(
        ("router_replay",),
        when=lambda run: run.args.is_asynchronous and run.args.router_replay,
        message="`router_replay`=True: samples of the asynchronous trainer do not carry their routing yet. Leave it "
        "unset.",
    ),
    Rule(
        ("exact_rollouts",),
        when=lambda run: run.args.is_asynchronous and run.args.exact_rollouts,
        message="`exact_rollouts`=True: a sampler beside the training holds older weights than the policy, so its bits "
        "are not the policy's. Leave it unset, or use QuantGRPOTrainer.",
    ),
    Rule(
        ("num_generations",),
        when=lambda run: run.args.is_asynchronous and run.args.num_generations < 2,
        message="`num_generations`={args.num_generations!r}: an advantage compares the completions of a prompt, and "
        "that of a single one is 0. Set at least 2.",
    ),
    Rule(
        ("rollouts_in_flight",),
        when=lambda run: run.args.is_asynchronous and run.args.rollouts_in_flight > 1,
        message="`rollouts_in_flight`={args.rollouts_in_flight!r}: a trainer that samples while it trains has no "
        "generations to carry completions between. `max_inflight_tasks` limits the completions in flight.",
    ),
    Rule(
        ("is_correction", "use_vllm"),
        when=lambda run: run.args.is_asynchronous and run.spec.sampler is None and not run.args.standardizes,
        message="`is_correction`={args.is_correction!r} needs advantages that are not standardized, and TRL's worker "
        "has no switch for it. Set a `rollout_precision`, or use another correction.",
    ),
    Rule(
        ("proximal_pass",),
        when=lambda run: run.args.proximal_pass and run.args.weight_sync_steps == 1,
        message="`proximal_pass`=True changes nothing with `weight_sync_steps`=1: one update follows each sync, and it "
        "starts from the policy that would score its samples, so R is 1 anyway. Set `weight_sync_steps` above 1, or "
        "leave `proximal_pass` unset.",
    ),
    Rule(
        ("proximal_pass", "is_correction"),
        when=lambda run: run.args.proximal_pass and _own_proximal(run),
        message="`proximal_pass`=True with `is_correction`={args.is_correction!r}, whose proximal policy is {found}. "
        "Leave `proximal_pass` unset, or use another correction.",
    ),
    acts_only(
        ("epsilon", "epsilon_high"),
        "`is_correction` 'trl' or 'coupled', or with `proximal_pass=True`: with `is_correction`={args.is_correction!r} "
        "alone the ratio that they bound is 1",
        where=lambda run: not run.args.is_asynchronous or _clips(run),
    ),
    Rule(
        ("vllm_mode",),
        when=lambda run: run.args.is_asynchronous and run.args.use_vllm and run.args.vllm_mode != "server",
        message="`vllm_mode`={args.vllm_mode!r}: vLLM in the trainer's process samples while nothing trains. Start a "
        "server for a trainer that samples while it trains, or set `use_vllm=False`.",
    ),
    acts_only(
        OF_THE_SERVER,
        "`use_vllm=True`",
        where=lambda run: not run.args.is_asynchronous or run.args.use_vllm,
    ),
    acts_only(
        OF_TRLS_WORKER,
        "TRL's worker, and a `rollout_precision` samples without it",
        where=lambda run: not _samples(run),
    ),
    acts_only(
        ("reward_timeout",),
        "rewards that the trainer's process calls, as with a `rollout_precision`; TRL's worker calls them in another",
        where=lambda run: not run.args.is_asynchronous or _samples(run),
    ),
    acts_only(
        ("vllm_request_timeout", "vllm_group_port"),
        "a server that samples in a `rollout_precision`",
        where=lambda run: not run.args.is_asynchronous or (_samples(run) and run.args.use_vllm),
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _samples(run) and run.args.deepspeed_plugin is not None,
        message="`rollout_precision`={args.rollout_precision!r} under DeepSpeed: TRL's asynchronous trainer reads the "
        "head's weight itself, which ZeRO-3 splits between ranks, and ZeRO-2 was not tried. Use DDP or FSDP2, or "
        "leave `rollout_precision` unset.",
    ),
    Rule(
        ("use_vllm", "rollout_precision"),
        when=lambda run: (
            run.args.is_asynchronous
            and not run.args.use_vllm
            and run.spec.sampler is None
            and run.others.get("rollout_worker") is None
        ),
        message="`use_vllm=False` without a `rollout_precision`: nothing samples. Set `rollout_precision='bf16'` for a "
        "copy without quantization, or pass a `rollout_worker`.",
        needs="arguments",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _samples(run) and _injected(run),
        message="`rollout_precision`={args.rollout_precision!r} with {found}, which samples instead of the engine. "
        "Leave one of the two out.",
        needs="arguments",
    ),
    acts_only(
        OF_TURNS,
        "`tools` or an `environment_factory`",
        where=lambda run: not _samples(run) or _has_turns(run),
        needs="arguments",
    ),
    Rule(
        ("use_vllm",),
        when=lambda run: run.args.is_asynchronous and why_no_tree(run.config),
        message="The policy {found}, and samples of the asynchronous trainer share a row, in a trie of their prefixes. "
        "Train it with QuantGRPOTrainer.",
        needs="model",
    ),
    Rule(
        ("use_vllm", "gradient_checkpointing"),
        when=lambda run: run.args.is_asynchronous and _redrawn_dropout(run),
        message="{found} with `gradient_checkpointing`=True: the thread that samples shares torch's random numbers "
        "with the training, so the backward pass would drop other values than the forward pass. Set the dropout to 0, "
        "or `gradient_checkpointing=False`.",
        needs="model",
    ),
)
