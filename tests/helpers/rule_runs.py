"""Runs that break a rule of what may not go together, or none: settings, trainers' configs, policies and teachers."""

from types import SimpleNamespace

from peft import LoraConfig
from readers import save_reader
from tiny import SIZES, save_tiny, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, HeliumConfig

from trl_quant import (
    DiffusionGRPOConfig,
    QuantAsyncGRPOConfig,
    QuantDistillationConfig,
    QuantGRPOConfig,
    QuantPPOConfig,
    QuantRLOOConfig,
)
from trl_quant.storage.layout import quantization_config, quantize_checkpoint


INT8 = {"rollout_precision": "int8"}
VLLM = {**INT8, "use_vllm": True, "vllm_mode": "colocate"}
BF16_VLLM = {**VLLM, "rollout_precision": "bf16"}
SERVER = VLLM | {"vllm_mode": "server"}
TRLS_VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
DRAFTING = {"vllm_engine_kwargs": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}}
UNCACHED = {"vllm_engine_kwargs": {"enable_prefix_caching": False}}
EAGLE = {"method": "eagle3", "model": "a/head", "num_speculative_tokens": 2}
SYNTHETIC = {"num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
REPLAY = {"router_replay": True}
SCALED_STEPS = {"ess_step_scaling": True}
EXACT = {"train_precision": "int8", "exact_rollouts": True}
LORA = {"peft_config": LoraConfig(target_modules=["q_proj"])}
ZERO3 = {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}
THREAD = {**INT8, "use_vllm": False}
PROXIMAL = {"proximal_pass": True, "weight_sync_steps": 2}
ASYNC, GRPO, RLOO, PPO, DISTILLATION, DIFFUSION = (
    QuantAsyncGRPOConfig,
    QuantGRPOConfig,
    QuantRLOOConfig,
    QuantPPOConfig,
    QuantDistillationConfig,
    DiffusionGRPOConfig,
)


MASK = {DIFFUSION: {"mask_token_id": 3}, ASYNC: {"use_vllm": False}}


class PlainGRPOConfig(QuantGRPOConfig):
    """Of a trainer whose loss takes no weights, and which has no dynamic sampling."""

    has_correction = has_dynamic_sampling = False


def build(config_class, **given):
    extra = {"num_generations": 1} if config_class is QuantPPOConfig else {}
    return config_class(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **extra | given)


def tiny(family="qwen3", **changes):
    """A policy in memory, whose config then has other values."""

    def make(directory):
        model = tiny_model(family)
        vars(model.config).update(changes)
        return model

    return make


def saved(directory):
    return save_tiny(directory / "model")


def saved_mixture(directory):
    return save_tiny(directory / "model", "mixtral")


def changed(directory):
    """A policy that differs from the checkpoint it was loaded from."""
    model = tiny_model()
    model.config.name_or_path, model.config.rms_norm_eps = saved(directory), 0.25
    return model


def without_tower(directory):
    """A policy of text alone, from a checkpoint with a vision tower."""
    return AutoModelForCausalLM.from_pretrained(save_reader(directory / "published", "qwen3_5"))


def lost(directory):
    """A policy whose checkpoint is gone."""
    model = tiny_model()
    model.config.name_or_path = str(directory / "gone")
    return model


def from_disk(directory):
    model = tiny_model()
    model.config.name_or_path = saved(directory)
    return model


def outside(directory):
    """A policy of a family that is not in the table."""
    return AutoModelForCausalLM.from_config(HeliumConfig(**SIZES))


def bare(config, **changes):
    vars(config).update(changes)
    return lambda directory: SimpleNamespace(config=config, peft_config={})


def quantized_mixture(directory, kind="nvfp4"):
    path = save_tiny(directory / "teacher", "qwen3_moe", tied=False)
    return str(quantize_checkpoint(path, directory / f"teacher-{kind}", kind))


def teacher(family="qwen3", **changes):
    return lambda directory: {"teacher_model": tiny(family, **changes)(directory)}


def quantized(directory, kind="int8"):
    """A policy whose checkpoint says that it is quantized."""
    model = tiny_model()
    model.config.quantization_config = quantization_config(kind, [])
    model.config.name_or_path = str(directory / kind)
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(directory / kind)
    return model


def of_class(directory, name):
    model = from_disk(directory)
    config = AutoConfig.from_pretrained(model.config.name_or_path)
    config.architectures = [name]
    config.save_pretrained(model.config.name_or_path)
    return model


def names_another(directory):
    save_tiny(directory / "model")
    return tiny(rms_norm_eps=0.25)(directory)
