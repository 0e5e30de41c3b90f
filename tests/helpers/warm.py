"""
Python processes that begin with everything imported: forks of one that imports it and does nothing else.

`run` and `Popen` stand in for `subprocess`'s, of commands that begin with `sys.executable`: most of the time of a test
with processes of its own is theirs to import torch, TRL and vLLM, ten seconds each. torch's launcher in such a process
forks its ranks too. Each has a memory and an environment of its own and can be killed. What forks cannot show is that
a new interpreter gets to the same point, and that no order depends on the seed of its hashes, which forks share:
test_choose, test_examples and test_package start new ones.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running

import garbage


os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else a fork cannot use a GPU that its parent asked for
server = get_context("forkserver")
server.set_forkserver_preload(["trl.trainer.grpo_trainer", "vllm.entrypoints.llm", "pytest"])


def run(command: list, env: dict | None = None, capture_output=False, text=True, check=False):
    """Always captures what is printed; without `capture_output` it is for pytest to show."""
    ensure_running()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = Popen(command, env, files=[f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]).wait()
        done = subprocess.CompletedProcess(command, code, *(file.seek(0) or file.read() for file in (out, err)))
    if not capture_output:
        print(done.stdout, done.stderr)
    if check:
        done.check_returncode()
    return done


class Popen:
    context = server

    def __init__(self, args: list, env: dict | None = None, files: list[str] | None = None, **kwargs):
        self.args = [*map(str, args)]
        assert self.args[0] == sys.executable
        settings = (self.args[1:], dict(env or os.environ), os.getcwd(), files or [])
        self.process = self.context.Process(target=python, args=settings)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.poll()

    def terminate(self) -> None:
        self.process.terminate()


class Rank(Popen):
    """Of a launcher that is a fork itself, whose files and imports it shares."""

    context = get_context("fork")


def python(arguments: list[str], environment: dict[str, str], directory: str, files: list[str]) -> None:
    """What `python` does with its arguments, in a fork; `files` are to be its output."""
    import lookups
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as launcher

    lookups.remember()
    launcher.Popen = Rank
    garbage.leave_out_all_there_is()
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if environment.get("TORCHDYNAMO_DISABLE") == "1":  # which a new process reads as it imports what is compiled
        import torch._dynamo

        torch._dynamo.config.disable = True
    queues = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    if hasattr(queues, "SpinCondition"):  # by which vLLM's processes keep a core busy for a second after each message
        queues.SpinCondition.__init__.__defaults__ = (0.001,)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    for stream, file in zip((1, 2), files):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    how, *sys.argv = (argument for argument in arguments if argument != "-u")
    if how == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(code, {"__name__": "__main__"})
    elif how == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv.insert(0, how)
        sys.path.insert(0, os.path.dirname(how))
        runpy.run_path(how, run_name="__main__")
