"""
Measures how far vLLM's samples are from a policy in BF16, in the sampler's precision, and with the same kernels.

    python benchmarks/unified_mismatch.py --data train.jsonl            # GSM8K's rows: "question" and "answer"

A small model is first trained on the concatenated texts. It can therefore continue a question to any length: after an
answer it writes the next question. Each pair of sampler and policy then runs one step without an update through the
trainer, in its own process, and logs `mismatch/*`. The benchmark prints the KL (k3, nats a token), the share of tokens
whose log-probabilities have the same bits, tokens a second, and the KL by position.

| pair | sampler | policy computes in |
|---|---|---|
| `bf16/bf16` | BF16 | BF16: TRL's own |
| `P/bf16` | P | BF16 |
| `P/P` | P | P (`train_precision`); a base in 4 bits is shared, with an adapter |
| `P/exact` | P, the same for any batch | P with vLLM's kernels (`exact_rollouts`) |
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from engines import CUDA, in_own_process, load_tokenizer, machine, report, save

from trl_quant.precisions import exact_flows, frozen_bases, in_vllm, unified_flows


SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}  # of 128
TINY = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
LENGTH, BATCH, RATE = (1024, 32, 1e-3) if CUDA else (64, 2, 1e-3)
ROWS = 4  # sequences whose activations and logits are in memory at the same time


def text(row: dict) -> str:
    return f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"


def add_gradients(model, batch: torch.Tensor, rows: int = ROWS) -> float:
    """
    Adds the gradient of a batch's mean loss to that of the weights, `rows` sequences at a time.

    Args:
        model (`PreTrainedModel`): A causal language model.
        batch (`torch.Tensor` of shape `(N, T)`): Token ids, N a multiple of `rows` or less.
        rows (`int`, *optional*): Sequences of a forward and backward pass.

    Returns:
        `float`: The loss, in nats a token.
    """
    total = 0.0
    for part in batch.split(rows):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=CUDA):  # many CPUs are slow in BF16
            loss = model(part, labels=part).loss * (len(part) / len(batch))
        loss.backward()
        total += loss.item()
    return total


def train(
    directory: Path,
    data: Path,
    tokenizer_file: Path | None,
    updates: int,
    sequences: int = BATCH,
    **shape: int,
) -> float:
    """
    Trains a language model on the texts, and writes it in BF16 with its tokenizer.

    Weights, gradients and AdamW's states are in FP32, 16 bytes a parameter. With gradient checkpointing, a pass adds
    12 GiB to the 45 of 3B parameters, by an estimate. Models that are wider than `SHAPE` have a smaller learning rate.

    Args:
        directory (`Path`): Where it is written.
        data (`Path`): The texts' rows.
        tokenizer_file (`Path` or `None`): A tokenizer.json.
        updates (`int`): Number of updates.
        sequences (`int`, *optional*): Sequences of an update.
        shape: Fields of `Qwen2Config`.

    Returns:
        `float`: The last update's loss, in nats a token.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = load_tokenizer(tokenizer_file)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    ids = torch.tensor([token for row in rows for token in tokenizer(text(row))["input_ids"]])
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, max_position_embeddings=8192, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"], **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable()
    rate = RATE * min(1.0, SHAPE["hidden_size"] / config.hidden_size)
    # Fused, because AdamW's other ways copy all weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, updates, pct_start=0.1)
    for update in range(updates):
        starts = torch.randint(len(ids) - LENGTH, (sequences,))
        loss = add_gradients(model, torch.stack([ids[start : start + LENGTH] for start in starts]).to(model.device))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if update % 100 == 0 or update == updates - 1:
            print(f"update {update}: loss {loss:.3f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return loss


def measure(args) -> dict:
    from datasets import Dataset
    from peft import LoraConfig

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    precision, policy = args.one.split("/")
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    asked = random.Random(0).sample(rows, args.completions // 2)
    small = {} if CUDA else {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    given = {} if policy == "bf16" else {"train_precision": precision, "exact_rollouts": policy == "exact"}
    settings = QuantGRPOConfig(
        tempfile.mkdtemp(), rollout_precision=precision, is_correction="none", use_vllm=True, vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3, vllm_max_model_length=args.new_tokens + 512, sync_check_steps=0,
        vllm_engine_kwargs={"disable_log_stats": True, **small}, generation_kwargs={"ignore_eos": True},
        temperature=args.temperature, learning_rate=0.0, max_steps=2, logging_steps=1, num_generations=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=args.completions // 2, bf16=True, use_cpu=not CUDA,
        max_completion_length=args.new_tokens, save_strategy="no", report_to="none", disable_tqdm=True,
        gradient_checkpointing=True, num_iterations=1, beta=0.0, **given,
    )  # fmt: skip
    frozen = policy != "bf16" and precision in frozen_bases()
    trainer = QuantGRPOTrainer(
        model=str(args.model),
        peft_config=LoraConfig(target_modules="all-linear") if frozen else None,
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [f"Question: {row['question']}\nAnswer:" for row in asked]}),
    )
    generate, seconds = trainer.vllm_generation.generate, []

    def timed(*args, **kwargs):
        start = time.perf_counter()
        output = generate(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return output

    trainer.vllm_generation.generate = timed
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "mismatch/kl_k3" in entry]
    found = {name: sum(entry[name] for entry in logs) / len(logs) for name in logs[0] if name.startswith("mismatch/")}
    found["largest difference"] = max(entry["sampling/sampling_logp_difference/max"] for entry in logs)
    return found | {"tokens/s": args.completions * args.new_tokens / seconds[-1], "entropy": logs[-1]["entropy"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl with the columns 'question' and 'answer'")
    parser.add_argument("--model", type=Path, help="what this wrote before; trained if not given, or not there")
    parser.add_argument("--updates", type=int, default=500 if CUDA else 5, help="of the training on the texts")
    parser.add_argument("--precisions", nargs="+", choices=in_vllm(), default=[*unified_flows(), "nvfp4"])
    parser.add_argument("--completions", type=int, default=16 if CUDA else 4)
    parser.add_argument("--new_tokens", type=int, default=4096 if CUDA else 32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default litellm's, if it is installed")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one pair")
    parser.add_argument("--pairs", nargs="+", metavar="SAMPLER/POLICY", help="by default all of `--precisions`")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return report(measure(args))
    args.model = args.model or Path(tempfile.mkdtemp(), "model")
    if not (args.model / "model.safetensors").is_file():
        shape = SHAPE | HEADS if CUDA else TINY
        train(args.model, args.data, args.tokenizer, args.updates, **shape)
    trained = {*unified_flows(), *frozen_bases()}
    pairs = args.pairs or ["bf16/bf16"] + [
        f"{p}/{policy}"
        for p in args.precisions
        for policy in ("bf16", *([p] if p in trained else []), *(["exact"] if p in exact_flows() else []))
    ]
    print(f"{machine()}, {args.completions} completions of {args.new_tokens} tokens, temperature {args.temperature:g}")
    print(
        f"{'sampler/policy':<22}{'KL k3':>10}{'same bits':>11}{'largest':>10}{'tok/s':>9}  KL by position", flush=True
    )
    arguments = {name: str(value) for name, value in vars(args).items() if name not in ("one", "output", "model")}
    results = {}
    for pair in pairs:
        given = [a for i, a in enumerate(sys.argv[1:]) if a != "--model" and sys.argv[i] != "--model"]
        found = results[pair] = in_own_process([*given, "--model", str(args.model), "--one", pair], args.timeout)
        save("unified-mismatch", {"arguments": arguments, "results": results}, args.output)
        if "error" in found:
            print(f"{pair:<22}{found['error']}", flush=True)
            continue
        positions = "  ".join(
            f"{name.rpartition('/')[2]}: {value:.1e}" for name, value in found.items() if "by_position" in name
        )
        print(
            f"{pair:<22}{found['mismatch/kl_k3']:>10.1e}{found['mismatch/same_fraction']:>11.2%}"
            f"{found['largest difference']:>10.1e}{found['tokens/s']:>9.0f}  {positions}",
            flush=True,
        )


if __name__ == "__main__":
    main()
