"""Says whether a run can compute packed rows, as far as that is known before a model is loaded."""

from transformers import PreTrainedConfig, ProcessorMixin

from ..models.families import families_with
from ..models.positions import switching


def why_not_packed(args, config: PreTrainedConfig, processing_class, whose: str = "policy") -> str | None:
    """
    Returns why a run cannot compute packed rows; `None` if it can. The text calls the model `whose`.

    Args:
        args ([`~config.fields.QuantFields`]): The run's settings.
        config ([`~transformers.PreTrainedConfig`]): The model's config.
        processing_class: The policy's tokenizer or processor.
        whose (`str`, *optional*, defaults to `"policy"`): The model in words.
    """
    config, known = config.get_text_config(), families_with("packs")
    if args.neftune_noise_alpha:
        return f"`neftune_noise_alpha`={args.neftune_noise_alpha!r} adds less noise to longer rows"
    if isinstance(processing_class, ProcessorMixin):
        return "the processor makes images"
    if config.model_type not in known:
        return f"the {whose}'s `model_type`={config.model_type!r} is not among {', '.join(known)}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"the {whose}'s attention caps logits (`attn_logit_softcapping`={config.attn_logit_softcapping})"
    if getattr(config, "attention_dropout", 0.0):
        return f"the {whose}'s attention has dropout (`attention_dropout`={config.attention_dropout})"
    found = switching(config)
    if found is not None and args.rollout_precision is None:  # with one, all rows have the sampler's positions
        return f"the {whose} has {found}, and a packed row is longer or shorter than the padded rows of its batch"
    return None
