"""An engine starts on another port where another process has taken the one that TRL found free."""

import os
import socket

import pytest
from torch.distributed import DistNetworkError, TCPStore

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


class Engine:
    """Listens as vLLM's process group does, on the port of the environment or else on the next of `ports`."""

    def __init__(self, *ports: int):
        self.left, self.tried, self.store = list(ports), [], None

    def start(self) -> None:
        port = int(os.environ.get("MASTER_PORT") or self.left.pop(0))
        os.environ["MASTER_PORT"] = str(port)  # as TRL does
        self.tried.append(port)
        self.store = TCPStore("127.0.0.1", port, 1, True)


def test_another_port_is_found(taken):
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    engine = Engine(taken, taken, free)
    start_on_a_free_port(engine.start)
    assert engine.tried == [taken, taken, free] and engine.store.port == free


def test_a_port_of_the_user_is_kept(taken, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(taken))
    engine = Engine()
    with pytest.raises(DistNetworkError, match="EADDRINUSE"):
        start_on_a_free_port(engine.start)
    assert engine.tried == [taken]


def test_it_ends(taken):
    engine = Engine(*[taken] * 2 * START_ATTEMPTS)
    with pytest.raises(DistNetworkError, match=str(taken)):
        start_on_a_free_port(engine.start)
    assert engine.tried == [taken] * START_ATTEMPTS


def test_other_errors_are_not_repeated():
    calls = []

    def start():
        calls.append(1)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        start_on_a_free_port(start)
    assert len(calls) == 1
