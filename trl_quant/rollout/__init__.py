"""Engines: quantized copies of the policy that sample completions for TRL's trainers.

The class of an engine is imported on first use: it imports transformers, and with it much else.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..run_spec import ENGINES, EngineSpec
from .engine import Engine


# public name -> the module that defines it
_PUBLIC = {
    "DiffusionEngine": ".embedded.diffusion",
    "FrozenBaseEngine": ".embedded.shared_base",
    "RolloutEngine": ".base",
    "RolloutNoise": ".engine",
    "SharedDiffusionEngine": ".embedded.diffusion",
    "SharedEngine": ".embedded.shared_base",
    "TransformersEngine": ".embedded.transformers_engine",
    "VLLMBase": ".vllm.base",
    "VLLMEngine": ".vllm.engine",
    "VLLMServerEngine": ".vllm.server",
}

__all__ = ["ENGINES", "EngineSpec", *_PUBLIC, "build_engine", "engine_of"]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)


def build_engine(spec: EngineSpec, model, accelerator, processing_class, **settings):
    """
    Builds the engine that `spec` describes.

    Args:
        spec ([`EngineSpec`]): The engine.
        model (`nn.Module`): The policy.
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        processing_class: The tokenizer or processor.
        settings: The fields of [`~rollout.settings.SamplingSettings`] and of [`~rollout.settings.VLLMSettings`].

    Returns:
        [`RolloutEngine`]: The engine.
    """
    options = settings | spec.options()
    return __getattr__(ENGINES[spec.kind])(model, accelerator, processing_class, **options)


@contextmanager
def engine_of(
    trainer_class: type,
    args,
    models_loaded: Callable[[], None],
    engine_built: Callable[[object], None],
    build: Callable[..., Engine] = build_engine,
    **fields,
) -> Iterator[None]:
    """
    Context in which the constructor of TRL's trainer gets the engine that `args` describe, as a
    [`~rollout.trl_face.QuantGeneration`]. Without a `rollout_precision`, TRL builds its own.

    TRL builds its engine after it has loaded the models and before it shards the reference model. At that point this
    context calls `models_loaded`, then `build`, then `engine_built` with the built engine.

    Inside the context, `args` has the given `fields`. On exit its own values are restored.

    Args:
        trainer_class (`type`): The trainer's class.
        args ([`QuantGRPOConfig`]): The run's configuration.
        models_loaded (`Callable`): Called before the engine is built.
        engine_built (`Callable`): Called with the [`RolloutEngine`] that TRL gets.
        build (`Callable`, *optional*, defaults to [`build_engine`]):
            Builds the engine. It takes the arguments of [`build_engine`].
        fields: Fields of `args`, with the values that TRL's constructor must find.
    """
    from ..trl_seams import trainer_builds
    from .trl_face import presented

    spec = EngineSpec.from_config(args)

    def build_for_trl(**given):
        models_loaded()
        # TRL gives vLLM room for the completions of one generation
        groups = math.ceil(given["max_num_seqs"] / args.num_generations)
        if args.rollouts_in_flight > 1:
            given["max_num_seqs"] = math.ceil(args.rollouts_in_flight * groups) * args.num_generations
        given.pop("logprobs", None)  # engines return those of the drawn tokens, and no others
        generation = presented(build(spec, **given), spec, **given)
        engine_built(generation.sampler)
        return generation

    if spec is not None:
        fields |= spec.fields_for_trl()
    with trainer_builds(trainer_class, None if spec is None else build_for_trl, args, **fields):
        yield
