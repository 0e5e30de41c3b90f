"""Samples completions for a dataset's prompts and scores them."""

from collections.abc import Callable

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import token_ids


@torch.no_grad()
def mean_reward(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    reward: Callable[..., list[float | None]],
    max_new_tokens: int,
    temperature: float = 1.0,
    batch_size: int = 256,
    seed: int = 0,
) -> float:
    """Returns the mean of `reward` over one completion per prompt. The global random state stays as it is.

    Args:
        dataset (`Dataset`): with `prompt` (plain strings or conversations) and the columns that the reward needs.
        reward: in TRL's signature. Rows that it scores `None` are left out of the mean.
        temperature (`float`): for plain sampling from the full distribution; 0 is greedy.

    Returns:
        `float`: in the reward's units; for a reward of 0 or 1, the accuracy.
    """
    sampling = {"do_sample": False, "repetition_penalty": 1.0}  # the model's own `generation_config` must not act
    if temperature > 0:
        sampling |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    was_training = model.training
    model.eval()
    scores = []
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, len(dataset), batch_size):
            columns = dataset[start : start + batch_size]
            prompts = columns.pop("prompt")
            ids = {"input_ids": token_ids(prompts, tokenizer)}  # as in training: a chat template adds its own BOS
            inputs = tokenizer.pad(ids, return_tensors="pt", padding_side="left").to(model.device)
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **sampling,
            )
            completions = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            scores += reward(completions=completions, prompts=prompts, **columns)
    model.train(was_training)
    scores = [score for score in scores if score is not None]
    return sum(scores) / max(len(scores), 1)
