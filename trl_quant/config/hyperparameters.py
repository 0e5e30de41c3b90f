"""Which field of a config sets which hyperparameter of a correction.

The hyperparameter `delta` of the correction `ais` is set by the field `ais_delta`. A correction may declare another
field in its `aliases`: the hyperparameter `cap` is set by the field `is_cap` in each correction that has one. A field
with the hyperparameter's bare name sets nothing, so a correction's `beta` is never TRL's `beta`.
"""

from dataclasses import fields

from ..corrections import ALL_CORRECTIONS


def setting_fields(correction: str, config_class: type) -> dict[str, str]:
    """
    Maps each hyperparameter of a correction to the field of `config_class` that sets it. Hyperparameters that no field
    sets are left out and keep their defaults.
    """
    kind = ALL_CORRECTIONS[correction]
    names = {f.name: kind.aliases.get(f.name, f"{correction}_{f.name}") for f in fields(kind)}
    return {own: name for own, name in names.items() if name in config_class.__dataclass_fields__}
