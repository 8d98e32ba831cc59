"""The messages of a pass in two forms: as they are, and flat.

Most gradient messages are a few arrays. Flat, these are shape, dtype and bytes (large ones lend
their memory), and all else is numbers and names in tuples, so that nothing in a message needs care
on the way.

The gradient of a sum or an average is one number, spread over an array. A large one travels as that
number, and is spread again where it arrives, as on a tape without workers: it cannot be written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import numpy as np

from aiograd.dist.passes import Answer
from aiograd.wire.arrays import CODES, DTYPES
from aiograd.wire.flat import LIMIT, flat_array

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
            elif gradient.nbytes > LIMIT and not any(gradient.strides):
                plain = _spread(gradient)
            else:
                plain = flat_array(gradient.copy(), lent)
            if plain is None:
                return None
            row.append(plain)
        flat.append((edge, row, loops))
    return flat


def _spread(array: np.ndarray) -> tuple[Any, ...] | None:
    """An array that shows one element again and again: all that `np.ndarray` needs to know."""
    code = CODES.get(array.dtype)
    if code is None:
        return None
    return array.shape, code, array.flat[0].tobytes(), 0, array.strides


def unflatten(flat: Sequence[FlatAnswer]) -> list[Answer]:
    """The answers that `flatten` was given."""
    answers: list[Answer] = []
    for edge, row, loops in flat:
        gradients: list[Any] | None = None
        if row is not None:
            gradients = []
            for plain in row:
                if plain is not None:
                    plain = np.ndarray(plain[0], DTYPES[plain[1]], *plain[2:])
                gradients.append(plain)
        answers.append((edge, gradients, loops))
    return answers
