"""The checks of [`preflight`] on an adapter: of its fields, and of where it fits into the policy."""

import copy
import warnings
from itertools import accumulate

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.families import HEAD
from ..models.linears import linears
from ..policy.adapters import NOT_PLAIN
from ..precisions import unified_flows
from ..rollout.stream import NO_WEIGHTS, adapter_fault
from ..storage.source import skeleton


def check_adapter(args, config: PreTrainedConfig, model, peft_config) -> None:
    """
    Refuses adapters that do not change weights or that add layers, because an engine gets only weights and is built
    from the model's config. Also refuses adapters that cannot be merged into the weight that is quantized at each step,
    and those that train a copy of a layer whose base is held in codes.

    LoRA on a policy that is not loaded yet is added to its skeleton, so that PEFT's own errors, such as
    `target_modules` without a match, come now.
    """
    if getattr(peft_config, "is_prompt_learning", False) or getattr(peft_config, "is_adaption_prompt", False):
        raise ValueError(f"`peft_config`: {NO_WEIGHTS.format(type(peft_config).__name__)}")
    if getattr(peft_config, "layer_replication", None):
        raise ValueError(
            f"`peft_config`: `layer_replication`={peft_config.layer_replication!r} adds layers that the model's config "
            "does not describe, and engines are built from that config. Unset it, or leave `rollout_precision` unset."
        )
    further = any(getattr(peft_config, name, False) for name in ("lora_dropout", "lora_bias", "use_dora"))
    further |= not isinstance(peft_config, LoraConfig | None)
    if further and args.train_precision in unified_flows() and args.lora_sync == "merge":
        raise ValueError(f"`train_precision`={args.train_precision!r}: the adapter of `peft_config` is {NOT_PLAIN}")
    if args.spec.training.kind == "frozen":
        configs = [peft_config] if peft_config is not None else model.peft_config.values()
        copied = [name for adapter in configs for name in getattr(adapter, "modules_to_save", None) or ()]
        if copied:
            _check_copied(args, skeleton(config, args.trust_remote_code) if isinstance(model, str) else model, copied)
    if isinstance(model, str) and isinstance(peft_config, LoraConfig):
        policy = _adapted(skeleton(config, args.trust_remote_code), peft_config)
        fault = adapter_fault(policy, policy.get_base_model())
        if fault is not None:
            raise ValueError(f"`rollout_precision`={args.rollout_precision!r} cannot sample from the policy: {fault}")


def check_head(peft_config) -> None:
    """Refuses an adapter of the output head, in TRL's words, which come only after everything is loaded."""
    if isinstance(peft_config, PeftConfig) and getattr(peft_config, "target_modules", None):
        for head in HEAD:
            if check_target_module_exists(peft_config, head):
                raise ValueError(
                    f"Applying a PEFT adapter to `{head}` is not supported: the log-probabilities are computed from "
                    f"`{head}.weight` directly, so the adapter would never be trained. Remove `{head!r}` from your "
                    "`target_modules`."
                )


def _check_copied(args, policy: PreTrainedModel | PeftModel, copied: list[str]) -> None:
    """Refuses `modules_to_save` with layers of a frozen base: their copies would hold codes, which do not train."""
    for place in linears(policy.get_base_model() if is_peft_model(policy) else policy):
        for path in accumulate(place.split("."), "{}.{}".format):  # PEFT copies a module by the end of its path
            found = next((name for name in copied if path.endswith(name)), None)
            if found is not None:
                raise ValueError(
                    f"`modules_to_save` has {found!r}, which trains a copy of `{path}`, and `train_precision`="
                    f"{args.train_precision!r} holds its weights in codes, which do not train. Leave it out, and adapt "
                    "the layer (`target_modules`)."
                )


def _adapted(policy, peft_config: LoraConfig) -> PeftModel:
    """
    Adds an adapter to a policy on the meta device, and leaves torch's random state as it was, so that the run's own
    adapter starts as in TRL's trainer. Raises `ValueError` if PEFT refuses it.
    """
    given = copy.deepcopy(peft_config)
    vars(given).update(init_lora_weights=True, use_dora=False)  # other values read the policy's weights
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # PEFT warns again when it adds the adapter to the loaded policy
        try:
            return get_peft_model(policy, given, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ValueError(f"`peft_config`: {error}") from error
