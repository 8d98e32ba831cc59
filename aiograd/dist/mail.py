"""The messages of a pass in two forms: as they are, and flat.

Most gradient messages are a few arrays. Flat, these are shape, dtype and bytes (large ones lend
their memory), and all else is numbers and names in tuples, so that nothing in a message needs care
on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import numpy as np

from aiograd.dist.passes import Answer
from aiograd.wire.arrays import DTYPES
from aiograd.wire.flat import flat_array

FlatAnswer = tuple[int, list[Any] | None, Any]


def flatten(answers: Sequence[Answer], lent: list[PickleBuffer]) -> list[FlatAnswer] | None:
    """The answers with arrays as plain data, large ones `lent`; None if one is something else."""
    flat: list[FlatAnswer] = []
    for edge, gradients, loops in answers:
        if gradients is None:
            flat.append((edge, None, loops))
            continue
        row: list[Any] = []
        for gradient in gradients:
            if gradient is None:
                row.append(None)
                continue
            if gradient.__class__ is not np.ndarray:
                return None
            flags = gradient.flags
            if not (flags.c_contiguous and flags.writeable):  # spread from a scalar, mostly
                gradient = gradient.copy()
            plain = flat_array(gradient, lent)
            if plain is None:
                return None
            row.append(plain)
        flat.append((edge, row, loops))
    return flat


def unflatten(flat: Sequence[FlatAnswer]) -> list[Answer]:
    """The answers that `flatten` was given."""
    return [
        (edge, None if row is None else list(map(_array, row)), loops) for edge, row, loops in flat
    ]


def _array(plain: Any) -> np.ndarray | None:
    return None if plain is None else np.ndarray(plain[0], DTYPES[plain[1]], plain[2])
