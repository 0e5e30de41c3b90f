"""Says where a token's position depends on the rest of its batch: on the longest row of the forward pass.

| `rope_type` | up to the limit | if a row of the pass is longer | the limit |
|---|---|---|---|
| `longrope` (Phi-3.5, Phi-4-mini) | short factors | long factors, for all rows | `original_max_position_embeddings` |
| `dynamic` (dynamic NTK) | the trained base | a base that grows with the row | `max_position_embeddings` |

So transformers gives a row other positions in another batch. vLLM chooses once, by its context: LongRoPE's long factors
if `max_model_len` exceeds the limit. A run with a `rollout_precision` also chooses once ([`~policy.positions`]).
"""

import math
from typing import NamedTuple


LONGROPE = ("longrope", "su")  # "su" is the name in older configs


class Switching(NamedTuple):
    """
    Rotary embeddings that depend on the longest row of a forward pass.

    Attributes:
        rope_type (`str`): The config's name for them.
        limit (`int`): Length, in tokens, of the longest row up to which they do not change.
        longest (`int`): The model's `max_position_embeddings`.
        parameters (`dict`): The config's `rope_parameters`, or those of one type of layers.
    """

    rope_type: str
    limit: int
    longest: int
    parameters: dict

    def __str__(self) -> str:
        return f"`rope_type`={self.rope_type!r}, which changes where a row is longer than {self.limit} tokens"

    def are_same(self, context: int, other: int) -> bool:
        """Whether rows of up to `context` tokens and rows of up to `other` tokens get the same positions."""
        if self.rope_type in LONGROPE:
            return (context > self.limit) == (other > self.limit)
        return max(context, self.limit) == max(other, self.limit)

    def attention_factors(self, is_long: bool) -> tuple[float, float]:
        """Returns the factors of cosines and sines under LongRoPE in transformers and in vLLM."""
        given, ratio = self.parameters, self.longest / self.limit
        own = given.get("attention_factor")
        if own is None:
            own = self._factor_of(given.get("factor") or ratio)
        vllm = given.get("long_mscale" if is_long else "short_mscale")
        return own, self._factor_of(ratio) if vllm is None else vllm

    def _factor_of(self, ratio: float) -> float:
        return math.sqrt(1 + math.log(ratio) / math.log(self.limit)) if ratio > 1 else 1.0


def switching(config) -> Switching | None:
    """
    Returns the rotary embeddings of a model that depend on the longest row; `None` if it has none.

    Args:
        config ([`~transformers.PreTrainedConfig`]): The model's config, with or without a text config inside.
    """
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    longest = getattr(config, "max_position_embeddings", None)
    # Models whose types of layers rotate differently have a dict for each type
    for rope in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
        rope_type = str(rope.get("rope_type") or rope.get("type"))
        if rope_type in LONGROPE:
            limit = rope.get("original_max_position_embeddings")
            limit = limit or getattr(config, "original_max_position_embeddings", None) or longest
            return Switching(rope_type, limit, longest, rope)
        if "dynamic" in rope_type:
            return Switching(rope_type, longest, longest, rope)
    return None


def why_vllm_differs(config, context: int | None, model_impl: str = "auto") -> str | None:
    """
    Returns why vLLM would compute other positions than a policy whose choice is fixed, or `None` if it computes the
    same.

    Args:
        config ([`~transformers.PreTrainedConfig`]): The policy's config.
        context (`int` or `None`): The longest sequence that vLLM takes, in tokens; `None` for vLLM's default.
        model_impl (`str`, *optional*, defaults to `"auto"`): vLLM's `model_impl`.
    """
    found = switching(config)
    if found is None:
        return None
    if found.rope_type not in LONGROPE:
        trained = found.parameters.get("max_trained_positions", found.limit)
        if trained != found.limit:
            return f"the policy has {found}, and vLLM alone reads `max_trained_positions`={trained}"
        if context is None or context > found.limit:
            return f"the policy has {found}: then the trainer scales by the longest row, and vLLM does not"
        return None
    is_long = context is not None and context > found.limit
    if is_long and model_impl == "transformers":
        return f"the policy has {found}, and `model_impl`='transformers' chooses anew in each forward pass"
    own, vllm = found.attention_factors(is_long)
    if not math.isclose(own, vllm, rel_tol=1e-6):
        return (
            f"the policy has {found}, and an attention factor of {own:.6g} (`attention_factor` and `factor` of "
            f"`rope_parameters`), where vLLM computes with {vllm:.6g}"
        )
    return None
