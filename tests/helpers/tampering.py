"""Syncs in which a test changes some tensors on the way into vLLM."""

from unittest.mock import patch

import torch


def sync_changed(sampler, change) -> None:
    """Syncs all tensors, by their names on disk, as `change` returns them."""
    stream = sampler.names_on_disk.stream
    with patch.object(sampler.names_on_disk, "stream", lambda tensors: change(dict(stream(tensors))).items()):
        sampler.is_current = False  # the engine gets all tensors
        sampler.sync()


def assert_stale_is_found(sampler, part: str) -> None:
    """Of the one parameter whose name ends with `part`, and which moves; the engine is right again afterwards."""
    before = {name: tensor.clone() for name, tensor in sampler.stream(measured=False) if name.endswith(part)}
    (name,) = before
    with torch.no_grad():
        sampler.model.get_parameter(name).mul_(1.25)
    sync_changed(sampler, lambda tensors: tensors | before)
    assert sampler.differing_weight() == name
    sync_changed(sampler, dict)
    assert sampler.differing_weight() is None


def of_expert(tensors, expert: int, layer: int = 1) -> list[str]:
    """Names on disk of one expert's matrices, or of their codes and scales; those of its down projection last."""
    found = [name for name in tensors if f".layers.{layer}." in name and f".experts.{expert}." in name]
    assert len(found) in (3, 6)
    return found
