"""
Measures the speed of weight quantization by Triton kernels and by `trl_quant.formats`, against a plain copy.

    python benchmarks/quantize.py                      # 7B shapes on a GPU, tiny shapes on a CPU
    python benchmarks/quantize.py --shapes 32b --layers 8 --output benchmarks/results

GB/s counts only the necessary bytes: one read of the weight, one write of codes and scales. A second read, which
fp8_tensor and nvfp4 need for the tensor's maximum, therefore lowers GB/s. Times cover all weights in sequence, best of
the rounds, with new memory for the results each time, as in a sync. `nvfp4 given scale` skips the first read.
"""

import argparse
import platform
from pathlib import Path

import torch
from engines import seconds
from raw_results import write_results

from trl_quant import formats


SHAPES = {  # Qwen2.5: (out, in) of the linear layers in one decoder layer, and the number of layers
    "7b": ([(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (18944, 3584), (3584, 18944)], 28),
    "32b": ([(5120, 5120), (1024, 5120), (1024, 5120), (5120, 5120), (27648, 5120), (27648, 5120), (5120, 27648)], 64),
    "tiny": ([(256, 256), (128, 256), (128, 256), (256, 256), (768, 256), (768, 256), (256, 768)], 2),
}


def best(run, rounds: int) -> float:
    """Returns the seconds of the fastest call of `run`, after a warm-up call."""
    run()
    return min(seconds(run) for _ in range(rounds))


def quantizing(quantize, weights: list[torch.Tensor], name: str, scale: torch.Tensor | None):
    return lambda: [quantize(w, name, scale, check=False) for w in weights]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", choices=SHAPES, help="default: 7b on a GPU, tiny on a CPU")
    parser.add_argument("--layers", type=int, help="decoder layers, by default all")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--formats", nargs="+", choices=list(formats.FORMATS), default=list(formats.FORMATS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-torch", action="store_true", help="leave out the torch code, which is slow")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    args = parser.parse_args()

    cuda = args.device.startswith("cuda")
    shapes, layers = SHAPES[args.shapes or ("7b" if cuda else "tiny")]
    layers = args.layers or layers
    machine = torch.cuda.get_device_name(args.device) if cuda else f"{platform.processor() or platform.machine()} CPU"
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    weights = [torch.randn(shape, device=args.device, dtype=dtype) * 0.02 for _ in range(layers) for shape in shapes]
    read = sum(w.nbytes for w in weights)

    copy = best(lambda: [w.clone() for w in weights], args.rounds)
    copy_rate = 2 * read / copy / 1e9
    print(f"{machine}, torch {torch.__version__}, {len(weights)} weights, {read / 1e9:.2f} GB of {args.dtype}")
    print(f"copy: {copy * 1e3:.2f} ms, {copy_rate:.0f} GB/s read and written")
    columns = f"{'format':<18}{'kernel ms':>11}{'GB/s':>8}{'of copy':>9}{'torch ms':>11}{'GB/s':>8}{'kernel is':>12}"
    print(columns)

    kernels = None
    if cuda:
        from trl_quant.kernels import quantize as kernels

    results = {"machine": machine, "bytes": read, "copy_s": copy, "formats": {}}
    runs = [(name, False) for name in args.formats]
    if "nvfp4" in args.formats:
        runs.append(("nvfp4", True))
    for name, given in runs:
        scale = formats.global_scale(weights[0]) if given else None
        moved = sum(w.nbytes + formats.quantize(w, name, scale, check=False).nbytes for w in weights[: len(shapes)])
        moved *= layers
        row: dict[str, float | None] = {"bytes": moved, "kernel_s": None, "torch_s": None}
        if kernels is not None and name in kernels.KERNELS:
            row["kernel_s"] = best(quantizing(kernels.quantize, weights, name, scale), args.rounds)
        if not args.no_torch:
            row["torch_s"] = best(quantizing(formats.quantize, weights, name, scale), min(args.rounds, 2))
        label = f"{name} given scale" if given else name
        results["formats"][label] = row
        print(line(label, row, copy_rate))
    if args.output:
        path = args.output / f"quantize-{machine.replace(' ', '-')}.json.xz"
        write_results(path, results, indent=2)
        print(f"wrote {path}")


def line(label: str, row: dict, copy_rate: float) -> str:
    kernel, torch_time = row["kernel_s"], row["torch_s"]
    out = f"{label:<18}"
    if kernel:
        rate = row["bytes"] / kernel / 1e9
        out += f"{kernel * 1e3:>11.2f}{rate:>8.0f}{rate / copy_rate:>9.0%}"
    else:
        out += f"{'-':>11}{'-':>8}{'-':>9}"
    if torch_time:
        out += f"{torch_time * 1e3:>11.2f}{row['bytes'] / torch_time / 1e9:>8.1f}"
    else:
        out += f"{'-':>11}{'-':>8}"
    return out + (f"{torch_time / kernel:>11.1f}x" if kernel and torch_time else f"{'-':>12}")


if __name__ == "__main__":
    main()
