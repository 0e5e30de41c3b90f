"""Time limits for single calls that may never return: a user's function, or a request to a server.

[`time_limit`] limits code in the main thread. When the time is over, another thread signals the main one. The signal's
handler raises an exception at the current instruction, even inside a system call that waits. The signal is repeated
every second, because the interrupted code may swallow the exception or wait again while it cleans up.

    main     ---- the call ------------x (interrupted: `TimeoutError` where the context ends)
    monitor  ---- waits `seconds` -----^ signal ---- after `GRACE` more: the process ends

Python handles signals between two of its instructions. A call that hangs in C therefore cannot be interrupted, nor can
code that swallows every exception. If the call is still running `GRACE` seconds after the limit, the process prints an
error and ends: a run that has ended can be resumed, and one that hangs cannot. An interactive process only prints it.

[`called_within`] limits a call in any thread: in the main one as above, in others with [`finished_within`], which runs
the call in a thread of its own. [`CoroutineThread`] limits coroutines.

A call that was ended may leave threads behind, such as those of a `ThreadPoolExecutor` or of `asyncio.to_thread`, and
Python waits for its threads before it exits. [`leave_threads_at_exit`] limits that time as well, to `GRACE` seconds.
"""

import asyncio
import atexit
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch


logger = logging.getLogger(__name__)

GRACE = 60.0  # seconds from the limit to the end of a process that cannot be interrupted
REPEAT = 1.0  # seconds from one signal to the next
# A signal that nobody else uses: math-verify takes SIGALRM, and job schedulers send SIGUSR1 and SIGUSR2
SIGNAL = next((getattr(signal, name) for name in ("SIGRTMAX", "SIGUSR2") if hasattr(signal, name)), None)
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
            leave_threads_at_exit()
            for _ in range(int(GRACE / REPEAT)):
                self.pending = True
                signal.pthread_kill(threading.main_thread().ident, SIGNAL)
                if self._changed.wait_for(lambda: self.ended, REPEAT):
                    return
        end_process(f"{self.message()} It could not be interrupted for {GRACE:g} seconds, so this process ends.")


def end_process(message: str) -> None:
    """
    Prints `message` and the stack of every thread, and ends this process at once with status 1. An interactive process,
    such as a notebook's kernel, holds more than a run: it stays.
    """
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    print(message, "Restart the session." if is_interactive else "", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(sys.__stderr__)
    if not is_interactive:
        os._exit(1)


def leave_threads_at_exit() -> None:
    """
    Limits the time for which this process waits at its end for threads and child processes. Called when a call is ended
    that may have left some behind. Until the main program has ended, whether with an error or not, nothing happens, so
    a program that handles the error goes on. The process keeps the exit status of its main program.

        main program ends --- waits for threads and children --- `GRACE / 2`: exits without them --- `GRACE`: status 1
    """
    with contextlib.suppress(RuntimeError):  # the process is ending already
        # Registered at each call, since Python calls the last one first: before a pool waits for its threads
        threading._register_atexit(_Exit.begin)


class _Exit:
    """The end of this process, after its main program has ended."""

    began: float | None = None

    @classmethod
    def begin(cls) -> None:
        """Called in the main thread, before Python waits for the other threads."""
        if cls.began is not None:
            return
        cls.began = time.monotonic()
        if not hasattr(signal, "setitimer"):  # Windows
            faulthandler.dump_traceback_later(GRACE, exit=True, file=sys.__stderr__)
            return
        atexit.register(cls._wait_for_children)
        signal.signal(signal.SIGALRM, cls._stop_waiting)
        signal.setitimer(signal.ITIMER_REAL, GRACE / 2)

    @classmethod
    def _stop_waiting(cls, number, frame) -> None:
        """Handles the alarm. The exception ends Python's waiting for threads, as Ctrl-C does, and Python prints it."""
        faulthandler.dump_traceback(sys.__stderr__)
        faulthandler.dump_traceback_later(GRACE / 2, exit=True, file=sys.__stderr__)
        raise TimeoutError(
            f"The program ended {GRACE / 2:g} seconds ago, and threads that a call left behind when its time was over "
            "are still running. The process exits without them."
        )

    @classmethod
    def _wait_for_children(cls) -> None:
        """Called when the threads have ended or are not waited for, before Python waits for child processes."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for child in multiprocessing.active_children():
            if not child.daemon:  # Python itself ends the others
                child.join(max(0, cls.began + GRACE / 2 - time.monotonic()))
                child.kill()


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
    Context of code in the main thread that raises `TimeoutError` if it takes longer than `seconds`. Contexts may be
    nested. On exit the previous handler of the signal is restored.

    Args:
        seconds (`float` or `None`): The limit; `None` for no limit.
        message (`Callable[[], str]`): Returns the text of the error. Called when the time is over.
    """
    if seconds is None:
        yield
        return
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


def called_within(seconds: float | None, message: Callable[[], str], call: Callable, *args, **kwargs) -> Any:
    """
    Returns `call(*args, **kwargs)`, or raises `TimeoutError` if it takes longer than `seconds`. In the main thread the
    call is interrupted. In other threads it runs in a thread of its own and is abandoned.

    Args:
        seconds (`float` or `None`): The limit; `None` for no limit.
        message (`Callable[[], str]`): Returns the text of the error. Called when the time is over.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"):  # Windows
        return finished_within(seconds, message, call, *args, **kwargs)
    with time_limit(seconds, message):
        return call(*args, **kwargs)


def finished_within(seconds: float | None, message: Callable[[], str], call: Callable, *args, **kwargs) -> Any:
    """
    Runs `call` in a thread of its own and returns its result, or raises its error. If it takes longer than `seconds`,
    raises `TimeoutError` and abandons the thread, which does not keep the process alive. The thread has the caller's
    context variables, grad mode and current GPU.
    """
    if seconds is None:
        return call(*args, **kwargs)
    result, context, has_grad = Future(), copy_context(), torch.is_grad_enabled()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            with torch.set_grad_enabled(has_grad):
                result.set_result(context.run(call, *args, **kwargs))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="limited-call").start()
    if not wait([result], seconds).done:
        leave_threads_at_exit()
        raise TimeoutError(message())
    return result.result()


class CoroutineThread:
    """
    The event loop of a user's coroutines, in a daemon thread. The loop that waits for them is another one, because a
    coroutine that blocks its loop also stops the loop's timers.
    """

    def __init__(self):
        self._events: asyncio.AbstractEventLoop | None = None

    async def finished_within(self, seconds: float | None, message: Callable[[], str], coroutine: Coroutine) -> Any:
        """
        Runs `coroutine` in this thread and returns its result. After `seconds`, raises `TimeoutError`, also if the
        coroutine refuses to be cancelled or blocks its loop. A blocked loop is abandoned: later coroutines get another.
        """
        if self._events is None:
            self._events = asyncio.new_event_loop()
            threading.Thread(target=self._events.run_forever, daemon=True, name="coroutines").start()
        loop = self._events
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        if await self._is_done(future, seconds):
            return future.result()
        future.cancel()
        leave_threads_at_exit()
        answer = Future()
        loop.call_soon_threadsafe(answer.set_result, None)
        if not await self._is_done(answer, REPEAT) and self._events is loop:
            self._events = None
        raise TimeoutError(message())

    async def _is_done(self, future: Future, seconds: float | None) -> bool:
        return bool((await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds))[0])
