"""Both ends of the transfer of weights to a server: through shared memory on one device, and else over NCCL."""

import json
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

from trl_quant.rollout.vllm import same_device
from trl_quant.rollout.vllm.client import Client
from trl_quant.rollout.vllm.same_device import bytes_to_share, filled, opened, place_of, read, shared_memory
from trl_quant.rollout.vllm.server import announcement
from trl_quant.rollout.vllm.support import require_nccl
from trl_quant.rollout.vllm.transfer import WeightTransfer, WorkerExtension


pytestmark = pytest.mark.vllm


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
    client.init_communicator(torch.device("cpu"))


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


@pytest.mark.parametrize("joins", ["over NCCL", "on one device"])
def test_a_run_forgets_what_a_killed_one_has_begun(monkeypatch, joins):
    """An update would be compared in place of loaded, or read from memory that nobody fills."""
    monkeypatch.setattr(NCCLWeightTransferEngine, "init_transfer_engine", lambda self, info: None)
    engine = object.__new__(WeightTransfer)
    engine.model_update_group = SimpleNamespace(disabled=False)
    engine.comparison, engine.memory = object(), torch.zeros(8, dtype=torch.uint8)
    worker = object.__new__(WorkerExtension)
    worker.weight_transfer_engine, worker.device = engine, torch.device("cpu")
    if joins == "over NCCL":
        engine.init_transfer_engine(None)
    else:
        assert worker.connect() == place_of(worker.device)
    assert engine.comparison is None and engine.memory is None


def test_a_server_on_some_of_the_trainers_gpus_is_refused():
    """Over NCCL two ranks cannot be on one GPU, and only a server whose workers are all there shares memory."""
    client = object.__new__(Client)
    client.check, client.base_url = lambda client: None, "http://127.0.0.1:8000"
    here = place_of(torch.device("cpu"))
    client.ask_workers = lambda method: ["another device", here]
    with pytest.raises(ValueError, match="has 2 GPUs, of which the trainer uses one"):
        client.init_communicator(torch.device("cpu"))
    client.ask_workers = lambda method: [here, here]
    client.init_communicator(torch.device("cpu"))
    assert client.shared_on == torch.device("cpu")


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
def test_shared_memory_carries_each_tensor_unchanged(monkeypatch, most, times):
    """All at once, a few at a time, or no more than the largest; the other process sees what was written."""
    monkeypatch.setattr(same_device, "SHARED", most)
    sent = tensors()
    size = bytes_to_share(announcement(sent))
    device = torch.device("cpu")
    with shared_memory(size, device) as (memory, handle):
        others = opened(size, json.loads(json.dumps(handle)), device)
        assert others.data_ptr() != memory.data_ptr()
        received = list(written_anew(others, filled(memory, iter(sent))))
    assert len(received) == times and size <= max(most, 528)
    assert [each for announced, _ in received for each in announced] == announcement(sent)
    found = [each for _, batch in received for each in batch]
    for (name, tensor), (other, copy) in zip(sent, found, strict=True):
        assert name == other and copy.dtype == tensor.dtype and torch.equal(copy, tensor)
    assert not Path(*handle).exists()
