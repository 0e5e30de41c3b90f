"""Two hosts on this machine, each a network namespace with processes of its own, and a cable between them.

    with two_hosts() as hosts:
        launched = [host.launch(command, directory) for host in hosts]
        hosts[1].kill()      # every process that it runs, at once
        hosts[1].unplug()    # or: from now on neither hears anything of the other

A host has the address 10.0.0.1 or 10.0.0.2. Its processes are forks (`warm`) that enter its namespace first. Making
namespaces takes root and iproute2.
"""

import ctypes
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import warm
from places import HELPERS, ROOT


def missing() -> str | None:
    """Why there can be no hosts here."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "needs the commands `ip` (iproute2) and `unshare`"
    if subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True).returncode:
        return "may not make network namespaces with devices here: needs root"
    return None


@contextmanager
def two_hosts() -> Iterator[list["Host"]]:
    hosts = [Host("10.0.0.1"), Host("10.0.0.2")]
    try:
        hosts[0].ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", hosts[1].keeper.pid)
        for host in hosts:
            host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", "eth0", "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            host.keeper.kill()
            host.keeper.wait()


class Launched:
    """`accelerate launch` on one host."""

    def __init__(self, process: warm.Popen, output: Path):
        self.process, self.output = process, output

    def wait(self, timeout: float) -> tuple[int, str]:
        """Its exit status and all that its processes printed."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        return status, self.output.read_text()


class Host:
    def __init__(self, address: str):
        self.address = address
        # The namespace lasts as long as this process
        self.keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.namespace = f"/proc/{self.keeper.pid}/ns/net"
        while os.readlink(self.namespace) == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)

    def ip(self, *arguments) -> None:
        subprocess.run(self.inside("ip", *arguments), check=True)

    def inside(self, *command) -> list[str]:
        """A command as this host runs it."""
        return ["nsenter", f"--net={self.namespace}", *map(str, command)]

    def launch(self, arguments: list[str], directory: Path) -> Launched:
        """Starts `accelerate launch` with these arguments in a directory, to which what it prints is written too."""
        outputs = sorted(directory.glob("output-*"))
        (output := directory / f"output-{len(outputs)}").touch()
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        environment |= {"PYTHONPATH": f"{ROOT}:{HELPERS}", "GLOO_SOCKET_IFNAME": "eth0"}
        code = f"import hosts; hosts.enter({self.namespace!r}, {str(directory)!r})"
        process = warm.Popen([sys.executable, "-c", code, *arguments], environment, files=[str(output)] * 2)
        return Launched(process, output)

    def processes(self) -> list[int]:
        """All but its keeper."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if os.readlink(process / "ns/net") == os.readlink(self.namespace):
                    found.append(int(process.name))
        return [process for process in found if process != self.keeper.pid]

    def kill(self) -> None:
        while processes := self.processes():
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)

    def unplug(self) -> None:
        self.ip("link", "set", "eth0", "down")

    def plug(self) -> None:
        self.ip("link", "set", "eth0", "up")


def enter(namespace: str, directory: str) -> None:
    """What each process of a host does first; then it is `accelerate launch`, whose ranks are its forks."""
    from ranks import shard_on_cpu

    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.chdir(directory)
    shard_on_cpu()
    runpy.run_module("accelerate.commands.launch", run_name="__main__", alter_sys=True)


def spread(completions, **kwargs) -> list[float]:
    """`training.spread` of completions that are messages: for `--reward_funcs hosts.spread`."""
    from training import spread

    return spread([messages[-1]["content"] for messages in completions])
