"""Finds, by name, the norms of a model that feed linear layers. Noise (AQN) and scaling (UAQ) act on these."""

from collections.abc import Iterable

from .families import family_of
from .names import clean_name, place_in_layer


def feeding_norms(model_type: str, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """
    Finds the feeding norms among the parameters of a model.

    Args:
        model_type (`str`): `model_type` of the text model's config.
        names (`Iterable[str]`): Names of all parameters, with any prefix (`model.`, `model.language_model.`,
            `base_model.model.model.`); parameters outside the decoder layers are ignored.

    Returns:
        `dict[str, tuple[str, ...]]`: name of each norm's weight, as given -> clean names of the linear layers that it
        feeds, and of the tensor that holds a layer's experts; two norms per decoder layer, in layer order. In a mixture
        of experts and in a hybrid, those that are not among `names` are left out, since their layers differ.

    Raises:
        `ValueError`: The family is unknown, or a decoder layer among `names` lacks a norm or has it twice.
    """
    family, names = family_of(model_type), list(names)
    layers: dict[str, set[int]] = {}  # stack of decoder layers -> indices
    found: dict[tuple[str, int, str], list[str]] = {}
    for name in names:
        place = place_in_layer(name)
        if place is None:
            continue
        stack, index, path = place
        layers.setdefault(stack, set()).add(index)
        norm = path.removesuffix(".weight")
        if norm in family.feeds and norm != path:
            found.setdefault((stack, index, norm), []).append(name)

    stacks = {stack for stack, _, _ in found}  # a vision tower is a stack of layers too, with other norms
    if len(stacks) != 1:
        raise ValueError(
            f"The parameter names must hold one stack of {model_type} decoder layers, with norms "
            f"{' and '.join(family.feeds)}; found {sorted(stacks) or 'none'}."
        )
    (stack,) = stacks
    present = {clean_name(name).removesuffix(".weight") for name in names}
    result, differs = {}, family.mixture or family.recurrent
    for index in sorted(layers[stack]):
        for norm, linears in family.feeds.items():
            matches = found.get((stack, index, norm), [])
            if len(matches) != 1:
                raise ValueError(
                    f"{stack}.{index} must have exactly one {norm}.weight in a {model_type} model, found {matches}."
                )
            fed = (f"{stack}.{index}.{linear}" for linear in linears)
            result[matches[0]] = tuple(x for x in fed if clean_name(x) in present or not differs)
    return result
