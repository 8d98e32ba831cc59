"""The quick road for the commonest payloads: numbers, strings and small arrays, not nested.

They need no care on the way, so they are pickled without looking inside, and arrays go as shape,
dtype and bytes: a third of the cost of the general codec in `payload`, which takes all the rest.
Values of one further class may come along as a *box*: an array and a number that says the rest.
"""

from __future__ import annotations

import pickle
from typing import Any, Final, Protocol

import numpy as np

from aiograd.wire.arrays import CODES, DTYPES

_NOTHING: Final = pickle.dumps(((), None, None), 5)  # a call without arguments
LIMIT: Final = 32 * 1024  # bytes of one array; larger ones gain nothing here
_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None), complex})


class Box(Protocol):
    """How values of one class travel as an array and a small number."""

    def open(self, value: Any, departure: Any) -> tuple[Any, int] | None:
        """The array and the number; None: it must take the general road."""

    def close(self, array: np.ndarray, note: int, arrival: Any) -> Any: ...


Boxes = tuple[type, Box] | None  # the one class that may take the quick road boxed


def encode_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    boxes: Boxes = None,
    departure: Any = None,
) -> bytes | None:
    """`(args, kwargs)` for `decode_call`; None if something else than the simplest is in them."""
    if not args and not kwargs:
        return _NOTHING
    for value in args:
        if type(value) not in _ATOMS:
            return _encode_arrays(args, kwargs, boxes, departure)
    if kwargs and not _are_atoms(kwargs):
        return None
    return pickle.dumps((args, kwargs, None), 5)


def _are_atoms(kwargs: dict[str, Any]) -> bool:
    return all(type(value) in _ATOMS for value in kwargs.values())


def _encode_arrays(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None, boxes: Boxes, departure: Any
) -> bytes | None:
    """`encode_call` where something may be an array or a box."""
    arrays: list[int] | None = None
    boxed: list[tuple[int, int]] | None = None
    seen: dict[int, int] = {}
    for index, value in enumerate(args):
        cls = type(value)
        if cls in _ATOMS:
            continue
        if boxes is not None and cls is boxes[0]:
            if arrays is None:
                arrays, args = [], list(args)  # type: ignore[assignment]
            if boxed is None:
                boxed = []
            first = seen.setdefault(id(value), index)
            if first != index:  # the same object again stays the same object
                boxed.append((index, -1 - first))
                args[index] = None  # type: ignore[index]
                continue
            opened = boxes[1].open(value, departure)
            flat = None if opened is None else _flat(opened[0])
            if opened is None or flat is None:
                return None
            boxed.append((index, opened[1]))
        else:
            flat = _flat(value) if cls is np.ndarray else None
            if flat is None:
                return None
            if arrays is None:
                arrays, args = [], list(args)  # type: ignore[assignment]
            arrays.append(index)
        args[index] = flat  # type: ignore[index]
    if kwargs and not _are_atoms(kwargs):
        return None
    if boxed is None:
        return pickle.dumps((args, kwargs, arrays), 5)
    return pickle.dumps((args, kwargs, arrays, boxed), 5)


def decode_call(
    data: Any, boxes: Boxes = None, arrival: Any = None
) -> tuple[Any, dict[str, Any] | None]:
    args, kwargs, arrays, *boxed = pickle.loads(data)
    if arrays is not None:
        for index in arrays:
            args[index] = _array(*args[index])
    if boxed:
        assert boxes is not None
        close = boxes[1].close
        for index, note in boxed[0]:
            if note < 0:
                args[index] = args[-1 - note]
            else:
                args[index] = close(_array(*args[index]), note, arrival)
    return args, kwargs


def encode_value(value: Any, boxes: Boxes = None, departure: Any = None) -> bytes | None:
    """One result, or None if it needs the general codec."""
    cls = type(value)
    if cls in _ATOMS:
        return pickle.dumps((value, None), 5)
    note = -1
    if boxes is not None and cls is boxes[0]:
        opened = boxes[1].open(value, departure)
        if opened is None:
            return None
        value, note = opened
    elif cls is not np.ndarray:
        return None
    flat = _flat(value)
    return None if flat is None else pickle.dumps((flat, note), 5)


def decode_value(data: Any, boxes: Boxes = None, arrival: Any = None) -> Any:
    value, note = pickle.loads(data)
    if note is None:
        return value
    array = _array(*value)
    if note < 0:
        return array
    assert boxes is not None
    return boxes[1].close(array, note, arrival)


def _array(shape: tuple[int, ...], code: str, memory: bytearray) -> np.ndarray:
    return np.ndarray(shape, DTYPES[code], memory)


def _flat(array: np.ndarray) -> tuple[tuple[int, ...], str, bytearray] | None:
    code = CODES.get(array.dtype)
    if code is None or array.nbytes > LIMIT or not array.flags.c_contiguous:
        return None
    return array.shape, code, bytearray(array.tobytes())
