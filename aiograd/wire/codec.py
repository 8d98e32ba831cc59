"""The codec: any Python value to bytes and borrowed buffers, and back.

    value ─▶ Codec.encode ─▶ Payload(data, buffers) ─▶ … wire … ─▶ Codec.decode ─▶ value
                  │                                                     ▲
                  └─ Traveller.depart(value) ─▶ plain data ─▶ Traveller.arrive(data)

Pickle protocol 5 with three additions. Arrays have a reduction of their own, a tenth of the cost of
numpy's; from `BORROW_FROM` bytes up they are not copied but borrowed (zero-copy), and arrive in
memory that belongs to the receiver. Functions and classes that cannot be imported elsewhere go by
value (cloudpickle). *Travellers*, types that need care on the way such as tensors and references,
are asked for plain data and rebuilt on arrival.

This module decides which values can be sent. The layers above register travellers; the link sends
the bytes.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import cloudpickle
import numpy as np

from aiograd.errors import AiogradError, SerializationError
from aiograd.wire.arrays import rebuild_array, reduce_array
from aiograd.wire.diagnose import find_culprit
from aiograd.wire.fastcodec import BORROW_FROM, Boxes
from aiograd.wire.namespaces import (
    ELSEWHERE,
    Definition,
    Namespaces,
    closure_of,
    fill,
    make_function,
    parts,
    script_key,
    shares_globals,
)
from aiograd.wire.reducers import REDUCERS, keep_slots

_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None), complex})
_UNKNOWN: Final = object()
_LARGE: Final = 4096  # bytes of a pickle whose pickler is not used again

Reducer = Callable[["_Pickler", Any], Any]


# What has to be known of the message to decode a payload: nothing, whose namespaces its functions
# live in, or everything (travellers).
NO: Final = 0
BY_SCRIPT: Final = 1
YES: Final = 2


@dataclass(slots=True)
class Payload:
    """An encoded value: the pickle, the buffers it borrows, and whether travellers are in it."""

    data: bytes
    buffers: Sequence[Any] = ()
    travelled: int = 0  # NO, BY_SCRIPT or YES

    def size(self) -> int:
        """Return the bytes of pickle and buffers together."""
        total = len(self.data)
        for buffer in self.buffers:
            total += memoryview(buffer).nbytes
        return total


class Traveller(Protocol):
    """How values of one type are sent that need care on the way."""

    tag: str  # names the type on the wire

    def depart(self, value: Any, departure: Any) -> Any:
        """Return the plain data that stands for `value` in a message."""

    def arrive(self, data: Any, arrival: Any) -> Any:
        """Return the value that the data stands for."""


class Promise:
    """A traveller that is loaded when the first value of its class leaves or arrives.

    For classes of libraries that take long to import, or are not there at all.
    """

    tag: str
    class_name: str

    def __init__(self, tag: str, class_name: str, load: Callable[[], None]) -> None:
        self.tag, self.class_name = tag, class_name  # the name with its module
        self.load = load  # adds the traveller; SerializationError if it cannot
        self.loading: Any = None  # of those who load it off their loop: the first one's future


class Travellers:
    """The travellers of one worker, by class (also for its subclasses) and by tag."""

    def __init__(self) -> None:
        self._by_class: dict[type, Traveller] = {}
        self._by_tag: dict[str, Traveller] = {}
        self.promises: list[Promise] = []  # of travellers that are not loaded yet
        self.namespaces: Namespaces = Namespaces()  # the globals of functions that came by value
        # The classes that may take the fast path, and their boxes: those that every peer knows, and
        # all that can be decoded here.
        self.common_boxes: Boxes = None
        self.boxes: Boxes = None
        self.listeners: list[Callable[[], None]] = []  # invalidate caches when a type is added

    def add(self, cls: type, traveller: Traveller) -> None:
        """Let `traveller` send values of a class and its subclasses."""
        self._by_class[cls] = self._by_tag[traveller.tag] = traveller
        self.promises = [promise for promise in self.promises if promise.tag != traveller.tag]
        # A codec may have met the class before, and noted that pickle takes care of it.
        for changed in self.listeners:
            changed()

    def promise(self, tag: str, class_name: str, load: Callable[[], None]) -> None:
        """Let `load` add the traveller of a class when it is first needed."""
        self.promises.append(Promise(tag, class_name, load))
        for changed in self.listeners:
            changed()

    def of(self, cls: type) -> Traveller | None:
        """Return the traveller of a class, or of its nearest base; None if there is none."""
        # Along the MRO, so that the nearest base wins over one that was registered earlier.
        for base in cls.__mro__:
            if base in self._by_class:
                return self._by_class[base]
        for promise in self.promises:
            for base in cls.__mro__:
                # By name: the class itself is known only when its library is loaded.
                if f"{base.__module__}.{base.__qualname__}" == promise.class_name:
                    promise.load()
                    return self._by_class[base]
        return None

    def tagged(self, tag: str) -> Traveller:
        """Return the traveller of a tag; KeyError if there is none."""
        for promise in self.promises:
            if promise.tag == tag:
                promise.load()
        return self._by_tag[tag]

    def promised(self, data: Any) -> Promise | None:
        """Return what must be loaded to decode a payload with travellers; None if nothing.

        Every codec writes the tag of a traveller as it is, so finding it in the bytes is enough. A
        tag that is there by chance only loads a library too early.
        """
        for promise in self.promises:
            if promise.tag.encode() in bytes(data):
                return promise
        return None


class Encoder(Protocol):
    """What `Codec` and `safecodec.DataCodec` have in common."""

    @property
    def plain(self) -> bool:
        """Whether it sends plain data only."""

    def encode(self, value: Any, departure: Any) -> Payload:
        """Return `value` as bytes and buffers."""


# What `_arrive` needs: pickle calls it with its own arguments only. A ContextVar, because `decode`
# nests (a traveller may decode another payload) and runs in threads, too. Set only while a payload
# with travellers is loaded.
_arriving: ContextVar[tuple[Travellers, Any]] = ContextVar("aiograd_arriving")


def _arrive(tag: str, data: Any) -> Any:
    travellers, arrival = _arriving.get()
    return travellers.tagged(tag).arrive(data, arrival)


# A private extension code makes the reference one opcode instead of two strings and an import.
copyreg.add_extension(__name__, "_arrive", 0x61670002)


def _make_function(code: Any, key: str, basic: Any, closure: Any) -> Any:
    """Make a function that came by value."""
    return make_function(code, _namespaces().get(key), key, basic, closure)


def _set_function(func: Any, state: Any) -> None:
    """Give a function that came by value its attributes, and its script the definitions."""
    attributes, slots, definitions, values = state
    arriving = _arriving.get(None)
    sender = getattr(arriving[1], "sender", None) if arriving is not None else None
    source = getattr(sender, "incarnation", None)
    namespace = _namespaces().get(func.__globals__["__aiograd_script__"])
    for name, made in definitions.items():
        namespace.define(name, Definition(*made), source, pickle.loads)
    for name, (identity, value) in values.items():
        namespace.bind(name, value, identity, source)
    fill(func, attributes, slots)


def _namespaces() -> Namespaces:
    arriving = _arriving.get(None)
    return ELSEWHERE if arriving is None else arriving[0].namespaces


class Codec:
    """Encodes and decodes values for one worker.

    Re-entrant: a reducer may encode another value. May be used in any thread.
    """

    def __init__(self, travellers: Travellers) -> None:
        self.plain: bool = False  # what it reads may run code
        self.travellers = travellers
        # Memo of `reducer_of`: pickle asks for every object, and types are few.
        self.reducers: dict[type, Reducer | None] = {}
        travellers.listeners.append(self.reducers.clear)
        # Picklers to use again: to make one costs more than a small pickle. A list is a stack with
        # atomic operations, so threads and nested calls get different ones.
        self._idle: list[_Pickler] = []

    def encode(self, value: Any, departure: Any) -> Payload:
        """Return `value` as it is now; buffers of `BORROW_FROM` bytes and more are borrowed.

        They must not change until the message is sent. Raises whatever pickle or a traveller does.
        """
        # They hold neither arrays nor travellers, so pickle alone gives the same bytes.
        if type(value) in _ATOMS:
            return Payload(pickle.dumps(value, 5))
        pickler = self._idle.pop() if self._idle else _Pickler(self)
        payload: Payload | None = None
        try:
            payload = pickler.encode(value, departure)
            return payload
        finally:
            pickler.reset()
            # One that wrote much has a large memo, which costs more to clear than to make anew.
            if payload is not None and len(payload.data) < _LARGE and len(self._idle) < 8:
                self._idle.append(pickler)

    def decode(
        self,
        data: bytes | memoryview | np.ndarray,
        buffers: Sequence[Any] = (),
        travelled: int = NO,
        arrival: Any = None,
    ) -> Any:
        """Return the value of a payload. May run code of the sender: for trusted peers only."""
        if not travelled:
            return pickle.loads(data, buffers=buffers)  # type: ignore[arg-type]
        token = _arriving.set((self.travellers, arrival))
        try:
            return pickle.loads(data, buffers=buffers)  # type: ignore[arg-type]
        finally:
            _arriving.reset(token)

    def reducer_of(self, cls: type) -> Reducer | None:
        """Return how instances of `cls` are reduced; None: as pickle does it."""
        reducer: Reducer | None
        # Travellers first: one may be a subclass of something below.
        if self.travellers.of(cls) is not None:
            reducer = _reduce_traveller
        # Exactly: a subclass has more to it than shape, dtype and memory.
        elif cls is np.ndarray:
            reducer = _reduce_array
        elif issubclass(cls, type | types.FunctionType):
            reducer = _reduce_code
        elif issubclass(cls, io.IOBase):
            reducer = _refuse
        else:
            reducer = None
        self.reducers[cls] = reducer
        return reducer


class _DispatchTable(dict[type, Any]):
    """cloudpickle's reducers and ours, then copyreg's as they are at that moment.

    A dict in place of cloudpickle's ChainMap, whose lookups run in Python.
    """

    def __missing__(self, cls: type) -> Any:
        return copyreg.dispatch_table[cls]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler with our reducers, which can be used again."""

    dispatch_table = _DispatchTable({**cloudpickle.Pickler._dispatch_table, **REDUCERS})

    def __init__(self, codec: Codec) -> None:
        self._file = io.BytesIO()
        # In place of cloudpickle's `__init__`; `proto` and `globals_ref` are its attributes.
        pickle.Pickler.__init__(self, self._file, 5, buffer_callback=self._borrow)
        self.proto = 5
        self.globals_ref: dict[int, Any] = {}
        self.codec = codec
        self._reducers = codec.reducers
        self.departure: Any = None
        self.buffers: list[pickle.PickleBuffer] = []
        self.travelled = NO
        self.reduced = False  # whether a reducer that is not for arrays made something on the way
        self.needs: set[str] | None = None  # in a definition: the globals that its functions use

    def encode(self, value: Any, departure: Any) -> Payload:
        """Pickle one value; call `reset` before the next."""
        self.departure = departure
        pickle.Pickler.dump(self, value)
        return Payload(self._file.getvalue(), self.buffers, self.travelled)

    def reset(self) -> None:
        """Forget the value, also after a failure in the middle of it."""
        # CPython frees the objects of a memo one by one, while a collection still visits all of
        # them. Freeing what a reducer made may start one: by code in `__del__`, or by releasing the
        # GIL, as torch's tensors do, to a thread that collects. So nothing is freed until the memo
        # is empty. What was given is held by the caller, and arrays and atoms run no code.
        made = self.memo.copy() if self.reduced else None
        self.clear_memo()
        if made is not None:
            self.reduced = False
        self._file.seek(0)
        self._file.truncate()
        self.departure = None
        if self.buffers:
            self.buffers = []
        if self.globals_ref:
            self.globals_ref = {}
        self.travelled = NO

    def _borrow(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < BORROW_FROM:
            return True  # pickle copies it into the stream
        if self.needs is not None:
            raise _NotByItself
        self.buffers.append(buffer)
        return False

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is reduced: pickle's hook, called for every object but atoms."""
        reducer: Any = self._reducers.get(type(obj), _UNKNOWN)
        if reducer is _UNKNOWN:
            reducer = self.codec.reducer_of(type(obj))
        if reducer is None:
            self.reduced = True
            return NotImplemented
        return reducer(self, obj)


def _reduce_array(pickler: _Pickler, array: np.ndarray) -> Any:
    return reduce_array(array, BORROW_FROM)


def _reduce_traveller(pickler: _Pickler, value: Any) -> Any:
    traveller = pickler.codec.travellers.of(type(value))
    assert traveller is not None
    if pickler.needs is not None:
        raise _NotByItself
    pickler.travelled = YES
    pickler.reduced = True
    return _arrive, (traveller.tag, traveller.depart(value, pickler.departure))


def _reduce_code(pickler: _Pickler, code: Any) -> Any:
    # Part of every array and traveller; cloudpickle would search the modules for them each time.
    if code is rebuild_array or code is _arrive:
        return NotImplemented
    pickler.reduced = True
    if (
        type(code) is types.FunctionType
        and shares_globals(code)
        and not cloudpickle.cloudpickle._should_pickle_by_reference(code)
    ):
        return _reduce_function(pickler, code)
    reduced = cloudpickle.Pickler.reducer_override(pickler, code)
    if isinstance(code, type) and "__slots__" in vars(code) and isinstance(reduced, tuple):
        keep_slots(code, reduced)
    return reduced


class _NotByItself(Exception):
    """A global holds travellers or large arrays, which belong to the message."""


def _reduce_function(pickler: _Pickler, func: types.FunctionType) -> Any:
    """Reduce a function whose globals are shared with other functions of its script."""
    (code, basic, closure), attributes, slots, names = parts(func)
    values: dict[str, Any] = {}
    received = pickler.codec.travellers.namespaces.of(func)
    key = received[0] if received is not None else script_key(func)
    if pickler.needs is not None:
        pickler.needs.update(names)
        definitions: dict[str, Definition] = {}
    else:
        pickler.travelled = max(pickler.travelled, BY_SCRIPT)

        def lookup(name: str) -> Definition | None:
            if received is not None and (known := received[1].known.get(name)) is not None:
                if known.definition is not None:
                    return known.definition
                values[name] = (id(known.value), known.value)
                return None
            value = func.__globals__.get(name, _UNKNOWN)
            if value is _UNKNOWN or received is not None:  # state of this worker stays here
                return None
            inner = _Pickler(pickler.codec)
            inner.needs = set()
            try:
                data = inner.encode(value, None).data
            except _NotByItself:
                values[name] = (id(value), value)
                return None
            return Definition(data, tuple(sorted(inner.needs)))

        definitions = closure_of(names, lookup)
    plain = {name: tuple(made) for name, made in definitions.items()}
    state = (attributes, slots, plain, values)
    return _make_function, (code, key, basic, closure), state, None, None, _set_function


def _refuse(pickler: _Pickler, value: Any) -> Any:
    # cloudpickle would read a file and send its contents: a surprise, and a large one.
    if isinstance(value, io.BytesIO | io.StringIO):
        return NotImplemented
    raise TypeError(f"cannot send an open file ({type(value).__name__})")


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


def encode_named(codec: Encoder, value: Any, departure: Any, name: str) -> Payload:
    """Encode a value; SerializationError with the path of the culprit if that fails.

    `name` is how the path begins. Our own errors pass as they are, because a traveller raised them
    on purpose: an RRef whose owner is gone is not a serialization problem.
    """
    try:
        return codec.encode(value, departure)
    except SerializationError as error:
        # Raised by a traveller, which knows the path; the data codec only knows the type.
        if not codec.plain:
            raise
        path, _ = find_culprit(codec, value, departure, name, error)
        raise SerializationError(path, error.what) from None
    except AiogradError:
        raise
    except RecursionError as error:
        # No search for the culprit: it would run into the same depth, once per level.
        raise SerializationError(name, "it is nested too deeply") from error
    except Exception as error:
        path, what = find_culprit(codec, value, departure, name, error)
        raise SerializationError(path, what) from error
