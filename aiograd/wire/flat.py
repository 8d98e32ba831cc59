"""The quick road for the commonest payloads: numbers, strings and small arrays, not nested.

They need no care on the way, so they are pickled without looking inside, and arrays go as shape,
dtype and bytes: a third of the cost of the general codec in `payload`, which takes all the rest.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

import numpy as np

from aiograd.wire.arrays import CODES

_NOTHING: Final = pickle.dumps(((), None, None), 5)  # a call without arguments
LIMIT: Final = 32 * 1024  # bytes of one array; larger ones gain nothing here
_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None), complex})


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bytes | None:
    """`(args, kwargs)` for `decode_call`; None if something else than the simplest is in them."""
    if not args and not kwargs:
        return _NOTHING
    arrays: list[int] | None = None
    for index, value in enumerate(args):
        if type(value) in _ATOMS:
            continue
        flat = _flat(value) if type(value) is np.ndarray else None
        if flat is None:
            return None
        if arrays is None:
            arrays, args = [], list(args)  # type: ignore[assignment]
        arrays.append(index)
        args[index] = flat  # type: ignore[index]
    if kwargs:
        for value in kwargs.values():
            if type(value) not in _ATOMS:
                return None
    return pickle.dumps((args, kwargs, arrays), 5)


def decode_call(data: Any) -> tuple[Any, dict[str, Any] | None]:
    args, kwargs, arrays = pickle.loads(data)
    if arrays is not None:
        for index in arrays:
            args[index] = np.ndarray(*args[index])
    return args, kwargs


def encode_value(value: Any) -> bytes | None:
    """One result, or None if it needs the general codec."""
    if type(value) in _ATOMS:
        return pickle.dumps((value, False), 5)
    if type(value) is np.ndarray:
        flat = _flat(value)
        if flat is not None:
            return pickle.dumps((flat, True), 5)
    return None


def decode_value(data: Any) -> Any:
    value, is_array = pickle.loads(data)
    return np.ndarray(*value) if is_array else value


def _flat(array: np.ndarray) -> tuple[tuple[int, ...], str, bytearray] | None:
    code = CODES.get(array.dtype)
    if code is None or array.nbytes > LIMIT or not array.flags.c_contiguous:
        return None
    return array.shape, code, bytearray(array.tobytes())
