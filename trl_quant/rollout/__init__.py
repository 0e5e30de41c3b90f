"""Where samples come from: engines that hold a quantized copy of the policy, behind TRL's generation interface.

The only room that touches vLLM, and the only place where something of TRL's is exchanged: `engine_of` swaps the class
that `GRPOTrainer.__init__` builds its engine from, for the duration of that call.
"""

from contextlib import contextmanager
from functools import partial

import trl.trainer.grpo_trainer as grpo_trainer

from .auto import choose_precision
from .base import RolloutEngine, RolloutNoise
from .transformers_engine import TransformersEngine
from .vllm_base import VLLMBase
from .vllm_engine import VLLMEngine
from .vllm_server import VLLMServerEngine


ENGINES = {"embedded": TransformersEngine, "vllm": VLLMEngine, "vllm_server": VLLMServerEngine}

__all__ = [
    "ENGINES",
    "RolloutEngine",
    "RolloutNoise",
    "TransformersEngine",
    "VLLMBase",
    "VLLMEngine",
    "VLLMServerEngine",
    "choose_precision",
    "engine_of",
]


@contextmanager
def engine_of(args):
    """
    Context in which TRL's `GRPOTrainer.__init__` builds the engine that `args` ask for; without a
    `rollout_precision`, TRL's own. On exit `args` and TRL are as they were.

    TRL corrects for its sampler only where `args.use_vllm` holds, so the embedded engine is built under it.
    """
    own = args.is_correction != "trl"
    saved = {name: getattr(args, name) for name in ("use_vllm", "vllm_mode", "vllm_importance_sampling_mode")}
    original = grpo_trainer.VLLMGeneration
    try:
        if args.rollout_precision is not None:
            name = "embedded"
            options = {"precision": args.rollout_precision}
            if args.use_vllm:
                name = "vllm" if args.vllm_mode == "colocate" else "vllm_server"
                options["sync_check_steps"] = args.sync_check_steps
            if name == "vllm":
                options |= {
                    "engine_kwargs": args.vllm_engine_kwargs,
                    "lora_sync": args.lora_sync,
                    "sleep_level": args.vllm_sleep_level,
                }
            grpo_trainer.VLLMGeneration = partial(ENGINES[name], **options)
            if name == "embedded":
                args.use_vllm, args.vllm_mode = True, "embedded"
        if own and args.loss_type == "vespo":
            # TRL's ratio is replaced by ours; VESPO insists on one with a value for each token, which ours has.
            args.vllm_importance_sampling_mode = "token_truncate"
        yield
    finally:
        grpo_trainer.VLLMGeneration = original
        for name, value in saved.items():
            setattr(args, name, value)
