"""Rows: calls of one function, or replies, that follow each other and travel in one frame.

One pickle of all their *entries* takes a third of the time of as many pickles. Their ids count up
from the one in the header. An entry is a snapshot, taken when its call is made:

    of a call     the tuple of its arguments; a list if arrays or boxes (see `flat`) are among them
    of a reply    the value; a tuple if it is an array or a box

Only what is small goes in a row, so that the entries of one always fit into a frame.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

import numpy as np

from aiograd.errors import ProtocolError
from aiograd.wire.arrays import CODES, DTYPES
from aiograd.wire.flat import ARRAY, ATOMS, Boxes, unflatten

ALONE: Final = object()  # the entry of what has to travel alone
_TINY: Final = frozenset({float, bool, type(None), complex})  # a few bytes, whatever the value
_INT: Final = 1 << 64
_FEW: Final = 8  # arguments of a call
_SHORT: Final = 1000  # characters or bytes of one of them
_LITTLE: Final = 4096  # bytes of an array


def call_entry(args: tuple[Any, ...], boxes: Boxes) -> Any:
    """The arguments of a call."""
    if len(args) > _FEW:
        return ALONE
    for value in args:
        cls = type(value)
        if cls is int:
            if not -_INT < value < _INT:
                return ALONE
        elif cls not in _TINY:
            if cls not in ATOMS:
                return _array_entry(args, boxes)
            if len(value) > _SHORT:
                return ALONE
    return args


def _array_entry(args: tuple[Any, ...], boxes: Boxes) -> Any:
    boxed = None if boxes is None else boxes[0]
    items: list[Any] = []
    for value in args:
        if items and value.__class__ is boxed:
            index = 0  # where it is met first; `tuple.index` would compare arrays
            while args[index] is not value:
                index += 1
            if index < len(items):  # the same object again stays the same object
                items.append((index,))
                continue
        entry = value_entry(value, boxes)
        if entry is ALONE:
            return ALONE
        items.append(entry)
    return items


def value_entry(value: Any, boxes: Boxes) -> Any:
    """One result."""
    cls, note = type(value), ARRAY
    if boxes is not None and cls is boxes[0]:
        opened = boxes[1].open(value, None)
        if opened is None:
            return ALONE
        value, note = opened
    elif cls is int:
        return value if -_INT < value < _INT else ALONE
    elif cls in _TINY:
        return value
    elif cls in ATOMS:
        return value if len(value) <= _SHORT else ALONE
    elif cls is not np.ndarray:
        return ALONE
    code = CODES.get(value.dtype)
    if code is None or value.nbytes > _LITTLE or not value.flags.c_contiguous:
        return ALONE
    return value.shape, code, bytearray(value.tobytes()), note


def encode_row(entries: list[Any]) -> bytes:
    return pickle.dumps(entries, 5)


def decode_row(data: Any) -> list[Any]:
    entries = pickle.loads(data)
    if entries.__class__ is not list:
        raise ProtocolError(f"a row is a list, not {type(entries).__name__}")
    return entries


def call_of(entry: Any, boxes: Boxes) -> Any:
    """The arguments in an entry."""
    if entry.__class__ is list:
        unflatten(entry, boxes, None)
    return entry


def call_alone(entry: Any) -> bytes:
    """An entry as a payload of its own, for `flat.decode_call`."""
    return pickle.dumps((entry, None, entry.__class__ is list), 5)


def value_alone(entry: Any) -> bytes:
    """The same for `flat.decode_value`."""
    whole = (entry[:3], entry[3]) if entry.__class__ is tuple else (entry, None)
    return pickle.dumps(whole, 5)


def value_of(entry: Any, boxes: Boxes) -> Any:
    """The result in an entry."""
    if entry.__class__ is not tuple:
        return entry
    shape, code, memory, note = entry
    array: Any = np.ndarray(shape, DTYPES[code], memory)
    return array if note == ARRAY else boxes[1].close(array, note, None)  # type: ignore[index]
