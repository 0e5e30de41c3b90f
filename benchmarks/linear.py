"""
Measures the speed of a linear layer that is frozen in four bits (`trl_quant.layers.FrozenLinear`), on a GPU.

    python benchmarks/linear.py                        # 7B and 32B shapes, NVFP4, about a minute
    python benchmarks/linear.py --precision mxfp4 --sizes 7b --tokens 4096 --output benchmarks/results

The first table has each product of a layer, `X W^T` (forward) and `dY W` (dX), in three ways: `F.linear` in BF16,
cuBLAS on the dequantized weight, and the kernel that decodes while it multiplies. A time is the GPU's in a CUDA graph,
over copies of the weight that together exceed the L2 cache. `limit` is the share of the card's limit, which is the
longer of two times: moving the necessary bytes at its bandwidth, or multiplying at its dense BF16 rate. `dB` is the
SQNR against `F.linear` on the dequantized weight. The last lines show where the kernel is faster, which sets
`FUSED_TOKENS` and `FUSED_OUTPUTS` of `layers/weight_only.py`.

The second table has a layer with its adapter, forward and backward: PEFT's on a BF16 layer, PEFT's on a frozen layer,
and the joined branch.
"""

import argparse
import time
import traceback
from collections import defaultdict
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from engines import BANDWIDTH, DENSE, FLOPS, SHAPES, call_seconds, machine, of_card, save
from torch import nn

from trl_quant.formats import quantize
from trl_quant.layers import FrozenLinear, weight_only


CACHE = 128 << 20  # more than any L2
MOST_FUSED = 1024  # tokens; the kernel decodes the weight again for each tile of tokens
NEVER, ALWAYS = 0, 1 << 40  # tokens among which `FUSED_TOKENS` is sought


def shapes_of(size: str) -> dict[str, tuple[int, int]]:
    """Returns layer -> (out, in). Layers of the same shape are listed once."""
    shape = SHAPES[size]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["heads"] * shape["kv_heads"]
    return {"q,o": (hidden, hidden), "k,v": (kv, hidden), "gate,up": (inner, hidden), "down": (hidden, inner)}


def replayed_seconds(calls: list, budget: float = 0.03) -> float:
    """Returns the GPU's time of one call: the mean over a CUDA graph of all calls, best of several replays."""
    for call in calls[:2]:
        call()  # compiles and tunes kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    best, spent = float("inf"), 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    while spent < budget:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end) / 1e3
        best, spent = min(best, elapsed), spent + elapsed
    return best / len(calls)


def sqnr(given: torch.Tensor, right: torch.Tensor) -> float:
    """Returns the signal-to-quantization-noise ratio in dB; infinite for equal tensors."""
    right = right.double()
    return (20 * torch.log10(right.norm() / (given.double() - right).norm())).item()


class Ways:
    """The three ways to multiply, as functions of the inputs and the index of a copy of the layer."""

    def __init__(self, shape: tuple[int, int], precision: str):
        layer = FrozenLinear(shape[1], shape[0], False, precision, torch.bfloat16, device="cuda")
        layer.fill(quantize(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02, layer.format))
        layers = [layer, *(deepcopy(layer) for _ in range(CACHE // (shape[0] * shape[1] // 2)))]
        self.stored = [copied.stored() for copied in layers]
        self.numbers = layer.dequantize()
        self.dense = [self.numbers, *(self.numbers.clone() for _ in range(CACHE // self.numbers.nbytes))]
        stored = sum(parameter.nbytes for parameter in layer.parameters())
        self.bytes = {"bf16": self.numbers.nbytes, "dequantize": stored, "fused": stored}

    def calls(self, way: str, x: torch.Tensor, forward: bool) -> list:
        if way == "bf16":
            return [partial(F.linear, x, weight if forward else weight.t()) for weight in self.dense]
        return [partial(self.frozen, way, x, stored, forward) for stored in self.stored]

    def frozen(self, way: str, x: torch.Tensor, stored: tuple, forward: bool) -> torch.Tensor:
        weight_only.FUSED_TOKENS, weight_only.FUSED_OUTPUTS = (ALWAYS, 1) if way == "fused" else (NEVER, 1)
        return weight_only.weight_only_product(x, None, *stored, forward)


def products(args, results: dict, deadline: float) -> None:
    wins = defaultdict(dict)
    ways = ("bf16", "dequantize", "fused")
    print(f"{'layer':<22}{'tokens':>7} " + "".join(f"{way + ' us':>14}{'limit':>7}{'dB':>6}" for way in ways))
    for size in args.sizes:
        for name, shape in shapes_of(size).items():
            try:
                layer = Ways(shape, args.precision)
            except Exception:
                traceback.print_exc()
                continue
            for forward in (True, False):
                for tokens in args.tokens:
                    label = f"{size} {name} {'forward' if forward else 'dX'}"
                    if time.perf_counter() > deadline:
                        print(f"{label:<22}{tokens:>7} left out: out of time")
                        continue
                    x = torch.randn(tokens, shape[1] if forward else shape[0], device="cuda", dtype=torch.bfloat16)
                    right = F.linear(x, layer.numbers if forward else layer.numbers.t())
                    row = {}
                    for way in ways:
                        if way == "fused" and tokens > MOST_FUSED:
                            continue
                        try:
                            calls = layer.calls(way, x, forward)
                            given = calls[0]()
                            took = replayed_seconds(calls if tokens <= 4096 else calls[:2])
                            moved = layer.bytes[way] + x.nbytes + given.nbytes
                            limit = max(moved / of_card(BANDWIDTH), 2 * tokens * shape[0] * shape[1] / of_card(FLOPS))
                            row[way] = {"s": took, "limit": limit / took, "dB": sqnr(given, right)}
                            del calls, given
                        except Exception:
                            print(f"{label} of {tokens} tokens, {way}:")
                            traceback.print_exc()
                            torch.cuda.synchronize()
                    cells = "".join(
                        f"{row[way]['s'] * 1e6:>14.1f}{row[way]['limit']:>7.0%}{row[way]['dB']:>6.0f}"
                        if way in row
                        else f"{'-':>14}{'-':>7}{'-':>6}"
                        for way in ways
                    )
                    print(f"{label:<22}{tokens:>7} {cells}", flush=True)
                    results[f"{label} {tokens}"] = row
                    if "fused" in row and "dequantize" in row:
                        wins[tokens][label] = row["dequantize"]["s"] / row["fused"]["s"]
            del layer
            torch.cuda.empty_cache()
    for tokens, gains in sorted(wins.items()):
        won = sum(gain > 1 for gain in gains.values())
        low, high = min(gains.values()), max(gains.values())
        print(f"{tokens} tokens: the kernel wins {won} of {len(gains)} products, {low:.2f}x to {high:.2f}x")


def adapters(args, results: dict, deadline: float) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear

    from trl_quant.policy.adapters import with_frozen_layers

    print(f"\nforward and backward with an FP32 adapter of rank {args.rank}, under BF16 autocast")
    ways = ("PEFT, BF16", "PEFT, frozen", "joined")
    print(
        f"{'layer':<22}{'tokens':>7} "
        + "".join(f"{way + ' us':>18}{'saved MiB':>11}" for way in ways)
        + "     joined is"
    )
    for size in args.sizes:
        for name, shape in shapes_of(size).items():
            for tokens in [tokens for tokens in args.tokens if tokens >= 64]:
                if time.perf_counter() > deadline:
                    print(f"{size} {name:<18}{tokens:>7} left out: out of time")
                    continue
                row, cells = {}, ""
                for way in ways:
                    try:
                        plain = nn.Linear(shape[1], shape[0], bias=False, device="cuda", dtype=torch.bfloat16)
                        config = LoraConfig(r=args.rank, target_modules=["0"], init_lora_weights=False)
                        if way != "PEFT, BF16":
                            plain = FrozenLinear.from_linear(plain, args.precision)
                            config = with_frozen_layers(config)
                        layer = get_peft_model(nn.Sequential(plain), config).base_model.model[0]
                        forward = type(layer).forward if way == "joined" else Linear.forward
                        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
                        dy = torch.randn(tokens, shape[0], device="cuda", dtype=torch.bfloat16)
                        parameters = (x, layer.lora_A["default"].weight, layer.lora_B["default"].weight)

                        def run(layer=layer, forward=forward, x=x, dy=dy, parameters=parameters):
                            with torch.autocast("cuda", dtype=torch.bfloat16):
                                y = forward(layer, x)
                            return torch.autograd.grad(y, parameters, dy)

                        row[way] = {"s": call_seconds(run, budget=0.06), "saved": saved_by(layer, forward, x)}
                        cells += f"{row[way]['s'] * 1e6:>18.1f}{row[way]['saved'] / 2**20:>11.1f}"
                    except Exception:
                        print(f"{size} {name} of {tokens} tokens, {way}:")
                        traceback.print_exc()
                        cells += f"{'-':>18}{'-':>11}"
                if "joined" in row and "PEFT, BF16" in row:
                    cells += f"{row['joined']['s'] / row['PEFT, BF16']['s']:>13.2f}x"
                print(f"{size + ' ' + name:<22}{tokens:>7} {cells}", flush=True)
                results[f"{size} {name} lora {tokens}"] = row
                torch.cuda.empty_cache()


def saved_by(layer: nn.Module, forward, x: torch.Tensor) -> int:
    """Returns the bytes saved between forward and backward, without the output."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = forward(layer, x)
    return torch.cuda.memory_allocated() - before - y.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--sizes", nargs="+", choices=DENSE, default=["7b", "32b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 64, 256, 1024, 4096, 16384])
    parser.add_argument("--precision", choices=FrozenLinear.precisions(), default="nvfp4")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=80, help="after which no more is measured")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark measures Triton kernels against cuBLAS: it needs a CUDA device.")

    start, default, results = time.perf_counter(), (weight_only.FUSED_TOKENS, weight_only.FUSED_OUTPUTS), {}
    print(f"{machine()}, torch {torch.__version__}, {args.precision}")
    for part, share in ((products, 0.7), (adapters, 1.0)):
        try:
            part(args, results, start + share * args.seconds)
        except Exception:
            traceback.print_exc()
        weight_only.FUSED_TOKENS, weight_only.FUSED_OUTPUTS = default
    print(f"{time.perf_counter() - start:.0f} s")
    save("linear", results, args.output)


if __name__ == "__main__":
    main()
