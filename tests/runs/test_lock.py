"""One process at a time writes a place: runs, evaluations and copies; the system frees the lock of one that died."""

import os
import signal
import threading

import pytest
from locks import holder

from trl_quant.storage.lock import OUTPUT_LOCK, locked


@pytest.fixture
def held(tmp_path):
    process = holder(tmp_path / OUTPUT_LOCK)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_another_process_is_refused_until_the_holder_dies(tmp_path, held):
    lock = tmp_path / OUTPUT_LOCK
    with pytest.raises(ValueError, match=rf"^Taken\. It is process {held.pid} on "), locked(lock, "Taken."):
        pass
    held.kill()
    held.wait()
    assert lock.exists()  # a killed process removes nothing
    with locked(lock, "Taken."), locked(tmp_path / "." / OUTPUT_LOCK, "Taken."):
        assert str(os.getpid()) in lock.read_text()
    assert not lock.exists()


def test_a_lock_is_of_one_thread_and_ends_with_an_error(tmp_path):
    lock, refused = tmp_path / "new" / OUTPUT_LOCK, []

    def take():
        try:
            with locked(lock, "Taken."):
                pass
        except ValueError as error:
            refused.append(str(error))

    with pytest.raises(KeyError), locked(lock, "Taken."):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        raise KeyError
    take()
    assert refused == ["Taken. It is another thread of this process."]
    assert not lock.exists()
