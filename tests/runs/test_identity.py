"""A checkpoint is tied to the models that its run read: one that was overwritten stops a resume, and is said."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from distilling import distil
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import save_tiny, tiny_tokenizer
from training import config, dataset, lora, make, parameters, spread
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantPPOConfig, QuantPPOTrainer
from trl_quant.cli import main as command
from trl_quant.report.trained import Trained
from trl_quant.storage import identity as identities
from trl_quant.storage.identity import complete, difference, identity
from trl_quant.storage.manifest import MANIFEST, read_manifest


SAVED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


def save(path: Path, seed: int) -> str:
    """A model of one layer; another seed gives other weights of the same shapes."""
    return save_tiny(path, seed=seed, num_hidden_layers=1)


def run(path, model, adapter: LoraConfig | None = None, rewards=spread, **settings) -> QuantGRPOTrainer:
    args = config(QuantGRPOConfig, path, **SAVED | settings)
    return make(QuantGRPOTrainer, args, model, reward_funcs=rewards, peft_config=adapter)


def resume(trainer, step: int = 1):
    trainer.train(resume_from_checkpoint=os.path.join(trainer.args.output_dir, f"checkpoint-{step}"))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of the files that are read in full meanwhile."""
    names, checksums = [], identities.checksums

    def noting(files):
        files = list(files)
        names.extend(file.name for file in files)
        return checksums(files)

    monkeypatch.setattr(identities, "checksums", noting)
    return names


def test_what_is_the_same_model(tmp_path, read):
    """Unchanged files are read once; the same bytes are the same model elsewhere, with another time or by a link."""
    base = save(tmp_path / "base", 3)
    before = complete(identity(base))
    assert "model.safetensors" in read
    read.clear()
    assert difference(before, identity(base)) is None and not read  # size, time and header are the same
    os.utime(Path(base, "model.safetensors"))
    copy = shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "link").symlink_to(base)
    for same in (base, copy, tmp_path / "link"):
        assert difference(before, identity(str(same))) is None
    assert read.count("model.safetensors") == 3
    Path(copy, "notes.txt").write_text("of a user")
    assert difference(before, identity(str(copy))) is None


def test_what_is_another_model(tmp_path):
    """Each file of the model, changed, gone or new, and other weights with the same size, shapes and header."""
    base = save(tmp_path / "base", 3)
    before = complete(identity(base))
    assert {"model.safetensors", "config.json", "generation_config.json"} <= before["files"].keys()
    for name in before["files"]:
        other = Path(shutil.copytree(base, tmp_path / name))
        data = bytearray((other / name).read_bytes())
        data[-20] ^= 1
        (other / name).write_bytes(data)
        assert difference(before, identity(str(other))) == f"{other / name} has other contents"
        (other / name).unlink()
        assert difference(before, identity(str(other))) == f"{other / name} is gone"
    (Path(base) / "model-00002-of-00002.safetensors").touch()
    assert "is new" in difference(before, identity(base))


def test_a_hub_name_is_its_commit(tmp_path, monkeypatch):
    def cached(commit):
        monkeypatch.setattr(identities, "try_to_load_from_cache", lambda *args, **given: f"/{commit}/config.json")

    cached("aaa")
    before = identity("org/model")
    assert before["commit"] == "aaa" and difference(before, identity("org/model")) is None
    snapshot = tmp_path / "snapshots" / "aaa"
    save(snapshot, 3)
    assert difference(before, identity(str(snapshot))) is None
    cached("bbb")
    assert difference(before, identity("org/model")) == "org/model is at commit bbb, and was at aaa"
    assert "only one of them is on the hub" in difference(before, identity(save(tmp_path / "local", 3)))


def test_a_base_that_was_overwritten(tmp_path, caplog, capsys):
    """An adapter's base: a resume stops before it trains, `export` and `eval` say so; restored, it goes on."""
    base = save(tmp_path / "base", 3)
    whole = run(tmp_path / "run", base, lora(), rollout_precision="int8")
    whole.train()
    whole.save_model()
    final = parameters(whole)
    saved = shutil.copytree(base, tmp_path / "saved")
    for name in ("run", "run/checkpoint-2"):
        Trained.find(str(tmp_path / name))
        command(["export", "--adapter", str(tmp_path / name), "--output", str(tmp_path / f"well-{Path(name).name}")])
    assert "another model" not in caplog.text
    save(tmp_path / "base", 4)
    trainer = run(tmp_path / "run", base, lora(), rollout_precision="int8")
    with pytest.raises(ValueError, match=r"the policy: .*base/model\.safetensors has other contents"):
        resume(trainer)
    assert trainer.state.global_step == 0
    for name in ("run", "run/checkpoint-2"):
        for look in (
            lambda name: Trained.find(str(tmp_path / name)),
            lambda name: command(
                ["export", "--adapter", str(tmp_path / name), "--output", str(tmp_path / f"out-{Path(name).name}")]
            ),
        ):
            caplog.clear()
            look(name)
            assert "belongs to a run that read another model (the policy)" in caplog.text
    resume(run(tmp_path / "run", base, lora(), rollout_precision="int8", resume_with_changes=True))
    assert "Resuming" in caplog.text and "has other contents" in caplog.text
    elsewhere = run(tmp_path / "elsewhere", str(saved), lora(), rollout_precision="int8")
    elsewhere.train(resume_from_checkpoint=str(shutil.copytree(tmp_path / "run/checkpoint-1", tmp_path / "c-1")))
    ended = parameters(elsewhere)
    assert all(torch.equal(ended[name], final[name]) for name in final)


def test_a_reference_and_a_reward_model_that_changed(tmp_path, caplog):
    """All weights are trained; the reference is the policy's path. Without a reference the base is only mentioned."""
    base, reward = save(tmp_path / "base", 3), str(tmp_path / "reward")

    def save_reward(seed):
        torch.manual_seed(seed)
        scorer = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        scorer.config.pad_token_id = 256
        scorer.save_pretrained(reward)
        tiny_tokenizer().save_pretrained(reward)

    save_reward(0)
    run(tmp_path / "run", base, rewards=[reward, spread], beta=0.1).train()
    saved = shutil.copytree(reward, tmp_path / "saved")
    save_reward(1)
    with pytest.raises(ValueError, match=r"reward_funcs\[0\]: .*reward/model\.safetensors has other contents"):
        resume(run(tmp_path / "run", base, rewards=[reward, spread], beta=0.1))
    shutil.rmtree(reward)
    shutil.copytree(saved, reward)
    save(tmp_path / "base", 4)
    with pytest.raises(ValueError, match=r"the policy: .*base/model\.safetensors has other contents"):
        resume(run(tmp_path / "run", base, rewards=[reward, spread], beta=0.1))
    resume(run(tmp_path / "run", base, rewards=[reward, spread], resume_with_changes=True))
    assert "base/model.safetensors has other contents" in caplog.text


def test_a_teacher_and_a_critic_that_changed(tmp_path, caplog):
    """The teacher stops a resume; a critic is in the checkpoint, and its start is only mentioned."""
    teacher, base = save(tmp_path / "teacher", 5), save(tmp_path / "base", 3)
    given = {"teacher_model": teacher, "model": base, **SAVED}
    distil(tmp_path, **given).train()
    save(tmp_path / "teacher", 6)
    with pytest.raises(ValueError, match=r"teacher_model: .*teacher/model\.safetensors has other contents"):
        resume(distil(tmp_path, **given))

    def ppo():
        settings = {"value_model_name_or_path": teacher, "num_generations": 1, **SAVED}
        return make(QuantPPOTrainer, config(QuantPPOConfig, tmp_path / "ppo", **settings), base)

    ppo().train()
    save(tmp_path / "teacher", 7)
    caplog.clear()
    resume(ppo())
    assert "value_model_name_or_path: " in caplog.text and "has other contents" in caplog.text


def test_a_base_that_changes_while_it_is_read(tmp_path):
    base = save(tmp_path / "base", 3)
    found = identities.Identities({"the policy": (base, None)})
    save(tmp_path / "base", 4)
    found.begin({})
    assert "was changed while the run before read it" in difference(found.all()["the policy"], identity(base))


def test_other_tokens_stop_a_resume_and_other_data_are_said(tmp_path, caplog):
    """A chat template and a token that another tokenizer has; the manifest's adapters are those that are active."""
    base = save(tmp_path / "base", 3)
    trainer = run(tmp_path / "run", base, lora())
    trainer.train()
    assert read_manifest(tmp_path / "run/checkpoint-1")["run"]["adapters"] == ["default"]
    other, more = tiny_tokenizer(), tiny_tokenizer()
    other.chat_template += "{# more #}"
    more.add_tokens(["<more>"])
    for tokenizer in (other, more):
        args = config(QuantGRPOConfig, tmp_path / "run", **SAVED)
        changed = make(QuantGRPOTrainer, args, base, peft_config=lora(), processing_class=tokenizer)
        with pytest.raises(ValueError, match="tokenizer: "):
            resume(changed)
    args = config(QuantGRPOConfig, tmp_path / "run", **SAVED)
    resume(make(QuantGRPOTrainer, args, base, peft_config=lora(), train_dataset=dataset(9)))
    assert "data: {'rows': 8" in caplog.text


# Damaged files in other commands


def test_each_reader_names_a_damaged_file(tmp_path, caplog):
    base = save(tmp_path / "base", 3)
    run(tmp_path / "run", base, lora()).train()
    run(tmp_path / "full", base).train()
    readers = {
        "adapter_model.safetensors": lambda: command(
            ["export", "--adapter", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
        ),
        "adapter_config.json": lambda: Trained.find(str(tmp_path / "run")),
        "rollout_state.json": lambda: Trained.find(str(tmp_path / "run")),
        "trainer_state.json": lambda: command(
            ["report", str(tmp_path / "run"), "--output", str(tmp_path / "report.html")]
        ),
    }
    whole = {
        "config.json": lambda: command(
            ["prepare", "--model", f"{tmp_path}/full/checkpoint-2", "--format", "int8", "--output", f"{tmp_path}/out"]
        ),
        "model.safetensors": lambda: run(tmp_path / "next", f"{tmp_path}/full/checkpoint-2"),
        "generation_config.json": lambda: command(
            ["eval", f"{tmp_path}/full", "--task", "arithmetic", "--output", f"{tmp_path}/eval.json"]
        ),
    }
    for place, known in (("run", readers), ("full", whole)):
        for name, reader in known.items():
            file = tmp_path / place / "checkpoint-2" / name
            data = file.read_bytes()
            at = data.index(b"7") if b"7" in data[200:] and name.endswith("json") else len(data) - 20
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises((SystemExit, ValueError), match=f"checkpoint-2/{name} is damaged"):
                reader()
            file.write_bytes(data)
    assert not (tmp_path / "out").exists()


# Adapters


def adapted(base: str, active: list[str]):
    """A policy with the adapters `default` and `sft`, some of which are active."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    model.add_adapter("sft", lora())
    model.base_model.set_adapter(active)
    return model


@pytest.mark.parametrize("active", [["default", "sft"], ["sft"]])
def test_a_policy_that_computes_with_other_adapters_is_refused(tmp_path, active):
    base = save(tmp_path / "base", 3)
    with pytest.raises(ValueError, match=rf"computes with the adapters \[{', '.join(map(repr, active))}\]"):
        run(tmp_path / "run", adapted(base, active), rollout_precision="int8").train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_policy_with_an_adapter_that_rests_is_resumed(tmp_path, beta, caplog):
    """With `beta` TRL adds a copy of the adapter, `ref`. transformers alone would resume without the trained one."""
    base = save(tmp_path / "base", 3)

    def trainer():
        torch.manual_seed(0)
        return run(tmp_path / "run", adapted(base, ["default"]), rollout_precision="int8", beta=beta, max_steps=3)

    whole = trainer()
    whole.train()
    final = parameters(whole)
    again = trainer()
    resume(again, 2)
    ended = parameters(again)
    assert ended.keys() == final.keys() and all(torch.equal(ended[name], final[name]) for name in final)
    trained = load_file(tmp_path / "run/checkpoint-3/adapter_model.safetensors")
    start = load_file(tmp_path / "run/checkpoint-1/adapter_model.safetensors")
    assert any(not torch.equal(trained[name], start[name]) for name in trained)
    command(["export", "--adapter", str(tmp_path / "run/checkpoint-3"), "--output", str(tmp_path / "out")])
    assert "beside its own" not in caplog.text
    (tmp_path / "run/checkpoint-3" / MANIFEST).unlink()  # an older version, which does not say what was active
    with caplog.at_level(logging.WARNING):
        command(["export", "--adapter", str(tmp_path / "run/checkpoint-3"), "--output", str(tmp_path / "old")])
    assert "holds the adapters ['sft'] beside its own" in caplog.text
    assert json.loads((tmp_path / "old/config.json").read_text())["model_type"] == "qwen3"
