"""Two ranks on this CPU: policies that FSDP2 and ZeRO hold in parts, tensor and data parallel vLLM engines.

The cases of one launch share its processes, in this order (see `ranks`). vLLM keeps one tensor parallel size a process.
"""

from functools import cache
from importlib.util import find_spec

import async_ranks
import ppo_ranks
import pytest
import torch
from ranks import on_demand
from tiny import save_tiny
from vllm_ranks import check


pytestmark = [pytest.mark.isa, pytest.mark.slow]
PARTITIONED = ["embedded-int8-full", "embedded-int8-lora", "experts-int8-lora"]  # the last: experts and routers too
EMBEDDED = [*PARTITIONED, "hybrid-int8-full", "rloo-int8-full", "distilled-int8-full", "truncated-int8-full"]
PPO = ["ppo-int8-full", "ppo-int8-lora", "ppo-int8-shared"]
THREADS = ["async-int8-full", "async-int8-lora"]
TOOLS = "async-tools-full"
ASYNC = ["async-tis-full", *THREADS, TOOLS, "async-broken-full"]
PASSES = ["passes-int4-full", "passes-int4-lora"]
TRAINED = ["trained-nvfp4-lora", "trained-fp8_block-full"]
PACKED = ["packed-int4-full", "packed-int4-lora"]
LATE = ["late-int8-lora"]
MASKED = ["masked-int4-full", "masked-int8-lora"]
SHARDED = ["sharded-fp8_block-full", "sharded-int8-lora", "sharded-int8-rounded"]
SHARDED_EXPERTS = "sharded-fp8-experts"
WITHOUT_VLLM = EMBEDDED + PPO + ASYNC + PASSES + TRAINED + PACKED + LATE + MASKED + SHARDED + [SHARDED_EXPERTS]
LONG = "-others"  # how the launches that `make test-long` alone runs are named
# launch -> (accelerate's configuration, cases)
LAUNCHES = {
    "ddp": (
        "ddp",
        [
            *("embedded-int8-full", "experts-int8-lora", "truncated-int8-full", "ppo-int8-shared", "async-int8-full"),
            *("async-broken-full", "passes-int4-lora", *TRAINED, "packed-int4-lora", *LATE, "masked-int4-full"),
            "tp-int8-lora",
        ],
    ),
    f"ddp{LONG}": (
        "ddp",
        [
            *("embedded-int8-lora", "hybrid-int8-full", "rloo-int8-full", "distilled-int8-full", "ppo-int8-full"),
            *("ppo-int8-lora", "async-tis-full", "async-int8-lora", TOOLS, "passes-int4-full", "masked-int8-lora"),
        ],
    ),
    f"tp{LONG}": ("ddp", ["spread-bf16-full"]),
    f"dp{LONG}": ("ddp", ["dp-int8-full", "beside-int8-lora"]),  # vLLM keeps a process to one tensor parallel size
    "fsdp2": ("fsdp2", ["embedded-int8-full", "experts-int8-lora", "fsdp2-int8-lora"]),
    f"fsdp2{LONG}": (
        "fsdp2",
        [
            *EMBEDDED[1:2],
            *EMBEDDED[3:],
            *(PPO[0], PPO[2], *ASYNC, *PACKED, *MASKED, *SHARDED, SHARDED_EXPERTS),
            *("unified-int8-full", "split-int8-lora", "gathered-bf16-lora"),
        ],
    ),
    "zero2": ("zero2", TRAINED),
    f"zero2{LONG}": ("zero2", [*PACKED[:1], "zero2-int8-full"]),
    f"zero3{LONG}": ("zero3", [*PARTITIONED, "zero3-int8-full", "zero3-bf16-lora", "partitioned-bf16-full"]),
}


def launch_of(configuration: str, case: str) -> str:
    """The launch in which a case runs under a configuration."""
    return next(name for name, (its, cases) in LAUNCHES.items() if its == configuration and case in cases)


def marks(case: str, *configurations: str) -> list:
    """A test of a case is `long` if one of the launches that it needs is."""
    launches = [launch_of(configuration, case) for configuration in configurations]
    return [pytest.mark.long] if any(launch.endswith(LONG) for launch in launches) else []


def each(cases: list[str], *configurations: str) -> list:
    """The cases, as the parameters of a test that needs each under all `configurations`."""
    return [pytest.param(case, marks=marks(case, *configurations)) for case in cases]


def wherever(cases: list[str]) -> list:
    """Each of `cases` under each configuration that has it, as the parameters of a test."""
    return [
        pytest.param(configuration, case, marks=marks(case, configuration))
        for configuration, its_cases in LAUNCHES.values()
        for case in its_cases
        if case in cases
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with_vllm = find_spec("vllm")
    launches = {
        name: (configuration, [case for case in cases if case in WITHOUT_VLLM or with_vllm])
        for name, (configuration, cases) in LAUNCHES.items()
    }
    run = on_demand(tmp_path_factory, launches)
    return lambda configuration, case: run(launch_of(configuration, case), case)


@pytest.mark.parametrize(
    ("configuration", "case"),
    [
        pytest.param(configuration, case, marks=marks(case, configuration, "ddp"))
        for configuration, cases in (("fsdp2", EMBEDDED), ("zero3", PARTITIONED))
        for case in cases
    ],
)
def test_a_sharded_policy_trains_as_the_whole(found, configuration, case):
    """
    Under FSDP2 bit for bit in all steps; under ZeRO-3, whose optimizer rounds otherwise, in the first.

    No gradients are clipped: FSDP2 adds up their norm in another order, and the last bits of a weight move codes of the
    engine, which decide between two tokens now and then. Which step that happens in depends on every other last bit.
    """
    ours, theirs = found(configuration, case)[0], found("ddp", case)[0]
    assert len(ours) == 3 and ours[0] == theirs[0] and ours[1] != ours[2]
    if configuration == "fsdp2":
        assert ours == theirs
    else:
        updates, expected = ([entry["weights/normalized_update"] for entry in log[1:]] for log in (ours, theirs))
        assert updates == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("configuration", "case"), wherever(PACKED))
def test_packed_rows_train_as_padded_ones(found, configuration, case):
    ranks = found(configuration, case)
    assert all(rank["gap"] < 1e-4 for rank in ranks)
    assert all(packed < 0.8 * padded for packed, padded in (rank["computed"] for rank in ranks))


@pytest.mark.parametrize("case", LATE)
def test_a_checkpoint_is_marked_as_whole_after_all_ranks_have_saved(found, case):
    assert found("ddp", case) == [["rng_state_0.pth", "rng_state_1.pth"], []]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """PPO's cases in this process."""

    @cache
    def run(case: str):
        path = tmp_path_factory.mktemp(case)
        save_tiny(path / "model", "qwen2", dtype=torch.bfloat16)
        return ppo_ranks.run(*case.split("-")[1:], path / case, ranks=1)

    return run


@pytest.mark.parametrize(("configuration", "case"), wherever(PPO))
def test_policy_and_critic_on_two_ranks_train_as_on_one(found, on_one_rank, configuration, case):
    """
    Two updates on each of two generations, whose completions their prompts decide, each in two micro-batches. Resumed
    inside a generation or between two, the ranks end bit for bit where they did.
    """
    left, right = found(configuration, case)
    assert left["weights"] == right["weights"] and left["resumed"] and right["resumed"]
    assert left["sharded"] == right["sharded"] == (configuration == "fsdp2" and not case.endswith("shared"))
    one = on_one_rank(case)
    expected = ppo_ranks.sums(one)
    for part, names in left["weights"].items():
        start, end = left["start"][part], expected[part]
        way = sum((end[name] - start[name]) ** 2 for name in end) ** 0.5
        gap = sum((end[name] - names[name]) ** 2 for name in end) ** 0.5
        assert way > 0 and gap < 2e-2 * way, part
    for ours, theirs in zip(left["log"], ppo_ranks.log(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-3)


@pytest.fixture(scope="module")
def beside_one_rank(tmp_path_factory):
    """The asynchronous cases in this process."""

    @cache
    def run(case: str):
        path = tmp_path_factory.mktemp("one")
        save_tiny(path / "model", "qwen2", dtype=torch.bfloat16)
        return async_ranks.trained(case, path / case)

    return run


@pytest.mark.parametrize(("configuration", "case"), wherever(ASYNC[:-1]))
def test_asynchronous_samples_train_as_on_one_rank(found, beside_one_rank, configuration, case):
    """
    The first rank samples in a thread or has the samples, and makes the rows of both, which have ages and weights. The
    weights of a sync reach its copy, whose log-probabilities the samples have.
    """
    left, right = found(configuration, case)
    assert left["weights"] == right["weights"]
    one = beside_one_rank(case)
    expected = ppo_ranks.sums_of(ppo_ranks.whole(one.model))
    way = sum((end - left["start"][name]) ** 2 for name, end in expected.items()) ** 0.5
    gap = sum((end - left["weights"][name]) ** 2 for name, end in expected.items()) ** 0.5
    assert way > 0 and gap < 1e-3 * way
    for ours, theirs in zip(left["log"], async_ranks.log(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
        if case == TOOLS:
            assert ours["tools/call_frequency"] == 1 and ours["rollout/turns_mean"] == 2


@pytest.mark.parametrize(("configuration", "case"), wherever(THREADS))
def test_a_run_that_samples_on_the_first_rank_resumes(found, configuration, case):
    """Between two syncs too: the resumed run begins with a sync."""
    left, right = found(configuration, case)
    assert (left["samples"], right["samples"]) == (True, False)
    assert left["versions"] == right["versions"] and left["resumed"] == right["resumed"]
    if case == THREADS[0]:
        assert left["resumed"] == left["weights"]
    else:  # saved after the first of two updates: in the unbroken run the copy has older weights
        assert left["resumed"] != left["weights"] != left["start"]


@pytest.mark.parametrize(("configuration", "case"), wherever(ASYNC[-1:]))
def test_an_error_beside_the_training_ends_all_ranks(found, configuration, case):
    left, right = found(configuration, case)
    assert "The reward function 'broken', at step" in left["error"] and "returned inf for row 0" in left["error"]
    assert right["error"] == f"Rank 0: {left['error']}"


@pytest.mark.parametrize("case", each(MASKED, "ddp"))
def test_a_masked_diffusion_policy_has_the_same_masks_on_every_rank(found, case):
    """Each rank's trainer and copy see the same rows, and both ranks train one policy."""
    ranks = found("ddp", case)
    for rank in ranks:
        rows = rank["rows"]
        assert sum(rows["copy"].values()) == 2 * 2 * 8  # generations, draws, rows
        assert rows["policy"] == {row: 2 * times for row, times in rows["copy"].items()}
        assert len(rank["log"]) == 4 and rank["log"][0]["mismatch/kl_k3"] > 0
    assert ranks[0]["rows"] != ranks[1]["rows"]
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.parametrize("case", each(MASKED, "ddp", "fsdp2"))
def test_a_masked_diffusion_policy_in_parts_begins_as_the_whole(found, case):
    for whole, part in zip(found("ddp", case), found("fsdp2", case), strict=True):
        assert part["rows"]["policy"] == {row: 2 * times for row, times in part["rows"]["copy"].items()}
        for name in ("reward", "mismatch/kl_k3", "ais/alpha"):
            assert part["log"][0][name] == pytest.approx(whole["log"][0][name], rel=1e-3)


@pytest.mark.parametrize("case", each(PASSES, "ddp"))
def test_one_pass_trains_as_two(found, case):
    """Weights bit for bit; metrics are those of both ranks' tokens, to the rounding of their sums."""
    ranks = found("ddp", case)
    for one, two in ranks:
        assert one["weights"] == two["weights"] and len(one["log"]) == 3
        for left, right in zip(one["log"], two["log"], strict=True):
            assert left == pytest.approx(right, rel=1e-4, abs=1e-6)
    assert ranks[0][0]["log"] == ranks[1][0]["log"] != []


@pytest.mark.parametrize("configuration", ["ddp", "zero2"])
def test_a_frozen_base(found, configuration):
    """Both ranks train one adapter, of which both sample, and leave the base as it was."""
    left, right = found(configuration, TRAINED[0])
    assert left["log"] == right["log"] and left["weights"] == right["weights"]
    assert left["moved"] and all(".lora_" in name for name in left["moved"])
    assert all(abs(entry["mismatch/kl_k3"]) < 1e-9 for entry in left["log"])
    assert len({entry["reward"] for entry in left["log"]}) == 3


def test_the_numbers_that_sample(found):
    """
    Both ranks train what they sample from; ZeRO-2, which writes weights past torch's count, trains what DDP does.

    The bound is on the mean over the run. Most steps have no mismatch, but a single code that last bits move makes up
    to 1e-4 in its step. In one process the mean over 16 seeds is 4e-6. A policy trained in FP32 has 1e-3 in each step.
    """
    (ddp, other), zero2 = found("ddp", TRAINED[1]), found("zero2", TRAINED[1])[0]
    assert ddp == other
    for run in (ddp, zero2):
        assert abs(sum(entry["mismatch/kl_k3"] for entry in run["log"]) / 3) < 1e-4
    assert len({entry["reward"] for entry in ddp["log"]}) == 3
    # The third step's samples are of weights that differ in last bits, which move codes
    assert [entry["reward"] for entry in zero2["log"][:2]] == [entry["reward"] for entry in ddp["log"][:2]]
    assert zero2["moved"] == ddp["moved"] != []
    assert zero2["codes"] == ddp["codes"] >= 14 and zero2["stale"] == ddp["stale"] == []


@pytest.mark.parametrize("case", each(SHARDED[:2], "fsdp2"))
def test_in_the_numbers_that_sample_fsdp2_trains_as_the_whole(found, case):
    """
    Bit for bit, with a reference policy and resumed, or with micro-batches; a policy trained in FP32 ends far away.

    Nothing clips gradients, as in `test_a_sharded_policy_trains_as_the_whole`, and no correction weighs them: it reads
    the sampled log-probabilities, whose last bits differ between an engine with the policy's head and one with a copy.
    """
    left, right = found("fsdp2", case)
    assert left == right and left["sharded"] and len(left["log"]) == 3
    assert left.get("saved", True) and left.get("resumed", True)
    for ours, theirs, plain in zip(left["log"], left["other"], left["plain"], strict=True):
        assert all(ours[name] == theirs[name] for name in ("loss", "reward", "kl"))
        assert abs(ours["mismatch/kl_k3"]) < 2e-4 < 1e-3 < plain["mismatch/kl_k3"]
    kl = [entry["kl"] for entry in left["log"]]
    assert kl == [None] * 3 if "lora" in case else abs(kl[0]) < 1e-6 < kl[-1]
    assert left["gap"] == 0 and left["plain_gap"] > 0.3


@pytest.mark.parametrize("case", each([SHARDED_EXPERTS], "fsdp2"))
def test_experts_in_the_numbers_that_sample_train_under_fsdp2_as_the_whole(found, case):
    """Bit for bit, and resumed. The engine's codes are those of the optimizer's weights; a layer frees its own."""
    left, right = found("fsdp2", case)
    assert left == right and left["sharded"] and left["resumed"] and left["gradients"]
    assert all(left["sent"]) and len(left["sent"]) == 4 and left["held"] == 0
    for ours, theirs, plain in zip(left["log"], left["other"], left["plain"], strict=True):
        assert all(ours[name] == theirs[name] for name in ("loss", "reward"))
        assert abs(ours["mismatch/kl_k3"]) < 0.2 * plain["mismatch/kl_k3"]
    assert len({entry["reward"] for entry in left["log"]}) == 3
    assert left["gap"] == 0 and left["plain_gap"] > 0.3


@pytest.mark.parametrize(("configuration", "case"), wherever(SHARDED))
def test_codes_of_what_fsdp2_gathers(found, configuration, case):
    """The engine gets the codes that the trainer computes with, also where these are of weights gathered in BF16."""
    for result in found(configuration, case):
        layers, products = result["layers"], result["products"]
        # q, k and v have one, and so have gate and up; blocks of 128 do not divide this k
        assert products == layers * (6 if "fp8_block" in case else 4) / 7
        assert result["same"] == layers >= 14 and result["backward"]
        assert result["unrounded"] == 0 or "rounded" in case
        assert result["unrounded"] == layers or "rounded" not in case
        # A weight that is not let go after a forward pass has its codes until the backward pass has used them
        assert result["between"] == (products if "lora" in case else 0)
        assert result["after"] == 0
        # Three steps, each with a sync; a micro-batch of the policy and one of its reference, two micro-batches, or one
        passes = {"full": 2 + 1, "lora": 2 * 1, "rounded": 2}[case.rpartition("-")[2]]
        assert result["quantized"] == 3 * layers * (1 + passes)


@pytest.mark.vllm
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("configuration", "case"),
    wherever([case for _, cases in LAUNCHES.values() for case in cases if case not in WITHOUT_VLLM]),
)
def test_engines_end_as_fresh_ones(found, configuration, case):
    ranks = found(configuration, case)
    check(case, ranks)
    for result in ranks:  # a base in codes alone, which FSDP does not shard
        assert (result.get("layers", 0) > 0) == case.startswith("beside")
