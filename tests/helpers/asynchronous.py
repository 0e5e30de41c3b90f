"""Asynchronous trainers without a server: samples that are given, and an engine in a thread."""

import queue
import tempfile

import numpy as np
import torch
from tiny import save_tiny, tiny_tokenizer
from training import config, dataset, fields_of, spread
from transformers import AttentionInterface
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION

from trl_quant import QuantAsyncGRPOConfig, QuantAsyncGRPOTrainer
from trl_quant.policy.trees import attend_tree
from trl_quant.trainers.async_grpo.sampling_thread import AgedSample
from trl_quant.trl_seams import without_peak_flops


PROMPTS = ([5, 6, 7, 8, 9], [40, 41, 42])


def given_samples(groups: int = 8, each: int = 4, seed: int = 0, version: int = 1) -> list[AgedSample]:
    """Groups whose completions share a prompt, and log-probabilities that no policy has."""
    draw = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt, rewards = PROMPTS[group % len(PROMPTS)], draw.normal(size=each)
        advantages = (rewards - rewards.mean()) / rewards.std()
        for reward, advantage in zip(rewards, advantages, strict=True):
            length = int(draw.integers(2, 9))
            ids = np.concatenate([prompt, draw.integers(64, 90, length)])
            mask = np.concatenate([np.zeros(len(prompt), int), np.ones(length, int)])
            samples.append(
                AgedSample(
                    prompt=[{"role": "user", "content": "x"}],
                    completion=[{"role": "assistant", "content": "y"}],
                    input_ids=ids,
                    completion_mask=mask,
                    old_log_probs=np.where(mask, -5.5 + 0.5 * draw.normal(size=len(ids)), 0.0).astype(np.float32),
                    advantage=float(advantage),
                    model_version=version,
                    group_id=group,
                    metrics={"reward": float(reward)},
                    versions=np.where(mask, version, 0),
                )
            )
    return samples


class Given:
    """A rollout worker and a weight transfer: the samples are there before the training begins."""

    def __init__(self, samples):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.sent = []
        for sample in samples:
            self.rollout_buffer.put(sample)

    def check_health(self, stale_after_s):
        raise RuntimeError("no sample is left")

    def update_model_version(self, version): ...

    def send_weights(self, iterator):
        self.sent.append([name for name, _ in iterator])

    def start(self): ...

    stop = init_weight_transfer = pause = resume = destroy = start


def asynchronous(path, samples=None, kind=QuantAsyncGRPOTrainer, model=None, rewards=spread, data=None, **given):
    """An asynchronous trainer of a tiny policy. With `samples`, these are what it trains on."""
    config_class = AsyncGRPOConfig if kind is AsyncGRPOTrainer else QuantAsyncGRPOConfig
    fields = {name: given.pop(name) for name in given.keys() & fields_of(config_class)}
    if samples is not None:
        fields = {"token_budget": 0} | fields
        worker = Given(samples)
        given |= {"rollout_worker": worker, "weight_transfer": worker}
    elif config_class is QuantAsyncGRPOConfig:
        fields = {"use_vllm": False, "rollout_precision": "int8"} | fields
    if model is None:
        model = save_tiny(tempfile.mkdtemp(dir=path), seed=3)
    args = config(config_class, path, **fields)
    data = dataset() if data is None else data
    given = {"processing_class": tiny_tokenizer(), "train_dataset": data} | given
    with without_peak_flops():
        trainer = kind(model, rewards, args, **given)
    if kind is AsyncGRPOTrainer:
        AttentionInterface.register(TREE_ATTENTION, attend_tree)  # TRL's constructor has registered the hub's kernel
    return trainer


def noted(buffer: queue.Queue) -> list:
    """The samples that are put on a queue from now on."""
    found, put = [], buffer.put

    def noting(sample, **given):
        found.append(sample)
        put(sample, **given)

    buffer.put = noting
    return found


def policy_gradient(trainer) -> torch.Tensor:
    """The gradient of the next micro-batch's loss, flat."""
    return gradient_of_batch(trainer, next(iter(trainer.get_train_dataloader())))


def gradient_of_batch(trainer, batch) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, batch).backward()
    return torch.cat([param.grad.flatten() for param in trainer.model.parameters() if param.grad is not None]).double()


def logps_of(trainer, samples) -> list[torch.Tensor]:
    """The policy's log-probabilities of each sample's trained tokens, each sample alone."""
    found = []
    for sample in samples:
        ids = torch.tensor(sample.input_ids)[None]
        logps = trainer.model(ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].log_softmax(-1)
        logps = logps.gather(-1, ids[0, 1:, None])[:, 0]
        found.append(logps[torch.tensor(sample.completion_mask[1:]) > 0])
    return found
