"""
Routing replay on two ranks: routing goes to the rank that trains on its rows, metrics are those of all rows, and the
load of experts is balanced within each micro-batch.

As a script, one of the two ranks.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from slow_routing import as_sets, chosen_again, mixture_of
from training import dataset, metrics, parameters, trainer_for

from trl_quant.policy.routing import ROUTED


# A packed row would count a prompt once for all its completions
EVERY = {"rollout_precision": "int4", "is_correction": "tis", "max_steps": 2, "pack_sequences": False}
# Groups of four lie on both ranks, and are sampled by one engine where completions are carried
CASES = {
    "at once": EVERY | {"per_device_train_batch_size": 6},
    "trained": EVERY | {"per_device_train_batch_size": 6, "rollout_precision": "fp8", "train_precision": "fp8"},
    "in flight": EVERY
    | {"per_device_train_batch_size": 6, "rollouts_in_flight": 2.0, "max_completion_length": 24, "max_steps": 3}
    | {"generation_kwargs": {"eos_token_id": list(range(0, 320, 9))}},
}
# SGD, which follows a gradient's size, of a loss that is mostly the load's
BALANCED = EVERY | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "router_aux_loss_coef": 1.0}
BALANCED |= {"optim": "sgd", "learning_rate": 1e-3, "max_grad_norm": 0.0}
BALANCES = {
    "padded": BALANCED,
    "packed": BALANCED | {"pack_sequences": True},
    "unbalanced": BALANCED | {"router_aux_loss_coef": 0.0},
}


@pytest.mark.long
@pytest.mark.slow
def test_the_load_is_balanced_on_both_ranks_as_in_padded_rows(tmp_path, monkeypatch):
    from ranks import on_two_ranks, results

    monkeypatch.setattr("ranks.__file__", __file__)
    printed, found = on_two_ranks("cpu", tmp_path, *BALANCES), {}
    start = flat(mixture_of("qwen3_moe"))
    for case in BALANCES:
        both = results(tmp_path, case, printed)
        found[case], other = (torch.load(tmp_path / case / f"weights-{rank}.pt") - start for rank in range(2))
        assert torch.equal(found[case], other) and both[0]["losses"] == both[1]["losses"]
        found[case, "losses"] = both[0]["losses"]
    size = found["padded"].norm()
    assert (found["packed"] - found["padded"]).norm() < 1e-3 * size
    assert (found["unbalanced"] - found["padded"]).norm() > 0.1 * size
    assert found["packed", "losses"] == pytest.approx(found["padded", "losses"], rel=1e-4)


def flat(model) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def balance_rank(path: Path, case: str) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    policy = mixture_of("qwen3_moe")
    trainer = trainer_for(path / case / "out", policy, **BALANCES[case], train_dataset=dataset(32))
    trainer.train()
    torch.save(flat(policy), path / case / f"weights-{os.environ['RANK']}.pt")
    losses = [log["aux_loss"] for log in metrics(trainer) if "aux_loss" in log]
    (path / case / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"losses": losses}))


@pytest.mark.long
@pytest.mark.slow
def test_routing_travels_with_its_rows(tmp_path, monkeypatch):
    from ranks import on_two_ranks, results

    monkeypatch.setattr("ranks.__file__", __file__)
    printed, found = on_two_ranks("cpu", tmp_path, *CASES), {}
    for case in CASES:
        both = results(tmp_path, case, printed)
        assert both[0]["weights"] == both[1]["weights"] and both[0]["logs"] == both[1]["logs"]
        for step, log in enumerate(both[0]["logs"]):
            counts = [rank["counts"][step] for rank in both]
            differs, known = map(sum, zip(*counts, strict=True))
            assert log["routing/by_layer/0"] == pytest.approx(differs / known)
            if case == "trained":  # in the sampler's numbers
                assert differs < 0.02 * known and abs(log["mismatch/kl_k3"]) < 0.1 * found["at once"]
            else:
                assert 0 < differs < known
            assert counts[0] != counts[1] and log["routing/unreplayed"] == 0
        found[case] = both[0]["logs"][0]["mismatch/kl_k3"]
        if case != "in flight":  # else older tokens have an older engine's
            assert both[0]["rows"] == both[1]["rows"] == [True] * len(both[0]["rows"])
        else:
            assert sum(log["rollouts/carried"] for log in both[0]["logs"]) > 0


def run_rank(path: Path, case: str) -> None:
    torch.manual_seed(int(os.environ["RANK"]))
    policy = mixture_of("qwen3_moe")
    trainer = trainer_for(path / case / "out", policy, **CASES[case], train_dataset=dataset(32))
    compute, counts, rows = trainer._compute_loss, [], []

    def counted(model, inputs, *others):
        """Counts by hand what differs in the first layer, which other layers' experts do not reach."""
        differs = known = 0
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1).bool()
        for row, on, experts in zip(ids, mask, inputs[ROUTED], strict=True):
            sampled = as_sets(experts[on][:-1], 0)
            own = chosen_again(policy, "qwen3_moe", row[on].tolist())[0][:-1]
            engines = chosen_again(trainer.vllm_generation.engine.copy, "qwen3_moe", row[on].tolist())[0][:-1]
            rows.append(torch.equal(sampled, engines))
            differs, known = differs + (sampled != own).any(1).sum().item(), known + len(own)
        counts.append([differs, known])
        return compute(model, inputs, *others)

    trainer._compute_loss = counted
    trainer.train()
    weights = {name: value.double().sum().item() for name, value in parameters(trainer).items()}
    logs = [log for log in metrics(trainer) if "loss" in log]
    found = {"weights": weights, "logs": logs, "counts": counts, "rows": rows}
    (path / case).mkdir(exist_ok=True)
    (path / case / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        (balance_rank if name in BALANCES else run_rank)(Path(sys.argv[1]), name)
