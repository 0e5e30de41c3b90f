"""A plan that needs too much memory ends with an error, and each change that it names makes the run fit."""

import re
from dataclasses import replace

import pytest
import torch
from training import lora
from transformers import Qwen2Config

from trl_quant import QuantGRPOConfig
from trl_quant.cli import main
from trl_quant.report import cures as module
from trl_quant.report.cures import CHANGES, Planned, cures
from trl_quant.report.memory import Shape
from trl_quant.report.plan import memory_of_machine
from trl_quant.storage.source import skeleton


GB = 10**9
VLLM = {"rollout_precision": "fp8", "use_vllm": True, "vllm_mode": "colocate"}


@pytest.fixture(scope="module")
def config() -> Qwen2Config:
    """The shapes of 7B."""
    return Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip


@pytest.fixture
def planned(config, tmp_path):
    def of(card: float, rank: int = 32, dtype=torch.bfloat16, on_cpu: bool = False, **settings) -> Planned:
        batch = {"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}
        batch |= {"max_completion_length": 1024}
        args = QuantGRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **batch | settings)
        args.resolve_for(adapted=rank > 0)
        shape = Shape.of(config, lora(r=rank) if rank else None)
        return Planned(args, skeleton(config, False), None, shape, dtype, 256, round(card * GB), on_cpu)

    return of


@pytest.mark.long
def test_each_change_is_told_where_it_is_enough_and_only_there(planned):
    """Every member of `CHANGES` is enough for some run, told with the peak that it leaves, and not for 1 GB."""
    runs = [
        planned(40, dtype=torch.float32, **VLLM | {"vllm_gpu_memory_utilization": 0.3}),
        planned(40, gradient_checkpointing=False, **VLLM | {"vllm_gpu_memory_utilization": 0.2}),
        planned(40, **VLLM | {"vllm_gpu_memory_utilization": 0.5}),
        planned(44, per_device_train_batch_size=64, gradient_accumulation_steps=1, **VLLM),
        planned(60, rank=0, **VLLM | {"vllm_gpu_memory_utilization": 0.2}),
        planned(16, **VLLM),
    ]
    enough = set()
    for run in runs:
        assert not run.fits
        lines = cures(run)
        for change in CHANGES:
            variants = [(told, changed) for told, changed in change(run) if changed.fits]
            mine = [line for line in lines if any(line.startswith(f"{told}: peak") for told, _ in variants)]
            assert bool(mine) == bool(variants), (change, lines)
            if variants:
                enough.add(change)
                told, changed = variants[0]  # the mildest
                assert mine == [f"{told}: peak {changed.memory().card / GB:.2f} GB"]
                assert changed.memory().card <= run.card < run.memory().card
    assert enough == {*CHANGES}
    assert all(not changed.fits for change in CHANGES for _, changed in change(planned(1, **VLLM)))


def test_what_no_change_does_alone_several_do(planned):
    """None of them is there in vain; and what nothing cures is said."""
    run = planned(14, dtype=torch.float32, per_device_train_batch_size=64, gradient_accumulation_steps=1, **VLLM)
    (line,) = cures(run)
    assert float(re.search(r": peak ([\d.]+)", line)[1]) <= 14
    parts = line.partition(": peak")[0].split(", ")
    assert len(parts) > 1 and "GPUs" not in line
    assert any("`per_device_train_batch_size`" in part for part in parts)
    (line,) = cures(planned(2, rank=0, **VLLM))
    assert line.startswith("no change that is known here is enough")
    assert float(re.search(r"peak is ([\d.]+)", line)[1]) > 2


def test_a_smaller_micro_batch_keeps_the_batch(planned):
    run = planned(44, per_device_train_batch_size=12, gradient_accumulation_steps=2, **VLLM)
    for told, changed in module.smaller_micro_batch(run):
        args = changed.args
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 24
        assert args.per_device_train_batch_size * args.steps_per_generation == args.generation_batch_size
        assert f"={args.per_device_train_batch_size} with" in told
    assert run.args.per_device_train_batch_size == 12  # the run itself is not changed


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_a_change_is_told_with_the_prompts_that_the_changed_run_computes(planned, attention):
    """With this attention each completion has its own: no change is told that is enough for packed rows alone."""
    settings = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "max_completion_length": 256}
    attending = {"model_init_kwargs": {"attn_implementation": attention}}
    run, packed, padded = (
        replace(planned(40, **VLLM, **settings, **given), prompt=2048)
        for given in (attending, {}, {"pack_sequences": False})
    )
    assert run.memory() == padded.memory() and run.memory().peak > packed.memory().peak + 5 * GB
    assert cures(run) == cures(padded) != cures(packed)
    assert run.policy.config._attn_implementation == "sdpa"  # as it was: only its name is asked for


def test_a_run_that_no_longer_is_exact_has_its_own_attention_again(planned):
    """Exact rollouts bring an attention that shares prompts, and a 4-bit base has none."""
    exact = {"train_precision": "int8", "exact_rollouts": True, "use_vllm": True, "vllm_mode": "colocate"}
    run = planned(30, gradient_accumulation_steps=1, **exact, model_init_kwargs={"attn_implementation": "eager"})
    assert run.memory() == replace(run, args=run.args.having(model_init_kwargs=None)).memory()
    ((_, changed),) = module.four_bit_base(run)
    assert changed.memory() == changed.having(pack_sequences=False).memory()
    assert run.memory() != run.having(pack_sequences=False).memory()


def test_a_cpu_has_neither_sleep_nor_gpus(planned):
    on_cpu = planned(8, on_cpu=True, **VLLM)
    assert not [*module.asleep(on_cpu), *module.more_gpus(on_cpu)]
    assert [*module.asleep(replace(on_cpu, on_cpu=False))] and [*module.more_gpus(replace(on_cpu, on_cpu=False))]


# The commands


def plan(argv: list[str], capsys) -> tuple[int, str]:
    """Status and words of a command."""
    try:
        main(argv)
        status = 0
    except SystemExit as ended:
        status = ended.code
    return status, capsys.readouterr().out


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry_run", "true", "--model_name_or_path"]])
def test_a_run_that_does_not_fit_ends_with_an_error(model_dir, options, capsys, unloaded, monkeypatch, command):
    argv = [*command, model_dir, *options, "--rollout_precision", "int4", "--max_completion_length", "2000"]
    status, told = plan(argv, capsys)
    assert status == 0 and "It would fit" not in told
    peak = float(re.search(r"peak +([\d.]+)", told)[1])
    monkeypatch.setattr("trl_quant.report.plan.memory_of_machine", lambda: round((peak - 0.01) * GB))
    status, told = plan(argv, capsys)
    assert status == 1 and "does not fit" in told and "It would fit with one of these changes:" in told
    assert "  `per_device_train_batch_size`=" in told


def test_a_cpus_memory_is_the_machines(model_dir, options, capsys, unloaded, monkeypatch):
    """With `use_cpu`; a plan for another machine's GPU says which GPU it supposes."""
    status, told = plan(["plan", model_dir, *options], capsys)
    assert status == 0 and f"Memory of a CPU with {memory_of_machine() / GB:.4g} GB" in told
    with open("/proc/meminfo") as file:
        kilobytes = int(re.search(r"MemTotal: +(\d+) kB", file.read())[1])
    assert memory_of_machine() == pytest.approx(1024 * kilobytes, rel=0.05)
    if not torch.accelerator.is_available():
        at = options.index("--use_cpu")
        status, told = plan(["plan", model_dir, *options[:at], *options[at + 2 :]], capsys)
        assert status == 0 and "Memory of a GPU (there is none here; `--card` says another) with 80 GB" in told
