"""Says whether a run renormalises the policy over the tokens that truncation left its sampler."""

from collections.abc import Mapping
from types import MappingProxyType

from ..rollout.sampling_options import biasing_options, truncating


def truncating_options(args) -> dict[str, object]:
    """Returns the options of a run by which its sampler leaves out unlikely tokens, with their values."""
    return truncating(biasing_options(args))


def why_not_replayed(args, others: Mapping = MappingProxyType({})) -> str | None:
    """
    Returns why a run cannot renormalise the policy over what truncation left; `None` if it can.

    Args:
        args ([`~config.fields.QuantFields`]): The run's settings.
        others (`Mapping`, *optional*): The trainer's other arguments.
    """
    source = args.spec.source
    plugin = args.deepspeed_plugin
    reasons = {
        "`rollout_precision` is not set, so no engine of this package samples": args.spec.sampler is None,
        "TRL's client takes no such tokens from a server": source == "server",
        "samples of the asynchronous trainer do not carry such tokens": args.is_asynchronous,
        "a masked diffusion model scores tokens by one-step estimates": args.denoises,
        "distillation compares whole distributions": not args.has_rewards,
        "`use_liger_kernel`=True computes the loss without the head's scores": args.use_liger_kernel,
        "`exact_rollouts`=True scores with the engine's own head": args.exact_rollouts,
        "the head was not tried in a compiled model (`torch_compile=True`)": args.torch_compile,
        "ZeRO-3 shards the head": plugin is not None and plugin.zero_stage == 3,
        "it is not known which tokens of a `rollout_func` the engine has sampled": others.get("rollout_func"),
        **{
            f"vLLM does not return such tokens beside {name!r}": (args.vllm_engine_kwargs or {}).get(name)
            for name in ("speculative_config", "logits_processors")
        },
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def replays(args) -> bool:
    """
    Whether a run renormalises the policy over what truncation left, as far as its settings say. vLLM must be asked for
    it by `truncation_replay=True`, since it then takes no request without truncation and no greedy one.
    """
    is_asked = args.truncation_replay or (args.truncation_replay is None and args.spec.source != "colocate")
    return bool(is_asked and truncating_options(args)) and why_not_replayed(args) is None
