"""Several arrays into one, and one into several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.autograd.op import Op
from aiograd.autograd.ops.shape import atleast_1d, atleast_2d, atleast_3d, ravel
from aiograd.autograd.ops.table import as_tensor, composite, numpy_op

# ── joining ─────────────────────────────────────────────────────────────────────────────────────


def _list(arrays: Any) -> list[Any]:
    """Return the arrays to join; a Tensor gives its rows."""
    return list(arrays)


def _part(g: Any, y: Any, i: int, *arrays: Any, axis: int | None = 0) -> Any:
    """The slice of the gradient that belongs to array number `i`."""
    # Flattened one after another.
    if axis is None:
        start = sum([a.size for a in arrays[:i]])
        return g[start : start + arrays[i].size].reshape(arrays[i].shape)
    # Counted from the front, since slices are built up to it.
    axis %= arrays[i].ndim
    start = sum([a.shape[axis] for a in arrays[:i]])
    return g[(slice(None),) * axis + (slice(start, start + arrays[i].shape[axis]),)]


# The rules ask for shapes alone (`shapes_only`), so no array is saved, however many are joined.
concatenate = numpy_op(
    np.concatenate,
    forward=lambda *arrays, axis=0: np.concatenate(arrays, axis=axis),
    each=_part,
    shapes_only=True,
    arrange=lambda arrays, axis=0, out=None: (_list(arrays), {"axis": axis, **_out(out)}),
)
stack = numpy_op(
    np.stack,
    forward=lambda *arrays, axis=0: np.stack(arrays, axis=axis),
    each=lambda g, y, i, *arrays, axis=0: g[(slice(None),) * (axis % g.ndim) + (i,)],
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
def append(arr: Any, values: Any, axis: int | None = None) -> Any:
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
    gs: Sequence[Any], ys: Any, a: Any, indices_or_sections: Any = 1, axis: int = 0
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


split = _splitter(np.split)
array_split = _splitter(np.array_split)


@composite(np.hsplit)
def hsplit(ary: Any, indices_or_sections: Any) -> Any:
    """Split along the second axis; a vector along its only one."""
    return split(ary, indices_or_sections, axis=1 if as_tensor(ary).ndim > 1 else 0)


@composite(np.vsplit)
def vsplit(ary: Any, indices_or_sections: Any) -> Any:
    """Split along the first axis."""
    return split(ary, indices_or_sections, axis=0)


@composite(np.dsplit)
def dsplit(ary: Any, indices_or_sections: Any) -> Any:
    """Split along the third axis."""
    return split(ary, indices_or_sections, axis=2)


# New in numpy 2.1; on older ones the operation exists without its counterpart.
@composite(getattr(np, "unstack", None))
def unstack(x: Any, /, *, axis: int = 0) -> Any:
    """Split into the slices along an axis, which disappears."""
    x = as_tensor(x)
    return tuple(np.squeeze(part, axis=axis) for part in split(x, x.shape[axis], axis=axis))
