"""How runs end: finished ones that are started again, what is left on the disk, and what the next training finds."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from resumes import SETTINGS, metrics, trainer_of
from training import dataset, parameters, spread, trainer_for

from trl_quant.storage.manifest import MANIFEST, damage


def test_a_finished_run_trains_no_further(tmp_path):
    given = {"max_steps": 3, "prompts": 16, "lr_scheduler_type": "constant"}
    finished = trainer_of(tmp_path, **given)
    finished.train()
    again = trainer_of(tmp_path, **given)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3 and not (tmp_path / "checkpoint-4").exists()
    now = parameters(again)
    assert all(torch.equal(now[name], tensor) for name, tensor in parameters(finished).items())


def test_the_end_of_a_run_deletes_no_other_checkpoints(tmp_path):
    """transformers deletes all but the best, with `save_total_limit=1`."""
    trainer_of(tmp_path, max_steps=2, save_steps=2).train()
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-2-keep")
    given = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": dataset(8), "save_total_limit": 1}
    given |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    trainer = trainer_of(tmp_path, prompts=16, max_steps=9, save_steps=3, **given)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint).name
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert left == {"checkpoint-2", "checkpoint-2-keep", "checkpoint-9", best}


def test_the_coefficient_of_the_entropy_is_part_of_a_checkpoint(tmp_path, monkeypatch):
    """TRL writes it after the checkpoint is whole: what it finds then are the same bytes."""
    given = {"use_adaptive_entropy": True, "entropy_target": 50.0, "entropy_coef_delta": 0.05}
    given |= {"save_steps": 1, "max_steps": 3}
    trainer_of(tmp_path, **given).train()
    manifest = json.loads((tmp_path / "checkpoint-3" / MANIFEST).read_text())
    assert "entropy_ctrl_state.json" in manifest["contents"]["files"]
    changed = trainer_of(tmp_path, **given, max_grad_norm=0.1)
    changed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [damage(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3)] == [None] * 3
    monkeypatch.setattr(json, "dump", None)
    with pytest.raises(TypeError):  # at TRL's writing, which has opened the file
        trainer_of(tmp_path / "full", **given).train()
    assert "entropy_ctrl_state.json" in damage(tmp_path / "full" / "checkpoint-1")


def test_a_second_training_samples_first(tmp_path):
    """Not from what the first one has left of its last generation."""
    trainer = trainer_of(tmp_path, num_iterations=3, max_steps=2, save_strategy="no", prompts=16)
    for _ in range(2):
        trainer.train()
        assert next(entry["step"] for entry in metrics(trainer) if "completions/mean_length" in entry) == 1


def test_a_stream_that_ends_in_what_a_resume_skips_is_told(tmp_path, caplog):
    """Six prompts, two for each step."""
    given = {"train_dataset": dataset(6).to_iterable_dataset(), "save_steps": 4, "max_steps": 6, "reward_funcs": spread}
    trainer_for(tmp_path, **SETTINGS | given).train()
    told = "ended within the 4 steps that this resumed run has behind it"
    assert told not in caplog.text
    again = trainer_for(tmp_path, **SETTINGS | given)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert told in caplog.text
