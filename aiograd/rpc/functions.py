"""How functions travel: once per peer and content, then as a number.

Importable ones go by reference, registered ops by name, everything else (`__main__`, notebook
cells, lambdas, closures) by value. A function that went by value is looked at again with every
call: if its code, its defaults, or anything it refers to is no longer the same object, it is
pickled again, and sent again if the bytes differ. One that holds travellers or large arrays cannot
be sent ahead: it goes inside the call.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from cloudpickle import cloudpickle

from aiograd.errors import SerializationError
from aiograd.rpc.travel import Departure
from aiograd.wire.frames import SMALL
from aiograd.wire.messages import OP
from aiograd.wire.payload import encode_named

if TYPE_CHECKING:
    from aiograd.rpc.directory import PeerInfo
    from aiograd.wire.payload import Codec

TABLE: Final = 4096  # functions per peer that have a number; more are sent anew
SERVICE: Final = 1 << 15  # flag of a DEFINE that names a service
_STABLE: Final = (int, float, str, bytes, bool, type(None), complex, types.ModuleType)


def mark_inline(func: Callable[..., Any]) -> Callable[..., Any]:
    func.__aiograd_inline__ = True  # type: ignore[attr-defined]
    return func


class Shipment:
    """A function as it is sent: `data` goes into DEFINE, or is None if it goes inside the call."""

    __slots__ = ("__weakref__", "data", "flags", "kind", "name", "parts", "quiet")

    def __init__(self, name: str, data: bytes | None, flags: int = 0, kind: str = "call") -> None:
        self.name, self.data, self.flags, self.kind = name, data, flags, kind
        self.parts: list[Any] | None = None  # by value: what it was made of; None: never changes
        self.quiet = False  # not counted as a call


class Shipper:
    """Knows, for one worker, how each function is sent."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._known: dict[int, tuple[weakref.ref[Any], Shipment]] = {}
        self._contents: OrderedDict[bytes, Shipment] = OrderedDict()  # sent by value

    def of(self, func: Any, to: PeerInfo) -> Shipment:
        """How `func` is sent right now. TypeError if it cannot be called."""
        known = self._known.get(id(func))
        if known is not None:
            shipment = known[1]
            if shipment.parts is None or _same(shipment.parts, _parts(func)):
                return shipment
        return self._look(func, to)

    def _look(self, func: Any, to: PeerInfo) -> Shipment:
        if not callable(func):
            raise TypeError(f"a function is called, not {type(func).__name__} ({func!r:.80})")
        shipment = self._describe(func, to)
        shipment.quiet = getattr(func, "__aiograd_quiet__", False) is True
        if shipment.data is not None and shipment.parts != []:
            self._remember(func, shipment)
        return shipment

    def _remember(self, func: Any, shipment: Shipment) -> None:
        key, known = id(func), self._known
        try:
            reference = weakref.ref(func, lambda _: known.pop(key, None))
        except TypeError:
            return
        known[key] = (reference, shipment)

    def _describe(self, func: Any, to: PeerInfo) -> Shipment:
        op_name = getattr(func, "op_name", None)
        if isinstance(op_name, str) and not isinstance(func, type):
            return Shipment(op_name, op_name.encode(), OP, "op")
        name = function_name(func)
        if not isinstance(func, type | types.FunctionType | types.BuiltinFunctionType):
            return Shipment(name, None)  # a bound method, partial, …: its state goes with the call
        if isinstance(func, types.BuiltinFunctionType) and not (
            func.__self__ is None or isinstance(func.__self__, types.ModuleType)
        ):
            return Shipment(name, None)
        departure = Departure(to, "call")
        payload = encode_named(self._codec, func, departure, lambda: "func")
        if payload.travelled or payload.buffers or len(payload.data) > SMALL:
            departure.cancel()
            return Shipment(name, None)
        if isinstance(func, types.BuiltinFunctionType) or _importable(func):
            return Shipment(name, payload.data)
        return self._by_content(func, name, payload.data)

    def _by_content(self, func: Any, name: str, data: bytes) -> Shipment:
        shipment = self._contents.get(data)
        if shipment is None:
            shipment = self._contents[data] = Shipment(name, data)
            if len(self._contents) > TABLE:
                self._contents.popitem(last=False)
        else:
            self._contents.move_to_end(data)
        shipment.parts = _parts(func) or []
        return shipment


def _importable(func: Any) -> bool:
    return bool(cloudpickle._should_pickle_by_reference(func))


def _same(old: list[Any], new: list[Any] | None) -> bool:
    return (
        new is not None
        and len(old) == len(new)
        and all(a is b for a, b in zip(old, new, strict=True))
    )


def _parts(func: Any) -> list[Any] | None:
    """Everything a by-value function is made of; None if something in it may change unseen."""
    parts: list[Any] = []
    return parts if _collect(func, parts, set()) else None


def _collect(func: Any, parts: list[Any], seen: set[int]) -> bool:
    if not isinstance(func, types.FunctionType):
        return False
    seen.add(id(func))
    code = func.__code__
    parts.append(code)
    values = [func.__defaults__, func.__kwdefaults__]
    if func.__defaults__ is not None:
        values.extend(func.__defaults__)
    if func.__kwdefaults__ is not None:
        values.extend(func.__kwdefaults__.values())
    try:
        values.extend(cell.cell_contents for cell in func.__closure__ or ())
    except ValueError:  # an empty cell
        return False
    names = cloudpickle._extract_code_globals(code)
    known = func.__globals__
    values.extend(known[name] for name in names if name in known)
    values.extend(func.__dict__.values())
    for index, value in enumerate(values):
        parts.append(value)
        if index < 2 or isinstance(value, _STABLE):
            continue
        if isinstance(value, types.FunctionType):
            if id(value) in seen or _importable(value):
                continue
            if not _collect(value, parts, seen):
                return False
        elif isinstance(value, types.BuiltinFunctionType | type):
            if isinstance(value, type) and not _importable(value):
                return False
        else:
            return False
    return True


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
        self.quiet = getattr(func, "__aiograd_quiet__", False) is True

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


def unsendable(error: Exception, name: str) -> SerializationError:
    return SerializationError("func", f"{name}: {error}")
