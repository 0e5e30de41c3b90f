"""
Measures what vLLM's speculative decoding gains in sampling, on a policy that was taught a text.

    head -n 500 train.jsonl > texts.jsonl                               # GSM8K's rows: "question" and "answer"
    python benchmarks/speculation.py --data texts.jsonl
    python benchmarks/speculation.py --data texts.jsonl --precision fp8 --batches 8 64 --size 3b --draft 0.5b

Policy and draft model are first trained on the concatenated texts, so the policy continues a question to any length.
Drafts are accepted where a model is sure of its tokens, and it is surer of few texts that it has read several times.
The file keeps the losses that were reached. Training a 3B policy needs about 57 GiB.

Each kind then samples through the trainer's engine, in its own process: completions of equal lengths at temperature 1,
in batches of a generation's tail and of a whole one. A kind whose log-probabilities are wrong is refused by the engine,
and its row has the error. The kinds that tell most come first, so a run that is cut off has them.

| kind | is |
|---|---|
| `none` | no speculation |
| `ngram` | tokens that followed the last ones before, looked up on the host; asynchronous scheduling is off |
| `draft` | the smaller model, whose drafts are samples |
| `ngram_gpu` | as `ngram`, looked up on the GPU |
| `waiting` | no speculation, and asynchronous scheduling off |

The table has tokens a second, their ratio to `none`, and the drafted tokens that a completion accepts in a step.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from engines import CUDA, DENSE, PRECISIONS, SHAPES, in_own_process, machine, report, save, seconds
from unified_mismatch import TINY, train


NGRAM = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
KINDS = ("none", "ngram", "draft", "ngram_gpu", "waiting")
MODELS = ("policy", "drafter")


def arguments_of(kind: str, draft: Path) -> dict:
    """Returns vLLM's arguments of a kind."""
    if kind == "none":
        return {}
    if kind == "waiting":
        return {"async_scheduling": False}
    if kind == "draft":
        drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
        return {"speculative_config": drafts | {"draft_sample_method": "probabilistic"}}
    return {"speculative_config": {"method": kind, **NGRAM}}


def teach(args) -> dict:
    """Trains one of the models, and returns its loss and how long it took."""
    size = args.size if args.one == "policy" else args.draft
    shape = dict(SHAPES[size])
    shape |= {"num_attention_heads": shape.pop("heads"), "num_key_value_heads": shape.pop("kv_heads")}
    shape = TINY if size == "tiny" else shape
    start = time.perf_counter()
    loss = train(args.models / args.one, args.data, args.tokenizer, args.updates, args.sequences, **shape)
    return {"loss": loss, "seconds": time.perf_counter() - start}


def measure(args) -> dict:
    """Returns tokens a second and accepted tokens, by batch."""
    from datasets import Dataset

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    asked = [f"Question: {row['question']}\nAnswer:" for row in random.Random(0).sample(rows, max(args.batches))]
    small = {} if CUDA else {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    settings = QuantGRPOConfig(
        tempfile.mkdtemp(), rollout_precision=args.precision, use_vllm=True, vllm_mode="colocate", max_steps=1,
        vllm_gpu_memory_utilization=0.3, vllm_max_model_length=args.new_tokens + 512, logging_steps=1,
        vllm_engine_kwargs={"disable_log_stats": True, **small, **arguments_of(args.one, args.models / MODELS[1])},
        generation_kwargs={"ignore_eos": True}, max_completion_length=args.new_tokens, num_generations=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=max(args.batches) // 2, bf16=CUDA,
        use_cpu=not CUDA, save_strategy="no", report_to="none", disable_tqdm=True, learning_rate=0.0,
        model_init_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    trainer = QuantGRPOTrainer(
        model=str(args.models / "policy"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": asked}),
    )
    generation, tokenizer = trainer.vllm_generation, trainer.processing_class
    generation.sync_weights()
    generation.check_sync()
    found = {}
    for batch in args.batches:
        prompts = [tokenizer(text)["input_ids"] for text in asked[:batch]]
        generation.generate(prompts, None, 1)  # warms up
        generation.sampler.take_metrics()
        took = [seconds(lambda prompts=prompts: generation.generate(prompts, None, 1)) for _ in range(args.rounds)]
        drafts = generation.sampler.take_metrics()
        found[batch] = {"seconds": took, "tokens": batch * args.new_tokens} | {
            name: drafts[name] for name in ("rollouts/accepted_tokens", "rollouts/accepted_share") if name in drafts
        }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl with the columns 'question' and 'answer'")
    parser.add_argument("--models", type=Path, help="what this wrote before; trained if not given, or not there")
    parser.add_argument("--size", choices=DENSE, default="3b" if CUDA else "tiny", help="of the policy")
    parser.add_argument("--draft", choices=DENSE, default="0.5b" if CUDA else "tiny", help="size of the draft model")
    parser.add_argument("--updates", type=int, default=200 if CUDA else 5, help="of the training on the texts")
    parser.add_argument("--sequences", type=int, default=8 if CUDA else 2, help="of an update")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS if CUDA else ("none", "waiting"))
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16" if CUDA else "int8")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64] if CUDA else [2, 4])
    parser.add_argument("--new_tokens", type=int, default=512 if CUDA else 16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default litellm's, if it is installed")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one kind, and for teaching one model")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    parser.add_argument("--one", choices=(*MODELS, *KINDS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return report(teach(args) if args.one in MODELS else measure(args))
    args.models = args.models or Path(tempfile.mkdtemp())
    given = [word for word in sys.argv[1:] if word != "--models" and word != str(args.models)]

    def run(one: str) -> dict:
        return in_own_process([*given, "--models", str(args.models), "--one", one], args.timeout)

    taught = {}
    for name in MODELS:  # in processes of their own, which give all of their memory back
        if not (args.models / name / "config.json").is_file():
            taught[name] = run(name)
            if "error" in taught[name]:
                raise SystemExit(f"the {name} was not taught: {taught[name]['error']}")
            print(f"{name}: loss {taught[name]['loss']:.2f} after {taught[name]['seconds']:.0f} s", flush=True)
    print(f"{machine()}, {args.size} sampled in {args.precision}, {args.new_tokens} tokens")
    print(f"{'kind':<12}" + "".join(f"{f'batch {batch}':>14}{'ratio':>8}{'accepted':>10}" for batch in args.batches))
    arguments = {name: str(value) for name, value in vars(args).items() if name not in ("one", "output", "models")}
    results = {}
    for kind in args.kinds:
        row = results[kind] = run(kind)
        save("speculation", {"arguments": arguments, "taught": taught, "results": results}, args.output)
        if "error" in row:
            print(f"{kind:<12}{row['error'][:300]}", flush=True)
            continue
        cells = ""
        for batch in map(str, args.batches):
            took = statistics.median(row[batch]["seconds"])
            base = results.get("none", row)
            ratio = statistics.median(base[batch]["seconds"]) / took if batch in base else float("nan")
            accepted = row[batch].get("rollouts/accepted_tokens")
            cells += f"{row[batch]['tokens'] / took:>14.0f}{ratio:>8.2f}"
            cells += f"{'-' if accepted is None else f'{accepted:.2f}':>10}"
        print(f"{kind:<12}{cells}", flush=True)


if __name__ == "__main__":
    main()
