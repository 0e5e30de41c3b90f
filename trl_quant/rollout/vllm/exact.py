"""
Makes vLLM compute each token independently of the rest of its batch, and gives the trainer vLLM's kernels
([`policy.exact`]).

| computation of vLLM that depends on the batch | setting that prevents it |
|---|---|
| torch.compile fuses kernels differently from graph to graph | `compilation_config`: mode 0 |
| norms sum in other blocks of threads from 256 tokens on | [`layers.norm.rms_norm`] replaces them |
| attention splits the keys into more parts, the fewer sequences there are | always one part |
| a common prefix is attended separately and merged | `disable_cascade_attn` |
| DeepGEMM requantizes block-scaled weights to its own kind of scales | `precisions.InVLLM.as_given` |

vLLM's own `VLLM_BATCH_INVARIANT` was not enough in 0.26 on Hopper, and is not needed. The effect on norms was read in
vLLM's sources; the other effects were measured.

The rest depends on the linear layers themselves. Products in `int8` and `fp8_block` gave the same bits for any number
of tokens. Those in `fp8` did not: they use other kernels up to 64 tokens than above. With heads of 128, FlashAttention
3 gave the same bits in decoding as over a whole sequence; with heads of 64 only up to 128 tokens.
"""

import sys
from functools import partial

import torch
from packaging.version import Version
from torch import Tensor, nn
from vllm import __version__
from vllm import _custom_ops as ops
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
from vllm.v1.worker.gpu.sample.sampler import Sampler

from ...layers.norm import rms_norm
from ...layers.packed import Packed
from ...policy.exact.attention import Kernels
from ...policy.exact.head import log_softmax


# vLLM 0.26 rounds the tempered logits to the model's type again; every later version copies the logits to FP32 first
DIVIDES_IN_16_BITS = Version(__version__) < Version("0.27")


def exact_arguments(given: dict) -> dict:
    """Returns the arguments of vLLM's `LLM` that make it exact, merged into those `given`."""
    return {
        "compilation_config": {**(given.get("compilation_config") or {}), "mode": 0, "cudagraph_mode": "FULL"},
        "attention_config": {
            **(given.get("attention_config") or {}),
            "backend": "FLASH_ATTN",
            "flash_attn_max_num_splits_for_cuda_graph": 1,
        },
        "disable_cascade_attn": True,
    }


def hold_exact_norms(model: nn.Module) -> None:
    """
    Makes a model compute its norms with [`layers.norm.rms_norm`]. Must be called before CUDA graphs are captured.

    Raises:
        `ValueError`: The model has norms of another kind.
    """
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    others = sorted({type(norm).__name__ for norm in norms if type(norm) is not RMSNorm})
    if others:
        raise ValueError(f"`exact_rollouts` does not know the norms of vLLM's {type(model).__name__}: {others}.")
    for norm in norms:
        norm.forward = partial(_norm, norm)


def _norm(norm: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    y, total = rms_norm(x, norm.weight.data, norm.variance_epsilon, residual)
    return y if residual is None else (y, total)


def attend_in_one_part(worker) -> None:
    """Keeps a worker from splitting the keys of a sequence, for any number of tokens. For `LLM.collective_rpc`."""
    for groups in worker.model_runner.attn_groups:
        for group in groups:
            for builder in group.metadata_builders:
                if not isinstance(builder, FlashAttentionMetadataBuilder):
                    raise ValueError(f"`exact_rollouts` needs FlashAttention 3, and vLLM has {type(builder).__name__}.")
                builder.max_num_splits = 1
                builder.max_cudagraph_size = sys.maxsize  # vLLM applies `max_num_splits` only up to this size


def kernels(worker) -> Kernels:
    """
    Returns the kernels with which a worker computes rotary embeddings, attention and log-probabilities. For
    `LLM.collective_rpc`.

    Raises:
        `ValueError`: The model has rotary embeddings of another kind.
    """
    model = worker.get_model()
    embeddings = {m for m in model.modules() if isinstance(m, RotaryEmbedding)}
    is_plain = len(embeddings) == 1 and all(type(m).forward_cuda is RotaryEmbedding.forward_cuda for m in embeddings)
    if not is_plain:
        names = ", ".join(sorted(type(m).__name__ for m in embeddings)) or "none"
        raise ValueError(
            f"`exact_rollouts` does not know the rotary embeddings of vLLM's {type(model).__name__}: {names}. Leave it "
            "at False."
        )
    (rotary,) = embeddings
    cache = rotary.cos_sin_cache.to(torch.bfloat16, copy=True)  # a copy, because vLLM discards its own to sleep
    rotate = partial(_rotate, cache=cache, size=rotary.head_size, neox=rotary.is_neox_style)
    score = _score if isinstance(worker.model_runner.sampler, Sampler) else log_softmax
    return Kernels(rotate, _attend, score, rotary.rotary_dim, torch.bfloat16)


def _rotate(positions: Tensor, q: Tensor, k: Tensor, inverse: bool, cache: Tensor, size: int, neox: bool) -> None:
    ops.rotary_embedding(positions, q, k, size, cache, neox, inverse=inverse)


def _attend(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return fa_utils.flash_attn_varlen_func(  # looked up here, because it does not exist on a CPU
        q,
        k,
        v,
        cu_seqlens_q=packed.starts,
        cu_seqlens_k=packed.key_starts,
        max_seqlen_q=packed.longest,
        max_seqlen_k=packed.longest_keys,
        softmax_scale=scale,
        causal=True,
        window_size=None if window is None else [window - 1, 0],
        num_splits=1,
        fa_version=3,
        return_softmax_lse=True,
    )


def _score(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """
    Computes the log-probabilities of `ids` as vLLM's second model runner does, which divides the logits by the
    temperature in place.
    """
    if temperature != 1:
        logits = logits if DIVIDES_IN_16_BITS else logits.float()
        request_of_row = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        apply_temperature(logits, request_of_row, torch.full((1,), temperature, device=logits.device))
    return compute_token_logprobs(logits, ids.unsqueeze(1)).squeeze(1), logits
