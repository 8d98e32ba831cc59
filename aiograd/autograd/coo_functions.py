"""Numpy's functions on sparse arrays: the tables that `Coo` looks into when numpy asks it.

Only what keeps zeros zero is here; everything else is refused by numpy itself, with a TypeError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.autograd.coo import FUNCTIONS, UFUNCS, Coo, axes_of

_GROWTH = 4  # sums coalesce when they have grown to this many times their last coalesced size


def _add(a: Any, b: Any) -> Any:
    if not (isinstance(a, Coo) and isinstance(b, Coo)):
        return np.add(_dense(a), _dense(b))
    if a.shape != b.shape:
        raise ValueError(f"cannot add sparse arrays of shapes {a.shape} and {b.shape}")
    if a.sparse_dim != b.sparse_dim:
        a, b = a.fully_sparse(), b.fully_sparse()
    total = Coo(
        np.concatenate([a.indices, b.indices], axis=1),
        np.concatenate([a.values, b.values]),
        a.shape,
    )
    total.settled = max(a.settled, b.settled)
    return total.coalesce() if total.nnz > _GROWTH * total.settled else total


def _subtract(a: Any, b: Any) -> Any:
    return _add(a, -b)


def _multiply(a: Any, b: Any) -> Any:
    if not isinstance(a, Coo):
        a, b = b, a
    if not isinstance(b, Coo):
        return _scale(np.multiply, a, b)
    if a.shape != b.shape:
        raise ValueError(f"cannot multiply sparse arrays of shapes {a.shape} and {b.shape}")
    if a.sparse_dim != b.sparse_dim:
        a, b = a.fully_sparse(), b.fully_sparse()
    a, b = a.coalesce(), b.coalesce()
    _, mine, other = np.intersect1d(a.keys(), b.keys(), assume_unique=True, return_indices=True)
    return Coo(a.indices[:, mine], a.values[mine] * b.values[other], a.shape, True)


def _divide(a: Any, b: Any) -> Any:
    if isinstance(b, Coo):
        return NotImplemented  # would divide by the zeros that are not stored
    return _scale(np.divide, a, b)


def _scale(ufunc: Any, a: Coo, factor: Any) -> Any:
    """Combine with a dense array or a number where zero stays zero."""
    shape = np.shape(factor)
    if np.ndim(factor) == 0:
        return a.with_values(ufunc(a.values, factor))
    if np.broadcast_shapes(a.shape, shape) != a.shape:
        return ufunc(a.to_dense(), factor)
    there = np.broadcast_to(factor, a.shape)[tuple(a.indices)]
    return a.with_values(ufunc(a.values, there))


def _each(ufunc: Any) -> Any:
    """A function that is linear in the values, so that positions stored twice need no care."""
    return lambda a: a.with_values(ufunc(a.values))


def _each_whole(ufunc: Any) -> Any:
    def apply(a: Coo) -> Coo:
        whole = a.coalesce()
        return whole.with_values(ufunc(whole.values))

    return apply


def stack(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Stack along a new sparse dimension."""
    if not all(isinstance(array, Coo) for array in arrays):
        return np.stack([_dense(array) for array in arrays], axis)
    sparse_dim = arrays[0].sparse_dim
    if any(array.shape != arrays[0].shape for array in arrays):
        raise ValueError("all input arrays must have the same shape")
    axis = axis + arrays[0].ndim + 1 if axis < 0 else axis
    if axis > sparse_dim or any(array.sparse_dim != sparse_dim for array in arrays):
        arrays = [array.fully_sparse() for array in arrays]
    positions = [np.insert(array.indices, axis, i, axis=0) for i, array in enumerate(arrays)]
    shape = (*arrays[0].shape[:axis], len(arrays), *arrays[0].shape[axis:])
    return Coo(np.concatenate(positions, axis=1), np.concatenate([a.values for a in arrays]), shape)


def transpose(a: Coo, axes: Sequence[int] | None = None) -> Coo:
    """The same array with its dimensions in another order."""
    a = a.fully_sparse()
    order = tuple(range(a.ndim))[::-1] if axes is None else tuple(axes)
    return Coo(a.indices[list(order)], a.values, tuple(a.shape[i] for i in order))


def zeros_like(a: Coo, dtype: Any = None, **_: Any) -> Coo:
    """Nothing stored, of the same shape."""
    return Coo(a.indices[:, :0], a.values[:0].astype(dtype or a.dtype), a.shape, True)


def _dense(a: Any) -> Any:
    return a.to_dense() if isinstance(a, Coo) else a


UFUNCS |= {
    np.add: _add,
    np.subtract: _subtract,
    np.multiply: _multiply,
    np.divide: _divide,
    np.negative: _each(np.negative),
    np.positive: _each(np.positive),
    np.conjugate: _each(np.conjugate),
    np.absolute: _each_whole(np.absolute),
    np.square: _each_whole(np.square),
    np.sign: _each_whole(np.sign),
}

FUNCTIONS |= {
    np.sum: lambda a, axis=None, dtype=None, out=None, keepdims=False: a.sum(axis, dtype, keepdims),
    np.mean: lambda a, axis=None, dtype=None, out=None, keepdims=False: (
        a.sum(axis, dtype, keepdims) / math.prod(a.shape[i] for i in axes_of(axis, a.ndim))
    ),
    np.stack: lambda arrays, axis=0: stack(arrays, axis),
    np.reshape: lambda a, shape, order="C": a.reshape(shape) if order == "C" else NotImplemented,
    np.transpose: transpose,
    np.swapaxes: lambda a, i, j: transpose(a, _swapped(a.ndim, i, j)),
    np.zeros_like: zeros_like,
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a: a.size,
    np.copy: lambda a, order="K": a.copy(),
    np.real: lambda a: a.real,
    np.imag: lambda a: a.imag,
    np.iscomplexobj: lambda a: a.dtype.kind == "c",
    np.broadcast_to: lambda a, shape: _broadcast(a, tuple(shape)),
}


def _swapped(ndim: int, i: int, j: int) -> list[int]:
    order = list(range(ndim))
    order[i], order[j] = order[j], order[i]
    return order


def _broadcast(a: Coo, shape: tuple[int, ...]) -> Any:
    return a if a.shape == shape else np.broadcast_to(a.to_dense(), shape)
