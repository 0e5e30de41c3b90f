"""Configs, data and checks before a model is loaded, for the tests of what is refused there, in which words."""

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from tiny import tiny_model
from training import dataset, spread

from trl_quant import QuantGRPOConfig
from trl_quant.config.before_loading import check_before_loading


INT8 = {"rollout_precision": "int8"}
VLLM = {**INT8, "use_vllm": True, "vllm_mode": "colocate"}


def build(config_class=QuantGRPOConfig, **kwargs):
    return config_class(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **kwargs)


def refused(call, *words):
    with pytest.raises(ValueError) as error:
        call()
    assert not [word for word in words if word not in str(error.value)], str(error.value)


POLICY = tiny_model()


def check(model=None, args=None, train_dataset=..., reward_funcs=spread, eval_dataset=None, **others):
    given = dict.fromkeys(("peft_config", "environment_factory", "rollout_func", "quantization_config")) | others
    check_before_loading(
        model=POLICY if model is None else model,
        args=args or build(num_generations=4, per_device_train_batch_size=4),
        train_dataset=dataset() if train_dataset is ... else train_dataset,
        eval_dataset=eval_dataset,
        reward_funcs=reward_funcs,
        **given,
    )


def prompts(*values, **columns) -> Dataset:
    return Dataset.from_dict({"prompt": list(values), **columns})


def said(role: str, content) -> dict:
    return {"role": role, "content": content}


USER = said("user", "1+1=")
STREAM = IterableDataset.from_generator(lambda: iter([{"prompt": "1+1="}, {"prompt": ""}]))
REFUSED_DATA = [  # dataset -> what the message says
    (prompts(), "`train_dataset` is empty"),
    (Dataset.from_dict({"text": ["a"]}), "`train_dataset` has the columns ['text']; a column 'prompt' is needed"),
    (prompts("a", "", "b"), "`train_dataset`: the prompt of row 1 is empty"),
    (prompts("a", "b", None), "`train_dataset`: the prompt of row 2 is missing"),
    (prompts(1, 2), "`train_dataset`: the prompt of row 0 is a int"),
    (prompts([USER], []), "row 1 is empty"),
    (prompts([USER], [said("user", "")]), "row 1 has a message without content"),
    (prompts([said("system", "Think."), said("user", None)]), "row 0 has a message without content"),
    (prompts([said("system", "")]), "row 0 has a message without content"),
    (prompts([said("user", [{"role": "user", "content": "1+1="}])]), "row 0 has a message without content"),
    (prompts([{"content": "1+1="}]), "row 0 has a message without a role"),
    (prompts(*["a"] * 5000, "").shuffle(seed=1), "is empty"),
    (DatasetDict(train=dataset()), "`train_dataset` is a DatasetDict; take one of its splits"),
    ([{"prompt": "a"}], "`train_dataset` is a list. It must be a `datasets.Dataset`"),
    (STREAM, "`max_steps`=-1, but a stream has no length"),
    (None, "`train_dataset` is required unless an `environment_factory` is provided"),
]
ACCEPTED_DATA = [
    prompts("a"),
    prompts(" \n"),
    prompts([USER]),
    prompts([said("system", ""), USER]),
    prompts([USER, said("assistant", None), said("tool", ""), USER]),
    prompts([said("user", [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}])]),
    prompts("a", "", "b").filter(lambda row: row["prompt"]),
    prompts("a", "", "b").select([2, 0]),
    prompts("a", "b", answer=[None, None]),
    prompts("a").with_transform(lambda rows: {"prompt": [[USER] for _ in rows["prompt"]]}),
    Dataset.from_dict({"text": ["a"]}).with_transform(lambda rows: {"prompt": rows["text"]}),
    dataset(5000).shuffle(seed=1),
]
