r"""
Checks that the engine samples from the policy: compares its log-probabilities with a forward pass of the policy.

The reference is the trainer's model itself. For one forward pass, each linear layer of its decoder computes in the
engine's format, `Y = Q(X) Q(W + BA)^T`, through `formats`, one layer at a time. Keys and values are rounded as in the
engine's KV cache, if that is quantized (`kv_cache.py`). Reference and engine then differ only in the order of sums:
kernels differ in the last bit of BF16, and that bit may move a quantized input to the next code.

The bound on this difference is measured with the run's own format and model. A second reference pass changes every
linear layer's output by up to one BF16 rounding, `y (1 + 2^-8 u)` with u uniform in [-1, 1]. It differs from the first
by d, and the engine must stay within the bound:

    d = mean |log p_jittered - log p_reference|        mean |log p_engine - log p_reference| <= SLACK * d + FLOOR

Weights of an earlier step may change log-probabilities by less than this bound. So three more comparisons are exact:

| compared | with |
|---|---|
| the policy's adapters, or merged weights on the layers and rows that `WeightDrift` measures | the last sync's |
| the policy's [`~fingerprint.fingerprint`], which covers all of its weights and settings | the last sync's |
| the embeddings, norms, biases, experts and routers that the engine holds | the policy's, in the engine's type |

The scales of a quantized KV cache are compared with those of a fresh engine.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from accelerate.utils import gather_object, is_peft_model
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ...layers import EngineWeight, FrozenLinear, UnheldExperts, held_vllm_linear, quantized_linear, vllm_linear
from ...models.linears import unquantized_linears
from ...precisions import PRECISIONS
from ..tensors import base_layer, outer_modules
from ..weights import PolicyWeights
from .kv_cache import KVCache, attending_to
from .rounding import Rounding
from .rows import TEXTS, PicturedRow, pictured_row, rows_to_check


SLACK = 4.0
FLOOR = 2e-3  # nats
SAME = 1e-7  # relative difference up to which weights count as equal
CHECKED_TOKENS = 4  # tokens that the engine adds to each row
PICTURED_TOKENS = 32  # ... and to the row with a picture, of which a server scores no others


def plain_logps(logits: Tensor, tokens: Tensor) -> Tensor:
    """
    Returns the log-probabilities, in nats and of shape (tokens,), of `tokens`, shape (tokens, 1), at temperature 1.
    `logits` have the shape (tokens, vocabulary).
    """
    return logits.float().log_softmax(-1).gather(-1, tokens)[:, 0]


@torch.no_grad()
def policy_logps(
    model: nn.Module,
    sequences: list[list[int]],
    device: torch.device,
    arithmetic: AbstractContextManager | None = None,
    score: Callable[[Tensor, Tensor], Tensor] = plain_logps,
    pictured: PicturedRow | None = None,
) -> list[Tensor]:
    """
    Computes the policy's log-probability, in nats, of each token but the first.

    Args:
        model (`nn.Module`): The policy.
        sequences (`list[list[int]]`): Token ids, all sequences of the same length.
        device (`torch.device`): The policy's device.
        arithmetic (`AbstractContextManager`, *optional*):
            The context in which the engine computes; by default autocast to BF16, as vLLM computes.
        score (`Callable`, *optional*):
            Computes something else from a sequence's logits, shape (length - 1, vocabulary), and the tokens that
            follow, shape (length - 1, 1). By default [`plain_logps`].
        pictured ([`~rows.PicturedRow`], *optional*): The row with a picture that the sequences begin with.

    Returns:
        `list[torch.Tensor]`: For each sequence, a tensor of shape (length - 1,) on the CPU, or what `score` returns.
    """
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        tokens = torch.tensor(sequences, device=device)  # one batch, so that each layer is quantized only once
        fields = {} if pictured is None else pictured.given(tokens.shape[1], device)
        with arithmetic or torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False, **fields).logits[:, :-1]
        targets = tokens[:, 1:, None]
        return [score(x, t).cpu() for x, t in zip(logits, targets, strict=True)]
    finally:
        for module, training in was_training.items():
            module.training = training


def mean_difference(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Returns the mean absolute difference over all tokens; infinite if one of them is NaN."""
    difference = (torch.cat(list(left)) - torch.cat(list(right))).abs().mean().item()
    return difference if difference == difference else float("inf")


def self_check(engine, quick: bool = False) -> dict[str, float]:
    """
    Compares engine and policy. All ranks must call it: each checks its own engine, and all of them raise if one does.

    Args:
        engine ([`VLLMEngine`]): The engine, awake and without noise.
        quick (`bool`, *optional*, defaults to `False`):
            Whether to compare on a third of the rows with the unquantized policy instead of on all with the reference.
            The bound is then twice the difference at the last full check, plus the bound of that check.

    Returns:
        `dict[str, float]`: `sync_check/logp_difference` and `sync_check/bound`, in nats.

    Raises:
        `RuntimeError`: The engine's weights are stale, corrupted, or those of the base model without its adapter.
    """
    device, last = engine.accelerator.device, engine.last_check
    update, pictured = engine.update_since_sync(), None
    is_stale = engine.is_stale()
    differing_weight = engine.differing_weight()
    block, longest = engine.limits()
    # Three times two blocks of the prefix cache and part of a third, if the engine's sequences may be that long
    longest -= CHECKED_TOKENS
    prompts = rows_to_check(engine, longest, len(TEXTS) * min(max(2 * block + 32, 160), longest))
    if quick:
        prompts = prompts[: math.ceil(len(prompts) / len(TEXTS))]
    sequences, sampled = engine.logps(prompts, CHECKED_TOKENS)
    unquantized_difference = None
    if engine.sleep_level:  # a quick check, when the engine wakes up, needs this difference
        unquantized_difference = mean_difference(sampled, policy_logps(engine.model, sequences, device))
    if quick:
        difference = unquantized_difference
        bound = 2 * last["unquantized_difference"] + last["bound"]
    else:
        reference = Reference(engine)
        expected = reference.logps(sequences)
        difference = mean_difference(sampled, expected)
        bound = SLACK * mean_difference(reference.logps(sequences, jitter=True), expected) + FLOOR
        pictured = _pictured_difference(engine, reference, longest)
        engine.last_check = {
            "unquantized_difference": unquantized_difference,
            "bound": bound,
            "logps": sampled,
        }

    changed_scale = _changed_cache_scale(engine)
    fault = None
    if update > SAME:
        fault = f"stale: the policy has moved since the last sync, by {update:.1e} of its norm"
    elif is_stale:
        fault = "stale: the policy's weights or adapters have changed since the last sync"
    elif engine.stale_cache:
        fault = "stale: the prefix cache still holds keys and values from before the last sync"
    elif changed_scale is not None:
        fault = f"stale: {changed_scale}"
    elif not math.isfinite(difference + bound):
        fault = "not to be compared: a log-probability of the engine, or of the policy in its format, is not finite"
        fault += f", and the engine holds another `{differing_weight}` than the policy" if differing_weight else ""
    elif difference > bound:
        fault = _explain_difference(engine, sequences, sampled, bound, last)
    elif differing_weight is not None:
        fault = f"corrupted: the engine holds another `{differing_weight}` than the policy"
    elif pictured is not None and not (math.isfinite(sum(pictured)) and pictured[0] <= pictured[1]):
        difference, bound = pictured
        fault = "those of the policy for text, but not for an image: it places or computes images in another way"
    _require_no_fault(engine, fault, difference, bound)
    found = {"sync_check/logp_difference": difference, "sync_check/bound": bound}
    if pictured is not None:
        found |= {"sync_check/image_logp_difference": pictured[0], "sync_check/image_bound": pictured[1]}
    return found


def _pictured_difference(engine, reference: "Reference", longest: int) -> tuple[float, float] | None:
    """
    Compares engine and policy on a prompt with a picture, if they take one and the run's processor makes one. What
    follows an image token is not compared where it is another: no policy has learned to predict them.

    Returns:
        `tuple[float, float]`: The mean difference and its bound, in nats.
    """
    longest -= PICTURED_TOKENS - CHECKED_TOKENS
    takes_images = engine.image_token is not None and engine.refuses_images is None
    row = pictured_row(engine.processing_class, longest) if takes_images else None
    if row is None:
        return None
    (ids,), (sampled,) = engine.logps([row.prompt], PICTURED_TOKENS, [row.images])
    if engine.image_token in ids[-PICTURED_TOKENS:]:  # no image belongs to it, and the policy refuses such rows
        end = ids.index(engine.image_token, len(ids) - PICTURED_TOKENS)
        ids, sampled = ids[:end], sampled[: end - len(ids)]
    if not len(sampled):
        return None
    is_text = (torch.tensor(ids[1:]) != engine.image_token)[-len(sampled) :]
    (expected,), (jittered,) = (
        [logps[-len(sampled) :][is_text] for logps in reference.logps([ids], jitter=jitter, pictured=row)]
        for jitter in (False, True)
    )
    bound = SLACK * mean_difference([jittered], [expected]) + FLOOR
    return mean_difference([sampled[is_text]], [expected]), bound


def _require_no_fault(engine, fault: str | None, difference: float, bound: float) -> None:
    """
    Raises `RuntimeError`, on all ranks, if a rank found a fault of its engine or of its policy. All ranks must call it.
    """
    message = None
    if fault is not None:
        message = (
            f"The {engine.precision} vLLM engine does not sample from the policy. Its weights are {fault}. Its "
            f"log-probabilities differ from the policy's by {difference:.4f} nats a token on average; the format "
            f"explains up to {bound:.4f}."
        )
    if not math.isfinite(difference):
        broken = engine.weights.first_non_finite()
        if broken is not None:
            message = f"The policy itself is broken, not the engine: its `{broken}` holds NaN or infinity."
    raise_everywhere(message)


def raise_everywhere(message: str | None) -> None:
    """Raises `RuntimeError` on all ranks if one has a message. All ranks must call it."""
    messages = [other for other in gather_object([message]) if other]
    if messages:
        raise RuntimeError(messages[0])


def _changed_cache_scale(engine) -> str | None:
    """Describes the first scale of the engine's KV cache that differs from a fresh engine's; `None` if none does."""
    if not engine.caches:
        return None
    for held in engine.read_caches():
        for index, cache in engine.caches.items():
            for name, expected in cache.scales.items():
                found = held[index].scales[name]
                if found != expected:
                    return f"in layer {index} the KV cache's `{name}` is {found:g}, a fresh engine's {expected:g}"
    return None


def _explain_difference(
    engine, sequences: list[list[int]], sampled: list[Tensor], bound: float, last: dict | None
) -> str:
    """Returns the known fault that explains the engine's log-probabilities."""
    changed = engine.changed_module()
    if changed is not None:
        return (
            f"of another function: the policy's `{changed}` has changed since the last check (a forward hook, or an "
            "attribute such as an activation or an epsilon), and vLLM computes as the model's class and config say"
        )
    if is_peft_model(engine.model):
        base = mean_difference(sampled, Reference(engine).logps(sequences, adapted=False))
        if base <= bound:
            return f"base-only: the adapter does not act (without it the difference is {base:.4f})"
    if last is not None:
        lengths = [len(ids) - CHECKED_TOKENS - 1 for ids in sequences]
        rows = zip(sampled, last["logps"], lengths)
        if all(torch.equal(now[:length], before[:length]) for now, before, length in rows):
            return "stale: the engine computes the same as before the last syncs"
    fault = "corrupted: neither the policy's nor those of an earlier sync"
    if engine.lora_sync == "adapter":
        fault += (
            ". With `lora_sync='adapter'` the engine keeps the base that it started on: if that is not the policy's, "
            "use `lora_sync='merge'`"
        )
    if engine.drafts is not None:
        fault += ". Or vLLM computes otherwise while it speculates: try without 'speculative_config'"
    return fault


class Reference:
    """
    The policy's forward pass as the engine should compute it.

    Parameters:
        engine ([`VLLMBase`]): The engine. It determines the policy, the precision and how adapters are synced.
    """

    def __init__(self, engine):
        self.engine = engine
        self.weights = engine.weights
        self._gathered: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}  # a layer's experts, and these in full

    def logps(
        self,
        sequences: list[list[int]],
        adapted: bool = True,
        jitter: bool = False,
        score: Callable[[Tensor, Tensor], Tensor] = plain_logps,
        pictured: PicturedRow | None = None,
    ) -> list[Tensor]:
        """
        Computes log-probabilities in nats, as [`policy_logps`] returns them.

        Args:
            sequences (`list[list[int]]`): Token ids.
            adapted (`bool`, *optional*, defaults to `True`): Whether the adapters are active.
            jitter (`bool`, *optional*, defaults to `False`): Whether each linear layer's output gets an error of up to
                one rounding.
            score, pictured: As in [`policy_logps`].
        """
        device = self.engine.accelerator.device
        rounding = Rounding(device) if jitter else None
        stand_ins = self._stand_ins(adapted, rounding)
        with computing_as_the_engine(self.weights, stand_ins, self.engine.caches, rounding), ExitStack() as hooks:
            for layer in self.other_layers() if rounding is not None else ():
                hook = layer.register_forward_hook(lambda module, args, output: rounding(output))
                hooks.callback(hook.remove)
            return policy_logps(self.engine.model, sequences, device, score=score, pictured=pictured)

    def other_layers(self) -> list[nn.Module]:
        """Returns the head, and the linear layers of a tower and of what joins it to the text."""
        policy = self.weights.base_model
        inside = set(policy.get_decoder().modules())
        found = (policy.get_submodule(name) for name in unquantized_linears(policy, head=False))
        return [policy.get_output_embeddings(), *(module for module in found if module not in inside)]

    def _stand_ins(self, adapted: bool, rounding: Rounding | None) -> dict[str, nn.Module]:
        """Returns the module that replaces each linear layer of the decoder, by the layer's place in the policy."""
        policy, engine = self.weights.base_model, self.engine
        found = self.weights.linears()
        layers = {place: layer for place, layer in found.items() if not layer.holds_experts}
        named = {layer.name: policy.get_submodule(place) for place, layer in layers.items()}
        merged = adapted and engine.lora_sync == "merge"
        shares_scale = PRECISIONS[engine.precision].vllm.fused_scale
        stand_ins = {}
        for place, layer in layers.items():
            fused = (layer.name,)
            if shares_scale:
                fused = tuple(name for name in engine.fused_in_engine(layer.name) if name in named)
            group = [named[name] if merged else base_layer(named[name]) for name in fused]
            stand_in = EngineLayer(engine, group, fused.index(layer.name), rounding)
            keeps_adapter = adapted and not merged and isinstance(named[layer.name], BaseTunerLayer)
            stand_ins[f"{place}.base_layer" if keeps_adapter else place] = stand_in
        if PRECISIONS[engine.precision].format is None:  # experts compute in BF16, as the policy's own
            return stand_ins
        outer = (module for _, module in outer_modules(policy) if isinstance(module, ParamWrapper))
        wrappers = {module.get_base_layer(): module for module in outer} if merged else {}
        frozen = {layer for _, layer in self.weights.frozen()}
        owners: dict[nn.Module, dict[str, Tensor]] = {}
        for place in (place for place in found if place not in layers):
            parent, _, leaf = place.rpartition(".")
            owner = policy.get_submodule(parent)
            if owner not in owners:
                held = dict(owner.named_parameters(recurse=False))
                owners[owner] = self.weights.merged(wrappers[owner]) if owner in wrappers else held
            if owner in frozen:  # the engine holds the same codes
                stand_ins[place] = owner.as_engine(leaf, torch.bfloat16)
                continue
            read = partial(self._whole, owners[owner], leaf)
            stand_ins[place] = UnheldExperts(read, found[place].shape, engine.precision, torch.bfloat16)
        return stand_ins

    def _whole(self, tensors: dict[str, Tensor], leaf: str) -> Tensor:
        """
        Returns a tensor of a layer's experts in full. The tensors of one layer are gathered together, and kept until
        those of the next layer are: which experts a rank reads depends on its tokens, and gathering is collective.
        """
        if self._gathered[0] is not tensors:
            with self.weights.gathered(tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)):
                whole = {name: self.weights.full(tensor) for name, tensor in tensors.items()}
                self._gathered = tensors, {n: t.clone() for n, t in whole.items()} if self.weights.is_zero3 else whole
        return self._gathered[1][leaf]


class EngineLayer(nn.Module):
    """
    Replaces a linear layer of the policy and computes as the engine does. It reads the policy's weights at each call,
    so that only one layer at a time is held in full.

    Parameters:
        engine ([`VLLMBase`]): The engine.
        group (`list[nn.Module]`): The layers that the engine quantizes as one matrix, with the adapters that it merges.
        index (`int`): Index of this layer in the group.
        rounding ([`Rounding`] or `None`): Adds a random error to the outputs, if given.
    """

    def __init__(self, engine, group: list[nn.Module], index: int, rounding: Rounding | None):
        super().__init__()
        # In a tuple, so that the policy's layers do not become this module's children
        self.setup = (engine, group, index, rounding)

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        """Maps (..., in) to (..., out) in BF16."""
        engine, group, index, rounding = self.setup
        layer = group[index]
        base, bias = base_layer(layer), engine.weights.bias_of_linear(layer)
        is_held = isinstance(layer, FrozenLinear) and layer.precision == engine.precision
        if is_held and layer.quantizes_inputs:
            y = held_vllm_linear(x, layer.codes(), engine.precision, bias)  # the engine holds the same frozen base
            return y if rounding is None else rounding(y, engine.product_errors.get(base.in_features, 0.0))
        if is_held:
            weight = EngineWeight(layer.dequantize(torch.bfloat16))
            y = quantized_linear(x.to(torch.bfloat16), weight, None, bias)
            return y if rounding is None else rounding(y)
        weights = [engine.weights.of_linear(layer) for layer in group]
        if engine.travels_quantized and engine.lora_sync == "adapter":
            weights = [weight.to(engine.checkpoint_dtype) for weight in weights]  # the engine keeps the loaded base
        y = vllm_linear(x, weights, index, engine.precision, bias, wide=not engine.travels_quantized)
        return y if rounding is None else rounding(y, engine.product_errors.get(base.in_features, 0.0))


@contextmanager
def computing_as_the_engine(
    weights: PolicyWeights, stand_ins: dict[str, nn.Module], caches: dict[int, KVCache], rounding: Rounding | None
) -> Iterator[None]:
    """
    Context in which the live policy computes as the engine does. Everything is undone on exit.

    1. `stand_ins` replace the layers that they are named after. The layers' own forward hooks act on them. Where they
       replace tensors that hold experts, the policy multiplies expert by expert, without the adapters of experts, which
       a stand-in has merged.
    2. In a sharded policy (FSDP2, ZeRO-3) the other modules run without the hooks that gather parameters, and gather
       their own parameters as a sync does. FSDP2's hooks would round them before they are quantized, and DeepSpeed's
       fail if one layer reads the weights of another.
    3. Attention rounds keys and values as `caches` do. They are empty unless the engine's KV cache is quantized.
    """
    policy = weights.base_model
    places = [(policy.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in stand_ins]
    live = [getattr(parent, leaf) for parent, leaf in places]
    own_hooks = [_forward_hooks_of(stand_in) for stand_in in stand_ins.values()]
    names = ("forward", "_forward_pre_hooks", "_forward_hooks")
    modules = list(weights.model.modules()) if weights.is_sharded else []
    saved_attributes = {}
    for module in modules:
        saved_attributes[module] = {name: vars(module)[name] for name in names if name in vars(module)}
    implementations = policy.get_experts_implementation()
    experts = [parent for (parent, _), layer in zip(places, live, strict=True) if isinstance(layer, nn.Parameter)]
    orders = {parent: list(parent._parameters) for parent in experts}
    outer = [(path, module) for path, module in outer_modules(policy) if isinstance(module, ParamWrapper)]
    inside = {part for _, module in outer for part in module.modules()}
    wrapped = [(path, module) for path, module in outer if module.get_base_layer() in experts]
    try:
        if experts:
            policy.set_experts_implementation("eager")
        for path, wrapper in wrapped:
            policy.set_submodule(path, wrapper.get_base_layer())
        for module in saved_attributes:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
            if module._parameters and module not in inside:
                module.forward = partial(_gathered_call, weights, module, module.forward)
        for _, wrapper in outer if weights.is_sharded else ():  # reads the parameters of all modules inside it
            wrapper.forward = partial(_whole_call, weights, wrapper, wrapper.forward)
        for (parent, leaf), layer, stand_in in zip(places, live, stand_ins.values(), strict=True):
            if isinstance(layer, nn.Parameter):
                delattr(parent, leaf)  # torch lets no module take a parameter's place
            setattr(parent, leaf, stand_in)
            if not weights.is_sharded:
                vars(stand_in).update(_forward_hooks_of(layer))
        with attending_to(caches, policy.get_decoder().modules(), rounding):
            yield
    finally:
        if experts:
            policy.set_experts_implementation(implementations)
        for path, wrapper in wrapped:
            policy.set_submodule(path, wrapper)
        for (parent, leaf), layer, stand_in, hooks in zip(places, live, stand_ins.values(), own_hooks, strict=True):
            setattr(parent, leaf, layer)
            vars(stand_in).update(hooks)
        for parent, order in orders.items():  # as it was: ranks gather in it, and a sync is announced in it
            parent._parameters.update({leaf: parent._parameters.pop(leaf) for leaf in order})
        for module, attributes in saved_attributes.items():
            vars(module).pop("forward", None)
            vars(module).update(attributes)


def _forward_hooks_of(module: nn.Module) -> dict:
    """Returns the attributes in which a module keeps its forward hooks."""
    return {name: hooks for name, hooks in vars(module).items() if re.fullmatch("_forward_(pre_)?hooks.*", name)}


def _whole_call(weights: PolicyWeights, module: nn.Module, forward: Callable, *args, **kwargs):
    """Calls a module's `forward` while the parameters of all modules inside it are gathered."""
    with weights.gathered(module.parameters()), weights.whole(module):
        return forward(*args, **kwargs)


def _gathered_call(weights: PolicyWeights, module: nn.Module, forward: Callable, *args, **kwargs):
    """Calls a module's `forward` while its own parameters are gathered."""
    parts = {name: param for name, param in module._parameters.items() if param is not None}
    with weights.gathered(parts.values()):
        try:
            module._parameters.update({name: weights.full(param) for name, param in parts.items()})
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(parts)
