"""Writes a quantized copy of a checkpoint (`trl-quant prepare`).

A vLLM server that samples in INT8, NVFP4 or MXFP4 starts from such a copy, while the trainer loads the 16-bit
checkpoint. A colocated engine (`vllm_engine_kwargs={"model": ...}`) and a policy on a 4-bit base can also start from
such a copy, which saves them from quantizing.

Weights are rounded to nearest, without data. `--awq` first scales them on calibration data. Repeating the command
resumes a run that was killed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from ..precisions import PRECISIONS
from ..reading import reading
from .awq import check_awq, smooth_checkpoint
from .card import describe, write_card
from .files import fingerprint, read_config, unfinished
from .layout import check_target, quantization_config, quantized, quantizers_on, rewrite_checkpoint, rounded_first
from .perplexity import perplexities
from .progress import progress_bar
from .quantization import gathered_dtype
from .source import Source, find_source, kinds
from .text import token_sequences


@dataclass(frozen=True)
class PrepareOptions:
    """
    The options of `trl-quant prepare`. Data are a .txt, .jsonl, .parquet or .csv file, or a dataset on the hub.

    Attributes:
        model (`str`): Hub id or directory of a 16-bit safetensors checkpoint.
        format (`str`): One of [`~layout.storable`].
        output (`str`): Directory to write, which must not exist.
        revision (`str` or `None`): Branch, tag or commit on the hub.
        trust_remote_code (`bool`): Whether to run the checkpoint's own Python, and copy it.
        awq (`bool`): Whether to scale the weights on calibration data first.
        calibration (`str` or `None`): Data for AWQ.
        calibration_samples (`int`): Number of sequences for AWQ.
        calibration_length (`int`): Tokens of each sequence, for AWQ and for perplexity.
        perplexity (`str` or `None`): Data for perplexity; `None` for the part of `calibration` that AWQ did not use.
        perplexity_samples (`int`): Number of sequences for perplexity; 0 measures none.
    """

    model: str
    format: str
    output: str
    revision: str | None
    trust_remote_code: bool
    awq: bool
    calibration: str | None
    calibration_samples: int
    calibration_length: int
    perplexity: str | None
    perplexity_samples: int


def prepare(options: PrepareOptions) -> list[str]:
    """Quantizes a checkpoint, one fused layer at a time, and returns lines of text that report it."""
    _check(options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trust, target = options.trust_remote_code, Path(options.output)
    check_target(target)
    source = find_source(options.model, options.revision, trust)
    ignore = source.ignored()
    chosen, left = source.layers(options.format)
    if options.awq:
        check_awq(options.format, chosen)
    calibration, measured, tokenizer = _sequences(options, source)
    scheme = quantization_config(options.format, ignore)
    settings = {"source": fingerprint(source.path), "scheme": scheme, "code": trust, "calibration": None}
    if options.awq:
        settings["calibration"] = [options.calibration, len(calibration), options.calibration_length]

    with unfinished(target, settings) as result:
        unquantized, done = source.path, [("calibration", "none; weights rounded to nearest")]
        if options.awq:
            unquantized = result.with_name("awq")
            note = result.with_name("awq.json")
            if not unquantized.exists():
                with unfinished(unquantized, settings) as smooth:
                    change = smooth_checkpoint(
                        source.path, smooth, options.format, ignore, calibration, tokenizer, trust
                    )
                    note.write_text(json.dumps(change))
            with reading(note):
                before = json.loads(note.read_text())
            done = _awq_rows(options, len(calibration), before)
        transform = quantized(options.format, ignore, **quantizers_on(device))
        config = read_config(source.path) | {"quantization_config": scheme}
        gathered_in = gathered_dtype(config)
        if gathered_in is not None:
            transform = rounded_first(transform, gathered_in, ignore)
        with progress_bar("quantizing", source.nbytes) as progress:
            rewrite_checkpoint(unquantized, result, transform, config, device, None, trust, progress)
        if measured:
            before, after = perplexities(source.path, result, options.format, measured, device, trust)
            used = _used(len(measured), options.calibration_length, options.perplexity or options.calibration)
            done.append(("perplexity", f"{before:.4g} before, {after:.4g} after; {used}"))
        layers = f"{len(chosen)} of {len(chosen) + len(left)} linear layers in {options.format}: {kinds(chosen)}"
        meaning = PRECISIONS[options.format].summary if options.format in PRECISIONS else ""
        rows = [
            ("format", f"`{options.format}`: {meaning}"),
            ("quantized", layers),
            ("as they were", ", ".join(filter(None, [kinds(left), "embeddings, norms and biases"]))),
            *done,
        ]
        write_card(result, target.name, source, _summary(options, source), rows)
    rest = f"; left as they are: {kinds(left)}" if left else ""
    return [*(f"{key}: {value}" for key, value in done), f"{target}: {layers}{rest}"]


def _check(options: PrepareOptions) -> None:
    """Raises `ValueError` if options are out of range or contradict each other."""
    if options.awq and options.calibration is None:
        raise ValueError("`--awq` needs text to calibrate on: give `--calibration`, a file or a dataset on the hub.")
    if options.calibration is not None and not options.awq:
        raise ValueError(f"`--calibration` {options.calibration} acts only with `--awq`. Give both, or `--perplexity`.")
    for name, least in (("calibration_samples", 1), ("calibration_length", 2), ("perplexity_samples", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"`--{name}` {getattr(options, name)} is out of range. It must be >= {least}.")


def _sequences(options: PrepareOptions, source: Source) -> tuple[list, list, PreTrainedTokenizerBase | None]:
    """Returns tokens for calibration, tokens for perplexity, and the tokenizer; empty if neither is requested."""
    measuring = options.perplexity_samples if options.perplexity or options.awq else 0
    if not options.awq and not measuring:
        return [], [], None
    with reading(source.path):
        text_config = AutoConfig.from_pretrained(source.path, trust_remote_code=source.trust).get_text_config()
    most = getattr(text_config, "max_position_embeddings", None) or options.calibration_length
    if options.calibration_length > most:
        raise ValueError(f"`--calibration_length` {options.calibration_length} is out of range. It must be <= {most}.")
    with reading(source.path):
        tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=source.trust)
    calibration, measured, length = [], [], options.calibration_length
    if options.awq:
        more = 0 if options.perplexity else measuring
        found = token_sequences(options.calibration, tokenizer, options.calibration_samples + more, length)
        calibration = found[: options.calibration_samples]
        measured = found[options.calibration_samples :] or found[:measuring]
    if options.perplexity and measuring:
        measured = token_sequences(options.perplexity, tokenizer, measuring, length)
    return calibration, measured[:measuring], tokenizer


def _awq_rows(options: PrepareOptions, samples: int, change: float) -> list[tuple[str, str]]:
    """Returns the card's rows about AWQ."""
    used = _used(samples, options.calibration_length, options.calibration)
    return [
        ("calibration", f"AWQ through llmcompressor, {used}"),
        ("function before rounding", f"logits changed by {change:.1e} of their size"),
    ]


def _used(samples: int, length: int, data: str) -> str:
    """Describes the data that were used. A card names a file, but not the directory that holds it."""
    return f"{samples} sequences of {length} tokens of {Path(data).name if Path(data).exists() else data}"


def _summary(options: PrepareOptions, source: Source) -> str:
    """Returns the card's first paragraphs."""
    text = f"{describe(source)}, with the linear layers of its decoder in {options.format}; by `trl-quant prepare`."
    if options.awq:
        text += (
            "\n\nAWQ scaled norms and weights before they were rounded: the 16-bit weights behind this checkpoint "
            "compute the same function as the source, but are not its weights. An adapter of one fits the other only "
            "up to that scaling: train and serve adapters on the same checkpoint."
        )
    return text
