"""Runs a script in two processes, as `accelerate launch` would with one of the project's configurations."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch


CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"


def on_two_ranks(configuration: str, script: str, *arguments) -> None:
    """On two GPUs, or on this CPU without mixed precision."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{configuration}.yaml"]
    launcher += ["--num_processes", 2, "--main_process_port", port]
    launcher += [] if torch.cuda.is_available() else ["--mixed_precision", "no"]
    command = [sys.executable, *launcher, script, *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
