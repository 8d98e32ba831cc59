"""`ag.sparse`: Tensors of which only some entries are stored.

    t = ag.sparse.coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], (3, 3), requires_grad=True)
    ag.sparse.sum(t * t).backward()
    t.grad                                  # sparse as well

A sparse Tensor is a Tensor whose `data` is a `Coo` (see `coo.py`), and `+ - *`, `ag.stack` and the
other operations are the usual ones. What only makes sense for sparse tensors is here. Each of these
operations has its adjoint beside it, so derivatives of any order exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.autograd.coo import Coo
from aiograd.autograd.names.methods import Methods
from aiograd.autograd.op import Op, op
from aiograd.autograd.tensor import Tensor

__all__ = [
    "coalesce",
    "coo_tensor",
    "indices",
    "stack",
    "sum",
    "to_dense",
    "to_scipy",
    "to_sparse",
    "values",
]


def coo_tensor(
    indices: Any,
    values: Any,
    shape: Sequence[int] | None = None,
    requires_grad: bool = False,
    dtype: Any = None,
) -> Tensor:
    """Make a sparse tensor from coordinates, one column of `indices` per entry of `values`.

    A position given twice means the sum. `values` may have further dimensions, which are dense.
    Where `values` is a Tensor that requires grad, the result is made from it and gradients flow
    back to it.
    """
    raw = values.raw if isinstance(values, Tensor) else np.array(values, dtype=dtype)
    places = np.array(indices.raw if isinstance(indices, Tensor) else indices)
    places = _checked(places, raw, shape)
    if shape is None:
        shape = (*(int(n) + 1 for n in places.max(axis=1)), *raw.shape[1:])
    # Recorded, so that gradients reach the values; the result is then no leaf.
    if isinstance(values, Tensor) and values.requires_grad:
        made: Tensor = _from_values(values, indices=places, shape=tuple(shape))
        return made if dtype is None else made.astype(dtype)
    return Tensor(Coo(places, np.array(raw, dtype=dtype), tuple(shape)), requires_grad)


def _checked(places: Any, values: Any, shape: Sequence[int] | None) -> Any:
    """Return coordinates as a matrix of int64; raise ValueError if they do not fit."""
    # `[]` says nothing about the number of sparse dimensions; the shape does.
    if places.size == 0 and places.ndim < 2:
        places = places.reshape(len(shape) - values.ndim + 1 if shape is not None else 1, 0)
    places = places.reshape(1, -1) if places.ndim == 1 else places
    if places.ndim != 2 or (places.size and places.dtype.kind not in "iu"):
        raise ValueError("indices must be integers of shape (sparse dimensions, entries)")
    if values.ndim == 0 or values.shape[0] != places.shape[1]:
        raise ValueError(f"{places.shape[1]} indices but values of shape {values.shape}")
    if shape is None:
        if not places.size:
            raise ValueError("a sparse tensor without entries needs a shape")
    elif len(shape) != len(places) + values.ndim - 1:
        raise ValueError(
            f"shape {tuple(shape)} does not fit {len(places)} sparse "
            f"and {values.ndim - 1} dense dimensions"
        )
    elif tuple(shape[len(places) :]) != values.shape[1:]:
        raise ValueError(f"values of shape {values.shape} do not fit the shape {tuple(shape)}")
    # Without a shape it is computed from the largest index, which fits by itself.
    limits = np.inf if shape is None else np.array(shape[: len(places)]).reshape(-1, 1)
    if places.size and ((places < 0).any() or (places >= limits).any()):
        raise ValueError(f"an index lies outside of the shape {shape}")
    # One layout for all: messages send the memory as it is.
    return np.ascontiguousarray(places, dtype=np.int64)


# ── operations and their adjoints ───────────────────────────────────────────────────────────────


def _pattern(a: Any) -> Coo:
    pattern: Coo = a.raw if isinstance(a, Tensor) else a
    return pattern


def _spread(g: Any, pattern: Coo, axis: Any = None) -> Coo:
    """Adjoint of a sum: the total's gradient at every stored position, once."""
    # A position stored twice has one gradient, as the dense array would have.
    whole = pattern.coalesce()
    g = g.to_dense() if isinstance(g, Coo) else np.asarray(g)
    if axis is not None:
        axes = axis if isinstance(axis, Sequence) else (axis,)
        g = np.expand_dims(g, tuple(a % whole.ndim for a in axes))
    values = np.broadcast_to(g, whole.shape)[tuple(whole.indices)]
    return whole.with_values(np.ascontiguousarray(values))


def _at(a: Any, indices: Any) -> Any:
    """Gather values at positions; adjoint of `_from`."""
    return a.at(indices) if isinstance(a, Coo) else a[tuple(indices)]


def _mask(a: Any, pattern: Coo) -> Coo:
    return pattern.mask(a)


def _as_coo(a: Any) -> Coo:
    """Return the entries that are not zero, fully sparse."""
    if isinstance(a, Coo):
        return a
    a = np.asarray(a)
    places = np.array(np.nonzero(a))
    return Coo(places, a[tuple(places)], a.shape, True)


def _plain(a: Any) -> Any:
    return a.to_dense() if isinstance(a, Coo) else np.asarray(a)


def _total(a: Coo, axis: Any = None) -> Any:
    return np.asarray(a.sum()) if axis is None else a.sum(axis)


def _sum_rule(g: Any, y: Any, a: Any, axis: Any = None) -> Any:
    return _spread_op.of(g, pattern=_pattern(a), axis=axis)


def _spread_rule(g: Any, y: Any, a: Any, pattern: Coo, axis: Any) -> Any:
    return _sum.of(_masked.of(g, pattern=pattern), axis=axis)


def _to_dense_rule(g: Any, y: Any, a: Any) -> Any:
    return _masked.of(g, pattern=_pattern(a))


def _values_rule(g: Any, y: Any, a: Any) -> Any:
    return _from_values.of(g, indices=_pattern(a).indices, shape=_pattern(a).shape)


def _from_values_rule(g: Any, y: Any, a: Any, indices: Any, shape: Any) -> Any:
    return _gather.of(g, indices=indices)


def _gather_rule(g: Any, y: Any, a: Any, indices: Any) -> Any:
    return _from_values.of(g, indices=indices, shape=a.shape)


def _dense_rule(g: Any, y: Any, a: Any, pattern: Any = None) -> Any:
    return _to_dense.of(g)


def _from(a: Any, indices: Any, shape: Any) -> Coo:
    return Coo(indices, a, shape)


# fmt: off
# Each operation's adjoint is in the table too, so that rules are made of operations and derivatives
# of any order need nothing more.
#                         name              forward                  d/da
_sum:         Op = op("sparse.sum",       _total,                  _sum_rule)
_spread_op:   Op = op("sparse.spread",    _spread,                 _spread_rule)
_to_dense:    Op = op("sparse.to_dense",  _plain,                  _to_dense_rule)
_masked:      Op = op("sparse.mask",      _mask,                   _dense_rule)
_to_sparse:   Op = op("sparse.to_sparse", _as_coo,                 _dense_rule)
_coalesce:    Op = op("sparse.coalesce",  lambda a: a.coalesce(),  lambda g, y, a: g)
_values:      Op = op("sparse.values",    lambda a: a.values,      _values_rule)
_from_values: Op = op("sparse.coo",       _from,                   _from_values_rule)
_gather:      Op = op("sparse.gather",    _at,                     _gather_rule)
# fmt: on


def sum(tensor: Tensor, axis: Any = None) -> Tensor:
    """Add up the stored entries: to a number, or along `axis` to a sparse tensor.

    The gradient is sparse and has one entry for each position that is stored.
    """
    result: Tensor = _sum(_sparse(tensor), axis=axis)
    return result


def to_dense(tensor: Tensor) -> Tensor:
    """Return the tensor with its zeros; the gradient comes back at the stored positions."""
    result: Tensor = _to_dense(tensor)
    return result


def to_sparse(tensor: Any) -> Tensor:
    """Return the entries that are not zero as a sparse tensor.

    A scipy sparse matrix is taken with the entries it stores.
    """
    # Where scipy was not imported the argument cannot be one of its matrices.
    scipy_sparse = sys.modules.get("scipy.sparse")
    if scipy_sparse is not None and scipy_sparse.issparse(tensor):
        matrix = tensor.tocoo()
        return coo_tensor(np.array([matrix.row, matrix.col]), matrix.data, matrix.shape)
    result: Tensor = _to_sparse(tensor)
    return result


def to_scipy(tensor: Tensor) -> Any:
    """Return the value as a scipy sparse array; needs `import scipy.sparse` to have happened."""
    # Looked up, never imported: scipy is no dependency, and importing it takes long.
    scipy_sparse = sys.modules.get("scipy.sparse")
    if scipy_sparse is None:
        raise ImportError("import scipy.sparse before asking for one of its arrays")
    whole = _sparse(tensor).raw.fully_sparse()
    return scipy_sparse.coo_array((whole.values, tuple(whole.indices)), shape=whole.shape)


def coalesce(tensor: Tensor) -> Tensor:
    """Return the same tensor with every position stored once, in order."""
    result: Tensor = _coalesce(_sparse(tensor))
    return result


def indices(tensor: Tensor) -> Tensor:
    """Return where the entries are, as stored: (sparse dimensions, entries)."""
    return Tensor(_sparse(tensor).raw.indices)


def values(tensor: Tensor) -> Tensor:
    """Return the entries as stored, in the order of `indices`; differentiable."""
    result: Tensor = _values(_sparse(tensor))
    return result


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Stack sparse tensors along a new dimension."""
    result: Any = np.stack([_sparse(tensor) for tensor in tensors], axis=axis)
    return result if isinstance(result, Tensor) else Tensor(result)


def mask(tensor: Tensor, pattern: Coo) -> Tensor:
    """Return the entries of a dense tensor at the positions that are stored in `pattern`."""
    result: Tensor = _masked(tensor, pattern=pattern)
    return result


def sparse_rows(values: Any, rows: Any, shape: tuple[int, ...]) -> Any:
    """Make a row-sparse array, or Tensor, from rows by number: the gradient of a table."""
    places = np.asarray(rows, dtype=np.int64).reshape(1, -1)
    return _from_values.of(values.reshape(-1, *shape[1:]), indices=places, shape=tuple(shape))


def _sparse(tensor: Any) -> Tensor:
    """Return the tensor itself; raise TypeError if it is not sparse."""
    if not isinstance(tensor, Tensor) or not tensor.is_sparse:
        kind = f"a dense tensor of shape {tensor.shape}" if isinstance(tensor, Tensor) else tensor
        raise TypeError(f"a sparse tensor is needed here, not {kind!r}; see ag.sparse.to_sparse")
    return tensor


def _as_method(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def method(self: Tensor) -> Tensor:
        return function(self)

    method.__name__, method.__doc__ = function.__name__, function.__doc__
    return method


# Methods too, as in torch; attached from here, like all that can be done with a Tensor.
for _function in (to_dense, coalesce, indices, values):
    setattr(Methods, _function.__name__, _as_method(_function))
