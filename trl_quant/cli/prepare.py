"""`trl-quant prepare`: writes a quantized copy of a checkpoint.

A vLLM server that samples in INT8, NVFP4 or MXFP4 is started on such a copy, while the trainer keeps the 16-bit one. A
colocated engine takes one as well (`vllm_engine_kwargs={"model": ...}`) and then starts without quantizing first.
"""

import argparse
import sys
from pathlib import Path

from ..formats.checkpoint import quantize_checkpoint, storable


def main(argv: list[str] | None = None) -> None:
    """Quantizes the checkpoint named on the command line, tensor by tensor."""
    parser = argparse.ArgumentParser(prog="trl-quant prepare", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub id or directory of a 16-bit safetensors checkpoint")
    parser.add_argument("--format", required=True, choices=storable(), help="number format of the linear layers")
    parser.add_argument("--output", required=True, help="directory to write, which must not exist")
    args = parser.parse_args(argv)

    import torch
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig

    from ..rollout.vllm.support import quantizers_on, skeleton, unquantized_layers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        source = args.model if Path(args.model).is_dir() else snapshot_download(args.model)
        ignore = unquantized_layers(skeleton(AutoConfig.from_pretrained(source)))
        written = quantize_checkpoint(source, args.output, args.format, ignore, device=device, **quantizers_on(device))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{written}: {args.model} in {args.format}")
