r"""
AWQ through llmcompressor: an invariant scaling of the inputs of linear layers, found on calibration data.

    Q(W diag(s)) diag(s)^-1 X        s minimizes the error against W X (AWQ, arXiv:2306.00978, eq. 4 and 5)

`diag(s)^-1` is absorbed by what comes before: a norm's gain, or the rows of the layer before. So a smoothed checkpoint
is an ordinary one of 16 bits, which computes the same function from other weights, and is then rounded to nearest as
any other.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ..formats import FORMATS
from .files import read_config
from .layout import quantization_config, rewrite_checkpoint, storable


PROBE = 128  # tokens that tell whether the function is unchanged
# Most that the logits may change, relative: by rounding of weights and activations. A wrong scaling changes them by 1.
BOUNDS = {torch.float32: 1e-3}
BOUND_16_BITS = 0.1


def check_awq(format: str) -> None:
    """Raises `ValueError` for a format that AWQ is not for, `ImportError` without llmcompressor."""
    if format not in (allowed := [name for name in storable() if FORMATS[name].activations is None]):
        raise ValueError(f"`--awq` is for formats of weights alone, not {format!r}; allowed: {', '.join(allowed)}.")
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
        format (`str`): What the copy will be quantized to, of weights alone.
        ignore (`Sequence[str]`): Linear layers that will not be.
        sequences (`Sequence[Sequence[int]]`): Tokens to calibrate on, (sequences, length).
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The model's.
        trust (`bool`, *optional*): Whether the checkpoint's own Python may run.

    Returns:
        `float`: Relative change of the logits, in 16 or 32 bits, which should be rounding.

    Raises:
        ValueError: llmcompressor's scaling changes the function of this model.
    """
    from compressed_tensors.offload import remove_dispatch
    from compressed_tensors.utils import patch_attr
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from llmcompressor.utils.helpers import DisableQuantization

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=trust).eval()
    probe = torch.tensor([sequences[0][:PROBE]])
    before = _logits(model, probe)
    recipe = [
        AWQModifier(),
        QuantizationModifier(config_groups=quantization_config(format)["config_groups"], ignore=list(ignore)),
    ]
    data = Dataset.from_dict({"input_ids": sequences, "attention_mask": [[1] * len(row) for row in sequences]})
    # llmcompressor 0.14 pins memory for a GPU also where there is none, which raises
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
    reset_session()  # which holds the model
    model = remove_dispatch(model)
    with DisableQuantization(model):
        after = _logits(model, probe)
    change = ((after - before).norm() / before.norm()).item()
    if not change <= (bound := BOUNDS.get(model.dtype, BOUND_16_BITS)):
        raise ValueError(
            f"`--awq`: llmcompressor's scaling changes the logits of {type(model).__name__} by {change:.1e} of their "
            f"size, more than rounding does ({bound}). Leave `--awq` out."
        )
    weights = dict(model.named_parameters())

    def smoothed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What was not scaled is taken from the source, which may hold it in another type than the model does."""
        return {
            name: tensor if name not in weights or _same(tensor, weights[name]) else weights[name].data.to(tensor)
            for name, tensor in tensors.items()
        }

    rewrite_checkpoint(source, result, smoothed, read_config(source), with_code=trust)
    return change


def _same(stored: Tensor, loaded: Tensor) -> bool:
    return torch.equal(stored.to(loaded), loaded.data)


@torch.no_grad()
def _logits(model, probe: Tensor) -> Tensor:
    return model(input_ids=probe.to(model.device), use_cache=False).logits.float().cpu()
