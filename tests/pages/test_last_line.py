"""What a session of tests says in its last line: the versions and the cards that it ran on."""

import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from long_tests import rest_is_long
from places import HELPERS, TESTS


NVIDIA_SMI = """#!/bin/sh
printf 'NVIDIA H100\\nNVIDIA H100\\nNVIDIA H200\\n'
"""


@pytest.mark.parametrize("options", rest_is_long([["-n", "2"], []], []), ids=["two-processes", "one-process"])
def test_last_line_has_versions_and_cards_once(tmp_path, options):
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    directories = {"PYTHONPATH": f"{TESTS}:{HELPERS}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", os.devnull, f"--rootdir={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *options, tmp_path], env=environment | directories, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert "1 passed" in lines[-2]
    assert re.match(f"torch {re.escape(version('torch'))}, transformers .*, trl .*", lines[-1])
    assert lines[-1].endswith("; 2 x NVIDIA H100, 1 x NVIDIA H200")
    assert done.stdout.count("NVIDIA") == 2, "a process of `-n` wrote the line as well"
