"""README's script runs; what README and the other pages name exists: files, fields, metrics, commands."""

import configparser
import importlib
import json
import re
import runpy
import shlex
import warnings
from dataclasses import fields
from functools import partial

import pytest
import torch
import training
from accelerate.commands.launch import launch_command_parser
from pages import MANUAL, README, ROOT, TEXTS, blocks, called, commands, inline
from tiny import FURTHER, save_tiny
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

import trl_quant
from trl_quant import (
    AISGRPOConfig,
    DiffusionGRPOConfig,
    QuantAsyncGRPOConfig,
    QuantDistillationConfig,
    QuantGRPOConfig,
    QuantGRPOTrainer,
    QuantPPOConfig,
    QuantRLOOConfig,
    tasks,
)
from trl_quant.cli import COMMANDS, prepare, train
from trl_quant.corrections import CORRECTIONS
from trl_quant.models.families import FAMILIES, families_with
from trl_quant.models.page import READ_IMAGES, dense_families
from trl_quant.noise import SCHEDULES
from trl_quant.precisions import PRECISIONS
from trl_quant.rollout.vllm.support import VLLM_VERSIONS
from trl_quant.tasks.named_data import NAMED_DATA


SOURCES = "\n".join(path.read_text() for path in (ROOT / "trl_quant").rglob("*.py"))
GPU = torch.cuda.is_available()
# What a run of seconds sets beside what the script does
SMALL = {
    "use_cpu": not GPU,
    "max_steps": 2,
    "max_completion_length": 8,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
# Names on these pages that are neither fields, precisions nor metrics, by whose they are
FOREIGN = {
    "trl": {"sequence_mask", "save_model", "peft_config", "rollout_func", "environment_factory", "env_mask"}
    | {"cispo_clip_ratio", "aux_loss", "dataset_name", "dataset_test_split", "train_dataset"}
    | {"rollout_worker", "weight_transfer"},
    "peft": {"lora_dropout", "modules_to_save", "target_modules", "target_parameters", "lora_bias", "use_dora"}
    | {"init_lora_weights", "merge_and_unload"},
    "transformers": {"do_sample", "is_causal", "max_position_embeddings", "attention_factor", "generation_config"}
    | {"grad_norm", "model_type", "quantization_config", "in_proj_a", "in_proj_b", "in_proj_ba", "out_proj"},
    "trl_quant": {"trl_quant", "shifted_logits", "eval_dataset_name"},
}


# The script


@pytest.fixture
def problems(tmp_path) -> str:
    path = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"What is {a} plus {a}?", "answer": f"{a}+{a}\n#### {2 * a}"} for a in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_script(tmp_path, monkeypatch, problems, changes: dict[str, str], **settings) -> QuantGRPOTrainer:
    (script,) = [block for block in blocks(README, "python") if "QuantGRPOTrainer(" in block]
    assert len([line for line in script.splitlines() if line]) <= 15
    changes = {
        "Qwen/Qwen2.5-0.5B-Instruct": save_tiny(tmp_path / "model"),
        "openai/gsm8k": problems,
        **changes,
    }
    for before, after in changes.items():
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    # What the script gives itself takes the place of these
    monkeypatch.setattr(trl_quant, "QuantGRPOConfig", partial(QuantGRPOConfig, **SMALL | settings), raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(script)
    trainer = runpy.run_path(str(tmp_path / "script.py"))["trainer"]
    return trainer


def logged(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "mismatch/kl_k3" in entry]


def check_trained(trainer, tmp_path) -> None:
    assert [entry["step"] for entry in logged(trainer)] == [1, 2]
    assert all(entry["mismatch/kl_k3"] > 0 for entry in logged(trainer))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "gsm8k-fp8")
    for name, param in trainer.model.state_dict().items():
        assert torch.equal(param.cpu(), saved.state_dict()[name]), name


def test_script_with_the_embedded_engine(tmp_path, monkeypatch, problems):
    """As README says for other devices, without `use_vllm=True`; and every metric that it logs is on its page."""
    trainer = run_script(tmp_path, monkeypatch, problems, {"use_vllm=True, ": ""})
    check_trained(trainer, tmp_path)
    assert trainer.args.is_correction == "tis" and trainer.args.rollout_precision == "fp8"
    groups = ("mismatch/", "weights/")
    for entry in logged(trainer):
        names = {re.sub(r"by_position/.*", "by_position/a-b", name) for name in entry if name.startswith(groups)}
        assert not [name for name in names if f"`{name}`" not in TEXTS["docs/metrics.md"]]


@pytest.mark.vllm
def test_script_with_vllm(tmp_path, monkeypatch, problems):
    vllm_engines = pytest.importorskip("vllm_engines", reason="vLLM is not installed")
    changes = {} if GPU else {'rollout_precision="fp8"': 'rollout_precision="int8"'}  # what vLLM runs on every CPU
    engine = {"vllm_engine_kwargs": vllm_engines.SMALL, "vllm_max_model_length": 256}
    trainer = run_script(tmp_path, monkeypatch, problems, changes, **engine)
    vllm_engines.keep(trainer)
    check_trained(trainer, tmp_path)
    first = logged(trainer)[0]
    assert first["sync_check/logp_difference"] < first["sync_check/bound"]


def test_merging_an_adapter(tmp_path, monkeypatch):
    """What the script saves is the base and the adapter, and `trl-quant prepare` takes it."""
    base, out = save_tiny(tmp_path / "base"), str(tmp_path / "out")
    settings = {"rollout_precision": "int8", "max_steps": 1}
    args = training.config(QuantGRPOConfig, out, **settings)
    trainer = training.make(QuantGRPOTrainer, args, model=base, peft_config=training.lora())
    trainer.train()
    trainer.save_model(out)
    (script,) = [block for block in blocks(TEXTS["docs/saving.md"], "python") if "merge_and_unload" in block]
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    merged = AutoModelForCausalLM.from_pretrained("merged")
    layer = trainer.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    expected = layer.get_base_layer().weight + layer.get_delta_weight("default")
    torch.testing.assert_close(merged.model.layers[0].mlp.up_proj.weight, expected)
    (arguments,) = called("trl-quant", "prepare")[:1]
    prepare.main([{"out": "merged"}.get(word, word) for word in arguments])
    assert (tmp_path / arguments[-1] / "config.json").is_file()


def test_the_first_run(tmp_path, monkeypatch, capsys):
    """README's command, for one step, and the metrics that README shows of its log."""
    (words,) = [words for words in called("trl-quant", "train", text=README) if "--config" in words]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    train.main([*words, "--max_steps", "1", "--logging_steps", "1", "--disable_tqdm", "true"])
    state = json.loads((tmp_path / words[words.index("--output_dir") + 1] / "trainer_state.json").read_text())
    first, last = state["log_history"]
    (shown,) = blocks(README, "text")
    sampling, *steps, end = shown.splitlines()
    assert sampling in capsys.readouterr().out.splitlines()
    for line in steps:
        named = re.findall(r"'([\w/]+)':", line)
        assert {"reward", "mismatch/kl_k3", "mismatch/ess_ratio"} <= set(named) <= first.keys()
    assert set(re.findall(r"'([\w/]+)':", end)) <= last.keys()
    assert 0.2 < first["reward"] < 0.7  # the model can be taught


def test_the_diff_is_of_two_lines():
    (diff,) = blocks(README, "diff")
    removed, added = ([line[1:] for line in diff.splitlines() if line.startswith(sign)] for sign in "-+")
    assert len(removed) == len(added) == 2
    exec(removed[0], theirs := {})
    exec(added[0], ours := {})
    assert issubclass(ours["GRPOConfig"], theirs["GRPOConfig"])
    assert issubclass(ours["GRPOTrainer"], theirs["GRPOTrainer"])
    for line, names in ((removed[1], theirs), (added[1], ours)):
        given = line.replace("output_dir=", f"use_cpu={not GPU}, output_dir=")
        exec(given, names)
        assert names["args"].use_vllm
    assert names["args"].rollout_precision == "fp8"


# Names


CONFIGS = (DiffusionGRPOConfig, QuantAsyncGRPOConfig, QuantDistillationConfig, QuantPPOConfig, QuantRLOOConfig)


def config_fields() -> set[str]:
    """The fields of all trainers: those of diffusion are GRPO's and its own."""
    return {field.name for config in CONFIGS for field in fields(config)}


def known_names() -> set[str]:
    of_tasks = {*tasks.__all__, *tasks.REWARDS, *NAMED_DATA}
    of_config = config_fields() | {*PRECISIONS, *CORRECTIONS, *SCHEDULES, *families_with("feeds"), *READ_IMAGES}
    return of_config | of_tasks | set().union(*FOREIGN.values())


def test_fields_exist():
    config = config_fields()
    named = re.findall(r"\b([a-z_]+)=[\"\dTF]", "\n".join(inline(MANUAL)))
    assert len(named) > 10
    assert not [name for name in named if name not in config | FOREIGN["transformers"]]
    words = [word for word in inline(MANUAL) if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", word)]
    assert len(words) > 15
    assert not [word for word in words if word not in known_names()]


def test_values_exist():
    """`field="value"` is one that the field takes, and the corrections' table has each of them once."""
    for field, value in re.findall(r"`([a-z_]+)=\"([a-z0-9_]+)\"`", MANUAL):
        settings = {field: value, "use_cpu": True, "output_dir": "out"}
        if field != "rollout_precision":
            settings["rollout_precision"] = "int8"
        if field == "lora_sync":
            settings |= {"use_vllm": True, "vllm_mode": "colocate"}
        assert getattr(QuantGRPOConfig(**settings), field) == value
    table = TEXTS["docs/corrections.md"].partition("| `is_correction` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted(rows) == sorted([*CORRECTIONS, "trl"])


def test_defaults_are_those_that_are_told():
    quantized = {"rollout_precision": "int4", "use_cpu": True, "output_dir": "out"}
    assert QuantGRPOConfig(**quantized).is_correction == "tis"
    assert [CORRECTIONS[name]().cap for name in ("tis", "acr", "ais", "dppo")] == [2, 2, 5, 10]
    assert CORRECTIONS["icepop"]() == CORRECTIONS["icepop"](low=0.5, high=5)
    assert CORRECTIONS["geometric"]().epsilon == 0.01
    assert (CORRECTIONS["trm"]().delta, CORRECTIONS["dppo"]().delta) == (0.05, 0.15)
    for config in (AISGRPOConfig(**quantized), QuantGRPOConfig(is_correction="ais", **quantized)):
        assert (config.is_correction, config.scale_rewards, config.loss_type) == ("ais", "none", "grpo")
    plain = GRPOConfig(use_cpu=True, output_dir="out")
    assert plain.vllm_importance_sampling_mode == "sequence_mask" and plain.vllm_importance_sampling_clip_max == 3
    assert plain.vllm_group_port == 51216 and plain.top_p == 1 and plain.num_iterations == 1


def test_metrics_exist():
    named = {word for word in inline(MANUAL) if re.match(r"(mismatch|ais|weights|sync_check|noise)/", word)}
    assert len(named) > 15
    assert not [name for name in named if re.sub(r"(a-b|\*)$", "", name) not in SOURCES]


def test_what_is_said_of_versions():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pins = setup["options"]["install_requires"] + setup["options.extras_require"]["vllm"]
    lowest, above = re.search(r"vllm>=([\d.]+),<([\d.]+)", pins).groups()
    assert (lowest, above) == VLLM_VERSIONS
    minor = int(above.split(".")[1])
    assert f"vLLM {lowest} to 0.{minor - 1}" in README
    lowest, above = re.search(r"transformers>=([\d.]+),<([\d.]+)", pins).groups()
    assert f"transformers {lowest} to below {above}" in README
    assert f"TRL {re.search(r'trl>=(1[.][0-9]+)', pins)[1]}," in README
    assert f"Python {setup['options']['python_requires'].removeprefix('>=')} or newer" in README
    extras = re.findall(r"trl_quant\[(\w+)\]", MANUAL)
    assert extras and set(extras) <= set(setup["options.extras_require"])
    # tests/gpu/test_families_gpu.py: three precisions of each family that vLLM knows, and two compiled classes
    cases = 3 * sum(FAMILIES[name].vllm is not None for name in FURTHER) + 2
    assert f"of {cases} such tests passed" in " ".join(TEXTS["docs/models.md"].split())


# What works with what

COLUMNS = {
    "GRPO": QuantGRPOConfig,
    "PPO": QuantPPOConfig,
    "RLOO": QuantRLOOConfig,
    "distillation": QuantDistillationConfig,
    "masked diffusion": DiffusionGRPOConfig,
}
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}
# The row that starts so -> what a configuration is given, every one of which it must take
FEATURES = {
    "vLLM samples": [COLOCATED, {"use_vllm": True, "vllm_mode": "server"}],
    "the embedded engine": [{}],
    "[trained]": [{"train_precision": "int8"}, {"rollout_precision": "nvfp4", "train_precision": "nvfp4"}],
    "`exact_rollouts`": [{**COLOCATED, "train_precision": "int8", "exact_rollouts": True}],
    "`pack_sequences`": [{"pack_sequences": True}],
    '`lora_sync="adapter"`': [{**COLOCATED, "lora_sync": "adapter"}],
    "[`rollouts_in_flight`]": [{"rollouts_in_flight": 2.0}, {**COLOCATED, "rollouts_in_flight": 2.0}],
    "`dynamic_sampling_rounds`": [{"dynamic_sampling_rounds": 2}],
}


def takes(config: type, settings: dict) -> bool:
    try:
        config(**{"rollout_precision": "int8", "use_cpu": True, "bf16": False, "output_dir": "out"} | settings)
    except ValueError:
        return False
    return True


def test_what_works_with_what():
    rows = [row.split(" | ") for row in README.partition("| | GRPO |")[2].partition("\n\n")[0].splitlines()[2:]]
    told = {row[0].removeprefix("| "): [cell.rstrip(" |") for cell in row[1:]] for row in rows}
    assert README.count(f"| | {' | '.join(COLUMNS)} |") == 1 and len(told) == len(FEATURES) + 1
    for start, all_settings in FEATURES.items():
        (row,) = [cells for name, cells in told.items() if name.startswith(start)]
        found = [all(takes(config, settings) for settings in all_settings) for config in COLUMNS.values()]
        assert row == ["yes" if works else "no" for works in found], start
    ((label, counts),) = [row for row in told.items() if row[0].startswith("[corrections]")]
    taken = [sum(takes(config, {"is_correction": name}) for name in CORRECTIONS) for config in COLUMNS.values()]
    assert counts == [str(count) for count in taken] and label.endswith(f"of {len(CORRECTIONS)}")


def test_models_that_are_named():
    (known,) = {int(number) for text in TEXTS.values() for number in re.findall(r"\[(\d+) dense families\]", text)}
    assert f"[{known} dense families](docs/models.md)" in README and known == len(dense_families())


def test_mixtures_that_are_named():
    table = TEXTS["docs/mixtures.md"].partition("| `model_type` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == {*families_with("mixture")}


def test_hybrids_that_are_named():
    table = TEXTS["docs/limits.md"].partition("| hybrid |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {*families_with("recurrent")}


# Commands


def test_two_commands():
    (commands,) = [block for block in blocks(README, "bash") if "make demo" in block]
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == ["make demo", "make test"]


@pytest.mark.parametrize("name", TEXTS)
def test_commands_are_of_files_and_targets_that_exist(name):
    makefile = (ROOT / "Makefile").read_text()
    targets = {
        target for line in re.findall(r"^([a-z][\w -]*):(?!=)", makefile, re.MULTILINE) for target in line.split()
    }
    found = 0
    for words in commands(TEXTS[name]):
        if words[0] == "make":
            found += 1
            assert set(words[1:]) <= targets, words
        elif words[0] == "pytest" or words[:3] == ["python", "-m", "pytest"]:
            found += 1
            paths = [word for word in words if word.endswith(".py")]
            assert paths and not [path for path in paths if not (ROOT / path).is_file()], words
        elif words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
            found += 1
            source = (ROOT / words[1]).read_text()
            if "from engines import" in source:
                source += (ROOT / "benchmarks/engines.py").read_text()
            if "trl_quant.cli" in source:
                source += SOURCES
            assert not [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source], words
    assert found > 2 or name.startswith("docs/")


def test_options_of_the_command_line(capsys):
    assert {words[0] for words in called("trl-quant") if words} == set(COMMANDS)
    for name in COMMANDS:
        for words in called("trl-quant", name):
            kind = ["--mismatch", "MODEL"] if "--mismatch" in words else []  # which has options of its own
            if "--trainer" in words:  # whose options it decides
                kind = words[words.index("--trainer") :][:2]
            with pytest.raises(SystemExit):
                importlib.import_module(f"trl_quant.cli.{name}").main([*kind, "--help"])
            help_text = capsys.readouterr().out
            assert not [word for word in words if word.startswith("--") and word not in help_text], words


def test_commands_for_several_processes():
    launched = called("accelerate", "launch")
    assert len(launched) == 2
    for words in launched:
        place = words.index("examples/train_grpo.py")
        launcher = launch_command_parser().parse_args(words[: place + 1])
        assert (ROOT / launcher.config_file).is_file()
        _, config, _ = train.parse_args([*words[place + 1 :], "--use_cpu", "true"])
        assert config.use_vllm and config.vllm_mode == "server" and config.rollout_precision == "fp8"
        completions = config.per_device_train_batch_size * launcher.num_processes
        assert completions % config.num_generations == 0


def test_server_commands():
    """Each names the host that it listens on; the one for training is the one that a wrong server is refused with."""
    served = [words for words in called("vllm", "serve") if len(words) > 1]
    assert len(served) >= 4 and "0.0.0.0" not in MANUAL
    hosts = [words[words.index("--host") + 1] for words in served]
    assert set(hosts) == {"127.0.0.1"}
    (training_server,) = [words for words in served if "--weight-transfer-config" in words]
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    from trl_quant.rollout.vllm.serving import serve_command

    with warnings.catch_warnings():
        expected = shlex.split(serve_command(training_server[0], "fp8").splitlines()[-1])
    assert expected[0] == "VLLM_SERVER_DEV_MODE=1" and f"{expected[0]} vllm serve {training_server[0]}" in MANUAL
    expected = expected[expected.index(training_server[0]) :]
    assert sorted(training_server) == sorted(expected)
    options = {word for words in served for word in words if word.startswith("--")}
    known = {f"--{field.name.replace('_', '-')}" for field in fields(arguments.AsyncEngineArgs)}
    assert options <= known | {"--host", "--lora-modules"}
