"""
Checks that an embedded engine's copy computes the policy's function.

A copy is built from the policy's class and config, and gets its weights. What else acts in the policy is not copied: a
forward hook, or an activation, a scaling or an epsilon that was changed after the policy was loaded. For one forward
pass the policy computes with the copy's own linear layers, so that everything else in it is compared with the copy:

    mean |log p_copy - log p_policy with the copy's layers| <= FLOOR

Where the rest of the two computes in another arithmetic (norms in FP32, kernels that fuse norms with quantizers),
last bits differ, and the bound is that of [`~verify.self_check`].
"""

import math
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from accelerate.utils import gather_object, is_compiled_module
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ...models.names import clean_name
from ...policy.unified import flow
from ..function import first_change, function_of
from ..tensors import outer_modules
from .rounding import Rounding
from .rows import rows_to_check
from .self_check import FLOOR, SLACK, computing_as_the_engine, mean_difference, policy_logps


TOKENS_COMPARED = 480  # of all rows that are compared


@torch.no_grad()
def copy_check(engine) -> dict[str, float]:
    """
    Compares an embedded engine's copy with the policy. All ranks must call it, and all raise if one does.

    Args:
        engine ([`~rollout.TransformersEngine`]): The engine, synced and without noise.

    Returns:
        `dict[str, float]`: `logp_difference` and `bound`, in nats.

    Raises:
        `RuntimeError`: The policy computes something that the copy does not.
    """
    device, layers = engine.accelerator.device, engine.copied_layers()
    rows = rows_to_check(engine, engine.longest_row(), TOKENS_COMPARED)

    def logps(model, rounding: Rounding | None = None) -> list[torch.Tensor]:
        with ExitStack() as hooks:
            for layer in layers.values() if rounding is not None else ():
                hook = layer.register_forward_hook(lambda module, args, output: rounding(output))
                hooks.callback(hook.remove)
            return policy_logps(model, rows, device, engine.accelerator.autocast())

    sampled = logps(engine.copy)
    stand_ins = {place: layer for place, layer in layers.items() if place in engine.replaced_layers()}
    if stand_ins:  # other layers that an adapter changes, such as the gate of a shared expert: merged in the copy
        policy = engine.weights.base_model
        beside = [path for path, module in outer_modules(policy) if isinstance(module, BaseTunerLayer)]
        merged = [path for path in beside if not isinstance(policy.get_submodule(path), ParamWrapper)]
        stand_ins = {path: engine.copy.get_submodule(clean_name(path)) for path in merged} | stand_ins
    with computing_as_the_engine(engine.weights, stand_ins, {}, None), _eager(engine.model):
        expected = logps(engine.model)
    difference, bound = mean_difference(sampled, expected), FLOOR
    if engine.multiplies_codes or engine.wide_norms or (stand_ins and _has_other_kernels(engine)):
        bound += SLACK * mean_difference(logps(engine.copy, Rounding(device)), sampled)
    fault = None
    if not all(row.isfinite().all() for row in expected):
        fault = _broken_policy(engine)
    elif not math.isfinite(difference + bound) or difference > bound:
        fault = _described(engine, difference, bound)
    faults = [other for other in gather_object([fault]) if other]
    if faults:
        raise RuntimeError(faults[0])
    return {"logp_difference": difference, "bound": bound}


def _eager(model: nn.Module) -> AbstractContextManager:
    """Context in which a model that torch.compile has compiled, whole or in parts, computes as it was written."""
    compiled = any(vars(module).get("_compiled_call_impl") is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled or is_compiled_module(model) else nullcontext()


def _has_other_kernels(engine) -> bool:
    """Whether modules of the policy compute with kernels of their own: ours for low precision, or Liger's."""
    modules = engine.weights.base_model.get_decoder().children()
    own = (part for module in modules for part in module.modules())
    return bool(flow(engine.model)) or any("forward" in vars(module) for module in own)


def _broken_policy(engine) -> str:
    broken = engine.weights.first_non_finite()
    cause = "its log-probabilities are not finite" if broken is None else f"its `{broken}` holds NaN or infinity"
    return f"The policy itself is broken, not the engine: {cause}."


def _described(engine, difference: float, bound: float) -> str:
    """Describes how the copy differs from the policy, and what may be changed."""
    layers = engine.copied_layers()
    policy, copy = (
        # The classes of quantized layers differ by design, so only their hooks, which come last, are compared
        {name: seen[-1:] if name in layers else seen for name, seen in function_of(model).items() if name}
        for model in (engine.weights.base_model, engine.copy)
    )
    both = policy.keys() & copy.keys()
    place = first_change({name: copy[name] for name in both}, {name: policy[name] for name in policy if name in both})
    hint = "" if place is None else f" Look at `{place}`."
    return (
        f"The embedded {engine.precision} engine does not sample from the policy: beside its weights, the policy "
        f"computes another function than the copy that samples. Their log-probabilities differ by {difference:.4f} "
        f"nats a token on average, and {bound:.4f} can be explained.{hint} The copy is built from the policy's class "
        "and config, without its forward hooks and without an activation, a scaling or an epsilon that was changed "
        "after it was loaded. Make the change in the class or in the config, undo it, or leave `rollout_precision` "
        "unset: then TRL samples from the policy itself."
    )
