"""The messages of a pass in two forms: as they are, and flat.

Most gradient messages are a few arrays. Flat, these are shape, dtype and bytes (large ones lend
their memory), and all else is numbers and names in tuples, so that nothing in a message needs care
on the way.

The gradient of a sum or an average is the same along the axes that were summed. A large one travels
as what there is of it, a number or a row, and is shown again and again where it arrives, as on a
tape without workers: it cannot be written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import numpy as np

from aiograd.dist.backward.state import Answer
from aiograd.wire.arrays import DTYPES
from aiograd.wire.fastcodec import BORROW_FROM, flat_array

FlatAnswer = tuple[int, list[Any] | None, Any]


def flatten(answers: Sequence[Answer], lent: list[PickleBuffer]) -> list[FlatAnswer] | None:
    """The answers with arrays as plain data, large ones `lent`; None if one is something else."""
    flat: list[FlatAnswer] = []
    for edge, gradients, loops in answers:
        if gradients is None:
            flat.append((edge, None, loops))
            continue
        row: list[Any] = []
        plain: tuple[Any, ...] | None
        for gradient in gradients:
            if gradient is None:
                row.append(None)
                continue
            if gradient.__class__ is not np.ndarray:
                return None
            flags = gradient.flags
            if flags.c_contiguous and flags.writeable:
                plain = flat_array(gradient, lent)
            elif gradient.nbytes >= BORROW_FROM and 0 in gradient.strides:
                plain = _repeated(gradient, lent)
            else:
                plain = flat_array(gradient.copy(), lent)
            if plain is None:
                return None
            row.append(plain)
        flat.append((edge, row, loops))
    return flat


def _repeated(array: np.ndarray, lent: list[PickleBuffer]) -> tuple[Any, ...] | None:
    """An array that shows some elements again and again: all that `np.ndarray` needs to know."""
    once = array[tuple([slice(None) if stride else slice(1) for stride in array.strides])].copy()
    plain = flat_array(once, lent)
    if plain is None:
        return None
    strides = zip(once.strides, array.strides, strict=True)
    return array.shape, *plain[1:], 0, tuple([now if stride else 0 for now, stride in strides])


def unflatten(flat: Sequence[FlatAnswer]) -> list[Answer]:
    """The answers that `flatten` was given."""
    answers: list[Answer] = []
    for edge, row, loops in flat:
        gradients: list[Any] | None = None
        if row is not None:
            gradients = []
            for plain in row:
                if plain is not None:
                    repeated = len(plain) > 3
                    plain = np.ndarray(plain[0], DTYPES[plain[1]], *plain[2:])
                    if repeated:
                        plain.flags.writeable = False
                gradients.append(plain)
        answers.append((edge, gradients, loops))
    return answers
