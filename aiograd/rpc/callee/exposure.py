"""What those may call who are not trusted: functions, classes and methods marked with `@expose`.

    function    by its module and name
    class       the same: it may be made; so may a `RemoteModule` of it, and an optimiser
    method      of a value to which they hold a reference, by its name

Everything is found in the dictionaries of modules and classes that are already here, so finding
runs no code and imports nothing. Private names lead nowhere.
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
    """Whether it carries the mark itself: neither its class nor a `__getattr__` can lend it one."""
    marks = vars(thing) if isinstance(thing, type) else getattr(thing, "__dict__", None)
    return isinstance(marks, dict | types.MappingProxyType) and marks.get(MARK) is True


def exposed_name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def exposing_modules() -> tuple[str, ...]:
    """The modules here, other than the script itself, that expose something of their own."""
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        and name != "__main__"
        and any(is_exposed(each) and each.__module__ == name for each in _contents(module))
    )


def _contents(module: types.ModuleType) -> list[Any]:
    found = list(vars(module).values())
    classes = [each for each in found if isinstance(each, type)]
    for cls in classes:
        found += [getattr(each, "__func__", each) for each in vars(cls).values()]
    return [*classes, *(each for each in found if isinstance(each, types.FunctionType))]


def find_exposed(name: str) -> Any:
    """The exposed function or class of that name, from modules that are here; None if none is.

    It is found under its own name only.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        if not isinstance(found, types.ModuleType | type) or part.startswith("_"):
            return None
        found = vars(found).get(part)
        if isinstance(found, types.ModuleType):
            return None
    if isinstance(found, staticmethod):
        found = found.__func__
    return found if is_exposed(found) and exposed_name(found) == name else None


def exposed_method(value: Any, name: Any) -> Callable[..., Any] | None:
    """A method of a value, if its class exposes it; what the object itself says does not count.

    An override counts for itself: one without the mark hides an exposed one."""
    if type(name) is not str or name.startswith("_"):
        return None
    for cls in type(value).__mro__:
        found = vars(cls).get(name)
        if found is None:
            continue
        function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        if isinstance(function, types.FunctionType) and is_exposed(function):
            method: Callable[..., Any] = found.__get__(value, type(value))
            return method
        return None
    return None


class ClassTraveller:
    """Classes between partners: a name, which means something where the class is exposed."""

    tag = "class"

    def __init__(self, worker: str) -> None:
        self._worker = worker  # who exposes

    def depart(self, cls: type, departure: Departure) -> str:
        return exposed_name(cls)

    def arrive(self, name: Any, arrival: Arrival) -> type:
        found = find_exposed(name) if type(name) is str else None
        if not isinstance(found, type):
            raise NotAllowed(f"the class {str(name)[:200]} is not exposed here", self._worker)
        return found
