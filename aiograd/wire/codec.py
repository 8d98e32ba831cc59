"""The codec: any Python values to bytes and borrowed buffers, and back.

Pickle protocol 5 with three additions. Arrays have a reduction of their own, a tenth of the cost of
numpy's; from `BORROW_FROM` bytes up they are not copied but borrowed, and arrive in memory that
belongs to the receiver. Functions and classes that cannot be imported elsewhere go by value
(cloudpickle). *Travellers*, types that need care on the way, are asked for plain data and rebuilt
on arrival.

What may travel is decided here; who the travellers are, and what becomes of the bytes, is not.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol

import cloudpickle
import numpy as np

from aiograd.errors import AiogradError, SerializationError
from aiograd.wire.arrays import rebuild_array, reduce_array
from aiograd.wire.diagnose import find_culprit
from aiograd.wire.fastcodec import BORROW_FROM, Boxes

_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None), complex})
_UNKNOWN: Final = object()
_LARGE: Final = 4096

Reducer = Callable[["_Pickler", Any], Any]


class Payload(NamedTuple):
    """Encoded values: the pickle, the buffers that it borrows, and whether travellers are in it."""

    data: bytes
    buffers: Sequence[Any] = ()
    travelled: bool = False

    def size(self) -> int:
        total = len(self.data)
        for buffer in self.buffers:
            total += memoryview(buffer).nbytes
        return total


class Traveller(Protocol):
    """A type that needs care on the way."""

    tag: str

    def depart(self, value: Any, departure: Any) -> Any: ...

    def arrive(self, data: Any, arrival: Any) -> Any: ...


class Travellers:
    """Which types travel with care, by class and by tag; subclasses too."""

    def __init__(self) -> None:
        self._by_class: dict[type, Traveller] = {}
        self._by_tag: dict[str, Traveller] = {}
        self.boxes: Boxes = None  # the class that may take the quick road of `flat`, and its box
        self.listeners: list[Callable[[], None]] = []  # caches that must forget what they know

    def add(self, cls: type, traveller: Traveller) -> None:
        self._by_class[cls] = self._by_tag[traveller.tag] = traveller
        for changed in self.listeners:
            changed()

    def of(self, cls: type) -> Traveller | None:
        for base in cls.__mro__:
            if base in self._by_class:
                return self._by_class[base]
        return None

    def tagged(self, tag: str) -> Traveller:
        return self._by_tag[tag]


class Encoder(Protocol):
    """What `Codec` and the codec for plain data have in common."""

    @property
    def plain(self) -> bool: ...

    def encode(self, value: Any, departure: Any) -> Payload: ...


# What is being decoded in this context; set only while a payload with travellers is loaded.
_arriving: ContextVar[tuple[Travellers, Any]] = ContextVar("aiograd_arriving")


def _arrive(tag: str, data: Any) -> Any:
    travellers, arrival = _arriving.get()
    return travellers.tagged(tag).arrive(data, arrival)


# A private extension code makes the reference one opcode instead of two strings and an import.
copyreg.add_extension(__name__, "_arrive", 0x61670002)


class Codec:
    """Encodes and decodes payloads for one worker. Re-entrant: a reducer may encode another one."""

    plain: Final = False  # what it reads may run code

    def __init__(self, travellers: Travellers) -> None:
        self.travellers = travellers
        self.reducers: dict[type, Reducer | None] = {}
        travellers.listeners.append(self.reducers.clear)
        self._idle: list[_Pickler] = []

    def encode(self, value: Any, departure: Any) -> Payload:
        """Take `value` as it is now; only buffers of `BORROW_FROM` bytes and more are borrowed."""
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
        travelled: bool = False,
        arrival: Any = None,
    ) -> Any:
        if not travelled:
            return pickle.loads(data, buffers=buffers)  # type: ignore[arg-type]
        token = _arriving.set((self.travellers, arrival))
        try:
            return pickle.loads(data, buffers=buffers)  # type: ignore[arg-type]
        finally:
            _arriving.reset(token)

    def reducer_of(self, cls: type) -> Reducer | None:
        """How instances of `cls` are reduced; None: as pickle does it."""
        reducer: Reducer | None
        if self.travellers.of(cls) is not None:
            reducer = _reduce_traveller
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
    """cloudpickle's reducers, then whatever is in copyreg at that moment."""

    def __missing__(self, cls: type) -> Any:
        return copyreg.dispatch_table[cls]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = _DispatchTable(cloudpickle.Pickler._dispatch_table)

    def __init__(self, codec: Codec) -> None:
        self._file = io.BytesIO()
        pickle.Pickler.__init__(self, self._file, 5, buffer_callback=self._lend)
        self.proto = 5
        self.globals_ref: dict[int, Any] = {}
        self.codec = codec
        self._reducers = codec.reducers
        self.departure: Any = None
        self.buffers: list[pickle.PickleBuffer] = []
        self.travelled = False

    def encode(self, value: Any, departure: Any) -> Payload:
        self.departure = departure
        pickle.Pickler.dump(self, value)
        return Payload(self._file.getvalue(), self.buffers, self.travelled)

    def reset(self) -> None:
        self.clear_memo()
        self._file.seek(0)
        self._file.truncate()
        self.departure = None
        if self.buffers:
            self.buffers = []
        if self.globals_ref:
            self.globals_ref = {}
        self.travelled = False

    def _lend(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < BORROW_FROM:
            return True  # in band
        self.buffers.append(buffer)
        return False

    def reducer_override(self, obj: Any) -> Any:
        reducer: Any = self._reducers.get(type(obj), _UNKNOWN)
        if reducer is _UNKNOWN:
            reducer = self.codec.reducer_of(type(obj))
        return NotImplemented if reducer is None else reducer(self, obj)


def _reduce_array(pickler: _Pickler, array: np.ndarray) -> Any:
    return reduce_array(array, BORROW_FROM)


def _reduce_traveller(pickler: _Pickler, value: Any) -> Any:
    traveller = pickler.codec.travellers.of(type(value))
    assert traveller is not None
    pickler.travelled = True
    return _arrive, (traveller.tag, traveller.depart(value, pickler.departure))


def _reduce_code(pickler: _Pickler, code: Any) -> Any:
    if code is rebuild_array or code is _arrive:  # on every array's way: spare it the search
        return NotImplemented
    return cloudpickle.Pickler.reducer_override(pickler, code)


def _refuse(pickler: _Pickler, value: Any) -> Any:
    if isinstance(value, io.BytesIO | io.StringIO):
        return NotImplemented
    raise TypeError(f"cannot send an open file ({type(value).__name__})")


# ── who was it ──────────────────────────────────────────────────────────────────────────────────


def encode_named(codec: Encoder, value: Any, departure: Any, name: str) -> Payload:
    """Encode, and say where the trouble sits if that fails.

    SerializationError passes as it is; so does what a traveller raises on purpose (any of our own
    errors): an RRef whose owner is gone is not a serialization problem.
    """
    try:
        return codec.encode(value, departure)
    except SerializationError as error:
        if not codec.plain:
            raise
        path, _ = find_culprit(codec, value, departure, name, error)
        raise SerializationError(path, error.what) from None
    except AiogradError:
        raise
    except RecursionError as error:
        raise SerializationError(name, "it is nested too deeply") from error
    except Exception as error:
        path, what = find_culprit(codec, value, departure, name, error)
        raise SerializationError(path, what) from error
