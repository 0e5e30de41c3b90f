"""
Tiny models that read images, with processors of their own: built on the spot from a seed, as those of `tiny.py`.

    model, processor = reader("qwen3_vl")
    save_reader(tmp_path / "model", "gemma3")
    picture(3)
"""

from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import CHAT_TEMPLATE, DELTA_NET, FAMILIES, SIZES, tiny_tokenizer
from transformers import PreTrainedModel, ProcessorMixin


# Tokens of Gemma 3 that stand for an image, and others that vLLM asks its tokenizer for
GEMMA = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
GEMMA |= {f"line_{count}": "\n" * count for count in range(1, 5)}
# Tokens of Qwen's models. An image stands between the first two, one token for each of its 28 x 28 or 32 x 32 pixels
MARKS = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
MARKS |= {"image": "<|image_pad|>", "video": "<|video_pad|>"}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128, "initializer_range": 0.1}
DEEPSTACK = {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# family -> (its classes' name, text, vision)
QWEN = {
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
        {"depth": 2, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 32, "num_hidden_layers": 3}
        | {"rope_parameters": ROPE | {"mrope_section": [8, 4, 4], "mrope_interleaved": True}},
        DEEPSTACK,
    ),
    "qwen3_5": (
        "Qwen3_5",
        DELTA_NET | {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"depth": 2, "num_position_embeddings": 64},
    ),
}
READERS = (*QWEN, "gemma3")
# Of models for a GPU: large enough for every kernel, with heads as published
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE |= {"initializer_range": 0.03}
WIDE_LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
WIDE_LINEAR |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
SECTIONS = {"qwen2_5_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20], "qwen3_5": [8, 4, 4]}  # of heads of 128
WIDE_TEXT = {
    "qwen2_5_vl": WIDE,
    "qwen3_vl": WIDE | {"head_dim": 128},
    "qwen3_5": WIDE | {"head_dim": 128} | WIDE_LINEAR,
    "gemma3": WIDE | {"head_dim": 128, "query_pre_attn_scalar": 128},
}
WIDE_VISION = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "out_hidden_size": 1024}
WIDE_VISION |= {"initializer_range": 0.03}


def template(place: str) -> str:
    """A chat template that writes `place` for an image."""
    part = f"{{% if part['type'] == 'image' %}}{place}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    parts = f"{{% for part in message['content'] %}}{part}{{% endfor %}}"
    return CHAT_TEMPLATE.replace("{{ message['content'] }}", parts)


def reader(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, wide: bool = False
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """
    A model and its processor; a `wide` one is for a GPU. The weights are drawn in FP32 and cast; norms, biases and what
    would start at 0 have values of their own, so that a test notices when one is dropped.
    """
    kind, config, processor = gemma(wide) if family == "gemma3" else qwen(family, wide)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 or not parameter.any():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if wide and family == "gemma3":  # as drawn, its tied head repeats the last token with certainty
                model.get_input_embeddings().weight.mul_(0.6)
                for name, parameter in model.named_parameters():
                    if name.endswith(("q_norm.weight", "k_norm.weight")):
                        parameter.add_(1)  # attention that tells tokens apart
    return model.to(dtype), processor


def gemma(wide: bool) -> tuple:
    """Gemma 3's class, config and processor, which does without torchvision. An image is 4 tokens, or 64 if `wide`."""
    tokenizer, (side, tokens) = tiny_tokenizer(GEMMA), (112, 64) if wide else (28, 4)
    images = transformers.Gemma3ImageProcessorPil(size={"height": side, "width": side}, do_pan_and_scan=False)
    processor = transformers.Gemma3Processor(
        images, tokenizer, chat_template=template(GEMMA["boi"]), image_seq_length=tokens
    )
    vision = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    vision |= {"num_attention_heads": 4, "image_size": side, "patch_size": 14, "initializer_range": 0.1}
    text = SIZES | {"tie_word_embeddings": True} | FAMILIES["gemma3"][1]
    if wide:
        text |= WIDE_TEXT["gemma3"]
        vision |= {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "initializer_range": 0.03}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision | {"vision_use_head": False},
        mm_tokens_per_image=tokens,
        eos_token_id=257,
        pad_token_id=256,
        **{f"{name}_token_index": tokenizer.convert_tokens_to_ids(GEMMA[name]) for name in ("boi", "eoi", "image")},
    )
    return transformers.Gemma3ForConditionalGeneration, config, processor


def qwen(family: str, wide: bool) -> tuple:
    """The class, config and processor of one of Qwen's models. An image is as many tokens as its size says."""
    pytest.importorskip("torchvision", reason="torchvision, which Qwen's processors need, is not installed")
    name, text, vision = QWEN[family]
    tokenizer, is_old = tiny_tokenizer(MARKS), family == "qwen2_5_vl"
    patch = {"patch_size": 14 if is_old else 16}
    images = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 128 * 128}, **patch)
    videos = (transformers.Qwen2VLVideoProcessor if is_old else transformers.Qwen3VLVideoProcessor)()
    kind = transformers.Qwen2_5_VLProcessor if is_old else transformers.Qwen3VLProcessor
    processor = kind(images, tokenizer, videos, chat_template=template(PLACE))
    text, vision = SIZES | {"tie_word_embeddings": False} | text, VISION | patch | vision
    if wide:
        rope = text["rope_parameters"] | {"mrope_section": SECTIONS[family]}
        text, vision = text | WIDE_TEXT[family] | {"rope_parameters": rope}, vision | WIDE_VISION
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **{f"{one}_token_id": tokenizer.convert_tokens_to_ids(mark) for one, mark in MARKS.items()},
    )
    return getattr(transformers, f"{name}ForConditionalGeneration"), config, processor


def save_reader(
    path: str | Path, family: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, wide: bool = False
) -> str:
    """Saves a model, under the names of published ones, and its processor to `path`; returns `path` as a string."""
    for part in reader(family, dtype, seed, wide):
        part.save_pretrained(path)
    weights = Path(path) / "model.safetensors"
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(weights).items()}
    save_file(named, weights, metadata={"format": "pt"})
    return str(path)


def load_reader(path: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Loads what [`save_reader`] saved."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
    return model, transformers.AutoProcessor.from_pretrained(path)


def picture(number: int, width: int = 64, height: int = 96) -> Image.Image:
    """A picture of random pixels."""
    generator = torch.Generator().manual_seed(number)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy())


def conversation(images: list[Image.Image], text: str) -> list[dict]:
    """A question about images."""
    return [
        {
            "role": "user",
            "content": [*({"type": "image", "image": one} for one in images), {"type": "text", "text": text}],
        }
    ]


def processed(processor: ProcessorMixin, images: list[Image.Image], text: str) -> dict:
    """What a processor makes of a question about images, as TRL asks it."""
    return processor.apply_chat_template(
        conversation(images, text), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
