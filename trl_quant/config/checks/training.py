"""Rules of what is trained: its precision, its sharding, its reference model, and the scale of UAQ."""

import os

from ...formats import FORMATS
from ...models.families import FAMILIES, families_with, family_of, is_tested
from ...models.linears import linears
from ...precisions import PRECISIONS, experts_flows, frozen_bases, qat_precisions, unified_flows
from ...storage.layout import check_groups, misread_experts
from ...storage.quantization import prepared_precisions
from ..given import Given, name_of
from ..packed import why_not_packed
from ..values import listed
from .rule import Rule, acts_only, refusal


def _trains(run: Given, kind: str) -> bool:
    return run.spec.training.kind == kind


def _replaces_weights(run: Given) -> bool:
    """Whether transformers would quantize weights that a `train_precision` needs in 16 or 32 bits."""
    return run.spec.training.kind in ("unified", "qat") and run.quantization_config is not None


def _sharded_bases(run: Given) -> str | None:
    """Returns the sharding under which a policy's base cannot be held in codes."""
    if _is_zero3(run):
        return "ZeRO-3"
    return None if run.args.fsdp_version is None else "FSDP2"


def _is_zero3(run: Given) -> bool:
    plugin = run.args.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def _pads_otherwise(run: Given) -> str | None:
    """Returns the policy's family, if a padded row of it is not what the row is alone, and rows are padded."""
    model_type = run.config.get_text_config().model_type
    family = FAMILIES.get(model_type)
    if family is None or family.pads:
        return None
    is_packed = run.args.pack_sequences is not False and not why_not_packed(run.args, run.config, run.processor)
    return None if is_packed else model_type


def _unwrapped(run: Given) -> tuple[str, str] | None:
    """
    Returns the classes of the layers that FSDP2 would wrap and the policy lacks, and those that it has. Unless the user
    names classes, accelerate takes the names that transformers gives, which may be of a larger model.
    """
    given = run.args.fsdp_plugin_args or {}
    names = given.get("transformer_cls_names_to_wrap") or os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    policy = given.get("auto_wrap_policy") or os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
    if names or policy.upper() != "TRANSFORMER_BASED_WRAP":
        return None
    wanted, own = set(run.policy._no_split_modules or ()), {type(module).__name__ for module in run.policy.modules()}
    return (listed(sorted(wanted - own)), ",".join(sorted(wanted & own))) if wanted - own else None


def _bits(run: Given) -> str:
    """Returns the size of a base in codes, as a share of its size in 16 bits."""
    return f"{FORMATS[PRECISIONS[run.args.train_precision].format].bits / 16:.0%}"


def _trains_experts(run: Given) -> bool:
    """Whether a mixture of experts would train in a `train_precision`."""
    return run.args.train_precision is not None and run.experts > 0


def _uneven_groups(run: Given) -> str | None:
    """Returns which weight has a shape that no 4-bit checkpoint can hold."""
    format = PRECISIONS[run.args.train_precision].format
    for layer in linears(run.policy).values():
        fault = refusal(check_groups, f"{layer.name}.weight", layer.shape[-1], format)
        if fault is not None:
            return fault
    return None


def _read_past(run: Given) -> str:
    """Lists the policy's linear layers of whose modules a kernel reads the weight alone."""
    family = FAMILIES.get(run.config.get_text_config().model_type)
    return ", ".join(family.read) if family is not None else ""


def _is_quantized(run: Given) -> bool:
    """Whether the policy is a quantized checkpoint that is not trained as one."""
    is_trainable = _trains(run, "frozen") or getattr(run.quantization_config, "dequantize", False)
    return not is_trainable and prepared_precisions(run.config) is not None


def _scales_again(run: Given) -> float | None:
    """Returns the other factor by which UAQ has scaled the model already."""
    applied = getattr(run.config, "uaq_scale", None)
    return applied if applied != run.args.uaq_scale else None


def _is_unscaled(run: Given) -> bool:
    return run.args.uaq_scale is not None and getattr(run.config, "uaq_scale", None) is None


def _arguments(run: Given) -> dict:
    return run.args.vllm_engine_kwargs or {}


def _not_routed(run: Given) -> str | None:
    """Returns the families whose routing is known, if the policy's is not one of them."""
    known = families_with("scores")
    return ", ".join(known) if run.config.get_text_config().model_type not in known else None


RULES = (
    Rule(
        ("enable_jit_checkpoint",),
        when=lambda run: run.args.enable_jit_checkpoint,
        message="`enable_jit_checkpoint`=True saves in the middle of a step, when what was sampled is a step ahead of "
        "what was trained: a run could not resume it. Leave it unset, and set `save_steps` to what may be lost.",
    ),
    Rule(
        ("sync_ref_model", "beta"),
        when=lambda run: run.args.sync_ref_model and not run.args.needs_reference,
        message="`sync_ref_model`=True with `beta`={args.beta!r}: without a KL term there is no reference model to "
        "sync. Unset `sync_ref_model`, or set a `beta` above 0.",
    ),
    *(
        acts_only((name,), "`sync_ref_model=True`", where=lambda run: run.args.sync_ref_model)
        for name in ("ref_model_mixup_alpha", "ref_model_sync_steps")
    ),
    Rule(
        ("uaq_scale", "sync_ref_model"),
        when=lambda run: run.args.uaq_scale is not None and run.args.sync_ref_model,
        message="`uaq_scale`={args.uaq_scale!r} cannot be combined with `sync_ref_model=True`, which would mix scaled "
        "weights with the reference model's unscaled ones. Unset one of the two.",
    ),
    Rule(
        ("max_completion_length", "loss_type"),
        when=lambda run: run.args.loss_type == "dr_grpo" and run.args.max_completion_length is None,
        message="`max_completion_length`=None with `loss_type`='dr_grpo', which divides the loss by that length. Set "
        "it, or use another `loss_type`.",
    ),
    Rule(
        ("train_precision",),
        when=_replaces_weights,
        message="`train_precision`={args.train_precision!r} trains 16- or 32-bit weights, which a "
        "`quantization_config` replaces. Unset one of the two.",
        needs="arguments",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: _trains(run, "frozen") and not run.has_adapter,
        message="`train_precision`={args.train_precision!r} freezes the policy's base, and there is no adapter to "
        f"train: pass a `peft_config`, or train all weights in {listed([*qat_precisions(), *unified_flows()])}.",
        needs="arguments",
    ),
    Rule(
        ("train_precision", "uaq_scale"),
        when=lambda run: _trains(run, "frozen") and run.args.uaq_scale is not None,
        message="`uaq_scale`={args.uaq_scale!r} scales 16-bit weights, and a base that is frozen in `train_precision`="
        "{args.train_precision!r} has none. Scale and save the model first (`trl_quant.scaling.apply_uaq`), or unset "
        "one of the two.",
        needs="arguments",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: _trains(run, "qat") and run.args.is_adapted,
        message="`train_precision`={args.train_precision!r} trains all weights, and the policy has an adapter. Leave "
        f"the adapter out, or freeze the base in {listed(frozen_bases())}.",
        needs="arguments",
    ),
    Rule(
        ("train_precision", "rollout_precision"),
        when=lambda run: _trains(run, "qat") and not run.spec.samples_as_trained,
        message="`rollout_precision`={args.rollout_precision!r} with `train_precision`={args.train_precision!r} and no "
        "adapter: the policy is its 4-bit weights, and that sampler would quantize the 16- or 32-bit weights behind "
        "them. Leave `rollout_precision` unset.",
        needs="arguments",
    ),
    Rule(
        ("train_precision", "lora_sync"),
        when=lambda run: _trains(run, "qat") and run.args.lora_sync == "adapter",
        message="`lora_sync`='adapter' with `train_precision`={args.train_precision!r} and no adapter: all weights are "
        "trained, and each sync sends all of them. Leave `lora_sync` unset, or pass a `peft_config`.",
        needs="arguments",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: _trains(run, "frozen") and _sharded_bases(run) and (_sharded_bases(run), _bits(run)),
        message="`train_precision`={args.train_precision!r} with {found[0]}, which shards weights that must be held "
        "whole. Use DDP or ZeRO-2: each GPU holds the base in {found[1]} of its size in 16 bits.",
        needs="arguments",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: run.args.train_precision is not None and _is_zero3(run),
        message="`train_precision`={args.train_precision!r} with ZeRO-3, which shards weights that must be quantized "
        "whole. Use FSDP2 (`fsdp_version: 2`), DDP or ZeRO-2.",
        needs="arguments",
    ),
    Rule(
        ("fsdp_config",),
        when=lambda run: run.args.fsdp_version == 2 and _unwrapped(run),
        message="FSDP2 would wrap layers of the classes {found[0]}, of which the policy has none. Name the classes "
        "that it has: `fsdp_transformer_layer_cls_to_wrap: {found[1]}` in accelerate's config file, or "
        "'transformer_layer_cls_to_wrap' in `fsdp_config`.",
        needs="model",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: run.spec.sampler is None and misread_experts(run.config.to_dict()),
        message="The policy {run.config.name_or_path!r} is a mixture of experts stored in {found!r}. transformers does "
        "not read the global scales of its experts, and would train wrong ones. Use its 16-bit checkpoint.",
        needs="model",
    ),
    Rule(
        ("rollout_precision",),
        when=lambda run: run.spec.sampler is not None and _is_quantized(run),
        message="The policy {run.config.name_or_path!r} is quantized already (`quantization_config` in config.json). "
        "Train the 16-bit checkpoint, or this one under LoRA with `train_precision`; vLLM may start on this one, with "
        "`vllm_engine_kwargs={{'model': ...}}`.",
        needs="model",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: _trains(run, "qat") and _uneven_groups(run),
        message="`train_precision`={args.train_precision!r} trains for a checkpoint in 4 bits. {found} Set another "
        "`train_precision`, or leave it unset.",
        needs="model",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: run.args.train_precision is not None and _read_past(run),
        message="`train_precision`={args.train_precision!r}: while a {run.config.model_type} trains, the kernel of "
        "mamba-ssm reads the weight of {found} past its module, and would not quantize it. Leave it unset, and set "
        "`rollout_precision`.",
        needs="model",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: _trains_experts(run) and run.args.train_precision not in experts_flows() and run.experts,
        message="`train_precision`={args.train_precision!r}, but the policy is a mixture of {found} experts, which "
        f"torch multiplies in one call in {listed(experts_flows())} alone. Use that, or leave it unset and set "
        "`rollout_precision`.",
        needs="model",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: (
            _trains_experts(run) and _trains(run, "frozen") and prepared_precisions(run.config) is not None
        ),
        message="`train_precision`={args.train_precision!r} freezes the base of a mixture of experts, which is not "
        "read from a checkpoint that `trl-quant prepare` wrote. Start from the 16-bit checkpoint.",
        needs="model",
    ),
    Rule(
        ("train_precision", "torch_compile"),
        when=lambda run: _trains_experts(run) and run.args.torch_compile,
        message="`train_precision`={args.train_precision!r} with `torch_compile=True`: how tokens are sorted by expert "
        "was not tried in a compiled model. Unset one of the two.",
        needs="model",
    ),
    Rule(
        ("train_precision",),
        when=lambda run: run.args.train_precision is not None and not is_tested(run.config),
        message="`train_precision`={args.train_precision!r}: `model_type`={run.config.model_type!r} is not among the "
        "families that were trained so, which docs/models.md lists. Leave it unset: `rollout_precision` samples from "
        "any decoder in which the check of the first sync finds no fault.",
        needs="model",
    ),
    Rule(
        ("pack_sequences", "rollout_precision"),
        when=lambda run: run.spec.sampler is not None and _pads_otherwise(run),
        message="`rollout_precision`={args.rollout_precision!r} with `pack_sequences`={args.pack_sequences!r}: the "
        "queries and keys of {found} depend on a token's place, which padding on its left shifts, and the sampler has "
        "no padding. Train packed rows.",
        needs="model",
    ),
    Rule(
        ("noise_schedule", "uaq_scale"),
        when=lambda run: (
            (run.args.noise_schedule is not None or run.args.uaq_scale is not None)
            and refusal(family_of, run.config.get_text_config().model_type)
        ),
        message="`noise_schedule`={args.noise_schedule!r} and `uaq_scale`={args.uaq_scale!r}: {found}",
        needs="model",
    ),
    Rule(
        ("uaq_scale",),
        when=lambda run: run.args.uaq_scale is not None and not _is_unscaled(run) and _scales_again(run),
        message="`uaq_scale`={args.uaq_scale}, but the model was already scaled by {found}. Use that factor.",
        needs="model",
    ),
    Rule(
        ("uaq_scale",),
        when=lambda run: run.args.uaq_scale is not None and run.has_adapter and _is_unscaled(run),
        message="`uaq_scale`={args.uaq_scale} scales the base model, which a saved adapter does not contain. Scale the "
        "base once with `trl_quant.scaling.apply_uaq`, save it, and train the adapter on that.",
        needs="model",
    ),
    Rule(
        ("pack_sequences",),
        when=lambda run: run.args.pack_sequences and why_not_packed(run.args, run.config, run.processor),
        message="`pack_sequences`=True cannot act: {found}.",
        needs="model",
    ),
    Rule(
        ("router_replay", "rollout_precision"),
        when=lambda run: run.args.router_replay and run.spec.sampler is None,
        message="`router_replay`=True needs an engine that returns its routing, but `rollout_precision` is not set. "
        "Set `rollout_precision='bf16'` for one without quantization.",
    ),
    Rule(
        ("router_replay", "vllm_mode"),
        when=lambda run: run.args.router_replay and run.spec.source == "server",
        message="`router_replay`=True with `vllm_mode='server'`: TRL's client takes no routing from a server. Use "
        "`vllm_mode='colocate'` or `use_vllm=False`, or leave it unset.",
    ),
    Rule(
        ("router_replay", "vllm_engine_kwargs"),
        when=lambda run: run.args.router_replay and _arguments(run).get("enable_prefix_caching") is False,
        message="`router_replay`=True with 'enable_prefix_caching': False in `vllm_engine_kwargs`: vLLM returns the "
        "routing of experts only with its prefix cache. Leave one of the two out.",
    ),
    Rule(
        ("router_replay", "vllm_engine_kwargs"),
        when=lambda run: run.args.router_replay and _arguments(run).get("speculative_config"),
        message="`router_replay`=True with 'speculative_config' in `vllm_engine_kwargs`: the routing of tokens that "
        "vLLM drafts was not tried. Leave one of the two out.",
    ),
    Rule(
        ("router_replay", "torch_compile"),
        when=lambda run: run.args.router_replay and run.args.torch_compile,
        message="`router_replay`=True with `torch_compile=True`: the hooks that replay were not tried in a compiled "
        "model. Unset one of the two.",
    ),
    Rule(
        ("router_replay",),
        when=lambda run: run.args.router_replay and run.others.get("rollout_func"),
        message="`router_replay`=True with a `rollout_func`, of whose completions it is not known which tokens the "
        "engine has sampled. Leave it unset.",
        needs="arguments",
    ),
    Rule(
        ("router_replay",),
        when=lambda run: run.args.router_replay and _not_routed(run),
        message="`router_replay`=True acts only on the mixtures of experts of {found}, and the policy's `model_type` "
        "is {run.config.model_type!r}. Leave it unset.",
        needs="model",
    ),
    Rule(
        ("beta",),
        when=lambda run: run.args.needs_reference and not run.has_adapter and not name_of(run.model),
        message="`beta`={args.beta} needs a reference model, which TRL loads from the policy's path, but this policy "
        "was built in memory. Save it and pass the directory, or set `beta=0`.",
        needs="model",
    ),
)
