"""An adapter's base on the hub is loaded at the revision that the run named, by `trl-quant eval` and by PEFT."""

import shutil

import huggingface_hub.constants
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftConfig
from tiny import save_tiny
from training import config, dataset, lora, make

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.report.trained import Trained


NAME, OLD, NEW = "someone/model", "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache with two commits of a model whose weights differ; `main` is the newer."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    place = cache / f"models--{NAME.replace('/', '--')}"
    for seed, commit in enumerate((OLD, NEW)):
        shutil.copytree(save_tiny(tmp_path / commit, seed=seed), place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(NEW)
    return {commit: place / "snapshots" / commit for commit in (OLD, NEW)}


@pytest.mark.parametrize("revision", [OLD, None])
def test_eval_loads_the_revision_that_was_trained(tmp_path, hub, revision):
    settings = {"rollout_precision": "int8", "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings["model_init_kwargs"] = {"dtype": "float32"} | ({"revision": revision} if revision else {})
    args = config(QuantGRPOConfig, tmp_path / "run", **settings)
    trainer = make(QuantGRPOTrainer, args, model=NAME, train_dataset=dataset(8), peft_config=lora())
    trainer.train()
    checkpoint = tmp_path / "run/checkpoint-1"
    assert PeftConfig.from_pretrained(checkpoint).revision == revision
    trained = Trained.find(str(tmp_path / "run"))
    ours = trained.policy("bf16", torch.float32, merged=True)
    pefts = AutoPeftModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    whole = Trained.find(str(hub[revision or NEW])).policy("bf16", torch.float32, merged=True).state_dict()
    for loaded in (ours, pefts):
        base = {name.replace("base_layer.", ""): value for name, value in loaded.base_model.model.state_dict().items()}
        assert all(torch.equal(base[name], value) for name, value in whole.items())
    assert trained.tokenizer().get_vocab()
