"""How things of scripts and notebooks go by value that cloudpickle cannot send, or changes.

    slots of a class          cloudpickle makes the class without them
    functools.cache           goes by name, which `__main__` elsewhere does not have
    functools.cached_property holds a lock before Python 3.12
    functools.singledispatch  holds a dictionary with weak keys

`codec` uses them. What a cache has stored stays with the sender.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Final

from cloudpickle import cloudpickle

CachedFunction: Final = functools._lru_cache_wrapper


def keep_slots(cls: type, reduced: tuple[Any, ...]) -> None:
    """Let a class that cloudpickle has reduced have its slots at the receiver, too.

    Its objects would else have a `__dict__` there, and those that come back could not be set up at
    the sender, where they have none.
    """
    make, args = reduced[:2]
    slots = vars(cls)["__slots__"]
    # Slots given by an iterator are used up by now, and `typing.NamedTuple` makes its own.
    known = hasattr(slots, "__len__") and not (issubclass(cls, tuple) and "_fields" in vars(cls))
    if known and make is cloudpickle._make_skeleton_class:
        args[3]["__slots__"] = slots


def _reduce_cached_function(func: Any) -> Any:
    found = cloudpickle._lookup_module_and_qualname(func)
    if found is not None and found[0].__name__ not in cloudpickle.list_registry_pickle_by_value():
        return func.__reduce__()  # by name
    options = func.cache_parameters()
    marks = {key: value for key, value in vars(func).items() if key != "__wrapped__"}
    return _cached_function, (func.__wrapped__, options["maxsize"], options["typed"]), marks


def _cached_function(func: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(func)


def _reduce_cached_property(prop: Any) -> Any:
    state = {key: value for key, value in vars(prop).items() if key not in ("func", "lock")}
    return type(prop), (prop.func,), state


def _reduce_weak_keys(weak: Any) -> Any:
    known = dict(weak)
    # Keys that nothing else holds would be freed on arrival, and their values be lost without a
    # word. Those are refused, as pickle does.
    if not all(isinstance(key, type) for key in known):
        return weak.__reduce_ex__(5)
    return weakref.WeakKeyDictionary, (known,)


# By exact type, as pickle looks them up.
REDUCERS: Final = {
    CachedFunction: _reduce_cached_function,
    functools.cached_property: _reduce_cached_property,
    weakref.WeakKeyDictionary: _reduce_weak_keys,
}
