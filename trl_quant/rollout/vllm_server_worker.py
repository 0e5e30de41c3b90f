"""The name that `vllm serve --worker-extension-cls` is given; what it names lives in `vllm/transfer.py`."""

from .vllm.transfer import WorkerExtension


__all__ = ["WorkerExtension"]
