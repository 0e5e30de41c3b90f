"""A weight transfer through a file, for servers without NCCL: the trainer's end and the end in vLLM's worker."""

import os
import time
from pathlib import Path

import torch


FILE = Path(os.environ.get("FILE_TRANSFER", "/nowhere"))


def send(iterator, group=None, src=0, post_iter_func=None) -> None:
    """Stands in for vLLM's broadcast: writes the tensors in their order."""
    part = FILE.with_suffix(".part")
    torch.save([(name, tensor.detach().clone()) for name, tensor in iterator], part)
    part.rename(FILE)


def receive() -> list[tuple[str, torch.Tensor]]:
    while not FILE.exists():
        time.sleep(0.05)
    tensors = torch.load(FILE)
    FILE.unlink()
    return tensors


if "FILE_TRANSFER_WORKER" in os.environ:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from trl_quant.rollout.vllm.transfer import ReloadBracket, WorkerExtension

    class Files(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info):
            pass

        def receive_weights(self, update_info):
            tensors = receive()
            found = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]
            info = update_info
            assert found == list(map(tuple, zip(info.names, info.dtype_names, info.shapes, strict=True)))
            self.model.load_weights(iter(tensors))

    class FileTransfer(ReloadBracket, Files):
        pass

    WeightTransferEngineFactory.register_engine("files", FileTransfer)

    __all__ = ["WorkerExtension"]


def trainer_send_weights(iterator, trainer_args) -> None:
    """`send`, by the name that vLLM had for it before 0.28."""
    send(iterator)
