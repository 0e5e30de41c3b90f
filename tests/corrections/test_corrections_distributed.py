"""Corrections on several ranks: sharded equals whole, for every weight, bound and metric."""

import pytest
import torch
import torch.multiprocessing as mp
from correction_ranks import CASES, FIELDS, case, rank_of_two, run

from trl_quant.corrections import CORRECTIONS, CorrectionInputs


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
