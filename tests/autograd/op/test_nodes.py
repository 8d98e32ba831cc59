"""Saved values: writes in between are noticed, arrays are those of the time."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.errors import GradError


def leaf(*values: float) -> ag.Tensor:
    return ag.tensor(values or (1.0, 2.0, 3.0), requires_grad=True)


@pytest.mark.parametrize(
    "compute",
    [lambda w, x: w * x, lambda w, x: x / w, lambda w, x: ag.exp(w * x), lambda w, x: x**w],
)
def test_a_changed_value_that_backward_needs_is_an_error(compute):
    w, x = ag.tensor([2.0]), leaf(3.0)
    y = compute(w, x).sum()
    w += 1
    with pytest.raises(GradError) as caught:
        y.backward()
    assert caught.value.reason == "modified"


def test_a_changed_result_that_backward_needs_is_an_error():
    x = leaf()
    y = ag.exp(x)
    total = y.sum()
    with ag.no_grad():
        y += 1
    with pytest.raises(GradError) as caught:
        total.backward()
    assert caught.value.reason == "modified"
    assert "exp" in str(caught.value)


def test_a_changed_value_that_backward_does_not_need_is_fine():
    x = leaf()
    y = x + 1
    total = y.sum()
    with ag.no_grad():
        y += 1
    total.backward()
    assert x.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.detach(),
        lambda t: t[:2],
        lambda t: t.reshape(1, 3),
        lambda t: t.T,
        lambda t: t.real,
        lambda t: t.squeeze(),
        lambda t: t.ravel(),
    ],
)
def test_a_write_through_a_view_counts_for_the_tensor(view):
    w, x = ag.tensor([1.0, 2.0, 3.0]), leaf()
    total = (w * x).sum()
    shown = view(w)
    with ag.no_grad():
        shown += 1
    with pytest.raises(GradError) as caught:
        total.backward()
    assert caught.value.reason == "modified"


def test_a_write_into_the_tensor_counts_for_its_views():
    w, x = ag.tensor([1.0, 2.0, 3.0]), leaf(1.0, 1.0)
    total = (w[:2] * x).sum()
    w += 1
    with pytest.raises(GradError) as caught:
        total.backward()
    assert caught.value.reason == "modified"


def test_a_write_before_use_does_no_harm():
    w, x = ag.tensor([1.0]), leaf(3.0)
    w += 1
    (w * x).sum().backward()
    assert x.grad.tolist() == [2.0]


def test_a_result_that_shows_memory_written_to_before_does_no_harm():
    shown = ag.op("shown", lambda a: a[:], lambda g, y, a: g * y)
    x = leaf()
    with ag.no_grad():
        x += 1
    shown(x).sum().backward()
    assert x.grad.tolist() == [2, 3, 4]


@pytest.mark.parametrize("changed", ["argument", "result"])
def test_a_second_derivative_notices_writes_to_what_the_first_one_saved(changed):
    x = leaf()
    h = x * 2
    y = ag.exp(h * h)
    (slope,) = ag.grad(y.sum(), x, create_graph=True)
    with ag.no_grad():
        (h if changed == "argument" else y)[...] = 0
    with pytest.raises(GradError) as caught:
        slope.sum().backward()
    assert caught.value.reason == "modified"


def test_a_graph_keeps_the_array_that_a_leaf_had():
    x, w = leaf(), leaf(2.0, 2.0, 2.0)
    total = (x * w).sum()
    w.data = np.full(3, 7.0)  # what an optimiser does while a graph needs the old one
    total.backward()
    assert x.grad.tolist() == [2, 2, 2]
    (slope,) = ag.grad((x * w * w).sum(), x, create_graph=True)
    w.data = np.zeros(3)
    (second,) = ag.grad(slope.sum(), w)
    assert second.tolist() == [14, 14, 14]
