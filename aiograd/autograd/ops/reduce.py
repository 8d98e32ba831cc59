"""Sums, extremes, averages and running totals along axes."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from aiograd.autograd.ops.table import as_tensor, composite, conj, new_op, numpy_op, spread
from aiograd.autograd.tensor import Tensor

Axis = int | tuple[int, ...] | None


def kept(value: Any, axis: Axis, keepdims: Any, ndim: int) -> Any:
    """A reduced value with its reduced axes put back as ones, ready to broadcast."""
    if axis is None or keepdims or ndim == 0:
        return value
    return value.reshape(_ones_at(value.shape, axis, ndim))


def _ones_at(shape: tuple[int, ...], axis: Axis, ndim: int) -> tuple[int, ...]:
    axes = {i % ndim for i in ((axis,) if isinstance(axis, int | np.integer) else axis or ())}
    rest = iter(shape)
    return tuple([1 if i in axes else next(rest) for i in range(ndim)])


def count(shape: tuple[int, ...], axis: Axis) -> int:
    """How many elements are reduced into one."""
    if axis is None:
        return int(np.prod(shape, dtype=np.int64))
    axes = (axis,) if isinstance(axis, int | np.integer) else axis
    return int(np.prod([shape[i] for i in axes], dtype=np.int64))


# ── sums and averages ───────────────────────────────────────────────────────────────────────────


def _sum(
    g: Any, y: Any, a: Any, axis: Axis = None, dtype: Any = None, keepdims: Any = False
) -> Any:
    return spread(kept(g, axis, keepdims, a.ndim), a.shape)


def _mean(
    g: Any, y: Any, a: Any, axis: Axis = None, dtype: Any = None, keepdims: Any = False
) -> Any:
    share = kept(g, axis, keepdims, a.ndim) / count(a.shape, axis)
    return spread(share, a.shape)


def _var(
    g: Any, y: Any, a: Any, axis: Axis = None, ddof: float = 0, keepdims: Any = False,
    correction: float | None = None,
) -> Any:  # fmt: skip
    n = count(a.shape, axis) - (ddof if correction is None else correction)
    return kept(g, axis, keepdims, a.ndim) * ((a - a.mean(axis=axis, keepdims=True)) * (2 / n))


def _std(
    g: Any, y: Any, a: Any, axis: Axis = None, ddof: float = 0, keepdims: Any = False,
    correction: float | None = None,
) -> Any:  # fmt: skip
    return _var(g / (2 * y), None, a, axis, ddof, keepdims, correction)


def _sum_forward(a: Any, axis: Axis = None, **kwargs: Any) -> Any:
    return np.add.reduce(a, axis, **kwargs)  # what np.sum ends up with, without its way there


sum = numpy_op(np.sum, _sum, forward=_sum_forward)
mean = numpy_op(np.mean, _mean)
var = numpy_op(np.var, _var)
std = numpy_op(np.std, _std)


# ── extremes ────────────────────────────────────────────────────────────────────────────────────


def _extreme(g: Any, y: Any, a: Any, axis: Axis = None, keepdims: Any = False) -> Any:
    """The gradient goes to the extreme element, in even shares to all of them at a tie."""
    chosen = a == kept(y, axis, keepdims, a.ndim)
    ties = chosen.sum(axis=axis, keepdims=True, dtype=g.dtype)
    return chosen * (kept(g, axis, keepdims, a.ndim) / ties)


max = numpy_op(np.max, _extreme)
min = numpy_op(np.min, _extreme)
amax = numpy_op(np.amax, _extreme)
amin = numpy_op(np.amin, _extreme)


@composite(np.ptp)
def ptp(a: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Give the distance from the smallest to the largest element."""
    return max(a, axis=axis, keepdims=keepdims) - min(a, axis=axis, keepdims=keepdims)


# ── products ────────────────────────────────────────────────────────────────────────────────────


def _prod(
    g: Any, y: Any, a: Any, axis: Axis = None, dtype: Any = None, keepdims: Any = False
) -> Any:
    if np.all(a != 0):
        return kept(g * conj(y), axis, keepdims, a.ndim) / conj(a)
    return kept(g, axis, keepdims, a.ndim) * conj(_product_of_others(a, axis))


def _product_of_others(a: Any, axis: Axis) -> Any:
    """For each element the product of all others, exact beside zeros."""
    if axis is None:
        return _others_along_last(a.reshape(-1)).reshape(a.shape)
    axes = (axis,) if isinstance(axis, int | np.integer) else axis
    last = tuple(range(-len(axes), 0))
    moved = np.moveaxis(a, axes, last)
    flat = moved.reshape((*moved.shape[: a.ndim - len(axes)], -1))
    return np.moveaxis(_others_along_last(flat).reshape(moved.shape), last, axes)


def _others_along_last(a: Any) -> Any:
    one = np.ones((*a.shape[:-1], 1), a.dtype)
    before = np.concatenate([one, np.cumprod(a[..., :-1], axis=-1)], axis=-1)
    after = np.flip(np.cumprod(np.flip(a[..., 1:], -1), axis=-1), -1)
    return before * np.concatenate([after, one], axis=-1)


def _cumprod(g: Any, y: Any, a: Any, axis: int | None = None, dtype: Any = None) -> Any:
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


def _cumsum(g: Any, y: Any, a: Any, axis: int | None = None, dtype: Any = None) -> Any:
    if axis is None:
        return np.flip(np.cumsum(np.flip(g))).reshape(a.shape)
    return np.flip(np.cumsum(np.flip(g, axis), axis=axis), axis)


prod = numpy_op(np.prod, _prod)
cumprod = numpy_op(np.cumprod, _cumprod)
cumsum = numpy_op(np.cumsum, _cumsum)


# ── exponentials ────────────────────────────────────────────────────────────────────────────────


def _logsumexp_forward(a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    top = np.maximum.reduce(a, axis=axis, keepdims=True)
    if not isfinite(np.add.reduce(top, axis=None)):
        return _logsumexp_of_infinities(a, top, axis, keepdims)
    shifted = np.asarray(a - top)
    y = np.log(np.add.reduce(np.exp(shifted, out=shifted), axis=axis, keepdims=True))
    y += top
    return y if keepdims else y.squeeze(axis)


def _logsumexp_of_infinities(a: Any, top: Any, axis: Any, keepdims: Any) -> Any:
    top = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):  # all -inf: the logarithm of 0 is what is meant
        y = np.log(np.add.reduce(np.exp(a - top), axis=axis, keepdims=True)) + top
    return y if keepdims else np.squeeze(y, axis=axis)


def _logsumexp(g: Any, y: Any, a: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    share = np.exp(a - kept(y, axis, keepdims, a.ndim))
    return kept(g, axis, keepdims, a.ndim) * share


logsumexp = new_op("logsumexp", _logsumexp_forward, _logsumexp)


# ── made of others ──────────────────────────────────────────────────────────────────────────────


@composite(np.nansum)
def nansum(a: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Sum, taking nan for 0."""
    a = as_tensor(a)
    return sum(np.where(np.isnan(a), 0, a), axis=axis, keepdims=keepdims)


@composite(np.nanmean)
def nanmean(a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    """Average what is not nan."""
    a = as_tensor(a)
    known = np.add.reduce(~np.isnan(a.data), axis=axis, keepdims=keepdims)
    return nansum(a, axis=axis, keepdims=keepdims) / known.astype(a.dtype)


@composite(np.average)
def average(a: Any, axis: Axis = None, weights: Any = None, *, keepdims: bool = False) -> Any:
    """Average with weights, along one axis or over everything."""
    if weights is None:
        return mean(a, axis=axis, keepdims=keepdims)
    a, weights = as_tensor(a), as_tensor(weights)
    if weights.shape != a.shape:
        if not isinstance(axis, int) or weights.ndim != 1:
            raise TypeError("weights of another shape need one axis and must be a vector")
        weights = weights.reshape(_ones_at((weights.shape[0],), _others(axis, a.ndim), a.ndim))
    total = sum(weights * np.ones(a.shape, weights.dtype), axis=axis, keepdims=keepdims)
    return sum(a * weights, axis=axis, keepdims=keepdims) / total


def _others(axis: int, ndim: int) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if i != axis % ndim)


@composite(np.quantile)
def quantile(a: Any, q: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Give the value below which a share `q` of the elements lies, interpolating linearly."""
    a, q = as_tensor(a), np.asarray(q, dtype=np.float64)
    where = 0 if axis is None else axis
    ordered = np.sort(a.reshape(-1) if axis is None else a, axis=where)
    place = q * (ordered.shape[where] - 1)
    low = np.floor(place).astype(np.intp)
    share = (place - low).astype(a.dtype)
    share = share.reshape(share.shape + (1,) * (ordered.ndim - 1))
    lower = np.moveaxis(np.take(ordered, low.reshape(-1), axis=where), where, 0)
    above = np.minimum(low + 1, ordered.shape[where] - 1)
    upper = np.moveaxis(np.take(ordered, above.reshape(-1), axis=where), where, 0)
    lower, upper = (x.reshape(q.shape + x.shape[1:]) for x in (lower, upper))
    result: Tensor = lower + (upper - lower) * share
    if not keepdims:
        return result
    return result.reshape(q.shape + _ones_at(result.shape[q.ndim :], _all(axis, a.ndim), a.ndim))


def _all(axis: int | None, ndim: int) -> Axis:
    return tuple(range(ndim)) if axis is None else axis


@composite(np.percentile)
def percentile(a: Any, q: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Give the value below which `q` percent of the elements lie."""
    return quantile(a, np.asarray(q) / 100, axis=axis, keepdims=keepdims)


@composite(np.median)
def median(a: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Give the middle element, or the mean of the two in the middle."""
    return quantile(a, 0.5, axis=axis, keepdims=keepdims)


@composite(np.trapezoid)
def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    """Integrate along an axis by trapezoids."""
    y = as_tensor(y)
    steps: Any = dx
    if x is not None:
        x = as_tensor(x)
        steps = np.diff(x, axis=axis if x.ndim > 1 else 0)
        if x.ndim == 1:
            steps = steps.reshape(_ones_at((steps.size,), _others(axis, y.ndim), y.ndim))
    y = np.moveaxis(y, axis, -1)
    steps = np.moveaxis(steps, axis, -1) if x is not None else steps
    return (steps * ((y[..., 1:] + y[..., :-1]) / 2)).sum(axis=-1)
