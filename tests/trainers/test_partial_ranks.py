"""
Partial rollouts on two ranks: one engine samples a group, and its rows go to the ranks on which TRL expects them.

As a script, one of the two ranks.
"""

import json
import os
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path

import pytest
import torch
from remembering import partial_run
from tiny import tiny_model
from training import dataset, metrics, parameters, trainer_for

from trl_quant import QuantGRPOTrainer


ENDS = [*range(0, 320, 13)]
# Completions of a group, and of a rank: a group may lie on both, and there may be fewer groups than engines
CASES = {"even": (2, 4), "across": (4, 6), "single": (4, 2)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    from ranks import on_two_ranks, results

    path = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ranks.__file__", __file__)
        printed = on_two_ranks("cpu", path, *CASES)
    return {case: results(path, case, printed) for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_groups_travel_whole(ranks, case):
    both, (size, rows) = ranks[case], CASES[case]
    assert both[0]["weights"] == both[1]["weights"] and both[0]["log"] == both[1]["log"]
    assert sum(log["rollouts/carried"] for log in both[0]["log"]) > 0
    # Each engine has started whole groups, and no two the same
    starts = [Counter(map(tuple, rank["starts"])) for rank in both]
    assert all(count == size for of_rank in starts for count in of_rank.values())
    assert not starts[0].keys() & starts[1].keys()
    order = [tuple(prompt) for prompt in both[0]["order"]]
    assert starts[0].keys() | starts[1].keys() == set(order)
    # Each rank has trained on its part of the groups, one after another
    travelled = 0
    for left, right in zip(both[0]["trained"], both[1]["trained"], strict=True):
        assert len(left) == len(right) == rows
        whole = [tuple(prompt) for prompt, _ in left + right]
        groups = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert all(len(set(group)) == 1 for group in groups) and len({group[0] for group in groups}) == len(groups)
        for i, trained in enumerate((left, right)):
            travelled += sum(tuple(prompt) not in starts[i] for prompt, _ in trained)
    assert case == "even" or travelled > 0
    returned = Counter(tuple(prompt) for rank in both for prompt, _ in chain(*rank["trained"]))
    assert returned == Counter(dict.fromkeys(order, size))


@contextmanager
def server_of(model: Path, monkeypatch):
    """Context of a server, of whose address the ranks are told by `monkeypatch`."""
    from servers import serving

    with serving(model) as (url, _):
        monkeypatch.setenv("SERVER_URL", url)
        yield


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("case", ["tp", "server"])
def test_one_engine_on_two_ranks(tmp_path, monkeypatch, case):
    """Both take each group's samples from it, and new tokens differ from the policy by BF16's rounding alone."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from ranks import on_two_ranks, results
    from tiny import save_tiny

    monkeypatch.setattr("ranks.__file__", __file__)
    model = save_tiny(tmp_path / "model", seed=3, dtype=torch.bfloat16)
    with server_of(model, monkeypatch) if case == "server" else nullcontext():
        both = results(tmp_path, case, on_two_ranks("cpu", tmp_path, case))
    assert both[0]["weights"] == both[1]["weights"] and both[0]["log"] == both[1]["log"]
    logs = both[0]["log"]
    assert sum(log["rollouts/carried"] for log in logs) > 0
    young, old = ([log[name] for log in logs if name in log] for name in ("mismatch/by_age/0", "mismatch/by_age/1"))
    assert young and old and max(young) < 1e-3 < max(old)
    returned = Counter(map(tuple, chain(*both[0]["prompts"], *both[1]["prompts"])))
    assert set(returned.values()) == {2} and len(returned) == both[0]["started"] == both[1]["started"]


def run_vllm(path: Path, case: str) -> dict:
    import servers
    from vllm_engines import SMALL, keep

    asked = []
    if case == "server":
        settings = servers.behind(os.environ["SERVER_URL"], "bf16")
        # Shorter ones have all ended before a client can stop the server
        settings |= {"max_completion_length": 300, "generation_kwargs": {"stop_token_ids": [*ENDS[::8]]}}
    else:
        settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_engine_kwargs": SMALL, "rollout_precision": "bf16"}
        settings |= {"vllm_max_model_length": 512, "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.1}
        settings |= {"max_completion_length": 24, "generation_kwargs": {"stop_token_ids": ENDS}}

    def reward(prompts, completion_ids, **kwargs):
        asked.append([list(prompt.encode()) for prompt in prompts])
        return [float(sum(ids) % 5) for ids in completion_ids]

    settings |= {"rollouts_in_flight": 2.0, "max_steps": 4, "num_train_epochs": 1}
    settings |= {"per_device_train_batch_size": 4, "num_generations": 2}
    settings |= {"learning_rate": 0.05, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    given = {"train_dataset": dataset(32), "reward_funcs": reward}
    trainer = trainer_for(path / case / "out", str(path / "model"), QuantGRPOTrainer, **settings | given)
    if case == "tp":
        keep(trainer)
    trainer.train()
    return {"prompts": asked, "started": trainer.pool.started} | told(trainer)


def told(trainer) -> dict:
    """What all ranks must find alike."""
    return {
        "weights": {name: value.double().sum().item() for name, value in parameters(trainer).items()},
        "log": [log for log in metrics(trainer) if "loss" in log],
    }


def run_rank(path: Path, case: str) -> None:
    found = run_embedded(path, case) if case in CASES else run_vllm(path, case)
    (path / case).mkdir(exist_ok=True)
    (path / case / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def run_embedded(path: Path, case: str) -> dict:
    size, rows = CASES[case]
    trained = []

    def reward(prompts, completion_ids, **kwargs):
        trained.append([[list(prompt.encode()), ids] for prompt, ids in zip(prompts, completion_ids, strict=True)])
        return [float(sum(ids) % 5) for ids in completion_ids]

    torch.manual_seed(int(os.environ["RANK"]))
    settings = {"num_generations": size, "per_device_train_batch_size": rows, "max_steps": 4, "num_train_epochs": 1}
    settings |= {"max_staleness": 2, "rollouts_in_flight": 3.0, "max_completion_length": 30}
    given = {"train_dataset": dataset(16), "model": tiny_model(seed=3), "reward_funcs": reward}
    trainer = partial_run(path / case, QuantGRPOTrainer, **settings, **given)
    trainer.train()
    order = trainer.pool.order
    prompts = [trainer.train_dataset[order[place]]["prompt"] for place in range(4 * order.groups)]
    return told(trainer) | {
        "starts": trainer.memory.starts,
        "order": [trainer._tokenize_prompts([prompt])[0][0] for prompt in prompts],
        "trained": [
            [[trainer._tokenize_prompts([bytes(prompt).decode()])[0][0], ids] for prompt, ids in call]
            for call in trained
        ],
    }


if __name__ == "__main__":
    for name in sys.argv[2:]:
        run_rank(Path(sys.argv[1]), name)
