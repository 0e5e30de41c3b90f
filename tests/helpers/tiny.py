"""Tiny models and a tokenizer for the tests: built on the spot from a seed, no network, no files.

The models are real transformers architectures with about 0.3 million parameters. Widths are multiples of 128, so that
every block and group size of `trl_quant.formats` fits without padding; pass others to provoke padding. Weights are
drawn wide enough that the next-token distribution is clearly not uniform. Norm weights and biases are moved off their
usual ones and zeros, so that a test notices when one is dropped, doubled or swapped.

    model, tokenizer = tiny_model("llama", tied=False), tiny_tokenizer()
    save_tiny(tmp_path / "model")           # what `from_pretrained` and vLLM load
"""

import functools
import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)


PAD, EOS, START = "<|pad|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320  # 256 bytes, 3 control tokens, then reserved ones up to a multiple of 64

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
# family -> (config class, settings that differ from the other families)
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "phi3": (transformers.Phi3Config, {}),
}
# As `FAMILIES`, for further dense families, which tests/models/test_families.py tests. Where some layers see a
# window alone, the first one does.
SLIDES = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FURTHER = {
    "arcee": (transformers.ArceeConfig, {}),
    "cohere": (transformers.CohereConfig, {"use_qk_norm": True, "logit_scale": 1.0}),
    "cohere2": (transformers.Cohere2Config, {"logit_scale": 1.0, **SLIDES}),
    "cwm": (transformers.CwmConfig, {"head_dim": 32, "bos_token_id": 258, **SLIDES}),
    "ernie4_5": (transformers.Ernie4_5Config, {"head_dim": 32}),
    "exaone4": (transformers.Exaone4Config, {"sliding_window_pattern": "LG", **SLIDES}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 32}),
    "glm": (transformers.GlmConfig, {"head_dim": 32}),
    "glm4": (transformers.Glm4Config, {"head_dim": 32}),
    "granite": (
        transformers.GraniteConfig,
        {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.1},
    ),
    # vLLM 0.26 has a class of its own for it, which reads `use_qk_norm`, as published configs have it
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, {"head_dim": 32, "use_qk_norm": True}),
    "ministral": (transformers.MinistralConfig, {"head_dim": 32, **SLIDES}),
    "ministral3": (transformers.Ministral3Config, {"head_dim": 32}),
    "olmo": (transformers.OlmoConfig, {}),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (transformers.Olmo3Config, SLIDES),
    "seed_oss": (transformers.SeedOssConfig, {"head_dim": 32, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2}),
    "starcoder2": (transformers.Starcoder2Config, {"use_bias": True, "sliding_window": 8}),
}
# Ministral 3 scales queries by their place, in steps of 16384 tokens; here of 16
SCALED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 128.0, "original_max_position_embeddings": 16}
SCALED |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
# family -> its norms before attention and before the MLP, where they have other names than Llama's
NORMS = dict.fromkeys(("gemma2", "gemma3"), ("input_layernorm", "pre_feedforward_layernorm"))
# As `FAMILIES`, for mixtures of experts. GLM-4's first layer is dense. In Qwen2's and GLM-4's, tokens share an expert.
ROUTED = {"num_experts_per_tok": 2}
MIXTURES = {
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, **ROUTED},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 128, **ROUTED},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, **ROUTED}),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {"head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 128, **ROUTED}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    ),
}

# As `FAMILIES`, for hybrids, whose first layer has no attention and whose second one has. Qwen3-Next's is a mixture too
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "head_dim": 32,
}
HYBRIDS = {
    "qwen3_5_text": (
        transformers.Qwen3_5TextConfig,
        DELTA_NET | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        DELTA_NET | {"num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, **ROUTED},
    ),
    "falcon_h1": (
        transformers.FalconH1Config,
        {"head_dim": 32, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32}
        | {"mamba_chunk_size": 16},
    ),
}


def norms_of(family: str) -> tuple[str, str]:
    """The norms of a decoder layer that feed linear layers: the one before attention, the one before the MLP."""
    return NORMS.get(family, ("input_layernorm", "post_attention_layernorm"))


@functools.cache
def _backend() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    control = [PAD, EOS, START]
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(alphabet) - len(control))]
    backend.add_special_tokens(control + reserved)
    return backend.to_str()


def tiny_tokenizer(marks: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """
    One token per UTF-8 byte, ChatML template, pad `<|pad|>` (256), eos `<|im_end|>` (257), padded on the left. `marks`
    are texts of reserved tokens, from the first on, by what transformers calls the token ("image").
    """
    marks = marks or {}
    backend = json.loads(_backend())
    for number, mark in enumerate(marks.values()):
        backend["added_tokens"][3 + number]["content"] = mark
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        extra_special_tokens={f"{name}_token": mark for name, mark in marks.items()},
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    family: str = "qwen3", tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides
) -> PreTrainedModel:
    """A causal LM of `family` (a key of a table above), in eval mode; the global random state is unchanged.

    The weights are drawn in float32 and cast, so one seed gives the same model, rounded, in each dtype. `overrides`
    are settings of the family's config, such as `hidden_size=96` or `num_hidden_layers=1`.
    """
    known = FAMILIES | FURTHER | MIXTURES | HYBRIDS
    if family not in known:
        raise ValueError(f"family {family!r} is unknown; allowed are {sorted(known)}")
    config_class, specific = known[family]
    config = config_class(**SIZES | {"tie_word_embeddings": tied} | specific | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


def save_tiny_vision(path: str | Path) -> str:
    """
    Saves a vision-language model and its processor to `path`; returns `path` as a string. It is BLIP-2 around OPT: its
    processor does without torchvision, and vLLM calls its tower otherwise than transformers does.
    """
    images, tokenizer = transformers.BlipImageProcessorPil(size={"height": 28, "width": 28}), tiny_tokenizer()
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=4).save_pretrained(path)  # adds "<image>"
    vocabulary = {"vocab_size": VOCAB_SIZE + 64}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"initializer_range": 0.1}
    ids = {"pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None}
    text = {"model_type": "opt", "ffn_dim": 256, "word_embed_proj_dim": 128, "max_position_embeddings": 512}
    config = transformers.Blip2Config(
        text_config=sizes | vocabulary | ids | text,
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        qformer_config=sizes | vocabulary | {"encoder_hidden_size": 128},
        num_query_tokens=4,
        image_text_hidden_size=128,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Blip2ForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return str(path)


def save_tiny(path: str | Path, family: str = "qwen3", **kwargs) -> str:
    """Saves `tiny_model(family, **kwargs)` and the tokenizer to `path`; returns `path` as a string."""
    tiny_model(family, **kwargs).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def save_words(path: Path) -> Path:
    """Writes a tokenizer of a few words and every byte."""
    words = [f"Ġ{first}{second}" for first in "abcdefgh" for second in "aeiou"]
    names = ["<|eos|>", "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<|pad|>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(path))
    return path


def gpt2() -> GPT2LMHeadModel:
    """A decoder of convolutions, and a head, which is not quantized."""
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=128, n_head=4, vocab_size=320, n_positions=128, eos_token_id=257)
    )
