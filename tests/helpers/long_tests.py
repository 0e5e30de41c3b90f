"""Which values of a parameter `make test` leaves to `make test-long`."""

from collections.abc import Iterable

import pytest


def rest_is_long(values: Iterable, *kept) -> list:
    """The values of a parameter. `make test` runs those in `kept`, or the first one; the others are `long`."""
    values = list(values)
    kept = kept or values[:1]
    assert all(value in values for value in kept), f"{kept} are not all in {values}"
    return [value if value in kept else _long(value) for value in values]


def _long(value):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
