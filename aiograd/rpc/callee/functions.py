"""How functions travel: once per peer and content, then as a number.

Importable ones go by reference, registered ops by name, everything else (`__main__`, notebook
cells, lambdas, closures) by value. A function that went by value is looked at again with every
call: if its code, its defaults, or anything it refers to is no longer the same object, it is
pickled again, and sent again if the bytes differ. One that holds travellers or large arrays cannot
be sent ahead: it goes inside the call.

What a peer means when it defines a function by its bytes or its name.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import sys
import types
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from cloudpickle import cloudpickle

from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rpc.callee.exposure import exposed_name, find_exposed, is_exposed
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Departure
from aiograd.wire.codec import encode_named
from aiograd.wire.framing import SMALL
from aiograd.wire.messages import OP

if TYPE_CHECKING:
    from aiograd.rpc.directory import PeerInfo
    from aiograd.wire.codec import Codec


TABLE: Final = 4096  # functions per peer that have a number; more are sent anew
SERVICE: Final = 1 << 15  # flag of a DEFINE that names a service
EXPOSED: Final = 1 << 14  # flag of a DEFINE that names an exposed function
BY_VALUE: Final = 1 << 13  # with it: a line with the name, then the pickle for those who open it
_MISSING: Final = object()
_STABLE: Final = (int, float, str, bytes, bool, type(None), complex, types.ModuleType)


class Shipment:
    """A function as it is sent: `data` goes into DEFINE, or is None if it goes inside the call."""

    __slots__ = ("again", "data", "flags", "kind", "name", "quiet")

    def __init__(
        self,
        name: str,
        data: bytes | None,
        flags: int = 0,
        kind: str = "call",
        func: Any = None,
    ) -> None:
        self.name, self.data, self.flags, self.kind = name, data, flags, kind
        self.quiet = is_quiet(func)  # not counted as a call
        if self.quiet:
            self.kind = "look"
        self.again = is_idempotent(func)  # may be called again when a worker is lost


class ServiceShipments(dict[str, Shipment]):
    """Services go by name; how, is noted when one is asked for the first time."""

    def __missing__(self, name: str) -> Shipment:
        shipment = self[name] = Shipment(name, name.encode(), SERVICE, name)
        return shipment


class Shipper:
    """Knows, for one worker, how each function is sent."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._known: dict[int, tuple[weakref.ref[Any], Shipment, _Watch | None]] = {}
        self._contents: OrderedDict[bytes, Shipment] = OrderedDict()  # what was ever pickled
        self._named: dict[int, tuple[weakref.ref[Any], Shipment]] = {}  # what goes by name only

    def of(self, func: Any, to: PeerInfo) -> Shipment:
        """How `func` is sent right now. TypeError if it cannot be called."""
        known = self._known.get(id(func))
        if known is not None:
            watch = known[2]
            if watch is None or watch.unchanged(func):
                return known[1]
        if not callable(func):
            raise TypeError(f"a function is called, not {type(func).__name__} ({func!r:.80})")
        return self._describe(func, to)

    def named(self, func: Any, to: PeerInfo) -> Shipment:
        """How `func` is sent to a peer that takes names only; it refuses what is not exposed."""
        if not callable(func):
            return self.of(func, to)
        op_name = getattr(func, "op_name", None)
        if isinstance(op_name, str) and not isinstance(func, type):
            return self.of(func, to)
        known = self._named.get(id(func))
        if known is not None and known[0]() is func:
            return known[1]
        name = function_name(func)
        if is_exposed(func):
            shipment = Shipment(name, exposed_name(func).encode(), EXPOSED, func=func)
        else:
            shipment = Shipment(name, name.encode(), func=func)
        with contextlib.suppress(TypeError):
            if len(self._named) > TABLE:
                self._named.clear()
            self._named[id(func)] = (weakref.ref(func), shipment)
        return shipment

    def _remember(self, func: Any, shipment: Shipment, watch: _Watch | None) -> Shipment:
        key, known = id(func), self._known
        if len(known) > TABLE:
            known.clear()
        with contextlib.suppress(TypeError):  # what has no weak references is looked at every time
            reference = weakref.ref(func, lambda _: known.pop(key, None))
            known[key] = (reference, shipment, watch)
        return shipment

    def _describe(self, func: Any, to: PeerInfo) -> Shipment:
        op_name = getattr(func, "op_name", None)
        if isinstance(op_name, str) and not isinstance(func, type):
            return self._remember(func, Shipment(op_name, op_name.encode(), OP, "op"), None)
        name = function_name(func)
        if not isinstance(func, type | types.FunctionType | types.BuiltinFunctionType):
            if _is_global(func):  # such as numpy's functions
                return self._remember(func, self._by_reference(func, name, to), None)
            # A bound method, partial, …: its state goes with the call.
            return Shipment(name, None, func=func)
        if isinstance(func, types.BuiltinFunctionType):
            if not isinstance(func.__self__, types.ModuleType | None):
                return Shipment(name, None, func=func)
            return self._remember(func, self._by_reference(func, name, to), None)
        if _importable(func):
            return self._remember(func, self._by_reference(func, name, to), None)
        departure = Departure(to, "call")
        payload = encode_named(self._codec, func, departure, "func")
        if payload.travelled or payload.buffers or len(payload.data) > SMALL:
            departure.cancel()
            return Shipment(name, None, func=func)
        shipment = self._by_value(func, name, payload.data)
        watch = _watch(func)
        return shipment if watch is None else self._remember(func, shipment, watch)

    def _by_reference(self, func: Any, name: str, to: PeerInfo) -> Shipment:
        if is_exposed(func):
            return Shipment(name, exposed_name(func).encode(), EXPOSED, func=func)
        payload = encode_named(self._codec, func, Departure(to, "call"), "func")
        return self._by_content(func, name, payload.data)

    def _by_value(self, func: Any, name: str, data: bytes) -> Shipment:
        if is_exposed(func):  # whoever takes names only may run the same script
            data = exposed_name(func).encode() + b"\n" + data
            return self._by_content(func, name, data, EXPOSED | BY_VALUE)
        return self._by_content(func, name, data)

    def _by_content(self, func: Any, name: str, data: bytes, flags: int = 0) -> Shipment:
        shipment = self._contents.get(data)
        if shipment is None:
            shipment = self._contents[data] = Shipment(name, data, flags, func=func)
            if len(self._contents) > TABLE:
                self._contents.popitem(last=False)
        else:
            self._contents.move_to_end(data)
        return shipment


def is_quiet(func: Any) -> bool:
    """Whether calls of it are left out of the counters, because they read them."""
    return getattr(func, "__aiograd_quiet__", False) is True


def is_idempotent(func: Any) -> bool:
    """Whether running it twice does no harm, by its author's word."""
    return getattr(func, "__aiograd_idempotent__", False) is True


def _importable(func: Any) -> bool:
    return bool(cloudpickle._should_pickle_by_reference(func))


def _is_global(func: Any) -> bool:
    """Whether a callable of some other type can be found by its module and name."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return False
    return getattr(sys.modules.get(module), name, None) is func


class _Watch:
    """Everything a by-value function is made of, to see cheaply whether it is still the same."""

    __slots__ = ("_cells", "_functions", "_globals")

    def __init__(self) -> None:
        self._functions: list[tuple[Any, Any, Any, Any, int]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []

    def unchanged(self, root: Any) -> bool:
        for other, code, defaults, keywords, marks in self._functions:
            func = root if other is None else other
            if (
                func.__code__ is not code
                or func.__defaults__ is not defaults
                or func.__kwdefaults__ is not keywords
                or len(func.__dict__) != marks
            ):
                return False
        for known, name, value in self._globals:
            if known.get(name, _MISSING) is not value:
                return False
        for cell, value in self._cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:
                return False
        return True

    def add(self, func: types.FunctionType, root: Any = None) -> bool:
        """Look at a function and all that it refers to; False if something may change unseen."""
        code, known = func.__code__, func.__globals__
        if func is root or any(func is each[0] for each in self._functions):
            return True
        # The function itself is not kept alive by what is known about it.
        other = func if root is not None else None
        marks = len(func.__dict__)
        self._functions.append((other, code, func.__defaults__, func.__kwdefaults__, marks))
        root = func if root is None else root
        values = [*(func.__defaults__ or ()), *(func.__kwdefaults__ or {}).values()]
        values.extend(func.__dict__.values())
        for name in cloudpickle._extract_code_globals(code):
            value = known.get(name, _MISSING)
            self._globals.append((known, name, value))
            if value is not _MISSING:
                values.append(value)
        for cell in func.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                return False
            self._cells.append((cell, value))
            values.append(value)
        return all(self._stable(value, root) for value in values)

    def _stable(self, value: Any, root: Any) -> bool:
        if isinstance(value, _STABLE):
            return True
        if isinstance(value, types.FunctionType):
            return _importable(value) or self.add(value, root)
        if isinstance(value, type):
            return _importable(value)
        return isinstance(value, types.BuiltinFunctionType) or hasattr(value, "op_name")


def _watch(func: Any) -> _Watch | None:
    """None: something in it may change unseen, so it must be pickled every time."""
    watch = _Watch()
    return watch if isinstance(func, types.FunctionType) and watch.add(func) else None


# ── at the callee ───────────────────────────────────────────────────────────────────────────────

TASK: Final = 0  # a coroutine function: a task on the loop
INLINE: Final = 1  # runs right where the message is read
THREAD: Final = 2  # runs off the loop


class Target:
    """A function that can be called, and where it runs."""

    __slots__ = ("error", "func", "kind", "mode", "name", "quiet")

    def __init__(self, func: Any, name: str, kind: str = "call") -> None:
        self.func, self.name, self.kind = func, name, kind
        self.mode = INLINE if kind == "op" else run_mode(func)
        self.error: BaseException | None = None  # why it cannot be called after all
        self.quiet = is_quiet(func)

    @classmethod
    def broken(cls, name: str, error: BaseException) -> Target:
        target = cls(None, name)
        target.error = error
        return target


def run_mode(func: Any) -> int:
    if inspect.iscoroutinefunction(func):
        return TASK
    if getattr(func, "__aiograd_inline__", False) is True or isinstance(
        getattr(func, "op_name", None), str
    ):
        return INLINE
    if callable(func) and inspect.iscoroutinefunction(type(func).__call__):
        return TASK
    return THREAD


def function_name(func: Any) -> str:
    """What to call it in messages."""
    for candidate in (func, getattr(func, "func", None), type(func)):
        name = getattr(candidate, "__qualname__", None)
        if isinstance(name, str):
            return name.replace("<locals>.", "").rpartition("<locals>")[2] or name
    return type(func).__name__


_NAME: Final = 1024  # bytes of a function's name; thousands of them are kept


def resolve(agent: Any, flags: int, data: bytes, peer: PeerInfo) -> Target:
    """What a peer's DEFINE means here; a pickle is opened only for peers that are trusted."""
    trusts = agent.trusts(peer)
    if flags & BY_VALUE:
        line, _, pickled = data.partition(b"\n")
        data, flags = (pickled, 0) if trusts else (line, EXPOSED)
    if flags & (SERVICE | OP | EXPOSED):
        name = _name(data, peer)
        if flags & SERVICE:
            return Target(None, name, name)
        if flags & OP:
            return _resolve_op(agent, name, trusts)
        return _resolve_exposed(agent, name, trusts)
    if not trusts:
        refused: Target = agent.refused
        return refused
    try:
        func = pickle.loads(data)
    except Exception as error:
        error.add_note(
            f"the function could not be found on {agent.name}: it travels by reference, "
            "so its module must be importable there and contain it"
        )
        return Target.broken("a function", error)
    return Target(func, function_name(func))


def _name(data: bytes, peer: PeerInfo) -> str:
    if len(data) > _NAME:
        raise ProtocolError(f"a function's name of {len(data)} bytes", peer.name)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a function's name is not UTF-8", peer.name) from None


def _resolve_op(agent: Any, name: str, trusts: bool) -> Target:
    op = agent.ops.get(name)
    if op is None or not (trusts or is_exposed(op)):
        why = f"there is no op {name[:80]!r} here" if op is None else f"{name} is not exposed here"
        return Target.broken(name, NotAllowed(why, agent.name))
    return Target(op, name, "op")


def _resolve_exposed(agent: Any, name: str, trusts: bool) -> Target:
    if trusts:
        with contextlib.suppress(ImportError):
            importlib.import_module(name.partition(":")[0])
    func = find_exposed(name)
    if func is None:
        return Target.broken(name, NotAllowed(f"{name} is not exposed here", agent.name))
    return Target(func, function_name(func))
