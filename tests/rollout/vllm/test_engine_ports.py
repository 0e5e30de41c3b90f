"""An engine starts on another port where another process has taken the one that was found free."""

import os
import socket
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, TCPStore

from trl_quant.rollout.vllm import lifetime
from trl_quant.rollout.vllm.lifetime import LAUNCHER_VARIABLES, START_ATTEMPTS, start_on_a_free_port


@pytest.fixture
def taken():
    """A port on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


RANK = SimpleNamespace(process_index=0, local_process_index=0, num_processes=1)


class Engine:
    """Listens as vLLM's process group does, on the port of the environment; the next of `ports` is found free."""

    def __init__(self, monkeypatch, *ports: int):
        self.left, self.tried, self.store = list(ports), [], None
        monkeypatch.setattr(lifetime, "choose_port", self.choose)

    def choose(self) -> None:
        os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT") or str(self.left.pop(0))

    def start(self) -> str:
        port = int(os.environ["MASTER_PORT"])
        self.tried.append(port)
        self.store = TCPStore("127.0.0.1", port, 1, True)
        return "engine"


def test_another_port_is_found(taken, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    engine = Engine(monkeypatch, taken, taken, free)
    assert start_on_a_free_port(engine.start, RANK) == "engine"
    assert engine.tried == [taken, taken, free] and engine.store.port == free


def test_a_port_of_the_user_is_kept(taken, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(taken))
    engine = Engine(monkeypatch)
    with pytest.raises(DistNetworkError, match="EADDRINUSE"):
        start_on_a_free_port(engine.start, RANK)
    assert engine.tried == [taken]


def test_it_ends(taken, monkeypatch):
    engine = Engine(monkeypatch, *[taken] * 2 * START_ATTEMPTS)
    with pytest.raises(DistNetworkError, match=str(taken)):
        start_on_a_free_port(engine.start, RANK)
    assert engine.tried == [taken] * START_ATTEMPTS


def test_other_errors_are_not_repeated():
    calls = []

    def start():
        calls.append(1)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        start_on_a_free_port(start, RANK)
    assert len(calls) == 1


def test_it_is_started_as_by_a_launcher(monkeypatch):
    """With the variables of its rank, which are gone afterwards; the port is TRL's choice."""
    rank = SimpleNamespace(process_index=3, local_process_index=1, num_processes=4)
    seen = start_on_a_free_port(lambda: {name: os.environ[name] for name in LAUNCHER_VARIABLES}, rank)
    assert 1023 < int(seen.pop("MASTER_PORT")) < 2**16
    assert seen == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
    assert not {*LAUNCHER_VARIABLES} & {*os.environ}
