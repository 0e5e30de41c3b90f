"""
The rows on which an engine is compared with its policy: of the run's own prompts or of texts, and one with a picture.

The picture is drawn here, the same in every run: three gradients that cross, wider than high. Its row is a question of
the run's processor, as the trainer would ask it, so it passes through all that an image passes through in a run.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from ..engine import OF_EACH_TOKEN


TEXTS = (
    "To find how many apples are left, start from what was bought and take away what was eaten. Ana bought 3 bags with "
    "12 apples each, so she had 3 * 12 = 36 apples. She gave 7 to her brother and ate 2 a day for 5 days, which makes "
    "7 + 2 * 5 = 17. Then 36 - 17 = 19 apples are left. The answer is 19. Check: 19 + 17 = 36, as it should be. ",
    "def running_mean(values, window):\n    total, means = 0.0, []\n    for index, value in enumerate(values):\n"
    "        total += value\n        if index >= window:\n            total -= values[index - window]\n"
    "        means.append(total / min(index + 1, window))\n    return means\n\n\nprint(running_mean([4, 8, 15], 2))\n",
    "The river rises in the hills north of the town, runs past two mills and an old stone bridge, and reaches the sea "
    "after a day's walk. In spring the meadows along it are under water; in August children cross it on foot. Nobody "
    "remembers who built the bridge, but a date is cut into its middle arch, and every year somebody paints it white. ",
)
PICTURE = (168, 112)  # pixels, wide and high
SHORT = 40  # characters of text after it, where more would not fit


def rows_to_check(engine, longest: int, tokens: int) -> list[list[int]]:
    """
    Returns the rows on which an engine is compared with its policy: of the run's own prompts, and as long as its own
    rows may be. If no prompt is known, they are texts, repeated to a third of `tokens`. All ranks must call it, and get
    the same rows. A run keeps its first rows.

    Args:
        engine ([`~rollout.RolloutEngine`]): The engine.
        longest (`int`): Tokens of a row at most.
        tokens (`int`): Tokens of all rows, about.
    """
    if engine.checked_rows is None:
        asked = [engine.ask_prompts() if engine.ask_prompts is not None and engine.accelerator.is_main_process else []]
        (prompts,) = broadcast_object_list(asked, from_process=0)
        if not prompts:
            return check_sequences(engine.tokenizer, max(1, min(tokens // len(TEXTS), longest)))
        length = tokens
        if engine.settings.max_completion_length is not None:
            length = max(map(len, prompts)) + engine.settings.max_completion_length
        engine.checked_rows = own_rows(prompts, max(1, min(length, longest, tokens)), tokens)
    return engine.checked_rows


def own_rows(prompts: list[list[int]], length: int, tokens: int) -> list[list[int]]:
    """
    Returns rows of `length` token ids, of `tokens` in all or fewer. Each begins with another of the `prompts` and goes
    on with those after it; further rows begin inside of prompts.
    """
    prompts = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    stream = [token for ids in prompts for token in ids]
    count = max(1, tokens // length)
    starts = [sum(map(len, prompts[:number])) for number in range(len(prompts))]
    starts += range(0, len(stream), max(1, len(stream) // count))
    endless = stream * (length // len(stream) + 2)
    return [endless[start : start + length] for start in list(dict.fromkeys(starts))[:count]]


def check_sequences(tokenizer, length: int) -> list[list[int]]:
    """Returns `length` token ids of each text, repeating it if it is shorter. The result is the same on every rank."""
    sequences = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        sequences.append((ids * (length // len(ids) + 1))[:length])
    return sequences


class PicturedRow(NamedTuple):
    """
    A prompt with a picture.

    Attributes:
        prompt (`list[int]`): Its token ids, with those of the picture.
        images (`list`): The picture, as a request has it.
        fields (`Mapping`): What the processor made of it, such as `pixel_values`; values for each token of the prompt.
    """

    prompt: list[int]
    images: list[Image.Image]
    fields: Mapping[str, Any]

    def given(self, length: int, device: torch.device) -> dict[str, Tensor]:
        """Returns the arguments of the policy's forward pass, beside tokens, for the prompt and text after it."""
        longer = {
            name: torch.nn.functional.pad(field, (0, length - len(self.prompt)))
            for name, field in self.fields.items()
            if name in OF_EACH_TOKEN
        }
        return {name: field.to(device) for name, field in {**self.fields, **longer}.items()}


def pictured_row(processor, longest: int) -> PicturedRow | None:
    """
    Returns a prompt with a picture, of at most `longest` tokens; `None` if the run's processor reads only text, has no
    template for conversations, or makes more tokens of the picture.
    """
    if not isinstance(processor, ProcessorMixin) or processor.chat_template is None:
        return None
    across, around = Image.linear_gradient("L"), Image.radial_gradient("L")
    picture = Image.merge("RGB", (across, around, across.rotate(90))).resize(PICTURE)
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    for text in (TEXTS[-1], TEXTS[-1][:SHORT]):
        content = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
        fields = dict(processor.apply_chat_template([{"role": "user", "content": content}], **options))
        (prompt,) = fields.pop("input_ids").tolist()
        fields.pop("attention_mask", None)
        if len(prompt) <= longest:
            return PicturedRow(prompt, [picture], fields)
    return None
