"""Rows of tables: padding, ranges, bags."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd.autograd as ag


def leaf(*shape: int) -> ag.Tensor:
    return ag.randn(*shape, generator=np.random.default_rng(0), requires_grad=True)


def test_the_padding_row_is_read_but_gets_no_gradient():
    table = leaf(3, 2)
    y = ag.embedding(np.array([0, 1, 1]), table, padding_idx=1)
    np.testing.assert_array_equal(y.data[1], table.data[1])
    y.sum().backward()
    assert table.grad.tolist() == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("rows", [[0, 3], [-1]])
def test_rows_outside_the_table_are_an_index_error(rows: list[int]):
    with pytest.raises(IndexError):
        ag.embedding(np.array(rows), leaf(3, 2))


def test_rows_must_be_whole_numbers():
    with pytest.raises(TypeError, match="integers"):
        ag.embedding(np.array([0.5]), leaf(3, 2))


def test_repeated_rows_add_up_in_small_and_large_batches():
    for size in (5, 500):
        table = leaf(4, 2)
        rows = np.arange(size) % 4
        ag.embedding(rows, table).sum().backward()
        np.testing.assert_array_equal(table.grad.data[:, 0], np.bincount(rows, minlength=4))


def test_bags_may_be_empty():
    table = leaf(3, 2)
    for mode in ("sum", "mean", "max"):
        y = ag.embedding_bag(np.array([1, 2]), table, np.array([0, 0, 2]), mode=mode)
        assert y.shape == (3, 2)
        assert not y.data[0].any()
        assert not y.data[2].any()
    assert ag.embedding_bag(np.array([], int), table, np.array([0]), mode="max").shape == (1, 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "median"}, "mode"),
        ({"offsets": [1, 2]}, "offsets"),
        ({"offsets": [0, 9]}, "offsets"),
        ({"offsets": [0, 2, 1]}, "offsets"),
        ({"offsets": None}, "offsets"),
        ({"mode": "mean", "per_sample_weights": np.ones(3)}, "per_sample_weights"),
        ({"mode": "sum", "per_sample_weights": np.ones(2)}, "per_sample_weights"),
    ],
)
def test_bags_refuse_what_makes_no_sense(options: dict[str, object], error: str):
    given = {"offsets": [0, 1]} | options
    with pytest.raises(ValueError, match=error):
        ag.embedding_bag(np.array([0, 1, 2]), leaf(3, 2), **given)
