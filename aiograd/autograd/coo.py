"""Coo: an array of which only some entries are stored, as coordinates and values.

    indices  (sparse_dim, nnz)        where
    values   (nnz, *dense_shape)      what; a "row-sparse" array has sparse_dim 1
    shape    (*sparse_shape, *dense_shape)

A position may be stored several times, which means the sum; `coalesce()` sorts and adds up. Sums of
two are concatenations that coalesce themselves once they have grown, so gradients can be collected
cheaply. A Coo is never changed after it was made. It answers numpy's functions as far as gradient
rules need them (`coo_functions.py`); the Tensor side (`ag.sparse`) is in `sparse.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

UFUNCS: dict[Any, Any] = {}  # numpy ufunc → the same on sparse arrays; filled by coo_functions.py
FUNCTIONS: dict[Any, Any] = {}  # numpy function → the same


class Coo:
    """A sparse array in coordinate form; see the module for the layout."""

    __slots__ = ("coalesced", "indices", "settled", "shape", "values")

    is_sparse_array = True
    base = None  # it never shows the memory of another array

    def __init__(
        self, indices: Any, values: Any, shape: Sequence[int], coalesced: bool = False
    ) -> None:
        self.indices = indices
        self.values = values
        self.shape = tuple(shape)
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
        return self.values.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return int(self.indices.nbytes + self.values.nbytes)

    @property
    def nnz(self) -> int:
        """How many entries are stored."""
        return int(self.indices.shape[1])

    @property
    def sparse_dim(self) -> int:
        return int(self.indices.shape[0])

    @property
    def contiguous(self) -> bool:
        """True when the values and indices are plain blocks of memory."""
        return bool(self.values.flags.c_contiguous and self.indices.flags.c_contiguous)

    @property
    def real(self) -> Coo:
        return self.with_values(self.values.real)

    @property
    def imag(self) -> Coo:
        return self.with_values(self.values.imag)

    def __len__(self) -> int:
        return self.shape[0]

    # ── copies and conversions ──────────────────────────────────────────────────────────────────

    def with_values(self, values: Any) -> Coo:
        """The same positions with other values."""
        return Coo(self.indices, values, self.shape, self.coalesced)

    def copy(self) -> Coo:
        return Coo(
            np.array(self.indices, order="C"),
            np.array(self.values, order="C"),
            self.shape,
            self.coalesced,
        )

    def astype(self, dtype: Any, copy: bool = True) -> Coo:
        return self.with_values(self.values.astype(dtype, copy=copy))

    def item(self) -> Any:
        return self.to_dense().item()

    def __float__(self) -> float:
        return float(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        dense = self.to_dense()
        return dense if dtype is None else dense.astype(dtype, copy=False)

    def to_dense(self) -> Any:
        """The whole array, zeros included."""
        dense = np.zeros(self.shape, self.dtype)
        self.add_into(dense)
        return dense

    def add_into(self, dense: Any) -> None:
        """Add the stored entries to a dense array, touching nothing else."""
        whole = self.coalesce()
        dense[tuple(whole.indices)] += whole.values

    def keys(self) -> Any:
        """One number per stored entry that orders positions as in memory."""
        return np.ravel_multi_index(tuple(self.indices), self.shape[: self.sparse_dim])

    def coalesce(self) -> Coo:
        """The same array with every position stored once, in order."""
        if self.coalesced:
            return self
        keys = self.keys()
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        values = np.add.reduceat(self.values[order], first, axis=0)
        return Coo(self.indices[:, order[first]], values, self.shape, True)

    def at(self, indices: Any) -> Any:
        """The values at other positions of the sparse dimensions; zero where none is stored."""
        whole = self.coalesce()
        found = np.zeros((indices.shape[1], *self.values.shape[1:]), self.dtype)
        if whole.nnz:
            mine = whole.keys()
            wanted = np.ravel_multi_index(tuple(indices), self.shape[: self.sparse_dim])
            place = np.minimum(np.searchsorted(mine, wanted), len(mine) - 1)
            hit = mine[place] == wanted
            found[hit] = whole.values[place[hit]]
        return found

    def mask(self, array: Any) -> Coo:
        """Another array of this shape, at the positions stored here; each of them once."""
        if isinstance(array, Coo):
            return array
        whole = self.coalesce()
        return whole.with_values(array[tuple(whole.indices)])

    def fully_sparse(self) -> Coo:
        """The same entries with every dimension a sparse one."""
        if self.sparse_dim == self.ndim:
            return self
        dense = self.shape[self.sparse_dim :]
        inner = np.indices(dense).reshape(len(dense), -1)
        count = inner.shape[1]
        indices = np.vstack([np.repeat(self.indices, count, axis=1), np.tile(inner, self.nnz)])
        return Coo(indices, self.values.reshape(-1), self.shape, self.coalesced)

    def reshape(self, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], Sequence):
            shape = tuple(shape[0])
        if -1 in shape:
            known = int(np.prod([n for n in shape if n != -1], dtype=np.int64))
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if shape == self.shape:
            return self
        if not shape:
            return self.to_dense().reshape(shape)
        flat = self.fully_sparse()
        indices = np.array(np.unravel_index(flat.keys(), shape)).reshape(len(shape), -1)
        return Coo(indices, flat.values, shape, flat.coalesced)

    def __getitem__(self, index: Any) -> Any:
        """Basic indexing: integers, slices and `...`."""
        if index is Ellipsis:
            return self
        parts = _expanded(index, self.ndim)
        keep = np.ones(self.nnz, bool)
        rows, shape = [], []
        for axis in range(self.sparse_dim):
            here, part, n = self.indices[axis], parts[axis], self.shape[axis]
            if isinstance(part, slice):
                start, stop, step = part.indices(n)
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
        return Coo(indices, values, shape, self.coalesced and len(left) == split)

    # ── arithmetic, as numpy dispatches it ──────────────────────────────────────────────────────

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))[0]
        if ufunc is np.add and method == "reduce" and out is None:
            return inputs[0].sum(*inputs[1:], **kwargs)
        rule = UFUNCS.get(ufunc)
        if rule is None or method != "__call__" or kwargs:
            return NotImplemented
        if out is None:
            return rule(*inputs)
        first, second = inputs
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
    """The axes that numpy's `axis` argument means."""
    if axis is None:
        return tuple(range(ndim))
    return tuple(_place(a, ndim, 0) for a in (axis if isinstance(axis, Sequence) else (axis,)))


def _place(index: Any, n: int, axis: int) -> int:
    place: int = index if isinstance(index, int) else int(index)
    if not -n <= place < n:
        raise IndexError(f"index {place} is out of bounds for axis {axis} with size {n}")
    return place % n


def _expanded(index: Any, ndim: int) -> list[Any]:
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(p is Ellipsis or isinstance(p, int | np.integer | slice) for p in parts):
        raise TypeError("a sparse array takes integers, slices and ... as an index")
    missing = ndim - len(parts) + parts.count(Ellipsis)
    if missing < 0:
        raise IndexError(f"too many indices for an array of {ndim} dimensions")
    where = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    return parts[:where] + [slice(None)] * missing + parts[where + 1 :]
