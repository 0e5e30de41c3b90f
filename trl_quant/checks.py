"""What can be known to fail before a model is loaded."""

from accelerate.utils import is_peft_model
from transformers import AutoConfig

from .norms import family_of
from .rollout.vllm.support import check_device, check_version


def check_before_loading(model, args, train_dataset, peft_config, environment_factory) -> None:
    """Raises `ValueError` or `ImportError` for a trainer's arguments that do not fit together, or this machine."""
    columns = getattr(train_dataset, "column_names", None)
    if columns is not None and environment_factory is None and "prompt" not in columns:
        raise ValueError(f"`train_dataset` has the columns {columns}; a column 'prompt' is needed.")
    if args.use_vllm and args.rollout_precision is not None:
        check_version()
        if args.vllm_mode == "colocate":
            check_device(args.rollout_precision, args.vllm_enable_sleep_mode)
    if args.noise_schedule is not None or args.uaq_scale is not None:
        _check_norms(model, args, peft_config)


def _check_norms(model, args, peft_config) -> None:
    """The noise and the scaling must know which norms feed which layers; the scaling, that nobody scaled before."""
    config = getattr(model, "config", None)
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
    family_of(config.get_text_config().model_type)
    applied = getattr(config, "uaq_scale", None)
    if args.uaq_scale is None:
        return
    if applied is not None and applied != args.uaq_scale:
        raise ValueError(f"`uaq_scale`={args.uaq_scale}, but the model was already scaled by {applied}.")
    if applied is None and (peft_config is not None or (not isinstance(model, str) and is_peft_model(model))):
        raise ValueError(
            f"`uaq_scale`={args.uaq_scale} scales the base model, which a saved adapter does not contain. Scale "
            "the base once with `trl_quant.scaling.apply_uaq`, save it, and train the adapter on that."
        )
