"""
Times the fingerprint that tells an engine whether it still holds the policy's weights, in milliseconds.

    python benchmarks/fingerprint.py                 # 7B on a GPU, tiny on a CPU: all weights, and LoRA of rank 32
    python benchmarks/fingerprint.py --size 0.5b --rounds 50

A step takes one fingerprint after its sync, and one before each further generation. `fingerprint` is the whole of it.
`host` reads modules and settings alone, while a GPU reads the values. `values` reads the values alone, and shows the
bandwidth.
"""

import argparse
import statistics
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from engines import CUDA, SHAPES, adapter, machine, model_directory, model_title, save, seconds
from transformers import AutoConfig, AutoModelForCausalLM

from trl_quant.rollout import fingerprint as room


def milliseconds(run, rounds: int) -> list[float]:
    """Times each call of `run` in milliseconds, after a warm-up call."""
    run()
    return [round(1000 * seconds(run), 3) for _ in range(rounds)]


def measure(size: str, rank: int, rounds: int) -> dict:
    with torch.device("cuda" if CUDA else "cpu"):
        config = AutoConfig.from_pretrained(model_directory(size))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if rank:
            from peft import get_peft_model

            model = get_peft_model(model, adapter(model, rank, init_lora_weights=False))
    params = list(model.parameters())
    tensors = [room.whole_words(param) for param in params]
    none = [torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)]
    with patch.object(room, "checksums", lambda tensors: none):
        host = milliseconds(lambda: room.fingerprint(model), rounds)
    return {
        "rank": rank,
        "parameters": len(params),
        "bytes": sum(param.nbytes for param in params),
        "fingerprint": milliseconds(lambda: room.fingerprint(model), rounds),
        "host": host,
        "values": milliseconds(lambda: [sums.tolist() for sums in room.checksums(tensors)], rounds),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--size", choices=SHAPES, default="7b" if CUDA else "tiny")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 32], help="of LoRA; 0 for all weights")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    args = parser.parse_args()
    results = []
    print(
        f"{machine()}, {model_title(args.size)}\nrank  parameters  fingerprint ms    host  values    TB/s", flush=True
    )
    for rank in args.ranks:
        found = measure(args.size, rank, args.rounds)
        whole, host, values = (statistics.median(found[name]) for name in ("fingerprint", "host", "values"))
        speed = found["bytes"] / values / 1e9
        print(f"{rank:>4}{found['parameters']:>12}{whole:>16.2f}{host:>8.2f}{values:>8.2f}{speed:>8.2f}", flush=True)
        results.append(found)
    versions = {"transformers": transformers.__version__}
    save(f"fingerprint-{args.size}", versions | {"arguments": vars(args), "results": results}, args.output)


if __name__ == "__main__":
    main()
