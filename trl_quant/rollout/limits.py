"""Time limits for single calls that may never return: a user's reward function, or a request to a server.

[`time_limit`] limits code in the main thread. When the time is over, another thread signals the main one. The signal's
handler raises an exception at the current instruction, even inside a system call that waits. The signal is repeated
every second, because the interrupted code may swallow the exception or wait again while it cleans up.

    main     ---- the call ------------x (interrupted: `TimeoutError` where the context ends)
    monitor  ---- waits `seconds` -----^ signal ---- after `GRACE` more: the process ends

Python handles signals between two of its instructions. A call that hangs in C therefore cannot be interrupted, nor can
code that swallows every exception. If the call is still running `GRACE` seconds after the limit, the process prints an
error and ends: a run that has ended can be resumed, and one that hangs cannot.

[`finished_within`] limits a call that may run in a separate thread, such as a request to a server. It can be called
from any thread. [`awaited_within`] limits a coroutine.
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
REPEAT = 1.0  # seconds from one signal to the next
# A signal that nobody else uses: math-verify takes SIGALRM, and job schedulers send SIGUSR1 and SIGUSR2
SIGNAL = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", None))
# Files whose code must not be interrupted: an exception raised there could bypass the context that must catch it
UNINTERRUPTED_FILES = (__file__, contextlib.__file__)


class Interrupted(BaseException):
    """Raised by a [`Limit`] in the main thread. Not an `Exception`, because a user's code might catch that."""

    def __init__(self, limit: "Limit"):
        self.limit = limit
        super().__init__(f"interrupted after {limit.seconds:g} seconds")


class Limit:
    """
    A time limit on the main thread, and the thread that watches it.

    Attributes:
        over (`bool`): Whether the time limit has passed.
        pending (`bool`): Whether the main thread has yet to handle a signal.
        ended (`bool`): Whether the main thread has left the context.
    """

    active: list["Limit"] = []  # from the outermost to the innermost

    def __init__(self, seconds: float, message: Callable[[], str]):
        self.seconds, self.message = seconds, message
        self.over = self.pending = self.ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="time-limit")

    def start(self) -> None:
        """Starts the watching thread. Called in the main thread."""
        Limit.active.append(self)
        self._thread.start()

    def stop(self) -> None:
        """
        Stops the watching thread and waits for signals that it sent, so that the handler may be removed. Called in the
        main thread.
        """
        self.ended = True  # from now on the handler raises nothing for this limit
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
            for _ in range(int(GRACE / REPEAT)):
                self.pending = True
                signal.pthread_kill(threading.main_thread().ident, SIGNAL)
                if self._changed.wait_for(lambda: self.ended, REPEAT):
                    return
        end_process(f"{self.message()} It could not be interrupted for {GRACE:g} seconds, so this process ends.")


def end_process(message: str) -> None:
    """Prints `message` and the stack of every thread, and ends this process at once with status 1."""
    print(message, file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(sys.__stderr__)
    os._exit(1)


def _handle(number, frame) -> None:
    """Handles the signal: interrupts the main thread for the outermost limit whose time is over."""
    signalled = [limit for limit in Limit.active if limit.pending]
    for limit in signalled:
        limit.pending = False
    if frame is not None and frame.f_code.co_filename in UNINTERRUPTED_FILES:
        return  # the context is being left, or the signal will be repeated
    for limit in signalled:
        if not limit.ended:
            raise Interrupted(limit)


@contextmanager
def time_limit(seconds: float | None, message: Callable[[], str]) -> Iterator[None]:
    """
    Context that raises `TimeoutError` if it takes longer than `seconds`. Contexts may be nested. On exit the previous
    handler of the signal is restored.

    Only the main thread can be interrupted. In another thread, and on a system that cannot signal threads (Windows), a
    call that hangs keeps hanging, and the log says so; if it returns late, the context raises `TimeoutError`.

    Args:
        seconds (`float` or `None`): The limit; `None` for no limit.
        message (`Callable[[], str]`): Returns the text of the error. Called when the time is over.
    """
    if seconds is None:
        yield
        return
    can_interrupt = threading.current_thread() is threading.main_thread() and hasattr(signal, "pthread_kill")
    with _interrupting(seconds, message) if can_interrupt else _reporting(seconds, message):
        yield


@contextmanager
def _interrupting(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """[`time_limit`] in the main thread, which a signal interrupts."""
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
    except Exception as error:  # the interrupted code may have raised an error of its own instead
        if not limit.over:
            raise
        cause = error
    finally:
        limit.stop()
        signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)
    if limit.over:
        raise TimeoutError(message()) from cause


@contextmanager
def _reporting(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """[`time_limit`] where nothing can be interrupted: logs that the time is over, and raises if the code returns."""
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
    Runs `call` in a thread of its own and returns its result, or raises its error. If it takes longer than `seconds`,
    raises `TimeoutError` and abandons the thread, which does not keep the process alive.
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
    """Awaits `awaitable`. After `seconds`, raises `TimeoutError`, even if `awaitable` refuses to be cancelled."""
    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        task.cancel()
        raise TimeoutError(message())
    return task.result()
