"""Two ranks train all weights in 4 bits, under DDP and FSDP2 (see `qat_ranks`)."""

import pytest
from ranks import on_demand


pytestmark = [pytest.mark.isa, pytest.mark.slow]
CASE = "qat-nvfp4-full"
ROUNDED = "qat-nvfp4-rounded"
LAUNCHES = {"ddp": [CASE], "fsdp2": [CASE, ROUNDED]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_demand(tmp_path_factory, {name: (name, cases) for name, cases in LAUNCHES.items()})


@pytest.mark.long
def test_ranks_that_hold_the_policy_whole(found):
    """Both train one policy, sample with its codes, which are those of a checkpoint, and resume bit for bit."""
    left, right = found("ddp", CASE)
    assert left == right and left["resumed"] and not left["sharded"]
    assert left["layers"] == left["forward"] == left["prepared"] == left["stored"] == 14 and left["moved"] > 14
    assert all(abs(entry["mismatch/kl_k3"]) < 1e-9 for entry in left["log"])
    assert len({entry["reward"] for entry in left["log"]}) == 3


@pytest.mark.long
def test_a_policy_in_parts(found):
    """
    FSDP2 trains as DDP does, bit for bit, resumed and with a reference policy. Layers that share NVFP4's global scale
    find it where other ranks hold parts of the others. The engine is a copy with the trainer's codes.
    """
    left, right = found("fsdp2", CASE)
    assert left == right and left["sharded"] and left["resumed"] and left["gap"] == 0
    assert left["layers"] == left["forward"] == left["prepared"] == left["stored"] == 14
    assert left["rounded"] < 14
    for ours, theirs in zip(left["log"], left["other"], strict=True):
        assert all(ours[name] == theirs[name] for name in ("loss", "reward", "kl"))
        assert abs(ours["mismatch/kl_k3"]) < 1e-9


@pytest.mark.long
def test_weights_that_are_gathered_in_bf16(found):
    """Then Q is of the rounded weights, in both passes and in the engine."""
    left, right = found("fsdp2", ROUNDED)
    assert left == right and left["sharded"]
    assert left["layers"] == left["forward"] == left["prepared"] == left["rounded"] == 14 > left["stored"]
    assert all(abs(entry["mismatch/kl_k3"]) < 1e-3 for entry in left["log"])
