"""A process that holds a lock, for the tests."""

import subprocess
import sys
from pathlib import Path

from places import ROOT


HOLDER = """
import os, sys, time
from trl_quant.storage.lock import locked
with locked(sys.argv[1], "Taken."):
    if os.fork() == 0:  # a worker that lives on must not keep the lock
        time.sleep(60)
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def holder(lock: Path) -> subprocess.Popen:
    """A process that holds the lock, and has forked another."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process.stdout.readline()
    return process
