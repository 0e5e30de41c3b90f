"""One of two ranks that agree on a checkpoint, whose process imports this file."""

import os
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from accelerate import PartialState

from trl_quant.runs.agreement import check_same_settings, on_every_rank
from trl_quant.runs.checkpoints import check_same_files, checkpoint_to_resume
from trl_quant.storage.run_checkpoints import how_to_go_on


def fail_on_the_second(error: Exception) -> None:
    with on_every_rank():
        if dist.get_rank() == 1:
            raise error


def settings(differing: str | None) -> SimpleNamespace:
    """A config whose fields that may differ between ranks do, and one more."""
    rank = dist.get_rank()
    values = {"learning_rate": 1e-3, "reward_weights": [1.0], "beta": 0.0, "local_rank": rank, "run_name": str(rank)}
    values |= {"model_init_kwargs": {"object": object()}}  # whose address differs
    return SimpleNamespace(to_dict=lambda: values | ({} if differing is None else {differing: rank}))


# name -> what a rank calls in its directory
CALLS = {
    "newest": lambda: checkpoint_to_resume("out"),
    "same": lambda: check_same_files("out/checkpoint-2"),
    "wrong": lambda: fail_on_the_second(ValueError("`field`=1 is wrong.")),
    "denied": lambda: fail_on_the_second(PermissionError("out/checkpoint-2 cannot be read.")),
    "same settings": lambda: check_same_settings(settings(None), "model", train_dataset=[1]),
    "settings": lambda: check_same_settings(settings("beta"), "model"),
    "a new field": lambda: check_same_settings(settings("a_new_field"), "model"),
    "data": lambda: check_same_settings(settings(None), "model", train_dataset=[1] * (1 + dist.get_rank())),
    "policy": lambda: check_same_settings(settings(None), f"model-{dist.get_rank()}"),
    "go on": lambda: how_to_go_on("out"),
}


def rank_of_two(rank: int, call: str, path: Path, results) -> None:
    os.chdir(path / f"disk-{rank}")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{path / 'store'}", rank=rank, world_size=2)
    PartialState(cpu=True)
    try:
        found = CALLS[call]()
    except (ValueError, OSError) as error:
        found = error
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()
