"""A vLLM server with a model that reads images: it gets their weights, and samples with them."""

import pytest
import torch
from readers import picture, save_reader
from training import killing, metrics, trainer_for
from transformers import AutoProcessor


pytest.importorskip("vllm", reason="vLLM is not installed")
from datasets import Dataset
from servers import serving

from trl_quant.rollout.vllm.serving import images_flag


pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = save_reader(tmp_path_factory.mktemp("server") / "model", "qwen3_vl")
    with serving(path, *images_flag().split()) as (url, _):
        yield path, url


def test_grpo_trains_with_images(served, tmp_path, monkeypatch):
    """
    The tower moves, by more than BF16 rounds away, and the next samples are of the moved one; each sync is checked with
    an image.
    """
    path, url = served
    prompts = [[{"role": "user", "content": "look" * (1 + i % 2)}] for i in range(8)]
    images = [[picture(1), picture(2, 40, 40)][: 1 + i % 2] for i in range(8)]
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "rollout_precision": "bf16"}
    settings |= {"sync_check_steps": 1, "max_steps": 3, "learning_rate": 2e-3}
    settings |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 16}
    settings |= {"reward_funcs": killing(None), "processing_class": AutoProcessor.from_pretrained(path)}
    trainer = trainer_for(
        tmp_path, path, train_dataset=Dataset.from_dict({"prompt": prompts, "images": images}), **settings
    )
    start = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    logged = [entry for entry in metrics(trainer) if "mismatch/abs_logp_diff" in entry]
    assert len(logged) == 3 and all(0 < entry["mismatch/abs_logp_diff"] < 0.05 for entry in logged)
    assert all(entry["sync_check/image_logp_difference"] < entry["sync_check/image_bound"] for entry in logged)
    moved = {name for name, param in trainer.model.named_parameters() if not torch.equal(param, start[name])}
    assert {name for name in start if ".visual." in name and "weight" in name} <= moved
