"""Images of the prompts in flight. The pool holds none: each generation reads those that it needs from the data."""

from copy import deepcopy
from typing import Any

from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from ..config.data import images_of
from ..rollout.engine import Request


COLUMNS = ("image", "images")


def with_images(row: dict[str, Any]) -> str | list[dict]:
    """Returns the prompt of a row of the data, with the row's images in the conversation, as TRL puts them there."""
    prompt = deepcopy(row["prompt"])
    if isinstance(prompt, str) or not any(name in row for name in COLUMNS):
        return prompt
    images = row["images"] if "images" in row else [row["image"]]
    return prepare_multimodal_messages(prompt, images=[image for image in images or [] if image is not None])


def requests_in_flight(trainer, asked: list[tuple]) -> tuple[list[Request], dict[str, Any]]:
    """
    Returns requests for completions that start or go on, with their images, and the processor's results for these if
    the engine needs them.

    Args:
        trainer: The trainer.
        asked (`list[tuple[Group, Completion]]`): The completions, each with its group.

    Raises:
        `ValueError`: A prompt with images now has another number of tokens than when its group started.
    """
    prompts = {}
    if isinstance(trainer.processing_class, ProcessorMixin):
        prompts = {group.place: with_images(trainer.train_dataset[group.row]) for group, _ in asked}
    images = {place: images_of(prompt) for place, prompt in prompts.items()}
    requests = [Request(group.prompt, images.get(group.place), sampled=c.token_ids) for group, c in asked]
    if trainer.vllm_generation.sampler.reads_images or not any(images.values()):
        return requests, {}
    tokenized, _, processed = trainer._tokenize_prompts([prompts[group.place] for group, _ in asked])
    for (group, _), ids in zip(asked, tokenized, strict=True):
        if len(ids) != len(group.prompt):
            raise ValueError(
                f"The prompt of row {group.row} had {len(group.prompt)} tokens when its completions started, and has "
                f"{len(ids)} now, so its images have other places. If the chat template writes the date, set it in "
                "`chat_template_kwargs`."
            )
    return requests, processed
