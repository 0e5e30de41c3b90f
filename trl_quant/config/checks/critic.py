"""Rules of PPO's critic: what trains it, and the model that it starts from."""

from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig

from ...policy.vocabulary import saved_tokenizer, why_not_one_vocabulary
from ...reading import reading
from ...storage.named import check_named
from ...storage.quantization import prepared_precisions
from ..given import Given, name_of
from ..saving import check_savable
from ..values import CLIPPED_LOSSES, listed
from .rule import Rule, acts_only


# TRL's field -> the values that PPO takes, and why no others
TAKES = {
    "scale_rewards": (
        ("none",),
        "compares the completions of a prompt or a batch, and PPO's advantages come from a critic",
    ),
    "loss_type": (
        tuple(name for name in CLIPPED_LOSSES if name != "luspo"),
        "does not clip the ratio of each token, as PPO does",
    ),
    "importance_sampling_level": (
        ("token",),
        "has one ratio for a completion, and PPO has one for each token",
    ),
    "multi_objective_aggregation": (
        ("sum_then_normalize",),
        "compares the completions of a prompt, and PPO's advantages come from a critic",
    ),
}


def _untrainable(run: Given) -> str | None:
    """Returns what the critic, a second model beside the policy, cannot be trained with."""
    args = run.args
    optimizer = args.optim.value
    refused = {
        "DeepSpeed, whose engine holds a single model": args.deepspeed_plugin is not None,
        "FSDP1": args.fsdp_version == 1,
        "`fp16`": args.fp16,
        f"`optim`={optimizer!r}, which is built around one model": args.optim_target_modules is not None
        or optimizer.partition("_")[0] in ("lomo", "adalomo"),
        f"`optim`={optimizer!r}, which transformers puts into training mode for the policy alone": (
            optimizer.startswith("schedule_free")
        ),
        f"`lr_scheduler_type`={args.lr_scheduler_type!r}, which reads a metric": args.lr_scheduler_type
        in ("reduce_lr_on_plateau", "greedy"),
    }
    return next((what for what, is_set in refused.items() if is_set), None)


def _name(run: Given) -> str:
    """Returns the checkpoint that the critic starts from; empty for a policy that was built in memory."""
    return run.args.value_model_name_or_path or name_of(run.model)


def _fault(run: Given) -> str | None:
    """Returns what is wrong with the critic's checkpoint, by its name. Raises `ValueError` if it cannot be read."""
    name, source = _name(run), run.args.critic_source
    check_named("value_model_name_or_path", name, source.get("revision"))
    try:
        with reading(name):
            config = AutoConfig.from_pretrained(name, **source)
    except (OSError, ValueError) as error:
        raise ValueError(f"The critic's `value_model_name_or_path`={name!r} cannot be read: {error}") from error
    fault = _why_no_critic(run, config)
    if fault is None:
        check_savable("the critic", config)
    return None if fault is None else f"{name!r} {fault}"


def _why_no_critic(run: Given, config) -> str | None:
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return f"has the `model_type`={config.model_type!r}, of which transformers has no token classifier"
    if prepared_precisions(config) is not None or getattr(config, "quantization_config", None) is not None:
        return "is quantized, and the critic trains all of its weights"
    if (config.architectures or [""])[0].endswith("Classification") and config.num_labels != 1:
        return f"is a {config.architectures[0]} with {config.num_labels} labels, and a critic gives one value"
    return _other_tokens(run, config)


def _other_tokens(run: Given, config) -> str | None:
    """Returns why a critic with a smaller embedding lacks tokens of the policy, or `None` if it lacks only padding."""
    rows, own = (given.get_text_config().vocab_size for given in (run.config, config))
    if own >= rows:
        return None
    trust = run.args.trust_remote_code
    tokenizer = saved_tokenizer(run.config, trust) if run.processing_class is None else run.processing_class
    tokenizers = {
        "policy": getattr(tokenizer, "tokenizer", tokenizer),
        "critic": saved_tokenizer(config, trust),
    }
    known = {name: tokenizer for name, tokenizer in tokenizers.items() if tokenizer is not None}
    fault = why_not_one_vocabulary(own, known)
    return None if fault is None else f"has {own} tokens, and the policy {rows}: {fault}"


RULES = (
    *(
        Rule(
            ("vf_share_layers", name),
            when=lambda run, name=name, allowed=allowed: getattr(run.args, name) not in allowed,
            message=f"`{name}`={{args.{name}!r}} {reason}. Use {listed(allowed)}.",
        )
        for name, (allowed, reason) in TAKES.items()
    ),
    Rule(
        ("vf_share_layers",),
        when=_untrainable,
        message="PPO's critic cannot be trained with {found}. Use DDP or FSDP2, in BF16 or FP32.",
    ),
    acts_only(
        ("vf_coef",),
        "`vf_share_layers=True`: a critic of its own has `value_learning_rate`",
        where=lambda run: run.args.vf_share_layers,
    ),
    Rule(
        ("vf_share_layers", "value_model_name_or_path"),
        when=lambda run: run.args.vf_share_layers and run.args.value_model_name_or_path is not None,
        message="`value_model_name_or_path`={args.value_model_name_or_path!r} is a critic of its own, and with "
        "`vf_share_layers`=True the critic is a value head on the policy's layers. Unset one of the two.",
    ),
    Rule(
        ("vf_share_layers", "torch_compile"),
        when=lambda run: run.args.vf_share_layers and run.args.torch_compile,
        message="`vf_share_layers`=True reads the hidden states of the policy, and a policy compiled with "
        "`torch_compile` does not expose them. Unset one of the two.",
    ),
    Rule(
        ("vf_share_layers", "value_model_name_or_path"),
        when=lambda run: not run.args.vf_share_layers and not _name(run),
        message="The policy was built in memory, and the critic starts from a checkpoint: name one in "
        "`value_model_name_or_path`, or set `vf_share_layers=True`.",
        needs="model",
    ),
    Rule(
        ("value_model_name_or_path",),
        when=lambda run: not run.args.vf_share_layers and _fault(run),
        message="The critic's {found}. Name another model in `value_model_name_or_path`, or set "
        "`vf_share_layers=True`.",
        needs="model",
    ),
)
