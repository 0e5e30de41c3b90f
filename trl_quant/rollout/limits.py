"""Limits on the time of a single call that may never come back: of a user's reward function, or to a server.

[`time_limit`] is for what runs in the main thread. When the time is over, another thread sends a signal to the main
one, whose handler raises an exception wherever Python stands, also in a system call that waits. It is sent again every
second, since the code that is interrupted may swallow it or wait while it cleans up.

    main     ---- the call ------------x (interrupted: `TimeoutError` where the context ends)
    monitor  ---- waits `seconds` -----^ signal ---- after `GRACE` more: the process ends

Python handles signals between two of its instructions. A call that hangs in C and never returns to Python therefore
cannot be interrupted; nor can code that swallows every interrupt. After `GRACE` seconds the process says so and ends,
since a run that ended can be resumed and a run that waits cannot.

[`finished_within`] is for what may run in a thread of its own, from any thread: a request to a server;
[`awaited_within`] for a coroutine.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any


logger = logging.getLogger(__name__)

GRACE = 60.0  # seconds from the limit to the end of a process that cannot be interrupted
AGAIN = 1.0  # seconds from one interrupt to the next
# One that nobody else takes: `signal.alarm` is math-verify's, and job schedulers send SIGUSR1 and SIGUSR2
SIGNAL = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))
WAYS_OUT = (__file__, contextlib.__file__)  # raised in these, an interrupt could pass the context that is to catch it


class Interrupted(BaseException):
    """What a [`Limit`] raises in the main thread: no `Exception`, which a user's code may take for one of its own."""

    def __init__(self, limit: "Limit"):
        self.limit = limit
        super().__init__(f"interrupted after {limit.seconds:g} seconds")


class Limit:
    """
    A limit that the main thread is under, and the thread that watches it.

    Attributes:
        over (`bool`): Whether the time is over.
        pending (`bool`): Whether a signal was sent that the main thread has not handled yet.
        ended (`bool`): Whether the main thread left the context.
    """

    active: list["Limit"] = []  # the outermost first

    def __init__(self, seconds: float, message: Callable[[], str]):
        self.seconds, self.message = seconds, message
        self.over = self.pending = self.ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="time-limit")

    def start(self) -> None:
        """Begins to watch. Called by the main thread, as `stop` is."""
        Limit.active.append(self)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch. No signal of this limit is on its way any more, so the handler may go."""
        self.ended = True  # from here on the handler raises nothing of this limit
        try:
            with self._changed:
                self._changed.notify()
            for _ in range(1000):
                if not self.pending:
                    break
                time.sleep(0.001)
        finally:
            if self in Limit.active:
                Limit.active.remove(self)

    def _watch(self) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self.ended, self.seconds):
                return
            self.over = True
            for _ in range(int(GRACE / AGAIN)):
                self.pending = True
                signal.pthread_kill(threading.main_thread().ident, SIGNAL)
                if self._changed.wait_for(lambda: self.ended, AGAIN):
                    return
        end_process(f"{self.message()} It could not be interrupted for {GRACE:g} seconds, so this process ends.")


def end_process(message: str) -> None:
    """Ends this process at once, with status 1, after it said why and where each of its threads stands."""
    print(message, file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(sys.__stderr__)
    os._exit(1)


def _handle(number, frame) -> None:
    sent = [limit for limit in Limit.active if limit.pending]
    for limit in sent:
        limit.pending = False
    if frame is not None and frame.f_code.co_filename in WAYS_OUT:
        return  # a context that is just left; else the signal comes again
    for limit in sent:
        if not limit.ended:
            raise Interrupted(limit)


@contextmanager
def time_limit(seconds: float | None, message: Callable[[], str]) -> Iterator[None]:
    """
    Context that the main thread leaves with a `TimeoutError` when it takes longer than `seconds`; `None` sets no limit.
    Contexts may stand in one another. At the end the handler of the signal is the one of before.

    Python interrupts the main thread alone: off it, and on systems without signals for threads (Windows), what hangs
    goes on to hang, which the log says, and what comes back too late is a `TimeoutError`.

    Args:
        message (`Callable[[], str]`): What the error says; called when the time is over.
    """
    if seconds is None:
        yield
        return
    in_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "pthread_kill")
    with _interrupting(seconds, message) if in_main else _telling(seconds, message):
        yield


@contextmanager
def _interrupting(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    limit, cause = Limit(seconds, message), None
    before = signal.signal(SIGNAL, _handle)
    try:
        try:
            limit.start()
            yield
        finally:
            limit.ended = True
    except Interrupted as interrupted:
        if interrupted.limit is not limit:
            raise
        cause = interrupted
    except Exception as error:  # some code makes an error of its own of an interrupt
        if not limit.over:
            raise
        cause = error
    finally:
        limit.stop()
        signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)
    if limit.over:
        raise TimeoutError(message()) from cause


@contextmanager
def _telling(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    began = time.monotonic()
    timer = threading.Timer(seconds, lambda: logger.error("%s It cannot be interrupted in this thread.", message()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if time.monotonic() - began > seconds:
        raise TimeoutError(message())


def finished_within(seconds: float | None, message: Callable[[], str], call: Callable, *args, **kwargs) -> Any:
    """
    What `call` returns or raises, from a thread of its own. If it takes longer than `seconds` a `TimeoutError` is
    raised here, and that thread is left behind: it keeps no process from ending.
    """
    if seconds is None:
        return call(*args, **kwargs)
    result = Future()

    def run() -> None:
        try:
            result.set_result(call(*args, **kwargs))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="request").start()
    if not wait([result], seconds).done:
        raise TimeoutError(message())
    return result.result()


async def awaited_within(seconds: float | None, message: Callable[[], str], awaitable: Awaitable) -> Any:
    """What `awaitable` gives; a `TimeoutError` after `seconds`, also where it refuses to be cancelled."""
    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        task.cancel()
        raise TimeoutError(message())
    return task.result()
