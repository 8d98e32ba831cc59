"""Several arrays into one, and one into several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.op import Op
from aiograd.autograd.ops.shape import atleast_1d, atleast_2d, atleast_3d, ravel
from aiograd.autograd.ops.table import as_tensor, composite, numpy_op
from aiograd.autograd.tensor import Tensor

# ── joining ─────────────────────────────────────────────────────────────────────────────────────


def _list(arrays: Any) -> list[Any]:
    """Return the arrays to join; a Tensor gives its rows."""
    return list(arrays)


def _parts(g: Array, y: Array, *arrays: Any, axis: int | None = 0) -> Any:
    """The adjoint of `concatenate`: the slice of the gradient that belongs to each array."""
    flat = axis is None  # joined flattened, one after another
    # Counted from the front, since slices are built up to it.
    at = 0 if axis is None else axis % arrays[0].ndim
    ends = list(accumulate([a.size if flat else a.shape[at] for a in arrays]))
    if _is_recorded(g):
        # One node for all slices. A slice of its own for each would put zeros around each in a
        # second derivative: n arrays of the size of the whole.
        parts = list(np.split(g, ends[:-1], axis=at))
    else:
        before = (slice(None),) * at
        starts = [0, *ends[:-1]]
        parts = [g[(*before, slice(i, j))] for i, j in zip(starts, ends, strict=True)]
    return [part.reshape(a.shape) for part, a in zip(parts, arrays, strict=True)] if flat else parts


def _layers(g: Array, y: Array, *arrays: Any, axis: int = 0) -> Any:
    """The adjoint of `stack`: the layer of the gradient that belongs to each array."""
    at = axis % g.ndim
    count = g.shape[at]
    if _is_recorded(g):
        shape = g.shape[:at] + g.shape[at + 1 :]
        return [part.reshape(shape) for part in np.split(g, count, axis=at)]
    before: tuple[Any, ...] = (slice(None),) * at
    return [g[(*before, i)] for i in range(count)]


def _is_recorded(g: Values) -> bool:
    """Whether a gradient is a Tensor that can be split by one operation."""
    return isinstance(g, Tensor) and not g.is_sparse


# One rule for all arrays: a rule that is called for each of n arrays, with all n of them, makes
# the backward pass quadratic. The rules ask for shapes alone (`shapes_only`), so no array is saved,
# however many are joined.
concatenate: Op = numpy_op(
    np.concatenate,
    forward=lambda *arrays, axis=0: np.concatenate(arrays, axis=axis),
    joint=_parts,
    shapes_only=True,
    arrange=lambda arrays, axis=0, out=None: (_list(arrays), {"axis": axis, **_out(out)}),
)
stack: Op = numpy_op(
    np.stack,
    forward=lambda *arrays, axis=0: np.stack(arrays, axis=axis),
    joint=_layers,
    shapes_only=True,
    arrange=lambda arrays, axis=0, out=None: (_list(arrays), {"axis": axis, **_out(out)}),
)


def _out(out: Any) -> dict[str, Any]:
    return {} if out is None else {"out": out}


@composite(np.vstack)
def vstack(tup: Any) -> Any:
    """Join along the first axis; vectors become rows."""
    return concatenate([atleast_2d(a) for a in tup], axis=0)


@composite(np.hstack)
def hstack(tup: Any) -> Any:
    """Join along the second axis; vectors along their only one."""
    arrays = [atleast_1d(a) for a in tup]
    return concatenate(arrays, axis=0 if arrays and arrays[0].ndim == 1 else 1)


@composite(np.dstack)
def dstack(tup: Any) -> Any:
    """Join along the third axis."""
    return concatenate([atleast_3d(a) for a in tup], axis=2)


@composite(np.column_stack)
def column_stack(tup: Any) -> Any:
    """Join as columns; vectors become one column each."""
    arrays = [as_tensor(a) for a in tup]
    return concatenate([a if a.ndim > 1 else a.reshape(-1, 1) for a in arrays], axis=1)


@composite(np.append)
def append(arr: Values, values: Any, axis: int | None = None) -> Any:
    """Join values to the end, flattened unless an axis is given."""
    if axis is None:
        return concatenate([ravel(arr), ravel(values)])
    return concatenate([arr, values], axis=axis)


@composite(np.meshgrid)
def meshgrid(*xi: Any, indexing: str = "xy") -> Any:
    """Make coordinate matrices from coordinate vectors."""
    vectors = [ravel(x) for x in xi]
    # numpy's default lays the first vector along the second axis, as x goes to the right.
    order = [1, 0, *range(2, len(vectors))] if indexing == "xy" and len(vectors) > 1 else None
    shape = tuple(v.size for v in vectors)
    grids = []
    for i, vector in enumerate(vectors):
        column = vector.reshape(tuple(n if j == i else 1 for j, n in enumerate(shape)))
        grid = np.broadcast_to(column, shape)
        grids.append(np.transpose(grid, order) if order else grid)
    return tuple(grids)


# ── splitting ───────────────────────────────────────────────────────────────────────────────────


def _join_parts(
    gs: Sequence[Any], ys: Sequence[Any], a: Array, indices_or_sections: Any = 1, axis: int = 0
) -> Any:
    """The adjoint of a split; parts that nobody used come as zeros."""
    return [np.concatenate(gs, axis=axis)]


def _splitter(function: Any) -> Op:
    """Declare one of numpy's two ways to split: it has several outputs and one rule for all."""
    return numpy_op(
        function,
        forward=lambda ary, indices_or_sections, axis=0: tuple(
            function(ary, indices_or_sections, axis=axis)
        ),
        joint=_join_parts,
    )


split: Op = _splitter(np.split)
array_split: Op = _splitter(np.array_split)


@composite(np.hsplit)
def hsplit(ary: Values, indices_or_sections: Any) -> Any:
    """Split along the second axis; a vector along its only one."""
    return split(ary, indices_or_sections, axis=1 if as_tensor(ary).ndim > 1 else 0)


@composite(np.vsplit)
def vsplit(ary: Values, indices_or_sections: Any) -> Any:
    """Split along the first axis."""
    return split(ary, indices_or_sections, axis=0)


@composite(np.dsplit)
def dsplit(ary: Values, indices_or_sections: Any) -> Any:
    """Split along the third axis."""
    return split(ary, indices_or_sections, axis=2)


# New in numpy 2.1; on older ones the operation exists without its counterpart.
@composite(getattr(np, "unstack", None))
def unstack(x: Values, /, *, axis: int = 0) -> Any:
    """Split into the slices along an axis, which disappears."""
    x = as_tensor(x)
    return tuple(np.squeeze(part, axis=axis) for part in split(x, x.shape[axis], axis=axis))
