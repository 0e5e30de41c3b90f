"""The module to name in `vllm serve --worker-extension-cls`. The class itself is in `vllm/transfer.py`."""

from .vllm.transfer import WorkerExtension


__all__ = ["WorkerExtension"]
