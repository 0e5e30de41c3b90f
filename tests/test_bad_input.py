"""Bad input gets one clear error before anything is loaded; its right neighbour is accepted. Both as tables."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from safetensors import SafetensorError
from tiny import VOCAB_SIZE, save_tiny, tiny_tokenizer
from training import config, dataset, make, spread
from transformers import AutoConfig, BitsAndBytesConfig, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig
from trl import GRPOConfig, SFTConfig

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, checkpoints
from trl_quant.checks import check_before_loading
from trl_quant.cli import main
from trl_quant.cli.report import read_run
from trl_quant.formats.checkpoint import quantization_config
from trl_quant.rollout.vllm.support import differences


INT8 = {"rollout_precision": "int8"}
VLLM = {**INT8, "use_vllm": True, "vllm_mode": "colocate"}
TIS, AIS = ({**INT8, "is_correction": name} for name in ("tis", "ais"))
NOISE = {**INT8, "noise_schedule": "linear"}


def build(config_class=QuantGRPOConfig, **kwargs):
    return config_class(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **kwargs)


def refused(call, *words):
    with pytest.raises(ValueError) as error:
        call()
    assert not [word for word in words if word not in str(error.value)], str(error.value)


# The config

REFUSED_FIELDS = [  # fields -> what the message says
    ({"is_cap": "2"}, "`is_cap`='2' must be a finite number or None"),
    ({"is_cap": True}, "`is_cap`=True must be a finite number"),
    ({"is_cap": float("inf")}, "`is_cap`=inf must be a finite number"),
    ({"ais_delta": "0.02"}, "`ais_delta`='0.02' must be a finite number"),
    ({"ais_delta": None}, "`ais_delta`=None must be a finite number"),
    ({"ais_gamma": float("nan")}, "`ais_gamma`=nan"),
    ({"ais_beta_var": True}, "`ais_beta_var`=True"),
    ({"noise_sigma_start": float("inf")}, "`noise_sigma_start`=inf"),
    ({"noise_sigma_end": "5e-4"}, "`noise_sigma_end`='5e-4'"),
    ({"noise_stages": 3.5}, "`noise_stages`=3.5 must be an integer"),
    ({"noise_stages": None}, "`noise_stages`=None must be an integer"),
    ({"noise_schedule": 1}, "`noise_schedule`=1 must be a string or None"),
    ({"sync_check_steps": 1.5}, "`sync_check_steps`=1.5 must be an integer"),
    ({"sync_check_steps": "50"}, "`sync_check_steps`='50' must be an integer"),
    ({"sync_check_steps": True}, "`sync_check_steps`=True must be an integer"),
    ({"vllm_sleep_level": True}, "`vllm_sleep_level`=True must be an integer"),
    ({"vllm_sleep_level": None}, "`vllm_sleep_level`=None must be an integer"),
    ({"lora_sync": None}, "`lora_sync`=None must be a string"),
    ({"rollout_precision": ["int8"]}, "`rollout_precision`=['int8'] must be a string or None"),
    ({"rollout_precision": 8}, "`rollout_precision`=8 must be a string or None"),
    ({"is_correction": ["ais"]}, "`is_correction`=['ais'] must be a string or None"),
    ({"uaq_scale": "1.5"}, "`uaq_scale`='1.5' must be a finite number or None"),
    ({"uaq_scale": 1e300}, "`uaq_scale`=1e+300 must be a number from 0.00390625 to 256"),
    ({"uaq_scale": 1e-300}, "`uaq_scale`=1e-300 must be a number from 0.00390625 to 256"),
    ({"uaq_scale": 256.1}, "`uaq_scale`=256.1"),
    ({**VLLM, "vllm_engine_kwargs": [1]}, "`vllm_engine_kwargs`=[1] must be a dict (or a JSON object) or None"),
    ({**VLLM, "vllm_engine_kwargs": 3}, "`vllm_engine_kwargs`=3 must be a dict"),
    ({**VLLM, "vllm_engine_kwargs": "eager"}, "`vllm_engine_kwargs`='eager' must be a dict"),
    ({**VLLM, "vllm_engine_kwargs": "[1]"}, "`vllm_engine_kwargs`='[1]' must be a dict"),
    ({**VLLM, "vllm_engine_kwargs": "{eager}"}, "`vllm_engine_kwargs`='{eager}' is no JSON object"),
    ({"model_init_kwargs": "{dtype"}, "`model_init_kwargs`='{dtype' is no JSON object"),
    ({"use_vllm": True, "vllm_mode": "colocated"}, "`vllm_mode`='colocated' is unknown. Allowed: 'colocate', 'server'"),
    ({"temperature": 0}, "`temperature`=0 is out of range. It must be > 0"),
    ({"temperature": -1.0}, "`temperature`=-1.0 is out of range"),
    ({"temperature": "1"}, "`temperature`='1' must be a finite number"),
    ({"top_p": 0.0}, "`top_p`=0.0 is out of range. It must be > 0"),
    ({"top_p": 1.5}, "`top_p`=1.5 is out of range. It must be <= 1"),
    ({"min_p": -0.1}, "`min_p`=-0.1 is out of range"),
    ({"min_p": 2.0}, "`min_p`=2.0 is out of range. It must be <= 1"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty`=0.0 is out of range"),
    ({"max_completion_length": 0}, "`max_completion_length`=0 is out of range. It must be >= 1"),
    ({"max_completion_length": 2.5}, "`max_completion_length`=2.5 must be an integer"),
    ({"vllm_gpu_memory_utilization": 5.0}, "`vllm_gpu_memory_utilization`=5.0 is out of range. It must be <= 1.0"),
    ({**VLLM, "vllm_model_impl": "vlm"}, "`vllm_model_impl`='vlm' is unknown. Allowed: 'vllm', 'transformers', 'auto'"),
    ({**VLLM, "vllm_max_model_length": 512}, "`vllm_max_model_length`=512 leaves no room for a prompt"),
    ({"num_iterations": 0}, "`num_iterations`=0 is out of range"),
    ({"steps_per_generation": 0}, "`generation_batch_size`=0 is out of range"),
    ({"learning_rate": -1e-6}, "`learning_rate`=-1e-06 is out of range"),
    ({"learning_rate": float("nan")}, "`learning_rate`=nan must be a finite number"),
    ({"beta": float("nan")}, "`beta`=nan must be a finite number"),
    ({"epsilon": "0.2"}, "`epsilon`='0.2' must be a finite number"),
    ({"epsilon": -0.2}, "`epsilon`=-0.2 is out of range"),
    ({"loss_type": "ppo"}, "`loss_type`='ppo' is unknown. Allowed: 'grpo'"),
    ({"scale_rewards": "std"}, "`scale_rewards`='std' is unknown. Allowed: 'group', 'batch', 'none'"),
    ({"lora_sync": "adapter"}, "`lora_sync`='adapter' acts only with a `rollout_precision`"),
    ({"use_vllm": True, "vllm_sleep_level": 1}, "`vllm_sleep_level`=1 acts only with a `rollout_precision`"),
    (
        {"use_vllm": True, "vllm_engine_kwargs": {"enforce_eager": True}},
        "`vllm_engine_kwargs`={'enforce_eager': True} acts only with a `rollout_precision`",
    ),
    ({**INT8, "vllm_sleep_level": 1}, "`vllm_sleep_level`=1 acts only with vLLM, and `use_vllm=False`"),
    ({**VLLM, "vllm_mode": "server", "vllm_sleep_level": 1}, "`vllm_sleep_level`=1 acts only with `vllm_mode='coloc"),
]
ACCEPTED_FIELDS = [  # their neighbours
    {**TIS, "is_cap": 2},
    {**TIS, "is_cap": 1.0},
    {**TIS, "is_cap": np.float32(2)},
    {**TIS, "is_cap": None},
    {**AIS, "ais_delta": 1},
    {**AIS, "ais_beta_var": 0},
    {**NOISE, "noise_sigma_start": 1, "noise_sigma_end": 1},
    {**NOISE, "noise_stages": 3},
    {**NOISE, "noise_stages": np.int64(3)},
    {**VLLM, "sync_check_steps": 0},
    {"uaq_scale": 2},
    {"uaq_scale": 256.0},
    {"uaq_scale": 2**-8},
    {**VLLM, "vllm_engine_kwargs": {"enforce_eager": True}},
    {**VLLM, "vllm_engine_kwargs": '{"enforce_eager": true}'},
    {**VLLM, "vllm_engine_kwargs": ' {"enforce_eager": true} '},
    {**VLLM, "vllm_engine_kwargs": {}},
    {"vllm_engine_kwargs": {}},
    {"vllm_engine_kwargs": None},
    {"model_init_kwargs": '{"dtype": "bfloat16"}'},
    {"use_vllm": True, "vllm_mode": "server"},
    {"temperature": 0.01},
    {"temperature": 2},
    {"top_p": 1.0, "min_p": 0.0},
    {"top_p": 0.5, "min_p": 1.0, "top_k": 0},
    {**VLLM, "vllm_model_impl": "transformers", "vllm_max_model_length": 513},
    {"max_completion_length": 1, "vllm_gpu_memory_utilization": 1.0},
    {"learning_rate": 0.0, "beta": 0, "epsilon": 0.0},
    {"loss_type": "vespo"},
    {"scale_rewards": False},
    {"scale_rewards": "batch"},
    {**VLLM, "vllm_sleep_level": 1},
    {**VLLM, "lora_sync": "adapter"},
    {**INT8, "vllm_sleep_level": 2, "lora_sync": "merge"},
]


@pytest.mark.parametrize(("settings", "says"), REFUSED_FIELDS, ids=str)
def test_a_bad_field_is_refused(settings, says):
    refused(lambda: build(**settings), says)


@pytest.mark.parametrize("settings", ACCEPTED_FIELDS, ids=str)
def test_its_neighbour_is_accepted(settings):
    args = build(**settings)
    if isinstance(settings.get("vllm_engine_kwargs"), str):
        assert args.vllm_engine_kwargs == {"enforce_eager": True}


def test_a_plain_config_of_trl_is_checked_as_well():
    refused(lambda: QuantGRPOConfig.from_grpo(build(GRPOConfig, temperature=0.0)), "`temperature`=0.0")
    assert QuantGRPOConfig.from_grpo(build(GRPOConfig, temperature=0.7)).temperature == 0.7


def test_a_config_of_another_trainer_is_refused():
    refused(lambda: QuantGRPOConfig.from_grpo(build(SFTConfig)), "`args` is a SFTConfig", "`GRPOConfig`")


# What needs the data


def check(model=None, args=None, train_dataset=None, reward_funcs=spread, eval_dataset=None, **others):
    given = dict.fromkeys(("peft_config", "environment_factory", "rollout_func", "quantization_config")) | others
    check_before_loading(
        model=model,
        args=args or build(num_generations=4, per_device_train_batch_size=4),
        train_dataset=dataset() if train_dataset is None else train_dataset,
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


@pytest.mark.parametrize(("data", "says"), REFUSED_DATA, ids=[says for _, says in REFUSED_DATA])
def test_bad_data_is_refused(data, says):
    refused(lambda: check(train_dataset=data), says)


@pytest.mark.parametrize("data", ACCEPTED_DATA, ids=range(len(ACCEPTED_DATA)))
def test_good_data_is_accepted(data):
    check(train_dataset=data, eval_dataset=data)


def test_a_stream_is_accepted_and_not_read():
    def rows():
        raise AssertionError("the stream was read")

    args = build(num_generations=4, per_device_train_batch_size=4, max_steps=1)
    check(train_dataset=IterableDataset.from_generator(rows), args=args)


def test_data_for_evaluation():
    refused(lambda: check(eval_dataset=prompts()), "`eval_dataset` is empty")
    refused(lambda: check(eval_dataset={"hard": prompts("a", None)}), "`eval_dataset['hard']`: the prompt of row 1 is")
    check(eval_dataset={"hard": prompts("a"), "streamed": STREAM})


def test_an_environment_may_own_the_prompts_and_the_reward():
    check(train_dataset=prompts([said("user", "")]), environment_factory=object, reward_funcs=None)


def test_too_few_prompts_for_one_generation():
    args = build(num_generations=4, per_device_train_batch_size=8)
    refused(lambda: check(train_dataset=prompts("a"), args=args), "has 1 prompts", "one generation takes, 2")
    check(train_dataset=prompts("a", "b"), args=args)


def without_room(completions):
    return [0.0] * len(completions)


def with_answer(completions, answer, **kwargs):
    return [0.0] * len(completions)


REFUSED_REWARDS = [
    (os.path, "is a module. It must be a function, a model or a list"),
    (3, "`reward_funcs`=3 is a int"),
    (without_room, "`reward_funcs`: without_room(completions) cannot be called as a reward: got an unexpected keyword"),
    (with_answer, "`reward_funcs`: with_answer(completions, answer, **kwargs) cannot be called as a reward: missing"),
    (os.getcwd, "`reward_funcs`: getcwd() cannot be called as a reward"),
    ([spread, os.path], "is a module. It must be a function, a model or a list"),
]


@pytest.mark.parametrize(("reward", "says"), REFUSED_REWARDS, ids=[says for _, says in REFUSED_REWARDS])
def test_what_is_no_reward_is_refused(reward, says):
    refused(lambda: check(reward_funcs=reward), says)


def test_rewards_are_accepted():
    async def awaited(completions, **kwargs):
        return [0.0] * len(completions)

    check(reward_funcs=[spread, awaited, torch.nn.Linear(1, 1), "a model's name"])
    check(reward_funcs=with_answer, train_dataset=prompts("a", answer=["b"]))
    check(reward_funcs=with_answer, rollout_func=lambda prompts, trainer: {})  # which may bring the answer


# What needs the model's config.json


@pytest.fixture
def written(tmp_path):
    """Writes a config.json, the only file there is, and returns its directory."""

    def write(config_class=Qwen3Config, **changes) -> str:
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        quantization = changes.pop("quantization_config", None)
        made = config_class(**sizes | changes)
        made.architectures = [config_class.__name__.replace("Config", "ForCausalLM")]
        directory = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        made.save_pretrained(directory)
        if quantization is not None:
            file = directory / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
        return str(directory)

    return write


REFUSED_POLICIES = [  # arguments, config.json -> what the message says
    (INT8, {"quantization_config": quantization_config("int8")}, "is quantized already"),
    (INT8, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "is quantized already"),
    (INT8, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized already"),
    (INT8, {"quantization_config": {"quant_method": "awq", "bits": 4}}, "is quantized already"),
    (
        INT8,
        {"config_class": Qwen3MoeConfig, "num_experts": 8},
        "`rollout_precision`='int8', but the policy is",
    ),
    (
        VLLM,
        {"config_class": Qwen3MoeConfig, "num_experts": 8},
        "a mixture of 8 experts, which no engine here",
    ),
    (INT8, {"config_class": MixtralConfig}, "is a mixture of 8 experts"),
    (INT8, {"is_encoder_decoder": True}, "is an encoder with a decoder"),
    (INT8, {"text_config": {"n_routed_experts": 64}}, "is a mixture of 64 experts"),
]
ACCEPTED_POLICIES = [
    (INT8, {}),
    (INT8, {"quantization_config": BitsAndBytesConfig(load_in_4bit=True).to_dict()}),
    (INT8, {"num_experts": 1}),
    (INT8, {"num_experts": None, "num_experts_per_tok": 8}),
    ({}, {"config_class": Qwen3MoeConfig, "num_experts": 8}),
    ({}, {"quantization_config": quantization_config("int8")}),
]


@pytest.mark.parametrize(("settings", "model", "says"), REFUSED_POLICIES, ids=range(len(REFUSED_POLICIES)))
def test_a_policy_that_no_engine_samples_from_is_refused(settings, model, says, written, monkeypatch):
    monkeypatch.setattr("trl_quant.checks.check_version", lambda: None)
    monkeypatch.setattr("trl_quant.checks.check_device", lambda *args: None)
    with pytest.raises(ValueError) as error:
        check(written(**model), build(**settings, num_generations=4, per_device_train_batch_size=4))
    message = str(error.value)
    assert says in message
    assert "mixture" not in message or "use_vllm" not in message  # the other engine is no way out


@pytest.mark.parametrize(("settings", "model"), ACCEPTED_POLICIES, ids=range(len(ACCEPTED_POLICIES)))
def test_its_neighbour_is_sampled_from(settings, model, written):
    check(written(**model), build(**settings, num_generations=4, per_device_train_batch_size=4))


@pytest.mark.parametrize("changes", [{"hidden_size": 256}, {"num_key_value_heads": 4}, {"config_class": LlamaConfig}])
def test_two_models_are_told_apart(changes, written):
    mine, theirs = (AutoConfig.from_pretrained(written(**options)) for options in ({}, changes))
    assert differences(mine, AutoConfig.from_pretrained(written())) == ""
    name = next(iter(changes)).replace("config_class", "model_type")
    assert f"{name} (" in differences(mine, theirs)


@pytest.mark.vllm
def test_what_the_engine_starts_on(written):
    pytest.importorskip("vllm")

    def arguments(model):
        return build(**VLLM, vllm_engine_kwargs={"model": model}, num_generations=4, per_device_train_batch_size=4)

    policy = written()
    refused(
        lambda: check(policy, arguments("/nowhere")), "`vllm_engine_kwargs` has 'model'='/nowhere'", "cannot be read"
    )
    other = written(hidden_size=256)
    refused(lambda: check(policy, arguments(other)), "another model than the policy: hidden_size (256, not 128)")
    mxfp4 = written(quantization_config=quantization_config("mxfp4"))
    refused(lambda: check(policy, arguments(mxfp4)), "`rollout_precision`='int8'", "quantized to 'mxfp4'")
    check(policy, arguments(written(quantization_config=quantization_config("int8"))))
    check(policy, arguments(written()))


@pytest.mark.vllm
def test_heads_that_vllm_lacks_on_a_cpu(written):
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's kernels for CPUs")
    args = build(**VLLM, num_generations=4, per_device_train_batch_size=4)
    refused(lambda: check(written(head_dim=48), args), "heads have 48 dimensions", "32, 64", "use_vllm=False")
    check(written(head_dim=64), args)
    check(written(head_dim=48), build(**INT8, num_generations=4, per_device_train_batch_size=4))


def test_what_is_no_model_is_refused(tmp_path):
    args = config(QuantGRPOConfig, tmp_path)
    refused(lambda: make(QuantGRPOTrainer, args, tmp_path), "`model`=", "must be a name, a directory or a model")


def test_nothing_is_loaded_before(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model")

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    args = config(QuantGRPOConfig, tmp_path, **INT8)
    refused(lambda: make(QuantGRPOTrainer, args, model, train_dataset=prompts()), "`train_dataset` is empty")
    with pytest.raises(AssertionError, match="a model was loaded"):
        make(QuantGRPOTrainer, args, model)


def test_a_truncated_file_of_the_policy_is_named(tmp_path):
    file = Path(save_tiny(tmp_path / "model")) / "model.safetensors"
    check(str(file.parent))
    os.truncate(file, file.stat().st_size // 2)
    refused(lambda: check(str(file.parent)), "model.safetensors")


# While running


def trainer_of(path, **overrides):
    settings = {"rollout_precision": "int4", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    return make(QuantGRPOTrainer, config(QuantGRPOConfig, path, **settings | overrides), peft_config=None)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of two steps with two checkpoints."""
    path = tmp_path_factory.mktemp("run") / "run"
    trainer_of(path).train()
    return path


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_half_written_checkpoints_are_not_resumed(copied):
    for step in (1, 2):
        (copied / f"checkpoint-{step}" / "trainer_state.json").write_text('{"log_')
    text = checkpoints.how_to_go_on(copied)
    assert "checkpoint-1, checkpoint-2" in text and "resume_from_checkpoint" not in text
    trainer = trainer_of(copied)
    refused(lambda: trainer.train(resume_from_checkpoint=True), "`resume_from_checkpoint`=True", text)
    half = str(copied / "checkpoint-2")
    refused(lambda: trainer.train(resume_from_checkpoint=half), f"{half!r} was not written to its end", text)


def test_nothing_to_resume(tmp_path):
    trainer = trainer_of(tmp_path)
    refused(lambda: trainer.train(resume_from_checkpoint=True), "there is nothing to resume", "no checkpoint in")


def test_a_checkpoint_without_whole_weights_does_not_count(copied):
    assert checkpoints.last_complete_checkpoint(copied).endswith("checkpoint-2")
    file = copied / "checkpoint-2" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert checkpoints.last_complete_checkpoint(copied).endswith("checkpoint-1")
    (copied / "checkpoint-1" / "model.safetensors").unlink()  # killed while deleting
    (copied / "checkpoint-1" / "training_args.bin").unlink()
    assert checkpoints.last_complete_checkpoint(copied) is None


def test_a_truncated_state_of_the_rollouts_is_named(copied):
    assert checkpoints.read_rollout_state(copied / "checkpoint-2")
    assert checkpoints.read_rollout_state(copied) == {}
    (copied / "checkpoint-2" / "rollout_state.json").write_text('{"normal')
    refused(lambda: checkpoints.read_rollout_state(copied / "checkpoint-2"), "rollout_state.json is not whole")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["torch", "quota", "safetensors"],
)
def test_a_full_disk_is_told_with_the_directory_and_the_last_checkpoint(copied, error, monkeypatch):
    trainer = trainer_of(copied, max_steps=3, resume_with_changes=True)

    def full(output_dir):
        raise error

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(OSError) as raised:
        trainer.train(resume_from_checkpoint=True)
    assert raised.value.errno == errno.ENOSPC
    message = str(raised.value)
    assert f"while saving {copied}/checkpoint-3: " in message and "MiB are free" in message
    assert f"The last whole checkpoint is {copied}/checkpoint-2" in message


def test_other_errors_of_saving_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError, match="denied"), checkpoints.saving(str(tmp_path / "checkpoint-1")):
        raise PermissionError(errno.EACCES, "denied")


# The command line

REFUSED_COMMANDS = [  # arguments -> exit code, what is printed
    (["train", "--model_name_or_path", "{tmp}/nowhere"], 1, "nowhere"),
    (["train", "--model_name_or_path", "m", "--config"], 2, "--config"),
    (["train", "--model_name_or_path", "m", "--config", "{tmp}/nowhere.yaml"], 1, "nowhere.yaml"),
    (["train", "--model_name_or_path", "m", "--config={tmp}/bad.yaml"], 1, "not a YAML file"),
    (["train", "--model_name_or_path", "m", "--config={tmp}/list.yaml"], 1, "must contain a YAML mapping"),
    (["train", "--model_name_or_path", "m", "--rollout_precison", "int8"], 2, "did you mean --rollout_precision?"),
    (["train", "--model_name_or_path", "m", "--noise_stages", "3.5"], 2, "invalid int value: '3.5'"),
    (["train", "--model_name_or_path", "m", "--reward_funcs", "os.path"], 1, "`reward_funcs`='os.path' is a module"),
    (
        ["train", "--model_name_or_path", "m", "--reward_funcs", "os.nothing"],
        1,
        "`reward_funcs`='os.nothing' is",
    ),
    (["train", "--model_name_or_path", "m", "--per_device_train_batch_size", "3"], 1, "divisible by num_generations"),
    (["train", "--model_name_or_path", "{tmp}/model", "--dataset_name", "{tmp}/bad.jsonl"], 1, "bad.jsonl' cannot be"),
    (["train", "--model_name_or_path", "{tmp}/run"], 1, "its tokenizer cannot be read"),
    (["report", "{tmp}/run", "--output", "{tmp}/chart.txt"], 1, "chart.txt': charts are written as"),
    (["report", "{tmp}/nowhere"], 1, "holds no run"),
    (["report", "{tmp}/run", "--output", "{tmp}/bad.yaml/chart.png"], 1, "bad.yaml"),
    (["prepare", "--model", "{tmp}/nowhere", "--format", "int8", "--output", "{tmp}/out"], 1, "nowhere"),
    (["prepare", "--model", "m", "--format", "int5", "--output", "{tmp}/out"], 2, "invalid choice: 'int5'"),
]


@pytest.mark.parametrize(("argv", "code", "says"), REFUSED_COMMANDS, ids=[says for _, _, says in REFUSED_COMMANDS])
def test_a_foreseen_error_is_one_line(argv, code, says, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("a: [1\nb: }")
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    if argv[0] == "train":
        argv = [*argv, "--use_cpu", "--bf16", "false", "--report_to", "none"]
    with pytest.raises(SystemExit) as error:
        main([part.replace("{tmp}", str(tmp_path)) for part in argv])
    printed = capsys.readouterr().err
    if code == 1:
        assert str(error.value.code).startswith("error: ") and says in error.value.code
    else:
        assert error.value.code == 2 and says in printed and len(printed.splitlines()) < 8


def test_an_error_that_nobody_foresaw_keeps_its_traceback(monkeypatch):
    def slip(argv):
        int("seven")

    monkeypatch.setattr("trl_quant.cli.report.main", slip)
    with pytest.raises(ValueError, match="invalid literal"):
        main(["report"])

    def reward(argv):  # not ours
        raise ValueError("mine")

    monkeypatch.setattr("trl_quant.cli.report.main", reward)
    with pytest.raises(ValueError, match="mine"):
        main(["report"])


def test_the_version_is_told(capsys):
    from trl_quant import __version__

    with pytest.raises(SystemExit) as error:
        main(["--version"])
    assert error.value.code == 0 and capsys.readouterr().out == f"trl-quant {__version__}\n"


def test_help_shows_our_options_first(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[1:3] == ["what to train on", "the rollout copy"]
    assert titles[-3:] == ["ModelConfig of TRL", "GRPOConfig of TRL", "TrainingArguments of transformers"]
    named = [line.split()[0] for line in lines if line.startswith("  --")]
    assert named.index("--uaq_scale") < named.index("--lora_r") < named.index("--beta") < named.index("--max_steps")
    default = lines[lines.index("options:") : lines.index("what to train on:")]
    assert [line for line in default if line.startswith("  -")] == [
        "  -h, --help            show this help message and exit"
    ]
    assert {f"--{f.name}" for f in fields(QuantGRPOConfig)} <= {*named}


def test_a_finished_run_without_its_own_state_is_done(copied):
    (copied / "trainer_state.json").unlink(missing_ok=True)
    assert read_run(copied).status == "done"
    shutil.rmtree(copied / "checkpoint-2")
    assert read_run(copied).status == "stopped at step 1"


def test_a_log_may_end_in_half_a_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    assert [entry["step"] for entry in read_run(tmp_path).history] == [1]
    log.write_text('{"step": 1, "rew\n{"step": 2, "reward": 0.5}\n')
    refused(lambda: read_run(tmp_path), "metrics.jsonl, line 1")


def test_a_reward_that_returns_something_else_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def scalar(completions, **kwargs):\n    return 1.0\n"
        "def words(completions, **kwargs):\n    return ['good'] * len(completions)\n"
        "def right(completions, **kwargs):\n    return [1, None]\n"
    )
    code = (
        "from trl_quant.cli.train import TrainArguments\n"
        "for name in ('scalar', 'words', 'right'):\n"
        "    (reward,) = TrainArguments(reward_funcs=[f'mine.{name}']).rewards\n"
        "    try: print(reward.__name__, reward(['a', 'b']))\n"
        "    except ValueError as error: print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    first, second, third = done.stdout.splitlines()[-3:]
    assert "`reward_funcs`='mine.scalar' returned 1.0" in first and "'mine.words' returned ['good', 'good']" in second
    assert third == "right [1, None]"
