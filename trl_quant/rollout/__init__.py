"""Where samples come from: engines that hold a quantized copy of the policy, behind TRL's generation interface.

The engines are loaded when they are asked for: TRL's trainer loads vLLM where it is installed.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial


# name -> module
_PUBLIC = {
    "RolloutEngine": ".trl_adapter",
    "RolloutNoise": ".trl_adapter",
    "SharedEngine": ".embedded.shared_base",
    "TransformersEngine": ".embedded.transformers_engine",
    "VLLMBase": ".vllm.base",
    "VLLMEngine": ".vllm.engine",
    "VLLMServerEngine": ".vllm.server",
    "fastest_engine": ".vllm.auto",
}
ENGINES = {
    "embedded": "TransformersEngine",
    "shared": "SharedEngine",
    "colocate": "VLLMEngine",
    "server": "VLLMServerEngine",
}
VLLM_MODES = ("colocate", "server")

__all__ = ["ENGINES", *_PUBLIC, "engine_of"]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)


def engine_of(args, loaded: Callable[[], None], built: Callable[[object], None], **fields) -> AbstractContextManager:
    """
    Context in which TRL's `GRPOTrainer.__init__` builds the engine that `args` ask for, between calls of `loaded`, when
    the trainer's models are, and `built`, with the engine. Without a `rollout_precision` it builds TRL's own. There
    `fields` of `args` have other values; on exit `args` and TRL are as they were.
    """
    from ..trl_seams import trainer_builds

    engine = None
    if args.rollout_precision is not None:
        name = args.vllm_mode if args.use_vllm else "embedded"
        if name == "embedded" and args.samples_as_trained and args.fsdp_version is None:
            name = "shared"
        options = {
            "wide_norms": args.noise_schedule is not None,
            "uaq_scale": args.uaq_scale or 1.0,
        }
        if args.use_vllm:
            options["sync_check_steps"] = args.sync_check_steps
        else:
            fields |= {"use_vllm": True, "vllm_mode": "embedded"}
        if name == "server":
            options["request_timeout"] = args.vllm_request_timeout
        if name == "colocate":
            options |= {
                "engine_kwargs": args.vllm_engine_kwargs,
                "lora_sync": args.lora_sync,
                "sleep_level": args.vllm_sleep_level,
                "exact": args.exact_rollouts,
            }
        if args.rollout_precision == "auto":
            engine = partial(__getattr__("fastest_engine"), args, **options)
        else:
            engine = partial(__getattr__(ENGINES[name]), precision=args.rollout_precision, **options)
        engine = partial(_between, loaded, built, engine)
    if args.is_correction != "trl" and args.loss_type == "vespo":
        # TRL's ratio is replaced by ours; VESPO insists on one with a value for each token, which ours has.
        fields["vllm_importance_sampling_mode"] = "token_truncate"
    return trainer_builds(engine, args, **fields)


def _between(loaded: Callable[[], None], built: Callable[[object], None], kind: Callable, *args, **kwargs):
    loaded()
    built(engine := kind(*args, **kwargs))
    return engine
