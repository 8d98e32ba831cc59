"""Coo: an array of which only some entries are stored, as coordinates and values.

    indices  (sparse_dim, nnz)        where
    values   (nnz, *dense_shape)      what; a "row-sparse" array has sparse_dim 1
    shape    (*sparse_shape, *dense_shape)

A position may be stored several times, which means the sum; `coalesce()` sorts and adds up. Sums of
two are concatenations that coalesce themselves once they have grown, so gradients can be collected
cheaply. A Coo is never changed after it was made. It answers numpy's functions as far as gradient
rules need them: the two tables at the end of this module hold those that keep zeros zero, and numpy
itself refuses everything else with a TypeError. The Tensor side (`ag.sparse`) is in `sparse.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.autograd.array import Array

# A sum coalesces when it has grown to this many times its last coalesced size. So a gradient that
# is collected from many uses of a table is sorted a few times, not once per use, and takes at most
# this many times the memory it needs.
_GROWTH = 4


class Coo:
    """A sparse array in coordinate form; see the module for the layout."""

    __slots__ = ("coalesced", "indices", "settled", "shape", "values")

    is_sparse_array = True  # what `tensor.is_sparse_array` asks for
    # Operations ask every result whether it is a view of an argument. A Coo never shows the memory
    # of another array as its own.
    base = None

    def __init__(
        self, indices: Array, values: Array, shape: Sequence[int], coalesced: bool = False
    ) -> None:
        self.indices: Array = indices
        self.values: Array = values
        self.shape: tuple[int, ...] = tuple(shape)
        # Nothing to sort or to add up in less than two entries.
        self.coalesced = coalesced or indices.shape[1] < 2
        self.settled: int = indices.shape[1]  # stored entries when last made or coalesced

    def __reduce__(self) -> Any:
        return Coo, (self.indices, self.values, self.shape, self.coalesced)

    def __repr__(self) -> str:
        where = np.array2string(self.indices, separator=", ", threshold=60)
        what = np.array2string(self.values, separator=", ", threshold=60)
        return f"coo(indices={where}, values={what}, shape={self.shape})".replace("\n", "")

    # ── attributes, as an ndarray has them ──────────────────────────────────────────────────────

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions, sparse and dense."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements, zeros included."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """The bytes of what is stored."""
        return int(self.indices.nbytes + self.values.nbytes)

    @property
    def nnz(self) -> int:
        """The number of stored entries; a position that is stored twice counts twice."""
        return int(self.indices.shape[1])

    @property
    def sparse_dim(self) -> int:
        """The number of leading dimensions that are stored as coordinates."""
        return int(self.indices.shape[0])

    @property
    def contiguous(self) -> bool:
        """True when the values and indices are plain blocks of memory."""
        return bool(self.values.flags.c_contiguous and self.indices.flags.c_contiguous)

    @property
    def real(self) -> Coo:
        """The real parts, at the same positions."""
        return self.with_values(self.values.real)

    @property
    def imag(self) -> Coo:
        """The imaginary parts, at the same positions."""
        return self.with_values(self.values.imag)

    def __len__(self) -> int:
        return self.shape[0]

    # ── copies and conversions ──────────────────────────────────────────────────────────────────

    def with_values(self, values: Array) -> Coo:
        """Return the same positions with other values."""
        return Coo(self.indices, values, self.shape, self.coalesced)

    def copy(self) -> Coo:
        """Return a copy with contiguous memory of its own."""
        return Coo(
            np.array(self.indices, order="C"),
            np.array(self.values, order="C"),
            self.shape,
            self.coalesced,
        )

    def astype(self, dtype: Any, copy: bool = True) -> Coo:
        """Return the same positions with values of another dtype."""
        return self.with_values(self.values.astype(dtype, copy=copy))

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self.to_dense().item()

    def __float__(self) -> float:
        return float(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        dense = self.to_dense()
        return dense if dtype is None else dense.astype(dtype, copy=False)

    def to_dense(self) -> Array:
        """Return the whole array, zeros included."""
        dense = np.zeros(self.shape, self.dtype)
        self.add_into(dense)
        return dense

    def add_into(self, dense: Array) -> None:
        """Add the stored entries to a dense array, touching nothing else."""
        # `+=` on an index that occurs twice adds only once; coalesced, every position is unique,
        # and this is far faster than `np.add.at`.
        whole = self.coalesce()
        # An index per sparse dimension; the dense ones follow by themselves.
        dense[tuple(whole.indices)] += whole.values

    def keys(self) -> Any:
        """Return one number per stored entry that orders positions as in memory."""
        return np.ravel_multi_index(tuple(self.indices), self.shape[: self.sparse_dim])

    def coalesce(self) -> Coo:
        """Return the same array with every position stored once, in order."""
        if self.coalesced:
            return self
        keys = self.keys()
        # Stable, so that equal positions are added in the order they came: the same sum every time.
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        values = np.add.reduceat(self.values[order], first, axis=0)
        return Coo(self.indices[:, order[first]], values, self.shape, True)

    def at(self, indices: Array) -> Any:
        """Return the values at other sparse positions; zero where none is stored."""
        whole = self.coalesce()
        found = np.zeros((indices.shape[1], *self.values.shape[1:]), self.dtype)
        if whole.nnz:
            mine = whole.keys()
            wanted = np.ravel_multi_index(tuple(indices), self.shape[: self.sparse_dim])
            # A key beyond the last one would point behind the end; whatever it is compared with
            # there differs.
            place = np.minimum(np.searchsorted(mine, wanted), len(mine) - 1)
            hit = mine[place] == wanted
            found[hit] = whole.values[place[hit]]
        return found

    def mask(self, array: Array) -> Coo:
        """Return another array of this shape, at the positions stored here; each of them once."""
        if isinstance(array, Coo):
            return array
        whole = self.coalesce()
        return whole.with_values(array[tuple(whole.indices)])

    def fully_sparse(self) -> Coo:
        """Return the same entries with every dimension a sparse one."""
        if self.sparse_dim == self.ndim:
            return self
        dense = self.shape[self.sparse_dim :]
        inner = np.indices(dense).reshape(len(dense), -1)
        count = inner.shape[1]
        indices = np.vstack([np.repeat(self.indices, count, axis=1), np.tile(inner, self.nnz)])
        return Coo(indices, self.values.reshape(-1), self.shape, self.coalesced)

    def reshape(self, *shape: Any) -> Any:
        """Return the entries in another shape, as numpy's method; without axes an ndarray."""
        if len(shape) == 1 and isinstance(shape[0], Sequence):
            shape = tuple(shape[0])
        if -1 in shape:
            known = int(np.prod([n for n in shape if n != -1], dtype=np.int64))
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        # Never changed, so it may be shared.
        if shape == self.shape:
            return self
        if not shape:
            return self.to_dense().reshape(shape)
        # A shape may cut across the border between sparse and dense dimensions.
        flat = self.fully_sparse()
        indices = np.array(np.unravel_index(flat.keys(), shape)).reshape(len(shape), -1)
        return Coo(indices, flat.values, shape, flat.coalesced)

    def __getitem__(self, index: Any) -> Any:
        """Basic indexing: integers, slices and `...`."""
        if index is Ellipsis:
            return self
        # Every sparse dimension filters the entries; the dense ones are left to numpy.
        parts = _expanded(index, self.ndim)
        keep = np.ones(self.nnz, bool)
        rows, shape = [], []
        for axis in range(self.sparse_dim):
            here, part, n = self.indices[axis], parts[axis], self.shape[axis]
            if isinstance(part, slice):
                start, stop, step = part.indices(n)
                # From old positions to new ones, -1 where the slice leaves them out.
                places = np.full(n, -1, np.int64)
                chosen = range(start, stop, step)
                places[list(chosen) if step != 1 else slice(start, stop)] = np.arange(len(chosen))
                row = places[here]
                keep &= row >= 0
                rows.append(row)
                shape.append(len(chosen))
            else:
                keep &= here == _place(part, n, axis)
        values = self.values[(keep, *parts[self.sparse_dim :])]
        if not rows:
            return values.sum(axis=0)
        indices = np.array([row[keep] for row in rows])
        return Coo(indices, values, (*shape, *values.shape[1:]))

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """Add up; sparse while a sparse dimension is left, else an ndarray."""
        axes = axes_of(axis, self.ndim)
        split = self.sparse_dim
        inner = tuple(a - split + 1 for a in axes if a >= split)
        values = (
            self.values.sum(axis=inner, dtype=dtype, keepdims=keepdims) if inner else self.values
        )
        left = [a for a in range(split) if a not in axes]
        # No sparse dimension is left: an ndarray. Positions that are stored twice add up here too.
        if not left:
            total = values.sum(axis=0, dtype=dtype)
            return total.reshape((1,) * split + total.shape) if keepdims else total
        if keepdims:
            indices = self.indices.copy()
            indices[[a for a in axes if a < split]] = 0
            shape: tuple[int, ...] = tuple(1 if a in axes else n for a, n in enumerate(self.shape))
        else:
            indices = self.indices[left]
            shape = tuple(n for a, n in enumerate(self.shape) if a not in axes)
        # Positions that differed in a summed dimension coincide now.
        return Coo(indices, values, shape, self.coalesced and len(left) == split)

    # ── arithmetic, as numpy dispatches it ──────────────────────────────────────────────────────

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))[0]
        # `np.add.reduce` is how sums are written where speed counts (`ops/reduce.py`).
        if ufunc is np.add and method == "reduce" and out is None:
            return inputs[0].sum(*inputs[1:], **kwargs)
        rule = UFUNCS.get(ufunc)
        if rule is None or method != "__call__" or kwargs:
            return NotImplemented
        if out is None:
            return rule(*inputs)
        first, second = inputs
        # `dense += sparse`, as gradients are added up: touches only the stored positions.
        if ufunc is np.add and first is out and isinstance(out, np.ndarray):
            if second.shape != out.shape:
                raise ValueError(f"shapes {out.shape} and {second.shape} do not match")
            second.add_into(out)
            return out
        return NotImplemented

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        rule = FUNCTIONS.get(func)
        return NotImplemented if rule is None else rule(*args, **kwargs)

    def __add__(self, other: Any) -> Any:
        return np.add(self, other)

    def __radd__(self, other: Any) -> Any:
        return np.add(other, self)

    def __sub__(self, other: Any) -> Any:
        return np.subtract(self, other)

    def __rsub__(self, other: Any) -> Any:
        return np.subtract(other, self)

    def __mul__(self, other: Any) -> Any:
        return np.multiply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return np.divide(self, other)

    def __neg__(self) -> Coo:
        return self.with_values(-self.values)


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the axes that numpy's `axis` argument means."""
    if axis is None:
        return tuple(range(ndim))
    return tuple(_place(a, ndim, 0) for a in (axis if isinstance(axis, Sequence) else (axis,)))


def _place(index: Any, n: int, axis: int) -> int:
    """Return an index counted from the front; raise IndexError if it is out of bounds."""
    place: int = index if isinstance(index, int) else int(index)
    if not -n <= place < n:
        raise IndexError(f"index {place} is out of bounds for axis {axis} with size {n}")
    return place % n


def _expanded(index: Any, ndim: int) -> list[Any]:
    """Return one index per dimension, `...` written out."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(p is Ellipsis or isinstance(p, int | np.integer | slice) for p in parts):
        raise TypeError("a sparse array takes integers, slices and ... as an index")
    missing = ndim - len(parts) + parts.count(Ellipsis)
    if missing < 0:
        raise IndexError(f"too many indices for an array of {ndim} dimensions")
    where = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    return parts[:where] + [slice(None)] * missing + parts[where + 1 :]


# ── numpy's functions on sparse arrays ──────────────────────────────────────────────────────────


def _add(a: Any, b: Any) -> Any:
    if not (isinstance(a, Coo) and isinstance(b, Coo)):
        # A dense summand makes the sum dense anyway.
        return np.add(_dense(a), _dense(b))
    if a.shape != b.shape:
        raise ValueError(f"cannot add sparse arrays of shapes {a.shape} and {b.shape}")
    # Coordinates of different depth cannot be concatenated.
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
    # A position stored in parts on both sides would miss the cross terms of the product.
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
    # The factor stretches the sparse array: nothing to gain from its pattern.
    if np.broadcast_shapes(a.shape, shape) != a.shape:
        return ufunc(a.to_dense(), factor)
    there = np.broadcast_to(factor, a.shape)[tuple(a.indices)]
    return a.with_values(ufunc(a.values, there))


def _each(ufunc: Any) -> Any:
    """Make a function that is linear in the values: positions stored twice need no care."""
    return lambda a: a.with_values(ufunc(a.values))


def _each_whole(ufunc: Any) -> Any:
    """Make a function that is not linear: each position must be one number first."""

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
    """Return the same array with its dimensions in another order."""
    a = a.fully_sparse()
    order = tuple(range(a.ndim))[::-1] if axes is None else tuple(axes)
    return Coo(a.indices[list(order)], a.values, tuple(a.shape[i] for i in order))


def zeros_like(a: Coo, dtype: Any = None, **_: Any) -> Coo:
    """Return an array of the same shape that stores nothing."""
    return Coo(a.indices[:, :0], a.values[:0].astype(dtype or a.dtype), a.shape, True)


def _dense(a: Any) -> Any:
    return a.to_dense() if isinstance(a, Coo) else a


UFUNCS: dict[Any, Any] = {
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

FUNCTIONS: dict[Any, Any] = {
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
