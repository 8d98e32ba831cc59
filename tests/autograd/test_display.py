"""What a notebook shows of a tensor."""

from __future__ import annotations

import re

import numpy as np
import pytest

import aiograd as ag


def cells(tensor: ag.Tensor) -> list[list[str]]:
    rows = re.findall(r"<tr.*?</tr>", tensor._repr_html_())
    return [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in rows]


def words(tensor: ag.Tensor) -> str:
    return re.sub(r"<table.*|<[^>]*>", "", tensor._repr_html_())


def test_the_title_says_what_it_is_and_where_it_comes_from():
    w = ag.zeros(2, 3, requires_grad=True)
    assert words(w) == "Tensor 2 × 3 · float64 · requires grad"
    assert words(ag.exp(w).sum()) == "Tensor scalar · float64 · made by sum"
    assert words(ag.nn.Parameter(np.zeros(2, np.float32))).startswith("Parameter 2 · float32")
    assert words(ag.zeros(0, 3)) == "Tensor 0 × 3 · float64"


def test_small_ones_are_shown_whole():
    assert cells(ag.tensor([[1.0, -2.5], [0.0, 1e-9]])) == [["1", "−2.5"], ["0", "1e−09"]]
    assert cells(ag.arange(3)) == [["0", "1", "2"]]
    assert cells(ag.tensor(7.0)) == [["7"]]
    assert cells(ag.tensor([True])) == [["True"]]
    assert cells(ag.tensor([1 + 2j])) == [["1+2j"]]


def test_the_middle_of_large_ones_is_left_out():
    shown = cells(ag.arange(10_000).reshape(100, 100))
    assert [len(row) for row in shown] == [9] * 9
    assert shown[0] == ["0", "1", "2", "3", "⋯", "96", "97", "98", "99"]
    assert shown[4] == ["⋯"] * 9
    assert shown[8][8] == "9999"


def test_of_more_than_two_axes_the_first_matrix_is_shown():
    assert cells(ag.arange(24).reshape(2, 2, 2, 3)) == [["0", "1", "2"], ["3", "4", "5"]]
    assert words(ag.zeros(2, 2, 2, 3)).endswith("[0, 0, :, :]")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_colour_and_takes_none_from_others(value):
    page = ag.tensor([value, 2.0])._repr_html_()
    assert re.findall(r"rgba\([^)]*\)", page) == ["rgba(76,114,176,0.45)"]


def test_sparse_ones_are_told_of():
    assert "sparse" in words(ag.sparse.to_sparse(ag.eye(3)))
