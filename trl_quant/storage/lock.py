"""Locks on what a process writes. The system frees them when the process ends, however it ends."""

import errno
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..reading import reading


logger = logging.getLogger(__name__)

OUTPUT_LOCK = ".writing"  # the lock's file in a directory that a run writes
TAKEN = (errno.EACCES, errno.EAGAIN)
_threads: dict[Path, int] = {}  # lock files of this process -> the thread that holds each


@contextmanager
def locked(file: str | Path, refusal: str) -> Iterator[None]:
    """
    Context that holds a lock, which one process has at a time, and in it one thread. Contexts of the same thread share
    the lock. Its file is removed at the end; one that a killed process left behind locks nothing.

    These are POSIX's locks: forked processes do not inherit them, and network file systems share them between hosts.
    Nothing is locked on Windows, or on a file system without locks, which is logged.

    Args:
        file (`str` or `Path`): The lock's file; its directory is created.
        refusal (`str`): The error message, to which the holder is added.

    Raises:
        ValueError: Another process, or another thread, holds the lock.
    """
    path = Path(file).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name
    thread = threading.get_ident()
    if _threads.get(path) == thread:
        yield
        return
    if _threads.setdefault(path, thread) != thread:
        raise ValueError(f"{refusal} It is another thread of this process.")
    try:
        with _opened(path, refusal):
            yield
    finally:
        del _threads[path]


@contextmanager
def _opened(path: Path, refusal: str) -> Iterator[None]:
    """Context that holds the lock of a file. Closing the file frees it."""
    while True:
        with path.open("a") as file:
            _lock(file, refusal)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue  # the holder before has removed this file, and the next process would open a new one
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _lock(file: IO[str], refusal: str) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in TAKEN:
            logger.warning("%s cannot be locked (%s): nothing keeps a second writer away.", file.name, error)
            return
        with reading(file.name):
            holder = Path(file.name).read_text()
        raise ValueError(f"{refusal}{f' It is {holder}.' if holder else ''}") from None
