"""`trl-quant choose` and `trl-quant prepare`: the choice, and what comes of it in real vLLM engines."""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
import yaml
from places import ROOT
from tiny import save_tiny, tiny_model, tiny_tokenizer
from training import config, lora, make
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import COLOCATED, SMALL, greedy, keep

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, choose_precision
from trl_quant.cli import main as command
from trl_quant.config.checks.rule import refusal
from trl_quant.formats import quantize
from trl_quant.rollout.vllm import choice, support, trial
from trl_quant.rollout.vllm.support import supported_precisions
from trl_quant.rollout.vllm.trial import Speed, Trial
from trl_quant.trainers.choice import uncounted
from trl_quant.trainers.launch import TRAINERS


pytestmark = pytest.mark.vllm

ALIKE = Speed(step=1.0, sync=1.0)


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ({"bf16": 100.0, "int8": 150.0, "fp8": 149.0}, "int8"),
        ({"bf16": 100.0, "int8": 104.0}, "bf16"),  # not worth a mismatch
        ({"bf16": 100.0, "fp8": 140.0, "int8": 130.0, "mxfp4": 142.0}, "fp8"),  # as fast as MXFP4, and much nearer
        ({"bf16": 100.0, "fp8": 130.0, "mxfp4": 142.0}, "mxfp4"),
        ({"bf16": "no memory", "int8": 10.0}, "int8"),
        ({"int8": 10.0, "fp8": "RuntimeError: no kernel"}, "int8"),
        ({"bf16": "a", "int8": "b"}, None),
        ({}, None),
    ],
)
def test_choice(measured, chosen):
    assert choice.choice_of(measured) == chosen


SLOW_SYNC, FAST_SYNC = Speed(step=0.004, sync=0.5), Speed(step=0.006, sync=0.1)  # as fast at 200 tokens


@pytest.mark.parametrize(
    ("bf16", "nvfp4", "length", "chosen"),
    [
        (FAST_SYNC, SLOW_SYNC, 64, "bf16"),
        (FAST_SYNC, SLOW_SYNC, 220, "bf16"),  # not worth a mismatch
        (FAST_SYNC, SLOW_SYNC, 2000, "nvfp4"),
        (SLOW_SYNC, FAST_SYNC, 64, "nvfp4"),
        (SLOW_SYNC, FAST_SYNC, 2000, "bf16"),
    ],
)
def test_the_sync_counts(bf16, nvfp4, length, chosen, monkeypatch, capsys):
    """Fast decoding and a slow sync win where completions are long, and lose where they are short."""
    no_kernel = f"RuntimeError: no kernel{' at all' * 20}"
    speeds = {"bf16": bf16, "nvfp4": nvfp4, "int4": no_kernel}
    monkeypatch.setattr(choice, "measure", lambda trial, precision: speeds[precision])
    run = Trial(
        "model", torch.float32, torch.float32, {}, None, True, {"max_num_seqs": 8, "max_completion_length": length}
    )
    found = choice.choose(dict.fromkeys(speeds, run) | {"int8": "not for this run"}, ["reading prompts", "waking up"])
    assert found.precision == chosen and found.measured == speeds | {"int8": "not for this run"}

    found.print()
    printed = capsys.readouterr().out
    bf16_seconds, nvfp4_seconds = (speed.sync + length * speed.step for speed in (bf16, nvfp4))
    expected = (
        f"{8 / nvfp4.step:.0f} {nvfp4.sync:.3f} {8 * length / nvfp4_seconds:.0f} {bf16_seconds / nvfp4_seconds:.2f}"
    )
    row = next(line for line in printed.splitlines() if "nvfp4" in line)
    assert row.replace("│", " ").split() == ["nvfp4", *expected.split()]
    assert f"8 completions of {length} tokens" in printed and f"\nint4: {no_kernel}\n" in printed
    assert "\nint8: not for this run\n" in printed and "Not counted: reading prompts, waking up." in printed
    assert printed.endswith(f"\nrollout_precision: {chosen}\n")


def test_the_length_of_completions():
    """`max_tokens` among the arguments of generation takes the place of `max_completion_length` in TRL."""
    of = partial(Trial, "model", torch.float32, torch.float32, {}, None, True)
    assert of({"max_completion_length": 8}).length == 8
    assert of({"max_completion_length": 8, "generation_kwargs": {"max_tokens": 4}}).length == 4


def test_what_is_not_counted(tmp_path, monkeypatch):
    """The table says so."""
    policy, args = tiny_model(), settings(tmp_path)
    assert uncounted(policy, args) == ["reading prompts"]
    sleeping = settings(tmp_path, vllm_enable_sleep_mode=True)
    assert uncounted(policy, sleeping)[1:] == ["putting the engine to sleep"]
    speculating = settings(tmp_path, vllm_engine_kwargs={"speculative_config": {"method": "ngram"}})
    assert uncounted(policy, speculating)[1:] == ["speculative decoding, which depends on the policy"]
    for sharding in ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, {"fsdp_plugin_args": {"fsdp_version": 2}}):
        sharded = settings(tmp_path)
        vars(sharded).update(sharding)
        assert uncounted(policy, sharded)[1:] == ["gathering the sharded policy"]
    sharded.fsdp_plugin_args, sharded.deepspeed_plugin = None, SimpleNamespace(zero_stage=2)
    assert uncounted(policy, sharded) == ["reading prompts"]
    policy.model.norm.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    assert uncounted(policy, args)[1:] == ["dequantizing the policy's base"]


def settings(tmp_path, config_class=QuantGRPOConfig, **overrides):
    options = {
        **COLOCATED,
        "rollout_precision": "bf16",
        "max_steps": 2,
    }
    return config(config_class, tmp_path / "out", **options | overrides)


def run_file(tmp_path, **overrides) -> Path:
    """The config file of a run with [`settings`], with a comment and no precision."""
    args = settings(tmp_path)
    names = ["output_dir", "bf16", "use_cpu", "gradient_checkpointing", "per_device_train_batch_size", "max_steps"]
    names += ["num_generations", "max_completion_length", "use_vllm", "vllm_mode", "vllm_max_model_length"]
    found = {name: getattr(args, name) for name in names} | {"vllm_engine_kwargs": SMALL, "report_to": "none"}
    path = tmp_path / "run.yaml"
    path.write_text("# My run\n" + yaml.safe_dump(found | overrides, sort_keys=False))
    return path


class Measuring:
    """Stands in for what measures, and keeps the trials. The precisions are equally fast, or as `speeds` says."""

    def __init__(self, monkeypatch, **speeds):
        self.trials, self.speeds = {}, speeds
        monkeypatch.setattr(choice, "measure", self)

    def __call__(self, run, precision):
        self.trials[precision] = run
        self.placed = TrainingArguments.place_model_on_device.fget(None)  # what transformers is told now
        return self.speeds.get(precision, ALIKE)


HERE = [name for name, missing in supported_precisions().items() if missing is None]


@pytest.mark.long
@pytest.mark.slow
def test_the_fastest_is_written_and_trains(tmp_path, monkeypatch, capfd):
    """Real engines are measured; the run of the written file trains in the choice."""
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16, num_hidden_layers=1)
    measure, measured = choice.measure, {}
    warm.ensure_running()

    def remember(asked, precision):
        """
        In processes of their own, which leave no files; the first begins with nothing imported and compiles, as a
        user's.
        """
        with monkeypatch.context() as patch:
            patch.setattr("tempfile.tempdir", here := tempfile.mkdtemp())  # sockets have short names
            patch.chdir(here)
            patch.setenv("PYTHONPATH", str(ROOT))
            if measured:
                patch.setattr(trial, "subprocess", warm)
                patch.setenv("TORCHDYNAMO_DISABLE", "1")
            measured[precision] = measure(asked, precision)
        os.rmdir(here)  # which is empty
        return measured[precision]

    monkeypatch.setattr(choice, "measure", remember)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    path = run_file(tmp_path, dtype="bfloat16", rollout_precision="auto", dataset_name=str(data), save_steps=2)
    text = path.read_text()
    command(["choose", str(model), "--config", str(path), "--write", str(path)])
    assert list(measured) == HERE
    assert all(isinstance(speed, Speed) and speed.step > 0 and speed.sync > 0 for speed in measured.values()), measured
    rates = choice.rates_of(measured, 8, 8)
    chosen = choice.choice_of(rates)
    printed = capfd.readouterr().out
    assert all(f" {rate:.0f} " in printed for rate in rates.values()) and f"rollout_precision: {chosen}\n" in printed
    assert path.read_text() == text.replace("rollout_precision: auto\n", f"rollout_precision: {chosen}\n") != text
    assert {*os.listdir(tmp_path)} == {"model", "data.jsonl", "run.yaml"}  # nothing else was written

    built = []
    monkeypatch.setattr(QuantGRPOTrainer, "train", lambda self, **given: built.append(self))
    monkeypatch.setattr(QuantGRPOTrainer, "save_model", lambda self, *given: None)
    monkeypatch.setattr(QuantGRPOTrainer, "save_state", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["trl-quant"])
    command(["train", "--model_name_or_path", model, "--config", str(path), "--reward_funcs", "arithmetic"])
    monkeypatch.undo()
    (trainer,) = built
    keep(trainer)
    assert trainer.args.rollout_precision == trainer.vllm_generation.engine.precision == chosen
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("name", [name for name in TRAINERS if name not in ("diffusion", "async_grpo")])
def test_each_trainers_engine_is_measured(name, tmp_path, monkeypatch):
    """With the trainer's own batch, the run's lengths and adapter, and the policy as it is when the run samples."""
    model, measuring = save_tiny(tmp_path / "model", dtype=torch.bfloat16), Measuring(monkeypatch)
    trainer_class, overrides = TRAINERS[name], {"gradient_accumulation_steps": 3}
    if name == "distillation":
        overrides |= {"teacher_model_name_or_path": model}
    args = settings(tmp_path, trainer_class.config_class, model_init_kwargs={"dtype": "bfloat16"}, **overrides)
    before = vars(args).copy()
    found = choose_precision(trainer_class, model, args, peft_config=lora())
    assert found.precision == "bf16" and [*measuring.trials] == HERE == [*found.measured]
    for run in measuring.trials.values():
        assert (run.batch, run.length) == (8 * 3, 8) == (found.batch, found.length)
        assert run.dtype == torch.bfloat16 and run.model == model and run.adapters["default"].r == 4
        assert run.settings["max_model_length"] == 512 and run.settings["engine_kwargs"] == SMALL
        assert run.settings["lora_sync"] == "merge" and "precision" not in run.settings
    assert vars(args) == before and not (tmp_path / "out").exists()  # the run's own settings and directory


def test_ranks_and_processes_of_the_run(tmp_path, monkeypatch, capsys):
    """One process measures for a run of several, whose batches are those of one."""
    measuring = Measuring(monkeypatch)
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    options = {"vllm_tensor_parallel_size": 2, "generation_batch_size": 16, "per_device_train_batch_size": 2}
    options |= {"gradient_accumulation_steps": 2}
    path = run_file(tmp_path, **options)
    for processes, batch in ((4, 8), (2, 16)):
        command(["choose", str(model), "--config", str(path), "--processes", str(processes)])
        assert {run.batch for run in measuring.trials.values()} == {batch}  # 16 / (2 * processes) * 2 * 2 ranks
        assert {run.ranks for run in measuring.trials.values()} == {2}
        assert f"Sampling {batch} completions" in capsys.readouterr().out
    args = settings(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="in one process"):
        choose_precision(QuantGRPOTrainer, model, args)
    with pytest.raises(SystemExit, match="in one process"):  # before a config would wait for the other rank
        command(["choose", model, "--config", str(path)])


def test_without_a_file_the_defaults_are_measured(tmp_path, monkeypatch, capsys):
    """TRL's lengths, and vLLM. What is on the command line counts."""
    measuring = Measuring(monkeypatch, bf16=Speed(3.0, 1.0))
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    monkeypatch.chdir(tmp_path)
    argv = ["choose", str(model), "--bf16", "false", "--report_to", "none", "--use_cpu", "true"]
    command(argv)
    default = QuantGRPOConfig("out", bf16=False, use_cpu=True).max_completion_length
    chosen = "bf16" if len(HERE) == 1 else HERE[1]
    assert measuring.trials["bf16"].length == default
    assert f"of {default} tokens" in (printed := capsys.readouterr().out) and f"precision: {chosen}\n" in printed
    command([*argv, "--max_completion_length", "7", "--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"])
    assert measuring.trials["bf16"].length == 7 and measuring.trials["bf16"].adapters
    assert {*os.listdir(tmp_path)} == {"model"}


def test_a_file_to_write_is_what_is_measured(tmp_path, monkeypatch, capsys):
    measuring = Measuring(monkeypatch)
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    path = run_file(tmp_path, max_completion_length=5, model_name_or_path=model)
    text = path.read_text()
    command(["choose", "--write", str(path)])
    assert path.read_text() == f"{text}rollout_precision: bf16\n" and measuring.trials["bf16"].length == 5
    other = tmp_path / "other.yaml"
    other.write_text("a: 1")
    command(["choose", "--config", str(path), "--write", str(other)])
    assert other.read_text() == "a: 1\nrollout_precision: bf16\n" and capsys.readouterr().out.count("Written into") == 2


def test_each_precision_has_its_own_settings(tmp_path, monkeypatch):
    """An engine is measured as the run would build it. It takes an adapter only in the precision of the frozen base."""
    measuring = Measuring(monkeypatch)
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    args = settings(tmp_path, train_precision="int8", rollout_precision="int8", lora_sync="adapter")
    found = choose_precision(QuantGRPOTrainer, model, args, peft_config=lora())
    assert [*measuring.trials] == ["int8"] and found.precision == "int8"
    assert measuring.trials["int8"].settings["lora_sync"] == "adapter"
    assert "`lora_sync`='adapter' leaves vLLM's base in 'bf16'" in found.measured["bf16"]
    assert found.uncounted == ["reading prompts", "dequantizing the policy's base"]
    options = {"train_precision": "int8", "lora_sync": "adapter", "use_peft": True, "lora_target_modules": "all-linear"}
    path = run_file(tmp_path, rollout_precision="auto", dtype="bfloat16", **options)
    measuring.trials.clear()
    command(["choose", str(model), "--write", str(path)])
    assert [*measuring.trials] == ["int8"] and yaml.safe_load(path.read_text())["rollout_precision"] == "int8"


SHARDED = {"fsdp": True, "fsdp_config": {"version": 2}}, {"deepspeed": {"zero_optimization": {"stage": 3}}}


@pytest.mark.parametrize("sharding", SHARDED, ids=["FSDP2", "ZeRO-3"])
def test_a_sharded_run_is_measured_in_one_process(tmp_path, monkeypatch, sharding):
    """The policy stays where the run has it when it starts: not on the GPU. The run's settings stay too."""
    if "deepspeed" in sharding:
        pytest.importorskip("deepspeed")
    measuring = Measuring(monkeypatch)
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    found = choose_precision(QuantGRPOTrainer, model, settings(tmp_path))
    assert measuring.placed is None and found.uncounted == ["reading prompts"]  # where the run computes
    args = settings(tmp_path, **sharding)
    found = choose_precision(QuantGRPOTrainer, model, args)
    assert measuring.placed is False and found.uncounted == ["reading prompts", "gathering the sharded policy"]
    assert [*measuring.trials] == HERE and measuring.trials["bf16"].dtype == torch.float32
    assert is_deepspeed_zero3_enabled() == ("deepspeed" in sharding) and args.fsdp == sharding.get("fsdp")
    unset_hf_deepspeed_config()


def test_some_precisions_are_measured(tmp_path, monkeypatch):
    measuring = Measuring(monkeypatch)
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    found = choose_precision(QuantGRPOTrainer, model, settings(tmp_path), precisions=["int8"])
    assert [*measuring.trials] == ["int8"] and found.line == "rollout_precision: int8"


def test_a_mixture_is_measured_in_what_its_run_may_have(tmp_path, monkeypatch):
    """The others are told with the words of the run's own refusal."""
    if missing := refusal(support.check_experts_here, "bf16"):
        pytest.skip(missing)
    measuring, args = Measuring(monkeypatch), settings(tmp_path)
    model = save_tiny(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16)
    found = choose_precision(QuantGRPOTrainer, model, args)
    refused = {name: reason for name, reason in found.measured.items() if isinstance(reason, str)}
    assert [*found.measured] == HERE and [*measuring.trials] == [name for name in HERE if name not in refused]
    assert refused and found.precision in measuring.trials
    for name, reason in refused.items():
        with pytest.raises(ValueError) as error:
            make(QuantGRPOTrainer, args.having(rollout_precision=name), model)
        assert str(error.value) == reason


@pytest.mark.long
def test_why_nothing_was_chosen(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    monkeypatch.setattr(support, "supported_precisions", lambda: {"int8": None, "fp8": "no kernel"})
    monkeypatch.setattr(trial, "subprocess", warm)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    impossible = settings(tmp_path, vllm_engine_kwargs=SMALL | {"kv_cache_memory_bytes": 1})
    with pytest.raises(RuntimeError, match=r"no engine of .* started\. int8: .*memory"):
        choose_precision(QuantGRPOTrainer, model, impossible)


# Refused before a model is loaded


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"use_vllm": False, "vllm_engine_kwargs": None, "vllm_max_model_length": None}, "Set `use_vllm=True` and"),
        ({"vllm_mode": "server", "vllm_engine_kwargs": None}, "`vllm_mode`='server': only vLLM's engines in the run's"),
        ({"max_completion_length": None}, "`max_completion_length`=None, and completions of that length are measured"),
        ({"train_precision": "int8"}, "`train_precision`='int8': with another `rollout_precision` the sampler would"),
        ({"vllm_engine_kwargs": {"model": "no/such-model"}}, "no/such-model"),
    ],
)
def test_runs_without_a_choice(tmp_path, monkeypatch, overrides, message):
    monkeypatch.setattr(Trial, "of", None)
    model = save_tiny(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        choose_precision(QuantGRPOTrainer, model, settings(tmp_path, **overrides))


@pytest.mark.parametrize("precisions", [["int4"], ["bf16", "fp9"], []])
def test_precisions_that_vllm_does_not_run(tmp_path, precisions):
    with pytest.raises(ValueError, match=r"`precisions`=\[.*here vLLM runs only 'bf16'"):
        choose_precision(QuantGRPOTrainer, "no/such-model", settings(tmp_path), precisions=precisions)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["{tmp}/nowhere"], "nowhere"),
        (["{tmp}/empty"], "empty"),
        (["{tmp}/model", "--config", "{tmp}/nowhere.yaml"], "nowhere.yaml"),
        (["{tmp}/model", "--write", "{tmp}/nowhere.yaml"], "nowhere.yaml"),
        (["{tmp}/model", "--write", "{tmp}/list.yaml"], "list.yaml must contain a YAML mapping"),
        (["{tmp}/model", "--config", "{tmp}/list.yaml"], "must contain a YAML mapping"),
        (["{tmp}/model", "--processes", "0"], "`--processes`=0 is out of range"),
        (["{tmp}/model", "--use_vllm", "false"], "Set `use_vllm=True` and `vllm_mode='colocate'`."),
        (["{tmp}/model", "--trainer", "async_grpo"], "Measure a run of `--trainer grpo`, with `vllm_mode='colocate'`"),
        ([], "name the model"),
        (["{tmp}/model", "--rollout_precision", "fp8"], "--rollout_precision is what is chosen"),
        (["{tmp}/model", "--rollout-precision=fp8"], "--rollout_precision is what is chosen"),
        (["{tmp}/model", "--model_name_or_path", "m"], "both name the model"),
        (["{tmp}/model", "--num_generatoins", "8"], "did you mean --num_generations?"),
    ],
)
def test_a_wrong_command_is_one_line(tmp_path, monkeypatch, capsys, argv, says):
    monkeypatch.setattr(Trial, "of", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.yaml").write_text("- a\n")
    save_tiny(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit) as error:
        command(["choose", *(part.replace("{tmp}", str(tmp_path)) for part in argv), "--bf16", "false"])
    told = str(error.value.code) if error.value.code != 2 else capsys.readouterr().err
    assert says in told and (error.value.code == 2 or told.startswith("error: "))


def test_a_machine_without_vllm(tmp_path, monkeypatch):
    """Said before the model's name is read."""
    monkeypatch.setattr(support, "supported_precisions", lambda: {"fp8": "it needs a GPU"})
    with pytest.raises(SystemExit, match=r"vLLM runs no precision on this machine \('fp8': it needs a GPU\)"):
        command(["choose", str(tmp_path / "nowhere")])
    monkeypatch.setattr(support, "is_vllm_available", lambda: False)
    with pytest.raises(SystemExit, match=r"vLLM is not installed.*Install `trl_quant\[vllm\]`"):
        command(["choose", str(tmp_path / "nowhere")])
    with pytest.raises(ImportError, match="vLLM is not installed"):
        choose_precision(QuantGRPOTrainer, str(tmp_path / "nowhere"), settings(tmp_path))


def test_prepared_checkpoint(tmp_path, monkeypatch, capfd):
    """The copy holds `formats`' codes, it is known what runs it, and an engine on it equals one from 16 bits."""
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    command(["prepare", "--model", str(model), "--format", "int8", "--output", str(tmp_path / "int8")])
    assert "int8" in capfd.readouterr().out
    policy = AutoModelForCausalLM.from_pretrained(model)
    Measuring(monkeypatch)
    for start, chosen in ({}, "bf16"), ({"model": str(tmp_path / "int8")}, "int8"):
        args = settings(tmp_path, vllm_engine_kwargs=SMALL | start)
        given = {"processing_class": tiny_tokenizer()}
        assert choose_precision(QuantGRPOTrainer, policy, args, **given).precision == chosen
    with pytest.raises(ValueError, match="which holds int8: vLLM does not run that"):
        choose_precision(QuantGRPOTrainer, policy, args, precisions=["bf16"], **given)

    from safetensors.torch import load_file

    weights = load_file(next((tmp_path / "int8").glob("*.safetensors")))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[name], quantize(policy.get_parameter(name).data, "int8").values)

    engines = []
    for start in ({}, {"model": str(tmp_path / "int8")}):
        args = settings(tmp_path, rollout_precision="int8", vllm_engine_kwargs=SMALL | start)
        trainer = make(QuantGRPOTrainer, args, model=str(model))
        keep(trainer)
        assert trainer.vllm_generation.llm.llm_engine.model_config.model == start.get("model", str(model))
        engines.append(greedy(trainer.vllm_generation.llm))
    assert engines[0] == engines[1]

    with pytest.raises(SystemExit, match="exists"):
        command(["prepare", "--model", str(model), "--format", "int8", "--output", str(tmp_path / "int8")])
    with pytest.raises(SystemExit, match="already quantized"):
        command(["prepare", "--model", str(tmp_path / "int8"), "--format", "fp8", "--output", str(tmp_path / "x")])
