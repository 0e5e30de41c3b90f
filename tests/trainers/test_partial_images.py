"""
Rollouts in flight of a policy that reads images: a completion goes on with the images of its row, which the pool does
not hold. The policy is Gemma 3, whose image tokens see each other.
"""

import math
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from long_tests import rest_is_long
from readers import picture, reader
from remembering import assert_goes_on, in_flight, returned
from torch import nn
from training import Killed, killing, metrics, parameters, scored_batches, trainer_for
from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from trl_quant import QuantDistillationTrainer, QuantGRPOTrainer, QuantRLOOTrainer
from trl_quant.layers import EngineLinear
from trl_quant.trainers.pictures import requests_in_flight
from trl_quant.trainers.pool import Completion, Group


pytestmark = pytest.mark.isa
KINDS = {"GRPO": QuantGRPOTrainer, "RLOO": QuantRLOOTrainer, "distillation": QuantDistillationTrainer}
ENDS = {"generation_kwargs": {"eos_token_id": [*range(0, 255, 7)]}}


def data(column: str | None, rows: int = 8) -> Dataset:
    """Conversations of different lengths, without images, with one each, or with one or two."""
    found = {"prompt": [[{"role": "user", "content": "look" * (1 + i % 3) + str(i)}] for i in range(rows)]}
    if column == "image":
        found["image"] = [picture(i) for i in range(rows)]
    elif column == "images":
        found["images"] = [[picture(i + 10 * k) for k in range(1 + i % 2)] for i in range(rows)]
    return Dataset.from_dict(found)


def built(path, column, kind="GRPO", seed=0, **given):
    """Two groups, or four completions, a generation; weights that move visibly at each step."""
    policy, processor = reader("gemma3", seed=seed)
    settings = {"rollout_precision": "bf16", "rollouts_in_flight": 2.0, "per_device_train_batch_size": 4}
    settings |= {"max_completion_length": 40, "max_steps": 4, "optim": "sgd", "learning_rate": 0.01}
    settings |= {"lr_scheduler_type": "constant", **ENDS}
    if kind == "distillation":
        settings |= {"is_correction": "tis", "teacher_model": reader("gemma3", seed=4)[0]}
    else:
        settings |= {"num_generations": 2, "beta": 0.0, "reward_funcs": killing(None)}
    settings |= {"processing_class": processor, "train_dataset": data(column), "kind": KINDS[kind]}
    return trainer_for(path, policy, **settings | given)


def remembered(kind: type) -> type:
    """The trainer, whose embedded engine computes in FP32. `versions[g]` has the weights that sampled generation g."""

    class Remembered(kind):
        def build_engine(self, *args, **settings):
            engine = super().build_engine(*args, **settings)
            for name, layer in [*engine.copy.named_modules()]:
                if isinstance(layer, EngineLinear):
                    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                    engine.copy.set_submodule(name, linear.requires_grad_(False))
            self.versions, sample = {}, engine.sample

            def sampled(*args, **kwargs):
                self.versions[self.pool.generation] = deepcopy(engine.copy)
                return sample(*args, **kwargs)

            engine.sample = sampled
            return engine

    return Remembered


@torch.no_grad()
def logps_of(model, processor, prompt: list[int], images: list | None, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of a completion in one pass, without the image token, which is never sampled."""
    tokens = torch.tensor([[*prompt, *ids]])
    seen = {}
    if images:
        seen["pixel_values"] = processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
        seen["token_type_ids"] = (tokens == processor.tokenizer.image_token_id).long()
    scores = model(input_ids=tokens, **seen).logits[0, len(prompt) - 1 : -1].float()
    scores[:, processor.tokenizer.image_token_id] = -math.inf
    return scores.log_softmax(-1)[range(len(ids)), ids]


def now_and_then(prompts, completions, **kwargs) -> list[float]:
    """A reward that differs within the groups of two prompts in three, which have their images in them."""
    assert all(part["image"] for prompt in prompts for part in prompt[-1]["content"] if part["type"] == "image")
    texts = [prompt[-1]["content"][-1]["text"] for prompt in prompts]
    return [0.0 if "looklook" not in t else r for t, r in zip(texts, killing(None)(completions), strict=True)]


@pytest.mark.parametrize(
    ("kind", "column", "options"),
    [
        ("GRPO", "images", {}),
        pytest.param("RLOO", "image", {}, marks=pytest.mark.long),
        pytest.param("distillation", "image", {}, marks=pytest.mark.long),
        ("GRPO", None, {}),
        pytest.param(
            *("GRPO", "images", {"dynamic_sampling_rounds": 4, "reward_funcs": now_and_then}), marks=pytest.mark.long
        ),
    ],
    ids=["images", "image", "distillation", "none", "dynamic"],
)
def test_each_token_has_the_log_probability_of_its_version_with_its_images(
    tmp_path, monkeypatch, kind, column, options
):
    monkeypatch.setitem(KINDS, kind, remembered(KINDS[kind]))
    trainer = built(tmp_path, column, kind, **options)
    rows, batches = returned(trainer), scored_batches(trainer)
    trainer.train()
    processor = trainer.processing_class
    images = {}  # of each prompt
    for row in trainer.train_dataset:
        own = row.get("images") or ([row["image"]] if "image" in row else [])
        conversation = prepare_multimodal_messages(row["prompt"], images=own)
        images[tuple(trainer._tokenize_prompts([conversation])[0][0])] = own
    scored = [
        logps[mask.bool()]
        for batch in batches
        for logps, mask in zip(batch["sampling_per_token_logps"], batch["completion_mask"], strict=True)
    ]
    carried = swapped = 0
    for (prompt, ids, versions), mu in zip(rows, scored, strict=True):
        own = images[tuple(prompt)]
        others = [picture(100 + i) for i in range(len(own))]
        for version in set(versions):
            sampled = torch.tensor(versions) == version
            given = trainer.versions[version], processor, prompt
            assert (logps_of(*given, own, ids) - mu)[sampled].abs().max() < 1e-4
            swapped += (logps_of(*given, others, ids) - mu)[sampled].abs().mean().item()
            carried += len(set(versions)) > 1
    assert carried > 2 and sum(log.get("rollouts/carried", 0) for log in metrics(trainer)) > 0
    assert swapped > 0.1 if column else swapped < 1e-4
    if options:
        assert sum(log.get("dynamic_sampling/replaced_groups", 0) for log in metrics(trainer)) > 0


def test_trl_generates_with_the_images_of_further_groups(tmp_path):
    trainer = built(
        tmp_path,
        "images",
        rollout_precision=None,
        rollouts_in_flight=1.0,
        dynamic_sampling_rounds=4,
        reward_funcs=now_and_then,
        max_completion_length=4,
    )
    pool, seen, turn = type(trainer.pool), [], trainer._generate_single_turn

    def taken(prompt_ids, images, fields, *args, **kwargs):
        if trainer.pool.samples is None:
            pixels = torch.as_tensor(np.array(fields["pixel_values"])).split([len(own) for own in images])
            seen.extend(zip(map(tuple, prompt_ids), images, pixels, strict=True))
        return turn(prompt_ids, images, fields, *args, **kwargs)

    trainer._generate_single_turn = taken
    trainer.train()
    assert isinstance(trainer.pool, pool) and len(seen) == trainer.pool.started * 2 > 16
    processor, expected = trainer.processing_class, {}
    for row in trainer.train_dataset:
        conversation = prepare_multimodal_messages(row["prompt"], images=row["images"])
        expected[tuple(trainer._tokenize_prompts([conversation])[0][0])] = row["images"]
    for prompt, images, pixels in seen:
        own = expected[prompt]
        assert [image.tobytes() for image in images] == [image.tobytes() for image in own]
        assert torch.equal(pixels, processor.image_processor(images=own, return_tensors="pt")["pixel_values"])


@pytest.mark.long
def test_a_killed_run_resumes_with_the_bits_of_an_unbroken_one(tmp_path):
    """The checkpoint has no pixels: the resumed run reads the images again."""
    given = {"rollout_precision": "int8", "save_strategy": "steps", "save_steps": 1}
    whole = built(tmp_path / "whole", "images", **given)
    whole.train()
    broken = built(tmp_path / "broken", "images", reward_funcs=killing(3), **given)
    with pytest.raises(Killed):
        broken.train()
    resumed = built(tmp_path / "broken", "images", **given)
    rows = returned(resumed)
    resumed.train(resume_from_checkpoint=True)
    checkpoint = tmp_path / "broken" / "checkpoint-2"
    left = in_flight(checkpoint)
    assert_goes_on(left, rows)
    assert all(group.keys() == {"place", "row", "prompt", "began", "completions"} for group in left)
    assert same(resumed, whole) and not same(resumed, broken)
    resumed.state.best_model_checkpoint = str(checkpoint)
    resumed._load_best_model()
    assert same(resumed, broken)


def same(trainer, other) -> bool:
    mine, theirs = parameters(trainer), parameters(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_vllm_gets_the_images_themselves():
    """Also of a prompt that holds them; its processor's results are made by vLLM."""
    held = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}]}]
    text = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    trainer = SimpleNamespace(
        processing_class=ProcessorMixin.__new__(ProcessorMixin),
        train_dataset=[{"prompt": text}, {"prompt": held}],
        vllm_generation=SimpleNamespace(sampler=SimpleNamespace(reads_images=True)),
    )
    asked = [(Group(row, row, [5], 0, []), Completion(token_ids=[6])) for row in (0, 1)]
    requests, processed = requests_in_flight(trainer, asked)
    assert [(one.given, one.images) for one in requests] == [([5, 6], None), ([5, 6], ["a.png"])] and not processed


@pytest.mark.parametrize("column", rest_is_long(["image", None]))
def test_a_prompt_that_has_become_longer_is_refused_with_images(tmp_path, column):
    """Its images would have other places. Without images, the tokens stay those of the start."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            trainer.processing_class.chat_template = "Tomorrow. " + trainer.processing_class.chat_template
        return [float(sum(ids) % 5) for ids in completion_ids]

    trainer = built(tmp_path, column, reward_funcs=reward)
    if column is None:
        trainer.train()
        assert sum(log.get("rollouts/carried", 0) for log in metrics(trainer)) > 0
        return
    with pytest.raises(ValueError, match=r"row \d had \d+ tokens when its completions started, and has \d+ now"):
        trainer.train()
