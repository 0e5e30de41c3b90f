"""Rules of an adapter: what it may change, where it fits into the policy, and how it reaches the sampler."""

import copy
import warnings
from functools import partial
from itertools import accumulate

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import check_target_module_exists

from ...models.families import HEAD
from ...models.linears import linears
from ...models.names import clean_name
from ...policy.adapters import INITIALIZATIONS, NOT_PLAIN
from ...precisions import unified_flows
from ...rollout.faults import NO_WEIGHTS, adapter_fault
from ..given import Given
from .rule import Rule, refusal


# Fields of an adapter and the values that they must have where it changes tensors and not modules
OF_TENSORS = {"lora_dropout": 0.0, "lora_bias": False, "fan_in_fan_out": False, "use_dora": False}


def _adapted_head(run: Given) -> str | None:
    """Returns the name of an output head to which `peft_config` adds an adapter."""
    config = run.peft_config
    if not isinstance(config, PeftConfig) or not getattr(config, "target_modules", None):
        return None
    return next((head for head in HEAD if check_target_module_exists(config, head)), None)


def _without_weights(run: Given) -> str | None:
    """Returns why an engine, which gets only weights, cannot sample with a learned prompt."""
    config = run.peft_config
    learns = getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False)
    return NO_WEIGHTS.format(type(config).__name__) if learns else None


def _is_more_than_product(run: Given) -> bool:
    """Whether an adapter changes a weight by more than a product of B and A."""
    config = run.peft_config
    further = any(getattr(config, name, False) for name in ("lora_dropout", "lora_bias", "use_dora"))
    return further or not isinstance(config, LoraConfig | None)


def _copied_base(run: Given) -> tuple[str, str] | None:
    """
    Returns the name in `modules_to_save` that copies a layer of a base in codes, which do not train, and that layer.
    """
    adapters = [run.peft_config] if run.peft_config is not None else run.model.peft_config.values()
    copied = [name for adapter in adapters for name in getattr(adapter, "modules_to_save", None) or ()]
    if not copied:
        return None
    policy = run.policy
    for place in linears(policy.get_base_model() if is_peft_model(policy) else policy):
        for path in accumulate(place.split("."), "{}.{}".format):  # PEFT copies a module by the end of its path
            found = next((name for name in copied if path.endswith(name)), None)
            if found is not None:
                return found, path
    return None


def _with_adapter(run: Given, **changed) -> PeftModel:
    """
    Adds the adapter, with some fields `changed`, to the policy's skeleton on the meta device, and leaves torch's random
    state as it was, so that the run's own adapter starts as in TRL's trainer. Raises `ValueError` if PEFT refuses it,
    such as for `target_modules` without a match.
    """
    given = copy.deepcopy(run.peft_config)
    # Other values of the first two read the policy's weights
    vars(given).update({"init_lora_weights": True, "use_dora": False} | changed)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # PEFT warns again when it adds the adapter to the loaded policy
        return get_peft_model(run.policy, given, low_cpu_mem_usage=True)


def _is_added(run: Given) -> bool:
    """Whether the trainer adds a LoRA adapter to a policy that it loads, and an engine of ours samples from it."""
    return run.spec.sampler is not None and run.is_named and isinstance(run.peft_config, LoraConfig)


def _unfit_for_experts(run: Given) -> str | None:
    """Returns the settings that PEFT refuses with an adapter of experts or routers; `None` if there are none."""
    config = run.peft_config
    found = [f"`{name}`={getattr(config, name)!r}" for name in OF_TENSORS if getattr(config, name) != OF_TENSORS[name]]
    if config.init_lora_weights not in INITIALIZATIONS:
        found.append(f"`init_lora_weights`={config.init_lora_weights!r}")
    if run.quantization_config is not None:
        found.append("a `quantization_config`")
    plain = partial(_with_adapter, run, **OF_TENSORS)
    if not found or not run.experts or refusal(plain) is not None:
        return None
    return " and ".join(found) if any(isinstance(module, ParamWrapper) for module in plain().modules()) else None


def _adapted_tensor(run: Given) -> str | None:
    """Returns the name of a tensor of experts, or of a router, that the adapter changes; `None` if there is none."""
    if not run.experts or refusal(_with_adapter, run) is not None:
        return None
    wrappers = (item for item in _with_adapter(run).named_modules() if isinstance(item[1], ParamWrapper))
    return next((clean_name(f"{path}.{wrapper.parameter_name}") for path, wrapper in wrappers), None)


def _fault(run: Given) -> str | None:
    policy = _with_adapter(run)
    return adapter_fault(policy, policy.get_base_model())


RULES = (
    Rule(
        ("lora_sync", "train_precision", "rollout_precision"),
        when=lambda run: (
            run.spec.source in ("colocate", "server")
            and run.args.lora_sync == "adapter"
            and run.args.train_precision is not None
            and not run.spec.samples_as_trained
        ),
        message="`lora_sync`='adapter' leaves vLLM's base in {args.rollout_precision!r} (`rollout_precision`), and the "
        "adapter is trained on a base in {args.train_precision!r} (`train_precision`). Use one precision for both, or "
        "`lora_sync='merge'`.",
    ),
    Rule(
        ("lora_sync", "vllm_sleep_level", "vllm_enable_sleep_mode"),
        when=lambda run: (
            run.spec.sampler is not None
            and run.spec.sampler.is_vllm
            and run.args.lora_sync == "adapter"
            and run.args.vllm_enable_sleep_mode
            and run.args.vllm_sleep_level == 2
        ),
        message="`lora_sync`='adapter' cannot be combined with `vllm_sleep_level`=2, which discards the engine's base "
        "weights: no sync brings them back. Set `vllm_sleep_level=1`, or `lora_sync='merge'`.",
    ),
    Rule(
        ("lora_sync",),
        when=_adapted_head,
        message="Applying a PEFT adapter to `{found}` is not supported: the log-probabilities are computed from "
        "`{found}.weight` directly, so the adapter would never be trained. Remove `{found!r}` from your "
        "`target_modules`.",
        needs="arguments",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: run.spec.sampler is not None and _without_weights(run),
        message="`peft_config`: {found}",
        needs="arguments",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: run.spec.sampler is not None and getattr(run.peft_config, "layer_replication", None),
        message="`peft_config`: `layer_replication`={found!r} adds layers that the model's config does not describe, "
        "and engines are built from that config. Unset it, or leave `rollout_precision` unset.",
        needs="arguments",
    ),
    Rule(
        ("train_precision", "lora_sync"),
        when=lambda run: (
            run.args.train_precision in unified_flows() and run.args.lora_sync == "merge" and _is_more_than_product(run)
        ),
        message=f"`train_precision`={{args.train_precision!r}}: the adapter of `peft_config` is {NOT_PLAIN}",
        needs="arguments",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: run.spec.training.freezes_base and _copied_base(run),
        message="`modules_to_save` has {found[0]!r}, which trains a copy of `{found[1]}`, and `train_precision`="
        "{args.train_precision!r} holds its weights in codes, which do not train. Leave it out, and adapt the layer "
        "(`target_modules`).",
        needs="model",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _is_added(run) and _unfit_for_experts(run),
        message="`peft_config`: {found} with an adapter of experts or routers (`target_parameters`; PEFT makes them of "
        "`target_modules`='all-linear' too). There PEFT adds a plain product of B and A to tensors in 16 or 32 bits. "
        "Leave it out, or adapt linear layers alone, such as `target_modules=['q_proj', 'v_proj']`.",
        needs="model",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: run.args.train_precision is not None and _is_added(run) and _adapted_tensor(run),
        message="`peft_config` adapts `{found}`, a tensor of experts or a router (`target_parameters`; PEFT makes them "
        "of `target_modules`='all-linear' too), which `train_precision`={args.train_precision!r} does not merge. Adapt "
        "attention alone, such as `target_modules=['q_proj', 'v_proj']`.",
        needs="model",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _is_added(run) and refusal(_with_adapter, run),
        message="`peft_config`: {found}",
        needs="model",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: _is_added(run) and _fault(run),
        message="`rollout_precision`={args.rollout_precision!r} cannot sample from the policy: {found}",
        needs="model",
    ),
)
