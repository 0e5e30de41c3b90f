"""The checks of [`before_loading`] on the lengths of prompts, against the context in which the sampler completes them.

vLLM refuses a prompt that fills its context, which ends the run at the step that draws the prompt. A prompt that leaves
less room than `max_completion_length` shortens its completions, and nothing says so. Both are found before a model is
loaded, as far as the data can be read then: rows that are made when they are read are measured as they are drawn.
"""

import logging
import time
from dataclasses import dataclass

import torch
from datasets import Dataset
from jinja2 import TemplateError
from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from ..models.positions import LONGROPE, switching
from .data import evaluated


logger = logging.getLogger(__name__)

SECONDS = 2.0  # for which the prompts of a dataset are measured
TOGETHER = 128  # prompts that are tokenized together


@dataclass(frozen=True)
class Lengths:
    """
    The lengths of a dataset's prompts.

    Attributes:
        tokens (`list[int]`): Tokens of each prompt that was measured, without those of its images.
        rows (`int`): Number of prompts of the dataset. They are measured in random order.
    """

    tokens: list[int]
    rows: int

    @property
    def longest(self) -> int:
        """Tokens of the longest of the prompts that were measured."""
        return max(self.tokens)

    @property
    def source(self) -> str:
        """Says in words which prompts were measured."""
        if len(self.tokens) == self.rows:
            return f"all {self.rows} prompts"
        return f"{len(self.tokens)} of {self.rows} prompts, drawn at random,"


def is_stored(dataset) -> bool:
    """Whether the rows of a dataset are there before they are drawn, unlike those of a stream or of a transform."""
    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def measured(
    name: str, dataset, processing_class, tools: list | None = None, template: dict | None = None
) -> Lengths | None:
    """
    Measures the prompts of a dataset for `SECONDS`, with the chat template and the tools that the trainer gives it.

    Args:
        name (`str`): The dataset's name in messages.
        dataset ([`~datasets.Dataset`]): With a column `prompt`.
        processing_class: The policy's tokenizer or processor.
        tools (`list[Callable]`, *optional*): The trainer's tools.
        template (`dict`, *optional*): The trainer's `chat_template_kwargs`.

    Returns:
        [`Lengths`] or `None`: `None` if the rows are only made when they are read, as those of a stream.

    Raises:
        `ValueError`: The chat template refuses a prompt.
    """
    if not is_stored(dataset):
        return None
    prompts = dataset.select_columns("prompt").with_format(None)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    end, tokens = time.monotonic() + SECONDS, []
    for start in range(0, len(order), TOGETHER):
        if tokens and time.monotonic() > end:
            break
        try:
            rows = prompts.select(order[start : start + TOGETHER])["prompt"][:]
            ids = _token_ids(rows, processing_class, tools, template or {})
        except TemplateError as error:
            raise ValueError(f"`{name}`: the chat template refuses a prompt: {error}") from error
        tokens += map(len, ids)
    return Lengths(tokens, len(prompts))


def _token_ids(prompts: list, processing_class, tools, template: dict) -> list[list[int]]:
    """Tokenizes prompts as TRL's trainers do, without their images."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    if isinstance(processing_class, ProcessorMixin):
        prompts = [prepare_multimodal_messages(prompt) for prompt in prompts]
        template = {"chat_template": processing_class.chat_template} | template
    return tokenizer.apply_chat_template(
        conversation=prompts, tools=tools or None, add_generation_prompt=True, return_dict=True, **template
    )["input_ids"]


@dataclass(frozen=True)
class Context:
    """
    The longest row of prompt and completion that a sampler takes.

    Attributes:
        tokens (`int`): Its length.
        field (`str`): What sets it, for messages.
        ends (`bool`): Whether it is the sampler's limit. Otherwise the model only was not trained on later positions.
    """

    tokens: int
    field: str
    ends: bool


def context_of(args, config, served: int | None = None) -> Context | None:
    """
    Returns the context of a run; `None` if the model's config does not say it.

    Args:
        args ([`~config.fields.QuantFields`]): The run's settings.
        config ([`~transformers.PreTrainedConfig`]): The policy's config.
        served (`int`, *optional*): The context of the vLLM server.
    """
    if served is not None:
        return Context(served, "the server's `--max-model-len`", True)
    if args.use_vllm and args.vllm_mode == "colocate" and args.vllm_max_model_length is not None:
        return Context(args.vllm_max_model_length, "`vllm_max_model_length`", True)
    found = switching(config)
    if args.use_vllm and found is not None and found.rope_type in LONGROPE:  # vLLM's default
        return Context(found.limit, "the model's `original_max_position_embeddings`", True)
    return model_context(config, args.use_vllm)


def model_context(config, use_vllm: bool) -> Context | None:
    """
    Returns the context that a model's positions allow, stretched as its config says; `None` if it does not say it.

    Args:
        config ([`~transformers.PreTrainedConfig`]): The model's config.
        use_vllm (`bool`): Whether vLLM samples, which takes no longer rows. The embedded engine computes any rotation.
    """
    text = config.get_text_config()
    positions, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if not isinstance(positions, int):
        return None
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # each kind of layer may have its own
    stretched = positions * max(part.get("factor") or 1.0 for part in parts)  # in some versions of vLLM
    return Context(round(stretched), "the model's `max_position_embeddings`", use_vllm or not rope)


def check_lengths(args, context: Context | None, processing_class, datasets: dict, tools, rollout_func) -> None:
    """
    Raises `ValueError` for a prompt that fills the context, and warns of prompts whose completions are shortened.

    Args:
        args ([`~config.fields.QuantFields`]): The run's settings.
        context ([`Context`] or `None`): Its context.
        processing_class: The policy's tokenizer or processor.
        datasets (`dict`): The datasets, by their names in messages.
        tools (`list[Callable]` or `None`): The trainer's tools.
        rollout_func (`Callable` or `None`): The user's own sampling, which may shorten prompts: nothing is refused.
    """
    if context is None:
        return
    for name, dataset in datasets.items():
        lengths = measured(name, dataset, processing_class, tools, args.chat_template_kwargs)
        if lengths is not None:
            check_fits(args, context, lengths.tokens, f"`{name}` ({lengths.source} were measured)", rollout_func)


def check_fits(args, context: Context, tokens: list[int], where: str, rollout_func=None) -> bool:
    """
    Raises `ValueError` if a prompt fills the context, and warns if one leaves too little room.

    Args:
        args ([`~config.fields.QuantFields`]): The run's settings.
        context ([`Context`]): The run's context.
        tokens (`list[int]`): The prompts' lengths.
        where (`str`): Where the prompts are, for the message.
        rollout_func (`Callable`, *optional*): The user's own sampling.

    Returns:
        `bool`: Whether every prompt leaves room for its completions.
    """
    longest, wanted = max(tokens), args.max_completion_length
    limit = f"{context.field}={context.tokens}"
    if longest >= context.tokens and context.ends and rollout_func is None:
        raise ValueError(
            f"{where} has a prompt of {longest} tokens, which leaves no room for a completion in {limit}. Remove long "
            "prompts, or raise the limit."
        )
    short = sum(length + (wanted or 1) > context.tokens for length in tokens)
    if short:
        then = "their completions end earlier" if context.ends else "their completions reach positions beyond it"
        logger.warning(
            "%s has %d prompts that leave less than `max_completion_length`=%s in %s: %s. The longest has %d tokens.",
            where,
            short,
            wanted,
            limit,
            then,
            longest,
        )
    return not short


def datasets_of(train_dataset, eval_dataset) -> dict:
    """Returns the datasets of a run by their names in messages."""
    return {"train_dataset": train_dataset, **evaluated(eval_dataset)}
