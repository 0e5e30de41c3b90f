"""QuRL's two norms over one sync (eq. 13, 14): how far the weights moved, how far quantizing moves them."""

import zlib
from collections.abc import Collection, Iterable

import torch


class WeightDrift:
    """
    Samples about `MAX_LAYERS` trained layers by name hash, and of large ones the leading rows (whole 128-row blocks),
    at most `MAX_ELEMENTS` values. It keeps a copy of them until the next sync. A resumed run has no such copy: it takes
    the update from its checkpoint.

    Parameters:
        trained (`Collection[str]`): Names of the weights that training moves.
    """

    MAX_LAYERS = 32
    MAX_ELEMENTS = 2**18

    def __init__(self, trained: Collection[str]):
        stride = max(1, len(trained) // self.MAX_LAYERS)
        self.names = {name for name in trained if zlib.crc32(name.encode()) % stride == 0}
        self.resumed_update: float | None = None
        self.previous: dict[str, torch.Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Makes the next sync the first."""
        self.previous.clear()
        self._updates, self._errors, self._weights = [], [], []  # norms, one of each layer

    def measures(self, name: str) -> bool:
        """Whether the weight called `name` is in the sample."""
        return name in self.names

    def rows(self, weight: torch.Tensor) -> int:
        """Number of leading rows of `weight` in the sample."""
        if weight.numel() <= self.MAX_ELEMENTS:
            return weight.shape[0]
        return max(128, self.MAX_ELEMENTS // weight[0].numel() // 128 * 128)

    def add(self, name: str, weight: torch.Tensor, dequantized: torch.Tensor) -> None:
        """Counts the leading rows of a layer: `dequantized` of the copy, and the same rows of `weight`."""
        weight = weight[: len(dequantized)].detach()
        if name in self.previous:
            self._updates.append(_norm(weight - self.previous[name]))
        self._errors.append(_norm(dequantized.to(weight.dtype) - weight))
        self._weights.append(_norm(weight))
        self.previous[name] = weight.clone()

    def metrics(self) -> dict[str, float]:
        """
        The norms since the last call, relative to the weights'; the update only where there was a sync before:
        `weights/normalized_update` = ||W_t - W_{t-1}|| / ||W_t|| (eq. 13) and
        `weights/normalized_quantization_error` = ||Q(W_t) - W_t|| / ||W_t|| (eq. 14).
        """
        metrics = {}
        if self._errors:
            metrics["weights/normalized_quantization_error"] = _ratio(self._errors, self._weights)
        if self._updates:
            metrics["weights/normalized_update"] = _ratio(self._updates, self._weights)
        elif self.resumed_update is not None:
            metrics["weights/normalized_update"] = self.resumed_update
        self._updates, self._errors, self._weights = [], [], []
        return metrics

    def update_since_sync(self, named_params: Iterable[tuple[str, torch.Tensor]]) -> float | None:
        """The update that the next sync will see, for a checkpoint; `None` before the first sync."""
        updates, weights = [], []
        for name, tensor in named_params:  # to its end also where nothing is known: gathering is collective
            if name in self.previous:
                previous = self.previous[name]
                tensor = tensor[: len(previous)].detach().to(previous.device)
                updates.append(_norm(tensor - previous))
                weights.append(_norm(tensor))
        return _ratio(updates, weights) if self.previous else None


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float32)


def _ratio(norms: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Norm of all tensors of which `norms` are the norms, relative to that of `others`."""
    first, second = (torch.stack(x).double().square().sum().sqrt().item() for x in (norms, others))
    return first / max(second, 1e-30)
