"""Metrics of a sync: how far the weights moved, how large the quantization error is, and how much of the update
survives quantization (QuRL, 4.3 and appendix A). `t - 1` is the sync of the training's last generation: a sync for an
evaluation is measured, and the next one is measured against the same weights.

| metric | formula | paper |
|---|---|---|
| `weights/normalized_update` | `||W_t - W_{t-1}|| / ||W_t||` | eq. 13 for one sync |
| `weights/normalized_total_update` | `||W_t - W_0|| / ||W_0||`, `W_0` at the run's first sync | eq. 13, fig. 9 |
| `weights/normalized_quantization_error` | `||Q(W_t) - W_t|| / ||W_t||` | eq. 14 |
| `weights/codes_changed` | share of the codes of `Q(W)` that differ from those of the previous sync | |
| `weights/update_cosine` | `<dQ, dW> / (||dQ|| ||dW||)`, `dQ = Q(W_t) - Q(W_{t-1})`, `dW = W_t - W_{t-1}` | |

A metric whose denominator is zero is left out, except that the cosine is 0 if the weights changed and no code did.
"""

import zlib
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import FORMATS, QuantizedTensor, quantize
from ..precisions import PRECISIONS


class SampledRows(NamedTuple):
    """
    The rows of one layer that are measured, at one sync.

    Attributes:
        weight (`torch.Tensor` of shape `(rows, in)` or `(experts, out, in)`): The policy's weight.
        codes (`torch.Tensor` of 8- or 16-bit integers): Its quantized codes, one in each element.
        dequantized (`torch.Tensor`): The values that the codes stand for, in the shape of `weight`.
    """

    weight: Tensor
    codes: Tensor
    dequantized: Tensor


class WeightDrift:
    """
    Measures a sample of the weights at each sync.

    The sample has about `MAX_LAYERS` trained layers, chosen by a hash of their names. A large layer contributes its
    leading rows: whole blocks of 128 rows with at most `MAX_ELEMENTS` values, but at least one block. Of a large weight
    (experts, out, in) as many leading experts are measured, or the leading rows of the first one. The sampled rows and
    their codes are kept until the next sync. The total update needs one more copy of the sampled rows, taken at the
    first sync, and an evaluation one more until the next generation of the training.

    Each checkpoint holds both copies. For Qwen2.5-7B, a copy has 18M values, 36 MB in BF16; all weights take 15 GB.

    Parameters:
        trained (`Collection[str]`): Names of the trained weights.
        precision (`str`): Key of `PRECISIONS`.
        quantizer (`Callable`, *optional*): `formats.quantize`, or a function with its signature.

    Attributes:
        evaluates (`bool`):
            Whether syncs are those of an evaluation. Later syncs are not compared with their weights, unless the
            training samples from them ([`take`]). The trainer sets it.
        previous, compared (`dict[str, SampledRows]`):
            The sampled rows at the last sync, and those that the next sync is compared with.
        initial (`dict[str, Tensor]` or `None`):
            The sampled rows at the run's first sync; empty before it. If `None`, they are unknown, and the total update
            is not measured.
    """

    MAX_LAYERS = 32
    MAX_ELEMENTS = 2**18

    def __init__(self, trained: Collection[str], precision: str, quantizer: Callable[..., QuantizedTensor] = quantize):
        stride = max(1, len(trained) // self.MAX_LAYERS)
        self.names = {name for name in trained if zlib.crc32(name.encode()) % stride == 0}
        self.format, self.quantizer = PRECISIONS[precision].format, quantizer
        self.evaluates = False
        self.previous: dict[str, SampledRows] = {}
        self.compared: dict[str, SampledRows] = {}
        self.resumed: dict[str, Tensor] = {}  # the weights that a checkpoint compares with, until the next sync
        self.initial: dict[str, Tensor] | None = {}
        self.forget()

    def forget(self) -> None:
        """Drops the rows of earlier syncs, so that the next sync is not compared with them."""
        self.previous.clear()
        self.compared.clear()
        self.resumed.clear()
        self._sums = _Sums()

    def measures(self, name: str) -> bool:
        """Whether the weight called `name` is in the sample."""
        return name in self.names

    def add(self, name: str, weight: Tensor) -> None:
        """Measures a layer's weight, of shape (out, in) or (experts, out, in), as it is sent to the engine."""
        current = self._sampled(self._rows(weight).clone())
        if name in self.resumed:
            self.compared[name] = self._sampled(self.resumed.pop(name).to(weight.device))
        self._sums.add(current, self.compared.get(name))
        if self.initial and name in self.initial:
            self.initial[name] = self.initial[name].to(weight.device)  # those of a checkpoint are on the CPU
            self._sums.add_total(current.weight, self.initial[name])
        self.previous[name] = current
        if not self.evaluates:
            self.compared[name] = current

    def take(self) -> None:
        """Called when the training samples from the weights of the last sync: the next is compared with them."""
        self.compared = dict(self.previous)

    @property
    def synced(self) -> dict[str, Tensor]:
        """The sampled rows that the next sync is compared with, for a checkpoint."""
        return self.resumed | {name: rows.weight for name, rows in self.compared.items()}

    def metrics(self) -> dict[str, float]:
        """Ends a sync and returns its metrics. Metrics of the update exist only if an earlier sync was measured."""
        sums, self._sums = self._sums, _Sums()
        if self.initial == {}:
            self.initial = {name: rows.weight for name, rows in self.previous.items()}
        metrics = sums.error() | sums.update() | sums.total()
        return {f"weights/{name}": value for name, value in metrics.items()}

    def since_sync(self, named_params: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """
        Returns the metrics of the update since the last sync; empty before the first sync. Always reads `named_params`
        to the end, because gathering them is collective.
        """
        sums = _Sums()
        for name, tensor in named_params:
            if name in self.previous:
                rows = self._rows(tensor.to(self.previous[name].weight.device))
                sums.add(self._sampled(rows), self.previous[name])
        return sums.update()

    def _rows(self, weight: Tensor) -> Tensor:
        """Returns the rows, or whole experts, of a weight that are measured."""
        weight = weight.detach()
        if weight.numel() <= self.MAX_ELEMENTS:
            return weight
        count = self.MAX_ELEMENTS // weight[0].numel()  # of rows or experts that fit
        if weight.ndim > 2:
            return weight[:count] if count else self._rows(weight[0])
        return weight[: max(128, count // 128 * 128)]

    def _sampled(self, rows: Tensor) -> SampledRows:
        """Quantizes the rows of a weight."""
        if self.format is None:
            rounded = rows.bfloat16()
            return SampledRows(rows, rounded.view(torch.int16), rounded)
        with torch.autocast(rows.device.type, enabled=False):
            quantized = self.quantizer(rows, self.format, check=False)  # the sync itself checks for NaN
            return SampledRows(rows, FORMATS[self.format].codes(quantized.values), quantized.dequantize())


class _Sums:
    """Sums over layers. They stay on the device until a metric is computed."""

    def __init__(self):
        self.rows: list[Tensor] = []
        self.totals: list[Tensor] = []

    def add(self, current: SampledRows, previous: SampledRows | None) -> None:
        """Adds a layer: the sums of its error, and, if there is a previous sync, those of its update."""
        weight = current.weight
        sums = [_square(weight), _square(current.dequantized.to(weight.dtype) - weight)]
        if previous is not None:
            weight_update = weight - previous.weight
            quantized_update = current.dequantized.float() - previous.dequantized.float()
            changed = (current.codes != previous.codes).sum(dtype=torch.float32)
            sums += [
                _square(weight_update),
                _square(quantized_update),
                (weight_update.float() * quantized_update).sum(),
                changed,
                changed.new_tensor(current.codes.numel()),
            ]
        self.rows.append(torch.stack([x.double() for x in sums]))

    def add_total(self, weight: Tensor, initial: Tensor) -> None:
        """Adds the sums of a layer's update since the run's first sync."""
        self.totals.append(torch.stack([_square(weight - initial), _square(initial)]))

    def error(self) -> dict[str, float]:
        if not self.rows:
            return {}
        weight, error = torch.stack([row[:2] for row in self.rows]).sum(0).tolist()
        return {"normalized_quantization_error": (error / weight) ** 0.5} if weight else {}

    def update(self) -> dict[str, float]:
        rows = [row for row in self.rows if len(row) > 2]
        if not rows:
            return {}
        weight, _, weight_update, quantized_update, product, changed, codes = torch.stack(rows).sum(0).tolist()
        metrics = {"codes_changed": changed / codes}
        if weight:
            metrics["normalized_update"] = (weight_update / weight) ** 0.5
        if weight_update:
            metrics["update_cosine"] = product / (weight_update * quantized_update) ** 0.5 if quantized_update else 0.0
        return metrics

    def total(self) -> dict[str, float]:
        if not self.totals:
            return {}
        total_update, initial = torch.stack(self.totals).sum(0).tolist()
        return {"normalized_total_update": (total_update / initial) ** 0.5} if initial else {}


def _square(x: Tensor) -> Tensor:
    """Returns `||x||^2` in float64."""
    return torch.linalg.vector_norm(x, dtype=torch.float32).double().square()
