"""Picking elements out, putting gradients back: indexing, take, sort, repeat.

`a[index]` and its counterpart, adding values at an index into zeros, are each other's gradients.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.names.methods import Methods
from aiograd.autograd.op import Op, op
from aiograd.autograd.ops.table import as_tensor, composite, new_op, numpy_op
from aiograd.autograd.tensor import Tensor, plain_index


def _is_basic(index: Any) -> bool:
    """Whether an index gives a view and meets every element at most once."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or isinstance(part, int | np.integer | slice | EllipsisType) for part in parts
    )


def _is_mask(index: Any) -> bool:
    """Whether an index is an array of truth values, which meets every element at most once."""
    return isinstance(index, np.ndarray) and index.dtype == np.bool_


def add_at(values: Any, index: Any, shape: tuple[int, ...]) -> Any:
    """Return zeros of `shape` with `values` added at `index`; repeated positions add up."""
    total = np.zeros(shape, values.dtype)
    # Where no element is met twice an assignment will do; `np.add.at` is many times slower.
    if _is_basic(index) or _is_mask(index):
        total[index] = values
    else:
        np.add.at(total, index, values)
    return total


scattered: Op = op(
    "scattered", add_at, lambda g, y, values, index=None, shape=None: getitem.of(g, index=index)
)


def _kept(index: Any) -> Any:
    """Return a copy of the index: its owner may change the arrays before backward reads them."""
    if isinstance(index, Tensor):
        return index.raw.copy()
    if isinstance(index, np.ndarray):
        return index.copy()
    if isinstance(index, tuple):
        return tuple([_kept(part) for part in index])
    return index


def _pick(a: Array, index: Any) -> Any:
    """Pick elements, as `a[index]` does.

    >>> ag.getitem(ag.arange(5), slice(1, 3)).tolist()
    [1, 2]
    """
    # A single element comes as a numpy scalar, which has no memory to be recorded.
    return np.asarray(a[index])


getitem: Op = new_op(
    "getitem",
    _pick,
    lambda g, y, a, index=None: scattered.of(g, index=index, shape=a.shape),
    arrange=lambda a, index: ((a,), {"index": _kept(index)}),
)


def _getitem(self: Tensor, index: Any) -> Tensor:
    """Pick elements as numpy does; Tensors may be indices."""
    # Without a gradient nothing reads the index later, so it need not be copied.
    index = _kept(index) if self.requires_grad else plain_index(index)
    picked: Tensor = getitem.apply((self,), {"index": index})
    return picked


def _iterate(self: Tensor) -> Any:
    """Iterate over the first axis; each item is recorded."""
    if not self.shape:
        raise TypeError("a tensor without axes cannot be iterated over")
    return (self[i] for i in range(self.shape[0]))


setattr(Methods, "__getitem__", _getitem)  # noqa: B010  attached, like all methods
setattr(Methods, "__iter__", _iterate)  # noqa: B010


# ── take and similar functions ──────────────────────────────────────────────────────────────────
#
# All are made of `a[index]`, whose rule they share; numpy's own functions only compute the index.


@composite(np.take)
def take(a: Values, indices: Any, axis: int | None = None, mode: str = "raise") -> Any:
    """Pick whole slices along an axis, or elements of the flattened array."""
    a, indices = as_tensor(a), _whole(indices)
    if axis is None:
        a, axis = a.reshape(-1), 0
    size = a.shape[axis]
    # The modes only change the indices, so they need no rule.
    if mode == "wrap":
        indices = indices % size
    elif mode == "clip":
        indices = np.clip(indices, 0, size - 1)
    elif mode != "raise":
        raise ValueError(f"mode must be 'raise', 'wrap' or 'clip', not {mode!r}")
    return a[(slice(None),) * (axis % a.ndim) + (indices,)]


def _whole(indices: Any) -> Any:
    """Return indices as an array of integers; raise TypeError for anything else."""
    indices = plain_index(indices)
    indices = np.asarray(indices)
    if indices.dtype.kind not in "iu" and indices.size:
        raise TypeError(f"indices must be integers, not {indices.dtype}")
    return indices.astype(np.intp, copy=False)


@composite(np.take_along_axis)
def take_along_axis(arr: Values, indices: Any, axis: int | None = -1) -> Any:
    """Pick one element per position of `indices` along an axis."""
    arr, indices = as_tensor(arr), _whole(indices)
    if axis is None:
        arr, axis = arr.reshape(-1), 0
    if indices.ndim != arr.ndim:
        raise ValueError("indices must have as many axes as the array")
    axis %= arr.ndim
    places = [
        indices
        if i == axis
        else np.arange(n).reshape([n if j == i else 1 for j in range(arr.ndim)])
        for i, n in enumerate(arr.shape)
    ]
    return arr[tuple(places)]


@composite(np.compress)
def compress(condition: Any, a: Values, axis: int | None = None) -> Any:
    """Pick the slices where the condition holds."""
    chosen = np.flatnonzero(np.asarray(plain_index(condition)))
    return take(a, chosen, axis=axis)


def _compress(self: Tensor, condition: Any, axis: int | None = None) -> Tensor:
    """Pick the slices where the condition holds."""
    picked: Tensor = compress(condition, self, axis)
    return picked


# As a method, the array comes first.
_compress.__name__ = "compress"
setattr(Methods, "compress", _compress)  # noqa: B010


@composite(np.delete)
def delete(arr: Values, obj: Any, axis: int | None = None) -> Any:
    """Leave out slices along an axis, or elements of the flattened array."""
    arr = as_tensor(arr)
    size = arr.size if axis is None else arr.shape[axis]
    return take(arr, np.delete(np.arange(size), plain_index(obj)), axis=axis)


# ── sliding windows ─────────────────────────────────────────────────────────────────────────────


def _window_arguments(
    x: Array, window_shape: Any, axis: Any = None, *, writeable: bool = False
) -> Any:
    """Sort out the arguments of numpy's function; axes are counted from the front."""
    # The view would be written to behind the back of the version count.
    if writeable:
        raise TypeError("sliding_window_view() of a Tensor cannot be written to")
    sizes = (window_shape,) if isinstance(window_shape, int) else tuple(window_shape)
    axes = range(np.ndim(x)) if axis is None else (axis,) if isinstance(axis, int) else axis
    return (x,), {"sizes": sizes, "axes": tuple(i % np.ndim(x) for i in axes)}


def _add_windows(g: Array, sizes: Any, axes: Any, shape: Any) -> Any:
    """Add every window up at its position: the adjoint of taking them."""
    total = np.zeros(shape, g.dtype)
    # A loop over the elements of one window, which are few, and each step adds all windows at once.
    for offsets in np.ndindex(*sizes):
        place: list[Any] = [slice(None)] * len(shape)
        for axis, offset in zip(axes, offsets, strict=True):
            start = 0 if place[axis] == slice(None) else place[axis].start  # an axis may come twice
            place[axis] = slice(start + offset, start + offset + g.shape[axis])
        total[tuple(place)] += g[(..., *offsets)]
    return total


sliding_window_view: Op = numpy_op(
    np.lib.stride_tricks.sliding_window_view,
    lambda g, y, a, sizes=(), axes=(): _slid.of(g, sizes=sizes, axes=axes, shape=a.shape),
    forward=lambda x, sizes, axes: np.lib.stride_tricks.sliding_window_view(x, sizes, axes),
    arrange=_window_arguments,
)
_slid: Op = op(
    "slid",
    _add_windows,
    lambda g, y, a, sizes=(), axes=(), shape=(): sliding_window_view.of(g, sizes=sizes, axes=axes),
)


# ── order ───────────────────────────────────────────────────────────────────────────────────────


def _unsort(g: Array, order: Any, axis: int) -> Any:
    """Put a gradient back into the order before a sort."""
    return np.take_along_axis(g, np.argsort(order, axis=axis), axis=axis)


def _sort(
    g: Array, y: Array, a: Array, axis: int | None = -1, kind: Any = None, stable: Any = None
) -> Any:
    """Sort again to find the order; of equal elements any order is right."""
    if axis is None:
        return _sort(g, y, a.reshape(-1)).reshape(a.shape)
    # The order is computed in backward, so that a forward pass without one pays for one sort only.
    return _unsort(g, np.argsort(plain(a), axis=axis, kind="stable"), axis)


def _partition(g: Array, y: Array, a: Array, kth: Any = 0, axis: int | None = -1) -> Any:
    """The order of a partition, found again as for a sort."""
    if axis is None:
        return _partition(g, y, a.reshape(-1), kth, 0).reshape(a.shape)
    return _unsort(g, np.argpartition(plain(a), kth, axis=axis), axis)


def plain(a: Values) -> Any:
    """Return the array of a Tensor, for questions that have no gradient."""
    return a.raw if isinstance(a, Tensor) else a


sort: Op = numpy_op(np.sort, _sort)
partition: Op = numpy_op(np.partition, _partition)


# ── repetition ──────────────────────────────────────────────────────────────────────────────────


@composite(np.repeat)
def repeat(a: Values, repeats: Any, axis: int | None = None) -> Any:
    """Repeat every element, or every slice along an axis."""
    a, repeats = as_tensor(a), _whole(repeats)
    if axis is None:
        a, axis = a.reshape(-1), 0
    axis %= a.ndim
    # One number for all: stretching an axis, whose gradient is a sum. An index with repetitions
    # would scatter the gradient element by element.
    if repeats.size == 1:
        times = int(repeats.reshape(()))
        spread = np.broadcast_to(
            np.expand_dims(a, axis + 1), (*a.shape[: axis + 1], times, *a.shape[axis + 1 :])
        )
        return spread.reshape((*a.shape[:axis], a.shape[axis] * times, *a.shape[axis + 1 :]))
    return take(a, np.repeat(np.arange(a.shape[axis]), repeats), axis=axis)


@composite(np.tile)
def tile(A: Any, reps: Any) -> Any:  # noqa: N803  numpy's name
    """Lay copies of the array side by side."""
    a = as_tensor(A)
    times = tuple(reps) if isinstance(reps, list | tuple) else (int(reps),)
    shape = (1,) * (len(times) - a.ndim) + a.shape
    times = (1,) * (len(shape) - len(times)) + times
    # An axis of one before each, stretched to the number of copies: a view until the last reshape.
    split = a.reshape([n for size in shape for n in (1, size)])
    spread = np.broadcast_to(split, [n for k, s in zip(times, shape, strict=True) for n in (k, s)])
    return spread.reshape([k * size for k, size in zip(times, shape, strict=True)])
