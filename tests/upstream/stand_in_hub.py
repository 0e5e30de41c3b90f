"""A stand-in for the Hub: the tiny models and data sets that TRL's tests of `GRPOTrainer` name, built locally.

`build(root)` writes `root/hub` in the layout of the Hub's own cache, so that with `HF_HUB_CACHE` on it and
`HF_HUB_OFFLINE=1` every `from_pretrained` of the tests works as it stands, and `root/datasets` as parquet files.

The models are random, with the widths of upstream's. The chat templates are those of the installed TRL, which knows a
family (its tool calls, its training template) by the template's text.
Upstream's vocabularies of up to 248,077 would take minutes a test on a CPU, so these have about 600 tokens. Tests that
stand in for `generate` hard-code ids of Qwen's: `WORDS` lists what those ids mean, `compact_id` where they are here.
"""

import codecs
import contextlib
import functools
import io
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers as tf
import trl
from datasets import Dataset, Features, Image, List, Value
from PIL.Image import fromarray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


ORGANIZATION = "trl-internal-testing"
REVISION = "0" * 40
TEMPLATES = Path(trl.__file__).parent / "chat_templates"

# fmt: off
SIZES = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 32,
}
WIDE = SIZES | {"hidden_size": 16}
VISION = WIDE | {"num_heads": 4, "depth": 2, "out_hidden_size": 16, "embed_dim": 16, "fullatt_block_indexes": [1]}
EXPERTS = {
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GLM = EXPERTS | {"head_dim": 2, "attention_bias": True, "use_qk_norm": True}
MAMBA = {
    "hidden_size": 16, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 4,
    "mamba_n_groups": 1, "ssm_state_size": 16, "mamba_d_conv": 4, "moe_shared_expert_intermediate_size": 32, **EXPERTS,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1]}}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "shared_expert_intermediate_size": 32, **EXPERTS,
}

# pad, eos and bos (or "-") first, then the other control tokens
CHATML = "<|endoftext|> <|im_end|> - <|im_start|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
CHATML += " <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
COHERE = "<PAD> <|END_OF_TURN_TOKEN|> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>"
GLM4 = "<|endoftext|> <|user|> - <|assistant|> <|observation|> <|system|>"
HARMONY = "<|endoftext|> <|return|> - <|start|> <|message|> <|channel|> <|end|> <|call|>"
LLAMA = "<|eot_id|> <|eot_id|> <|begin_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|>"
GEMMA = "<pad> <eos> <bos> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token>"
GEMMA4 = "<pad> <eos> <bos> <|turn> <turn|> <|image> <image|> <|image|> <|audio> <audio|> <|audio|> <|video|>"
MISTRAL = "<pad> </s> <s> <image>"

# name in the organization, after "tiny-" | chat template | control tokens | configuration | its settings beyond SIZES
LANGUAGE_MODELS = [
    ("Qwen2ForCausalLM-2.5", "qwen2_5", CHATML, tf.Qwen2Config, {}),
    ("Qwen3ForCausalLM", "qwen3", CHATML, tf.Qwen3Config, {"head_dim": 8}),
    ("Qwen3MoeForCausalLM", "qwen3", CHATML, tf.Qwen3MoeConfig, {"head_dim": 8, "norm_topk_prob": True, **EXPERTS}),
    ("Cohere2ForCausalLM", "cohere2", COHERE, tf.Cohere2Config, {"logit_scale": 1.0}),
    ("Glm4MoeForCausalLM", "glm4moe", GLM4, tf.Glm4MoeConfig, GLM),
    ("GptOssForCausalLM", "gptoss", HARMONY, tf.GptOssConfig, EXPERTS),
    ("NemotronHForCausalLM-nano", "nemotron_3_nano", CHATML, tf.NemotronHConfig, MAMBA),
    ("Gemma2ForCausalLM", "gemma", GEMMA, tf.Gemma2Config, {}),
    ("LlamaForCausalLM-3.2", "llama3_2", LLAMA, tf.LlamaConfig, {}),
    ("RemoteForCausalLM", "llama3_2", LLAMA, tf.LlamaConfig, {}),
    ("Qwen2ForSequenceClassification-2.5", "qwen2_5", CHATML, tf.Qwen2Config, {"num_labels": 1}),
    ("Qwen3ForSequenceClassification", "qwen3", CHATML, tf.Qwen3Config, {"num_labels": 1, "hidden_size": 16}),
    ("LlamaForSequenceClassification-3.2", "llama3_2", LLAMA, tf.LlamaConfig, {"num_labels": 1}),
]

# id=text of the tokens in the tests' hard-coded completions: Qwen2.5 and 3, then Qwen3.5
WORDS = '4913={"|606=name|788=":|330= "|64648=multiply|22785=_tool|497=",|16370=arguments|5212= {"|11248=}}\n'
WORDS += "|7692=async|93054=_multiply|1513= don|944='t|1414= know|894= any|5392= tool|17453=Done|35744=increment"
WORDS += '|9520=step|2765= won|927=sh|411=out|1318=text|6023=hi|95642="}}\n|450=de|13477=crement|16252= increment'
WORDS += "|14172=tool|6659=call|397=>\n|522=</|314= {|293= b|151643=<|endoftext|>|151645=<|im_end|>|151657=<tool_call>"
WORDS += "|151658=</tool_call>"
WORDS += "|1628=function|13744==s|30091=creenshot|22076=_tool|510=</|1459= don|914='t|1366= know|866= any"
WORDS += "|5224= tool|16936=Done|248044=<|endoftext|>|248046=<|im_end|>|248058=<tool_call>|248059=</tool_call>"
WORDS = {int(pair.partition("=")[0]): pair.partition("=")[2] for pair in re.split(r"\|(?=\d+=)", WORDS)}
# fmt: on


@functools.cache
def learned() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges learned from the templates, so that a tool's description is 200 tokens long and not 800."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=556, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([(TEMPLATES / f"{name}.jinja").read_text() for name in ("qwen3", "llama3_1")], trainer)
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(pair) for pair in model["merges"]]


@functools.cache
def vocabulary(control: str) -> dict[str, int]:
    """Token -> id. The bytes have the ids of GPT-2 and Qwen, 0-255; then the learned, the control tokens, `WORDS`."""
    tokens = [*learned()[0], *control.split(), *map(as_bytes, WORDS.values())]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def as_bytes(text: str) -> str:
    return text.replace(" ", "Ġ").replace("\n", "Ċ")


def compact_id(qwen_id: int) -> int:
    """The id here of the token that has `qwen_id` in the vocabulary of Qwen2.5, Qwen3 or Qwen3.5."""
    return qwen_id if qwen_id < 256 else vocabulary(CHATML)[as_bytes(WORDS[qwen_id])]


def tokenizer(template: str, control: str, **processor_tokens: str) -> tf.PreTrainedTokenizerFast:
    tokens = [token for token in control.split() if token != "-"]
    backend = Tokenizer(models.BPE(vocab=vocabulary(control), merges=learned()[1]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, normalized=False, special="|" in token) for token in dict.fromkeys(tokens)])
    ends = {f"{end}_token": token for end, token in zip(("pad", "eos", "bos"), control.split()) if token != "-"}
    made = tf.PreTrainedTokenizerFast(tokenizer_object=backend, **ends, extra_special_tokens=processor_tokens)
    made.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return made


def of_tokenizer(tokens: tf.PreTrainedTokenizerFast) -> dict:
    """What a model's configuration says about its tokenizer."""
    ids = {f"{end}_token_id": getattr(tokens, f"{end}_token_id") for end in ("pad", "eos", "bos")}
    return {"vocab_size": len(tokens), "vocab_size_per_layer_input": len(tokens), **ids}


def save(hub: Path, name: str, model: tf.PreTrainedModel, processing) -> Path:
    """Saves under `hub` as the Hub's cache keeps a downloaded repository."""
    repository = hub / f"models--{ORGANIZATION}--tiny-{name}"
    snapshot = repository / "snapshots" / REVISION
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing may stay exactly zero, or its neighbours get no gradient
            if not parameter.any():
                parameter.normal_(std=0.02)
    for part in (model.to(torch.bfloat16), processing):
        part.save_pretrained(snapshot)
    return snapshot


def language_models(hub: Path) -> None:
    for name, template, control, config_class, sizes in LANGUAGE_MODELS:
        tokens = tokenizer(template, control)
        config = config_class(**SIZES | of_tokenizer(tokens) | sizes)
        auto = tf.AutoModelForSequenceClassification if "num_labels" in sizes else tf.AutoModelForCausalLM
        model = auto.from_config(config)
        if name == "Qwen2ForCausalLM-2.5":  # a test counts on it never to sample an end
            with torch.no_grad():
                model.model.embed_tokens.weight[:, 0] += 0.1  # so that the first of the last hidden state is about 2.6
                model.lm_head.weight[[tokens.eos_token_id, tokens.pad_token_id], 0] = -10
        if name == "RemoteForCausalLM":
            classes = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteForCausalLM"}
            model.config.auto_map = {auto: f"remote.{name}" for auto, name in classes.items()}
        snapshot = save(hub, name, model, tokens)
        if name == "RemoteForCausalLM":  # a Llama whose classes come with the repository
            (snapshot / "remote.py").write_text(
                "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
                'class RemoteConfig(LlamaConfig):\n    model_type = "remote"\n\n\n'
                "class RemoteForCausalLM(LlamaForCausalLM):\n    config_class = RemoteConfig\n"
            )
            text = (
                (snapshot / "config.json").read_text().replace('"LlamaFor', '"RemoteFor').replace('"llama"', '"remote"')
            )
            (snapshot / "config.json").write_text(text)


def vision_language_models(hub: Path) -> None:
    """Needs torchvision, which the processors of transformers need."""

    def add(name, family, text, vision, processor, **ids):
        text = WIDE | of_tokenizer(processor.tokenizer) | text
        config = getattr(tf, f"{family}Config")(text_config=text, vision_config=VISION | vision, **ids)
        save(hub, name, getattr(tf, f"{family}ForConditionalGeneration")(config), processor)

    def ids_of(tokens, suffix, *names):
        return {f"{n}_token_{suffix}": tokens.convert_tokens_to_ids(getattr(tokens, f"{n}_token")) for n in names}

    tokens = tokenizer(
        "gemma3", GEMMA, boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    images = tf.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    processor = tf.Gemma3Processor(images, tokens, tokens.chat_template, image_seq_length=4)
    vision = {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    ids = ids_of(tokens, "index", "boi", "eoi", "image")
    add("Gemma3ForConditionalGeneration", "Gemma3", {}, vision, processor, mm_tokens_per_image=4, **ids)

    marks = {"boi": "<|image>", "eoi": "<image|>", "image": "<|image|>", "boa": "<|audio>", "eoa": "<audio|>"}
    marks |= {"audio": "<|audio|>", "video": "<|video|>"}
    tokens = tokenizer("gemma4", GEMMA4, **{f"{name}_token": token for name, token in marks.items()})
    images = tf.Gemma4ImageProcessor(max_soft_tokens=70, image_seq_length=70)
    parts = (tf.Gemma4AudioFeatureExtractor(), images, tokens, tf.Gemma4VideoProcessor(), tokens.chat_template)
    text = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "global_head_dim": 8}
    vision = {"position_embedding_size": 630, "default_output_length": 70, "head_dim": 8, "embed_dim": 32}
    ids = ids_of(tokens, "id", "boi", "eoi", "image", "boa", "audio", "video")
    processor = tf.Gemma4Processor(*parts, image_seq_length=70)
    text |= {"hidden_size_per_layer_input": 16}
    add("Gemma4ForConditionalGeneration", "Gemma4", text, vision, processor, audio_config=None, **ids)

    tokens = tokenizer("llava_next", MISTRAL)
    grid = [[28, 56], [56, 28], [56, 56]]
    crop = {"height": 28, "width": 28}
    images = tf.LlavaNextImageProcessor(size={"shortest_edge": 28}, crop_size=crop, image_grid_pinpoints=grid)
    processor = tf.LlavaNextProcessor(images, tokens, 14, "default", tokens.chat_template, "<image>", 1)
    kinds = {"model_type": "mistral"}, {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    ids = {"image_token_index": tokens.convert_tokens_to_ids("<image>"), "image_grid_pinpoints": grid}
    add("LlavaNextForConditionalGeneration", "LlavaNext", *kinds, processor, **ids)

    for name, family, template, text, kind in [
        ("Qwen2VLForConditionalGeneration", "Qwen2VL", "qwen2_5_vl", MROPE, "Qwen2VL"),
        ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VL", "qwen2_5_vl", MROPE, "Qwen2_5_VL"),
        ("Qwen3_5ForConditionalGeneration-NoThink", "Qwen3_5", "qwen3_5_nothink", LINEAR, "Qwen3VL"),
        ("Qwen3_5MoeForConditionalGeneration-3.6", "Qwen3_5Moe", "qwen3_6", LINEAR, "Qwen3VL"),
    ]:
        marks = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        marks |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
        tokens = tokenizer(template, CHATML, **{f"{name}_token": token for name, token in marks.items()})
        patch = 16 if kind == "Qwen3VL" else 14
        edges = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
        images = tf.Qwen2VLImageProcessor(size=edges, patch_size=patch)
        videos = (tf.Qwen3VLVideoProcessor if kind == "Qwen3VL" else tf.Qwen2VLVideoProcessor)()
        processor = getattr(tf, f"{kind}Processor")(images, tokens, videos, chat_template=tokens.chat_template)
        add(name, family, text, {"patch_size": patch}, processor, **ids_of(tokens, "id", *marks))


def datasets(root: Path) -> None:
    """The Zen of Python, as prompts: the first words of each aphorism, 17 to train on and 2 to test."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").splitlines()[2:]
    counts = [4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, 5, 6, 4, 5, 6, 6, 3]
    prompts = [" ".join(line.split()[:n]) for line, n in zip(lines, counts, strict=True)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    pixels = torch.randint(0, 256, (len(prompts), 48, 64, 3), dtype=torch.uint8)
    pictures = [fromarray(picture.numpy()) for picture in pixels]
    message = List({"role": Value("string"), "content": Value("string")})
    chat = "conversational_prompt_only"
    for name, columns, features in [
        ("zen/standard_prompt_only", {"prompt": prompts}, {"prompt": Value("string")}),
        (f"zen/{chat}", {"prompt": chats}, {"prompt": message}),
        (f"zen-image/{chat}", {"prompt": chats, "image": pictures}, {"prompt": message, "image": Image()}),
        (
            f"zen-multi-image/{chat}",
            {"prompt": chats, "images": [[picture, picture] for picture in pictures]},
            {"prompt": message, "images": List(Image())},
        ),
    ]:
        whole = Dataset.from_dict(columns, features=Features(features))
        folder = root / name
        folder.mkdir(parents=True)
        whole.select(range(17)).to_parquet(folder / "train.parquet")
        whole.select(range(17, 19)).to_parquet(folder / "test.parquet")


def build(root: Path) -> None:
    torch.manual_seed(0)
    language_models(root / "hub")
    if find_spec("torchvision"):  # without it their processors do not load, and their tests fail with every class
        vision_language_models(root / "hub")
    datasets(root / "datasets")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
