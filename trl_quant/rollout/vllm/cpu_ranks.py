"""A vLLM worker for CPU ranks that a launcher started. It gives each engine its own shared memory.

vLLM's CPU ranks exchange tensors through shared memory: files in `/dev/shm` whose names start with the part of the
engine's address after its last colon. Ranks that a launcher started (`torchrun`, `accelerate launch`) all have the
address `env://`, so all engines on a machine use the same names. The second of two engines fails ("create shm in
SHMManager failed. errno: 17"), and so does every engine after one that was killed, because its files remain.
"""

from pathlib import Path
from uuid import uuid4

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


SHARED_MEMORY = Path("/dev/shm")


class RankOnCPU(CPUWorker):
    """One rank of an engine. The engine's shared memory has a unique name and leaves no files."""

    def init_device(self):
        names = [f"trl_quant_{uuid4().hex}"]
        torch.distributed.broadcast_object_list(names)  # all ranks take the first rank's name
        (name,) = names
        # vLLM takes only the name from this address, since the launcher's process group is already up.
        self.distributed_init_method = f"env://:{name}"
        super().init_device()
        # All ranks have opened the memory by now and keep it until they end, so its files can be deleted here.
        # Otherwise they would outlive a rank that is killed.
        for file in SHARED_MEMORY.glob(f"{name}-*"):
            file.unlink(missing_ok=True)
