"""Names that TRL and transformers gave up, with what is used instead: many scripts and answers on the web have them.

Python, argparse and TRL's parser say only that such a name is unknown.
"""

import inspect
from collections.abc import Iterable


_ACCELERATOR = "`accelerator_config`"
_ENGINE = "`vllm_engine_kwargs`"
# Earlier name -> what is used instead, in backticks, or a sentence
RENAMED = {
    # TRL
    "torch_dtype": "`dtype`",
    "tokenizer": "`processing_class`",
    "config": "`args`",
    "policy": "`model`",
    "reward_model": "`reward_funcs`",
    "value_model": "`value_model_name_or_path`",
    "ref_model": "`beta`: with one above 0, TRL loads the reference model itself",
    "dataset_text_field": "a column `prompt` in the dataset",
    "max_prompt_length": "TRL no longer shortens prompts: remove long ones from the dataset.",
    "max_new_tokens": "`max_completion_length`",
    "response_length": "`max_completion_length`",
    "kl_coef": "`beta`",
    "init_kl_coef": "`beta`",
    "cliprange": "`epsilon`",
    "rloo_k": "`num_generations`",
    "num_ppo_epochs": "`num_iterations`",
    "num_sample_generations": "`num_completions_to_print`",
    "wandb_log_unique_prompts": "`log_unique_prompts`",
    "use_liger_loss": "`use_liger_kernel`",
    "vllm_device": "`vllm_mode`",
    "vllm_dtype": "`dtype`",
    "vllm_max_model_len": "`vllm_max_model_length`",
    "vllm_enable_prefix_caching": _ENGINE,
    "vllm_init_kwargs": _ENGINE,
    "vllm_guided_decoding_regex": "`vllm_structured_outputs_regex`",
    # transformers
    "evaluation_strategy": "`eval_strategy`",
    "no_cuda": "`use_cpu`",
    "use_mps_device": "Leave it out: the device is found.",
    "warmup_ratio": "`warmup_steps`, which takes a share of the steps too, as a number below 1",
    "logging_dir": "Set the environment variable TENSORBOARD_LOGGING_DIR.",
    "overwrite_output_dir": "Leave it out: an `output_dir` may exist.",
    "save_safetensors": "Leave it out: checkpoints are always safetensors.",
    "group_by_length": "`train_sampling_strategy`",
    "per_gpu_train_batch_size": "`per_device_train_batch_size`",
    "per_gpu_eval_batch_size": "`per_device_eval_batch_size`",
    "push_to_hub_model_id": "`hub_model_id`",
    "push_to_hub_organization": "`hub_model_id`",
    "push_to_hub_token": "`hub_token`",
    "include_inputs_for_metrics": "`include_for_metrics`",
    "include_tokens_per_second": "`include_num_input_tokens_seen`",
    "dispatch_batches": _ACCELERATOR,
    "split_batches": _ACCELERATOR,
    "adafactor": "`optim`",
    "sharded_ddp": "`fsdp`",
    "fsdp_min_num_params": "`fsdp_config`",
    "fsdp_transformer_layer_cls_to_wrap": "`fsdp_config`",
    "torchdynamo": "`torch_compile_backend`",
    "fp16_backend": "`fp16`",
    "half_precision_backend": "`bf16`",
    "fp16_opt_level": "`fp16`",
    "tpu_metrics_debug": "`debug`",
    "tpu_num_cores": "Leave it out: accelerate starts the processes.",
    "past_index": "Leave it out.",
    "ray_scope": "Leave it out.",
    "jit_mode_eval": "Leave it out.",
    "use_ipex": "Leave it out.",
    "mp_parameters": "Leave it out.",
}


def earlier_name(name: str) -> str | None:
    """Says in a sentence what is used instead of an earlier name; `None` for any other name."""
    instead = RENAMED.get(name)
    if instead is None:
        return None
    return f"TRL and transformers gave up the name `{name}`. {instead if instead[0].isupper() else f'Use {instead}.'}"


def check_names(where: str, given: Iterable[str], known: Iterable[str] = ()) -> None:
    """
    Raises `ValueError` for the first earlier name among some arguments.

    Args:
        where (`str`): What takes the arguments.
        given (`Iterable[str]`): Their names.
        known (`Iterable[str]`, *optional*): Names that it takes.
    """
    for name in given:
        told = None if name in known else earlier_name(name)
        if told is not None:
            raise ValueError(f"{where}: {told}")


class CurrentNames:
    """Base of the classes whose constructors refuse earlier names of their arguments."""

    def __new__(cls, *args, **kwargs):
        check_names(cls.__name__, kwargs, inspect.signature(cls.__init__).parameters)
        return super().__new__(cls)
