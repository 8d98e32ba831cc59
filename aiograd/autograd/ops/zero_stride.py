"""Products of arrays with strides of zero: some of their rows or columns are the same memory.

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

from aiograd.autograd.array import Array

_ndarray = np.ndarray
# Arrays up to this many elements are written out: that takes less time than the tests and the views
# below.
_FEW = 4096


def dense(a: Array) -> Any:
    """Write out an array with strides of zero; return any other as it is."""
    return a.copy() if a.__class__ is _ndarray and 0 in a.strides else a


def product(a: Array, b: Array) -> Any:
    """Return `a @ b` for a matrix or a stack `b`; equal rows or columns are multiplied once."""
    if a.__class__ is not _ndarray or b.__class__ is not _ndarray:
        return np.matmul(a, b)
    # Nearly all products; the test costs little beside them.
    if 0 not in a.strides and 0 not in b.strides:
        return np.matmul(a, b)
    if a.ndim == 1 or (a.size <= _FEW and b.size <= _FEW):
        return np.matmul(dense(a), dense(b))
    (*_, rows, inner), columns = a.shape, b.shape[-1]
    # One row (or column) is multiplied, and the result is shown again by a stride of zero: the next
    # product finds it so, all the way back through a model.
    if rows > 1 and not a.strides[-2]:
        return _along(product(a[..., :1, :], b), -2, rows)
    if columns > 1 and not b.strides[-1]:
        return _along(product(a, b[..., :1]), -1, columns)
    # A sum over equal terms: one term times the sum of the others.
    if inner > 1 and _can_be_summed(a, b):
        if not a.strides[-1]:
            return a[..., :1] * b.sum(-2, b.dtype, keepdims=True)
        if not b.strides[-2]:
            return a.sum(-1, a.dtype, keepdims=True) * b[..., :1, :]
    return np.matmul(dense(a), dense(b))


def all_rows(a: Array, g: Array) -> tuple[Any, Any]:
    """Return two stacks of matrices as one matrix each, for `a.T @ g`; equal rows become one."""
    plain = g.ndim > 2 and g.__class__ is a.__class__ is _ndarray and _can_be_summed(a, g)
    if plain and g.shape[-2] > 1 and not g.strides[-2]:
        a, g = a.sum(-2, a.dtype), g[..., 0, :]
    # Not -1: numpy cannot compute it if there are no columns.
    rows = prod(g.shape[:-1])
    return a.reshape(rows, a.shape[-1]), g.reshape(rows, g.shape[-1])


def _can_be_summed(a: Array, b: Array) -> bool:
    """Whether a sum over one of them has the type of their product, and fits it.

    Half floats end at 65504: a sum of many may be infinite before the small factor behind a mean
    makes it fit.
    """
    return bool(a.dtype == b.dtype and a.dtype != np.float16)


def _along(one: Any, axis: int, count: int) -> Any:
    """Return the same row or column `count` times, by a stride of zero."""
    shape, strides = list(one.shape), list(one.strides)
    shape[axis], strides[axis] = count, 0
    if not one.flags.c_contiguous:
        return np.broadcast_to(one, shape)
    return shown(one, shape, strides)


def shown(a: Array, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return a read-only view of contiguous memory with these strides.

    What `np.broadcast_to` comes to, without the Python around it.
    """
    view = np.ndarray(shape, a.dtype, a, 0, strides)
    view.flags.writeable = False
    return view
