"""Checks, before anything is loaded, that vLLM's attention here computes what the policy's does."""

import torch
from transformers import PreTrainedConfig

from ...models.families import FAMILIES, families_with


NO_WHOLE_IMAGES = (
    "In this policy the tokens of an image see each other, and on a CPU vLLM's attention shows each token only those "
    "before it. Set `use_vllm=False` for the embedded engine, or train on text."
)
NO_BIAS_BESIDE_DRAFTS = (
    "A policy that is given images must not sample a token that stands for one. A `logit_bias` keeps it from that, "
    "which vLLM refuses beside speculative decoding. Leave 'speculative_config' out of `vllm_engine_kwargs`."
)
LINEAR_HEADS = (64, 128)  # sizes of the heads of linear attention that vLLM's CPU kernel takes
EXACT_HEADS = 128  # head size at which FlashAttention 3 decodes with the same tiles as it scores a whole sequence


def _head_size(config: PreTrainedConfig) -> int:
    config = config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_cpu_kernels(config: PreTrainedConfig) -> None:
    """
    Raises `ValueError` on a CPU for a head size that vLLM's CPU kernels lack, and on one whose kernels of linear
    attention fail for a policy that has it.
    """
    from vllm.platforms import current_platform

    text = config.get_text_config()
    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    has_latent_attention = getattr(text, "kv_lora_rank", None)  # it has other kernels
    wrong = [] if has_latent_attention else [("heads", _head_size(config), sizes)]
    linear = [getattr(text, f"linear_{kind}_head_dim", None) for kind in ("key", "value")]
    if any(linear) and torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported():
        raise ValueError(
            "This CPU has AVX-512 for BF16 and no AMX, where vLLM cannot compute the policy's linear attention. It "
            "says 'BFloat16 Brgemm VNNI format is only supported on X64 when oneDNN ukernel is enabled and `amx` is "
            "supported'. Set `use_vllm=False` for the embedded engine."
        )
    wrong += [("heads of linear attention", size, LINEAR_HEADS) for size in linear if size is not None]
    for kind, size, allowed in wrong:
        if size not in allowed:
            raise ValueError(
                f"The policy's {kind} have {size} dimensions; on a CPU vLLM has kernels for "
                f"{', '.join(map(str, allowed))}. Set `use_vllm=False` for the embedded engine."
            )


def refusal_of_images(config: PreTrainedConfig, drafts: bool, here: bool = True) -> str | None:
    """
    Returns why vLLM takes no images; `None` if it takes them.

    Args:
        config ([`~transformers.PreTrainedConfig`]): The policy's config.
        drafts (`bool`): Whether vLLM speculates.
        here (`bool`, *optional*, defaults to `True`): Whether to ask the vLLM of this machine too.
    """
    if drafts:
        return NO_BIAS_BESIDE_DRAFTS
    family = FAMILIES.get(config.model_type)
    if not here or family is None or not family.whole_images:
        return None
    from vllm.platforms import current_platform

    return NO_WHOLE_IMAGES if current_platform.is_cpu() else None


def check_exact(config: PreTrainedConfig) -> None:
    """Raises `ValueError` if the trainer cannot reproduce the engine's log-probabilities bit for bit."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability[0] != 9:
        found = "a CPU" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        raise ValueError(
            f"`exact_rollouts`=True needs FlashAttention 3, on Hopper (compute capability 9.0), not {found}."
        )
    model_type = config.get_text_config().model_type
    known = families_with("exact")
    if model_type not in known:
        raise ValueError(
            f"`exact_rollouts`=True knows the computation of {', '.join(known)}, not of {model_type}. Leave it "
            "at False."
        )
    dropout = getattr(config.get_text_config(), "attention_dropout", 0)
    if dropout:
        raise ValueError(f"`exact_rollouts`=True needs a model without dropout; it has `attention_dropout`={dropout}.")
    size = _head_size(config)
    if size != EXACT_HEADS:
        raise ValueError(
            f"`exact_rollouts`=True needs heads of {EXACT_HEADS} dimensions, and the policy's have {size}. It is not "
            "known whether FlashAttention 3 then adds up in the same order in decoding and over a whole sequence. "
            "Leave it at False."
        )
