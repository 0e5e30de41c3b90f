r"""
AWQ through llmcompressor: scales the inputs of linear layers by calibration data, without changing the function.

    Q(W diag(s)) diag(s)^-1 X        s minimizes the error against W X (AWQ, arXiv:2306.00978, eq. 4 and 5)

The preceding norm absorbs `diag(s)^-1` in its gain, or the preceding layer in the rows of its weight. A smoothed
checkpoint is therefore an ordinary 16-bit checkpoint, which computes the same function with other weights. It is then
rounded to nearest like any other.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..formats import FORMATS
from ..models.families import EXPERT
from .experts import NamesOnDisk
from .files import read_config
from .layout import quantization_config, rewrite_checkpoint, storable
from .source import load_whole


PROBE = 128  # tokens on which the smoothed model is compared with the source
# Largest relative change of the logits that rounding explains. A wrong scaling changes them by about 1.
BOUNDS = {torch.float32: 1e-3}
BOUND_16_BITS = 0.1


def check_awq(format: str, layers: Iterable[str]) -> None:
    """
    Raises `ValueError` for a format that quantizes inputs too, or if experts or a state-space model's projections are
    among the `layers` to quantize, and `ImportError` if llmcompressor is missing.
    """
    allowed = [name for name in storable() if FORMATS[name].activations is None]
    if format not in allowed:
        raise ValueError(f"`--awq` is for weight-only formats, not {format!r}; allowed: {', '.join(allowed)}.")
    if any(EXPERT.fullmatch(name) for name in layers):
        raise ValueError("`--awq` scales linear layers, and not the experts of a mixture. Leave it out.")
    if any(".mamba." in name for name in layers):
        raise ValueError(
            "`--awq` scales all layers that a norm feeds, and llmcompressor knows none of a state-space model. "
            "Leave it out."
        )
    try:
        import llmcompressor  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "`--awq` needs llmcompressor: `pip install --no-deps -r requirements/compress.txt` from a clone, or leave "
            "`--awq` out to round to nearest without data."
        ) from error


def smooth_checkpoint(
    source: Path,
    result: Path,
    format: str,
    ignore: Sequence[str],
    sequences: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    trust: bool = False,
) -> float:
    """
    Writes a smoothed copy of a 16-bit checkpoint.

    Args:
        source (`Path`): The checkpoint.
        result (`Path`): Directory to write in.
        format (`str`): The format to which the copy will be quantized; it must leave inputs in 16 bits.
        ignore (`Sequence[str]`): Linear layers that will not be quantized.
        sequences (`Sequence[Sequence[int]]`): Tokens to calibrate on, (sequences, length).
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The model's tokenizer.
        trust (`bool`, *optional*): Whether the checkpoint's own Python may run.

    Returns:
        `float`: Relative change of the logits, which should not exceed rounding.

    Raises:
        ValueError: llmcompressor's scaling changed the function of this model.
    """
    from llmcompressor.utils.helpers import DisableQuantization

    model = load_whole(source, {"trust_remote_code": trust}, dtype="auto").eval()
    probe = torch.tensor([sequences[0][:PROBE]])
    before = _logits(model, probe)
    model = _scaled(model, format, ignore, sequences, tokenizer, trust)
    with DisableQuantization(model):
        after = _logits(model, probe)
    change = ((after - before).norm() / before.norm()).item()
    bound = BOUNDS.get(model.dtype, BOUND_16_BITS)
    if not change <= bound:
        raise ValueError(
            f"`--awq`: llmcompressor's scaling changes the logits of {type(model).__name__} by {change:.1e} of their "
            f"size, more than rounding does ({bound}). Leave `--awq` out."
        )
    weights = dict(NamesOnDisk(model).stream(model.named_parameters()))

    def smoothed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replaces only the scaled tensors, because the source may hold others in another type than the model does."""
        return {
            name: tensor if name not in weights or _same(tensor, weights[name]) else weights[name].data.to(tensor)
            for name, tensor in tensors.items()
        }

    rewrite_checkpoint(source, result, smoothed, read_config(source), with_code=trust)
    return change


def _scaled(
    model: PreTrainedModel,
    format: str,
    ignore: Sequence[str],
    sequences: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    trust: bool,
) -> PreTrainedModel:
    """Scales a model by llmcompressor's AWQ, with the arguments of [`smooth_checkpoint`]. Rounds no weights."""
    from compressed_tensors.offload import remove_dispatch
    from compressed_tensors.utils import patch_attr
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    recipe = [
        AWQModifier(),
        QuantizationModifier(config_groups=quantization_config(format)["config_groups"], ignore=list(ignore)),
    ]
    data = Dataset.from_dict({"input_ids": sequences, "attention_mask": [[1] * len(row) for row in sequences]})
    # llmcompressor 0.14 pins memory for a GPU even on a machine without one, where that raises
    unpinned = patch_attr(IntermediatesCache, "pin_memory", lambda *_: None)
    with nullcontext() if torch.accelerator.is_available() else unpinned:
        oneshot(
            model=model,
            processor=tokenizer,
            recipe=recipe,
            dataset=data,
            num_calibration_samples=len(sequences),
            max_seq_length=len(sequences[0]),
            shuffle_calibration_samples=False,
            trust_remote_code_model=trust,
        )
    reset_session()  # the session holds the model
    return remove_dispatch(model)


def _same(stored: Tensor, loaded: Tensor) -> bool:
    return torch.equal(stored.to(loaded), loaded.data)


@torch.no_grad()
def _logits(model, probe: Tensor) -> Tensor:
    return model(input_ids=probe.to(model.device), use_cache=False).logits.float().cpu()
