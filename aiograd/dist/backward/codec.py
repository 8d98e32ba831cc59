"""The answers of a gradient message as they travel: arrays as shape, dtype and bytes.

Most gradient messages are a few dense arrays. Packed, an array is a tuple of plain data that
`np.ndarray` rebuilds in one step, and everything else in the message is numbers and names in tuples,
so nothing in it needs a traveller or the general codec:

    (shape, dtype code, bytes)                  large arrays are zero-copy: a `PickleBuffer`
    (shape, dtype code, bytes, offset, strides)  a large broadcast array, see below

This is worth a factor of about two for a pass over small arrays. `encode` returns None for what is
not such an array (sparse, recorded by `create_graph`, an exotic dtype): the message then carries the
gradients as they are, through the general codec. `decode` reads both, so there is one service and
one handler; which encoding a message gets is decided in `Engine._post` alone.

The gradient of a sum or an average is the same along the axes that were summed. A large one travels
as its distinct elements, a number or a row, and is broadcast again where it arrives, as on a tape
without workers: it is read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any, Final, Protocol

from numpy import ndarray

from aiograd.dist.backward.state import Answer
from aiograd.wire.arrays import CODES, DTYPES
from aiograd.wire.fastcodec import BORROW_FROM, flat_array

_code_of: Final = CODES.get
PackedArray = tuple[Any, ...]  # one of the two forms above
PackedAnswer = tuple[int, list[PackedArray | list[Any] | None] | None, Any]


class Packer(Protocol):
    """What packs the tensors of another library."""

    def pack(self, gradient: Any, buffers: list[PickleBuffer]) -> list[Any] | None:
        """Return a list of the packer's tag and plain data; None if the tensor needs more."""

    def unpack(self, packed: list[Any]) -> Any:
        """Return the tensor that `pack` was given."""


PACKERS: Final[dict[type, Packer]] = {}  # by the class of the tensors
UNPACKERS: Final[dict[str, Packer]] = {}  # by their tags


def encode(answers: Sequence[Answer], buffers: list[PickleBuffer]) -> list[PackedAnswer] | None:
    """Pack the arrays of some answers; None if a gradient is no dense array.

    The memory of large arrays is appended to `buffers` instead of being copied.
    """
    encoded: list[PackedAnswer] = []
    for edge, gradients, loops in answers:
        if gradients is None:
            encoded.append((edge, None, loops))
            continue
        arrays: list[PackedArray | list[Any] | None] = []
        packed: PackedArray | None
        for gradient in gradients:
            if gradient is None:
                arrays.append(None)
                continue
            # The exact class: a subclass of ndarray would arrive as a plain array.
            if gradient.__class__ is not ndarray:
                library = PACKERS.get(gradient.__class__)
                foreign = None if library is None else library.pack(gradient, buffers)
                if foreign is None:
                    return None
                arrays.append(foreign)
                continue
            if gradient.nbytes < BORROW_FROM and (code := _code_of(gradient.dtype)) is not None:
                # Copied as a whole, so it arrives contiguous and writable, whatever it is here.
                arrays.append((gradient.shape, code, bytearray(gradient.tobytes())))
                continue
            flags = gradient.flags
            if flags.c_contiguous and flags.writeable:
                packed = flat_array(gradient, buffers)
            elif 0 in gradient.strides:
                packed = _broadcast(gradient, buffers)
            else:
                # A copy is contiguous and writable, so the receiver may write to its array, too.
                packed = flat_array(gradient.copy(), buffers)
            if packed is None:
                return None
            arrays.append(packed)
        encoded.append((edge, arrays, loops))
    return encoded


def _broadcast(array: ndarray, buffers: list[PickleBuffer]) -> PackedArray | None:
    """Pack the distinct elements of a broadcast array, and the strides that repeat them."""
    once = array[tuple([slice(None) if stride else slice(1) for stride in array.strides])].copy()
    packed = flat_array(once, buffers)
    if packed is None:
        return None
    # The strides of the copy, not of the array: the latter may skip elements or run backwards.
    strides = zip(once.strides, array.strides, strict=True)
    return array.shape, *packed[1:], 0, tuple([now if stride else 0 for now, stride in strides])


def decode(answers: Sequence[Answer | PackedAnswer]) -> list[Answer]:
    """Rebuild the answers that `encode` was given; answers that were not encoded stay the same."""
    decoded: list[Answer] = []
    for edge, gradients, loops in answers:
        if gradients is not None:
            arrays: list[Any] = []
            for each in gradients:
                # A gradient is an array, a sparse array or a Tensor: only a packed one is a tuple,
                # or a list if it is of another library.
                if each.__class__ is tuple:
                    if len(each) == 3:
                        shape, code, memory = each
                        each = ndarray(shape, DTYPES[code], memory)
                    else:
                        shape, code, *rest = each
                        each = ndarray(shape, DTYPES[code], *rest)
                        # Several positions share one element, so a write would change them all.
                        each.flags.writeable = False
                elif each.__class__ is list:
                    each = UNPACKERS[each[0]].unpack(each)
                arrays.append(each)
            gradients = arrays
        decoded.append((edge, gradients, loops))
    return decoded
