"""The third stage of validation: a trainer's arguments and this machine, before a model is loaded.

The config was checked when it was built. Here it is checked against the model's config, data, rewards and machine.
"""

import logging
from pathlib import Path

import transformers
from accelerate import PartialState
from accelerate.utils import is_peft_model
from torch.nn import Module
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from ..models.families import FAMILIES, family_of, number_of_experts
from ..policy.masked import check_bidirectional, is_bidirectional, mask_token_of
from ..policy.vocabulary import saved_tokenizer, why_not_one_vocabulary
from ..reading import reading
from ..rollout.tokenizer import id_list
from ..rollout.vllm.support import (
    ARCHITECTURE,
    check_architecture,
    check_exact,
    check_head_size,
    differences,
)
from ..storage.identity import MODEL_FILES
from ..storage.layout import check_files
from ..storage.manifest import check_read
from ..storage.named import check_named
from ..storage.quantization import check_prepared, prepared_precisions
from ..storage.source import skeleton
from . import positions
from .adapters import check_adapter, check_head
from .callables import check_callables
from .data import (
    check_data,
    check_dynamic_sampling,
    check_rewards,
    check_tokenization,
    check_turns,
    evaluated,
    read_processing_class,
)
from .lengths import check_lengths, context_of, datasets_of, is_stored
from .machine import check_machine
from .marks import check_marks
from .places import check_output_dir, models_read
from .saving import check_savable, read_generation_config
from .teacher import check_teacher, read_teacher
from .trained import check_stored, check_trained, check_untouched


logger = logging.getLogger(__name__)

FEW_PROMPTS = 8  # whose ends are looked at


def name_of(model) -> str:
    """Returns the name that a model is or was loaded by. Raises `ValueError` for anything but a model or its name."""
    if isinstance(model, str):
        return model
    if not isinstance(model, Module) or not hasattr(model, "config"):
        given = repr(model) if len(repr(model)) < 100 else f"{type(model).__name__}(...)"
        raise ValueError(
            f"`model`={given} must be a name, a directory or a model of transformers; a directory is given as a string."
        )
    return getattr(model.config, "name_or_path", None) or ""


def check_before_loading(
    model, args, train_dataset, eval_dataset, peft_config, reward_funcs=None, here: bool = True, **others
) -> None:
    """
    Raises `ValueError` for arguments of a trainer that do not fit together or that this machine cannot run, and
    `ImportError` for a missing library. With `here=False`, this machine's vLLM is not checked.
    """
    models = models_read(model, args, reward_funcs=reward_funcs, **others)
    check_output_dir(args, models)
    tools, rollout_func, environments = map(others.get, ("tools", "rollout_func", "environment_factory"))
    _check_correction_acts(args, rollout_func)
    check_data(args, train_dataset, eval_dataset, environments)
    if environments is None and args.has_rewards:  # otherwise rewards may come from the environments
        check_rewards(args, reward_funcs, train_dataset, eval_dataset, more_columns=rollout_func is not None)
    check_dynamic_sampling(args, train_dataset, tools, rollout_func, environments)
    check_turns(args, tools, environments)
    check_head(peft_config)
    check_callables(args, others, train_dataset, eval_dataset)
    if here:
        check_machine(args)
    _check_names(args, model)  # this may ask the hub
    if args.denoises:
        _check_masked_diffusion(model, args, others)
    if args.has_critic:
        _check_critic(args, model, train_dataset, eval_dataset, others.get("processing_class"))
    if "teacher_model" in others:
        check_teacher(args, _read_config(model, args), others["teacher_model"], others.get("processing_class"))
    if isinstance(model, Module):
        check_untouched(args, model)
    if args.train_precision is not None:
        check_trained(args, model, peft_config, others["quantization_config"])
    if any(value is not None for value in (args.rollout_precision, args.noise_schedule, args.uaq_scale)):
        config = _read_config(model, args)
        if args.rollout_precision is not None:
            _check_kind(config, model)
            _check_direction(config, args)
            check_tokenization(config, model, args, others.get("processing_class"), train_dataset)
            _check_policy(config, args, others["quantization_config"], here)
            positions.check_positions(config, args)
            check_adapter(args, config, model, peft_config)
            if args.spec.training.kind == "qat":
                check_stored(config, model, args)
        if args.noise_schedule is not None or args.uaq_scale is not None:
            _check_norms(config, model, args, peft_config)
    if args.pack_sequences:
        why_not = why_not_packed(args, _read_config(model, args), others.get("processing_class"))
        if why_not is not None:
            raise ValueError(f"`pack_sequences`=True cannot act: {why_not}.")
    if args.needs_reference and peft_config is None and not name_of(model) and not is_peft_model(model):
        raise ValueError(
            f"`beta`={args.beta} needs a reference model, which TRL loads from the policy's path, but this policy was "
            "built in memory. Save it and pass the directory, or set `beta=0`."
        )
    for role, (name, _) in models.items():
        if Path(name).is_dir():
            check_files(name)
            check_read(name, MODEL_FILES, role)
    if peft_config is None and (isinstance(model, str) or not is_peft_model(model)):  # else only the adapter is saved
        check_savable("the policy", _read_config(model, args), read_generation_config(model, args))
    served = None
    if here and args.spec.sampler is not None and args.spec.source == "server":
        served = _wait_for_server(args, getattr(model, "name_or_path", model))
    if environments is None:
        datasets = datasets_of(train_dataset, eval_dataset)
        _check_prompts(args, model, others | {"reward_funcs": reward_funcs}, datasets, served)
    if here:
        _check_attention(args, model, others.get("teacher_model"))


def _check_names(args, model) -> None:
    """Raises `ValueError` for a policy, or a model that vLLM starts on, that is neither on the disk nor on the hub."""
    if isinstance(model, str):
        check_named("model", model, (args.model_init_kwargs or {}).get("revision"))
    for name in ("model", "tokenizer"):
        started_on = (args.vllm_engine_kwargs or {}).get(name)
        if started_on is not None:
            check_named(f"vllm_engine_kwargs['{name}']", started_on)


def _check_attention(args, model, teacher) -> None:
    """
    Builds the models without weights, with the attention that the config names. Raises `ImportError` if its library is
    missing, and `ValueError` if transformers has no attention of that name.
    """
    named = {
        "model_init_kwargs": (model, args.model_init_kwargs),
        "teacher_model_init_kwargs": (teacher, getattr(args, "teacher_model_init_kwargs", None)),
    }
    for field, (name, options) in named.items():
        attention = (options or {}).get("attn_implementation")
        if attention is None or not isinstance(name, str):
            continue
        given = {"revision": options.get("revision"), "trust_remote_code": args.trust_remote_code}
        try:
            with reading(name):
                config = AutoConfig.from_pretrained(name, attn_implementation=attention, **given)
            skeleton(config, args.trust_remote_code)
        except (ImportError, ValueError, OSError) as error:
            raise type(error)(
                f"`attn_implementation`={attention!r}, in `{field}`, does not work here. Install what is missing, or "
                f"use 'sdpa'. transformers says: {error}"
            ) from error


def _check_correction_acts(args, rollout_func) -> None:
    """Refuses a correction that TRL's loss would ignore, and warns of one that has nothing to correct."""
    correction = args.correction_class
    if correction.applied_by_trl or correction.ignores_sampler or args.spec.has_sampler:
        return
    if rollout_func is not None:
        raise ValueError(
            f"`is_correction`={args.is_correction!r} with a `rollout_func` needs `use_vllm=True`: without it TRL's "
            "loss takes no weights. Set `is_correction='none'`, or `use_vllm=True`."
        )
    logger.warning(
        "`is_correction`=%r does nothing in this run, whose samples come from the policy itself. Set "
        "`rollout_precision` or `use_vllm=True`.",
        args.is_correction,
    )


def vocabulary_sizes(args, model, teacher) -> tuple[int, int]:
    """Returns the rows of the student's and of the teacher's embedding, by their configs."""
    configs = _read_config(model, args), read_teacher(args, teacher)
    return tuple(config.get_text_config().vocab_size for config in configs)


def _check_masked_diffusion(model, args, others: dict) -> None:
    """Refuses causal models, several turns, and a mask token that is missing or has other uses."""
    names = [f"`{name}`" for name in ("tools", "rollout_func", "environment_factory") if others.get(name)]
    if names:
        raise ValueError(
            f"{' and '.join(names)} with a masked diffusion model, whose completions have one turn. Leave it out."
        )
    config, tokenizer = _read_config(model, args), others.get("processing_class")
    check_bidirectional(config)
    if tokenizer is not None or args.mask_token_id is not None:
        mask_token_of(args.mask_token_id, tokenizer, config, id_list(read_generation_config(model, args).eos_token_id))


def _wait_for_server(args, model: str) -> int | None:
    """Returns the server's context, on the process that talks to it."""
    from ..rollout.vllm.server import wait_for_server

    return wait_for_server(args, model) if PartialState().is_main_process else None


def _check_prompts(args, model, others: dict, datasets: dict, served: int | None) -> None:
    """Measures the prompts with the tokenizer that was given, or with the one that TRL will load."""
    processing_class = others.get("processing_class")
    if processing_class is None:
        try:
            processing_class = read_processing_class(name_of(model), args)
        except (OSError, ValueError):  # TRL says what is wrong with it
            return
    context = context_of(args, _read_config(model, args), served)
    check_lengths(args, context, processing_class, datasets, others.get("tools"), others.get("rollout_func"))
    rewards = others.get("reward_funcs")
    if args.has_rewards and is_stored(datasets["train_dataset"]):
        rewards = rewards if isinstance(rewards, list) else [rewards]
        prompts = datasets["train_dataset"].select_columns("prompt").with_format(None)[:FEW_PROMPTS]["prompt"]
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        check_marks(rewards, tokenizer, prompts, args.chat_template_kwargs or {})


def _read_config(model, args):
    """Returns the config of a policy. For a name, it is read as TRL will read it."""
    if not isinstance(model, str):
        return model.config
    given = args.model_init_kwargs or {}
    options = {name: given[name] for name in ("revision", *ARCHITECTURE) if given.get(name) is not None}
    if Path(model, "adapter_config.json").is_file() and not Path(model, "config.json").is_file():
        raise ValueError(
            f"`model`={model!r} is an adapter without its base. Load both, with "
            "`peft.AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True)`, and pass what that returns."
        )
    try:
        with reading(model):
            return AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code, **options)
    except (OSError, ValueError) as error:
        fault = "cannot be read"
        if Path(model).is_dir() and not Path(model, "config.json").is_file():
            fault = "is a directory without a config.json"
        raise ValueError(f"`model`={model!r} {fault}: {error}") from error


def _check_critic(args, model, train_dataset, eval_dataset, processing_class) -> None:
    """Refuses a critic that cannot be loaded, that has other tokens than the policy, or that cannot see the prompt."""
    for name, dataset in {"train_dataset": train_dataset, **evaluated(eval_dataset)}.items():
        images = {"image", "images"} & set(getattr(dataset, "column_names", None) or ())
        if images:
            raise ValueError(f"`{name}` has a column {images.pop()!r}, and the critic reads only text. Remove it.")
    if args.vf_share_layers:
        return
    policy = _read_config(model, args)
    name = args.value_model_name_or_path or name_of(model)
    if not name:
        raise ValueError(
            "The policy was built in memory, and the critic starts from a checkpoint: name one in "
            "`value_model_name_or_path`, or set `vf_share_layers=True`."
        )
    check_named("value_model_name_or_path", name, args.critic_source.get("revision"))
    try:
        with reading(name):
            config = AutoConfig.from_pretrained(name, **args.critic_source)
    except (OSError, ValueError) as error:
        raise ValueError(f"The critic's `value_model_name_or_path`={name!r} cannot be read: {error}") from error
    fault = None
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        fault = f"has the `model_type`={config.model_type!r}, of which transformers has no token classifier"
    elif prepared_precisions(config) is not None or getattr(config, "quantization_config", None) is not None:
        fault = "is quantized, and the critic trains all of its weights"
    elif (config.architectures or [""])[0].endswith("Classification") and config.num_labels != 1:
        fault = f"is a {config.architectures[0]} with {config.num_labels} labels, and a critic gives one value"
    elif config.vocab_size < policy.get_text_config().vocab_size:
        fault = _why_other_tokens(config, policy, args, processing_class)
    if fault is not None:
        raise ValueError(f"The critic's {name!r} {fault}. Name another model in `value_model_name_or_path`.")
    check_savable("the critic", config)


def _why_other_tokens(critic, policy, args, processing_class) -> str | None:
    """Returns why a critic with a smaller embedding lacks tokens of the policy, or `None` if it lacks only padding."""
    tokenizer = saved_tokenizer(policy, args.trust_remote_code) if processing_class is None else processing_class
    tokenizers = {
        "policy": getattr(tokenizer, "tokenizer", tokenizer),
        "critic": saved_tokenizer(critic, args.trust_remote_code),
    }
    known = {name: tokenizer for name, tokenizer in tokenizers.items() if tokenizer is not None}
    fault = why_not_one_vocabulary(critic.vocab_size, known)
    if fault is None:
        return None
    return f"has {critic.vocab_size} tokens, and the policy {policy.get_text_config().vocab_size}: {fault}"


def _check_kind(config, model) -> None:
    """Refuses a model without a head that predicts the next token."""
    if isinstance(model, str):
        model_class = getattr(transformers, (config.architectures or [""])[0], None)
    else:
        model_class = type(model.get_base_model() if is_peft_model(model) else model)
    is_known = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    if is_known and not model_class.can_generate():
        raise ValueError(
            f"The policy is a {model_class.__name__}, which generates no text. Load it with `AutoModelForCausalLM`, or "
            "train another checkpoint."
        )


def _check_direction(config, args) -> None:
    """Refuses a masked diffusion model where completions are written from left to right."""
    if is_bidirectional(config) and not args.denoises:
        raise ValueError(
            "The policy attends in both directions (`is_causal=False` in its config), so it is a masked diffusion "
            "model. Train it with `DiffusionGRPOTrainer`; examples/ais_llada.py has a command line for it."
        )


def _check_policy(config, args, quantization_config, here: bool) -> None:
    """Refuses policies that no engine can sample from."""
    quantization_config = quantization_config or (args.model_init_kwargs or {}).get("quantization_config")
    is_trainable = args.spec.training.kind == "frozen" or getattr(quantization_config, "dequantize", False)
    if prepared_precisions(config) is not None and not is_trainable:
        raise ValueError(
            f"The policy {config.name_or_path!r} is quantized already (`quantization_config` in config.json). Train "
            "the 16-bit checkpoint, or this one under LoRA with `train_precision`; vLLM may start on this one, with "
            "`vllm_engine_kwargs={'model': ...}`."
        )
    experts = number_of_experts(config.to_dict())
    if experts > 1:
        raise ValueError(
            f"`rollout_precision`={args.rollout_precision!r}, but the policy is a mixture of {experts} experts, which "
            "no engine here samples from. Leave `rollout_precision` unset: TRL generates."
        )
    if config.is_encoder_decoder:
        raise ValueError(
            f"`rollout_precision`={args.rollout_precision!r}, but {config.model_type} is an encoder with a decoder. "
            "The engines run only decoders: train a decoder-only model."
        )
    if here and args.use_vllm and args.vllm_mode == "colocate":
        _check_start(config, args)


def _check_start(config, args) -> None:
    """Refuses policies that vLLM cannot run here, and a checkpoint to start vLLM on that holds another model."""
    check_head_size(config)
    if args.exact_rollouts:
        check_exact(config)
    given = (args.vllm_engine_kwargs or {}).get("model")
    start = config.name_or_path if given is None else given
    instead = (
        "Save the model, without adapters, and its tokenizer, and name the directory in "
        "`vllm_engine_kwargs={'model': ...}`, or sample with `use_vllm=False`"
    )
    if not start:
        raise ValueError(f"The policy was built in memory, and vLLM starts from a directory. {instead}.")
    try:
        revision = getattr(config, "_commit_hash", None) if given is None else None
        with reading(start):
            engine = AutoConfig.from_pretrained(start, revision=revision, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError, TypeError) as error:
        if given is None:
            raise ValueError(
                f"The policy was loaded from {start!r}, where vLLM finds no config: {error}. {instead}."
            ) from error
        raise ValueError(f"`vllm_engine_kwargs` has 'model'={start!r}, which cannot be read: {error}") from error
    differing_fields = differences(config, engine)
    if differing_fields and given is None:
        raise ValueError(f"The policy differs from {start!r}, on which vLLM starts, in {differing_fields}. {instead}.")
    if differing_fields:
        raise ValueError(
            f"`vllm_engine_kwargs` has 'model'={start!r}, another model than the policy: {differing_fields}. "
            "Name a checkpoint of the policy."
        )
    check_architecture(engine, args.vllm_model_impl)
    check_prepared(engine, args.rollout_precision)


def why_not_packed(args, config, processing_class, whose: str = "policy") -> str | None:
    """
    Returns why a run cannot compute packed rows, as far as that is known before a model is loaded, or `None`. The text
    calls the model `whose`.
    """
    config = config.get_text_config()
    if args.neftune_noise_alpha:
        return f"`neftune_noise_alpha`={args.neftune_noise_alpha!r} adds less noise to longer rows"
    if isinstance(processing_class, ProcessorMixin):
        return "the processor makes images"
    if config.model_type not in FAMILIES:
        return f"the {whose}'s `model_type`={config.model_type!r} is not among {', '.join(FAMILIES)}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"the {whose}'s attention caps logits (`attn_logit_softcapping`={config.attn_logit_softcapping})"
    if getattr(config, "attention_dropout", 0.0):
        return f"the {whose}'s attention has dropout (`attention_dropout`={config.attention_dropout})"
    return positions.why_not_packed(args, config, whose)


def _check_norms(config, model, args, peft_config) -> None:
    """Refuses noise and scaling for models whose norms are unknown, and a second scaling by another factor."""
    family_of(config.get_text_config().model_type)
    applied = getattr(config, "uaq_scale", None)
    if args.uaq_scale is None:
        return
    if applied is not None and applied != args.uaq_scale:
        raise ValueError(
            f"`uaq_scale`={args.uaq_scale}, but the model was already scaled by {applied}. Use that factor."
        )
    if applied is None and (peft_config is not None or (not isinstance(model, str) and is_peft_model(model))):
        raise ValueError(
            f"`uaq_scale`={args.uaq_scale} scales the base model, which a saved adapter does not contain. Scale "
            "the base once with `trl_quant.scaling.apply_uaq`, save it, and train the adapter on that."
        )
