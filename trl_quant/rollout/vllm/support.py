"""Checks, before anything is loaded, that vLLM can run a policy here, and builds the arguments for a precision."""

import dataclasses
import logging
import os
import re
from functools import partial
from importlib.util import find_spec

import torch
from accelerate.utils import is_peft_model
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from ...formats import FORMATS
from ...formats.fp8 import BLOCK
from ...layers.products import follow_int8
from ...layers.quantizers import follow_groups
from ...models.families import GATES
from ...models.linears import gates_of, sampled_linears, unquantized_linears
from ...models.names import clean_name
from ...models.routers import routers
from ...precisions import PRECISIONS, InVLLM, in_vllm, with_experts
from ...storage.layout import quantization_config


logger = logging.getLogger(__name__)

VLLM_VERSIONS = ("0.26", "0.34")  # at least, below
EXPERTS_ON_CPU = Version("0.31")  # the first version whose mixtures were shown to take new weights on a CPU
RANK_ON_CPU = "trl_quant.rollout.vllm.cpu_ranks.RankOnCPU"  # vLLM's `worker_cls` where CPU ranks form one engine
# LoRA's initializations that do not change the base
KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")

# vLLM's arguments that have a field of their own or that the engine must set -> what sets them
RESERVED = {
    "quantization": "`rollout_precision`",
    "quantization_config": "`rollout_precision`",
    "model_loader_extra_config": "`rollout_precision`",
    "tensor_parallel_size": "`vllm_tensor_parallel_size`",
    "gpu_memory_utilization": "`vllm_gpu_memory_utilization`",
    "max_model_len": "`vllm_max_model_length`",
    "model_impl": "`vllm_model_impl`",
    "trust_remote_code": "`trust_remote_code`",
    "enable_sleep_mode": "`vllm_enable_sleep_mode`",
    "enable_lora": "`lora_sync='adapter'`",
    "distributed_executor_backend": "the trainer, which launches the workers",
    "logprobs_mode": "the trainer, which needs `'processed_logprobs'`",
    "return_sampling_mask": "`truncation_replay`",
    "seed": "the trainer's `seed`",
}

# Sampling parameters that users cannot set, and why
SET_BY_TRL = {
    "n": "TRL samples `num_generations` completions of each prompt",
    "logprobs": "the trainer needs only the log-probability of the drawn token",
}


def require_nccl(communicator, process: str) -> None:
    """
    Checks one end of the transfer of weights to a server.

    vLLM disables a communicator for which it finds no NCCL, or an older one than it needs (0.33: 2.29.7), and says
    nothing. Both ends then skip every broadcast, and the server fills its model with empty memory.

    Args:
        communicator ([`~vllm.distributed.device_communicators.pynccl.PyNcclCommunicator`]): What vLLM built there.
        process (`str`): Where that is, for the message.

    Raises:
        `RuntimeError`: vLLM has disabled the communicator.
    """
    if communicator.disabled:
        raise RuntimeError(
            f"vLLM cannot send weights over NCCL: it has disabled its communicator {process}. It does so if "
            "`VLLM_DISABLE_PYNCCL` is set, or if the NCCL that it finds is older than it needs (vLLM 0.33 needs "
            "2.29.7). Install the `nvidia-nccl` package that this vLLM's torch requires, or set `VLLM_NCCL_SO_PATH`."
        )


def is_vllm_available() -> bool:
    """Whether vLLM is installed, in any version."""
    return find_spec("vllm") is not None


def vllm_version() -> Version:
    """Returns the version of the installed vLLM, without what follows a `+`."""
    from vllm import __version__

    return Version(__version__.partition("+")[0])


def check_version() -> None:
    """Raises `ImportError` if vLLM is missing or its version was not tested."""
    if not is_vllm_available():
        raise ImportError(
            "`use_vllm`=True, but vLLM is not installed. Install `trl_quant[vllm]` (CUDA) or `trl_quant[cpu]`, or set "
            "`use_vllm=False` to sample from the embedded engine."
        )
    lowest, above = map(Version, VLLM_VERSIONS)
    if not lowest <= vllm_version() < above:
        raise ImportError(
            f"vLLM {vllm_version()} is installed; quantized rollouts need vLLM >= {lowest}, < {above}, whose weight "
            "reloading was tested. Install `trl_quant[vllm]` (CUDA) or `trl_quant[cpu]`, or set `use_vllm=False` for "
            "the embedded engine."
        )


def runnable_precisions() -> list[str]:
    """
    Returns the precisions that vLLM runs on this device, from the nearest to the policy to the farthest.

    Raises:
        `ImportError`: vLLM is missing, or its version was not tested.
        `ValueError`: vLLM does not run here.
    """
    instead = "The embedded engine (`use_vllm=False`) computes any precision here, and is equally slow in all."
    if not is_vllm_available():
        raise ImportError(
            "vLLM is not installed, and only its engines sample faster in some precisions than in others. Install "
            f"`trl_quant[vllm]` (CUDA) or `trl_quant[cpu]`. {instead}"
        )
    check_version()
    reasons = supported_precisions()
    runnable = [name for name, missing in reasons.items() if missing is None]
    if not runnable:
        missing = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"vLLM runs no precision on this machine ({missing}). {instead}")
    return runnable


def engine_arguments() -> set[str]:
    """Returns the names of vLLM's arguments; empty if vLLM is not installed."""
    if not is_vllm_available():
        return set()
    from vllm import EngineArgs

    return {field.name for field in dataclasses.fields(EngineArgs)}


def sampling_parameters(mode: str) -> set[str]:
    """Returns the names that `generation_kwargs` may have in a mode of vLLM; empty if vLLM is not installed."""
    if not is_vllm_available():
        return set()
    from vllm import SamplingParams

    known = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - SET_BY_TRL.keys()
    if mode == "server":
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        known = (known & CompletionRequest.model_fields.keys()) | {"vllm_xargs"}
    return known


def refused_by_vllm(generation_kwargs: dict, max_tokens: int) -> str | None:
    """Returns why vLLM does not sample with these parameters; `None` if it does, or if vLLM is not installed."""
    if not generation_kwargs or not is_vllm_available():
        return None
    from vllm import SamplingParams

    converted = ("structured_outputs", "vllm_xargs")  # TRL and the server turn these into objects first
    plain = {name: value for name, value in generation_kwargs.items() if name not in converted}
    try:
        SamplingParams(**{"max_tokens": max_tokens} | plain)
    except Exception as error:  # vLLM raises exceptions of its own classes
        return str(error)
    return None


def supported_precisions() -> dict[str, str | None]:
    """Maps each of vLLM's precisions to the reason why it does not run on this device, or to `None` if it runs."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {name: _missing_on_cpu(vllm) for name, vllm in in_vllm().items()}
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return {name: _missing_on_gpu(vllm, capability) for name, vllm in in_vllm().items()}


def _missing_on_cpu(vllm: InVLLM) -> str | None:
    """Returns the reason why vLLM does not run a precision on this CPU; `None` if it does."""
    if not vllm.cpu:
        return f"on a CPU vLLM runs only {', '.join(repr(name) for name, other in in_vllm().items() if other.cpu)}"
    if vllm.amx and not torch.cpu._is_amx_tile_supported():
        return "on a CPU it needs AMX, which this one lacks"
    return None


def _missing_on_gpu(vllm: InVLLM, capability: tuple[int, int]) -> str | None:
    """Returns the reason why vLLM does not run a precision on a GPU of this `capability`; `None` if it does."""
    if capability < vllm.capability:
        return f"{vllm.needs} needs compute capability {'.'.join(map(str, vllm.capability))}"
    if vllm.below is not None and capability >= vllm.below:
        return f"vLLM has no kernel for it from compute capability {'.'.join(map(str, vllm.below))} on"
    return None


def check_device(precision: str, sleeping: bool = False, otherwise: str = "use_vllm=False") -> None:
    """
    Raises `ImportError` if vLLM's version was not tested, and `ValueError` if vLLM cannot run the precision, or sleep,
    on this device. The message recommends the option `otherwise`, with which the embedded engine samples.
    """
    check_version()
    from vllm.platforms import current_platform

    reasons = supported_precisions()
    if reasons.get(precision) is not None:
        runnable = ", ".join(repr(name) for name, reason in reasons.items() if reason is None)
        raise ValueError(
            f"`rollout_precision`={precision!r} does not run in vLLM on this device: {reasons[precision]}. Here "
            f"vLLM runs {runnable or 'none'}; with `{otherwise}` the embedded engine runs any on any device."
        )
    if sleeping and current_platform.is_cpu():
        raise ValueError(
            "`vllm_enable_sleep_mode`=True, but vLLM has no sleep mode on a CPU. Leave it at False; a smaller "
            "`kv_cache_memory_bytes` in `vllm_engine_kwargs` saves memory."
        )


def check_experts_here(precision: str, otherwise: str = "use_vllm=False") -> None:
    """
    Raises `ValueError` if vLLM cannot run a mixture's experts in a precision on this device. The message recommends the
    option `otherwise`, with which the embedded engine samples.
    """
    if precision not in with_experts():
        raise ValueError(
            f"`rollout_precision`={precision!r} in vLLM, but the policy is a mixture of experts, and vLLM has no "
            f"kernel that multiplies experts as this precision says. Use one of {', '.join(map(repr, with_experts()))},"
            f" or `{otherwise}`, with which the embedded engine computes any."
        )
    if not is_vllm_available():
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        first = PRECISIONS[precision].vllm.experts_from
        if vllm_version() < Version(first):
            raise ValueError(
                f"`rollout_precision`={precision!r} in vLLM {vllm_version()}, but the policy is a mixture of experts, "
                f"whose inputs vLLM quantizes in this precision from {first} on. Install that, take another precision, "
                f"or set `{otherwise}` to sample from the embedded engine."
            )
        return
    if PRECISIONS[precision].format is not None:
        raise ValueError(
            f"`rollout_precision`={precision!r} in vLLM, but the policy is a mixture of experts, which vLLM was shown "
            f"to run on a CPU in 'bf16' alone. Use 'bf16', or `{otherwise}`, with which the embedded engine computes "
            "any precision."
        )
    if vllm_version() < EXPERTS_ON_CPU:
        raise ValueError(
            f"`rollout_precision`={precision!r} in vLLM {vllm_version()}, but the policy is a mixture of experts, of "
            f"which vLLM was shown to take new weights on a CPU from {EXPERTS_ON_CPU} on. Install that, or set "
            f"`{otherwise}` to sample from the embedded engine."
        )


def returns_routing_of(model: PreTrainedModel, arguments: dict) -> bool:
    """
    Whether vLLM, started with these `arguments`, returns the routing of this model: of a mixture of experts on a GPU,
    with its prefix cache and without speculation.
    """
    from vllm.platforms import current_platform

    fits = arguments.get("enable_prefix_caching") is not False and not arguments.get("speculative_config")
    return fits and bool(routers(model)) and not current_platform.is_cpu()


def check_returns_routing() -> None:
    """Raises `ValueError` on a CPU, where vLLM does not return the routing of a mixture of experts."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise ValueError(
            "vLLM returns the routing of experts from its second model runner, which needs a GPU. Set "
            "`use_vllm=False`, or leave the field unset."
        )


def check_returns_kept() -> None:
    """Raises `ValueError` if the installed vLLM, or its runner on this device, cannot return what truncation left."""
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    if not hasattr(EngineArgs, "return_sampling_mask") or current_platform.is_cpu():
        raise ValueError(
            "vLLM returns what truncation left from 0.28 on, from its second model runner, which needs a GPU. Set "
            "`use_vllm=False`, or leave the field unset."
        )


def multiply_as_given(precision: str) -> None:
    """
    Sets vLLM's environment variables so that engines that start in this process multiply the given codes and scales
    unchanged.

    Raises:
        `ValueError`: The user has set one of the variables to another value.
    """
    for name, value in PRECISIONS[precision].vllm.as_given.items():
        found = os.environ.setdefault(name, value)
        if found != value:
            raise ValueError(
                f"`{name}`={found!r} in the environment makes vLLM change the weights that the policy is trained with "
                f"(`train_precision`={precision!r}). Unset it, or set it to {value!r}."
            )


def compute_as_vllm(precision: str, device: torch.device) -> None:
    """
    Makes layers that train in `precision` compute as the installed vLLM does on a GPU. Where groups of values have a
    scale, versions of vLLM quantize inputs by different rules: see [`follow_groups`]. INT8 codes are multiplied by
    vLLM's function where it has one for this GPU: see [`follow_int8`].
    """
    fmt, vllm = FORMATS[PRECISIONS[precision].format], PRECISIONS[precision].vllm
    if fmt.grouped:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        follow_groups(partial(per_token_group_quant_fp8, group_size=BLOCK, use_ue8m0=False), device)
    if fmt.integers and _missing_on_gpu(vllm, torch.cuda.get_device_capability(device)) is None:
        from vllm import _custom_ops  # noqa: F401 - loads vLLM's operators

        follow_int8(getattr(torch.ops._C, "cutlass_scaled_mm", None))


def _class_in_vllm(architectures: list[str] | None, model_impl: str) -> type | None:
    """Returns vLLM's class of a model; `None` if vLLM runs transformers' model, with the policy's names, or none."""
    from vllm import ModelRegistry

    implemented = [name for name in architectures or [] if name in ModelRegistry.models]
    if not implemented or model_impl == "transformers":
        return None
    return ModelRegistry.models[implemented[0]].load_model_cls()


def check_architecture(config, model_impl: str) -> None:
    """Raises `ValueError` for a transformers config whose architecture vLLM does not implement, or cannot load."""
    architectures = getattr(config, "architectures", None)
    try:
        implemented = _class_in_vllm(architectures, model_impl)
    except ImportError as error:
        raise ValueError(
            f"vLLM cannot load its {architectures[0]}: {error}. Install it, or set `use_vllm=False`."
        ) from error
    if implemented is None and model_impl != "transformers":
        raise ValueError(
            f"vLLM does not know the architecture {architectures or type(config).__name__}. Set `use_vllm=False` to "
            "sample from the embedded engine, which runs any decoder of transformers, or "
            "`vllm_model_impl='transformers'`."
        )


def outside_decoder(policy: PreTrainedModel, architectures: list[str], model_impl: str) -> list[str]:
    """
    Returns patterns that tell vLLM which layers not to quantize: all except those of the policy's decoder, and the
    gates of linear attention in it. The patterns use vLLM's own names, because vLLM may have another name for a vision
    tower. The list is empty for a language model without such gates, whose head vLLM leaves unquantized anyway.

    Args:
        policy (`PreTrainedModel`): The policy, with or without memory for its weights.
        architectures (`list[str]`): The architectures of the checkpoint that vLLM starts on.
        model_impl (`str`): vLLM's argument of that name.
    """
    if not unquantized_linears(policy, head=False):
        return []
    from .adapter import decoder_in_vllm

    model = _class_in_vllm(architectures, model_impl)
    layers = sampled_linears(policy).values()
    decoder = decoder_in_vllm(model, [layer.name for layer in layers if not layer.holds_experts])
    return [f"re:(?!{re.escape(decoder)})", *([GATES] if gates_of(policy) else [])]


def layout_arguments(
    format: str, ignore: list[str], outside: list[str], device: torch.device, prepared: bool, given: dict
) -> dict:
    """
    Returns the arguments with which vLLM builds a model in compressed-tensors' layout.

    Args:
        format (`str`): Key of `FORMATS`.
        ignore (`list[str]`): Names, in the checkpoint, of linear layers that stay unquantized.
        outside (`list[str]`): Patterns of further layers that stay unquantized, from [`outside_decoder`].
        device (`torch.device`): The device on which the loader quantizes.
        prepared (`bool`): Whether vLLM starts on a checkpoint in that layout, and not on a 16-bit one.
        given (`dict`): The run's own arguments of vLLM.
    """
    arguments = {"quantization": None, "load_format": given.get("load_format", "trl_quant")}
    if not prepared:
        if arguments["load_format"] == "trl_quant":
            arguments["model_loader_extra_config"] = {"format": format, "ignore": ignore, "device": str(device)}
        arguments["hf_overrides"] = {
            "quantization_config": quantization_config(format, [*ignore, *outside]),
            **(given.get("hf_overrides") or {}),
        }
    return arguments


def adapter_arguments(model, given: dict) -> dict[str, dict[str, int]]:
    """
    Returns the arguments of the engine's loader that describe the model's adapter: `{"adapter": ranks}`, with the rank
    of each adapted layer by its clean name.

    Raises:
        `ValueError`: The model has no adapter, or one that the engine cannot hold beside the base.
    """
    instead = "Use `lora_sync='merge'`."
    if not is_peft_model(model):
        raise ValueError("`lora_sync`='adapter', but the model has no adapter: pass a `peft_config`, or use 'merge'.")
    if len(model.active_adapters) != 1:
        raise ValueError(f"`lora_sync`='adapter' takes one active adapter, not {model.active_adapters}. {instead}")
    (adapter,) = model.active_adapters
    config = model.peft_config[adapter]
    peft_type = getattr(config.peft_type, "value", config.peft_type)
    if peft_type != "LORA":
        raise ValueError(f"`lora_sync`='adapter' takes LoRA adapters, and this one is {peft_type}. {instead}")
    for field in ("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "target_parameters"):
        if getattr(config, field, None):
            raise ValueError(f"`lora_sync`='adapter': the engine does not run an adapter's `{field}`. {instead}")
    if config.bias != "none":
        raise ValueError(
            f"`lora_sync`='adapter': the engine does not run an adapter's `bias`={config.bias!r}. {instead}"
        )
    if config.init_lora_weights not in KEEPS_BASE:
        raise ValueError(
            f"`lora_sync`='adapter': `init_lora_weights`={config.init_lora_weights!r} changes the base, and the engine "
            f"has the base as it was saved. {instead}"
        )
    unused = [name for name in given if "lora" in name]
    if unused:
        raise ValueError(
            f"`vllm_engine_kwargs` has {unused}, which act only on vLLM's own adapters; `lora_sync`='adapter' does "
            "not use these. Leave them out."
        )
    base = model.get_base_model()
    layers = {layer.name for layer in sampled_linears(base).values() if not layer.is_expert}
    layers.update(gates_of(base))
    ranks = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer) or adapter not in layer.r:
            continue
        if clean_name(name) not in layers:
            raise ValueError(
                f"`lora_sync`='adapter' takes adapters of the decoder's linear layers, not `{name}`. {instead}"
            )
        if adapter in layer.lora_variant:
            variant = type(layer.lora_variant[adapter]).__name__
            raise ValueError(f"`lora_sync`='adapter': the engine does not run PEFT's `{variant}`. {instead}")
        ranks[clean_name(name)] = layer.r[adapter]
    return {"adapter": ranks}


def warn_of_two_copies(size: int, reason: str) -> None:
    """
    Warns that trainer and engine each hold a copy of the frozen base.

    Args:
        size (`int`): Bytes of the second copy.
        reason (`str`): Why they cannot share one.
    """
    logger.warning("Trainer and vLLM each hold a copy of the base, %.2f GiB more: %s.", size / 2**30, reason)
