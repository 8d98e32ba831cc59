"""Statistics made of sums and sorting: no rules of their own, so any derivative is right for free.

What has no gradient (numbers of elements, positions) is computed on plain arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.autograd.array import Values
from aiograd.autograd.ops.reduce import Axis, count, max, mean, min, ones_at, prod, sum
from aiograd.autograd.ops.table import as_tensor, composite
from aiograd.autograd.tensor import Tensor

# ── beside nan ──────────────────────────────────────────────────────────────────────────────────


@composite(np.nansum)
def nansum(a: Values, axis: Axis = None, keepdims: bool = False) -> Any:
    """Sum, taking nan for 0."""
    a = as_tensor(a)
    # `where` gives the replaced elements a gradient of zero, and never multiplies nan by it.
    return sum(np.where(np.isnan(a), 0, a), axis=axis, keepdims=keepdims)


@composite(np.nanmean)
def nanmean(a: Values, axis: Any = None, keepdims: Any = False) -> Any:
    """Average what is not nan."""
    a = as_tensor(a)
    # How many there are has no gradient.
    known = np.add.reduce(~np.isnan(a.raw), axis=axis, keepdims=keepdims)
    return nansum(a, axis=axis, keepdims=keepdims) / known.astype(a.dtype)


@composite(np.nanprod)
def nanprod(a: Values, axis: Axis = None, keepdims: bool = False) -> Any:
    """Multiply, taking nan for 1."""
    a = as_tensor(a)
    return prod(np.where(np.isnan(a), 1, a), axis=axis, keepdims=keepdims)


@composite(np.nanmax)
def nanmax(a: Values, axis: Axis = None, keepdims: bool = False) -> Any:
    """Give the largest element that is not nan."""
    a = as_tensor(a)
    return max(np.where(np.isnan(a), -np.inf, a), axis=axis, keepdims=keepdims)


@composite(np.nanmin)
def nanmin(a: Values, axis: Axis = None, keepdims: bool = False) -> Any:
    """Give the smallest element that is not nan."""
    a = as_tensor(a)
    return min(np.where(np.isnan(a), np.inf, a), axis=axis, keepdims=keepdims)


@composite(np.nanvar)
def nanvar(a: Values, axis: Any = None, ddof: float = 0, keepdims: Any = False) -> Any:
    """Give the variance of what is not nan."""
    a = as_tensor(a)
    known = np.add.reduce(~np.isnan(a.raw), axis=axis, keepdims=keepdims)
    away = a - nanmean(a, axis=axis, keepdims=True)
    squares = nansum(np.real(away * np.conj(away)), axis=axis, keepdims=keepdims)
    return squares / (known - ddof).astype(squares.dtype)


@composite(np.nanstd)
def nanstd(a: Values, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
    """Give the standard deviation of what is not nan."""
    return np.sqrt(nanvar(a, axis=axis, ddof=ddof, keepdims=keepdims))


# ── averages and order ──────────────────────────────────────────────────────────────────────────


@composite(np.average)
def average(a: Values, axis: Axis = None, weights: Any = None, *, keepdims: bool = False) -> Any:
    """Average with weights, along one axis or over everything."""
    if weights is None:
        return mean(a, axis=axis, keepdims=keepdims)
    a, weights = as_tensor(a), as_tensor(weights)
    if weights.shape != a.shape:
        if not isinstance(axis, int) or weights.ndim != 1:
            raise TypeError("weights of another shape need one axis and must be a vector")
        weights = weights.reshape(ones_at((weights.shape[0],), _others(axis, a.ndim), a.ndim))
    # Weights may broadcast; each element counts with its own.
    total = sum(weights * np.ones(a.shape, weights.dtype), axis=axis, keepdims=keepdims)
    return sum(a * weights, axis=axis, keepdims=keepdims) / total


def _others(axis: int, ndim: int) -> tuple[int, ...]:
    """Return all axes but one."""
    return tuple(i for i in range(ndim) if i != axis % ndim)


@composite(np.quantile)
def quantile(a: Values, q: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Give the value below which a share `q` of the elements lies, interpolating linearly."""
    a, q = as_tensor(a), np.asarray(q, dtype=np.float64)
    where = 0 if axis is None else axis
    ordered = np.sort(a.reshape(-1) if axis is None else a, axis=where)
    # Between which two elements of the sorted array, and how far.
    place = q * (ordered.shape[where] - 1)
    low = np.floor(place).astype(np.intp)
    share = (place - low).astype(a.dtype)
    share = share.reshape(share.shape + (1,) * (ordered.ndim - 1))
    lower = np.moveaxis(np.take(ordered, low.reshape(-1), axis=where), where, 0)
    # The largest element has none above it; its share is zero.
    above = np.minimum(low + 1, ordered.shape[where] - 1)
    upper = np.moveaxis(np.take(ordered, above.reshape(-1), axis=where), where, 0)
    lower, upper = (x.reshape(q.shape + x.shape[1:]) for x in (lower, upper))
    result: Tensor = lower + (upper - lower) * share
    if not keepdims:
        return result
    return result.reshape(q.shape + ones_at(result.shape[q.ndim :], _all(axis, a.ndim), a.ndim))


def _all(axis: int | None, ndim: int) -> Axis:
    """Return all axes for None."""
    return tuple(range(ndim)) if axis is None else axis


@composite(np.percentile)
def percentile(a: Values, q: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Give the value below which `q` percent of the elements lie."""
    return quantile(a, np.asarray(q) / 100, axis=axis, keepdims=keepdims)


@composite(np.median)
def median(a: Values, axis: int | None = None, keepdims: bool = False) -> Any:
    """Give the middle element, or the mean of the two in the middle."""
    return quantile(a, 0.5, axis=axis, keepdims=keepdims)


# ── several variables ───────────────────────────────────────────────────────────────────────────


@composite(np.cov)
def cov(m: Values, *, rowvar: bool = True, bias: bool = False, ddof: float | None = None) -> Any:
    """Give the covariance matrix of variables, one per row (or column, without `rowvar`)."""
    m = np.atleast_2d(as_tensor(m))
    m = m if rowvar or m.shape[0] == 1 else m.T
    # `ddof` wins over `bias`, as in numpy.
    freedom = count(m.shape, 1) - ((0 if bias else 1) if ddof is None else ddof)
    away = m - mean(m, axis=1, keepdims=True)
    return np.squeeze(away @ np.conj(away).T / freedom)


@composite(np.corrcoef)
def corrcoef(x: Values, *, rowvar: bool = True) -> Any:
    """Give the correlation of variables, one per row (or column, without `rowvar`)."""
    table = cov(x, rowvar=rowvar)
    if table.ndim == 0:
        return table / table
    spread = np.sqrt(np.real(np.diagonal(table)))
    return table / spread[:, None] / spread[None, :]


@composite(np.trapezoid)
def trapezoid(y: Values, x: Values = None, dx: float = 1.0, axis: int = -1) -> Any:
    """Integrate along an axis by trapezoids."""
    y = as_tensor(y)
    steps: Any = dx
    if x is not None:
        x = as_tensor(x)
        steps = np.diff(x, axis=axis if x.ndim > 1 else 0)
        if x.ndim == 1:
            steps = steps.reshape(ones_at((steps.size,), _others(axis, y.ndim), y.ndim))
    y = np.moveaxis(y, axis, -1)
    steps = np.moveaxis(steps, axis, -1) if x is not None else steps
    return (steps * ((y[..., 1:] + y[..., :-1]) / 2)).sum(axis=-1)
