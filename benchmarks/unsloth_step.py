"""
Times unsloth's GRPO trainer. `step.py` starts this file in a process of its own, and describes its trainers and phases:

    python benchmarks/step.py --trainers trl-control unsloth unsloth-fp8 --unsloth_site DIR

| trainer | is |
|---|---|
| `unsloth` | unsloth's `GRPOTrainer` over a base in BF16, with the switches of `trl-control` |
| `unsloth-fp8` | the same with `load_in_fp8=True`: vLLM quantizes the base, and forward passes compute in FP8 |

Unsloth needs TRL 1.15 and datasets 4. DIR has it and what else it needs in other versions than ours, and stands before
all other packages: `pip install --target DIR --no-deps` puts them there.

What unsloth decides by itself stays as it is: it packs the rows of a micro-batch, and checks the first ones against
rows alone. Its prompts are computed once for a group only without vLLM. Policy and engine hold the base once, so
`--vllm_gpu_memory_utilization` has room for the same cache as TRL's engine and the whole takes less memory. In BF16 it
adds the adapter to the base while it samples, in FP8 vLLM gets the adapter: both count as sampling, and sync is 0.

Each result also has an entry `unsloth`: the versions in this process, which of unsloth's paths were taken, and norms of
gradients.
"""

import os
import tempfile


# Nothing is sent or fetched, and what unsloth writes about TRL's classes does not stay
os.environ |= {"UNSLOTH_DISABLE_STATISTICS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", tempfile.mkdtemp(prefix="trl-quant-unsloth-"))

import unsloth  # first: it exchanges parts of TRL, transformers and PEFT  # isort: skip

import random
from contextlib import suppress
from importlib import metadata
from unittest import mock

import step
import torch
import vllm
from datasets import Dataset
from engines import load_tokenizer, model_directory, report, speak, words_of
from trl import GRPOConfig, GRPOTrainer


PACKAGES = ("unsloth", "unsloth_zoo", "torch", "vllm", "trl", "transformers", "peft", "datasets", "xformers")


class DummyLLM(vllm.LLM):
    """vLLM with dummy weights, where unsloth would read a checkpoint."""

    def __init__(self, **arguments):
        super().__init__(**arguments | {"load_format": "dummy"})


def make_trainer(args, tokenizer):
    """Builds unsloth's trainer with its own vLLM, which shares the base's weights."""
    (size,) = args.sizes
    generator = random.Random(0)
    prompts = step.draw_prompts(args, tokenizer, generator)
    directory = model_directory(size, tokenizer)
    settings = step.run_settings(args, directory, max(map(len, tokenizer(prompts).input_ids)))
    with mock.patch.object(vllm, "LLM", DummyLLM):
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            directory,
            max_seq_length=settings["vllm_max_model_length"],
            load_in_4bit=False,
            load_in_fp8=args.one == "unsloth-fp8",
            fast_inference=True,
            max_lora_rank=args.lora,
            max_num_seqs=len(prompts) + 1,  # all at once; exactly 256 would be no request
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        )
    with torch.inference_mode():  # as vLLM makes the weights
        speak(model, words_of(tokenizer))
        # Unsloth's gradients are NaN at more extreme logits. These give other tokens no probability either
        model.get_output_embeddings().weight[:, 0].clamp_(min=-64)
    # On the same layers as "all-linear", with unsloth's gradient checkpointing
    model = unsloth.FastLanguageModel.get_peft_model(model, r=args.lora, lora_alpha=2 * args.lora)
    # TRL's defaults, where unsloth has others
    settings |= {"optim": "adamw_torch_fused", "learning_rate": 1e-6}
    return GRPOTrainer(
        args=GRPOConfig(**settings | step.CONTROL),
        model=model,
        reward_funcs=lambda completions, **_: [generator.random() for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )


def taken(trainer) -> dict:
    """Returns the entry `unsloth` of a result."""
    from unsloth.utils.attention_dispatch import select_attention_backend

    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "versions": versions,
        "packing": {name: value for name, value in vars(trainer.model).items() if "seq_packing" in name},
        "packed_attention": select_attention_backend(use_varlen=True),
        "adds_adapter_to_base": any(name.endswith("merged_rollout_last") for name in vars(trainer.vllm_generation.llm)),
        "gradient_norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
    }


def main():
    args = step.options().parse_args()
    trainer = make_trainer(args, load_tokenizer(args.tokenizer))
    results = step.measure(args, trainer)
    for result in results.values():
        result["unsloth"] = taken(trainer)
    report(results)


if __name__ == "__main__":
    main()
