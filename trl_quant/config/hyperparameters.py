"""Maps the hyperparameters of corrections to the fields of a config that set them.

The field `ais_delta` sets the hyperparameter `delta` of the correction `ais`. A correction may declare another field in
its `aliases`: the field `is_cap` sets `cap` in each correction that has one. A field with the bare name of a
hyperparameter sets nothing, so TRL's `beta` never sets a correction's `beta`.
"""

from dataclasses import fields

from ..corrections import ALL_CORRECTIONS


def setting_fields(correction: str, config_class: type) -> dict[str, str]:
    """
    Maps each hyperparameter of a correction to the field of `config_class` that sets it. Hyperparameters that no field
    sets are left out and keep their defaults.
    """
    correction_class = ALL_CORRECTIONS[correction]
    found = {}
    for hyperparameter in fields(correction_class):
        name = correction_class.aliases.get(hyperparameter.name, f"{correction}_{hyperparameter.name}")
        if name in config_class.__dataclass_fields__:
            found[hyperparameter.name] = name
    return found
