"""Says that vLLM is starting while it says nothing itself. On a CPU it compiles for a minute."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


SILENT = 10.0  # seconds between two lines


@contextmanager
def starting(hint: str = "", seconds: float = SILENT) -> Iterator[None]:
    """
    Context of vLLM's start, which writes a line to standard error every so many seconds.

    Args:
        hint (`str`, *optional*): What makes it faster; the end of the first line.
        seconds (`float`, *optional*): Seconds before each line.
    """
    began, ended = time.monotonic(), threading.Event()

    def tell():
        told = hint
        while not ended.wait(seconds):
            print(f"vLLM has been starting for {time.monotonic() - began:.0f} s. {told}".rstrip(), file=sys.stderr)
            told = ""

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
