"""Tests marked `own_process` run in one: vLLM's sleep mode takes one engine in the life of a process."""

import os
import subprocess
import sys

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "own_process: runs in a process of its own")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not pyfuncitem.get_closest_marker("own_process") or "TESTS_OWN_PROCESS" in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--tb=short", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    of_ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # an engine here may have set them
    environment = {name: value for name, value in os.environ.items() if name not in of_ranks}
    environment["TESTS_OWN_PROCESS"] = "1"
    done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return True
