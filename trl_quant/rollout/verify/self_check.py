r"""
Does the engine sample from the policy? Its log-probabilities against those of the policy's own forward.

The reference is the trainer's model itself, with each linear layer of the decoder computing, for the duration of one
forward, what it computes in the engine's format: `Y = Q(X) Q(W + BA)^T`, through `formats`, one layer at a time. Keys
and values are rounded as in the engine's KV cache, where that is quantized (`kv_cache.py`). What is left between the
two is the order of sums: kernels differ in the last bit of BF16, and a last bit may move a code to the next one. The
bound on that comes from the format and the model as they are: the same reference forward with every linear layer's
output off by up to one BF16 rounding, `y (1 + 2^-8 u)`, u uniform in [-1, 1], moves by

    d = mean |log p_jittered - log p_reference|        and the engine must stay within   SLACK * d + FLOOR.

Weights that lag behind may differ by less than any such bound. So three things are compared without one:

| compared | with |
|---|---|
| the policy's adapters, or merged weights on the layers and rows that `WeightDrift` measures | the last sync's |
| the policy's [`~fingerprint.fingerprint`], which has all of its weights and settings | the last sync's |
| the embeddings, norms and biases that an engine in this process holds | the policy's, in the engine's type |

The scales of a quantized KV cache are read, and compared with those of a fresh engine.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate.utils import gather_object, is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ...layers import EngineWeight, FrozenLinear, quantized_linear, vllm_linear
from ...precisions import PRECISIONS
from ..stream import PolicyWeights, base_layer
from .kv_cache import KVCache, attending_to


SLACK = 4.0
FLOOR = 2e-3  # nats
SAME = 1e-7  # relative
CHECKED_TOKENS = 4
TEXTS = (
    "To find how many apples are left, start from what was bought and take away what was eaten. Ana bought 3 bags with "
    "12 apples each, so she had 3 * 12 = 36 apples. She gave 7 to her brother and ate 2 a day for 5 days, which makes "
    "7 + 2 * 5 = 17. Then 36 - 17 = 19 apples are left. The answer is 19. Check: 19 + 17 = 36, as it should be. ",
    "def running_mean(values, window):\n    total, means = 0.0, []\n    for index, value in enumerate(values):\n"
    "        total += value\n        if index >= window:\n            total -= values[index - window]\n"
    "        means.append(total / min(index + 1, window))\n    return means\n\n\nprint(running_mean([4, 8, 15], 2))\n",
    "The river rises in the hills north of the town, runs past two mills and an old stone bridge, and reaches the sea "
    "after a day's walk. In spring the meadows along it are under water; in August children cross it on foot. Nobody "
    "remembers who built the bridge, but a date is cut into its middle arch, and every year somebody paints it white. ",
)


def check_sequences(tokenizer, length: int) -> list[list[int]]:
    """The texts as token ids, `length` of each: the same on every rank, natural language, longer than a cache block."""
    sequences = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        sequences.append((ids * (length // len(ids) + 1))[:length])
    return sequences


@torch.no_grad()
def policy_logps(model: nn.Module, sequences: list[list[int]], device: torch.device) -> list[Tensor]:
    """The policy's log-probability of each token but the first of each sequence, in BF16 as the engine computes."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        tokens = torch.tensor(sequences, device=device)  # all as long, so that one forward quantizes each layer once
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        targets = tokens[:, 1:, None]
        return [x.float().log_softmax(-1).gather(-1, t)[:, 0].cpu() for x, t in zip(logits, targets, strict=True)]
    finally:
        for module, training in was_training.items():
            module.training = training


def mean_difference(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Mean |difference| over all tokens; infinite where one of them is not a number."""
    difference = (torch.cat(list(left)) - torch.cat(list(right))).abs().mean().item()
    return difference if difference == difference else float("inf")


def self_check(engine, quick: bool = False) -> dict[str, float]:
    """
    Compares engine and policy. Collective: every rank checks its own engine, and all of them raise if one does.

    Args:
        engine ([`VLLMEngine`]): The engine, awake and without noise.
        quick (`bool`, *optional*, defaults to `False`):
            Scores one text, against the unquantized policy: the two may then differ by twice what the last whole check
            found between them, plus its bound.

    Returns:
        `dict[str, float]`: `sync_check/logp_difference` and `sync_check/bound`, in nats.

    Raises:
        `RuntimeError`: if the engine's weights are stale, corrupted, or those of the base model alone.
    """
    device, last = engine.accelerator.device, engine.last_check
    lag, changed, other = engine.update_since_sync(), engine.is_stale(), engine.held_otherwise()
    block, longest = engine.limits()
    # Two blocks of the prefix cache and a part of a third, where the engine takes so many
    prompts = check_sequences(engine.tokenizer, min(max(2 * block + 32, 160), longest - CHECKED_TOKENS))
    sequences, sampled = engine.logps(prompts[:1] if quick else prompts, CHECKED_TOKENS)
    plain = None
    if engine.sleep_level:  # what a quick check after a wake-up is held against
        plain = mean_difference(sampled, policy_logps(engine.model, sequences, device))
    if quick:
        difference, bound = plain, 2 * last["plain"] + last["bound"]
    else:
        reference = Reference(engine)
        expected = reference.logps(sequences)
        difference = mean_difference(sampled, expected)
        bound = SLACK * mean_difference(reference.logps(sequences, jitter=True), expected) + FLOOR
        engine.last_check = {"plain": plain, "bound": bound, "logps": sampled}

    fault = None
    if lag > SAME:
        fault = f"stale: the policy has moved since the last sync, by {lag:.1e} of its norm"
    elif changed:
        fault = "stale: the policy's weights or adapters have changed since the last sync"
    elif engine.stale_cache:
        fault = "stale: the prefix cache still holds keys and values from before the last sync"
    elif (scale := _other_scale(engine)) is not None:
        fault = f"stale: {scale}"
    elif not difference <= bound:
        fault = _describe(engine, sequences, sampled, bound, last)
    elif other is not None:
        fault = f"corrupted: the engine holds another `{other}` than the policy"
    if fault is not None:
        fault = (
            f"The {engine.precision} vLLM engine does not sample from the policy. Its weights are {fault}. Its "
            f"log-probabilities differ from the policy's by {difference:.4f} nats a token on average; the format "
            f"explains up to {bound:.4f}."
        )
    if not math.isfinite(difference) and (broken := engine.weights.first_non_finite()) is not None:
        fault = f"The policy itself is broken, not the engine: its `{broken}` holds NaN or infinity."
    fault = next((found for found in gather_object([fault]) if found), None)
    if fault is not None:
        raise RuntimeError(fault)
    return {"sync_check/logp_difference": difference, "sync_check/bound": bound}


def _other_scale(engine) -> str | None:
    """The first scale of the engine's KV cache that is not what a fresh engine has."""
    for held in engine.read_caches() if engine.caches else ():
        for index, cache in engine.caches.items():
            for name, expected in cache.scales.items():
                if (found := held[index].scales[name]) != expected:
                    return f"in layer {index} the KV cache's `{name}` is {found:g}, a fresh engine's {expected:g}"
    return None


def _describe(engine, sequences: list[list[int]], sampled: list[Tensor], bound: float, last: dict | None) -> str:
    """Which of the known faults explains the engine's log-probabilities."""
    if is_peft_model(engine.model):
        base = mean_difference(sampled, Reference(engine).logps(sequences, adapted=False))
        if base <= bound:
            return f"base-only: the adapter does not act (without it the difference is {base:.4f})"
    prompts = [len(ids) - CHECKED_TOKENS - 1 for ids in sequences]
    if last is not None and all(torch.equal(a[:n], b[:n]) for a, b, n in zip(sampled, last["logps"], prompts)):
        return "stale: the engine computes what it computed before the last syncs"
    if engine.lora_sync == "adapter":
        return (
            "corrupted: neither the policy's, nor those of a sync before. With `lora_sync='adapter'` the engine keeps "
            "the base that it started on: where that is not the policy's, use `lora_sync='merge'`"
        )
    return "corrupted: neither the policy's, nor those of a sync before"


class Reference:
    """
    The policy's forward as the engine should compute it.

    Parameters:
        engine ([`VLLMBase`]): Whose policy, precision and way of syncing adapters are taken.
    """

    def __init__(self, engine):
        self.engine = engine
        self.weights = engine.weights

    def logps(self, sequences: list[list[int]], adapted: bool = True, jitter: bool = False) -> list[Tensor]:
        """Log-probabilities as [`policy_logps`]; without the adapters, or one rounding off, on request."""
        device = self.engine.accelerator.device
        rounding = Rounding(device) if jitter else None
        stand_ins = self._stand_ins(adapted, rounding)
        with computing_as_the_engine(self.weights, stand_ins, self.engine.caches, rounding):
            hook = None
            if rounding is not None:
                head = self.weights.base_model.get_output_embeddings()
                hook = head.register_forward_hook(lambda module, args, output: rounding(output))
            try:
                return policy_logps(self.engine.model, sequences, device)
            finally:
                if hook is not None:
                    hook.remove()

    def _stand_ins(self, adapted: bool, rounding: "Rounding | None") -> dict[str, nn.Module]:
        """What each linear layer of the decoder computes in the engine, by the layer's place in the policy."""
        policy, engine = self.weights.base_model, self.engine
        layers = self.weights.linears()
        named = {layer.name: policy.get_submodule(place) for place, layer in layers.items()}
        merged = adapted and engine.lora_sync == "merge"
        fuses = PRECISIONS[engine.precision].vllm.fused_scale
        stand_ins = {}
        for place, layer in layers.items():
            fused = layer.fused if fuses else (layer.name,)
            group = [named[name] if merged else base_layer(named[name]) for name in fused]
            stand_in = EngineLayer(engine, group, fused.index(layer.name), rounding)
            keeps_adapter = adapted and not merged and isinstance(named[layer.name], BaseTunerLayer)
            stand_ins[f"{place}.base_layer" if keeps_adapter else place] = stand_in
        return stand_ins


class EngineLayer(nn.Module):
    """
    Stands in for a linear layer of the policy and computes what the engine does, from the policy's weights as they are
    when it is called: one layer at a time is held in full.

    Parameters:
        engine ([`VLLMBase`]): The engine.
        group (`list[nn.Module]`): The layers that the engine quantizes as one matrix, with the adapters that it merges.
        part (`int`): Which of them this is.
        rounding ([`Rounding`] or `None`): What the outputs are put through.
    """

    def __init__(self, engine, group: list[nn.Module], part: int, rounding: "Rounding | None"):
        super().__init__()
        # In a tuple, lest the policy's layers become this module's children
        self.parts = (engine, group, part, rounding)

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        engine, group, part, rounding = self.parts
        base, bias = base_layer(group[part]), None
        if base.bias is not None:
            with engine.weights.gathered([base.bias]):
                bias = engine.weights.full(base.bias).clone()
        if isinstance(group[part], FrozenLinear) and group[part].precision == engine.precision:
            numbers = EngineWeight(group[part].dequantize(torch.bfloat16))  # the engine's own base
            y = quantized_linear(x.to(torch.bfloat16), numbers, None, bias)
            return y if rounding is None else rounding(y)
        weights = [engine.weights.of_linear(layer) for layer in group]
        if engine.travels_quantized and engine.lora_sync == "adapter":
            weights = [weight.to(engine.checkpoint_dtype) for weight in weights]  # it stays as it was loaded
        y = vllm_linear(x, weights, part, engine.precision, bias, wide=not engine.travels_quantized)
        return y if rounding is None else rounding(y, engine.product_errors.get(base.in_features, 0.0))


class Rounding:
    """Moves outputs by up to one rounding of BF16, and by the error of the device's own product; seeded."""

    def __init__(self, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, y: Tensor, product_error: float = 0.0) -> Tensor:
        """`y`, (..., out), one rounding and `product_error` (relative, root mean square) off."""
        u = torch.rand(y.shape, generator=self.generator, device=y.device) * 2 - 1
        n = torch.randn(y.shape, generator=self.generator, device=y.device)
        return (y * (1 + 2.0**-8 * u) + product_error * y.float().square().mean(-1, True).sqrt() * n).to(y.dtype)


@contextmanager
def computing_as_the_engine(
    weights: PolicyWeights, stand_ins: dict[str, nn.Module], caches: dict[int, KVCache], rounding: Rounding | None
) -> Iterator[None]:
    """
    All that the self-check does to a live model, undone on exit.

    1. `stand_ins` take the places of the layers that they are named after.
    2. Of a sharded policy (FSDP2, ZeRO-3) the other modules are called without the hooks that gather parameters, each
       with its own parameters gathered as for a sync: FSDP2's hooks would round them to the type of its forward before
       they are quantized, and DeepSpeed's do not bear that one layer reads the weights of another.
    3. Attention reads keys and values from `caches`, which are empty unless the engine's are quantized.
    """
    policy = weights.base_model
    places = [(policy.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in stand_ins]
    live = [getattr(parent, leaf) for parent, leaf in places]
    names = ("forward", "_forward_pre_hooks", "_forward_hooks")
    modules = list(weights.model.modules()) if weights.is_sharded else []
    own = {module: {name: vars(module)[name] for name in names if name in vars(module)} for module in modules}
    try:
        for module in own:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
            if module._parameters:
                module.forward = partial(_gathered_call, weights, module, module.forward)
        for (parent, leaf), stand_in in zip(places, stand_ins.values(), strict=True):
            setattr(parent, leaf, stand_in)
        with attending_to(caches, policy.get_decoder().modules(), rounding):
            yield
    finally:
        for (parent, leaf), layer in zip(places, live, strict=True):
            setattr(parent, leaf, layer)
        for module, attributes in own.items():
            vars(module).pop("forward", None)
            vars(module).update(attributes)


def _gathered_call(weights: PolicyWeights, module: nn.Module, forward: Callable, *args, **kwargs):
    parts = {name: param for name, param in module._parameters.items() if param is not None}
    with weights.gathered(parts.values()):
        try:
            module._parameters.update({name: weights.full(param) for name, param in parts.items()})
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(parts)
