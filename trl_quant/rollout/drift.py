"""How far the weights moved, over one sync and since the start, how far quantizing moves them, and what of the update
arrived (QuRL, 4.3 and appendix A).

| metric | formula | paper |
|---|---|---|
| `weights/normalized_update` | `||W_t - W_{t-1}|| / ||W_t||` | eq. 13 for one sync |
| `weights/normalized_total_update` | `||W_t - W_0|| / ||W_0||`, `W_0` of the run's first sync | eq. 13, fig. 9 |
| `weights/normalized_quantization_error` | `||Q(W_t) - W_t|| / ||W_t||` | eq. 14 |
| `weights/codes_changed` | share of the codes of `Q(W)` that differ from those of the sync before | |
| `weights/update_cosine` | `<dQ, dW> / (||dQ|| ||dW||)`, `dQ = Q(W_t) - Q(W_{t-1})`, `dW = W_t - W_{t-1}` | |
"""

import zlib
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from ..formats import FORMATS, QuantizedTensor, quantize
from ..precisions import PRECISIONS


class WeightDrift:
    """
    Samples about `MAX_LAYERS` trained layers by name hash, and of large ones the leading rows (whole 128-row blocks),
    at most `MAX_ELEMENTS` values, or 128 rows where these are more. It keeps a copy of them, and their codes, until the
    next sync. A resumed run has no such copy: it takes what it would have found from its checkpoint.

    The total update needs one more copy of the sampled rows, as the first sync brought them, on the device and in each
    checkpoint: 18M values of Qwen2.5-7B, 36 MB in BF16, where all initial weights take 15 GB.

    Parameters:
        trained (`Collection[str]`): Names of the weights that training moves.
        precision (`str`): Key of `PRECISIONS`.
        quantizer (`Callable`, *optional*): `formats.quantize`, or a function with its signature.

    Attributes:
        initial (`dict[str, Tensor]` or `None`):
            The sampled rows as the run's first sync brought them, empty before it. `None` where they are not known: the
            total update is then not measured.
    """

    MAX_LAYERS = 32
    MAX_ELEMENTS = 2**18

    def __init__(self, trained: Collection[str], precision: str, quantizer: Callable[..., QuantizedTensor] = quantize):
        stride = max(1, len(trained) // self.MAX_LAYERS)
        self.names = {name for name in trained if zlib.crc32(name.encode()) % stride == 0}
        self.format, self.quantizer = PRECISIONS[precision].format, quantizer
        self.resumed: dict[str, float] = {}
        self.previous: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # rows, their codes, the numbers these stand for
        self.initial: dict[str, Tensor] | None = {}
        self.forget()

    def forget(self) -> None:
        """Makes the next sync count as the first: nothing is compared with it."""
        self.previous.clear()
        self._found = _Sums()

    def measures(self, name: str) -> bool:
        """Whether the weight called `name` is in the sample."""
        return name in self.names

    def add(self, name: str, weight: Tensor) -> None:
        """Counts a layer, (out, in), as it is sent to the engine."""
        rows = self._rows(weight).clone()
        current = (rows, *self._quantized(rows))
        self._found.add(current, self.previous.get(name))
        if self.initial and name in self.initial:
            self.initial[name] = self.initial[name].to(rows.device)  # a checkpoint's are on the CPU
            self._found.add_total(rows, self.initial[name])
        self.previous[name] = current

    def metrics(self) -> dict[str, float]:
        """The metrics of the sync, which ends here; those of updates only where there was a sync before."""
        found, self._found = self._found, _Sums()
        if self.initial == {}:
            self.initial = {name: rows for name, (rows, _, _) in self.previous.items()}
        metrics = found.error() | (found.update() or self.resumed) | found.total()
        return {f"weights/{name}": value for name, value in metrics.items()}

    def since_sync(self, named_params: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """What the next sync will find of the update, for a checkpoint; empty before the first sync."""
        found = _Sums()
        for name, tensor in named_params:  # to its end also where nothing is known: gathering is collective
            if name in self.previous:
                rows = self._rows(tensor.to(self.previous[name][0].device))
                found.add((rows, *self._quantized(rows)), self.previous[name])
        return found.update()

    def _rows(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        if weight.numel() <= self.MAX_ELEMENTS:
            return weight
        return weight[: max(128, self.MAX_ELEMENTS // weight[0].numel() // 128 * 128)]

    def _quantized(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of some rows, one a byte or two, and the numbers that they stand for."""
        if self.format is None:
            numbers = rows.bfloat16()
            return numbers.view(torch.int16), numbers
        with torch.autocast(rows.device.type, enabled=False):
            quantized = self.quantizer(rows, self.format, check=False)  # the stream's own quantizer checks
            return FORMATS[self.format].codes(quantized.values), quantized.dequantize()


class _Sums:
    """Sums over layers, kept on the device until they are asked for."""

    def __init__(self):
        self.rows: list[Tensor] = []
        self.totals: list[Tensor] = []

    def add(self, current: tuple[Tensor, Tensor, Tensor], before: tuple[Tensor, Tensor, Tensor] | None) -> None:
        weight, codes, numbers = current
        sums = [_square(weight), _square(numbers.to(weight.dtype) - weight)]
        if before is not None:
            moved, arrived = weight - before[0], numbers.float() - before[2].float()
            changed = (codes != before[1]).sum(dtype=torch.float32)
            sums += [_square(moved), _square(arrived), (moved.float() * arrived).sum(), changed]
            sums += [changed.new_tensor(codes.numel())]
        self.rows.append(torch.stack([x.double() for x in sums]))

    def add_total(self, weight: Tensor, initial: Tensor) -> None:
        self.totals.append(torch.stack([_square(weight - initial), _square(initial)]))

    def error(self) -> dict[str, float]:
        if not self.rows:
            return {}
        weight, error = torch.stack([row[:2] for row in self.rows]).sum(0).tolist()
        return {"normalized_quantization_error": (error / max(weight, 1e-60)) ** 0.5}

    def update(self) -> dict[str, float]:
        rows = [row for row in self.rows if len(row) > 2]
        if not rows:
            return {}
        weight, _, moved, arrived, product, changed, codes = torch.stack(rows).sum(0).tolist()
        return {
            "normalized_update": (moved / max(weight, 1e-60)) ** 0.5,
            "codes_changed": changed / codes,
            "update_cosine": product / max((moved * arrived) ** 0.5, 1e-60),
        }

    def total(self) -> dict[str, float]:
        if not self.totals:
            return {}
        moved, initial = torch.stack(self.totals).sum(0).tolist()
        return {"normalized_total_update": (moved / max(initial, 1e-60)) ** 0.5}


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float32).double().square()
