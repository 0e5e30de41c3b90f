"""`trl-quant prepare`: writes a quantized copy of a checkpoint.

A vLLM server that samples in INT8, NVFP4 or MXFP4 is started on such a copy, while the trainer keeps the 16-bit one. A
colocated engine takes one as well (`vllm_engine_kwargs={"model": ...}`) and then starts without quantizing first.
"""

import argparse
from pathlib import Path

from ..formats.checkpoint import CODE, FILES, INDEX, check_target, linear_layers, quantize_checkpoint, storable


def main(argv: list[str] | None = None) -> None:
    """Quantizes the checkpoint named on the command line, tensor by tensor."""
    parser = argparse.ArgumentParser(prog="trl-quant prepare", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub id or directory of a 16-bit safetensors checkpoint")
    parser.add_argument("--format", required=True, choices=storable(), help="number format of the linear layers")
    parser.add_argument("--output", required=True, help="directory to write, which must not exist")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the checkpoint's own Python, and copy it")
    args = parser.parse_args(argv)

    import torch
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig

    from ..rollout.vllm.support import quantized_layers, quantizers_on, skeleton, unquantized_layers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    trust, options = args.trust_remote_code, {"device": device, **quantizers_on(device)}
    check_target(args.output)
    source = args.model
    if not Path(source).is_dir():
        needed = [*FILES, INDEX, "model*.safetensors", *([CODE] if trust else [])]
        source = snapshot_download(source, revision=args.revision, allow_patterns=needed, ignore_patterns="*/*")
    elif args.revision is not None:
        raise ValueError(f"`--revision` {args.revision}, but {source} is a directory, which has no revisions.")
    policy = skeleton(AutoConfig.from_pretrained(source, trust_remote_code=trust), trust)
    ignore, decoder = unquantized_layers(policy), set(quantized_layers(policy))
    quantized, left = linear_layers(source, ignore)
    if strangers := [name for name in quantized if name not in decoder]:
        raise ValueError(
            f"source: `{strangers[0]}` ({len(strangers)} such) is no linear layer in the decoder of "
            f"{type(policy).__name__}, and only those can be quantized."
        )
    written = quantize_checkpoint(source, args.output, args.format, ignore, with_code=trust, **options)
    rest = f"; left as they are: {_kinds(left)}" if left else ""
    total = len(quantized) + len(left)
    print(f"{written}: {len(quantized)} of {total} linear layers in {args.format}: {_kinds(quantized)}{rest}")


def _kinds(names: list[str]) -> str:
    """What layers are called in their modules, each name once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
