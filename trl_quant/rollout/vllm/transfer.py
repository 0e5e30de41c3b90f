"""What runs in the workers of a `vllm serve` that samples for a trainer of ours; nothing of it is used in the trainer.

    vllm serve MODEL --worker-extension-cls trl_quant.rollout.vllm_server_worker.WorkerExtension \\
        --weight-transfer-config '{"backend": "trl_quant"}' ...

makes every worker import this module, which adds the weight transfer `trl_quant`: vLLM's own over NCCL, with what a
reload needs besides (see `worker.py`). With vLLM's alone a 4-bit engine hangs after a sync.
"""

from dataclasses import asdict

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from ..stream import default_dtype
from .worker import (
    keep_onednn_scales,
    kv_caches,
    plain_tensors,
    quantized_outside,
    refresh_tied_head,
    restore_plain_tensors,
)


class ReloadBracket:
    """For a weight transfer engine of vLLM: between start and finish of an update, what `worker.reload` does."""

    def start_weight_update(self) -> None:
        keep_onednn_scales(self.model)
        self._plain = plain_tensors(self.model)
        super().start_weight_update()

    def receive_weights(self, update_info) -> None:
        with default_dtype(self.model_config.dtype):
            super().receive_weights(update_info)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        with default_dtype(self.model_config.dtype):
            super().finish_weight_update()
            refresh_tied_head(self.model)
        restore_plain_tensors(self._plain)


class NCCLTransfer(ReloadBracket, NCCLWeightTransferEngine):
    """vLLM's transfer over NCCL in [`ReloadBracket`]."""


class WorkerExtension:
    """Names this module on vLLM's command line; its methods become the worker's."""

    sync_token: str | None = None  # of the sync whose weights the worker holds

    def keep_token(self, token: str) -> None:
        """Keeps the token of a sync, for as long as this process has its weights."""
        self.sync_token = token

    def kept_token(self) -> str | None:
        return self.sync_token

    def read_caches(self) -> list[tuple]:
        """[`~worker.kv_caches`] as JSON can hold it: `(layer, fields)`."""
        return [(index, asdict(cache)) for index, cache in kv_caches(self.get_model()).items()]

    def quantized_outside(self, layers: list[str]) -> list[str]:
        """[`~worker.quantized_outside`]."""
        return quantized_outside(self.get_model(), layers)


WeightTransferEngineFactory.register_engine("trl_quant", NCCLTransfer)
