"""Maps a model to its quantizable linear layers. Nothing outside of `models/` decides which layers are quantized.

Engines quantize the linear layers of the decoder. The head, the embeddings, a vision tower, the routers of a mixture of
experts and the gates of linear attention keep their type: a quantized router would send tokens to other experts.
Convolutions are no linear layers, and keep it too.

| question | answer | asked by |
|---|---|---|
| Which layers of this model, experts included? | [`sampled_linears`] | engines, training in FP8, checkpoints |
| Which modules hold these layers? | [`places_of_modules`] | the same |
| Which linear layers stay unquantized? | [`unquantized_linears`] | engines, `trl-quant prepare` and `export` |
| Is this tensor of a checkpoint or a stream one? | [`is_quantizable`] | readers and writers of checkpoints |
| Which layers does an engine fuse with this one? | [`fused_with`], [`FusedGroups`] | code that keeps them together |
| Which tensors does a sync send together? | [`sent_with`] | vLLM's engines |

[`linears`] describes all mixtures of experts; [`sampled_linears`] refuses those whose experts cannot be quantized.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from .families import EMBEDDING, EXPERT, EXPERT_PARTS, FAMILIES, FUSED, GATE, HEAD, ROUTER, Family, families_with
from .names import clean_name, place_in_layer


class LinearLayer(NamedTuple):
    """
    A quantizable linear layer.

    Attributes:
        name (`str`): Its name in a checkpoint.
        shape (`tuple[int, ...]`): (out, in); (experts, out, in) for a tensor that holds all experts of a layer.
        fused (`tuple[str, ...]`):
            Names of the layers of the model that an engine computes as one matrix with this one, itself included.
        norm (`str` or `None`): Name of the norm that feeds it, where the family is known and a norm does.
        is_expert (`bool`): Whether it belongs to one or to all experts of a mixture.
    """

    name: str
    shape: tuple[int, ...]
    fused: tuple[str, ...]
    norm: str | None
    is_expert: bool

    @property
    def holds_experts(self) -> bool:
        """Whether one tensor holds all experts of a layer."""
        return len(self.shape) == 3

    @property
    def weight(self) -> str:
        """The name of its weight in a checkpoint: of the tensor itself where that holds all experts."""
        return self.name if self.holds_experts else f"{self.name}.weight"


# Models in memory


def linears(model: nn.Module) -> dict[str, LinearLayer]:
    """
    Maps a model of transformers, on any device and with or without adapters of PEFT, to its quantizable layers.

    Returns:
        `dict[str, LinearLayer]`: by the path in `model` of each layer's module, or of the tensor that experts share.
    """
    shapes = {}
    decoder = set(model.get_decoder().modules()) - set(_head_modules(model))  # some decoders contain their head
    for place, module in model.named_modules():
        if module not in decoder or _is_adapters(place):
            continue
        if isinstance(module, nn.Linear):
            if not keeps_type(clean_name(f"{place}.weight")):
                shapes[place] = (module.out_features, module.in_features)
            continue
        for leaf, tensor in module.named_parameters(recurse=False):
            shape = tuple(getattr(tensor, "ds_shape", tensor.shape))  # ZeRO-3's, of a tensor in parts
            if len(shape) == 3 and EXPERT.fullmatch(clean_name(f"{place}.{leaf}")):
                shapes[f"{place}.{leaf}"] = shape

    family = FAMILIES.get(model.config.get_text_config().model_type)
    names = {clean_name(place) for place in shapes}
    found = {}
    for place, shape in shapes.items():
        name = clean_name(place)
        fused = tuple(other for other in fused_with(name) if other in names)
        is_expert = EXPERT.fullmatch(name) is not None
        found[place] = LinearLayer(name, shape, fused, _feeding_norm(family, name), is_expert)
    return found


def sampled_linears(model: nn.Module) -> dict[str, LinearLayer]:
    """
    As [`linears`], for dense models and for mixtures of experts that the embedded engine samples from.

    Raises:
        ValueError: The model is a mixture of another family, or has experts in another layout.
    """
    found, known = linears(model), families_with("mixture")
    model_type = model.config.get_text_config().model_type
    has_experts = any(is_mixtures(clean_name(name)) for name, _ in model.get_decoder().named_parameters())
    in_one_tensor = all(layer.holds_experts for layer in found.values() if layer.is_expert)
    if has_experts and not (model_type in known and in_one_tensor):
        raise ValueError(
            f"model_type {model_type!r}: these experts cannot be quantized. Supported are the mixtures of experts of "
            f"transformers' {', '.join(known)}."
        )
    return found


def places_of_modules(layers: dict[str, LinearLayer]) -> list[str]:
    """Returns the path of the module that holds each of `layers`. The two tensors of a layer's experts share one."""
    own = (place.rpartition(".")[0] if layer.holds_experts else place for place, layer in layers.items())
    return list(dict.fromkeys(own))


def unquantized_linears(model: nn.Module, head: bool = True) -> list[str]:
    """
    Returns the names of the layers of a model that keep their type though their weight is a matrix: gates of linear
    attention and of shared experts, linear layers of a vision tower, norms with a gain for each head (Cohere's), and
    the head. Embeddings and routers are known by name.

    Args:
        model (`nn.Module`): A model of transformers.
        head (`bool`, *optional*, defaults to `True`): Whether to list the head.
    """
    quantized = linears(model)
    left_out = set() if head else set(_head_modules(model))
    names = []
    for place, module in model.named_modules():
        if place in quantized or module in left_out or _is_adapters(place):
            continue
        if isinstance(module, nn.Linear) or (_is_matrix(module) and not ROUTER.fullmatch(f"{place}.weight")):
            names.append(clean_name(place))
    return list(dict.fromkeys(names))


def gates_of(model: nn.Module) -> list[str]:
    """Returns the names of the linear layers of a model that are gates of linear attention."""
    return [name for name in unquantized_linears(model) if GATE.fullmatch(f"{name}.weight")]


def _is_matrix(module: nn.Module) -> bool:
    """Whether a module that is neither a linear layer nor an embedding has a matrix of its own as its weight."""
    weight = module._parameters.get("weight")
    shape = () if weight is None else tuple(getattr(weight, "ds_shape", weight.shape))
    return len(shape) == 2 and not isinstance(module, nn.Embedding)


def _head_modules(model: nn.Module) -> list[nn.Module]:
    head = model.get_output_embeddings()
    return [] if head is None else list(head.modules())


def _is_adapters(place: str) -> bool:
    return ".lora_" in place


def _feeding_norm(family: Family | None, name: str) -> str | None:
    place = place_in_layer(name)
    if family is None or place is None:
        return None
    stack, index, path = place
    for norm, fed in family.feeds.items():
        if path in fed:
            return f"{stack}.{index}.{norm}"
    return None


# Tensors of checkpoints and streams


def is_quantizable(name: str, tensor: Tensor, ignore: Iterable[str] = HEAD) -> bool:
    """
    Whether the tensor `name` is the weight of a linear layer to quantize: a floating-point matrix called `*.weight`
    that is neither an embedding nor one that [`keeps_type`], and whose module is not in `ignore`.

    Args:
        name (`str`): The tensor's name.
        tensor (`torch.Tensor`): The tensor, on any device.
        ignore (`Iterable[str]`, *optional*):
            Names of modules, or regular expressions after `re:`. Where the model is known, these are its
            [`unquantized_linears`].
    """
    module, _, kind = name.rpartition(".")
    if kind != "weight" or tensor.ndim != 2 or not tensor.is_floating_point():
        return False
    if EMBEDDING.fullmatch(name) or keeps_type(name):
        return False
    for ignored in ignore:
        if ignored.startswith("re:"):
            is_ignored = re.match(ignored.removeprefix("re:"), module) is not None
        else:
            is_ignored = ignored == module
        if is_ignored:
            return False
    return True


def keeps_type(name: str) -> bool:
    """
    Whether the tensor `name` is the weight of a linear layer in the decoder that is never quantized: of a router, or of
    a gate of linear attention, by the policy's name or by that of vLLM's layer.
    """
    return ROUTER.fullmatch(name) is not None or GATE.fullmatch(name) is not None


def holds_experts(name: str, tensor: Tensor) -> bool:
    """Whether the tensor `name` holds one of the matrices of all experts of a layer, (experts, out, in)."""
    return tensor.ndim == 3 and EXPERT.fullmatch(name) is not None and name.rpartition(".")[2] in EXPERT_PARTS


def is_mixtures(name: str) -> bool:
    """Whether the tensor `name` belongs to a router or to the experts of a mixture."""
    return ROUTER.fullmatch(name) is not None or EXPERT.fullmatch(name) is not None


# Fused layers


def fused_with(name: str) -> tuple[str, ...]:
    """Returns the names of the layers that an engine computes as one matrix with the layer called `name`, itself
    included, in the order of that matrix. A model may lack some of them.

    ```python
    >>> fused_with("model.layers.0.mlp.up_proj")
    ('model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj')
    ```
    """
    parent, dot, leaf = name.rpartition(".")
    for group in FUSED:
        if leaf in group:
            return tuple(f"{parent}{dot}{part}" for part in group)
    return (name,)


def fused_layer(name: str) -> str:
    """Returns the name of the module that has the tensor `name`, or one joint name such as `mlp.gate_proj+up_proj`."""
    first, *others = fused_with(name.rpartition(".")[0])
    return "+".join([first, *(other.rpartition(".")[2] for other in others)])


def sent_with(name: str) -> str:
    """
    Returns the name of the group of tensors to which a tensor of the policy belongs: a sync sends all of a group or
    none. The layers of one parent form a group, because engines compute some of them as one matrix. The experts of a
    layer are a group of their own.

    ```python
    >>> sent_with("model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp'
    >>> sent_with("model.layers.0.mlp.experts.down_proj")
    'model.layers.0.mlp.experts'
    ```
    """
    module = name.rpartition(".")[0]
    return module if EXPERT.fullmatch(name) else module.rpartition(".")[0]


class FusedGroups:
    """
    Collects the weights of layers that an engine fuses until a group is complete. NVFP4 needs this, because fused
    layers share a global scale.

    Parameters:
        siblings (`Callable`, *optional*): Name of a layer -> names of all that are fused with it, itself included.
    """

    def __init__(self, siblings: Callable[[str], tuple[str, ...]] = fused_with):
        self.siblings = siblings
        self.waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def add(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Takes the weight of a layer. Returns its whole group once that is complete, and nothing before."""
        group = self.siblings(name)
        weights = self.waiting.setdefault(group, {})
        weights[name] = weight
        return self.waiting.pop(group) if len(weights) == len(group) else {}

    def rest(self) -> Iterator[dict[str, Tensor]]:
        """Yields and removes the groups that are still incomplete."""
        while self.waiting:
            yield self.waiting.pop(next(iter(self.waiting)))
