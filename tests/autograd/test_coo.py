"""The raw sparse array."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiograd.autograd.coo import Coo


@st.composite
def arrays(draw: Any, sparse_dim: int | None = None) -> Coo:
    """Any sparse array of shape (3, 4, 2), with repeated and unordered positions."""
    shape = (3, 4, 2)
    dims = draw(st.integers(1, 3)) if sparse_dim is None else sparse_dim
    count = draw(st.integers(0, 7))
    columns = [draw(st.lists(st.integers(0, n - 1), min_size=count, max_size=count)) for n in shape]
    indices = np.array(columns[:dims], dtype=np.int64).reshape(dims, count)
    seed = draw(st.integers(0, 2**32 - 1))
    values = np.random.default_rng(seed).integers(-3, 4, (count, *shape[dims:])).astype(float)
    return Coo(indices, values, shape)


def reference(a: Coo) -> Any:
    dense = np.zeros(a.shape)
    np.add.at(dense, tuple(a.indices), a.values)
    return dense


@settings(max_examples=60, deadline=None)
@given(arrays(), arrays())
def test_arithmetic_equals_that_of_dense_arrays(a: Coo, b: Coo) -> None:
    x, y = reference(a), reference(b)
    for sparse, dense in [
        (a, x),
        (a.coalesce(), x),
        (a + b, x + y),
        (a - b, x - y),
        (a * b, x * y),
        (-a, -x),
        (2.0 * a, 2 * x),
        (a / 4.0, x / 4),
        (a * y, x * y),
        (y * a, x * y),
        (abs_of(a), np.abs(x)),
        (np.square(a), x * x),
        (a.fully_sparse(), x),
        (a.reshape(4, 6), x.reshape(4, 6)),
        (a.reshape(-1), x.reshape(-1)),
        (np.transpose(a), x.T),
        (np.swapaxes(a, 0, 2), np.swapaxes(x, 0, 2)),
        (np.stack([a, b], axis=1), np.stack([x, y], axis=1)),
        (np.stack([a, b], axis=-1), np.stack([x, y], axis=-1)),
        (np.zeros_like(a), np.zeros_like(x)),
    ]:
        assert isinstance(sparse, Coo)
        np.testing.assert_array_equal(sparse.to_dense(), dense)
    np.testing.assert_array_equal(a + y, x + y)
    np.testing.assert_array_equal(y - a, y - x)


def abs_of(a: Coo) -> Any:
    return np.absolute(a)


@settings(max_examples=40, deadline=None)
@given(arrays(), st.sampled_from([None, 0, 1, 2, -1, (0, 1), (1, 2), (0, 1, 2)]), st.booleans())
def test_sums_equal_those_of_dense_arrays(a: Coo, axis: Any, keepdims: bool) -> None:
    total = a.sum(axis, keepdims=keepdims)
    dense = total.to_dense() if isinstance(total, Coo) else total
    np.testing.assert_array_equal(dense, reference(a).sum(axis=axis, keepdims=keepdims))


@settings(max_examples=40, deadline=None)
@given(
    arrays(),
    st.sampled_from(
        [..., 1, -1, slice(1, 3), (slice(None), 2), (..., 1), (0, slice(None, None, 2)), (1, 2, 1)]
    ),
)
def test_basic_indexing_equals_that_of_dense_arrays(a: Coo, index: Any) -> None:
    picked = a[index]
    dense = picked.to_dense() if isinstance(picked, Coo) else picked
    np.testing.assert_array_equal(dense, reference(a)[index])


@settings(max_examples=40, deadline=None)
@given(arrays(sparse_dim=2), arrays(sparse_dim=2))
def test_values_at_positions_are_found_and_zero_elsewhere(a: Coo, b: Coo) -> None:
    np.testing.assert_array_equal(a.at(b.indices), reference(a)[tuple(b.indices)])


def test_a_dense_sum_takes_sparse_addends_in_place() -> None:
    total = np.ones((3, 2))
    before = total
    total += Coo(np.array([[0, 2, 0]]), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), (3, 2))
    assert total is before
    np.testing.assert_array_equal(total, [[7, 9], [1, 1], [4, 5]])


def test_a_long_sum_stays_small() -> None:
    addend = Coo(np.array([[0, 1]]), np.ones((2, 3)), (10, 3))
    total: Any = addend
    for _ in range(1000):
        total = total + addend
        assert total.nnz <= 10
    assert total.to_dense()[0, 0] == 1001


def test_dtypes_are_kept_and_promoted_as_numpy_does() -> None:
    single = Coo(np.array([[0]]), np.ones(1, np.float32), (2,))
    double = Coo(np.array([[1]]), np.ones(1, np.float64), (2,))
    assert (single * 2.0).dtype == np.float32
    assert (single + double).dtype == np.float64
    assert single.astype(np.float64).dtype == np.float64
    assert single.to_dense().dtype == np.float32
    assert (single * 1j).real.dtype == np.float32


def test_attributes_are_those_of_an_array() -> None:
    a = Coo(np.array([[0, 4]]), np.ones((2, 3)), (5, 3))
    assert (a.shape, a.ndim, a.size, len(a), a.nnz, a.sparse_dim) == ((5, 3), 2, 15, 5, 2, 1)
    assert a.nbytes == 16 + 48
    assert a.is_sparse_array
    assert a.base is None


def test_a_large_one_is_shown_in_short() -> None:
    text = repr(Coo(np.arange(1000).reshape(1, -1), np.ones(1000), (1000,)))
    assert "..." in text
    assert len(text) < 300


def test_it_survives_pickle() -> None:
    a = Coo(np.array([[0, 2]]), np.ones((2, 3)), (3, 3), True)
    b = pickle.loads(pickle.dumps(a))
    assert b.coalesced
    np.testing.assert_array_equal(a.to_dense(), b.to_dense())


def test_what_has_no_meaning_is_refused() -> None:
    a = Coo(np.array([[0, 2]]), np.ones((2, 3)), (3, 3))
    other = Coo(np.array([[0]]), np.ones((1, 4)), (3, 4))
    with pytest.raises(ValueError, match="shapes"):
        a + other
    with pytest.raises(ValueError, match="shapes"):
        a * other
    with pytest.raises(TypeError):
        a / a
    with pytest.raises(TypeError):
        np.exp(a)  # would not be sparse
    with pytest.raises(IndexError):
        a[7]
    with pytest.raises(TypeError):
        a[[0, 1]]
