"""The same numbers in another arrangement: axes moved, merged, added, turned around.

The gradient of a rearrangement is the rearrangement that undoes it, so no rule here reads a value:
at most the shape of the argument is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.names.methods import Methods
from aiograd.autograd.op import Op, op
from aiograd.autograd.ops.table import as_tensor, composite, numpy_op
from aiograd.autograd.tensor import Tensor

Axes = int | Sequence[int] | None


def _numbers_or_tuple(numbers: tuple[Any, ...]) -> Any:
    """Return `(2, 3)` for both `t.reshape(2, 3)` and `t.reshape((2, 3))`."""
    return numbers[0] if len(numbers) == 1 else numbers


# ── shapes ──────────────────────────────────────────────────────────────────────────────────────


def _reshape_forward(a: Array, shape: Any, order: Any = "C") -> Any:
    return np.reshape(a, shape, order)[...]


# `[...]` makes a view even where numpy gives the array itself, so that versions are shared.
reshape: Op = numpy_op(
    np.reshape,
    lambda g, y, a, shape=None, order="C": np.reshape(g, a.shape, order),
    forward=_reshape_forward,
    signature=_reshape_forward,
)
ravel: Op = numpy_op(
    np.ravel,
    lambda g, y, a, order="C": np.reshape(g, a.shape, order),
    forward=lambda a, order="C": np.ravel(a, order)[...],
)
squeeze: Op = numpy_op(
    np.squeeze,
    lambda g, y, a, axis=None: np.reshape(g, a.shape),
    forward=lambda a, axis=None: np.squeeze(a, axis)[...],
)
expand_dims: Op = numpy_op(np.expand_dims, lambda g, y, a, axis=None: np.reshape(g, a.shape))
# The sweep sums over the axes that were stretched (`sweep.conform`).
broadcast_to: Op = numpy_op(np.broadcast_to, lambda g, y, a, shape=None: g)


def _reshape(self: Tensor, *shape: Any, order: Any = "C") -> Tensor:
    """Give the same elements another shape; one number may be -1."""
    result: Tensor = reshape.apply((self,), {"shape": _numbers_or_tuple(shape), "order": order})
    return result


def _flatten(self: Tensor, order: Any = "C") -> Any:
    """Copy into one axis."""
    return np.copy(ravel(self, order=order))


@composite(np.broadcast_arrays)
def broadcast_arrays(*args: Any) -> Any:
    """Bring arrays to their common shape."""
    arrays = [as_tensor(arg) for arg in args]
    shape = np.broadcast_shapes(*[a.shape for a in arrays])
    return tuple(broadcast_to(a, shape) for a in arrays)


def _at_least(function: Any, ndim: int) -> Callable[..., Any]:
    """Declare one of numpy's functions that add axes."""

    def atleast(*arys: Any) -> Any:
        # The shape is asked of numpy, the reshape is recorded.
        grown = [
            a if a.ndim >= ndim else reshape(a, function(a.raw).shape)
            for a in (as_tensor(ary) for ary in arys)
        ]
        return grown[0] if len(grown) == 1 else tuple(grown)

    atleast.__name__, atleast.__doc__ = function.__name__, function.__doc__
    return composite(function)(atleast)


atleast_1d: Callable[..., Any] = _at_least(np.atleast_1d, 1)
atleast_2d: Callable[..., Any] = _at_least(np.atleast_2d, 2)
atleast_3d: Callable[..., Any] = _at_least(np.atleast_3d, 3)


# ── order of axes ───────────────────────────────────────────────────────────────────────────────


def _transpose(g: Array, y: Array, a: Array, axes: Sequence[int] | None = None) -> Any:
    """Transpose by the inverse permutation."""
    if axes is None:
        return np.transpose(g)
    back = sorted(range(len(axes)), key=[i % len(axes) for i in axes].__getitem__)
    return np.transpose(g, back)


transpose: Op = numpy_op(np.transpose, _transpose)
swapaxes: Op = numpy_op(
    np.swapaxes, lambda g, y, a, axis1=0, axis2=0: np.swapaxes(g, axis1, axis2), arrays=1
)
moveaxis: Op = numpy_op(
    np.moveaxis, lambda g, y, a, source=0, destination=0: np.moveaxis(g, destination, source)
)


@composite(np.rollaxis)
def rollaxis(a: Values, axis: int, start: int = 0) -> Any:
    """Move one axis back until it lies in front of another."""
    ndim = as_tensor(a).ndim
    axis, start = axis % ndim, start + ndim if start < 0 else start
    return moveaxis(a, axis, start - 1 if axis < start else start)


@composite(np.matrix_transpose)
def matrix_transpose(x: Values) -> Any:
    """Exchange the last two axes."""
    # `swapaxes` on a vector would say something about axes that nobody wrote.
    if as_tensor(x).ndim < 2:
        raise ValueError("a matrix has at least two axes")
    return swapaxes(x, -1, -2)


def _method_transpose(self: Tensor, *axes: Any) -> Tensor:
    """Reverse the axes, or order them as given."""
    order = _numbers_or_tuple(axes) if axes else None
    result: Tensor = transpose.apply((self,), {"axes": order} if order is not None else {})
    return result


# ── turning and rolling ─────────────────────────────────────────────────────────────────────────

flip: Op = numpy_op(np.flip, lambda g, y, a, axis=None: np.flip(g, axis))
fliplr: Op = numpy_op(np.fliplr, lambda g, y, a: np.fliplr(g))
flipud: Op = numpy_op(np.flipud, lambda g, y, a: np.flipud(g))
rot90: Op = numpy_op(np.rot90, lambda g, y, a, k=1, axes=(0, 1): np.rot90(g, -k, axes))


def _roll(g: Array, y: Array, a: Array, shift: Any = 0, axis: Any = None) -> Any:
    """Roll back."""
    back = tuple(-s for s in shift) if isinstance(shift, list | tuple) else -shift
    return np.roll(g, back, axis)


roll: Op = numpy_op(np.roll, _roll)


# ── triangles and diagonals ─────────────────────────────────────────────────────────────────────

tril: Op = numpy_op(np.tril, lambda g, y, a, k=0: np.tril(g, k))
triu: Op = numpy_op(np.triu, lambda g, y, a, k=0: np.triu(g, k))


def _on_diagonal(g: Array, shape: tuple[int, ...], offset: int, axis1: int, axis2: int) -> Any:
    """Return zeros of `shape` with the last axis of `g` on a diagonal."""
    if g.shape[-1] == 0:
        return np.zeros(shape, g.dtype)
    rows, columns = shape[axis1], shape[axis2]
    first = max(-offset, 0)  # the row of the first diagonal element
    # No assignment into zeros: with create_graph `g` is a Tensor, and writes are not recorded. Each
    # row takes one element, and the identity keeps it on the diagonal only.
    place = np.clip(np.arange(rows) - first, 0, g.shape[-1] - 1)
    spread = np.take(g, place, axis=-1)[..., None] * np.eye(rows, columns, offset, dtype=g.dtype)
    return np.moveaxis(spread, (-2, -1), (axis1, axis2))


diagonal: Op = numpy_op(
    np.diagonal,
    lambda g, y, a, offset=0, axis1=0, axis2=1: _on_diagonal(g, a.shape, offset, axis1, axis2),
)
diag: Op = numpy_op(
    np.diag,
    lambda g, y, v, k=0: np.diagonal(g, k) if v.ndim == 1 else _on_diagonal(g, v.shape, k, 0, 1),
)


@composite(np.diagflat)
def diagflat(v: Values, k: int = 0) -> Any:
    """Make a matrix with the flattened input on a diagonal."""
    return diag(ravel(v), k)


@composite(np.trace)
def trace(a: Values, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Sum along a diagonal."""
    return diagonal(a, offset, axis1, axis2).sum(axis=-1)


# ── borders ─────────────────────────────────────────────────────────────────────────────────────


def _unpad(g: Array, y: Array, a: Array, pad_width: Any = (), constant_values: Any = 0) -> Any:
    """Cut the border off."""
    return g[tuple([slice(w[0], w[0] + n) for w, n in zip(pad_width, a.shape, strict=True)])]


_bordered: Op = op(
    "pad",
    lambda a, pad_width, constant_values=0: np.pad(a, pad_width, constant_values=constant_values),
    _unpad,
)


@composite(np.pad)
def pad(array: Values, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    """Add a border: constant, or copies of elements as in numpy's edge, reflect, wrap, …"""
    a = as_tensor(array)
    if mode == "constant":
        return _bordered(a, pad_width=np.broadcast_to(pad_width, (a.ndim, 2)).tolist(), **kwargs)
    # The other modes compute new values (means, ramps), or call a function of the user's.
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        raise TypeError(f"pad() with mode {mode!r} has no gradient rule")
    # numpy pads the positions instead of the values: every element of the result is a copy of a
    # known one, and indexing has the gradient.
    places = np.pad(np.arange(a.size).reshape(a.shape), pad_width, mode, **kwargs)
    return a.reshape(-1)[places]


# ── differences ─────────────────────────────────────────────────────────────────────────────────


@composite(np.diff)
def diff(a: Values, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Give the differences of neighbours, n times."""
    a = as_tensor(a)
    ends = [(prepend, 0), (append, 1)]
    for value, last in ends:
        if value is not None:
            value = as_tensor(value)
            if value.ndim == 0:
                shape = list(a.shape)
                shape[axis] = 1
                value = broadcast_to(value, tuple(shape))
            a = np.concatenate([a, value] if last else [value, a], axis=axis)
    before = (slice(None),) * (axis % a.ndim)
    for _ in range(n):
        a = a[(*before, slice(1, None))] - a[(*before, slice(None, -1))]
    return a


@composite(np.gradient)
def gradient(f: Any, *spacing: float, axis: int | tuple[int, ...] | None = None) -> Any:
    """Give the slope by second order differences, first order at the ends, along each axis."""
    f = as_tensor(f)
    axes = range(f.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    steps = spacing * len(axes) if len(spacing) == 1 else spacing or (1.0,) * len(axes)
    if len(steps) != len(axes) or not all(np.ndim(step) == 0 for step in steps):
        raise TypeError("gradient() on Tensors takes one number per axis as spacing")
    slopes = [_slope(f, step, i % f.ndim) for step, i in zip(steps, axes, strict=True)]
    return slopes[0] if len(slopes) == 1 else tuple(slopes)


def _slope(f: Any, step: float, axis: int) -> Any:
    """Differences over two steps inside, over one at the ends."""
    if f.shape[axis] < 2:
        raise ValueError("gradient() needs at least two elements along an axis")
    before = (slice(None),) * axis
    inner = (f[(*before, slice(2, None))] - f[(*before, slice(None, -2))]) / (2 * step)
    edges = diff(f, axis=axis) / step
    first, last = edges[(*before, slice(None, 1))], edges[(*before, slice(-1, None))]
    return np.concatenate([first, inner, last], axis=axis)


@composite(np.ediff1d)
def ediff1d(ary: Values) -> Any:
    """Give the differences of neighbours of the flattened array."""
    return diff(ravel(ary))


# Methods whose arguments are written otherwise than those of the functions of the same name.
_METHODS: dict[str, Any] = {
    "reshape": _reshape,
    "transpose": _method_transpose,
    "flatten": _flatten,
    "T": property(lambda self: transpose.apply((self,), {})),
    "mT": property(lambda self: matrix_transpose(self)),
    "real": property(lambda self: np.real(self)),
    "imag": property(lambda self: np.imag(self)),
}
for _name, _method in _METHODS.items():
    setattr(Methods, _name, _method)
