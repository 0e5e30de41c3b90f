"""
Measures a linear layer that trains in FP8 or INT8 (`trl_quant.layers.UnifiedLinear`) against `nn.Linear` in BF16.

    python benchmarks/unified.py                       # 8B shapes, about a minute on a GPU; on a CPU tiny ones
    python benchmarks/unified.py --precisions fp8_block --tokens 8192 --output benchmarks/results
    python benchmarks/unified.py --parts quantizers blocks      # quantizers alone, and layers that share inputs

The first table has whole layers, forward and backward as a trainer calls them, with a trained and with a frozen weight
(as under LoRA). It includes all quantization but the weight's, which runs once a step and stands in the second table.
`x` is the speed relative to BF16. `limit` is the share of the card's peak rate, if all products were in the layer's
precision.

The second table has the parts of a layer. `quantize` quantizes the weight, once a step. `x` and `dy` quantize inputs
and gradients, in one layout for a frozen weight and in both for a trained one. `Y`, `dX` and `dW` are the products with
their scaling. `limit` is for Y alone, and `dB` is the SQNR of Y against BF16.

`quantizers` times each quantizing kernel, with several launch settings, against the torch code that it replaces. `GB/s`
counts one read and one write of the necessary bytes, and `share` compares that with a plain copy. `blocks` times
forward and backward of q, k and v and of an MLP, whose inputs are quantized by each layer (`apart`) or once, together
with the activation (`shared`), against BF16.
"""

import argparse
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from engines import CUDA, call_seconds, machine, save, wait
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trl_quant.formats import quantize
from trl_quant.formats.fp8 import FP8Block
from trl_quant.layers import UnifiedLinear, products, quantizers
from trl_quant.layers.gated import silu_mul
from trl_quant.layers.norm import FusedRMSNorm
from trl_quant.precisions import unified_flows


SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096), (4096, 6144)) if CUDA else ((256, 384), (384, 256))  # (in, out)
TOKENS = (2048, 4096, 8192, 16384) if CUDA else (128, 300)
BF16_RATE = 989e12  # dense BF16 operations a second of an H100 and an H200; in 8 bits twice as many
DEVICE = "cuda" if CUDA else "cpu"


def graph_seconds(run) -> float:
    """Times one call without launches: in a CUDA graph of several calls, on a GPU."""
    if not CUDA:
        return call_seconds(run)
    run()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
    return call_seconds(graph.replay, budget=0.02) / 3


def sqnr(given: torch.Tensor, right: torch.Tensor) -> float:
    right = right.double()
    return (20 * torch.log10(right.norm() / (given.double() - right).norm())).item()


def limit(tokens: int, shape: tuple[int, int], count: int, precision: str) -> float:
    """Returns the least seconds that `count` products can take."""
    return 2 * count * tokens * shape[0] * shape[1] / (BF16_RATE * (1 if precision == "bf16" else 2))


def layer_of(shape: tuple[int, int], precision: str, trained: bool) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(*shape, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(trained)
    return linear if precision == "bf16" else UnifiedLinear.from_linear(linear, precision)


def layers(args, results: dict, deadline: float) -> None:
    ways = ("bf16", *args.precisions)
    print(f"{'layer':<14}{'tokens':>7} {'weight':<8}{'bf16 ms':>9}{'limit':>7}", end="")
    print("".join(f"{way + ' ms':>14}{'x':>6}{'limit':>7}" for way in args.precisions))
    for shape in SHAPES:
        for trained in (True, False):
            for tokens in sorted(args.tokens, reverse=True):  # large layers matter most
                name = f"{shape[0]}x{shape[1]}"
                if time.perf_counter() > deadline:
                    print(f"{name:<14}{tokens:>7} left out: out of time")
                    continue
                row, cells = {}, ""
                for way in ways:
                    try:
                        layer = layer_of(shape, way, trained)
                        x = torch.randn(tokens, shape[0], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
                        dy = torch.randn(tokens, shape[1], device=DEVICE, dtype=torch.bfloat16)
                        wanted = (x, layer.weight) if trained else (x,)

                        def run(layer=layer, x=x, dy=dy, wanted=wanted):
                            return torch.autograd.grad(layer(x.view_as(x)), wanted, dy)  # not the last input

                        took = call_seconds(run)
                        share = limit(tokens, shape, 3 if trained else 2, way) / took
                        row[way] = {"ms": took * 1e3, "limit": share}
                        del layer, x, dy, wanted, run
                    except Exception:
                        print(f"{name} of {tokens} tokens, {way}:")
                        traceback.print_exc()
                    if way not in row:
                        cells += f"{'-':>9}{'-':>7}" if way == "bf16" else f"{'-':>14}{'-':>6}{'-':>7}"
                        continue
                    row[way]["x"] = row["bf16"]["ms"] / row[way]["ms"] if "bf16" in row else float("nan")
                    cells += f"{row[way]['ms']:>{9 if way == 'bf16' else 14}.3f}"
                    cells += ("" if way == "bf16" else f"{row[way]['x']:>6.2f}") + f"{row[way]['limit']:>7.0%}"
                kind = "trained" if trained else "frozen"
                print(f"{name:<14}{tokens:>7} {kind:<8}{cells}", flush=True)
                results[f"{name} {tokens} {kind}"] = row


def parts_of(shape: tuple[int, int], tokens: int, precision: str) -> tuple[dict, float]:
    """Returns the calls of a forward and a backward pass by name, and the SQNR of Y."""
    torch.manual_seed(0)
    x = torch.randn(tokens, shape[0], device=DEVICE, dtype=torch.bfloat16)
    dy = torch.randn(tokens, shape[1], device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(shape[1], shape[0], device=DEVICE, dtype=torch.bfloat16) / 64
    if precision == "bf16":
        return {"Y": lambda: F.linear(x, weight), "dX": lambda: dy @ weight, "dW": lambda: dy.t() @ x}, float("inf")
    if CUDA:
        from trl_quant.kernels.quantize import quantize as quantize_weight
    else:
        quantize_weight = quantize
    w, q = quantize_weight(weight, precision, check=False), quantizers.quantize_input(x, precision)
    calls = {
        "quantize": lambda: quantize_weight(weight, precision, check=False),
        "x": lambda: quantizers.quantize_input(x, precision),
        "Y": lambda: products.product(q, w, None, x.dtype),
    }
    if precision == "fp8_block":
        small, w_t = quantizers.LEAST_GRADIENT, products.transposed(w)
        (rows, columns), (_, x_t) = quantizers.quantize_for_both(dy, small), quantizers.quantize_for_both(x)
        calls |= {
            "x, both": lambda: quantizers.quantize_for_both(x),
            "dy, both": lambda: quantizers.quantize_for_both(dy, small),
            "transpose": lambda: products.transposed(w),
            "dX": lambda: products.product(rows, w_t, None, dy.dtype),
            "dW": lambda: products.weight_gradient(columns, x_t, dy.dtype),
        }
    else:
        calls |= {
            "dX": lambda: products.input_gradient(dy, w),
            "dW": lambda: dy.t() @ products.dequantize(q, dy.dtype),
        }
    return calls, sqnr(calls["Y"](), F.linear(x, weight))


def parts(args, results: dict, deadline: float) -> None:
    names = ("quantize", "transpose", "x", "x, both", "dy, both", "Y", "dX", "dW")
    print(
        f"\nmicroseconds\n{'layer':<14}{'tokens':>7} {'precision':<10}" + "".join(f"{name:>10}" for name in names),
        end="",
    )
    print(f"{'limit':>7}{'dB':>6}")
    for tokens in sorted(args.tokens, reverse=True):
        for shape in SHAPES:
            for precision in ("bf16", *args.precisions):
                name = f"{shape[0]}x{shape[1]}"
                if time.perf_counter() > deadline:
                    print(f"{name:<14}{tokens:>7} {precision:<10} left out: out of time")
                    continue
                try:
                    calls, quality = parts_of(shape, tokens, precision)
                    row = {part: graph_seconds(call) * 1e6 for part, call in calls.items()}
                    del calls
                    row |= {"limit": limit(tokens, shape, 1, precision) / (row["Y"] / 1e6), "dB": quality}
                except Exception:
                    print(f"parts of {name}, {tokens} tokens, {precision}:")
                    traceback.print_exc()
                    continue
                cells = "".join(f"{row[part]:>10.1f}" if part in row else f"{'-':>10}" for part in names)
                print(f"{name:<14}{tokens:>7} {precision:<10}{cells}{row['limit']:>7.0%}{quality:>6.0f}", flush=True)
                results[f"parts {name} {tokens} {precision}"] = row


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def passes_of(tokens: int, features: int) -> dict:
    """Returns the passes over (tokens, features) by name: bytes for each value, and the call."""
    from trl_quant.kernels import unified as kernels

    x, up, dy, y = (bfloat16(tokens, features) for _ in range(4))
    codes, small = quantizers.quantize_input(x, "fp8_block").values, FP8Block.least_amax
    ways = ({"num_warps": 4}, {"num_warps": 8}, {"num_warps": 16}, {"num_warps": 16, "maxnreg": 64})

    def launched(way: dict, both: bool, up: torch.Tensor | None):
        kernels.LAUNCH[up is not None] = way
        kernels.groups(x, small, False, both, up)

    def by_torch(leaves):
        return torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, dy)

    calls = {"copy": (4, lambda: y.copy_(x)), "transpose of codes": (2, lambda: kernels.transpose(codes))}
    for both, given in ((True, None), (False, None), (True, up), (False, up)):
        count = (2 if given is None else 6) + (2 if both else 1)
        name = f"{'' if given is None else 'silu, '}fp8_block, {'both' if both else 'one'}"
        for way in ways:
            how = " ".join(map(str, way.values()))
            calls[f"{name}: {how}"] = count, lambda way=way, both=both, given=given: launched(way, both, given)
        if given is not None:
            apart = quantizers.quantize_for_both if both else lambda x: quantizers.quantize_input(x, "fp8_block")
            calls[f"{name}: torch's, then codes"] = count, lambda apart=apart: apart(F.silu(x) * up)
        elif both:
            calls[f"{name}: one after the other"] = (
                count,
                lambda: (
                    quantizers.quantize_input(x, "fp8_block"),
                    quantizers.quantize_input(x.t().contiguous(), "fp8_block"),
                ),
            )
    for format in ("fp8", "int8"):
        calls[format] = 3, lambda format=format: quantizers.quantize_input(x, format)
        rows = lambda format=format: kernels.rows(x, format, True, up)  # noqa: E731
        calls[f"silu, {format}"] = 7, rows
        apart = lambda format=format: quantizers.quantize_input(F.silu(x) * up, format)  # noqa: E731
        calls[f"silu, {format}: torch's, then codes"] = 7, apart
    leaves = [each.clone().requires_grad_() for each in (x, up)]
    calls["gradients of silu"] = 10, lambda: kernels.silu_mul_backward(dy, x, up)
    calls["gradients of silu: torch's, with forward"] = 10, lambda: by_torch(leaves)
    theirs = LlamaRMSNorm(features).to(DEVICE, torch.bfloat16)
    for name, norm in {"transformers'": theirs, "kernel": FusedRMSNorm(theirs)}.items():
        calls[f"norm: {name}"] = 4, lambda norm=norm: norm(x)
        calls[f"norm: {name}, forward and backward"] = (
            10,
            lambda norm=norm: torch.autograd.grad(norm(leaves[0]), [leaves[0], norm.weight], dy),
        )
        for format in unified_flows():
            apart = lambda norm=norm, format=format: quantizers.quantize_input(norm(x), format)  # noqa: E731
            calls[f"norm: {name}, then {format}"] = 5, apart
    for format in unified_flows():
        fed = FusedRMSNorm(theirs, layer_of((features, 128), format, False))
        calls[f"norm: kernel, {format} in one pass"] = 5, lambda fed=fed: fed(x)
    return calls


def time_quantizers(args, results: dict, deadline: float) -> None:
    from trl_quant.kernels import unified as kernels

    usual = dict(kernels.LAUNCH)
    print(f"\n{'numbers':<14}{'pass':<46}{'us':>9}{'GB/s':>8}{'share':>7}")
    for tokens in sorted(args.tokens, reverse=True):
        for features in sorted({features for shape in SHAPES for features in shape}):
            copy = float("nan")
            for name, (count, call) in passes_of(tokens, features).items():
                if time.perf_counter() > deadline:
                    print(f"{tokens}x{features}: {name} left out: out of time")
                    continue
                try:
                    seconds = graph_seconds(call) if "forward" not in name else call_seconds(call)
                except Exception:
                    print(f"{tokens}x{features}: {name}")
                    traceback.print_exc()
                    continue
                rate = count * tokens * features / seconds
                copy = rate if name == "copy" else copy
                shares = f"{seconds * 1e6:>9.1f}{rate / 1e9:>8.0f}{rate / copy:>7.0%}"
                print(f"{f'{tokens}x{features}':<14}{name:<46}{shares}", flush=True)
                results[f"{name} {tokens}x{features}"] = {"us": seconds * 1e6, "GB/s": rate / 1e9}
            kernels.LAUNCH.update(usual)


def blocks_of(tokens: int, precision: str, trained: bool) -> dict:
    """Returns the calls of a forward and a backward pass, by name and way."""
    hidden, features = (4096, 14336) if CUDA else SHAPES[0]
    qkv = [layer_of((hidden, outputs), precision, trained) for outputs in (hidden, hidden // 4, hidden // 4)]
    gate, up, down = (layer_of(shape, precision, trained) for shape in 2 * [(hidden, features)] + [(features, hidden)])
    x, dy = bfloat16(tokens, hidden).requires_grad_(), bfloat16(tokens, hidden)

    def run(function, *layers):
        y = function(x.view_as(x))
        return torch.autograd.grad(y, [x, *(layer.weight for layer in layers if trained)], [dy] if len(y) == tokens else
                                   [each.new_ones(each.shape) for each in y])  # fmt: skip

    def fused(x):
        return down(silu_mul(gate(x), up(x), precision, trained))

    attention = {"apart": lambda x: [layer(x.view_as(x)) for layer in qkv], "shared": lambda x: [q(x) for q in qkv]}
    mlp = {"apart": lambda x: down(F.silu(gate(x.view_as(x))) * up(x.view_as(x))), "shared": fused}
    if precision == "bf16":
        mlp.pop("shared"), attention.pop("shared")
    return {
        ("q, k, v", way): (lambda function=function: run(function, *qkv)) for way, function in attention.items()
    } | {("MLP", way): (lambda function=function: run(function, gate, up, down)) for way, function in mlp.items()}


def blocks(args, results: dict, deadline: float) -> None:
    print(
        f"\n{'block':<9}{'tokens':>7} {'weights':<9}{'precision':<10}{'apart ms':>10}{'x':>6}{'shared ms':>11}{'x':>6}"
    )
    for tokens in sorted(args.tokens, reverse=True):
        for trained in (True, False):
            plain = {}
            for precision in ("bf16", *args.precisions):
                if time.perf_counter() > deadline:
                    print(f"{tokens} tokens, {precision} left out: out of time")
                    continue
                try:
                    took = {key: call_seconds(call) for key, call in blocks_of(tokens, precision, trained).items()}
                except Exception:
                    print(f"blocks of {tokens} tokens, {precision}:")
                    traceback.print_exc()
                    continue
                for block in ("q, k, v", "MLP"):
                    plain.setdefault(block, took[block, "apart"])
                    ways = [took[block, way] for way in ("apart", "shared") if (block, way) in took]
                    cells = "".join(f"{way * 1e3:>{10 + i}.3f}{plain[block] / way:>6.2f}" for i, way in enumerate(ways))
                    kind = "trained" if trained else "frozen"
                    print(f"{block:<9}{tokens:>7} {kind:<9}{precision:<10}{cells}", flush=True)
                    results[f"{block} {tokens} {kind} {precision}"] = {"ms": [1e3 * way for way in ways]}


PARTS = {"layers": layers, "parts": parts, "quantizers": time_quantizers, "blocks": blocks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--precisions", nargs="+", choices=unified_flows(), default=unified_flows())
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["layers", "parts"])
    parser.add_argument("--seconds", type=float, default=80, help="after which no more is measured")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    args = parser.parse_args()

    start, results = time.perf_counter(), {}
    print(f"{machine()}, torch {torch.__version__}")
    for i, part in enumerate(args.parts, 1):
        try:
            PARTS[part](args, results, start + i / len(args.parts) * args.seconds)
        except Exception:
            traceback.print_exc()
    print(f"{time.perf_counter() - start:.0f} s")
    save("unified", results, args.output)


if __name__ == "__main__":
    main()
