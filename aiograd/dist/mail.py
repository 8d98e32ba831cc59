"""The messages of a pass in two forms: as they are, and flat.

Most gradient messages are a few small arrays. Flat, these are shape, dtype and bytes, and all else
is numbers and names in tuples, so that nothing in a message needs care on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.dist.passes import Answer
from aiograd.wire.arrays import DTYPES
from aiograd.wire.flat import LIMIT, flat_array

FlatAnswer = tuple[int, list[Any] | None, Any]


def flatten(answers: Sequence[Answer]) -> list[FlatAnswer] | None:
    """The answers with arrays as plain data; None if one is not small, or all together are not."""
    flat: list[FlatAnswer] = []
    size = 0
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
            size += gradient.nbytes
            if size > LIMIT:
                return None
            if not gradient.flags.c_contiguous:  # spread from a scalar, as often as not
                gradient = gradient.copy()
            plain = flat_array(gradient)
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
