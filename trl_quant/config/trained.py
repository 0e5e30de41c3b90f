"""The checks of [`preflight`] on what is trained: its precision, its sharding, and an earlier trainer's changes."""

from accelerate.utils import is_compiled_module, is_peft_model
from torch.nn import Module

from ..formats import FORMATS
from ..layers import FrozenLinear
from ..models.linears import linears
from ..precisions import PRECISIONS, frozen_bases, qat_precisions, unified_flows
from ..storage.layout import check_groups
from ..storage.source import skeleton
from .values import listed


def check_untouched(args, model) -> None:
    """Raises `ValueError` for a model that an earlier trainer put into codes, or onto an engine's kernels."""
    packed = {module.precision for module in model.modules() if isinstance(module, FrozenLinear)}
    if packed and args.spec.training.kind != "frozen":
        raise ValueError(
            f"`train_precision`={args.train_precision!r}, but the policy's base is held in "
            f"{', '.join(map(repr, sorted(packed)))}, and its 16-bit weights are gone. Train an adapter with that "
            "`train_precision` (in FP8 and INT8 with `lora_sync='adapter'`), or load the model again."
        )
    if args.exact_rollouts:
        check_not_compiled(model)
    elif any(hasattr(module, "exact_attention") for module in model.modules()):
        raise ValueError(
            "`exact_rollouts`=False, but the policy computes with the kernels of another trainer's engine "
            "(`exact_rollouts`=True). Load the model again."
        )


def check_not_compiled(model: Module) -> None:
    """Raises `ValueError` if torch.compile would compute a model, or a layer of it, instead of an engine's kernels."""
    compiled = [name or "the policy" for name, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise ValueError(
            "`exact_rollouts`=True computes with the engine's kernels, and torch.compile would compute with its own in "
            f"{compiled[0]}. Load the model again, and do not compile it."
        )


def _is_compiled(module: Module) -> bool:
    """Whether a module is a result of `torch.compile`, or was compiled in place by its method `compile`."""
    return is_compiled_module(module) or vars(module).get("_compiled_call_impl") is not None


def check_trained(args, model, peft_config, quantization_config) -> None:
    """Raises `ValueError` for a `train_precision` that the model, its adapter or the sharding contradicts."""
    kind, precision = args.spec.training.kind, args.train_precision
    frozen = kind == "frozen"
    if not frozen and (quantization_config is not None or "quantization_config" in (args.model_init_kwargs or {})):
        raise ValueError(
            f"`train_precision`={precision!r} trains 16- or 32-bit weights, which a `quantization_config` replaces. "
            "Unset one of the two."
        )
    if frozen and peft_config is None and (isinstance(model, str) or not is_peft_model(model)):
        raise ValueError(
            f"`train_precision`={precision!r} freezes the policy's base, and there is no adapter to train: pass a "
            f"`peft_config`, or train all weights in {listed([*qat_precisions(), *unified_flows()])}."
        )
    if frozen and args.uaq_scale is not None:
        raise ValueError(
            f"`uaq_scale`={args.uaq_scale!r} scales 16-bit weights, and a base that is frozen in `train_precision`="
            f"{precision!r} has none. Scale and save the model first (`trl_quant.scaling.apply_uaq`), or unset one of "
            "the two."
        )
    if kind == "qat":
        if args.is_adapted:
            raise ValueError(
                f"`train_precision`={precision!r} trains all weights, and the policy has an adapter. Leave the adapter "
                f"out, or freeze the base in {listed(frozen_bases())}."
            )
        _check_four_bits(args)
    is_zero3 = args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3
    if is_zero3 or (frozen and args.fsdp_version is not None):
        sharding = "ZeRO-3" if is_zero3 else "FSDP2"
        if frozen:
            share = FORMATS[PRECISIONS[precision].format].bits / 16
            advice = f"held whole. Use DDP or ZeRO-2: each GPU holds the base in {share:.0%} of its size in 16 bits."
        else:
            advice = "quantized whole. Use FSDP2 (`fsdp_version: 2`), DDP or ZeRO-2."
        raise ValueError(f"`train_precision`={precision!r} with {sharding}, which shards weights that must be {advice}")


def _check_four_bits(args) -> None:
    """Refuses fields that contradict training all weights in 4 bits."""
    precision = args.train_precision
    if args.rollout_precision != precision:
        raise ValueError(
            f"`rollout_precision`={args.rollout_precision!r} with `train_precision`={precision!r} and no adapter: the "
            "policy is its 4-bit weights, and that sampler would quantize the 16- or 32-bit weights behind them. Leave "
            "`rollout_precision` unset."
        )
    if args.lora_sync == "adapter":
        raise ValueError(
            f"`lora_sync`='adapter' with `train_precision`={precision!r} and no adapter: all weights are trained, and "
            "each sync sends all of them. Leave `lora_sync` unset, or pass a `peft_config`."
        )


def check_stored(config, model, args) -> None:
    """Raises `ValueError` for a weight to train in 4 bits whose shape no 4-bit checkpoint can hold."""
    precision = args.train_precision
    policy = skeleton(config, args.trust_remote_code) if isinstance(model, str) else model
    for layer in linears(policy).values():
        try:
            check_groups(f"{layer.name}.weight", layer.shape[-1], PRECISIONS[precision].format)
        except ValueError as error:
            raise ValueError(
                f"`train_precision`={precision!r} trains for a checkpoint in 4 bits. {error} Set another "
                "`train_precision`, or leave it unset."
            ) from error
