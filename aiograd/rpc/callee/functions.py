"""How functions travel: once per peer and content, then as a number.

    caller                                            callee
    Shipper.of(func) ─▶ Shipment
      first call to a peer:  DEFINE number, data ──▶  resolve(data) ─▶ Target: function, run mode
      every call:            CALL number, args   ──▶  Target.func(*args)

    registered op            by its name
    service                  by its name; a function of the library itself
    exposed function         by module and name (see `exposure`), for every peer
    importable function      by reference: a pickle of module and name
    anything else            by value: a pickle of its code (`__main__`, notebook cells, lambdas, …)

A function sent by value is compared with its fingerprint at every call: if its code, its defaults,
or anything it refers to is no longer the same object, it is pickled again, and sent again if the
bytes differ. One that holds travellers or large arrays cannot be sent ahead: it goes inside each
call, and so do bound methods and partials, whose state belongs to the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from cloudpickle import cloudpickle

from aiograd._frames import warn
from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rpc.callee.exposure import exposed_name, find_exposed, is_exposed
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Arrival, Departure
from aiograd.rpc.remote_exceptions import explain_import
from aiograd.wire.codec import BY_SCRIPT, YES, encode_named
from aiograd.wire.framing import SMALL
from aiograd.wire.messages import BY_VALUE, EXPOSED, OP, SERVICE
from aiograd.wire.reducers import CachedFunction

if TYPE_CHECKING:
    from aiograd.wire.codec import Codec

_log = logging.getLogger("aiograd")
# Functions per peer that have a number; more are sent anew. It bounds what a peer can make us keep.
TABLE: Final = 4096
HEAVY: Final = 10 * 2**20  # bytes of a function that goes with every call, to be warned of
_NAME: Final = 1024  # bytes of a function's name; a peer can make us keep `TABLE` of them
_MISSING: Final = object()
# What the pickle of a mere reference has, besides the two texts.
_REFERENCE: Final = ("PROTO", "FRAME", "MEMOIZE", "STACK_GLOBAL", "STOP")
# Values that cannot change while they stay the same object; a module counts by its name.
_STABLE: Final = (int, float, str, bytes, bool, type(None), complex, types.ModuleType)


# ── at the caller ───────────────────────────────────────────────────────────────────────────────


class Shipment:
    """A function as it is sent: `data` goes into DEFINE, or is None if it goes inside the call."""

    __slots__ = ("data", "flags", "idempotent", "kind", "name", "quiet")

    name: str
    data: bytes | None
    flags: int

    def __init__(
        self,
        name: str,
        data: bytes | None,
        flags: int = 0,
        kind: str = "call",
        func: Any = None,
    ) -> None:
        self.name, self.data, self.flags = name, data, flags
        self.quiet: bool = is_quiet(func)  # not counted as a call
        self.kind: str = "look" if self.quiet else kind
        self.idempotent: bool = is_idempotent(func)  # may be retried when a worker is lost


class ServiceShipments(dict[str, Shipment]):
    """Shipments of services by name, made when a service is first requested."""

    def __missing__(self, name: str) -> Shipment:
        shipment = self[name] = Shipment(name, name.encode(), SERVICE, name)
        return shipment


class Shipper:
    """Knows, for one worker, how each function is sent."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        # By id of the function. A fingerprint of None: the function cannot change.
        self._known: dict[int, tuple[weakref.ref[Any], Shipment, _Fingerprint | None]] = {}
        # By pickle, least recently used first: equal contents share one shipment, so a function
        # that is defined again unchanged (a notebook cell that is run twice) is not sent again.
        self._contents: OrderedDict[bytes, Shipment] = OrderedDict()
        # The code of functions that were sent by reference, by module and name.
        self._by_name: dict[tuple[str, str], types.CodeType] = {}
        self._heavy: set[tuple[types.CodeType, bytes]] = set()  # large functions that peers got
        # By id of the function, for peers that take names only.
        self._named: dict[int, tuple[weakref.ref[Any], Shipment]] = {}

    def of(self, func: Any, to: PeerInfo) -> Shipment:
        """Return how `func` is sent right now. TypeError if it cannot be called.

        SerializationError if it must go by value and holds what cannot be pickled.
        """
        known = self._known.get(id(func))
        if known is not None:
            # The id is that of `func` and no other: an entry goes with its function (`_remember`).
            fingerprint = known[2]
            if fingerprint is None or fingerprint.matches(func):
                return known[1]
        if not callable(func):
            raise TypeError(f"a function is called, not {type(func).__name__} ({func!r:.80})")
        return self._describe(func, to)

    def named(self, func: Any, to: PeerInfo) -> Shipment:
        """Return how `func` is sent to a peer that takes names only.

        The peer refuses what it does not expose; the name is for its error message.
        """
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
        with contextlib.suppress(TypeError):  # no weak references to it: made anew every time
            if len(self._named) > TABLE:
                self._named.clear()
            self._named[id(func)] = (weakref.ref(func), shipment)
        return shipment

    def _remember(
        self, func: Any, shipment: Shipment, fingerprint: _Fingerprint | None
    ) -> Shipment:
        key, known = id(func), self._known
        # A program that makes functions without end would else keep all their shipments. Cleared
        # as a whole: an order of use would cost every call, and this happens to few programs.
        if len(known) > TABLE:
            known.clear()
        with contextlib.suppress(TypeError):  # no weak references to it: described every time
            reference = weakref.ref(func, lambda _: known.pop(key, None))
            known[key] = (reference, shipment, fingerprint)
        return shipment

    def _describe(self, func: Any, to: PeerInfo) -> Shipment:
        op_name = getattr(func, "op_name", None)
        if isinstance(op_name, str) and not isinstance(func, type):
            return self._remember(func, Shipment(op_name, op_name.encode(), OP, "op"), None)
        name = function_name(func)
        if not isinstance(func, type | types.FunctionType | types.BuiltinFunctionType):
            if _is_global(func):  # such as numpy's functions
                return self._remember(func, self._by_reference(func, name, to), None)
            if not isinstance(func, CachedFunction):
                # A bound method, partial, …: its state may change between calls, so it goes with
                # each.
                return Shipment(name, None, func=func)
        elif isinstance(func, types.BuiltinFunctionType):
            if not isinstance(func.__self__, types.ModuleType | None):
                return Shipment(name, None, func=func)
            return self._remember(func, self._by_reference(func, name, to), None)
        elif _importable(func) and not self._reloaded(func):
            return self._remember(func, self._by_reference(func, name, to), None)
        departure = Departure(to, "call")
        payload = encode_named(self._codec, func, departure, "func")
        # A DEFINE is one small frame, and is decoded without an arrival: no travellers, no buffers.
        if payload.travelled == YES or payload.buffers or len(payload.data) > SMALL:
            departure.cancel()
            if payload.size() > HEAVY and isinstance(func, types.FunctionType):
                self._heavy_again(func, name, payload.size(), to)
            return Shipment(name, None, func=func)
        shipment = self._by_value(func, name, payload.data)
        fingerprint = _fingerprint(func)
        if fingerprint is None:  # something in it may change unseen: pickle it at every call
            return shipment
        return self._remember(func, shipment, fingerprint)

    def _reloaded(self, func: Any) -> bool:
        """Return whether the module of a function was executed again since we sent it by name.

        Workers that have imported the module know the old function under that name. So everything
        of the module goes by value from now on.
        """
        if not isinstance(func, types.FunctionType):
            return False
        key = func.__module__, func.__qualname__
        before = self._by_name.setdefault(key, func.__code__)
        # The very object: equal code may call a helper of the module that has changed.
        if before is func.__code__:
            return False
        module = sys.modules[func.__module__]
        _log.info("%s was loaded again: its functions are sent by value now", module.__name__)
        cloudpickle.register_pickle_by_value(module)
        self._known.clear()
        return True

    def _heavy_again(self, func: types.FunctionType, name: str, size: int, to: PeerInfo) -> None:
        """Warn when a function with much data in it goes to a peer for the second time."""
        key = func.__code__, to.incarnation
        if key not in self._heavy:
            self._heavy.add(key)
            return
        warn(
            f"{name}() holds {size / 2**20:.0f} MiB in its closure, defaults or globals, and they "
            f"are sent with every call: to {to.name} for the second time. Leave them there with "
            "ag.remote, and pass the RRef as an argument",
            UserWarning,
        )

    def _by_reference(self, func: Any, name: str, to: PeerInfo) -> Shipment:
        if is_exposed(func):
            return Shipment(name, exposed_name(func).encode(), EXPOSED, func=func)
        payload = encode_named(self._codec, func, Departure(to, "call"), "func")
        return self._by_content(func, name, payload.data)

    def _by_value(self, func: Any, name: str, data: bytes) -> Shipment:
        # With its name in front: a peer that takes names only may run the same script, and has a
        # function of that name itself.
        if is_exposed(func):
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
    """Whether calls of it are left out of counters and recordings, because it reads them."""
    return getattr(func, "__aiograd_quiet__", False) is True


def is_idempotent(func: Any) -> bool:
    """Whether its author declared that running it twice does no harm."""
    return getattr(func, "__aiograd_idempotent__", False) is True


def _importable(func: Any) -> bool:
    return bool(cloudpickle._should_pickle_by_reference(func))


def _is_global(func: Any) -> bool:
    """Whether a callable of some other type can be found by its module and name."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return False
    return getattr(sys.modules.get(module), name, None) is func


class _Fingerprint:
    """The objects that a by-value function is made of, to see cheaply whether it has changed.

    Compares by identity only, so it is sound for values that cannot change in place (`_STABLE`);
    a function that refers to any other value has no fingerprint.
    """

    __slots__ = ("_cells", "_functions", "_globals")

    def __init__(self) -> None:
        self._functions: list[tuple[Any, Any, Any, Any, dict[str, Any]]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []

    def matches(self, root: Any) -> bool:
        """Whether `root`, the function itself, and all that it refers to are still the same."""
        for other, code, defaults, keywords, attributes in self._functions:
            func = root if other is None else other
            if (
                func.__code__ is not code
                or func.__defaults__ is not defaults
                or func.__kwdefaults__ is not keywords
                or func.__dict__ != attributes
            ):
                return False
        # Also for names that are missing: a helper that is defined later makes a difference.
        for known, name, value in self._globals:
            if known.get(name, _MISSING) is not value:
                return False
        for cell, value in self._cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:  # emptied by `del`
                return False
        return True

    def add(self, func: types.FunctionType, root: Any = None) -> bool:
        """Take in a function and all that it refers to; False if something may change unseen."""
        code, known = func.__code__, func.__globals__
        # Functions may refer to each other, and to themselves.
        if func is root or any(func is each[0] for each in self._functions):
            return True
        # None for the root: a fingerprint that held it would keep its function alive, and with it
        # its own entry in the table.
        other = func if root is not None else None
        attributes = dict(func.__dict__)  # a copy: they are set in place
        self._functions.append((other, code, func.__defaults__, func.__kwdefaults__, attributes))
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


def _fingerprint(func: Any) -> _Fingerprint | None:
    """Return a function's fingerprint; None if something in it may change unseen."""
    made = _Fingerprint()
    return made if isinstance(func, types.FunctionType) and made.add(func) else None


# ── at the callee ───────────────────────────────────────────────────────────────────────────────

# Run modes.
TASK: Final = 0  # a coroutine function: a task on the loop
INLINE: Final = 1  # on the loop, while the message is read
THREAD: Final = 2  # off the loop
DELEGATE: Final = 3  # on the loop; what it returns, a `Delegate`, is run in its stead


class Turn(Protocol):
    """The place of a call among calls that must not run at the same time."""

    def wait(self) -> asyncio.Future[None] | None:
        """Return what ends when the call may run; None if it may at once."""

    def finish(self) -> None:
        """Let the next call run: this one has ended, or never will begin."""


class Delegate(NamedTuple):
    """What runs in place of a function with the mark `__aiograd_delegate__`, such as a method."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    turn: Turn | None = None


# Builtin functions of other libraries that may run right where their call arrives, each with what
# tells whether they are quick for these arguments; else they run in a thread.
LIGHT: Final[dict[Any, Callable[[tuple[Any, ...]], bool]]] = {}
_BUILTIN: Final = (types.BuiltinFunctionType, types.MethodDescriptorType)


class Target:
    """A function that can be called, and where it runs."""

    __slots__ = ("builtin", "error", "func", "kind", "mode", "name", "quiet")

    func: Any
    name: str
    kind: str

    def __init__(self, func: Any, name: str, kind: str = "call") -> None:
        self.func, self.name, self.kind = func, name, kind
        self.mode: int = INLINE if kind == "op" else run_mode(func)
        self.builtin: bool = isinstance(func, _BUILTIN)  # then look into `LIGHT`
        self.error: BaseException | None = None  # why it cannot be called after all
        self.quiet: bool = is_quiet(func)

    @classmethod
    def broken(cls, name: str, error: BaseException) -> Target:
        """Return a target whose calls fail with `error`."""
        target = cls(None, name)
        target.error = error
        return target


def run_mode(func: Any) -> int:
    """Return where a function runs: TASK, INLINE or THREAD."""
    if inspect.iscoroutinefunction(func):
        return TASK
    if getattr(func, "__aiograd_delegate__", False) is True:
        return DELEGATE
    if getattr(func, "__aiograd_inline__", False) is True or isinstance(
        getattr(func, "op_name", None), str
    ):
        return INLINE
    # An object with `async def __call__`, which `iscoroutinefunction` does not see.
    if callable(func) and inspect.iscoroutinefunction(type(func).__call__):
        return TASK
    return THREAD


def function_name(func: Any) -> str:
    """Return what a function is called in messages; for a partial, what its function is."""
    for candidate in (func, getattr(func, "func", None), type(func)):
        name = getattr(candidate, "__qualname__", None)
        if isinstance(name, str):
            return name.replace("<locals>.", "").rpartition("<locals>")[2] or name
    return type(func).__name__


class ResolvingWorker(Protocol):
    """What `resolve` needs of a worker."""

    @property
    def name(self) -> str:
        """The name of the worker, for errors."""

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """The registered ops by name."""

    @property
    def codec(self) -> Codec:
        """How what trusted peers send is read."""

    @property
    def refused(self) -> Target:
        """What stands for every function that an untrusted peer sends as a pickle."""

    def trusts(self, peer: PeerInfo) -> bool:
        """Whether a peer may call anything here."""


def resolve(worker: ResolvingWorker, flags: int, data: bytes, peer: PeerInfo) -> Target:
    """Return the function that a peer's DEFINE means; load a pickle for trusted peers only.

    A function that cannot be found, or may not be called, is a broken target: DEFINE has no answer,
    so its calls fail. ProtocolError if the name is malformed.
    """
    trusts = worker.trusts(peer)
    if flags & BY_VALUE:
        line, _, pickled = data.partition(b"\n")
        data, flags = (pickled, 0) if trusts else (line, EXPOSED)
    if flags & (SERVICE | OP | EXPOSED):
        name = _name(data, peer)
        if flags & SERVICE:
            return Target(None, name, name)
        if flags & OP:
            return _resolve_op(worker, name, trusts)
        return _resolve_exposed(worker, name, trusts)
    # The one place where a pickle of a peer's DEFINE is loaded, and thus the one check it needs.
    if not trusts:
        return worker.refused
    try:
        func = worker.codec.decode(data, (), BY_SCRIPT, Arrival(peer, "define", False))
    except Exception as error:
        reference = referenced(data)
        if reference is None:
            name, what = "a function", "something that a function refers to"
        else:
            name, what = reference[1], f"the function {'.'.join(reference)}"
        explain_import(error, what, worker.name)
        return Target.broken(name, error)
    return Target(func, function_name(func))


def referenced(data: bytes) -> tuple[str, str] | None:
    """Return module and name of the object that a pickle refers to; None if it is more than that.

    For the errors of objects that cannot be found, so it need not be fast.
    """
    import pickletools

    found: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if isinstance(argument, str):
                found.append(argument)
            elif opcode.name not in _REFERENCE:
                return None
    except ValueError:  # no pickle, or one that is cut off
        return None
    return (found[0], found[1]) if len(found) == 2 else None


def _name(data: bytes, peer: PeerInfo) -> str:
    if len(data) > _NAME:
        raise ProtocolError(f"DEFINE: a name of {len(data)} bytes, more than {_NAME}", peer.name)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ProtocolError("DEFINE: a name that is not UTF-8", peer.name) from None


def _resolve_op(worker: ResolvingWorker, name: str, trusts: bool) -> Target:
    op = worker.ops.get(name)
    if op is None or not (trusts or is_exposed(op)):
        why = f"there is no op {name[:80]!r} here" if op is None else f"{name} is not exposed here"
        return Target.broken(name, NotAllowed(why, worker.name))
    return Target(op, name, "op")


def _resolve_exposed(worker: ResolvingWorker, name: str, trusts: bool) -> Target:
    # An import runs code, so only a trusted peer may cause one.
    if trusts:
        with contextlib.suppress(ImportError):
            importlib.import_module(name.partition(":")[0])
    func = find_exposed(name)
    if func is None:
        return Target.broken(name, NotAllowed(f"{name} is not exposed here", worker.name))
    return Target(func, function_name(func))
