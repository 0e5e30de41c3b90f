"""All checks of a trainer's arguments and of this machine, in their order, before a model is loaded.

The config was checked when it was built. Here it is checked against the models' configs, the data, the rewards and the
machine.
"""

import logging
from pathlib import Path

from accelerate import PartialState
from torch.nn import Module
from transformers import AutoConfig

from ..reading import reading
from ..rollout.vllm.attention import refusal_of_images
from ..storage.identity import MODEL_FILES
from ..storage.layout import check_files
from ..storage.manifest import check_read
from ..storage.named import check_named
from ..storage.source import skeleton
from .callables import check_callables, check_conversations
from .checks import check_what
from .data import (
    check_data,
    check_dynamic_sampling,
    check_reads_ahead,
    check_reward_models,
    check_rewards,
    check_texts,
    check_tokenization,
    check_turns,
    holds_images,
)
from .given import Given
from .lengths import check_lengths, context_of, datasets_of, is_stored
from .marks import check_marks
from .places import check_output_dir, models_read
from .saving import check_savable, read_generation_config
from .trained import check_untouched


logger = logging.getLogger(__name__)

FEW_PROMPTS = 8  # whose ends are looked at


def check_before_loading(
    model, args, train_dataset, eval_dataset, peft_config, reward_funcs=None, here: bool = True, **others
) -> None:
    """
    Raises `ValueError` for arguments of a trainer that do not fit together or that this machine cannot run, and
    `ImportError` for a missing library. With `here=False`, this machine's vLLM is not checked.
    """
    run = Given(args, model, {"peft_config": peft_config, **others})
    models = models_read(model, args, reward_funcs=reward_funcs, **others)
    check_output_dir(args, models)
    check_what("arguments", run)
    tools, rollout_func, environments = map(others.get, ("tools", "rollout_func", "environment_factory"))
    check_data(args, train_dataset, eval_dataset, environments)
    if args.has_rewards:
        check_reward_models(args, reward_funcs)
    if environments is None and args.has_rewards:  # otherwise rewards may come from the environments
        check_rewards(args, reward_funcs, train_dataset, eval_dataset, more_columns=rollout_func is not None)
    check_dynamic_sampling(args, tools, rollout_func, environments)
    check_reads_ahead(args, train_dataset)
    check_turns(args, tools, environments)
    check_callables(args, others, train_dataset, eval_dataset)
    if args.has_critic:
        check_texts(train_dataset, eval_dataset)
    if here:
        check_what("machine", run)
    _check_names(args, model)  # this may ask the hub
    if isinstance(model, Module):
        check_untouched(args, model)
    check_what("model", run)
    has_turns = bool(tools) or environments is not None
    if has_turns:
        check_conversations(datasets_of(train_dataset, eval_dataset))
    if args.spec.sampler is not None:
        check_tokenization(run.config, model, args, run.processing_class, train_dataset, has_turns)
    if here:
        check_what("start", run)
    if args.spec.sampler is not None and args.spec.sampler.is_vllm:
        _check_images(run, datasets_of(train_dataset, eval_dataset), here)
    for role, (name, _) in models.items():
        if Path(name).is_dir():
            check_files(name)
            check_read(name, MODEL_FILES, role)
    if not run.has_adapter:  # else only the adapter is saved
        check_savable("the policy", run.config, read_generation_config(model, args))
    served = None
    if here and args.spec.sampler is not None and args.spec.source == "server":
        served = _wait_for_server(args, getattr(model, "name_or_path", model))
    if environments is None:
        _check_prompts(run, reward_funcs, datasets_of(train_dataset, eval_dataset), served)
    if here:
        _check_attention(run)


def _check_names(args, model) -> None:
    """Raises `ValueError` for a policy, or a model that vLLM starts on, that is neither on the disk nor on the hub."""
    if isinstance(model, str):
        check_named("model", model, (args.model_init_kwargs or {}).get("revision"))
    for name in ("model", "tokenizer"):
        started_on = (args.vllm_engine_kwargs or {}).get(name)
        if started_on is not None:
            check_named(f"vllm_engine_kwargs['{name}']", started_on)


def _check_images(run: Given, datasets: dict, here: bool) -> None:
    """Raises `ValueError` for data with images that vLLM, on this machine if `here`, does not take."""
    drafts = (run.args.vllm_engine_kwargs or {}).get("speculative_config") is not None
    refused = refusal_of_images(run.config, drafts, here)
    for name, dataset in datasets.items():
        if refused is not None and holds_images(dataset):
            raise ValueError(f"`{name}` has images. {refused}")


def _check_attention(run: Given) -> None:
    """
    Builds the models without weights, with the attention that the config names. Raises `ImportError` if its library is
    missing, and `ValueError` if transformers has no attention of that name.
    """
    args = run.args
    named = {
        "model_init_kwargs": (run.model, args.model_init_kwargs),
        "teacher_model_init_kwargs": (run.teacher, getattr(args, "teacher_model_init_kwargs", None)),
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


def _wait_for_server(args, model: str) -> int | None:
    """Returns the server's context, on the process that talks to it."""
    from ..rollout.vllm.serving import wait_for_server

    return wait_for_server(args, model) if PartialState().is_main_process else None


def _check_prompts(run: Given, rewards, datasets: dict, served: int | None) -> None:
    """Measures the prompts with the tokenizer that was given, or with the one that TRL will load."""
    args, processing_class = run.args, run.processor
    if processing_class is None:
        return
    context = context_of(args, run.config, served)
    check_lengths(args, context, processing_class, datasets, run.others.get("tools"), run.others.get("rollout_func"))
    if args.has_rewards and is_stored(datasets["train_dataset"]):
        rewards = rewards if isinstance(rewards, list) else [rewards]
        prompts = datasets["train_dataset"].select_columns("prompt").with_format(None)[:FEW_PROMPTS]["prompt"]
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        check_marks(rewards, tokenizer, prompts, args.chat_template_kwargs or {})
