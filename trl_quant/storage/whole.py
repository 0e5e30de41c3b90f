"""Writes files completely or not at all, on disks that may be full. Needs no torch, so that reports load fast."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """
    Writes a file in one step. A reader sees the old file or the complete new one, even if the disk fills up or the
    process is killed. Creates the file's directory.

    Raises:
        OSError: The file cannot be written. The error names `path`, which the system's error for a full disk does not.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        begun.write_bytes(data)
        begun.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        begun.unlink(missing_ok=True)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or a quota, is full."""
    return getattr(error, "errno", None) in FULL or "No space left" in str(error)


@contextmanager
def told_if_full(path: Path) -> Iterator[None]:
    """Context in which a full disk, while `path` is written, raises an error with the space that is left."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        free = shutil.disk_usage(next(place for place in path.absolute().parents if place.is_dir())).free
        raise OSError(
            errno.ENOSPC,
            f"No space left while writing {path}: {free / 2**20:.1f} MiB are free there. Make room and repeat the "
            f"command: it continues from there. Cause: {error}",
        ) from error
