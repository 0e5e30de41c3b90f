"""
What a quantized KV cache does to attention. vLLM stores the keys and values of each token, after their rotation, as

    code = FP8(clamp(x / scale))        x^ = code * scale

with one scale for the keys of a layer and one for its values, and attends to x^ alone: in prefill as in decoding, a
token's own key and value included. A scale is 1 unless the checkpoint brings another. Where the products themselves
run in FP8 (FlashAttention 3 on Hopper), the queries are rounded alike, and so are the attention weights, inside of the
kernel: in which blocks, and hence how, is not known outside, but by how much is.

| format            | grid                 | relative error, root mean square |
|-------------------|----------------------|----------------------------------|
| `fp8`, `fp8_e4m3` | E4M3: +-448          | 2.7e-2                           |
| `fp8_e5m2`        | E5M2: +-57344        | 5.3e-2                           |

transformers computes attention in functions that it looks up by name, `ALL_ATTENTION_FUNCTIONS`. Another one stands in
for each of them here, rounds what it is given, and calls it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# vLLM's names for what the cache holds
UNQUANTIZED = ("auto", "bfloat16")
CACHE_FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Root mean square of a rounding to E4M3, relative, where all mantissas are as likely: 2^-3 / sqrt(12) * sqrt(0.541)
WEIGHTS_ERROR = 0.0265


@dataclass(frozen=True)
class KVCache:
    """
    The cache of one attention layer of vLLM.

    Attributes:
        format (`str`): A key of [`CACHE_FORMATS`].
        scales (`dict[str, float]`): Its scales, by the names that vLLM's layer has for them.
        in_fp8 (`bool`): Whether the products of attention run in FP8, with queries and attention weights rounded.
        truncates (`bool`): Whether bits that do not fit are dropped, as vLLM does on CPUs; else it rounds to nearest.
    """

    format: str
    scales: dict[str, float]
    in_fp8: bool
    truncates: bool

    def stored(self, x: Tensor, scale: str) -> Tensor:
        """`x`, in BF16 as the engine has it, as it is read from the cache."""
        dtype, scale = CACHE_FORMATS[self.format], self.scales[scale]
        limit = torch.finfo(dtype).max
        exact = (x.to(torch.bfloat16).float() / scale).clamp(-limit, limit)
        codes = exact.to(dtype)
        if self.truncates:  # one code nearer to zero where the nearest lies farther out
            codes = (codes.view(torch.uint8) - (codes.float().abs() > exact.abs()).to(torch.uint8)).view(dtype)
        return (codes.float() * scale).to(x.dtype)


@contextmanager
def attending_to(
    caches: dict[int, KVCache], modules: Iterable[nn.Module], rounding: Callable[[Tensor, float], Tensor] | None
) -> Iterator[None]:
    """
    Context in which the attention layers among `modules` attend to what `caches` hold, by the index of the layer.

    Args:
        rounding: What the outputs are put through with the relative error that the unknown rounding of the attention
            weights makes, where there is one.

    Raises:
        `RuntimeError`: if some of the layers called none of transformers' attention functions.
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
            output = rounding(output, WEIGHTS_ERROR)  # (batch, tokens, heads, head_dim): relative to each head's
        return output, weights

    before = {"eager": None, **ALL_ATTENTION_FUNCTIONS}  # the table lacks it: each model's file has its own
    try:
        ALL_ATTENTION_FUNCTIONS.update({name: partial(attend, function) for name, function in before.items()})
        yield
    finally:
        for name, function in before.items():
            del ALL_ATTENTION_FUNCTIONS[name]
            if ALL_ATTENTION_FUNCTIONS.get(name) is not function:  # somebody else's stood in for it
                ALL_ATTENTION_FUNCTIONS[name] = function
    if missed := caches.keys() - called:
        raise RuntimeError(
            f"What the engine's KV cache in {caches[min(missed)].format!r} does to layer {min(missed)} cannot be "
            "computed: the policy's attention there is none of transformers' attention functions. Leave "
            "`kv_cache_dtype` out of `vllm_engine_kwargs`, or set `sync_check_steps=0`."
        )


def _eager(module: nn.Module) -> Callable:
    """The attention function "eager" of the file that a layer's class, or one that it inherits from, stands in."""
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
