"""Rules of the trainer that samples while it trains: what samples beside it, and which policies it can pack."""

from ...policy.trees import why_no_tree
from ..given import Given
from .rule import Rule, acts_only


# Fields of TRL's that reach its worker, which samples from a server
OF_TRLS_WORKER = (
    *("vllm_server_base_url", "vllm_server_timeout", "request_timeout", "weight_sync_timeout"),
    *("max_tool_calling_iterations", "fork_threshold_tokens", "log_completions", "num_completions_to_print"),
)


def _embeds(run: Given) -> bool:
    """Whether the embedded engine is to sample in a thread beside the training."""
    return run.args.is_asynchronous and not run.args.use_vllm


def _samples(run: Given) -> bool:
    """Whether an engine of ours samples beside the training."""
    return run.args.is_asynchronous and run.spec.sampler is not None


def _is_spread(run: Given) -> bool:
    """Whether several processes train, or one that a library shards for several."""
    args = run.args
    return args.world_size > 1 or args.fsdp_version is not None or args.deepspeed_plugin is not None


def _injected(run: Given) -> str:
    """Names the arguments of a run that replace what samples in it."""
    given = [name for name in ("rollout_worker", "weight_transfer") if run.others.get(name) is not None]
    return " and ".join(f"`{name}`" for name in given)


def _speakers(run: Given) -> str:
    given = [name for name in ("tools", "environment_factory") if run.others.get(name)]
    return " and ".join(f"`{name}`" for name in given)


RULES = (
    Rule(
        ("rollout_precision", "use_vllm"),
        when=lambda run: _samples(run) and run.args.use_vllm,
        message="`rollout_precision`={args.rollout_precision!r} with `use_vllm=True`: a server that takes weights in "
        "this precision while it samples is not there yet for this trainer. Set `use_vllm=False`, or leave "
        "`rollout_precision` unset.",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: run.args.is_asynchronous and run.spec.training.freezes_base,
        message="`train_precision`={args.train_precision!r} freezes a base in codes, from which a copy beside the "
        "training would be quantized again. Leave it unset, or train all weights.",
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
        ("rollouts_in_flight",),
        when=lambda run: run.args.is_asynchronous and run.args.rollouts_in_flight > 1,
        message="`rollouts_in_flight`={args.rollouts_in_flight!r}: a trainer that samples while it trains has no "
        "generations to carry completions between. `max_inflight_tasks` limits the completions in flight.",
    ),
    Rule(
        ("is_correction", "use_vllm"),
        when=lambda run: run.args.is_asynchronous and run.args.use_vllm and not run.args.standardizes,
        message="`is_correction`={args.is_correction!r} needs advantages that are not standardized, and TRL's worker, "
        "which samples from the server, has no switch for it. Set `use_vllm=False`, or use another correction.",
    ),
    acts_only(
        OF_TRLS_WORKER,
        "`use_vllm=True`",
        where=lambda run: not _embeds(run),
    ),
    acts_only(
        ("reward_timeout",),
        "rewards that the trainer's process calls: `use_vllm=False` (TRL's worker calls them in another)",
        where=lambda run: not run.args.is_asynchronous or _embeds(run),
    ),
    acts_only(
        ("vllm_request_timeout",),
        "an engine of this package behind a server, and the asynchronous trainer has `request_timeout`",
        where=lambda run: not run.args.is_asynchronous,
    ),
    Rule(
        ("use_vllm",),
        when=lambda run: _embeds(run) and _is_spread(run),
        message="`use_vllm=False` on several processes, or under FSDP or DeepSpeed: the embedded engine samples in a "
        "thread of one process, which holds the whole policy. Use one process, or `use_vllm=True`.",
    ),
    Rule(
        ("use_vllm", "rollout_precision"),
        when=lambda run: _embeds(run) and run.spec.sampler is None and run.others.get("rollout_worker") is None,
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
    Rule(
        ("use_vllm",),
        when=lambda run: _embeds(run) and _speakers(run),
        message="`use_vllm=False` with {found}: the thread beside the training samples single turns. Set "
        "`use_vllm=True`, with which TRL's worker takes them.",
        needs="arguments",
    ),
    Rule(
        ("use_vllm",),
        when=lambda run: run.args.is_asynchronous and why_no_tree(run.config),
        message="The policy {found}, and samples of the asynchronous trainer share a row, in a trie of their prefixes. "
        "Train it with QuantGRPOTrainer.",
        needs="model",
    ),
)
