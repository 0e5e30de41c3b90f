"""The checks of a policy that was passed loaded: what an earlier trainer has changed."""

from accelerate.utils import is_compiled_module
from torch.nn import Module

from ..layers import FrozenExperts, FrozenLinear


def check_untouched(args, model) -> None:
    """Raises `ValueError` for a model that an earlier trainer put into codes, or onto an engine's kernels."""
    packed = {module.precision for module in model.modules() if isinstance(module, FrozenLinear | FrozenExperts)}
    if packed and not args.spec.training.freezes_base:
        raise ValueError(
            f"`train_precision`={args.train_precision!r}, but the policy's base is held in "
            f"{', '.join(map(repr, sorted(packed)))}, and its 16-bit weights are gone. Train an adapter with that "
            "`train_precision` (in FP8 and INT8 with `lora_sync='adapter'`), or load the model again."
        )
    if args.exact_rollouts:
        check_not_compiled(model)
    elif any(hasattr(module, "exact_attention") for module in model.modules()):
        raise ValueError(
            "`exact_rollouts`=False, but the policy computes with the kernels of another trainer's engine "
            "(`exact_rollouts`=True). Load the model again."
        )


def check_not_compiled(model: Module) -> None:
    """Raises `ValueError` if torch.compile would compute a model, or a layer of it, instead of an engine's kernels."""
    compiled = [name or "the policy" for name, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise ValueError(
            "`exact_rollouts`=True computes with the engine's kernels, and torch.compile would compute with its own in "
            f"{compiled[0]}. Load the model again, and do not compile it."
        )


def _is_compiled(module: Module) -> bool:
    """Whether a module is a result of `torch.compile`, or was compiled in place by its method `compile`."""
    return is_compiled_module(module) or vars(module).get("_compiled_call_impl") is not None
