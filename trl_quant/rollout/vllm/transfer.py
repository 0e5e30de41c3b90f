"""Code that runs in the workers of a `vllm serve` that samples for our trainers. The trainer does not import it.

    vllm serve MODEL --worker-extension-cls trl_quant.rollout.vllm_server_worker.WorkerExtension \\
        --weight-transfer-config '{"backend": "trl_quant"}' ...

makes every worker import this module, which registers the weight transfer `trl_quant`: vLLM's own over NCCL, or memory
that a trainer on the same device shares (`same_device.py`), plus the steps that a reload needs before and after it
(`repairs.py`). With vLLM's transfer alone, a 4-bit engine hangs after a sync.
"""

from dataclasses import asdict

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from ...storage.layout import quantizers_on
from ..tensors import default_dtype
from . import loading  # noqa: F401, which registers the model loader
from .experts import check_experts, repack_experts
from .kernel_checks import quantized_outside
from .repairs import keep_onednn_scales, kernel_state, refresh_convolutions, refresh_tied_head, restore_kernel_state
from .same_device import opened, place_of, read
from .support import require_nccl
from .worker import WeightComparison, kv_caches, loading_with, without_warnings


class SyncToken:
    """The token of the sync whose weights this process holds; `None` if there was none, or weights came since."""

    held: str | None = None


class ReloadBracket:
    """
    Mixin for vLLM's weight transfer engines that adds the steps of `worker.reload` to an update. Each step of it
    forgets the token of the last sync, because any client may send an update.

    Attributes:
        comparison ([`~worker.WeightComparison`] or `None`):
            Compares the tensors of the next update, which are then not loaded; `None` for an update of the weights.
        is_updating (`bool`):
            Whether an update or a comparison has begun and has not come to its end. Another run cannot end it: vLLM
            would fill the rest of a layer that is half loaded with whatever the memory holds, or with weights of both.
    """

    comparison: WeightComparison | None = None
    is_updating = False

    def init_transfer_engine(self, init_info) -> None:
        self.forget_run()
        super().init_transfer_engine(init_info)

    def forget_run(self) -> None:
        """Forgets the comparison that a run has asked for and not begun, or not asked the result of."""
        self.comparison = None

    def start_weight_update(self) -> None:
        self.is_updating = True
        if self.comparison is not None:
            return
        SyncToken.held = None
        keep_onednn_scales(self.model)
        self._state, self._received = kernel_state(self.model), []
        super().start_weight_update()

    def receive_weights(self, update_info) -> None:
        if self.comparison is not None:
            with loading_with(self.model, self.comparison.add):
                super().receive_weights(update_info)
            return
        SyncToken.held = None  # again, as another run's sync may have begun and ended since
        self._received += update_info.names
        with default_dtype(self.model_config.dtype):
            super().receive_weights(update_info)

    def finish_weight_update(self) -> None:
        if self.comparison is None:
            self._finish_reload()
        self.is_updating = False

    @torch.no_grad()
    def _finish_reload(self) -> None:
        SyncToken.held = None
        with default_dtype(self.model_config.dtype), without_warnings():  # a sync sends only what has changed
            super().finish_weight_update()
            refresh_tied_head(self.model)
            refresh_convolutions(self.model)
            repack_experts(self.model, self._received)
        restore_kernel_state(self._state)


class SharedOrNCCL(NCCLWeightTransferEngine):
    """
    vLLM's transfer over NCCL, or in memory that the trainer shares.

    Attributes:
        memory (`torch.Tensor` or `None`): What a trainer on this device has shared; `None` outside of its updates.
    """

    memory: Tensor | None = None

    def init_transfer_engine(self, init_info) -> None:
        super().init_transfer_engine(init_info)
        require_nccl(self.model_update_group, "in the server's worker")

    def receive_weights(self, update_info) -> None:
        if self.memory is None:
            super().receive_weights(update_info)
        else:
            announced = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
            self.model.load_weights(read(self.memory, announced))


class WeightTransfer(ReloadBracket, SharedOrNCCL):
    """The weight transfer with the steps of a reload."""

    def forget_run(self) -> None:
        """Forgets the memory that a run has shared and not closed, too."""
        super().forget_run()
        self.memory = None


class WorkerExtension:
    """The class to name on vLLM's command line. vLLM adds its methods to the worker."""

    def connect(self) -> str | None:
        """
        Returns the [`place_of`] the worker's device, and forgets what a run that was killed outside of an update has
        left here; `None` in the middle of an update, of which nothing is forgotten.
        """
        if self.weight_transfer_engine.is_updating:
            return None
        self.weight_transfer_engine.forget_run()
        return place_of(self.device)

    def open_memory(self, size: int, handle: list) -> str | None:
        """
        Has updates of weights read from the memory that a trainer shares, see [`~same_device.opened`]. Returns why this
        process cannot open it; `None` if it has.
        """
        try:
            self.weight_transfer_engine.memory = opened(size, handle, self.device)
        except Exception as error:  # raised here, it would reach the trainer as a status without words
            return f"{type(error).__name__}: {error}"
        return None

    def why_memory_differs(self, expected: list[int]) -> str | None:
        """Returns why the memory of [`open_memory`] is not the trainer's, which has these bytes; `None` if it is."""
        try:
            found = self.weight_transfer_engine.memory.tolist()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if found == expected else "they read other bytes than the trainer has written"

    def close_memory(self) -> None:
        """Gives the trainer's memory back."""
        self.weight_transfer_engine.memory = None

    def set_sync_token(self, token: str) -> None:
        """
        Stores the token of a sync until the next update of weights, or until this process ends. If another run waits
        for a comparison, the sync was compared and not loaded, and has no token.
        """
        SyncToken.held = token if self.weight_transfer_engine.comparison is None else None

    def get_sync_token(self) -> str | None:
        """Returns the token of the last sync; `None` if this process does not hold the weights of one."""
        return SyncToken.held

    def read_caches(self) -> list[tuple]:
        """Returns the result of [`~worker.kv_caches`] as `(layer, fields)`, which JSON can hold."""
        return [(index, asdict(cache)) for index, cache in kv_caches(self.get_model()).items()]

    def quantized_outside(self, layers: list[str]) -> list[str]:
        """Calls [`~kernel_checks.quantized_outside`] with the worker's model."""
        return quantized_outside(self.get_model(), layers)

    def why_experts_differ(self, precision: str) -> str | None:
        """Returns why [`~experts.check_experts`] refuses the worker's model; `None` if it does not."""
        try:
            check_experts(self.get_model(), precision)
        except ValueError as error:
            return str(error)
        return None

    def compare_next_update(self, format: str | None) -> None:
        """
        Has the next update of weights compared with the worker's own, and not loaded. The `format` is that of
        [`~worker.WeightComparison`].
        """
        found = WeightComparison(self.get_model(), self.vllm_config, format, quantizers_on(self.device))
        self.weight_transfer_engine.comparison = found

    def differing_weight(self) -> str | None:
        """Ends a comparison. Returns the name of the first of the compared weights that differs; `None` if none do."""
        found, self.weight_transfer_engine.comparison = self.weight_transfer_engine.comparison, None
        if found is None:
            raise RuntimeError("another run connected to this server during a comparison of weights")
        return found.differing()


WeightTransferEngineFactory.register_engine("trl_quant", WeightTransfer)
