"""
Reproduces the effect of vLLM's quantized KV cache in the policy's attention. vLLM stores the keys and values of each
token, after the rotary embedding, as

    code = FP8(clamp(x / scale))        x^ = code * scale

with one scale for the keys of a layer and one for its values. It attends only to x^, in prefill and in decoding, even
for a token's own key and value. A scale is 1 unless the checkpoint stores another. Where the products themselves run in
FP8 (FlashAttention 3 on Hopper), the queries are rounded in the same way. The kernel rounds the attention weights too,
but in blocks that only the kernel knows, so only the size of that error can be reproduced.

| format            | grid                 | relative error, root mean square |
|-------------------|----------------------|----------------------------------|
| `fp8`, `fp8_e4m3` | E4M3: +-448          | 2.7e-2                           |
| `fp8_e5m2`        | E5M2: +-57344        | 5.3e-2                           |

transformers looks up attention functions by name in `ALL_ATTENTION_FUNCTIONS`. [`attending_to`] replaces each of them
with a function that rounds its inputs and calls the original.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# vLLM's names of the cache's types
UNQUANTIZED = ("auto", "bfloat16")
CACHE_FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Relative root mean square error of E4M3 for uniformly distributed mantissas: 2^-3 / sqrt(12) * sqrt(0.541)
WEIGHTS_ERROR = 0.0265


@dataclass(frozen=True)
class KVCache:
    """
    The cache of one attention layer of vLLM.

    Attributes:
        format (`str`): A key of [`CACHE_FORMATS`].
        scales (`dict[str, float]`): The cache's scales, by their names in vLLM's layer.
        in_fp8 (`bool`): Whether the products of attention run in FP8, with rounded queries and attention weights.
        truncates (`bool`): Whether values are rounded toward zero, as vLLM does on CPUs, instead of to the nearest.
    """

    format: str
    scales: dict[str, float]
    in_fp8: bool
    truncates: bool

    def stored(self, x: Tensor, scale: str) -> Tensor:
        """Returns `x`, rounded to BF16 first, as it is read back from the cache with the scale named `scale`."""
        dtype, scale = CACHE_FORMATS[self.format], self.scales[scale]
        limit = torch.finfo(dtype).max
        exact = (x.to(torch.bfloat16).float() / scale).clamp(-limit, limit)
        codes = exact.to(dtype)
        if self.truncates:  # take the next code toward zero where rounding to nearest increased the magnitude
            codes = (codes.view(torch.uint8) - (codes.float().abs() > exact.abs()).to(torch.uint8)).view(dtype)
        return (codes.float() * scale).to(x.dtype)


@contextmanager
def attending_to(
    caches: dict[int, KVCache], modules: Iterable[nn.Module], rounding: Callable[[Tensor, float], Tensor] | None
) -> Iterator[None]:
    """
    Context in which the attention layers among `modules` use keys and values as quantized caches return them.

    Args:
        caches (`dict[int, KVCache]`): The caches, by the index of their layer.
        modules (`Iterable[nn.Module]`): The modules of the policy's decoder.
        rounding (`Callable` or `None`):
            Called with an attention output and a relative error where the kernel rounds attention weights; returns the
            output with that error.

    Raises:
        `RuntimeError`: One of the layers called none of transformers' attention functions.
    """
    if not caches:
        yield
        return
    inside, called = set(modules), set()

    def attend(
        function: Callable | None, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs
    ):
        function = function or _eager(module)
        cache = caches.get(module.layer_idx) if module in inside else None
        if cache is None:
            return function(module, query, key, value, *args, **kwargs)
        called.add(module.layer_idx)
        if cache.in_fp8:
            query = cache.stored(query, "_q_scale")
        key, value = cache.stored(key, "_k_scale"), cache.stored(value, "_v_scale")
        output, weights = function(module, query, key, value, *args, **kwargs)
        if cache.in_fp8 and rounding is not None:
            output = rounding(output, WEIGHTS_ERROR)  # (batch, tokens, heads, head_dim): relative to each head's norm
        return output, weights

    # The table has no "eager": each model's file defines its own
    originals = {"eager": None, **ALL_ATTENTION_FUNCTIONS}
    try:
        ALL_ATTENTION_FUNCTIONS.update({name: partial(attend, function) for name, function in originals.items()})
        yield
    finally:
        for name, function in originals.items():
            del ALL_ATTENTION_FUNCTIONS[name]
            if ALL_ATTENTION_FUNCTIONS.get(name) is not function:  # someone had overridden transformers' own
                ALL_ATTENTION_FUNCTIONS[name] = function
    missed = caches.keys() - called
    if missed:
        raise RuntimeError(
            f"The self-check cannot reproduce the engine's KV cache in {caches[min(missed)].format!r} for layer "
            f"{min(missed)}, because the policy's attention there is none of transformers' attention functions. Leave "
            "`kv_cache_dtype` out of `vllm_engine_kwargs`, or set `sync_check_steps=0`."
        )


def _eager(module: nn.Module) -> Callable:
    """Returns the "eager" attention function from the file of a layer's class, or of a class that it inherits from."""
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
