"""The data-only codec: values as bytes without pickle, for peers that must not run code here.

None, bool, int, float, complex, str, bytes, list, tuple, dict with str keys, arrays of plain
numbers, and travellers (as their plain data). Nothing else can be encoded, and no byte sequence
can make the decoder call, import or allocate anything beyond what it announces and the limits
allow: it raises `ProtocolError` and nothing else. Where a message starts with a count or a size,
that number is compared with what is there before anything is made of it.

    value = tag, then for   i q    int64          I len bytes   a larger int
                            f d    float64        c d d         complex
                            s len utf-8           b len bytes
                            l n values, t n values, d n (key value)
                            a dtype ndim dims… order, then len bytes (small) or M number (a buffer)
                            T tag-name value      a traveller
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from aiograd.errors import ProtocolError, SerializationError
from aiograd.wire.codec import NO, YES, Payload, Traveller, Travellers
from aiograd.wire.fastcodec import BORROW_FROM

# Limits of one value, for encoder and decoder alike, so that what is refused there fails here.
DEPTH: Final = 64  # both are recursive; far below Python's own limit
ITEMS: Final = 100_000  # an item of one byte becomes an object of dozens
ARRAYS: Final = 4_096
DIMENSIONS: Final = 32  # the limit of numpy 1
BIG_INT: Final = 1_024  # bytes
DECODED: Final = "decoded"  # the key of the bytes that a value takes, in `arrival.scratch`
# The key of those that travellers add while it is decoded: an array in a wider dtype, for example.
GROWN: Final = "grown"
_OBJECT: Final = 64  # bytes of an item besides what follows from its length

_DTYPES: Final = "?bBhHiIlLqQefdFD"  # numbers whose bytes mean nothing but themselves
_CODES: Final = {np.dtype(char).str: char for char in _DTYPES}
_INT, _FLOAT, _COMPLEX, _COUNT = (struct.Struct(f) for f in ("<q", "<d", "<dd", "<I"))


class DataCodec:
    """Encodes and decodes plain data; the same interface as `codec.Codec`."""

    plain: Final = True  # nothing it reads can be code

    def __init__(self, travellers: Travellers, plain: Travellers | None = None) -> None:
        self.travellers = travellers
        self._plain = plain  # types that pickle by themselves, and need a traveller only here

    def of(self, cls: type) -> Traveller | None:
        """Return the traveller of a class, or of its nearest base; None if there is none."""
        found = self.travellers.of(cls)
        return self._plain.of(cls) if found is None and self._plain is not None else found

    def tagged(self, tag: str) -> Traveller:
        """Return the traveller of a tag; KeyError if there is none."""
        try:
            return self.travellers.tagged(tag)
        except KeyError:
            if self._plain is None:
                raise
            return self._plain.tagged(tag)

    def encode(self, value: Any, departure: Any) -> Payload:
        """Return a value as bytes and buffers; SerializationError if it is no plain data."""
        writer = _Writer(self, departure)
        writer.value(value, 0)
        return Payload(bytes(writer.out), writer.buffers, writer.travelled)

    def decode(
        self,
        data: Any,
        buffers: Sequence[Any] = (),
        travelled: bool = False,
        arrival: Any = None,
    ) -> Any:
        """Return the value of a payload of any peer; ProtocolError if it is malformed."""
        reader = _Reader(memoryview(data).cast("B"), buffers, self, arrival)
        value = reader.value(0)
        if arrival is not None:
            arrival.scratch[DECODED] = reader.memory + arrival.scratch.pop(GROWN, 0)
        if reader.at != len(reader.data):
            raise ProtocolError(f"{len(reader.data) - reader.at} bytes follow the value")
        return value


class _Writer:
    """One value being encoded."""

    def __init__(self, travellers: DataCodec, departure: Any) -> None:
        self.out = bytearray()
        self.buffers: list[Any] = []
        self.travelled = NO
        self._travellers, self._departure = travellers, departure
        self._items = 0

    def value(self, value: Any, depth: int) -> None:
        """Append one value with all that is in it."""
        self._items += 1
        if depth > DEPTH or self._items > ITEMS:
            raise SerializationError("the value", "it is nested too deeply or has too many items")
        # By exact class: a subclass may hold more than the receiver would get.
        cls = value.__class__
        if value is None:
            self.out += b"0"
        elif cls is bool:
            self.out += b"+" if value else b"-"
        elif cls is int:
            self._int(value)
        elif cls is float:
            self.out += b"f" + _FLOAT.pack(value)
        elif cls is complex:
            self.out += b"c" + _COMPLEX.pack(value.real, value.imag)
        elif cls is str:
            self._bytes(b"s", value.encode())
        elif cls is bytes:
            self._bytes(b"b", value)
        elif cls is list or cls is tuple:
            self.out += (b"l" if cls is list else b"t") + _COUNT.pack(len(value))
            for item in value:
                self.value(item, depth + 1)
        elif cls is dict:
            self._dict(value, depth)
        # numpy's scalars become arrays without dimensions, which keeps their dtype.
        elif cls is np.ndarray or isinstance(value, np.generic):
            self._array(np.asarray(value))
        elif (traveller := self._travellers.of(cls)) is not None:
            self.travelled = YES
            self._bytes(b"T", traveller.tag.encode())
            self.value(traveller.depart(value, self._departure), depth + 1)
        else:
            raise SerializationError(
                f"a {cls.__name__}", "only numbers, text, containers and arrays travel to this peer"
            )

    def _int(self, value: int) -> None:
        if -(1 << 63) <= value < 1 << 63:
            self.out += b"i" + _INT.pack(value)
            return
        size = value.bit_length() // 8 + 1
        # Refused here already: the decoder's limit would fail at the peer, with less to say.
        if size > BIG_INT:
            raise SerializationError("an int", f"an int of more than {BIG_INT} bytes")
        self._bytes(b"I", value.to_bytes(size, "little", signed=True))

    def _bytes(self, tag: bytes, data: bytes) -> None:
        self.out += tag + _COUNT.pack(len(data)) + data

    def _dict(self, value: dict[Any, Any], depth: int) -> None:
        self.out += b"d" + _COUNT.pack(len(value))
        for key, item in value.items():
            if key.__class__ is not str:
                raise SerializationError(f"a dict key of type {type(key).__name__}", "only str do")
            data = key.encode()
            self.out += _COUNT.pack(len(data)) + data
            self.value(item, depth + 1)

    def _array(self, array: np.ndarray) -> None:
        code = _CODES.get(array.dtype.str)
        if code is None:
            raise SerializationError(f"an array of {array.dtype}", "only plain numbers do")
        order = b"C"
        if not array.flags.c_contiguous:
            if array.flags.f_contiguous:
                order = b"F"
            else:
                array = np.ascontiguousarray(array)
        flat = array.reshape(-1, order=order.decode())  # type: ignore[call-overload]
        self.out += b"a" + code.encode() + bytes([array.ndim]) + order
        for n in array.shape:
            self.out += _INT.pack(n)
        # The same threshold as in `codec`: what is smaller is taken as it is now, what is larger is
        # borrowed until the call is done.
        if array.nbytes < BORROW_FROM:
            data = flat.tobytes()
            self.out += b"m" + _COUNT.pack(len(data)) + data
        else:
            self.out += b"M" + _COUNT.pack(len(self.buffers))
            self.buffers.append(np.ascontiguousarray(flat).data.cast("B"))


class _Reader:
    """One value being decoded. Everything it reads was written by a peer that is not trusted."""

    def __init__(
        self, data: memoryview, buffers: Sequence[Any], travellers: DataCodec, arrival: Any
    ) -> None:
        self.data, self.buffers = data, buffers
        self.at = 0
        self._travellers, self._arrival = travellers, arrival
        self._items = self._arrays = 0
        self.memory = (
            0  # bytes that the value takes: more than those it came in, for text above all
        )

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes; ProtocolError if there are fewer."""
        end = self.at + count
        if end > len(self.data):
            raise ProtocolError("the value ends too early")
        part = self.data[self.at : end]
        self.at = end
        return part

    def number(self, form: struct.Struct) -> Any:
        """Return the numbers of a fixed layout."""
        return form.unpack(self.take(form.size))

    def count(self) -> int:
        """Return a length or an index."""
        (count,) = self.number(_COUNT)
        return int(count)

    def text(self) -> str:
        """Return a length and as many bytes of UTF-8."""
        try:
            text = str(self.take(self.count()), "utf-8")
            self.memory += sys.getsizeof(text)
            return text
        except UnicodeDecodeError as error:
            raise ProtocolError("text is not UTF-8") from error

    def octets(self, depth: int) -> bytes:
        """Return a length and as many bytes."""
        data = bytes(self.take(self.count()))
        self.memory += len(data)
        return data

    def value(self, depth: int) -> Any:
        """Return the next value with all that is in it."""
        self._items += 1
        self.memory += _OBJECT
        if depth > DEPTH or self._items > ITEMS:
            raise ProtocolError("the value is nested too deeply or has too many items")
        read = _READERS.get(bytes(self.take(1)))
        if read is None:
            raise ProtocolError("unknown tag of a value")
        return read(self, depth)

    def items(self, depth: int) -> list[Any]:
        """Return the items of a list or tuple."""
        count = self.count()
        # Every item takes a byte at least, so a larger count is a lie: refused before memory is
        # taken for it.
        if count > ITEMS - self._items or count > len(self.data) - self.at:
            raise ProtocolError("a container announces more items than there are")
        return [self.value(depth + 1) for _ in range(count)]

    def dictionary(self, depth: int) -> dict[str, Any]:
        """Return a dict with str keys."""
        count = self.count()
        if count > ITEMS - self._items or count > len(self.data) - self.at:
            raise ProtocolError("a dict announces more items than there are")
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.text()
            found[key] = self.value(depth + 1)
        return found

    def big_int(self, depth: int) -> int:
        """Return an int beyond 64 bits."""
        count = self.count()
        if count > BIG_INT:
            raise ProtocolError("an int is too large")
        return int.from_bytes(self.take(count), "little", signed=True)

    def array(self, depth: int) -> np.ndarray:
        """Return an array, over a copy of the bytes or over the buffer that came with them."""
        self._arrays += 1
        code, ndim, order = (bytes(self.take(1)) for _ in range(3))
        if self._arrays > ARRAYS or ndim[0] > DIMENSIONS:
            raise ProtocolError("too many arrays or dimensions")
        # An allow-list: `np.dtype` of a peer's text could name objects, that is pointers.
        if code.decode("latin-1") not in _DTYPES or order not in (b"C", b"F"):
            raise ProtocolError("unknown kind of array")
        dtype = np.dtype(code.decode())
        shape = tuple(int(self.number(_INT)[0]) for _ in range(ndim[0]))
        if any(n < 0 for n in shape):
            raise ProtocolError("an array has a negative dimension")
        size = math.prod(shape) * dtype.itemsize  # Python's ints: no overflow
        self.memory += size
        memory = self._memory(size)
        try:
            return np.ndarray(shape, dtype, memory, order="C" if order == b"C" else "F")
        except ValueError as error:  # empty, but with a dimension beyond all memory
            raise ProtocolError(f"an array cannot have this shape: {error}") from error

    def _memory(self, size: int) -> Any:
        where = bytes(self.take(1))
        # The size follows from shape and dtype; the sender's own figure must agree, or the array
        # would reach beyond its memory.
        if where == b"m":
            if self.count() != size:
                raise ProtocolError("an array's size does not fit its shape")
            return bytearray(self.take(size))
        if where != b"M":
            raise ProtocolError("unknown tag of an array's memory")
        number = self.count()
        if number >= len(self.buffers):
            raise ProtocolError("an array names a buffer that the message does not have")
        memory = memoryview(self.buffers[number]).cast("B")
        if memory.nbytes != size:
            raise ProtocolError("an array's size does not fit its shape")
        return memory

    def traveller(self, depth: int) -> Any:
        """Return what a traveller makes of its plain data."""
        tag = self.text()
        data = self.value(depth + 1)
        try:
            traveller = self._travellers.tagged(tag)
        except KeyError:
            raise ProtocolError(f"no such traveller: {tag[:40]!r}") from None
        # Travellers expect data of their own making. What they raise for other data is the peer's
        # fault, except our own errors, which they raise on purpose.
        try:
            return traveller.arrive(data, self._arrival)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise ProtocolError(f"a {tag} arrived broken: {error}") from error


# A table instead of methods found by name: a tag can reach nothing that is not listed here.
_READERS: Final = {
    b"0": lambda reader, depth: None,
    b"+": lambda reader, depth: True,
    b"-": lambda reader, depth: False,
    b"i": lambda reader, depth: reader.number(_INT)[0],
    b"I": _Reader.big_int,
    b"f": lambda reader, depth: reader.number(_FLOAT)[0],
    b"c": lambda reader, depth: complex(*reader.number(_COMPLEX)),
    b"s": lambda reader, depth: reader.text(),
    b"b": _Reader.octets,
    b"l": _Reader.items,
    b"t": lambda reader, depth: tuple(reader.items(depth)),
    b"d": _Reader.dictionary,
    b"a": _Reader.array,
    b"T": _Reader.traveller,
}
