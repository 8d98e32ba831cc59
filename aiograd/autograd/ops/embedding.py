"""Rows of a table by number: embedding, and bags of them summed, averaged or maximised.

The gradient of a table is zero almost everywhere. `row_gradient` is the one place where it is
built, from the numbers of the rows and the gradient of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.op import Op, op
from aiograd.autograd.ops.table import as_tensor, composite
from aiograd.autograd.sparse import sparse_rows
from aiograd.autograd.tensor import Tensor, wrap


def add_rows(values: Any, rows: Any, shape: tuple[int, ...]) -> Any:
    """Return zeros of `shape` with values added to rows; rows that occur again add up."""
    total = np.zeros(shape, values.dtype)
    rows = rows.reshape(-1)
    values = values.reshape(len(rows), *shape[1:])
    # For a few rows a Python loop is faster than sorting them. `np.add.at` would be right for any
    # number, and is slower than both.
    if len(rows) < 32:
        for row, value in zip(rows.tolist(), values, strict=True):
            total[row] += value
        return total
    order = np.argsort(rows, kind="stable")  # equal rows side by side, summed in one go
    ordered = rows[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    total[ordered[starts]] = np.add.reduceat(values[order], starts, axis=0)
    return total


def row_gradient(values: Any, rows: Any, shape: tuple[int, ...], sparse: bool) -> Any:
    """Return the gradient of a table of `shape` of which `rows` were read, dense or row-sparse."""
    if sparse:
        return sparse_rows(values, rows, shape)
    return _added_rows.of(values, rows=rows, shape=shape)


_added_rows: Op = op(
    "added_rows",
    add_rows,
    lambda g, y, values, rows=None, shape=None: g[rows].reshape(values.shape),
)


def _row_numbers(input: Values, size: int) -> Any:
    """Return row numbers as integers, copied; raise IndexError for rows that do not exist."""
    rows = np.asarray(input.raw if isinstance(input, Tensor) else input)
    if rows.dtype.kind not in "iu" and rows.size:
        raise TypeError(f"rows are picked by integers, not {rows.dtype}")
    # A copy in any case: backward reads it, and the caller may use its array for the next batch.
    rows = rows.astype(np.intp, copy=True)
    # A negative number would silently pick a row from the end.
    if rows.size and (rows.min() < 0 or rows.max() >= size):
        raise IndexError(f"a row lies outside 0 … {size - 1}")
    return rows


def _embedding(
    g: Array,
    y: Array,
    weight: Array,
    rows: Any = None,
    padding_idx: int | None = None,
    sparse: bool = False,
) -> Any:
    """The gradient of the rows that were read; none for the padding row."""
    if padding_idx is not None:
        g = g * (rows != padding_idx)[..., None]
    return row_gradient(g, rows, weight.shape, sparse)


_embedding_op: Op = op(
    "embedding",
    lambda weight, rows, padding_idx=None, sparse=False: weight[rows],
    _embedding,
)


@composite()
def embedding(
    input: Values, weight: Values, padding_idx: int | None = None, sparse: bool = False
) -> Any:
    """Pick rows of `weight` by number; the row `padding_idx` gets no gradient.

    >>> ag.embedding([1, 0], ag.eye(2)).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    weight = as_tensor(weight)
    rows = _row_numbers(input, weight.shape[0])
    # Row numbers are never negative, so it could not be found among them.
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _embedding_op(weight, rows=rows, padding_idx=padding_idx, sparse=sparse)


# ── bags ────────────────────────────────────────────────────────────────────────────────────────


def _sum_bags(rows_of: Any, bags: Any, count: int) -> Any:
    """Sum the picked rows of each bag; `bags` is ascending."""
    total = np.zeros((count, *rows_of.shape[1:]), rows_of.dtype)
    # `reduceat` needs at least one start, and gives a wrong sum for an empty run; empty bags stay
    # zero because only bags that occur are written.
    if len(bags):
        starts = np.flatnonzero(np.concatenate([[True], bags[1:] != bags[:-1]]))
        total[bags[starts]] = np.add.reduceat(rows_of, starts, axis=0)
    return total


_summed_bags: Op = op(
    "summed_bags", _sum_bags, lambda g, y, rows_of, bags=None, count=0: np.take(g, bags, axis=0)
)


def _max_bags(picked: Any, bags: Any, count: int) -> Any:
    """Return for each bag and column the position of the largest row, -1 in an empty bag."""
    best = np.full((count, picked.shape[1]), -1, dtype=np.intp)
    ends = np.searchsorted(bags, np.arange(count + 1))
    for bag in np.flatnonzero(np.diff(ends)):
        start = ends[bag]
        best[bag] = start + np.argmax(picked[start : ends[bag + 1]], axis=0)
    return best


@composite()
def embedding_bag(
    input: Values,
    weight: Values,
    offsets: Any = None,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    padding_idx: int | None = None,
) -> Any:
    """Sum, average or maximise the rows of each bag.

    A matrix holds one bag per row; a vector is cut into bags that start at `offsets`.

        >>> ag.embedding_bag([[0, 1]], ag.eye(2), mode="sum").tolist()
        [[1.0, 1.0]]
    """
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode must be 'sum', 'mean' or 'max', not {mode!r}")
    weight = as_tensor(weight)
    rows = _row_numbers(input, weight.shape[0])
    bags, count = _bags(rows, offsets)
    factors = None if per_sample_weights is None else as_tensor(per_sample_weights)
    if factors is not None and mode != "sum":
        raise ValueError("per_sample_weights only go with mode='sum'")
    if factors is not None and factors.shape != rows.shape:
        raise ValueError(
            f"per_sample_weights {factors.shape} and input {rows.shape} differ in shape"
        )
    flat = rows.reshape(-1)
    factors = None if factors is None else factors.reshape(-1)
    if padding_idx is not None:
        # Dropped before the lookup, so that they count neither in a mean nor in a maximum.
        real = np.flatnonzero(flat != padding_idx % weight.shape[0])
        flat, bags = flat[real], bags[real]
        factors = None if factors is None else factors[real]
    picked = _embedding_op(weight, rows=flat, sparse=sparse)
    if mode == "max":
        # The positions are found on plain arrays; taking the elements there is what has the
        # gradient.
        best = _max_bags(picked.raw, bags, count)
        if not len(flat):
            return wrap(np.zeros((count, weight.shape[1]), weight.dtype))
        largest = np.take_along_axis(picked, np.maximum(best, 0), axis=0)
        return np.where(best < 0, 0, largest)
    if factors is not None:
        picked = picked * factors[:, None]
    total = _summed_bags(picked, bags=bags, count=count)
    if mode == "sum":
        return total
    sizes = np.maximum(np.bincount(bags, minlength=count), 1)[:, None]
    return total / sizes.astype(weight.dtype)


def _bags(rows: Any, offsets: Any) -> tuple[Any, int]:
    """Return the bag of every row number, and the number of bags."""
    if rows.ndim == 2:
        if offsets is not None:
            raise ValueError("offsets are for a vector of row numbers; a matrix has a bag per row")
        return np.repeat(np.arange(rows.shape[0]), rows.shape[1]), rows.shape[0]
    if rows.ndim != 1:
        raise ValueError(f"row numbers come as a vector or matrix, not with {rows.ndim} axes")
    if offsets is None:
        raise ValueError("a vector of row numbers needs offsets")
    starts = np.asarray(offsets.raw if isinstance(offsets, Tensor) else offsets)
    if starts.ndim != 1 or (starts.size and (starts[0] != 0 or starts.max() > len(rows))):
        raise ValueError("offsets are a vector that starts with 0 and stays within the input")
    if (np.diff(starts) < 0).any():
        raise ValueError("offsets must not decrease")
    return np.searchsorted(starts, np.arange(len(rows)), side="right") - 1, len(starts)
