"""Bad input gets one clear error before anything is loaded; its right neighbour is accepted. Both as tables."""

import os

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from refusals import ACCEPTED_DATA, INT8, REFUSED_DATA, STREAM, VLLM, build, check, prompts, refused, said
from tiny import save_tiny, tiny_model, tiny_tokenizer
from training import spread
from transformers import Blip2Processor, BlipImageProcessorPil
from trl import GRPOConfig, SFTConfig

from trl_quant import QuantAsyncGRPOConfig, QuantDistillationConfig, QuantGRPOConfig, QuantRLOOConfig
from trl_quant.storage.layout import quantization_config, quantize_checkpoint
from trl_quant.tasks import REWARDS


TIS, AIS = ({**INT8, "is_correction": name} for name in ("tis", "ais"))
NOISE = {**INT8, "noise_schedule": "linear"}


# The config

REFUSED_FIELDS = [  # fields -> what the message says
    ({"is_cap": "2"}, "`is_cap`='2' must be a finite number or None"),
    ({"is_cap": True}, "`is_cap`=True must be a finite number"),
    ({"use_vllm": "false"}, "`use_vllm`='false' must be True or False"),
    ({"gradient_checkpointing": "true"}, "`gradient_checkpointing`='true' must be True or False"),
    ({"shuffle_dataset": "false"}, "`shuffle_dataset`='false' must be True or False or None"),
    ({"remove_unused_columns": "false"}, "`remove_unused_columns`='false' must be True or False"),
    ({"hub_private_repo": "no"}, "`hub_private_repo`='no' must be True or False or None"),
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
    ({"lora_sync": 1}, "`lora_sync`=1 must be a string or None"),
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
    ({**VLLM, "vllm_engine_kwargs": "{eager}"}, "`vllm_engine_kwargs`='{eager}' is not a JSON object"),
    ({"model_init_kwargs": "{dtype"}, "`model_init_kwargs`='{dtype' is not a JSON object"),
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
    (
        {"max_completion_length": None, "loss_type": "dr_grpo"},
        "`max_completion_length`=None with `loss_type`='dr_grpo', which divides the loss by that length",
    ),
    ({"rollout_precision": "auto"}, "`trl-quant choose MODEL --config run.yaml --write run.yaml` measures"),
    ({**VLLM, "rollout_precision": "auto"}, "name the precision that its checkpoints record"),
    ({"max_completion_length": 2.5}, "`max_completion_length`=2.5 must be an integer"),
    ({"vllm_gpu_memory_utilization": 5.0}, "`vllm_gpu_memory_utilization`=5.0 is out of range. It must be <= 1.0"),
    ({**VLLM, "vllm_model_impl": "vlm"}, "`vllm_model_impl`='vlm' is unknown. Allowed: 'vllm', 'transformers', 'auto'"),
    ({**VLLM, "vllm_max_model_length": 512}, "`vllm_max_model_length`=512 leaves no room for a prompt"),
    ({"num_iterations": 0}, "`num_iterations`=0 is out of range"),
    ({"steps_per_generation": 0}, "`generation_batch_size`=0 is out of range"),
    ({"learning_rate": -1e-6}, "`learning_rate`=-1e-06 is out of range"),
    ({"learning_rate": float("nan")}, "`learning_rate`=nan must be a finite number"),
    ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps`=0 is out of range. It must be >= 1"),
    ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size`=0 is out of range. It must be >= 1"),
    ({"max_steps": 0}, "`max_steps`=0 would still train one step"),
    ({"num_train_epochs": 0}, "`num_train_epochs`=0 is out of range. It must be > 0"),
    ({"num_generations_eval": 0}, "`num_generations_eval`=0 is out of range. It must be >= 1"),
    ({"delta": -1.0}, "`delta`=-1.0 is out of range. It must be > 0"),
    ({"top_entropy_quantile": -0.5}, "`top_entropy_quantile`=-0.5 is out of range. It must be >= 0"),
    ({"top_entropy_quantile": 1.5}, "`top_entropy_quantile`=1.5 is out of range. It must be <= 1"),
    ({"ref_model_mixup_alpha": 7.0}, "`ref_model_mixup_alpha`=7.0 is out of range. It must be <= 1"),
    ({"ref_model_mixup_alpha": "x"}, "`ref_model_mixup_alpha`='x' must be a finite number"),
    ({"max_grad_norm": -1.0}, "`max_grad_norm`=-1.0 is out of range. It must be >= 0"),
    ({"max_grad_norm": None}, "`max_grad_norm`=None must be a finite number"),
    (
        {"lr_scheduler_type": "cosine_with_min_lr"},
        "`lr_scheduler_kwargs`=None: One of min_lr or min_lr_rate should be set",
    ),
    (
        {"lr_scheduler_kwargs": {"min_lr": 1e-7}},
        "`lr_scheduler_kwargs`={'min_lr': 1e-07}: get_linear_schedule_with_warmup() got an unexpected keyword",
    ),
    (
        {"gradient_checkpointing_kwargs": {"use_reentant": False}},
        "`gradient_checkpointing_kwargs`={'use_reentant': False}: clone() got an unexpected keyword argument",
    ),
    ({"gradient_checkpointing_kwargs": "no"}, "`gradient_checkpointing_kwargs`='no' must be a dict (or a JSON object)"),
    ({"lr_scheduler_kwargs": 3}, "`lr_scheduler_kwargs`=3 must be a dict (or a JSON object) or None"),
    ({"weight_decay": -0.1}, "`weight_decay`=-0.1 is out of range. It must be >= 0"),
    ({"warmup_steps": float("nan")}, "`warmup_steps`=nan must be a finite number"),
    ({"adam_beta2": 1.5}, "`adam_beta2`=1.5 is out of range. It must be <= 1"),
    ({"adam_epsilon": "1e-8"}, "`adam_epsilon`='1e-8' must be a finite number"),
    ({"seed": -1}, "`seed`=-1 is out of range. It must be >= 0"),
    ({"seed": 2.5}, "`seed`=2.5 must be an integer"),
    ({"steps_per_generation": "4"}, "`steps_per_generation`='4' must be an integer or None"),
    ({"per_device_eval_batch_size": 0}, "`per_device_eval_batch_size`=0 is out of range"),
    ({"max_tool_calling_iterations": -1}, "`max_tool_calling_iterations`=-1 is out of range. It must be >= 0"),
    ({"off_policy_mask_threshold": float("nan")}, "`off_policy_mask_threshold`=nan must be a finite number"),
    ({"off_policy_mask_threshold": -0.5}, "`off_policy_mask_threshold`=-0.5 is out of range. It must be > 0"),
    ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "`sapo_temperature_neg`=0.0 is out of range. It must be > 0"),
    ({"loss_type": "vespo", "vespo_k_pos": float("nan")}, "`vespo_k_pos`=nan must be a finite number"),
    ({"loss_type": "vespo", "vespo_lambda_neg": -1.0}, "`vespo_lambda_neg`=-1.0 is out of range. It must be >= 0"),
    ({"entropy_coef": float("nan")}, "`entropy_coef`=nan must be a finite number"),
    ({"use_adaptive_entropy": True, "entropy_target": -1.0}, "`entropy_target`=-1.0 is out of range"),
    ({"beta": float("nan")}, "`beta`=nan must be a finite number"),
    ({"epsilon": "0.2"}, "`epsilon`='0.2' must be a finite number"),
    ({"epsilon": -0.2}, "`epsilon`=-0.2 is out of range"),
    ({"epsilon_high": -0.1}, "`epsilon_high`=-0.1 is out of range. It must be >= 0"),
    ({"epsilon_high": "0.3"}, "`epsilon_high`='0.3' must be a finite number or None"),
    ({"top_k": -2}, "`top_k`=-2 is out of range. It must be >= -1"),
    ({"top_k": 2.5}, "`top_k`=2.5 must be an integer"),
    ({"pad_to_multiple_of": 0}, "`pad_to_multiple_of`=0 is out of range. It must be >= 1"),
    ({"pad_to_multiple_of": "-8"}, "`pad_to_multiple_of`=-8 is out of range"),
    ({"pad_to_multiple_of": 2.5}, "`pad_to_multiple_of`=2.5 must be an integer or a string or None"),
    ({**INT8, "cache_implementation": "nonsense"}, "`cache_implementation`='nonsense' is unknown. Allowed: 'static'"),
    (
        {**INT8, "cache_implementation": "paged"},
        "`cache_implementation`='paged' is unknown",
    ),  # it has no log-probabilities
    (
        {**INT8, "generation_kwargs": {"cache_implementation": "nonsense"}},
        "`cache_implementation`='nonsense' is unknown",
    ),
    ({**VLLM, "cache_implementation": "static"}, "`cache_implementation`='static' acts only with transformers' `gen"),
    ({"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 0}, "`ref_model_sync_steps`=0 is out of range"),
    ({"ref_model_mixup_alpha": 0.1}, "`ref_model_mixup_alpha`=0.1 acts only with `sync_ref_model=True`"),
    ({"ref_model_sync_steps": 2}, "`ref_model_sync_steps`=2 acts only with `sync_ref_model=True`"),
    (
        {"transformers_continuous_batching_config": {"block_size": 8}},
        "acts only with `use_transformers_continuous_batching=True`",
    ),
    ({"sync_ref_model": True}, "`sync_ref_model`=True with `beta`=0.0: without a KL term there is no reference model"),
    ({"sync_ref_model": True, **INT8}, "`sync_ref_model`=True with `beta`=0.0"),
    ({"model_init_kwargs": "x"}, "`model_init_kwargs`='x' must be a dict (or a JSON object) or None"),
    ({"chat_template_kwargs": 3}, "`chat_template_kwargs`=3 must be a dict (or a JSON object) or None"),
    ({"loss_type": "ppo"}, "`loss_type`='ppo' is unknown. Allowed: 'grpo'"),
    ({"importance_sampling_level": "sequenc"}, "`importance_sampling_level`='sequenc' is unknown. Allowed: 'token'"),
    ({"importance_sampling_level": None}, "`importance_sampling_level`=None must be a string"),
    (
        {"multi_objective_aggregation": "gdpo"},
        "`multi_objective_aggregation`='gdpo' is unknown. Allowed: 'sum_then_normalize', 'normalize_then_sum'",
    ),
    (
        {"use_vllm": True, "vllm_importance_sampling_mode": "truncate"},
        "`vllm_importance_sampling_mode`='truncate' is unknown. Allowed: 'token_truncate'",
    ),
    (
        {"use_vllm": True, "loss_type": "vespo"},
        "`vllm_importance_sampling_mode`='sequence_mask' with `loss_type`='vespo', for which TRL's own correction",
    ),
    ({**INT8, "is_correction": "trl", "loss_type": "vespo"}, "Use 'token_truncate' or 'token_mask', or another `is_co"),
    ({"scale_rewards": "std"}, "`scale_rewards`='std' is unknown. Allowed: 'group', 'batch', 'none'"),
    ({"lora_sync": "adapter"}, "`lora_sync`='adapter' acts only with a `rollout_precision`"),
    ({"use_vllm": True, "vllm_sleep_level": 1}, "`vllm_sleep_level`=1 acts only with a `rollout_precision`"),
    (
        {"use_vllm": True, "vllm_engine_kwargs": {"enforce_eager": True}},
        "`vllm_engine_kwargs`={'enforce_eager': True} acts only with a `rollout_precision`",
    ),
    ({**INT8, "vllm_sleep_level": 1}, "`vllm_sleep_level`=1 acts only with vLLM, and `use_vllm=False`"),
    ({**INT8, "vllm_max_model_length": 513}, "`vllm_max_model_length`=513 acts only with vLLM, and `use_vllm=False`"),
    ({**VLLM, "vllm_mode": "server", "vllm_sleep_level": 1}, "`vllm_sleep_level`=1 acts only with `vllm_mode='coloc"),
    (
        {**INT8, "vllm_sleep_level": 1, "lora_sync": "adapter"},
        "`vllm_sleep_level`=1 and `lora_sync`='adapter' acts only with vLLM",
    ),
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
    {"epsilon_high": 0.0},
    {"weight_decay": 0.0, "warmup_steps": 0.1, "adam_beta1": 0.0, "adam_epsilon": 0, "seed": 0},
    {"entropy_coef": -0.1, "off_policy_mask_threshold": 0.5, "max_tool_calling_iterations": 0},
    {"steps_per_generation": 2, "off_policy_mask_threshold": None, "max_tool_calling_iterations": None},
    {**INT8, "max_completion_length": None},
    {**VLLM, "max_completion_length": None, "vllm_max_model_length": 5},
    {"max_completion_length": 1, "loss_type": "dr_grpo"},
    {**INT8, "cache_implementation": "static", "generation_kwargs": {"cache_implementation": "dynamic"}},
    {**VLLM, "cache_implementation": None},
    {"epsilon_high": None, "top_k": -1, "pad_to_multiple_of": None},
    {"epsilon_high": 5.0, "loss_type": "cispo"},  # the ratio's cap itself
    {"pad_to_multiple_of": 1, "sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 1},
    {"pad_to_multiple_of": "auto", "chat_template_kwargs": '{"a": 1}'},
    {"pad_to_multiple_of": "8", "fsdp_config": None, "lr_scheduler_kwargs": "{}"},
    {"loss_type": "vespo"},
    {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
    {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_correction": False},
    {"loss_type": "vespo", **INT8},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}},
    {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"gradient_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False}},
    {"importance_sampling_level": "sequence", "multi_objective_aggregation": "normalize_then_sum"},
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
    {"scale_rewards": False},
    {"shuffle_dataset": None, "remove_unused_columns": False, "hub_private_repo": None},
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


@pytest.mark.parametrize("config_class", [QuantGRPOConfig, QuantRLOOConfig, QuantDistillationConfig])
@pytest.mark.parametrize("others", [INT8, {"train_precision": "int8"}, {**VLLM, "vllm_mode": "server"}], ids=str)
def test_a_default_that_follows_from_another_field_is_not_named(config_class, others):
    """`lora_sync='adapter'` sets `vllm_sleep_level=1`, which the user did not."""
    with pytest.raises(ValueError, match=r"^`lora_sync`='adapter' acts only with "):
        build(config_class, lora_sync="adapter", **others)


def test_a_plain_config_of_trl_is_checked_as_well():
    refused(lambda: QuantGRPOConfig.from_grpo(build(GRPOConfig, temperature=0.0)), "`temperature`=0.0")
    assert QuantGRPOConfig.from_grpo(build(GRPOConfig, temperature=0.7)).temperature == 0.7


def test_a_wrong_value_is_named_before_a_fault_of_this_machine(monkeypatch):
    """Also while "auto", which TRL resolves on a machine that has all, is still a string."""
    assert build(pad_to_multiple_of="auto").pad_to_multiple_of is None

    def lacks(args):
        raise ValueError("this machine has no GPU")

    monkeypatch.setattr(GRPOConfig, "__post_init__", lacks)
    refused(lambda: build(pad_to_multiple_of="auto"), "this machine has no GPU")
    refused(lambda: build(pad_to_multiple_of="auto", epsilon_high=-1.0), "`epsilon_high`=-1.0 is out of range")


def test_a_config_of_another_trainer_is_refused():
    refused(lambda: QuantGRPOConfig.from_grpo(build(SFTConfig)), "`args` is a SFTConfig", "`GRPOConfig`")


# What needs the data


@pytest.mark.parametrize(("data", "says"), REFUSED_DATA, ids=[says for _, says in REFUSED_DATA])
def test_bad_data_is_refused(data, says):
    refused(lambda: check(train_dataset=data), says)


@pytest.mark.parametrize("data", ACCEPTED_DATA, ids=range(len(ACCEPTED_DATA)))
def test_good_data_is_accepted(data):
    check(train_dataset=data, eval_dataset=data)


def test_a_stream_is_accepted_and_not_read():
    def rows():
        raise AssertionError("the stream was read")

    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 1}
    check(train_dataset=IterableDataset.from_generator(rows), args=build(**settings))
    dispatched = build(**settings, accelerator_config={"dispatch_batches": True})
    refused(lambda: check(train_dataset=STREAM, args=dispatched), "Iterable datasets require `dispatch_batches=False`")


def test_data_for_evaluation():
    refused(lambda: check(eval_dataset=prompts()), "`eval_dataset` is empty")
    refused(lambda: check(eval_dataset={"hard": prompts("a", None)}), "`eval_dataset['hard']`: the prompt of row 1 is")
    check(eval_dataset={"hard": prompts("a"), "streamed": STREAM})
    refused(lambda: check(eval_dataset=[{"prompt": "a"}]), "`eval_dataset` is a list. It must be a `datasets.Dataset`")
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    evaluating = build(**sizes, eval_strategy="steps", eval_steps=1)
    refused(lambda: check(args=evaluating), "`eval_strategy`='steps' needs an `eval_dataset`, and there is none")
    check(args=evaluating, eval_dataset=prompts("a"))


class Environment:
    def reset(self, **kwargs): ...


def note() -> str:
    """Takes a note."""


def test_an_environment_may_own_the_prompts_and_the_reward():
    check(train_dataset=prompts([said("user", "")]), environment_factory=Environment, reward_funcs=None)
    without_prompts = Dataset.from_dict({"task": ["a"]})
    check(train_dataset=without_prompts, environment_factory=Environment, reward_funcs=None)
    refused(lambda: check(train_dataset=without_prompts), "a column 'prompt' is needed")


def test_reward_models():
    """Also where rewards may come from environments."""
    named = {"reward_funcs": [spread, "gsm8k"]}
    asynchronous = {"args": build(QuantAsyncGRPOConfig, use_vllm=False, num_generations=4, **INT8)}
    talk = {"environment_factory": Environment, "train_dataset": prompts([said("user", "1+1=")])}
    for given in ({}, talk):
        refused(lambda given=given: check(**named, **given), "`reward_funcs`='gsm8k' is the command line's name")
        for model in (tiny_model(), "some/model"):
            models = {"reward_funcs": [spread, model]}
            refused(lambda given=given, models=models: check(**models, **asynchronous, **given), "has a reward model")
    check(reward_funcs=[spread, tiny_model()])


def test_turns_need_a_length():
    """TRL compares the length of a completion with it after each turn, whoever samples."""
    settings = {"num_generations": 4, "per_device_train_batch_size": 4}
    for precision in ({}, INT8):
        without, with_one = (build(**precision, **settings, max_completion_length=length) for length in (None, 8))
        check(model=tiny_model(), args=without)
        for given in ({"tools": [note]}, {"environment_factory": Environment}):
            texts = {"model": tiny_model(), "args": with_one, **given}
            refused(lambda texts=texts: check(**texts), "`train_dataset` has texts as prompts", "must be conversations")
            given |= {"train_dataset": prompts([said("user", "1+1=")])}
            texts |= given | {"eval_dataset": {"hard": prompts("1+1=")}}
            refused(lambda texts=texts: check(**texts), "`eval_dataset['hard']` has texts as prompts")
            check(model=tiny_model(), args=with_one, **given)
            says = f"`{next(iter(given))}` with `max_completion_length`=None: TRL ends the turns of a completion at"
            refused(lambda args=without, given=given: check(model=tiny_model(), args=args, **given), says)


def test_too_few_prompts_for_one_generation():
    args = build(num_generations=4, per_device_train_batch_size=8)
    refused(lambda: check(train_dataset=prompts("a"), args=args), "has 1 prompts", "one generation takes, 2")
    check(train_dataset=prompts("a", "b"), args=args)
    asynchronous = build(QuantAsyncGRPOConfig, use_vllm=False, num_generations=4, per_device_train_batch_size=8, **INT8)
    check(train_dataset=prompts("a"), args=asynchronous)  # its thread reads them again


def without_room(completions):
    return [0.0] * len(completions)


def with_answer(completions, answer, **kwargs):
    return [0.0] * len(completions)


REFUSED_REWARDS = [
    (os.path, "is a module. It must be a function, a model or a list"),
    (3, "`reward_funcs`=3 is a int"),
    ("gsm8k", "Pass the function `trl_quant.tasks.gsm8k_reward`."),
    (without_room, "`reward_funcs`: without_room(completions) cannot be called as a reward: got an unexpected keyword"),
    (with_answer, "`reward_funcs`: with_answer(completions, answer, **kwargs) cannot be called as a reward: missing"),
    (None, "No reward source provided. Pass `reward_funcs`, or an `environment_factory` whose environment defines a"),
    ([], "`get_reward` method. `reward_funcs`=[] must be a function, a model or a list of them"),
    (os.getcwd, "`reward_funcs`: getcwd() cannot be called as a reward"),
    ([spread, os.path], "is a module. It must be a function, a model or a list"),
]


@pytest.mark.parametrize(("reward", "says"), REFUSED_REWARDS, ids=[says for _, says in REFUSED_REWARDS])
def test_what_is_no_reward_is_refused(reward, says):
    refused(lambda: check(reward_funcs=reward), says)


REFUSED_TRUTHS = [  # a reward of ours, and columns that it can compare with nowhere
    ("gsm8k", {"answer": ["seven", "3 or 4"]}, "gsm8k_reward can compare with none of the first"),
    ("arithmetic", {"answer": [None, "1 234"]}, "One has answer='1 234'"),
    ("countdown", {"nums": [["x"], ["y"]], "target": ["7", "7"]}, "One has nums=['x'], target='7'"),
    ("countdown", {"nums": [["3"], ["4"]], "target": ["seven", None]}, "target='seven'"),
    ("sudoku", {"puzzle": ["1 2 3 4", "5" * 16]}, "One has puzzle='1 2 3 4'"),
    ("strict_math", {"answer": ["", " "]}, "strict_math_reward can compare with none"),
]
ACCEPTED_TRUTHS = [
    ("gsm8k", {"answer": ["seven", "7"]}),
    ("gsm8k", {"answer": [None, None]}),  # another reward's rows
    ("countdown", {"nums": ["3 4", "3 4"], "target": ["7", "7.0"]}),
    ("sudoku", {"puzzle": ["1__4_41__14_4__1"] * 2}),
    ("strict_math", {"answer": [None, r"\text{Evelyn}"]}),
]


@pytest.mark.parametrize(("task", "columns", "says"), REFUSED_TRUTHS, ids=[says for *_, says in REFUSED_TRUTHS])
def test_a_ground_truth_that_cannot_be_read_is_refused(task, columns, says):
    data = prompts("a", "b", **columns)
    refused(lambda: check(train_dataset=data, reward_funcs=[spread, REWARDS[task]]), says)
    check(train_dataset=data, reward_funcs=lambda completions, **kwargs: [0.0] * len(completions))


@pytest.mark.parametrize(("task", "columns"), ACCEPTED_TRUTHS, ids=str)
def test_a_ground_truth_that_can_be_read_is_accepted(task, columns):
    check(train_dataset=prompts("a", "b", **columns), reward_funcs=REWARDS[task])


@pytest.mark.parametrize("weights", [[1.0, 2.0], [float("nan")], ["x"], [], 1.0], ids=str)
@pytest.mark.parametrize("config_class", [QuantGRPOConfig, QuantRLOOConfig])
def test_weights_that_do_not_fit_the_rewards_are_refused(config_class, weights):
    given = {"num_generations": 4, "per_device_train_batch_size": 4, "beta": 0.0}
    says = f"`reward_weights`={weights!r} must be a list of 1 finite number, for the 1 reward."
    refused(lambda: check(model=tiny_model(), args=build(config_class, reward_weights=weights, **given)), says)
    args = build(config_class, reward_weights=[1, 0.5], **given)
    check(model=tiny_model(), args=args, reward_funcs=[spread, spread])
    refused(lambda: check(model=tiny_model(), args=args), "`reward_weights`=[1, 0.5] must be a list of 1 finite number")


def test_a_column_that_is_removed_is_missing():
    sizes, data = {"num_generations": 4, "per_device_train_batch_size": 4}, prompts("a", answer=["b"])
    removing = build(**sizes, remove_unused_columns=True)
    refused(
        lambda: check(reward_funcs=with_answer, train_dataset=data, args=removing),
        "`remove_unused_columns`=True removes a column that a reward reads",
        "cannot be called as a reward: missing a required argument: 'answer'",
    )
    check(reward_funcs=with_answer, train_dataset=data)
    check(train_dataset=data, args=removing)  # this reward reads no column


def test_a_column_with_a_name_of_trls_is_refused():
    for name in ("prompts", "completions"):
        refused(lambda name=name: check(train_dataset=prompts("a", **{name: ["b"]})), f"has a column {name!r}")


def test_a_reward_model_whose_experts_transformers_misreads_is_refused(tmp_path):
    mixture = save_tiny(tmp_path / "mixture", "qwen3_moe", tied=False)
    stored = {name: str(quantize_checkpoint(mixture, tmp_path / name, name)) for name in ("nvfp4", "fp8")}
    refused(lambda: check(reward_funcs=[spread, stored["nvfp4"]]), "a mixture of experts stored in 'nvfp4'")
    check(reward_funcs=[spread, stored["fp8"]])
    loaded = tiny_model("qwen3_moe")
    check(reward_funcs=loaded)
    loaded.config.quantization_config = quantization_config("nvfp4", [])
    refused(lambda: check(reward_funcs=loaded), "a mixture of experts stored in 'nvfp4'")


def test_rewards_are_accepted(tmp_path):
    async def awaited(completions, **kwargs):
        return [0.0] * len(completions)

    check(reward_funcs=[spread, awaited, torch.nn.Linear(1, 1), str(tmp_path)])
    check(reward_funcs=save_tiny(tmp_path / "mixture", "qwen3_moe"))
    check(reward_funcs=with_answer, train_dataset=prompts("a", answer=["b"]))
    check(train_dataset=prompts("a", completion=["b"], completion_ids=[[1]]))  # which TRL does not pass on
    check(reward_funcs=with_answer, rollout_func=lambda prompts, trainer: {})  # which may bring the answer


def test_a_processor_that_trl_will_load_is_known_before(tmp_path):
    path = save_tiny(tmp_path / "model")
    args = build(num_generations=4, per_device_train_batch_size=4, pack_sequences=True)
    check(model=path, args=args)
    Blip2Processor(BlipImageProcessorPil(), tiny_tokenizer()).save_pretrained(path)
    refused(lambda: check(model=path, args=args), "`pack_sequences`=True cannot act: the processor makes images")
    check(model=path, args=args, processing_class=tiny_tokenizer())  # the one that is given counts
