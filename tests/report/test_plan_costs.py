"""A plan's costs, against what was measured, and what it says of completions in flight."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from figures import H200, middle, read
from pages import ROOT

from trl_quant import QuantGRPOConfig, QuantPPOConfig
from trl_quant.report import measured, plan
from trl_quant.report.memory import Shape, cache_of, completions_in_flight
from trl_quant.storage.source import skeleton_of


sys.path.append(str(ROOT / "benchmarks"))
from engines import adapter, model_directory


@cache
def shape_of(size: str, rank: int) -> Shape:
    policy = skeleton_of(Path(model_directory(size)))
    return Shape.of(policy.config, adapter(policy, rank) if rank else None)


def test_costs_are_those_that_were_measured():
    """Each line of the table is a step in the raw files, and none of these is left out."""
    found: dict[tuple, measured.Step] = {}
    for name in ("step-7b-all", "step-7b-another-host", "step-7b-weights", "step-7b-nvfp4", "step-32b"):
        content = read(f"{name}-{H200}")
        runs = {run["trainer"]: run for run in content["runs"]}
        trl = runs["trl"]["results"]
        for trainer, run in runs.items():
            rollout, _, train = trainer.partition("/")
            train, _, how = train.partition("/")
            lora_sync = "adapter" if how == "adapter" or train == "nvfp4" else "merge"
            for shape, result in run["results"].items():
                if trainer.startswith("trl") or "+" in trainer or not shape.endswith("equal"):
                    continue
                seconds = middle(trl[shape], "step"), middle(trl[shape], "scoring"), middle(result, "step")
                sides = [*map(int, shape.removesuffix(" equal").split("x"))]
                adapted = content["arguments"]["lora"] > 0
                micro = min(run["micro"], sides[0])
                planned = run["size"], adapted, lora_sync, train or None, rollout, how == "exact", *sides, micro
                step = measured.Step(*planned, *(round(value, 2) for value in seconds))
                found.setdefault(planned, step)  # the first host's, where two hosts have the step
    assert set(measured.STEPS) == set(found.values()) and len(measured.STEPS) == len(found)


MEASURED = {"use_vllm": True, "vllm_mode": "colocate", "max_completion_length": 1000, "num_generations": 8}
MEASURED |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}


@pytest.fixture
def cost(tmp_path):
    def of(
        size: str = "7b", rank: int = 32, dtype=torch.bfloat16, kind=QuantGRPOConfig, prompts_once=True, **settings
    ) -> str:
        args = kind(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **settings)
        return measured.cost(args, shape_of(size, rank), dtype, prompts_once)

    return of


def test_a_cost_is_told_where_it_was_measured_alone(cost):
    told = cost(rollout_precision="fp8", **MEASURED)
    assert told.startswith("12.99 s a step against TRL's 19.89 s, 1.53x (1.30x") and "of 1024 new tokens" in told
    assert cost(rank=0, rollout_precision="bf16", **MEASURED).startswith("13.99 s")
    assert cost(rank=0, rollout_precision="fp8", **MEASURED).startswith("not measured")
    assert cost() == "as TRL's, which this run is"
    assert cost(kind=QuantPPOConfig) == "not measured with this trainer"  # TRL has no such PPO
    eight = MEASURED | {"max_completion_length": 512, "gradient_accumulation_steps": 1}
    told = cost("32b", rollout_precision="fp8", train_precision="fp8", lora_sync="adapter", **eight)
    assert told.startswith("8.89 s a step against TRL's 13.95 s")
    told = cost("32b", rollout_precision="fp8", train_precision="fp8", lora_sync="merge", **eight)
    assert told.startswith("not measured")
    assert "embedded" in cost(rollout_precision="fp8")
    unlimited = MEASURED | {"max_completion_length": None}
    assert cost(rollout_precision="fp8", **unlimited) == "not measured without a `max_completion_length`"
    for other in ({"rollout_precision": "int8"}, {"rollout_precision": "fp8", "vllm_mode": "server"}):
        assert cost(**MEASURED | other).startswith("not measured")
    assert cost("14b", rollout_precision="fp8", **MEASURED).startswith("not measured")


def test_a_run_with_other_settings_is_told_in_what_it_differs(cost):
    """Each alone takes the figure away, and is named; a batch of the same size in other parts too."""
    others = {
        "a policy in float32 (measured: bfloat16)": {"dtype": torch.float32},
        "8 completions a generation (measured: 64)": {"gradient_accumulation_steps": 1},
        "300 tokens a completion": {"max_completion_length": 300},
        "1000 tokens a micro-batch (measured: 8192)": {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 64,
        },
        "2 updates a generation": {"num_iterations": 2},
        "4 updates a generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 8},
        "no `gradient_checkpointing`": {"gradient_checkpointing": False},
        "`use_liger_kernel`": {"use_liger_kernel": True},
        "prompts that are computed for each completion": {"prompts_once": False},
        "a reference model": {"beta": 0.04},
        "`is_correction`='trl', which scores a generation first": {"is_correction": "trl"},
    }
    for words, settings in others.items():
        told = cost(rollout_precision="fp8", **MEASURED | settings)
        assert told.startswith("not measured for such a run. The nearest") and words in told, told
        assert "s a step" not in told
    told = cost(rollout_precision="fp8", **MEASURED | {"max_completion_length": 1200})  # a sixth more
    assert told.startswith("12.99 s")


@pytest.mark.parametrize(("size", "cache"), [(2, "auto"), (1, "fp8")])
def test_what_is_in_flight_and_whether_the_cache_holds_it(tmp_path, size, cache):
    """By hand: 64 completions in 8 groups of 8, of 256 + 4096 tokens, and 12 groups in flight."""
    settings = {"num_generations": 8, "per_device_train_batch_size": 64, "max_completion_length": 4096}
    settings |= {"rollout_precision": "fp8", "rollouts_in_flight": 1.5, "use_vllm": True, "vllm_mode": "colocate"}
    given = {"vllm_engine_kwargs": {"kv_cache_dtype": cache}, "vllm_gpu_memory_utilization": 0.3}
    args = QuantGRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **settings, **given)
    shape, card = shape_of("7b", 32), 80 * 10**9
    needed, room = cache_of(args, shape, 256, card)
    assert completions_in_flight(args) == 96 and needed == 96 * 4352 * shape.token * size
    assert room == 24 * 10**9 - shape.linear - 2 * shape.other
    (line,) = plan.in_flight_lines(args, shape, 256, card)
    assert f"96 completions of a GPU when a generation starts. At their longest they need {needed / 1e9:.2f} GB" in line
    assert ("some may wait in vLLM's queue" in line) == (needed > room)
    assert "some may wait" in plan.in_flight_lines(args, shape, 256, card // 2)[0]
    assert "some may wait" not in plan.in_flight_lines(args, shape, 256, 2 * card)[0]
    args.rollouts_in_flight = 1.0
    assert plan.in_flight_lines(args, shape, 256, card) == []
