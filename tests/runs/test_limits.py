"""Limits on the time of a call: what is interrupted, what is not, and that nothing is left of them."""

import signal
import subprocess
import sys
import threading
import time
from contextvars import ContextVar

import pytest
import torch

from trl_quant.rollout import limits
from trl_quant.rollout.limits import Interrupted, called_within, finished_within, time_limit


def message() -> str:
    return "the call took too long"


def sleeps():
    time.sleep(60)


def spins():
    while True:
        pass


def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_child():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=True)


def swallows():
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def swallows_once_and_returns():
    try:
        time.sleep(60)
    except BaseException:
        return


def waits_in_its_cleanup():
    try:
        time.sleep(60)
    finally:
        time.sleep(60)


def makes_an_error_of_its_own():
    try:
        time.sleep(60)
    except BaseException:
        raise KeyError("of its own") from None


@pytest.mark.parametrize(
    "hangs",
    [
        sleeps,
        spins,
        waits_for_a_lock,
        waits_for_a_child,
        swallows,
        swallows_once_and_returns,
        waits_in_its_cleanup,
        makes_an_error_of_its_own,
    ],
)
def test_what_hangs_is_interrupted(hangs, monkeypatch):
    monkeypatch.setattr(limits, "REPEAT", 0.2)
    before = signal.getsignal(limits.SIGNAL)
    with pytest.raises(TimeoutError, match="the call took too long"), time_limit(0.2, message):
        hangs()
    assert signal.getsignal(limits.SIGNAL) is before and not limits.Limit.active


def test_what_ends_in_time_is_left_alone():
    with time_limit(60, message):
        pass
    with time_limit(None, message):
        pass
    with pytest.raises(KeyError), time_limit(60, message):
        raise KeyError
    with pytest.raises(KeyboardInterrupt), time_limit(60, message):
        raise KeyboardInterrupt
    assert not limits.Limit.active
    assert not [thread for thread in threading.enumerate() if thread.name == "time-limit" and not ends(thread)]


def ends(thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def test_limits_that_end_at_once_leave_no_signal_behind():
    """A signal that came after its handler was taken away would end the process."""
    ended = 0
    for i in range(2000):
        try:
            with time_limit(0.001, message):
                time.sleep(0.001 + (i % 7 - 3) * 1e-5)
        except TimeoutError:
            ended += 1
    assert ended > 0 and not limits.Limit.active


def test_limits_in_one_another():
    outer, inner = time_limit(60, lambda: "the outer"), time_limit(0.1, lambda: "the inner")
    with pytest.raises(TimeoutError, match="the inner"), outer, inner:
        sleeps()
    with pytest.raises(TimeoutError, match="the outer") as error, time_limit(0.1, lambda: "the outer"):
        try:
            with time_limit(60, lambda: "the inner"):
                sleeps()
        except Interrupted as interrupted:
            assert interrupted.limit.message() == "the outer"
            raise
    assert isinstance(error.value.__cause__, Interrupted)


def test_a_users_own_handlers_stay():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1)), signal.signal(limits.SIGNAL, rung.append)
    mine = signal.getsignal(limits.SIGNAL)
    try:
        with pytest.raises(TimeoutError), time_limit(0.3, message):
            signal.setitimer(signal.ITIMER_REAL, 0.05)  # as math-verify does
            sleeps()
        assert rung == [1] and signal.getsignal(limits.SIGNAL) is mine
    finally:
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(limits.SIGNAL, before[1])


@pytest.mark.parametrize("hangs", [sleeps, waits_for_a_lock, swallows, waits_in_its_cleanup])
def test_off_the_main_thread_a_call_is_left(hangs):
    """With the caller's grad mode and context variables; what it returns or raises in time is the caller's."""
    name, found = ContextVar("name"), []

    def call():
        name.set("mine")
        with torch.no_grad():
            found.append(called_within(60, message, lambda: (name.get(), torch.is_grad_enabled())))
        for act in (hangs, lambda: 1 / 0):
            try:
                called_within(0.2, message, act)
            except (TimeoutError, ZeroDivisionError) as error:
                found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found == [("mine", False), message(), "division by zero"]


def test_a_call_in_c_ends_the_process():
    """With the signal blocked, `sleep` in C goes on as a kernel or a library does that never looks at signals."""
    code = """
import ctypes, signal
from trl_quant.rollout import limits
limits.GRACE, limits.REPEAT = 2.0, 0.5
with limits.time_limit(0.1, lambda: "the call took too long."):
    signal.pthread_sigmask(signal.SIG_BLOCK, [limits.SIGNAL])
    ctypes.CDLL(None).sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1, done.stderr
    assert "the call took too long. It could not be interrupted for 2 seconds, so this process ends." in done.stderr
    assert 'File "<string>", line 7' in done.stderr  # where it stood


def test_a_call_in_a_thread_of_its_own():
    release = threading.Event()
    with pytest.raises(TimeoutError, match="the call took too long"):
        finished_within(0.1, message, release.wait)
    release.set()
    assert finished_within(60, message, sum, [1, 2]) == 3 == finished_within(None, message, sum, [1, 2])
    with pytest.raises(ZeroDivisionError):
        finished_within(60, message, lambda: 1 / 0)
