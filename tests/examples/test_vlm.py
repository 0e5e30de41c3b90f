"""The example with images: what it asks has one answer, and its sampler and trainer see the images."""

import sys

import pytest
import torch
from places import ROOT
from training import metrics


sys.path.insert(0, str(ROOT / "examples"))

import vlm


def test_the_answer_is_the_colour_that_is_not_white():
    rows, names = (
        vlm.squares(40),
        {(255, 0, 0): "red", (0, 128, 0): "green", (0, 0, 255): "blue", (255, 165, 0): "orange"},
    )
    for row in rows:
        counts = {colour: count for count, colour in row["image"].getcolors()}
        (colour,) = counts.keys() - {(255, 255, 255)}
        assert names[colour] == row["answer"] and 17**2 <= counts[colour] <= 32**2
    assert {*rows["answer"]} == {*vlm.COLOURS}
    assert vlm.squares(3, seed=1)["answer"] != vlm.squares(3, seed=2)["answer"]


def test_the_reward():
    said = [[{"role": "assistant", "content": text}] for text in ("red", " red", "blue", "redred")]
    assert vlm.names_the_colour(said, ["red"] * 4) == [1, 1, 0, 0]


def test_it_trains_on_images(tmp_path):
    """Sampler and trainer agree on rows with images, and the gradient of the reward reaches the tower."""
    pytest.importorskip("torchvision", reason="Qwen3-VL's processor needs it")
    given = {"max_steps": 2, "per_device_train_batch_size": 32, "logging_steps": 1, "disable_tqdm": True}
    trainer = vlm.main(output_dir=str(tmp_path), **given)
    start = vlm.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "start")
    logged = [entry for entry in metrics(trainer) if "reward" in entry]
    assert len(logged) == 2 and all(0 < entry["mismatch/abs_logp_diff"] < 0.2 for entry in logged)
    now = dict(trainer.model.named_parameters())
    moved = {name for name, param in start.named_parameters() if not torch.equal(param, now[name])}
    assert any(".visual.blocks." in name for name in moved) and any(".language_model." in name for name in moved)


@pytest.mark.vllm
def test_vllm_takes_its_model(tmp_path):
    """As the script says: the check of the first sync has an image."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import SMALL, keep

    given = {"use_vllm": True, "vllm_mode": "colocate", "vllm_engine_kwargs": SMALL, "vllm_max_model_length": 64}
    given |= {"max_steps": 1, "per_device_train_batch_size": 16, "logging_steps": 1, "disable_tqdm": True}
    trainer = vlm.main(output_dir=str(tmp_path), **given)
    keep(trainer)
    (logged,) = (entry for entry in metrics(trainer) if "reward" in entry)
    assert logged["sync_check/image_logp_difference"] < logged["sync_check/image_bound"]
