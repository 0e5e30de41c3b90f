"""A made-up number format, and its entry in the table of precisions."""

import torch
from torch import Tensor

from trl_quant.formats import Format, Scheme
from trl_quant.formats.common import Parts
from trl_quant.precisions import InVLLM, Precision


class Ternary(Format):
    """A made-up format: -1, 0 and 1 times the largest magnitude of a row."""

    bits, max, per_row = 1.6, 1.0, True
    scheme = Scheme("naive-quantized", {"num_bits": 2, "type": "int", "strategy": "channel"})

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        scale = x.abs().amax(-1, keepdim=True)
        return Parts((x / scale).round().to(torch.int8), scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return (parts.values.to(parts.scale.dtype) * parts.scale).to(dtype)


MADE_UP = Precision("three values a row", format="ternary", vllm=InVLLM(("Nobodys",), (99, 0), "a made-up kernel"))
