"""What TRL gets from an engine that a test has built without a trainer."""

from dataclasses import replace

from trl_quant.rollout.trl_face import QuantGeneration


def generated(engine, prompts, images=None, copies=1) -> tuple:
    """One turn: the token ids of prompts and completions, log-probabilities and their tokens."""
    given = engine.model, engine.accelerator, engine.processing_class
    return QuantGeneration(engine, *given, **vars(engine.settings)).generate(prompts, images, copies)


def set_options(engine, **generation_kwargs) -> None:
    """Gives an engine other `generation_kwargs`."""
    engine.settings = replace(engine.settings, generation_kwargs=generation_kwargs)
