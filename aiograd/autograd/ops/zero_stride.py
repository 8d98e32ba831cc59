"""Products of arrays that show some rows or columns again and again.

The gradient of a sum or an average is the same along the axes that were summed: numpy shows it by
strides of zero. BLAS cannot read that, and need not: equal rows times a matrix are equal rows, and
a sum over equal terms is one term times their number. So behind an average over tokens, samples or
everything, a product of matrices comes down to one of vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

_ndarray = np.ndarray
_FEW = 4096  # elements that are written out faster than thought about


def dense(a: Any) -> Any:
    """Write out an array that shows some elements again and again."""
    return a.copy() if a.__class__ is _ndarray and 0 in a.strides else a


def product(a: Any, b: Any) -> Any:
    """`a @ b`, where `b` is a matrix or a stack; equal rows or columns are multiplied once."""
    if a.__class__ is not _ndarray or b.__class__ is not _ndarray:
        return np.matmul(a, b)
    if 0 not in a.strides and 0 not in b.strides:
        return np.matmul(a, b)
    if a.ndim == 1 or (a.size <= _FEW and b.size <= _FEW):
        return np.matmul(dense(a), dense(b))
    (*_, rows, inner), columns = a.shape, b.shape[-1]
    if rows > 1 and not a.strides[-2]:
        return _along(product(a[..., :1, :], b), -2, rows)
    if columns > 1 and not b.strides[-1]:
        return _along(product(a, b[..., :1]), -1, columns)
    if inner > 1 and _can_be_summed(a, b):
        if not a.strides[-1]:
            return a[..., :1] * b.sum(-2, b.dtype, keepdims=True)
        if not b.strides[-2]:
            return a.sum(-1, a.dtype, keepdims=True) * b[..., :1, :]
    return np.matmul(dense(a), dense(b))


def all_rows(a: Any, g: Any) -> tuple[Any, Any]:
    """Two stacks of matrices as one matrix each, for `a.T @ g`; equal rows of `g` become one."""
    plain = g.ndim > 2 and g.__class__ is a.__class__ is _ndarray and _can_be_summed(a, g)
    if plain and g.shape[-2] > 1 and not g.strides[-2]:
        a, g = a.sum(-2, a.dtype), g[..., 0, :]
    rows = prod(g.shape[:-1])  # not left to numpy, which cannot tell it if there are no columns
    return a.reshape(rows, a.shape[-1]), g.reshape(rows, g.shape[-1])


def _can_be_summed(a: Any, b: Any) -> bool:
    """Whether a sum over one of them has the type of their product, and fits it.

    Half floats end at 65504: many of them, summed before a small factor makes them small, do not.
    """
    return bool(a.dtype == b.dtype and a.dtype != np.float16)


def _along(one: Any, axis: int, count: int) -> Any:
    """The same row or column so many times."""
    shape, strides = list(one.shape), list(one.strides)
    shape[axis], strides[axis] = count, 0
    if not one.flags.c_contiguous:
        return np.broadcast_to(one, shape)
    return shown(one, shape, strides)


def shown(a: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """What `broadcast_to` comes to, which takes long to find that out; `a` is contiguous."""
    view = np.ndarray(shape, a.dtype, a, 0, strides)
    view.flags.writeable = False
    return view
