"""The docs' command for two machines, on two hosts: to its end, with a host that dies, and resumed from there.

What is changed of it: the configuration, model, data, precision and engine, two processes, a CPU's options, and that a
run has eight steps and saves.
"""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hosts import ROOT, Host, missing, two_hosts
from pages import TEXTS, called
from safetensors.torch import load_file
from tiny import save_tiny
from training import metrics
from transformers import TrainerState


pytestmark = [pytest.mark.slow, pytest.mark.long]
CHANGED = {
    "--config_file": "configs/accelerate/{configuration}.yaml",
    "--machine_rank": "{rank}",
    "--num_processes": "2",
    "--model_name_or_path": "model",
    "--rollout_precision": "int8",
}
ENGINE = {"--use_vllm": 0, "--vllm_mode": 1, "--vllm_server_base_url": 1}  # option -> its values, which go too
ON_A_CPU = ["--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false"]
SMALL = "--dataset_name problems.jsonl --reward_funcs hosts.spread --max_completion_length 8 --learning_rate 1e-3"
SAVED = "--max_steps 8 --save_steps 2 --logging_steps 1 --report_to none"
RESUME = ["--resume_from_checkpoint", "true"]
OUTPUT = "runs/nodes"
PATIENCE = 300  # seconds, far more than any of these runs takes


@pytest.fixture(scope="module")
def pair():
    if torch.cuda.is_available():
        pytest.skip("the ranks of these hosts are forks, which cannot use GPUs")
    if reason := missing():
        pytest.skip(reason)
    with two_hosts() as hosts:
        yield hosts


def command(configuration: str, rank: int, *more: str) -> list[str]:
    (words,) = [words for words in called("accelerate", "launch") if "--num_machines" in words]
    words = list(words)
    for option, value in CHANGED.items():
        words[words.index(option) + 1] = value.format(configuration=configuration, rank=rank)
    for option, values in ENGINE.items():
        place = words.index(option)
        del words[place : place + 1 + values]
    script = words.index("examples/train_grpo.py")
    launcher = [*words[:script], "--mixed_precision", "no"]
    return [*launcher, *words[script:], *ON_A_CPU, *SMALL.split(), *SAVED.split(), *more]


def disks(path: Path, shared: bool) -> list[Path]:
    """A directory for each host to run in. What they write is on one disk, or on a disk of their own each."""
    directories = [path / "first", path / "second"]
    for directory in directories:
        directory.mkdir(parents=True)
        for name in ("configs", "examples"):
            (directory / name).symlink_to(ROOT / name)
        save_tiny(directory / "model", "qwen2")
        rows = [{"question": f"What is {a} plus {a}?", "answer": f"#### {2 * a}"} for a in range(32)]
        (directory / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if shared:
            (path / "runs").mkdir(exist_ok=True)
            (directory / "runs").symlink_to(path / "runs")
    return directories


def launch(hosts: list[Host], directories: list[Path], configuration: str, *more: str) -> list:
    for host in hosts:
        host.kill()
    places = zip(hosts, directories, strict=True)
    return [host.launch(command(configuration, rank, *more), place) for rank, (host, place) in enumerate(places)]


def run(*launched_with) -> list[str]:
    """Runs to the end; what each host printed."""
    ended = [launched.wait(PATIENCE) for launched in launch(*launched_with)]
    assert [status for status, _ in ended] == [0, 0], ended[0][1][-4000:] + ended[1][1][-4000:]
    return [printed for _, printed in ended]


def refused(*launched_with) -> list[str]:
    """Each host ends, and not well; the last lines that each rank printed."""
    ended = [launched.wait(PATIENCE) for launched in launch(*launched_with)]
    assert [status for status, _ in ended] == [1, 1], ended[0][1][-4000:] + ended[1][1][-4000:]
    return [error_of(printed) for _, printed in ended]


def error_of(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, printed[-4000:]
    return lines[0]


def until(path: Path, launched: list) -> None:
    """Waits for a file of a run that goes on."""
    while not path.exists():
        assert all(one.process.poll() is None for one in launched), [one.output.read_text() for one in launched]


def result(directory: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """The metrics of every step, without times and the summary of a part of the run; the weights at the end."""
    state = TrainerState.load_from_json(directory / OUTPUT / "trainer_state.json")
    steps = [entry for entry in metrics(SimpleNamespace(state=state)) if "train_loss" not in entry]
    return steps, load_file(directory / OUTPUT / "model.safetensors")


def assert_same(left: Path, right: Path) -> None:
    (steps, weights), (others, theirs) = result(left), result(right)
    assert steps == others and len(steps) == 8 and len({entry["reward"] for entry in steps}) > 4
    assert weights.keys() == theirs.keys() and all(torch.equal(weights[name], theirs[name]) for name in weights)


SERVER = "import http.server as h; h.HTTPServer(('{address}', 8000), h.SimpleHTTPRequestHandler).serve_forever()"


@contextmanager
def listening(host: Host, address: str, *before: str):
    """Something that listens at port 8000 of an address, on a host, started by a command that begins so."""
    process = subprocess.Popen(host.inside(*before, sys.executable, "-c", SERVER.format(address=address)))
    try:
        while not reaches(host, address, *before):
            assert process.poll() is None
        yield
    finally:
        process.kill()
        process.wait()


def reaches(host: Host, address: str, *before: str) -> bool:
    """Whether a connection to port 8000 of an address comes about from a host, in a command that begins so."""
    code = f"import socket; socket.create_connection(({address!r}, 8000), 2)"
    return not subprocess.run(host.inside(*before, sys.executable, "-c", code), capture_output=True).returncode


def test_a_namespace_keeps_others_out(pair):
    """The docs' commands. Nobody outside reaches the port: no other host, and no other process of the same one."""
    server, other = pair
    made = [["ip", *words] for words in called("ip") if "rollouts" in words and "exec" not in words]
    assert len(made) == 2, made
    inside = ("ip", "netns", "exec", "rollouts")
    assert " ".join(inside) in TEXTS["docs/servers.md"]
    try:
        for command in made:
            subprocess.run(server.inside(*command), check=True)
        for address in ("127.0.0.1", "0.0.0.0"):
            with listening(server, address, *inside):
                assert reaches(server, "127.0.0.1", *inside)
                assert not any(reaches(host, at) for host in pair for at in ("127.0.0.1", server.address))
        with listening(server, "0.0.0.0"):  # without the namespace
            assert reaches(server, "127.0.0.1") and reaches(other, server.address)
            assert not reaches(server, server.address, *inside)  # nor does anything get out
    finally:
        subprocess.run(["ip", "netns", "delete", "rollouts"], check=True)


def test_a_firewall_keeps_others_out(pair):
    """The docs' commands, on a server whose training nodes are 10.0.0.1 and 10.0.0.2: a third address is kept out."""
    if not shutil.which("nft"):
        pytest.skip("needs the command `nft`")
    server, trainer = pair
    with listening(server, server.address):
        trainer.ip("address", "add", "10.0.0.3/24", "dev", "eth0")
        trainer.ip("route", "add", f"{server.address}/32", "dev", "eth0", "src", "10.0.0.3")
        assert reaches(trainer, server.address)
        for words in called("nft"):
            subprocess.run(server.inside("nft", *words), check=True)
        try:
            assert not reaches(trainer, server.address)
            trainer.ip("route", "change", f"{server.address}/32", "dev", "eth0", "src", "10.0.0.2")
            assert reaches(trainer, server.address)
        finally:
            subprocess.run(server.inside("nft", "delete", "table", "inet", "rollouts"), check=True)
            trainer.ip("route", "delete", f"{server.address}/32")
            trainer.ip("address", "delete", "10.0.0.3/24", "dev", "eth0")


def test_a_killed_host_and_a_disk_for_each(pair, tmp_path):
    """The first host alone has checkpoints: a resume is refused by both until the second one has a copy."""
    whole, (first, second) = disks(tmp_path / "whole", shared=False), disks(tmp_path / "broken", shared=False)
    run(pair, whole, "ddp")
    launched = launch(pair, [first, second], "ddp")
    until(first / OUTPUT / "checkpoint-2" / "trainer_state.json", launched)
    pair[1].kill()
    status, printed = launched[0].wait(PATIENCE)
    error = error_of(printed)
    assert status == 1 and "Rank 0 " in error and "lost another rank at step" in error
    assert f"The last whole checkpoint is {OUTPUT}/checkpoint-" in error and "resume_from_checkpoint" in error

    for error in refused(pair, [first, second], "ddp", *RESUME):
        assert f"no checkpoint in {OUTPUT} is whole on every host" in error
        assert "has checkpoint-" in error and "has none (rank 1)" in error
    shutil.copytree(first / OUTPUT, second / OUTPUT, dirs_exist_ok=True)
    run(pair, [first, second], "ddp", *RESUME)
    assert_same(first, whole[0])


def test_a_silent_host_and_a_shared_disk(pair, tmp_path):
    """Sharded by FSDP2. Nothing tells either host that the other is out of reach: both wait for `ddp_timeout`."""
    whole, broken = disks(tmp_path / "whole", shared=True), disks(tmp_path / "broken", shared=True)
    run(pair, whole, "fsdp2")
    launched = launch(pair, broken, "fsdp2", "--ddp_timeout", "12")
    until(broken[0] / OUTPUT / "checkpoint-2" / "trainer_state.json", launched)
    pair[1].unplug()
    try:
        ended = [one.wait(PATIENCE) for one in launched]
    finally:
        pair[1].plug()
    for rank, (status, printed) in enumerate(ended):
        error = error_of(printed)
        assert status == 1 and f"Rank {rank} " in error and "`ddp_timeout`=12 seconds" in error
        assert f"The last whole checkpoint is {OUTPUT}/checkpoint-" in error
    run(pair, broken, "fsdp2", *RESUME)
    assert_same(broken[0], whole[0])
