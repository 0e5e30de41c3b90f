"""Both ends of the transfer of weights to a server: vLLM disables its communicator in silence where NCCL is missing."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")
import trl.generation.vllm_client as vllm_client
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from trl_quant.rollout.vllm.client import Client
from trl_quant.rollout.vllm.support import require_nccl
from trl_quant.rollout.vllm.transfer import NCCLTransfer


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
    client.init_communicator()


def joined_as_worker(monkeypatch, communicator) -> None:
    def join(self, init_info):
        self.model_update_group = communicator

    monkeypatch.setattr(NCCLWeightTransferEngine, "init_transfer_engine", join)
    object.__new__(NCCLTransfer).init_transfer_engine(None)


@pytest.mark.parametrize(
    ("join", "process"), [(joined_as_trainer, "the trainer's process"), (joined_as_worker, "the server's worker")]
)
def test_either_end_refuses_to_go_on(monkeypatch, join, process):
    join = partial(join, monkeypatch)
    join(SimpleNamespace(disabled=False))
    with pytest.raises(RuntimeError, match=process):
        join(SimpleNamespace(disabled=True))
