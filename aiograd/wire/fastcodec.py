"""The fast path for the commonest payloads: numbers, strings and arrays, not nested.

They contain no value that needs a traveller, so they are pickled without looking inside. Arrays go
as shape, dtype and bytes. That takes a third of the time of the general codec in `codec.py`, which
encodes everything else. Values of two further classes may be sent as a *box*: an array and a number
that says the rest. The second class is that of another library: it is sent to peers only that are
known to have the library loaded. Large arrays are not copied: their memory is added to a list, if
the caller passes one, and is sent beside the pickle.

A *batch* is several calls of one function, or several replies, in one frame. One pickle of all
their *entries* takes a third of the time of as many pickles. Their ids count up from the one in the
header. An entry is a snapshot, taken when its call is made:

    of a call     the tuple of its arguments; a list if arrays or boxes (see `flat`) are among them
    of a reply    the value; a tuple if it is an array or a box

Only small values are batched, so that the entries of a batch always fit into a frame.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final, Protocol

from numpy import ndarray  # by its name: numpy's attributes are looked up slowly

from aiograd.errors import ProtocolError
from aiograd.wire.arrays import CODES, DTYPES

_code_of: Final = CODES.get  # bound once: every array asks
_NOTHING: Final = pickle.dumps(((), None, None), 5)  # a call without arguments
BORROW_FROM: Final = 64 * 1024  # bytes of one array: from there up it is lent instead of copied
ARRAY: Final = -1  # a note on an argument: it is an array. From 0 up: it is a box
SECOND: Final = -2  # from there down: it is a box of the second class
ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None), complex})


class Box(Protocol):
    """How values of one class travel as an array and a small number."""

    def open(self, value: Any, departure: Any) -> tuple[Any, int] | None:
        """The array and the number; None: the value needs the general codec."""

    def close(self, array: ndarray, note: int, arrival: Any) -> Any:
        """Make the value again from the array and the number."""


class SecondBox(Box, Protocol):
    """The box of another library's values."""

    def finish(self, arrival: Any) -> None:
        """Complete the values of a message, when all of them are made."""


# The classes whose values are boxed; the second one is None where its library is not loaded.
Boxes = tuple[type, Box, type | None, SecondBox | None] | None
Lent = list[pickle.PickleBuffer] | None  # the memory of large arrays; None: they cannot travel


def encode_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    boxes: Boxes = None,
    departure: Any = None,
    lent: Lent = None,
) -> bytes | None:
    """`(args, kwargs)` for `decode_call`; None if something else than the simplest is in them."""
    if not args and not kwargs:
        return _NOTHING
    # By `type`, not `isinstance`: a subclass of int or str may carry more than its number or text,
    # and only the general codec takes that along.
    for value in args:
        if type(value) not in ATOMS:
            return _encode_arrays(args, kwargs, boxes, departure, lent)
    if kwargs and not _are_atoms(kwargs):
        return None
    return pickle.dumps((args, kwargs, None), 5)


def _are_atoms(kwargs: dict[str, Any]) -> bool:
    return all(type(value) in ATOMS for value in kwargs.values())


def _encode_arrays(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None, boxes: Boxes, departure: Any, lent: Lent
) -> bytes | None:
    """`encode_call` where something may be an array or a box: these become tuples."""
    if kwargs and not _are_atoms(kwargs):
        return None
    # Two classes at most, so that the tests below are identities and not a search.
    boxed, box, second, second_box = boxes if boxes is not None else (None, None, None, None)
    items: list[Any] = list(args)
    first: dict[int, int] = {}  # where a box, or something lent, was met for the first time
    for index, value in enumerate(args):
        cls = type(value)
        if cls in ATOMS:
            continue
        note = ARRAY
        if cls is boxed:
            earlier = first.setdefault(id(value), index)
            if earlier != index:  # the same object again stays the same object
                items[index] = (earlier,)
                continue
            opened = box.open(value, departure)  # type: ignore[union-attr]
            if opened is None:
                return None
            value, note = opened
        elif cls is not ndarray:
            if cls is not second:
                return None
            earlier = first.setdefault(id(value), index)
            if earlier != index:
                items[index] = (earlier,)
                continue
            opened = second_box.open(value, departure)  # type: ignore[union-attr]
            if opened is None:
                return None
            value, note = opened[0], SECOND - opened[1]
        elif value.nbytes >= BORROW_FROM and first.setdefault(id(value), index) != index:
            return None  # lent once, it would arrive as two
        flat = flat_array(value, lent)
        if flat is None:
            return None
        items[index] = (*flat, note)
    # Without the callback pickle would copy the memory into its own bytes.
    if lent:
        return pickle.dumps((items, kwargs, True), 5, buffer_callback=_outside)
    return pickle.dumps((items, kwargs, True), 5)


def encode_plain(args: tuple[Any, ...], lent: Lent = None) -> bytes:
    """Arguments of which the caller knows that they are plain data, however deep."""
    if lent:
        return pickle.dumps((args, None, None), 5, buffer_callback=_outside)
    return pickle.dumps((args, None, None), 5)


def _outside(buffer: pickle.PickleBuffer) -> bool:
    return False  # not in the pickle: it is in the list already, in the order of the pickle


def decode_call(
    data: Any, boxes: Boxes = None, arrival: Any = None, lent: Sequence[Any] = ()
) -> tuple[Any, dict[str, Any] | None]:
    """Return the arguments of `encode_call`; `lent` is the memory that was sent beside them."""
    args, kwargs, arrays = pickle.loads(data, buffers=lent) if lent else pickle.loads(data)
    if arrays:
        unflatten(args, boxes, arrival)
    return args, kwargs


def unflatten(args: list[Any], boxes: Boxes, arrival: Any) -> None:
    """Make arrays and boxes of the tuples among some arguments."""
    second: Any = None
    for index, item in enumerate(args):
        if item.__class__ is not tuple:
            continue
        # The number of an earlier argument: the two were one object, and shall be one again.
        if len(item) == 1:
            args[index] = args[item[0]]
            continue
        shape, code, memory, note = item
        # Over the memory of the message, without a copy: what arrives belongs to the receiver.
        args[index] = array = ndarray(shape, DTYPES[code], memory)
        if note >= 0:
            args[index] = boxes[1].close(array, note, arrival)  # type: ignore[index]
        elif note != ARRAY:
            second = _second(boxes)
            args[index] = second.close(array, SECOND - note, arrival)
    if second is not None:
        second.finish(arrival)


def _second(boxes: Boxes) -> SecondBox:
    if boxes is None or boxes[3] is None:
        raise ProtocolError("a value of a library that was never used with this peer")
    return boxes[3]


def encode_value(
    value: Any, boxes: Boxes = None, departure: Any = None, lent: Lent = None
) -> bytes | None:
    """One result, or None if it needs the general codec."""
    cls = type(value)
    if cls in ATOMS:
        return pickle.dumps((value, None), 5)
    note = ARRAY
    if boxes is not None and cls is boxes[0]:
        opened = boxes[1].open(value, departure)
        if opened is None:
            return None
        value, note = opened
    elif cls is not ndarray:
        if boxes is None or cls is not boxes[2]:
            return None
        opened = boxes[3].open(value, departure)  # type: ignore[union-attr]
        if opened is None:
            return None
        value, note = opened[0], SECOND - opened[1]
    flat = flat_array(value, lent)
    if flat is None:
        return None
    if lent:
        return pickle.dumps((flat, note), 5, buffer_callback=_outside)
    return pickle.dumps((flat, note), 5)


def decode_value(
    data: Any, boxes: Boxes = None, arrival: Any = None, lent: Sequence[Any] = ()
) -> Any:
    """Return the value of `encode_value`; `lent` is the memory that was sent beside it."""
    value, note = pickle.loads(data, buffers=lent) if lent else pickle.loads(data)
    if note is None:
        return value
    array: Any = ndarray(value[0], DTYPES[value[1]], value[2])
    if note == ARRAY:
        return array
    if note >= 0:
        return boxes[1].close(array, note, arrival)  # type: ignore[index]
    return _unbox_second(array, note, boxes, arrival)


def _unbox_second(array: ndarray, note: int, boxes: Boxes, arrival: Any) -> Any:
    second = _second(boxes)
    value = second.close(array, SECOND - note, arrival)
    second.finish(arrival)
    return value


def flat_array(array: ndarray, lent: Lent = None) -> tuple[tuple[int, ...], str, Any] | None:
    """Shape, dtype and bytes, of which `np.ndarray` makes the array; None if that is not all."""
    code, flags = _code_of(array.dtype), array.flags
    if code is None or not flags.c_contiguous:
        return None
    # A copy, and a bytearray: bytes would arrive as an array that cannot be written to.
    if array.nbytes < BORROW_FROM:
        return array.shape, code, bytearray(array.tobytes())
    if lent is None or not flags.writeable:  # it would not be writable where it arrives, either
        return None
    lent.append(pickle.PickleBuffer(array))  # type: ignore[arg-type]
    return array.shape, code, lent[-1]


NOT_BATCHABLE: Final = object()  # the entry of what has to travel alone
_TINY: Final = frozenset({float, bool, type(None), complex})  # a few bytes, whatever the value
# Beyond, the bytes of a number grow with it, and a batch of a thousand might not fit a frame.
_INT: Final = 1 << 64
# Limits of what one entry may take, so that a batch always fits into a frame.
_FEW: Final = 8  # arguments of a call
_SHORT: Final = 1000  # characters or bytes of one of them
_LITTLE: Final = 4096  # bytes of an array


def encode_call_entry(args: tuple[Any, ...], boxes: Boxes) -> Any:
    """The arguments of a call."""
    if len(args) > _FEW:
        return NOT_BATCHABLE
    for value in args:
        cls = type(value)
        # Compared: `bit_length()` would be a method call per argument.
        if cls is int:
            if not -_INT < value < _INT:
                return NOT_BATCHABLE
        elif cls not in _TINY:
            if cls not in ATOMS:
                return _array_entry(args, boxes)
            if len(value) > _SHORT:
                return NOT_BATCHABLE
    return args


def _array_entry(args: tuple[Any, ...], boxes: Boxes) -> Any:
    boxed, second = (None, None) if boxes is None else (boxes[0], boxes[2])
    items: list[Any] = []
    for value in args:
        # Arrays are not looked for: a second copy of a small one is cheaper than the search.
        if items and (value.__class__ is boxed or value.__class__ is second):
            index = 0  # where it is met first; `tuple.index` would compare arrays
            while args[index] is not value:
                index += 1
            if index < len(items):  # the same object again stays the same object
                items.append((index,))
                continue
        entry = encode_value_entry(value, boxes)
        if entry is NOT_BATCHABLE:
            return NOT_BATCHABLE
        items.append(entry)
    return items


def encode_value_entry(value: Any, boxes: Boxes) -> Any:
    """One result."""
    cls, note = type(value), ARRAY
    if boxes is not None and cls is boxes[0]:
        opened = boxes[1].open(value, None)
        if opened is None:
            return NOT_BATCHABLE
        value, note = opened
    elif cls is int:
        return value if -_INT < value < _INT else NOT_BATCHABLE
    elif cls in _TINY:
        return value
    elif cls in ATOMS:
        return value if len(value) <= _SHORT else NOT_BATCHABLE
    elif cls is not ndarray:
        if boxes is None or cls is not boxes[2]:
            return NOT_BATCHABLE
        opened = boxes[3].open(value, None)  # type: ignore[union-attr]
        if opened is None:
            return NOT_BATCHABLE
        value, note = opened[0], SECOND - opened[1]
    code = _code_of(value.dtype)
    if code is None or value.nbytes > _LITTLE or not value.flags.c_contiguous:
        return NOT_BATCHABLE
    return value.shape, code, bytearray(value.tobytes()), note


def encode_batch(entries: list[Any]) -> bytes:
    """Pickle the entries of one frame."""
    return pickle.dumps(entries, 5)


def decode_batch(data: Any) -> list[Any]:
    """Return the entries of one frame; ProtocolError if it holds anything but a list."""
    entries = pickle.loads(data)
    # Checked here, because the loop over the entries would take a string for many of them.
    if entries.__class__ is not list:
        raise ProtocolError(f"a batch is a list, not {type(entries).__name__}")
    return entries


def decode_call_entry(entry: Any, boxes: Boxes) -> Any:
    """The arguments in an entry."""
    if entry.__class__ is list:
        unflatten(entry, boxes, None)
    return entry


def decode_value_entry(entry: Any, boxes: Boxes, arrival: Any = None) -> Any:
    """The result in an entry."""
    if entry.__class__ is not tuple:
        return entry
    shape, code, memory, note = entry
    array: Any = ndarray(shape, DTYPES[code], memory)
    if note == ARRAY:
        return array
    if note >= 0:
        return boxes[1].close(array, note, arrival)  # type: ignore[index]
    return _unbox_second(array, note, boxes, arrival)
