"""The settings that optimisers share, and which values of them make sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# What `locals()` holds besides the settings.
_OTHERS = ("self", "params", "__class__")


def _not_negative(value: Any) -> bool:
    return bool(value >= 0)


_SENSIBLE: dict[str, Callable[[Any], bool]] = {
    "lr": _not_negative,
    "lr_decay": _not_negative,
    "weight_decay": _not_negative,
    "momentum": _not_negative,
    "eps": _not_negative,
    "alpha": _not_negative,
    "initial_accumulator_value": _not_negative,
    "rho": lambda value: 0 <= value <= 1,
    "betas": lambda value: all(0 <= beta < 1 for beta in value),
    "etas": lambda value: 0 < value[0] < 1 < value[1],
}


def checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimiser's constructor, its `locals()`, as settings.

    Raises ValueError, with the name of the setting, for a value that makes no sense.
    """
    settings = {name: value for name, value in arguments.items() if name not in _OTHERS}
    for name, value in settings.items():
        # nan fails every comparison, so it is refused as well.
        if name in _SENSIBLE and not _SENSIBLE[name](value):
            raise ValueError(f"invalid {name}: {value}")
    return settings
