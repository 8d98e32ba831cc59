"""Exposure: what untrusted peers may call, marked with `@expose`.

    function    by its module and name
    class       the same: it may be instantiated; so may a `RemoteModule` of it, and an optimiser
    method      by its name, on a value to which the peer holds a reference

Lookup reads the dictionaries of modules and classes that are already here, so it runs no code and
imports nothing. Private names are never found.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import NotAllowed

if TYPE_CHECKING:
    from aiograd.rpc.extension import Arrival, Departure

MARK: Final = "__aiograd_exposed__"


def is_exposed(thing: Any) -> bool:
    """Whether an object carries the mark itself."""
    # Read from its own dictionary: with `getattr`, an instance would inherit the mark of its class,
    # and an object with `__getattr__` could claim it.
    marks = vars(thing) if isinstance(thing, type) else getattr(thing, "__dict__", None)
    return isinstance(marks, dict | types.MappingProxyType) and marks.get(MARK) is True


def exposed_name(thing: Any) -> str:
    """Return the name under which `find_exposed` finds a function or class."""
    return f"{thing.__module__}:{thing.__qualname__}"


def exposing_modules() -> tuple[str, ...]:
    """Return the modules here, other than the script itself, that expose something of their own.

    Worker processes import them, so that names sent to them are found.
    """
    # A copy of the table: another thread may import something meanwhile.
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        and name != "__main__"
        and any(is_exposed(each) and each.__module__ == name for each in _contents(module))
    )


def _contents(module: types.ModuleType) -> list[Any]:
    # Methods, too: a class that is not exposed itself may expose some of them.
    found = list(vars(module).values())
    classes = [each for each in found if isinstance(each, type)]
    for cls in classes:
        found += [getattr(each, "__func__", each) for each in vars(cls).values()]
    return [*classes, *(each for each in found if isinstance(each, types.FunctionType))]


def find_exposed(name: str) -> Any:
    """Return the exposed function or class of that name; None if there is none.

    Only modules that are imported already are searched, and a function is found only under its
    own name: an alias in another module does not expose it there.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        if not isinstance(found, types.ModuleType | type) or part.startswith("_"):
            return None
        found = vars(found).get(part)
        # `module:other.function` would reach what `module` only imports.
        if isinstance(found, types.ModuleType):
            return None
    if isinstance(found, staticmethod):
        found = found.__func__
    elif isinstance(found, types.FunctionType) and "." in path:
        # A method is called on a value that the peer holds a reference to (`exposed_method`). By
        # its name alone it would take anything for `self`.
        return None
    return found if is_exposed(found) and exposed_name(found) == name else None


def exposed_method(value: Any, name: Any) -> Callable[..., Any] | None:
    """Return a bound method of a value, if its class exposes it; None if not.

    Attributes of the instance do not count. An override counts for itself: one without the mark
    hides an exposed one.
    """
    if type(name) is not str or name.startswith("_"):
        return None
    # By hand along the MRO: `getattr` would run properties and `__getattr__` of the value.
    for cls in type(value).__mro__:
        found = vars(cls).get(name)
        if found is None:
            continue
        function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        # Functions only: any other descriptor could run code when it is bound.
        if isinstance(function, types.FunctionType) and is_exposed(function):
            method: Callable[..., Any] = found.__get__(value, type(value))
            return method
        return None
    return None


class ClassTraveller:
    """Sends classes between partners: as a name, which the receiver looks up among its exposed."""

    tag = "class"

    def __init__(self, worker: str) -> None:
        self._worker = worker  # its name, for errors

    def depart(self, cls: type, departure: Departure) -> str:
        """Return the name to send."""
        return exposed_name(cls)

    def arrive(self, name: Any, arrival: Arrival) -> type:
        """Return the class of that name; NotAllowed if it is not exposed here."""
        found = find_exposed(name) if type(name) is str else None
        if not isinstance(found, type):
            raise NotAllowed(f"the class {str(name)[:200]} is not exposed here", self._worker)
        return found
