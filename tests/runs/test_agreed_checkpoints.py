"""Two ranks with a disk each agree on the checkpoint to resume from, or both refuse. Neither waits for the other."""

import queue
from pathlib import Path

import pytest
import torch
import warm
from checkpoint_ranks import rank_of_two


def write(disk: Path, step: int, *files: str, whole: bool = True) -> None:
    checkpoint = disk / "out" / f"checkpoint-{step}"
    (checkpoint / "global_step").mkdir(parents=True)
    torch.save({}, checkpoint / "rng_state_0.pth")
    for name in files:
        (checkpoint / name).touch()
    if whole:
        (checkpoint / "trainer_state.json").write_text("{}")


@pytest.fixture
def disks(tmp_path) -> list[Path]:
    found = [tmp_path / f"disk-{rank}" for rank in range(2)]
    for disk in found:
        disk.mkdir()
    return found


@pytest.fixture
def both(tmp_path):
    def both(call: str) -> list:
        """What each rank found."""
        (tmp_path / "store").unlink(missing_ok=True)
        results = warm.server.Queue()
        processes = [warm.server.Process(target=rank_of_two, args=(r, call, tmp_path, results)) for r in range(2)]
        for process in processes:
            process.start()
        try:
            found = dict(results.get(timeout=120) for _ in processes)
        except queue.Empty:
            pytest.fail("a rank waits for the other one")
        finally:
            for process in processes:
                process.join(timeout=60)
                process.kill()
        return [found[0], found[1]]

    return both


def test_the_newest_that_both_have_whole(disks, both):
    """The second host died while it saved the sixth step."""
    for disk in disks:
        write(disk, 2)
        write(disk, 4)
        write(disk, 6, whole=disk == disks[0])
    assert both("newest") == ["out/checkpoint-4"] * 2


def test_none_that_both_have(disks, both):
    write(disks[0], 4)
    write(disks[1], 2)
    write(disks[1], 4, "training_args.bin", "optimizer.pt")  # what `save_on_each_node` writes on a second host
    (disks[1] / "out/checkpoint-4/global_step").rmdir()
    for error in both("newest"):
        assert "no checkpoint in out is whole on every host" in str(error)
        assert "has checkpoint-4 (rank 0)" in str(error) and "has checkpoint-2 (rank 1)" in str(error)


def test_a_copy_beside_a_file_that_a_host_did_not_finish(disks, both):
    """The second host died while it wrote its random state, and then got a copy of the first host's checkpoint."""
    for disk in disks:
        write(disk, 2)
    (unfinished := disks[1] / "out/checkpoint-2/rng_state_1.pth").write_bytes(b"PK")
    for error in both("newest"):
        assert "has checkpoint-2 (rank 0)" in str(error)
        assert "has none (checkpoint-2 lacks its random state) (rank 1)" in str(error)
    unfinished.unlink()
    assert both("newest") == ["out/checkpoint-2"] * 2


def test_none_at_all(disks, both):
    assert all("there is nothing to resume" in str(error) for error in both("newest"))


def test_parts_that_one_lacks(disks, both):
    write(disks[0], 2, "optimizer.bin", "rng_state_0.pth")
    write(disks[1], 2, "rng_state_1.pth")
    for error in both("same"):
        assert "out/checkpoint-2 is not the same on every host" in str(error)
        assert "lacks optimizer.bin (rank 1)" in str(error)
    (disks[1] / "out/checkpoint-2/optimizer.bin").touch()
    assert both("same") == [None, None]


@pytest.mark.parametrize(
    ("call", "message"), [("wrong", "`field`=1 is wrong."), ("denied", "out/checkpoint-2 cannot be read.")]
)
def test_what_fails_on_one_rank(disks, both, call, message):
    assert list(map(str, both(call))) == [f"Rank 1: {message}", message]


def test_ranks_that_start_with_different_settings(disks, both):
    """Every field of the config is compared, and what the trainer got beside it."""
    assert both("same settings") == [None, None]
    names = {"settings": "beta", "a new field": "a_new_field", "data": "train_dataset", "policy": "model"}
    for call, name in names.items():
        for error in both(call):
            assert isinstance(error, ValueError) and f"`{name}` differs between the ranks of this run" in str(error)


def test_where_a_run_goes_on_by_a_host_without_checkpoints(disks, both):
    """The second host has its random state alone, and must not be told to delete or start again."""
    write(disks[0], 2)
    (disks[1] / "out/checkpoint-2").mkdir(parents=True)
    first, second = both("go on")
    assert "out/checkpoint-2; continue" in first
    assert "the first host saves them" in second and "elete" not in second and "start again" not in second
