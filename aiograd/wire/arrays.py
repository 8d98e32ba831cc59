"""How an ndarray is pickled: shape, dtype, memory and order, in as few steps as possible.

    rebuild_array(shape, dtype code, bytearray or PickleBuffer[, "F"])

Small arrays are copied into the pickle, large ones are borrowed as a `PickleBuffer` (zero-copy).
What arrives is always writable. The layout is kept when it is C or Fortran; any other view arrives
equal and C-contiguous. Arrays of Python objects are left to numpy, because their elements must be
pickled.
"""

from __future__ import annotations

import copyreg
import pickle
from typing import Any, Final

import numpy as np

# Dtypes that their string describes completely; the others (records, dates, text) go as objects.
CODES: Final = {np.dtype(char): np.dtype(char).str for char in "?bBhHiIlLqQefdFD"}
DTYPES: Final = {code: dtype for dtype, code in CODES.items()}


def rebuild_array(shape: tuple[int, ...], dtype: Any, memory: Any, order: Any = None) -> np.ndarray:
    """Return an array over memory that came with a message."""
    if order is None:
        return np.ndarray(shape, dtype, memory)
    return np.ndarray(shape, dtype, memory, 0, None, order)


# A private extension code makes the reference one opcode instead of two strings and an import.
copyreg.add_extension(__name__, "rebuild_array", 0x61670001)


class _Writable:
    """The memory of an array without its read-only mark.

    Pickle sends a read-only buffer as one, and the receiver would get an array it cannot write to.
    """

    def __init__(self, array: np.ndarray) -> None:
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}
        self.array = array  # keeps the memory alive


def reduce_array(array: np.ndarray, borrow: int) -> Any:
    """Return what pickle needs of an array; its memory is borrowed from `borrow` bytes up.

    NotImplemented: pickle it as numpy does.
    """
    dtype = array.dtype
    code: Any = CODES.get(dtype)
    if code is None:
        if dtype.hasobject:
            return NotImplemented
        code = dtype
    flags = array.flags
    # Fortran order as the transposed array in C order: `tobytes` and buffers know C order only.
    order = "C"
    if not flags.c_contiguous:
        if flags.f_contiguous:
            order, array = "F", array.T
        else:
            array = np.ascontiguousarray(array)
    shape = array.shape if order == "C" else array.shape[::-1]
    if array.nbytes < borrow:
        memory: Any = bytearray(array.tobytes())  # not bytes: what arrives must be writable
    else:
        # Other dtypes as bytes: dates, for example, have no buffer format of their own.
        plain: Any = array if code is not dtype else array.reshape(-1).view(np.uint8)
        if not plain.flags.writeable:
            plain = np.asarray(_Writable(plain))
        memory = pickle.PickleBuffer(plain)
    return (
        (rebuild_array, (shape, code, memory))
        if order == "C"
        else (rebuild_array, (shape, code, memory, "F"))
    )
