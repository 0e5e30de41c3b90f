"""Corrections on several ranks: sharded equals whole, for every weight, bound and metric."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trl_quant.corrections import CORRECTIONS, CorrectionInputs


FIELDS = ("rollout_logps", "old_logps", "advantages", "mask")


def case(kind):
    """A whole batch, and the rows of each rank."""
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(5, 6, generator=g) * 3
    rollout = old + 0.4 * torch.randn(5, 6, generator=g)
    rollout[0, 0], rollout[4, 1] = math.nan, -math.inf
    advantages = torch.randn(5, generator=g)
    mask = (torch.rand(5, 6, generator=g) > 0.3).long()
    mask[4, 1] = 1
    rows = [[0, 1, 2, 3], [4]]  # uneven token counts
    if kind == "one rank masked":
        mask[rows[1]] = 0
    elif kind == "one rank unscored":
        rollout[rows[0]] = math.nan
    elif kind == "all masked":
        mask[:] = 0
    elif kind == "one token a rank":
        mask[:] = 0
        mask[1, 2] = mask[4, 3] = 1
    elif kind == "NaN on the other rank":
        old[4, 1] = math.nan
    return CorrectionInputs(rollout, old, advantages, mask), rows


CASES = ("uneven", "one rank masked", "one rank unscored", "all masked", "one token a rank")


def run(name, inputs):
    output = CORRECTIONS[name]()(inputs)
    tensors = {k: getattr(output, k) for k in ("weights", "clip_low", "clip_high", "old_logps")}
    return {k: v.tolist() for k, v in tensors.items() if v is not None}, output.metrics


def rank_of_two(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    outputs = {}
    for kind in (*CASES, "NaN on the other rank"):
        whole, rows = case(kind)
        mine = CorrectionInputs(*(getattr(whole, f)[rows[rank]] for f in FIELDS))
        for name in CORRECTIONS:
            try:
                outputs[kind, name] = run(name, mine)
            except ValueError as error:
                outputs[kind, name] = str(error)
    results.put((rank, outputs))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes computed, by rank."""
    context = mp.get_context("spawn")  # a fork would inherit vLLM's process group if its tests ran before
    results = context.Queue()
    store = tmp_path_factory.mktemp("gloo") / "store"
    processes = [context.Process(target=rank_of_two, args=(r, store, results)) for r in range(2)]
    for process in processes:
        process.start()
    outputs = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return outputs


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_sharded_equals_whole(ranks, name, kind):
    whole, rows = case(kind)
    tensors, metrics = run(name, whole)
    assert ranks[0][kind, name][1] == ranks[1][kind, name][1]  # bit for bit the same on every rank
    for key, value in metrics.items():
        assert ranks[0][kind, name][1][key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    for rank in range(2):
        mine = ranks[rank][kind, name][0]
        assert mine.keys() == tensors.keys()
        for key, value in tensors.items():
            expected = torch.tensor(value)[rows[rank]]
            torch.testing.assert_close(torch.tensor(mine[key]), expected, rtol=1e-6, atol=0, equal_nan=True)


def test_a_rank_alone_would_say_something_else(ranks):
    """The test above can fail: each shard's own statistics are far from those of the whole batch."""
    whole, rows = case("uneven")
    for rank in range(2):
        alone = run("ais", CorrectionInputs(*(getattr(whole, f)[rows[rank]] for f in FIELDS)))
        together = ranks[rank]["uneven", "ais"]
        for key in ("mismatch/kl_k3", "mismatch/ess_ratio", "ais/alpha", "mismatch/unscored_fraction"):
            assert alone[1][key] != pytest.approx(together[1][key], rel=1e-2), key
        assert alone[0]["weights"] != together[0]["weights"] and 0 < together[1]["ais/alpha"] < 1


@pytest.mark.parametrize("name", CORRECTIONS)
def test_bad_input_on_one_rank_stops_every_rank(ranks, name):
    """An error on only one rank would leave the others waiting in a collective."""
    messages = {ranks[rank]["NaN on the other rank", name] for rank in range(2)}
    assert messages == {"old_logps must be numbers where the mask is 1, got 1 NaN."}
