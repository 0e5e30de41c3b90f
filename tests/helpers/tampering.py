"""Syncs of a mixture of experts in which a test changes some tensors on the way into vLLM."""

from unittest.mock import patch


def sync_changed(sampler, change) -> None:
    """Syncs all tensors, by their names on disk, as `change` returns them."""
    stream = sampler.names_on_disk.stream
    with patch.object(sampler.names_on_disk, "stream", lambda tensors: change(dict(stream(tensors))).items()):
        sampler.is_current = False  # the engine gets all tensors
        sampler.sync()


def of_expert(tensors, expert: int, layer: int = 1) -> list[str]:
    """Names on disk of one expert's matrices, or of their codes and scales; those of its down projection last."""
    found = [name for name in tensors if f".layers.{layer}." in name and f".experts.{expert}." in name]
    assert len(found) in (3, 6)
    return found
