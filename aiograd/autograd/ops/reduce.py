"""Sums, extremes, averages and running totals along axes."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.op import Op
from aiograd.autograd.ops.table import composite, conj, describe, new_op, numpy_op, spread

# `np.sum` and `np.max` end here, after some Python. Arguments by position (array, axis, dtype, out,
# keepdims) are read faster than by name.
_total: Any = np.add.reduce
_largest: Any = np.maximum.reduce

Axis = int | tuple[int, ...] | None


def kept(value: Any, axis: Axis, keepdims: Any, ndim: int) -> Any:
    """Return a reduced value with its reduced axes put back as ones, ready to broadcast."""
    # A single number broadcasts as it is.
    if axis is None or keepdims or ndim == 0:
        return value
    return value.reshape(ones_at(value.shape, axis, ndim))


def ones_at(shape: tuple[int, ...], axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return a reduced shape with ones at the axes that were reduced."""
    axes = {i % ndim for i in ((axis,) if isinstance(axis, int | np.integer) else axis or ())}
    rest = iter(shape)
    return tuple([1 if i in axes else next(rest) for i in range(ndim)])


def count(shape: tuple[int, ...], axis: Axis) -> int:
    """Return how many elements are reduced into one."""
    if axis is None:
        return int(np.prod(shape, dtype=np.int64))
    axes = (axis,) if isinstance(axis, int | np.integer) else axis
    return int(np.prod([shape[i] for i in axes], dtype=np.int64))


# ── sums and averages ───────────────────────────────────────────────────────────────────────────


def _sum(
    g: Array, y: Array, a: Array, axis: Axis = None, dtype: Any = None, keepdims: Any = False
) -> Any:
    """The gradient of the sum for each element, shown by strides of zero where it is large."""
    return spread(kept(g, axis, keepdims, a.ndim), a.shape)


def _mean(
    g: Array, y: Array, a: Array, axis: Axis = None, dtype: Any = None, keepdims: Any = False
) -> Any:
    """An even share for each element."""
    # Divided before it is spread: over the few results, not over all elements.
    share = kept(g, axis, keepdims, a.ndim) / count(a.shape, axis)
    return spread(share, a.shape)


def _var(
    g: Array, y: Array, a: Array, axis: Axis = None, ddof: float = 0, keepdims: Any = False,
    correction: float | None = None,
) -> Any:  # fmt: skip
    """Twice the distance from the mean, over the degrees of freedom."""
    n = count(a.shape, axis) - (ddof if correction is None else correction)
    # The variance of too few elements is not finite, and neither is its slope; torch agrees.
    twice = 2 / n if n > 0 else np.inf
    return kept(g, axis, keepdims, a.ndim) * ((a - a.mean(axis=axis, keepdims=True)) * twice)


def _std(
    g: Array, y: Array, a: Array, axis: Axis = None, ddof: float = 0, keepdims: Any = False,
    correction: float | None = None,
) -> Any:  # fmt: skip
    """The slope of the variance, through the root."""
    # Equal elements: the slope of the root is infinite there, torch takes zero.
    equal = y == 0
    slope = np.where(equal, 0, g / (2 * np.where(equal, 1, y)))
    return _var(slope, y, a, axis, ddof, keepdims, correction)


def _sum_forward(
    a: Array, axis: Axis = None, dtype: Any = None, keepdims: Any = False, **kwargs: Any
) -> Any:
    if kwargs:
        return np.sum(a, axis, dtype, keepdims=keepdims, **kwargs)
    return _total(a, axis, dtype, None, keepdims)


sum: Op = numpy_op(np.sum, _sum, forward=_sum_forward)
mean: Op = numpy_op(np.mean, _mean)
var: Op = numpy_op(np.var, _var)
std: Op = numpy_op(np.std, _std)


# ── extremes ────────────────────────────────────────────────────────────────────────────────────


def _extreme(g: Array, y: Array, a: Array, axis: Axis = None, keepdims: Any = False) -> Any:
    """The gradient goes to the extreme element, in even shares to all of them at a tie."""
    # Compared with the result, which costs less to save than the positions of all ties.
    chosen = a == kept(y, axis, keepdims, a.ndim)
    ties = chosen.sum(axis=axis, keepdims=True, dtype=g.dtype)
    return chosen * (kept(g, axis, keepdims, a.ndim) / ties)


max: Op = numpy_op(np.max, _extreme)
min: Op = numpy_op(np.min, _extreme)
amax: Op = numpy_op(np.amax, _extreme)
amin: Op = numpy_op(np.amin, _extreme)


@composite(np.ptp)
def ptp(a: Values, axis: Axis = None, keepdims: bool = False) -> Any:
    """Give the distance from the smallest to the largest element."""
    return max(a, axis=axis, keepdims=keepdims) - min(a, axis=axis, keepdims=keepdims)


# ── products ────────────────────────────────────────────────────────────────────────────────────


def _prod(
    g: Array, y: Array, a: Array, axis: Axis = None, dtype: Any = None, keepdims: Any = False
) -> Any:
    """The product of the others, by division where no element is zero."""
    if np.all(a != 0):
        return kept(g * conj(y), axis, keepdims, a.ndim) / conj(a)
    return kept(g, axis, keepdims, a.ndim) * conj(_product_of_others(a, axis))


def _product_of_others(a: Array, axis: Axis) -> Any:
    """Return for each element the product of all others, exact beside zeros."""
    if axis is None:
        return _others_along_last(a.reshape(-1)).reshape(a.shape)
    axes = (axis,) if isinstance(axis, int | np.integer) else axis
    last = tuple(range(-len(axes), 0))
    moved = np.moveaxis(a, axes, last)
    flat = moved.reshape((*moved.shape[: a.ndim - len(axes)], -1))
    return np.moveaxis(_others_along_last(flat).reshape(moved.shape), last, axes)


def _others_along_last(a: Array) -> Any:
    """Multiply what is before and what is after each element: no division."""
    one = np.ones((*a.shape[:-1], 1), a.dtype)
    before = np.concatenate([one, np.cumprod(a[..., :-1], axis=-1)], axis=-1)
    after = np.flip(np.cumprod(np.flip(a[..., 1:], -1), axis=-1), -1)
    return before * np.concatenate([after, one], axis=-1)


def _cumprod(g: Array, y: Array, a: Array, axis: int | None = None, dtype: Any = None) -> Any:
    """By division where no element is zero, else by the recurrence from the end."""
    if axis is None:
        return _cumprod(g, y, a.reshape(-1), 0).reshape(a.shape)
    if np.all(a != 0):
        return np.flip(np.cumsum(np.flip(g * conj(y), axis), axis=axis), axis) / conj(a)
    a, g = np.moveaxis(a, axis, 0), np.moveaxis(g, axis, 0)
    before = np.concatenate([np.ones((1, *a.shape[1:]), a.dtype), np.cumprod(a[:-1], axis=0)])
    rest = [g[-1]]  # rest[k] = g[k] + a[k+1] * rest[k+1], from the end
    for k in range(a.shape[0] - 2, -1, -1):
        rest.append(g[k] + conj(a[k + 1]) * rest[-1])
    return np.moveaxis(conj(before) * np.stack(rest[::-1]), 0, axis)


def _cumsum(g: Array, y: Array, a: Array, axis: int | None = None, dtype: Any = None) -> Any:
    """An element counts in its own total and all later ones."""
    if axis is None:
        return np.flip(np.cumsum(np.flip(g))).reshape(a.shape)
    return np.flip(np.cumsum(np.flip(g, axis), axis=axis), axis)


prod: Op = numpy_op(np.prod, _prod)
cumprod: Op = numpy_op(np.cumprod, _cumprod)
cumsum: Op = numpy_op(np.cumsum, _cumsum)


# ── exponentials ────────────────────────────────────────────────────────────────────────────────


def _logsumexp_forward(a: Array, axis: Any = None, keepdims: Any = False) -> Any:
    top = _largest(a, axis, None, None, True)
    # One test of one number. A sum that overflows without an infinity in it takes the careful way
    # too, which gives the same.
    if not isfinite(abs(_total(top, None))):
        return _logsumexp_of_infinities(a, top, axis, keepdims)
    # Shifted by the largest, so that no exponential overflows and one of them is 1.
    shifted = np.asarray(a - top)
    y = np.log(_total(np.exp(shifted, shifted), axis, None, None, True))
    y += top
    return y if keepdims else y.squeeze(axis)


def _logsumexp_of_infinities(a: Array, top: Any, axis: Any, keepdims: Any) -> Any:
    """An infinite maximum must not be subtracted from itself."""
    top = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):  # all -inf: the logarithm of 0 is what is meant
        y = np.log(np.add.reduce(np.exp(a - top), axis=axis, keepdims=True)) + top
    return y if keepdims else np.squeeze(y, axis=axis)


def _logsumexp(g: Array, y: Array, a: Array, axis: Axis = None, keepdims: bool = False) -> Any:
    """The softmax, from the result alone."""
    share = np.exp(a - kept(y, axis, keepdims, a.ndim))
    return kept(g, axis, keepdims, a.ndim) * conj(share)


logsumexp: Op = new_op("logsumexp", _logsumexp_forward, _logsumexp)

describe(
    {
        "logsumexp": """Give the logarithm of the sum of exponentials along axes, without overflow.

        >>> round(float(ag.logsumexp(ag.zeros(4))), 4)
        1.3863
    """,
    }
)
