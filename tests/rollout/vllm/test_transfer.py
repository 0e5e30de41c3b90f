"""Both ends of the transfer of weights to a server: through shared memory on one device, and else over NCCL."""

import errno
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")
import trl.generation.vllm_client as vllm_client
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from trl_quant.rollout.vllm import same_device, transfer
from trl_quant.rollout.vllm.client import Client
from trl_quant.rollout.vllm.same_device import (
    bytes_to_share,
    filled,
    how_to_share,
    opened,
    place_of,
    read,
    shared_memory,
)
from trl_quant.rollout.vllm.server import announcement
from trl_quant.rollout.vllm.support import require_nccl
from trl_quant.rollout.vllm.transfer import WeightTransfer, WorkerExtension


pytestmark = pytest.mark.vllm
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_disabled_communicator_sends_nothing(monkeypatch):
    """vLLM raises no error, and the receiver keeps what its memory held. The check finds that."""
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    store = torch.distributed.HashStore()
    sender, receiver = (PyNcclCommunicator(StatelessProcessGroup(rank, 2, store), "cpu") for rank in range(2))
    sent, received = torch.ones(4), torch.zeros(4)
    sender.broadcast(sent, src=0)
    receiver.broadcast(received, src=0)
    assert not received.any()
    for end in (sender, receiver):
        with pytest.raises(RuntimeError, match="`VLLM_DISABLE_PYNCCL` is set"):
            require_nccl(end, "here")


def joined_as_trainer(monkeypatch, communicator) -> None:
    monkeypatch.setattr(
        vllm_client.VLLMClient, "init_communicator", lambda self, device: setattr(self, "communicator", communicator)
    )
    client = object.__new__(Client)
    client.check, client.group_port, client.seconds = lambda client: None, 0, None
    client.ask_workers = lambda method: ["another device"]
    client.init_communicator(CPU)


def joined_as_worker(monkeypatch, communicator) -> None:
    def join(self, init_info):
        self.model_update_group = communicator

    monkeypatch.setattr(NCCLWeightTransferEngine, "init_transfer_engine", join)
    object.__new__(WeightTransfer).init_transfer_engine(None)


@pytest.mark.parametrize(
    ("join", "process"), [(joined_as_trainer, "the trainer's process"), (joined_as_worker, "the server's worker")]
)
def test_either_end_refuses_to_go_on(monkeypatch, join, process):
    join = partial(join, monkeypatch)
    join(SimpleNamespace(disabled=False))
    with pytest.raises(RuntimeError, match=process):
        join(SimpleNamespace(disabled=True))


def worker(model=None) -> WorkerExtension:
    """A worker's methods, without vLLM's own."""
    engine = object.__new__(WeightTransfer)
    engine.model_update_group, engine.model = SimpleNamespace(disabled=False), model
    found = object.__new__(WorkerExtension)
    found.weight_transfer_engine, found.device = engine, CPU
    return found


def client_of(*workers: WorkerExtension) -> Client:
    """A client whose server has these workers in this process. What it sends is JSON."""
    client = object.__new__(Client)
    client.check, client.base_url, client.posted = lambda client: None, "http://127.0.0.1:8000", []
    client.token, client.seconds = None, None

    def post(url, json=None, **kwargs):
        client.posted.append(url.rpartition("/")[2])
        if client.posted[-1] == "collective_rpc":
            given = loaded(json)
            return {"results": [getattr(each, given["method"])(**given["kwargs"]) for each in workers]}

    client._post = post
    return client


def loaded(sent):
    return json.loads(json.dumps(sent))


@pytest.mark.parametrize("joins", ["over NCCL", "on one device"])
def test_a_run_forgets_what_a_killed_one_has_left(monkeypatch, joins):
    """An update would be compared in place of loaded, or read from memory that nobody fills."""
    monkeypatch.setattr(NCCLWeightTransferEngine, "init_transfer_engine", lambda self, info: None)
    left = worker()
    engine = left.weight_transfer_engine
    engine.comparison, engine.memory = object(), torch.zeros(8, dtype=torch.uint8)
    if joins == "over NCCL":
        engine.init_transfer_engine(None)
    else:
        assert left.connect() == place_of(CPU)
    assert engine.comparison is None and engine.memory is None


@pytest.mark.parametrize("compares", [False, True])
def test_a_run_is_refused_in_the_middle_of_another_ones_update(monkeypatch, compares):
    """Layers may be half loaded, and vLLM begins no other update."""
    for step in ("start_weight_update", "finish_weight_update"):
        monkeypatch.setattr(NCCLWeightTransferEngine, step, lambda self: None)
    model = torch.nn.Module()
    workers = [worker(model), worker(model)]
    engine = workers[1].weight_transfer_engine
    engine.model_config = SimpleNamespace(dtype=torch.float32)
    engine.comparison = object() if compares else None
    engine.start_weight_update()
    client, memory = client_of(*workers), torch.zeros(8, dtype=torch.uint8)
    engine.memory = memory
    with pytest.raises(ValueError, match=r"stands in the middle of an update of a run that has ended.* Restart it"):
        client.init_communicator(CPU)
    assert client.shared_on is None and engine.memory is memory and (engine.comparison is not None) is compares
    engine.finish_weight_update()
    client.init_communicator(CPU)
    assert client.shared_on == CPU and engine.memory is None and engine.comparison is None


def test_a_failed_end_of_an_update_leaves_it_unfinished(monkeypatch):
    def fail(self):
        raise RuntimeError("no memory")

    monkeypatch.setattr(NCCLWeightTransferEngine, "start_weight_update", lambda self: None)
    monkeypatch.setattr(NCCLWeightTransferEngine, "finish_weight_update", fail)
    left = worker(torch.nn.Module())
    left.weight_transfer_engine.model_config = SimpleNamespace(dtype=torch.float32)
    left.weight_transfer_engine.start_weight_update()
    with pytest.raises(RuntimeError, match="no memory"):
        left.weight_transfer_engine.finish_weight_update()
    assert left.connect() is None


@pytest.mark.parametrize(
    ("device", "reason"),
    [(GPU, "NCCL refuses two ranks on one GPU.* on other GPUs"), (CPU, "NCCL does not run on a CPU.*trainer's host")],
)
def test_a_server_on_some_of_the_trainers_devices_is_refused(monkeypatch, device, reason):
    """Over NCCL two ranks cannot be on one GPU, and only a server whose workers are all there shares memory."""
    monkeypatch.setattr("trl_quant.rollout.vllm.client.place_of", lambda device: "here")
    client = client_of()
    client.ask_workers = lambda method: ["another device", "here", "here"]
    with pytest.raises(ValueError, match=f"has 3 workers, 2 of them on the trainer's device.*{reason}") as error:
        client.init_communicator(device)
    assert ("GPU" in str(error.value)) is (device is GPU)


def test_no_worker_answers():
    """Of no answers, all say that the worker is on the trainer's device."""
    with pytest.raises(RuntimeError, match=r"a call of `connect`, but not as `vllm serve` .*the result of no worker"):
        client_of().init_communicator(CPU)


# A client tries the memory before a run


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """The trainer's directory for temporary files, which is empty."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def elsewhere(path: Path):
    """Opens the memory as a process does that has another directory at the place of the trainer's."""
    return lambda size, handle, device: opened(size, [str(path / Path(*handle).name)], device)


def test_a_server_on_the_trainers_device_shares_memory(directory):
    workers = [worker(), worker()]
    client, state = client_of(*workers), torch.get_rng_state()
    client.init_communicator(CPU)
    assert client.shared_on == CPU and not list(directory.iterdir())
    assert [each.weight_transfer_engine.memory for each in workers] == [None, None]
    assert torch.equal(torch.get_rng_state(), state)  # it is the run's


FAULTS = {
    "FileNotFoundError: ": elsewhere,
    "they read other bytes than the trainer has written": lambda path: lambda size, *_: torch.zeros(size).byte(),
    "NotImplementedError: ": lambda path: lambda size, *_: torch.empty(size, device="meta"),  # which cannot be read
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_does_not_share_memory_is_refused(tmp_path, directory, monkeypatch, fault):
    """It would sample from zeros. The reason is the worker's, and nothing is left behind in either directory."""
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(transfer, "opened", FAULTS[fault](tmp_path / "other"))
    client = client_of(worker(), worker())
    with pytest.raises(ValueError, match=f"server at http://127.0.0.1:8000 is on .*: {fault}") as error:
        client.init_communicator(CPU)
    assert how_to_share(CPU) in str(error.value) and str(error.value).count(fault) == 1
    assert not list(directory.iterdir()) and not list((tmp_path / "other").iterdir())


def test_what_to_do_where_memory_is_not_shared():
    on_cpu, on_gpu = how_to_share(CPU), how_to_share(GPU)
    assert "the same /tmp" in on_cpu and "`TMPDIR`" in on_cpu and "CUDA" not in on_cpu
    assert "CUDA IPC must be allowed" in on_gpu and "`expandable_segments:True`" in on_gpu and "TMPDIR" not in on_gpu


def test_memory_that_cannot_be_opened_in_a_sync(tmp_path, directory, monkeypatch):
    """The server goes on: it was not paused, and no update has begun."""
    client = client_of(worker())
    client.init_communicator(CPU)
    monkeypatch.setattr(transfer, "opened", elsewhere(tmp_path / "other"))
    client.posted.clear()
    with pytest.raises(ValueError, match=r"cannot read the memory .*No such file") as error:
        client.update_named_params([("a", "float32", [2])], iter([("a", torch.ones(2))]))
    assert client.posted == ["collective_rpc"] and "middle of an update" not in str(error.value)


def test_a_file_of_another_size_is_not_opened(tmp_path):
    """`torch.from_file` would enlarge it, and make one that is missing."""
    path = tmp_path / "weights"
    with pytest.raises(FileNotFoundError, match=str(path)):
        opened(64, [str(path)], CPU)
    path.write_bytes(bytes(63))
    with pytest.raises(ValueError, match=f"{path} has 63 bytes here, and 64 where it was made"):
        opened(64, [str(path)], CPU)
    assert path.stat().st_size == 63
    path.write_bytes(bytes(range(64)))
    assert opened(64, [str(path)], CPU).tolist() == [*range(64)]


def test_a_full_disk_is_named(directory, monkeypatch):
    def full(file, start, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = f"{directory} has no room for the 256 MiB .*No space left on device.* set `TMPDIR`"
    with pytest.raises(OSError, match=words), shared_memory(2**28, CPU, list):
        pass
    assert not list(directory.iterdir())


KINDS = (torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.uint8)


def tensors() -> list[tuple[str, torch.Tensor]]:
    """Of all types, of sizes that are no multiple of the alignment; a scalar, an empty one, and a view with strides."""
    shapes = [(3, 5), (), (0, 4), (129,), (7, 1, 11)]
    found = [torch.randint(0, 100, shape).to(kind) for kind in KINDS for shape in shapes]
    return [(str(number), tensor) for number, tensor in enumerate([*found, torch.arange(35.0).view(5, 7).T])]


def written_anew(memory, batches):
    """Reads each batch, then overwrites the memory, as the next batch does."""
    for announced in batches:
        found = read(memory, announced)
        memory.fill_(77)
        yield announced, found


@pytest.mark.parametrize(("most", "times"), [(2**28, 1), (600, 5), (1, 6)])
def test_shared_memory_carries_each_tensor_unchanged(monkeypatch, directory, most, times):
    """
    All at once, a few at a time, or no more than the largest; the other process sees what was written. The file is
    deleted before, so that a process that is killed then leaves none.
    """
    monkeypatch.setattr(same_device, "SHARED", most)
    sent, others = tensors(), []
    size = bytes_to_share(announcement(sent))

    def have_opened(handle):
        assert Path(*handle).parent == directory
        others.append(opened(size, loaded(handle), CPU))

    with shared_memory(size, CPU, have_opened) as memory:
        assert not list(directory.iterdir())
        assert others[0].data_ptr() != memory.data_ptr()
        received = list(written_anew(others[0], filled(memory, iter(sent))))
    assert len(received) == times and size <= max(most, 528)
    assert [each for announced, _ in received for each in announced] == announcement(sent)
    found = [each for _, batch in received for each in batch]
    for (name, tensor), (other, copy) in zip(sent, found, strict=True):
        assert name == other and copy.dtype == tensor.dtype and torch.equal(copy, tensor)


@pytest.mark.parametrize("sent", [[], [("a", torch.zeros(0)), ("b", torch.zeros(2, 0, dtype=torch.int8))]])
def test_tensors_without_values_are_sent(sent):
    """A file of no bytes could not be mapped."""
    with shared_memory(bytes_to_share(announcement(sent)), CPU, list) as memory:
        found = [each for announced in filled(memory, iter(sent)) for each in read(memory, announced)]
    assert announcement(found) == announcement(sent)
