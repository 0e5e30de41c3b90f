"""`trl-quant prepare`: writes a quantized copy of a checkpoint.

A vLLM server that samples in INT8, NVFP4 or MXFP4 is started on such a copy, while the trainer keeps the 16-bit one. A
colocated engine takes one as well (`vllm_engine_kwargs={"model": ...}`) and then starts without quantizing first, and
so does a policy that is trained on a 4-bit base.

Weights are rounded to nearest, without data. With `--awq` they are scaled before, on calibration data. A run that was
killed goes on where it was, with the same command.
"""

import argparse
import json
from pathlib import Path

from ..precisions import PRECISIONS
from ..storage.files import fingerprint, read_config, unfinished
from ..storage.layout import check_target, quantization_config, quantized, rewrite_checkpoint, storable


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        prog="trl-quant prepare",
        usage="%(prog)s --model MODEL --format FORMAT --output DIR [options]",
        description=__doc__.partition("\n")[0],
    )
    options.add_argument("--model", required=True, help="hub id or directory of a 16-bit safetensors checkpoint")
    options.add_argument("--format", required=True, choices=storable(), help="number format of the linear layers")
    options.add_argument("--output", required=True, help="directory to write, which must not exist")
    options.add_argument("--revision", help="branch, tag or commit on the hub")
    options.add_argument(
        "--trust_remote_code", action="store_true", help="run the checkpoint's own Python, and copy it"
    )
    options.add_argument(
        "--awq", action="store_true", help="scale the weights on calibration data first (formats of weights alone)"
    )
    text = "a .txt, .jsonl or .parquet file, or a dataset on the hub"
    options.add_argument("--calibration", help=f"what to calibrate `--awq` on: {text}")
    options.add_argument("--calibration_samples", type=int, default=256, help="sequences (default: %(default)s)")
    options.add_argument("--calibration_length", type=int, default=2048, help="tokens of each (default: %(default)s)")
    options.add_argument(
        "--perplexity", help=f"what to measure perplexity on, before and after: {text} (default: what calibration left)"
    )
    options.add_argument(
        "--perplexity_samples", type=int, default=8, help="sequences of that length, 0 for none (default: %(default)s)"
    )
    return options


def main(argv: list[str] | None = None) -> None:
    """Quantizes the checkpoint named on the command line, a fused layer at a time."""
    args = parser().parse_args(argv)
    _check(args)

    import torch

    from ..rollout.vllm.support import quantizers_on
    from ..storage.awq import check_awq, smooth_checkpoint
    from ..storage.card import write_card
    from ..storage.perplexity import perplexities
    from ..storage.source import find_source, kinds
    from . import progress_bar

    if args.awq:
        check_awq(args.format)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trust, target = args.trust_remote_code, Path(args.output)
    check_target(target)
    source = find_source(args.model, args.revision, trust)
    ignore = source.ignored()
    chosen, left = source.layers()
    calibration, measured, tokenizer = _sequences(args, source)
    scheme = quantization_config(args.format, ignore)
    settings = {"source": fingerprint(source.path), "scheme": scheme, "code": trust, "calibration": None}
    if args.awq:
        settings["calibration"] = [args.calibration, len(calibration), args.calibration_length]

    with unfinished(target, settings) as result:
        wide, done = source.path, [("calibration", "none; weights rounded to nearest")]
        if args.awq:
            wide = result.with_name("awq")
            note = result.with_name("awq.json")
            if not wide.exists():
                with unfinished(wide, settings) as smooth:
                    options = args.format, ignore, calibration, tokenizer, trust
                    note.write_text(json.dumps(smooth_checkpoint(source.path, smooth, *options)))
            done = _awq_rows(args, len(calibration), json.loads(note.read_text()))
        transform = quantized(args.format, ignore, **quantizers_on(device))
        config = read_config(source.path) | {"quantization_config": scheme}
        with progress_bar("quantizing", source.nbytes) as progress:
            rewrite_checkpoint(wide, result, transform, config, device, None, trust, progress)
        if measured:
            before, after = perplexities(source.path, result, args.format, measured, device, trust)
            used = _used(len(measured), args.calibration_length, args.perplexity or args.calibration)
            done.append(("perplexity", f"{before:.4g} before, {after:.4g} after; {used}"))
        layers = f"{len(chosen)} of {len(chosen) + len(left)} linear layers in {args.format}: {kinds(chosen)}"
        rows = [
            ("format", f"`{args.format}`: {PRECISIONS[args.format].summary if args.format in PRECISIONS else ''}"),
            ("quantized", layers),
            ("as they were", ", ".join(filter(None, [kinds(left), "embeddings, norms and biases"]))),
            *done,
        ]
        write_card(result, target.name, source, _summary(args, source), rows)
    rest = f"; left as they are: {kinds(left)}" if left else ""
    for key, value in done:
        print(f"{key}: {value}")
    print(f"{target}: {layers}{rest}")


def _check(args: argparse.Namespace) -> None:
    """Raises `ValueError` for options that do not go together."""
    if args.awq and args.calibration is None:
        raise ValueError("`--awq` needs text to calibrate on: give `--calibration`, a file or a dataset on the hub.")
    if args.calibration is not None and not args.awq:
        raise ValueError(f"`--calibration` {args.calibration} acts with `--awq` alone. Give both, or `--perplexity`.")
    for name, least in (("calibration_samples", 1), ("calibration_length", 2), ("perplexity_samples", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"`--{name}` {getattr(args, name)} is out of range. It must be >= {least}.")


def _sequences(args: argparse.Namespace, source) -> tuple[list, list, object]:
    """Tokens to calibrate on, tokens to measure perplexity on, and the tokenizer; empty where there is no data."""
    measuring = args.perplexity_samples if args.perplexity or args.awq else 0
    if not args.awq and not measuring:
        return [], [], None
    from transformers import AutoConfig, AutoTokenizer

    from ..storage.text import token_sequences

    text_config = AutoConfig.from_pretrained(source.path, trust_remote_code=source.trust).get_text_config()
    most = getattr(text_config, "max_position_embeddings", None) or args.calibration_length
    if args.calibration_length > most:
        raise ValueError(f"`--calibration_length` {args.calibration_length} is out of range. It must be <= {most}.")
    tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=source.trust)
    calibration, measured, length = [], [], args.calibration_length
    if args.awq:
        more = 0 if args.perplexity else measuring
        found = token_sequences(args.calibration, tokenizer, args.calibration_samples + more, length)
        calibration = found[: args.calibration_samples]
        measured = found[args.calibration_samples :] or found[:measuring]
    if args.perplexity and measuring:
        measured = token_sequences(args.perplexity, tokenizer, measuring, length)
    return calibration, measured[:measuring], tokenizer


def _awq_rows(args: argparse.Namespace, samples: int, change: float) -> list[tuple[str, str]]:
    """What the card says of AWQ."""
    used = _used(samples, args.calibration_length, args.calibration)
    return [
        ("calibration", f"AWQ through llmcompressor, {used}"),
        ("function before rounding", f"logits changed by {change:.1e} of their size"),
    ]


def _used(samples: int, length: int, data: str) -> str:
    """A card says what a file is called, not where it lies."""
    return f"{samples} sequences of {length} tokens of {Path(data).name if Path(data).exists() else data}"


def _summary(args: argparse.Namespace, source) -> str:
    from ..storage.card import describe

    text = f"{describe(source)}, with the linear layers of its decoder in {args.format}; by `trl-quant prepare`."
    if args.awq:
        text += (
            "\n\nAWQ scaled norms and weights before they were rounded: the 16-bit weights behind this checkpoint "
            "compute the same function as the source, but are not its weights. An adapter of one fits the other only "
            "up to that scaling: train and serve adapters on the same checkpoint."
        )
    return text
