"""Where samples come from: engines that hold a quantized copy of the policy.

The engines are imported when they are first asked for, because TRL's trainer imports vLLM where it is installed.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .engine import Engine
from .spec import ENGINES, EngineSpec


# name -> module
_PUBLIC = {
    "RolloutEngine": ".trl_adapter",
    "RolloutNoise": ".engine",
    "SharedEngine": ".embedded.shared_base",
    "TransformersEngine": ".embedded.transformers_engine",
    "VLLMBase": ".vllm.base",
    "VLLMEngine": ".vllm.engine",
    "VLLMServerEngine": ".vllm.server",
    "fastest_engine": ".vllm.auto",
}

__all__ = ["ENGINES", "EngineSpec", *_PUBLIC, "build_engine", "engine_of"]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)


def build_engine(spec: EngineSpec, model, accelerator, processing_class, **settings):
    """
    Builds the engine that `spec` describes, and measures its precision first where that is `"auto"`.

    Args:
        spec ([`EngineSpec`]): The engine.
        model (`nn.Module`): The policy.
        accelerator ([`~accelerate.Accelerator`]): The trainer's.
        processing_class: The tokenizer or processor.
        settings: What TRL gives to its own engine: lengths, sampling options and the like.

    Returns:
        [`RolloutEngine`]: the engine.
    """
    options = settings | spec.options()
    if spec.precision == "auto":
        del options["precision"]
        return __getattr__("fastest_engine")(model, accelerator, processing_class, **options)
    return __getattr__(ENGINES[spec.kind])(model, accelerator, processing_class, **options)


@contextmanager
def engine_of(
    trainer_class: type,
    args,
    loaded: Callable[[], None],
    built: Callable[[object], None],
    build: Callable[..., Engine] = build_engine,
    **fields,
) -> Iterator[None]:
    """
    Context in which TRL's constructor of a trainer builds the engine that `args` mean. Without a `rollout_precision` it
    builds TRL's own.

    TRL builds its engine when the models are loaded and before it shards the reference model. At this point `loaded` is
    called, then `build`, then `built` with the engine.

    While TRL's constructor runs it finds other values of some `fields` in `args`; afterwards `args` holds its own
    again. Only `rollout_precision="auto"` gives way to the precision that was chosen.

    Args:
        trainer_class (`type`): The trainer's class.
        args ([`QuantGRPOConfig`]): The run's configuration.
        loaded (`Callable`): Called before the engine is built.
        built (`Callable`): Called with the engine as TRL gets it, a [`RolloutEngine`].
        build (`Callable`, *optional*, defaults to [`build_engine`]): Takes what [`build_engine`] takes.
        fields: Fields of `args`, with the values that TRL's constructor must find.
    """
    from ..trl_seams import trainer_builds
    from .trl_adapter import adapted

    spec = EngineSpec.from_config(args)
    engines = []

    def build_for_trl(**given):
        loaded()
        engine = adapted(build(spec, **given), spec, **given)
        built(engine)
        engines.append(engine)
        return engine

    if spec is not None:
        fields |= spec.fields_for_trl()
    with trainer_builds(trainer_class, None if spec is None else build_for_trl, args, **fields):
        yield
    if engines and args.rollout_precision == "auto":
        args.rollout_precision = engines[0].precision
