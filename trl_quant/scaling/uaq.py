"""Invariant scaling of each norm and the linear layers it feeds (QuRL, section 4.3, eq. 10-12).

    W X = (W / s) (s X)                                       eq. 11
    error of the quantized weight   / s                       eq. 12, left: a grid scaled by amax(W / s)
    gradient of the stored weight   * s                       eq. 12, right: dL/d(W / s) = dL/dY (s X)^T

| paper | here |
|---|---|
| `s` | `scale`, > 0; 1.5 for INT8 and FP8 |
| `s X`, absorbed in the preceding layer | the gain of the norm: `w *= s`, or `1 + w *= s` where the norm stores `w` |
| `W / s` | the weights of q, k, v, and of gate, up; in a mixture of experts, also of its routers |

The model computes the same function: up to float32 rounding in float32, up to the weights' own rounding in 16 bits, and
bit for bit where `s` is a power of two. So a router is divided too, although no engine quantizes it: it sees `s X`.
QuRL's factor s^2 for update over error holds for SGD; Adam's step does not grow with the gradient, which leaves a
factor of about s.

Scales the trainer's model in place, before it is sharded.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models.families import family_of
from ..models.names import clean_name
from ..models.norms import feeding_norms


# The allowed range of `s`. FP16, the 16-bit type with the smallest range, has normal values from 2^-14 to 2^16. Linear
# weights of about 0.02 (2^-5.6) stay normal down to 2^-13.6, and norm gains below 2^8 stay below 2^16.
SCALES = (2.0**-8, 2.0**8)
BEFORE_WRAPPING = "Scale the model before it is wrapped."


class _Fed(NamedTuple):
    """A checked norm and the tensors that multiply its output (`inputs`)."""

    gain: Tensor
    offset: bool
    inputs: list[Tensor]


def apply_uaq(model: nn.Module, scale: float) -> int:
    """
    Multiplies the gain of each feeding norm by `scale` and divides the linear layers it feeds by `scale`, in place.

    LoRA's A matrices and DoRA's magnitudes are divided too, so that an adapted model also keeps its function. The
    product of all scales is stored in `model.config.uaq_scale`; `apply_uaq(model, 1 / uaq_applied(model))` undoes it.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): Unquantized, unsharded model.
        scale (`float`): Factor `s`, within [`SCALES`].

    Returns:
        `int`: Number of norms scaled, two per decoder layer.

    Raises:
        `ValueError`: before anything is changed, if `scale` is not a number within [`SCALES`], the architecture is
        unknown, or a weight is not a dense floating-point tensor.
    """
    return scale_norms(model, scale)


def uaq_applied(model: nn.Module) -> float | None:
    """Returns the model's scale, also after loading from a checkpoint; `None` if it was never scaled."""
    return getattr(model.config, "uaq_scale", None)


@torch.no_grad()
def scale_norms(model: nn.Module, scale: float, folded: tuple[type, ...] = ()) -> int:
    """As [`apply_uaq`], for models whose norms of the classes `folded` store the gain itself."""
    check_scale(scale)
    plan = _plan(model, folded)
    if scale != 1:
        for fed in plan:
            fed.gain.data.copy_(_scaled_gain(fed.gain.data, scale, fed.offset))
            for weight in fed.inputs:
                weight.data.copy_(_scaled_input(weight.data, scale))
    model.config.uaq_scale = (uaq_applied(model) or 1.0) * scale
    return len(plan)


def scalings(model_type: str, names: Iterable[str], scale: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """
    Returns the functions with which [`apply_uaq`] scales a checkpoint tensor by tensor. With `1 / uaq_scale` they undo
    the scaling.

    Args:
        model_type (`str`): `model_type` of the text model's config.
        names (`Iterable[str]`): Names of all parameters, as the model has them in memory.
        scale (`float`): Factor `s`, within [`SCALES`].

    Returns:
        `dict[str, Callable]`: name of each tensor that is scaled -> function from the tensor to the scaled one, of the
        same shape and type.

    Raises:
        `ValueError`: for a scale outside [`SCALES`], or as in [`~models.norms.feeding_norms`].
    """
    check_scale(scale)
    offset, names = family_of(model_type).offset, set(names)
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for norm, linears in feeding_norms(model_type, names).items():
        found[norm] = lambda w: _scaled_gain(w, scale, offset)
        for linear in linears:
            name = linear if linear in names else f"{linear}.weight"  # one tensor holds all experts
            found[name] = lambda w: _scaled_input(w, scale)
    return found


def check_scale(scale: float, name: str = "scale") -> None:
    """Raises `ValueError` for a scale outside [`SCALES`]."""
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not SCALES[0] <= scale <= SCALES[1]:
        raise ValueError(
            f"`{name}`={scale!r} must be a number from {SCALES[0]} to {SCALES[1]}, so that weights neither vanish nor "
            "overflow in 16 bits."
        )


def _plan(model: nn.Module, folded: tuple[type, ...]) -> list[_Fed]:
    """Finds and checks everything to scale before anything is changed."""
    config = model.config
    model_type = (config.get_text_config() if hasattr(config, "get_text_config") else config).model_type
    family = family_of(model_type)
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(clean_name(name), module)  # an adapted layer comes before the base inside it
    plan = []
    for name, linears in feeding_norms(model_type, (name for name, _ in model.named_parameters())).items():
        for fed in (name, *linears):
            _check_single(fed, modules)
        norm = modules[clean_name(name.removesuffix(".weight"))]
        gain = _dense(name, norm.weight, (norm.weight.numel(),))
        inputs = []
        for linear in linears:
            parent, _, leaf = clean_name(linear).rpartition(".")
            owner = modules[parent]
            while not hasattr(owner, leaf):  # PEFT wraps a module to adapt one of its tensors
                if owner.parameter_name == leaf:
                    raise ValueError(f"{linear} is a tensor with an adapter. {BEFORE_WRAPPING}")
                owner = owner.base_layer
            inputs += _inputs(linear, getattr(owner, leaf), gain.numel())
        plan.append(_Fed(gain, family.offset and not isinstance(norm, folded), inputs))
    return plan


def _check_single(name: str, modules: dict[str, nn.Module]) -> None:
    """Raises `ValueError` for a tensor within `modules_to_save`, of which there are two: one would be scaled."""
    paths = accumulate(clean_name(name).split("."), "{}.{}".format)
    if any(hasattr(modules.get(path), "original_module") for path in paths):
        raise ValueError(f"{name} is trained as a copy (`modules_to_save`), beside its original. {BEFORE_WRAPPING}")


def _inputs(name: str, linear: nn.Module | nn.Parameter, channels: int) -> list[Tensor]:
    """
    Returns the tensors of a linear layer, or of one wrapped by PEFT, that multiply its input: the tensor itself where
    one holds all experts, and the weight of a router.
    """
    if isinstance(linear, nn.Parameter):
        return [_dense(name, linear, (*linear.shape[:-1], channels))]
    base = linear.base_layer if hasattr(linear, "base_layer") else linear
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"{name} must have a dense weight to be scaled, got {type(base).__name__}.")
    outputs = base.out_features if isinstance(base, nn.Linear) else len(weight)  # a router is no `nn.Linear`
    tensors = [_dense(f"{name}.weight", weight, (outputs, channels))]
    if base is not linear:
        if not isinstance(getattr(linear, "lora_A", None), nn.ModuleDict):
            raise ValueError(
                f"{name} is wrapped by {type(linear).__name__}; only LoRA adapters can be scaled with their base. "
                f"{BEFORE_WRAPPING}"
            )
        for adapter, a in linear.lora_A.items():
            tensors.append(_dense(f"{name}.lora_A.{adapter}", a.weight, (a.weight.shape[0], channels)))
        # DoRA's magnitudes are row norms of W + B A and shrink with it.
        for adapter, magnitude in getattr(linear, "lora_magnitude_vector", {}).items():
            m = magnitude.weight
            tensors.append(_dense(f"{name}.lora_magnitude_vector.{adapter}", m, tuple(m.shape)))
    return tensors


def _dense(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"{name} must be a floating-point weight of 16 bits or more, got {tensor.dtype}.")
    if tensor.is_meta or tuple(tensor.shape) != shape:
        where = "on the meta device" if tensor.is_meta else f"of shape {tuple(tensor.shape)}"
        raise ValueError(f"{name} must be loaded and whole, of shape {shape}, got a tensor {where}.")
    return tensor


def _scaled_gain(w: Tensor, scale: float, offset: bool) -> Tensor:
    """Multiplies the gain of a norm's weight, in at least float32, and rounds once."""
    wide, one = _wide(w), float(offset)
    return (scale * (one + wide) - one).to(w.dtype)


def _scaled_input(w: Tensor, scale: float) -> Tensor:
    """Divides a tensor that multiplies the norm's output, in at least float32, and rounds once."""
    return (_wide(w) / scale).to(w.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
