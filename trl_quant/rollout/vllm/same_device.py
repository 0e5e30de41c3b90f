"""
A transfer of weights between processes on one device, which NCCL refuses on a GPU and lacks on a CPU.

The trainer fills memory that a server's workers have opened: on a GPU by CUDA IPC, on a CPU as a file that both map.

    trainer                                      workers
    makes the memory   -- how to open it -------->  open it
    fills the memory   -- names, types, shapes -->  copy the tensors out of it and load them
    fills it again     <---- done ---------------
"""

import math
import os
import socket
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor


SHARED = 2**28  # bytes of the memory at most, unless one tensor is larger
ALIGNED = 16  # bytes: each tensor begins at a multiple of them

Announced = tuple[str, str, list[int]]  # name, type by torch's name, and shape of a tensor


def described(name: str, tensor: Tensor) -> Announced:
    """Returns name, type and shape of a tensor, as TRL's client announces them to a server."""
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def place_of(device: torch.device) -> str:
    """Returns what two processes compare to learn whether they are on one device: a GPU's UUID, or the host's name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname()


def bytes_to_share(announced: Iterable[Announced]) -> int:
    """Returns how much memory is shared for these tensors: for all of them up to `SHARED`, and for the largest."""
    sizes = [_occupied(each) for each in announced]
    return max(min(sum(sizes), SHARED), *sizes, ALIGNED)  # no file is mapped that has no bytes


@contextmanager
def shared_memory(size: int, device: torch.device, have_opened: Callable[[list], None]) -> Iterator[Tensor]:
    """
    Context of memory that other processes on the device have opened: (size,), UINT8.

    Args:
        size (`int`): Bytes of the memory.
        device (`torch.device`): The device of all these processes.
        have_opened (`Callable[[list], None]`):
            Called with what [`opened`] needs, as JSON takes it. It has the other processes open the memory. The file of
            a CPU is deleted then, so that none is left behind if this process is killed.

    Raises:
        `OSError`: The disk has no room for the file.
    """
    if device.type == "cuda":
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        _, (*_, handle, length, offset, _, counter, number, event, waits) = reduce_tensor(memory)
        have_opened([_text(handle), length, offset, _text(counter), number, _text(event), waits])
        yield memory
        return
    with NamedTemporaryFile(prefix="trl-quant-weights-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # without it a full disk would end the process later
        except OSError as error:
            raise OSError(
                f"{os.path.dirname(file.name)} has no room for the {size / 2**20:.0f} MiB in which weights travel to a "
                f"server on this CPU: {error}. Make room there, or set `TMPDIR` to a directory that has it and that "
                "the server sees too."
            ) from error
        memory = _mapped(file.name, size)
        have_opened([file.name])
    yield memory  # what is mapped stays when its file is deleted


def how_to_share(device: torch.device) -> str:
    """Returns what to do if another process on the device cannot open [`shared_memory`], for a message."""
    if device.type == "cuda":
        return (
            "Run both in one container. Between two, CUDA IPC must be allowed. `expandable_segments:True` in the "
            "trainer's `PYTORCH_CUDA_ALLOC_CONF` is known to break it in containers without privileges "
            "(`pidfd_getfd: Operation not permitted`): leave it out."
        )
    return (
        "Run both in one container and as one user. In two, both must see the trainer's directory for temporary files: "
        "let them have the same /tmp, or set the trainer's `TMPDIR` to a directory that both see."
    )


def opened(size: int, handle: list, device: torch.device) -> Tensor:
    """
    Returns the [`shared_memory`] of another process, which keeps it on a GPU until this tensor is gone. Raises an error
    of any class if this process cannot open it.
    """
    if device.type != "cuda":
        (name,) = handle
        return _mapped(name, size)
    memory, length, offset, counter, number, event, waits = handle
    kind = (torch.Tensor, (size,), (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index)
    given = (b64decode(memory), length, offset, False, b64decode(counter), number, b64decode(event), waits)
    return rebuild_cuda_tensor(*kind, *given)


def filled(memory: Tensor, stream: Iterable[tuple[str, Tensor]]) -> Iterator[list[Announced]]:
    """Copies tensors into the memory, as many at a time as it holds, and yields each time which ones are there."""
    held, end = [], 0
    for name, tensor in stream:
        values = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if end + len(values) > len(memory):
            yield _after_copies(held, memory)
            held, end = [], 0
        memory[end : end + len(values)] = values
        held.append(described(name, tensor))
        end += _occupied(held[-1])
    if held:
        yield _after_copies(held, memory)


def read(memory: Tensor, announced: Iterable[Announced]) -> list[tuple[str, Tensor]]:
    """Returns copies of the tensors that [`filled`] has announced, with their names."""
    found, start = [], 0
    for name, kind, shape in announced:
        dtype = getattr(torch, kind)
        values = memory[start : start + math.prod(shape) * dtype.itemsize]
        found.append((name, values.clone().view(dtype).view(shape)))
        start += _occupied((name, kind, shape))
    return _after_copies(found, memory)


def _mapped(name: str, size: int) -> Tensor:
    """
    Returns a file's bytes, shared with all that map it.

    Raises:
        `OSError`: There is no such file here. `from_file` would make one of zeros.
        `ValueError`: It has another size. `from_file` would enlarge it.
    """
    found = os.path.getsize(name)
    if found != size:
        raise ValueError(f"{name} has {found} bytes here, and {size} where it was made")
    return torch.from_file(name, True, size, dtype=torch.uint8)


def _occupied(announced: Announced) -> int:
    """Returns how many bytes of the memory a tensor takes."""
    _, kind, shape = announced
    return -(-math.prod(shape) * getattr(torch, kind).itemsize // ALIGNED) * ALIGNED


def _after_copies(result: list, memory: Tensor) -> list:
    """Returns `result` when everything has been copied, before another process touches the memory."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)
    return result


def _text(given: bytes) -> str:
    return b64encode(given).decode()
