"""The globals of functions that are sent by value: one namespace per script on each worker.

    sender    function ─▶ its code + the globals that it uses, each pickled on its own
    receiver  code + the namespace of that script, in which new definitions are set

So functions of one script or notebook share their globals on a worker, from any sender: what one
sets with `global`, the others see there. A name is *defined* by what its sender pickled; what a
function sets at the receiver is *state* of that worker. A definition is set

- if the namespace has no such name;
- if the same sender sent another definition before: the name was defined again there;
- if another process of the same script sends other data for a name that has no state here.

Otherwise what is there stays. State does not travel: a worker that passes a function on sends the
definitions as it got them. Functions and classes that another process of the same script defines
are the same code, so the first ones stay, and `isinstance` goes on working.

Values with travellers in them, and large ones, cannot be compared by their bytes. They are set
whenever they come, unless the name has state here and the sender has not bound it to another
object.
"""

from __future__ import annotations

import os
import sys
import types
import uuid
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from cloudpickle import cloudpickle

_BASIC: Final = ("__package__", "__name__", "__path__", "__file__")
# Tells scripts without a file apart: notebooks, shells. Of this process and not of its forks.
_processes: dict[int, str] = {}


class Definition(NamedTuple):
    """What a name means: its pickle, and the names that the functions in it use."""

    data: bytes
    needs: tuple[str, ...]


class Known(NamedTuple):
    """A definition as it was set."""

    digest: Any
    value: Any
    definition: Definition | None


class Namespace:
    """The globals of one script on one worker."""

    def __init__(self) -> None:
        self.globals: dict[str, Any] = {"__builtins__": __builtins__}
        self.known: dict[str, Known] = {}  # the definitions that were set
        self._sent: dict[tuple[Any, str], Any] = {}  # digests by sender and name

    def define(
        self, name: str, made: Definition, source: Any, load: Callable[[bytes], Any]
    ) -> None:
        """Take a definition that a sender sent."""
        # Definitions are compared by their bytes; the functions that are made of them never are
        # equal.
        digest = blake2b(made.data, digest_size=16).digest()
        if self._wanted(name, digest, source, False):
            self._set(name, Known(digest, load(made.data), made))

    def bind(self, name: str, value: Any, identity: int, source: Any) -> None:
        """Take a value that cannot be compared; `identity` is that of the sender's object."""
        if self._wanted(name, identity, source, True):
            self._set(name, Known(identity, value, None))

    def _wanted(self, name: str, digest: Any, source: Any, always: bool) -> bool:
        before = self._sent.get((source, name))
        self._sent[source, name] = digest
        # The first sender defines a name.
        if name not in self.globals:
            return True
        # This sender has changed its definition since: a cell was run again, or a script edited.
        if before is not None and before != digest:
            return True
        known = self.known.get(name)
        # What a called function has set with `global` stays, while its definition is the same.
        untouched = known is not None and self.globals[name] is known.value
        if always:
            return untouched
        if before is not None or not untouched:
            return False
        assert known is not None
        return known.digest != digest and not isinstance(known.value, type | types.FunctionType)

    def _set(self, name: str, known: Known) -> None:
        self.known[name] = known
        self.globals[name] = known.value


class Namespaces:
    """All namespaces of one worker."""

    def __init__(self) -> None:
        self._by_key: dict[str, Namespace] = {}

    def get(self, key: str) -> Namespace:
        """Return the namespace of a script; made on first sight."""
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = Namespace()
        return found

    def of(self, func: types.FunctionType) -> tuple[str, Namespace] | None:
        """Return the namespace that a received function lives in; None if it was defined here."""
        key = func.__globals__.get("__aiograd_script__")
        found = self._by_key.get(key) if isinstance(key, str) else None
        return (key, found) if found and found.globals is func.__globals__ else None  # type: ignore[return-value]


# For what is unpickled outside of messages, such as methods of exceptions.
ELSEWHERE: Final = Namespaces()


def shares_globals(func: types.FunctionType) -> bool:
    """Return whether a function that goes by value shares its globals: its module goes so, too."""
    known = func.__globals__
    name = known.get("__name__")
    if name == "__main__" or "__aiograd_script__" in known:
        return True
    # A function inside another one of an importable module brings copies of what it uses.
    return isinstance(name, str) and name in cloudpickle.list_registry_pickle_by_value()


def script_key(func: types.FunctionType) -> str:
    """Return what names the script or notebook of a function that was defined in this process."""
    known = func.__globals__
    name, file = known.get("__name__"), known.get("__file__")
    if isinstance(file, str) and os.path.basename(file) != "<stdin>":
        return f"{name}:{file}"
    # A namespace that some program made by hand is a script of its own, as far as we know.
    main = sys.modules.get(str(name))
    which = "" if main is not None and vars(main) is known else f":{id(known)}"
    # Without a file there is nothing that another process could share: each has a key of its own, a
    # forked child, too.
    process = _processes.get(os.getpid())
    if process is None:
        _processes.clear()
        process = _processes[os.getpid()] = uuid.uuid4().hex
    return f"{name}:{process}{which}"


def make_function(code: Any, namespace: Namespace, key: str, basic: Any, closure: Any) -> Any:
    """Make a function that lives in a namespace."""
    known = namespace.globals
    if "__aiograd_script__" not in known:
        known.update(basic)
        known["__aiograd_script__"] = key
    return types.FunctionType(code, known, None, None, closure)


def parts(func: types.FunctionType) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any], Any]:
    """Return (code, basic globals, empty closure), attributes, slots and globals of a function."""
    attributes, slots = cloudpickle._function_getstate(func)
    names = slots.pop("__globals__")
    basic = {key: func.__globals__[key] for key in _BASIC if key in func.__globals__}
    cells = func.__closure__
    closure = None if cells is None else tuple(cloudpickle._make_empty_cell() for _ in cells)
    return (func.__code__, basic, closure), attributes, slots, names


def fill(func: Any, attributes: dict[str, Any], slots: dict[str, Any]) -> None:
    """Set the attributes and slots of a function that `make_function` made."""
    # cloudpickle sets the builtins of the globals that it fills, which are shared here.
    builtins = func.__globals__["__builtins__"]
    cloudpickle._function_setstate(func, (attributes, {**slots, "__globals__": {}}))
    func.__globals__["__builtins__"] = builtins


def closure_of(
    names: Iterable[str], lookup: Callable[[str], Definition | None]
) -> dict[str, Definition]:
    """Return the definitions of some names and of all that these need, by name."""
    found: dict[str, Definition] = {}
    open_names = list(names)
    while open_names:
        name = open_names.pop()
        if name in found:
            continue
        definition = lookup(name)
        if definition is not None:
            found[name] = definition
            open_names.extend(definition.needs)
    return dict(sorted(found.items()))  # equal contents give equal bytes
