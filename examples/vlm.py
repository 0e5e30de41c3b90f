"""GRPO with images and INT8 samples, on a CPU, in a few minutes: a small model learns to name the colour of a square.

    python examples/vlm.py

Nothing is downloaded: the model is a Qwen3-VL of two layers with random weights, its tokenizer knows a dozen words, and
the images are drawn here. A quarter of the answers that are colours are right by chance; `reward` shows when the model
has begun to look. The sampler is an INT8 copy of the language model. The vision tower and what joins it to the text
keep their type and are trained, and each sync takes them along.

With vLLM installed, `main(use_vllm=True, vllm_mode="colocate")` samples with that; its check at the first sync then has
an image too. A published model is trained in the same way, by its name: see docs/recipes.md.
"""

import random
from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer


COLOURS = ("red", "green", "blue", "orange")
MARKS = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
MARKS |= {"image": "<|image_pad|>", "video": "<|video_pad|>"}
WORDS = ["<|pad|>", "<|end|>", *MARKS.values(), "Which", "colour", "?", *COLOURS]
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
SIZE = 64  # pixels of an image, in both directions: four image tokens
SETTINGS = {
    "output_dir": "runs/vlm",
    "rollout_precision": "int8",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 1,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 80,
    "logging_steps": 5,
    "report_to": "none",
}


def processor() -> Qwen3VLProcessor:
    """The processor of Qwen3-VL, with a tokenizer that knows `WORDS`."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<|pad|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        padding_side="left",
        extra_special_tokens={f"{name}_token": mark for name, mark in MARKS.items()},
    )
    images = Qwen2VLImageProcessor(size={"shortest_edge": SIZE**2, "longest_edge": SIZE**2}, patch_size=16)
    return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=TEMPLATE)


def save_model(path: str | Path, seed: int = 0) -> str:
    """Saves the model, with random weights, and its processor to `path`, where vLLM finds them too."""
    made = processor()
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3VLConfig(
        text_config=text
        | {"vocab_size": len(WORDS), "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 128}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}}
        | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.1},
        vision_config=vision | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **{f"{name}_token_id": made.tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()},
    )
    torch.manual_seed(seed)
    Qwen3VLForConditionalGeneration(config).save_pretrained(path)
    made.save_pretrained(path)
    return str(path)


def squares(count: int, seed: int = 0) -> Dataset:
    """Questions about images with one square, anywhere and of any size, on white."""
    generator, rows = random.Random(seed), []
    for _ in range(count):
        colour, side = generator.choice(COLOURS), generator.randrange(SIZE // 4, SIZE // 2)
        left, top = (generator.randrange(SIZE - side) for _ in range(2))
        image = Image.new("RGB", (SIZE, SIZE), "white")
        ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), fill=colour)
        prompt = [{"role": "user", "content": "Which colour ?"}]
        rows.append({"prompt": prompt, "image": image, "answer": colour})
    return Dataset.from_list(rows)


def names_the_colour(completions, answer, **kwargs) -> list[float]:
    """1 for the colour of the square, else 0."""
    return [float(said[0]["content"].strip() == colour) for said, colour in zip(completions, answer, strict=True)]


def main(**overrides) -> QuantGRPOTrainer:
    """Trains with `SETTINGS` and these overrides, and returns the trainer."""
    args = QuantGRPOConfig(**SETTINGS | overrides)
    path = save_model(Path(args.output_dir, "start"), args.seed)
    trainer = QuantGRPOTrainer(model=path, reward_funcs=names_the_colour, args=args, train_dataset=squares(512))
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
