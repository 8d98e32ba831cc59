"""Gradients that are the same along an axis are multiplied once, and rightly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd.backward import grad
from aiograd.autograd.ops import zero_stride
from aiograd.autograd.sweep import Sweep
from aiograd.nn.functional import linear

ROWS, INNER, COLUMNS = 70, 80, 90
PATTERNS = list(itertools.product((False, True), repeat=2))  # equal rows? equal columns?


def whole(*shape: int, dtype: str = "float64") -> np.ndarray:
    """Numbers of which every sum and product is exact."""
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(dtype)


def repeated(*shape: int, rows: bool, columns: bool, dtype: str = "float64") -> np.ndarray:
    small = whole(*shape[:-2], 1 if rows else shape[-2], 1 if columns else shape[-1], dtype=dtype)
    return np.broadcast_to(small, shape)


@pytest.mark.parametrize(("rows", "columns"), PATTERNS)
@pytest.mark.parametrize("stack", [(), (3,)])
def test_a_product_with_a_repeated_array_is_the_product(stack, rows, columns):
    a, b = whole(*stack, ROWS, INNER), whole(*stack, INNER, COLUMNS)
    left = repeated(*stack, ROWS, INNER, rows=rows, columns=columns)
    right = repeated(*stack, INNER, COLUMNS, rows=rows, columns=columns)
    assert np.array_equal(zero_stride.product(left, b), left.copy() @ b)
    assert np.array_equal(zero_stride.product(a, right), a @ right.copy())
    assert np.array_equal(zero_stride.product(left, right), left.copy() @ right.copy())


def test_equal_rows_stay_equal_rows_and_cost_one():
    g = repeated(ROWS, INNER, rows=True, columns=False)
    result = zero_stride.product(g, whole(INNER, COLUMNS))
    assert result.shape == (ROWS, COLUMNS)
    assert result.strides[0] == 0


def test_a_stack_with_one_batch_for_all_is_multiplied():
    a, b = np.broadcast_to(whole(1, ROWS, INNER), (3, ROWS, INNER)), whole(3, INNER, COLUMNS)
    assert np.array_equal(zero_stride.product(a, b), a.copy() @ b)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_types_are_those_of_the_plain_product(dtype):
    g, w = repeated(ROWS, INNER, rows=True, columns=True), whole(INNER, COLUMNS, dtype=dtype)
    expected = g.copy() @ w
    result = zero_stride.product(g, w)
    assert result.dtype == expected.dtype
    assert np.array_equal(result, expected)


def test_integers_are_summed_as_the_product_sums_them():
    g, w = np.broadcast_to(np.float32(1), (ROWS, INNER)), whole(INNER, COLUMNS, dtype="int8")
    expected = g.copy() @ w
    assert zero_stride.product(g, w).dtype == expected.dtype
    assert np.array_equal(zero_stride.product(g, w), expected)


@pytest.mark.parametrize("stack", [(), (2,)])
@pytest.mark.parametrize("layer", [lambda x, w: x @ w, lambda x, w: linear(x, w.T)])
def test_half_floats_that_fit_do_not_become_infinite_on_the_way(layer, stack):
    x = ag.tensor(np.full((*stack, 2000, 4), 100.0, np.float16), requires_grad=True)
    w = ag.tensor(np.full((4, 2000), 100.0, np.float16), requires_grad=True)
    layer(x, w).backward(np.broadcast_to(np.float16(1e-3), (*stack, 2000, 2000)))
    assert np.allclose(x.grad.numpy(), 200.0, rtol=1e-2)
    assert np.allclose(w.grad.numpy(), 200.0 * (stack or (1,))[0], rtol=1e-2)


@pytest.mark.parametrize("layer", [lambda x, w: x @ w, lambda x, w: linear(x, w.T)])
@pytest.mark.parametrize("shape", [(2, 3, 0, 4), (2, 3, 4, 0), (2, 0, 3, 4), (0, 2, 3, 4)])
def test_a_layer_without_features_or_rows_is_played_back(layer, shape):
    *stack, inner, outer = shape
    x = ag.tensor(np.ones((*stack, inner)), requires_grad=True)
    w = ag.tensor(np.ones((inner, outer)), requires_grad=True)
    layer(x, w).sum().backward()
    assert x.grad.tolist() == np.full(x.shape, outer).tolist()
    assert w.grad.tolist() == np.full(w.shape, stack[0] * stack[1]).tolist()


LOSSES = {
    "sum": lambda y: y.sum(),
    "mean": lambda y: y.mean(),
    "mean over rows": lambda y: (y.mean(axis=-2) * np.arange(COLUMNS)).sum(),
    "sum over columns": lambda y: (y.sum(axis=-1) * np.arange(ROWS)).sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("stack", [(), (4,)])
@pytest.mark.parametrize("layer", [lambda x, w: x @ w, lambda x, w: linear(x, w.T)])
def test_gradients_behind_sums_are_those_of_a_gradient_written_out(layer, stack, loss):
    values = whole(*stack, ROWS, INNER), whole(INNER, COLUMNS)

    def gradients(write_out: bool) -> list[np.ndarray]:
        x, w = (ag.tensor(value, requires_grad=True) for value in values)
        y = layer(x, w)
        if write_out:
            y.register_hook(lambda g: ag.tensor(g.numpy().copy()))
        loss(y).backward()
        assert x.grad.numpy().flags.writeable
        return [x.grad.numpy(), w.grad.numpy()]

    for found, expected in zip(gradients(False), gradients(True), strict=True):
        assert np.allclose(found, expected, rtol=1e-13, atol=1e-9)
        assert found.flags.c_contiguous


def test_a_chain_of_layers_keeps_equal_rows_until_a_leaf():
    x, v, w = (ag.tensor(whole(150, 150), requires_grad=True) for _ in range(3))
    h = x @ v
    loss = (h @ w).sum()
    sweep = Sweep([loss._node], retain_graph=True, capture=[h._node])
    sweep.feed(loss._node, np.float64(1))
    sweep.drain()
    assert sweep.captured[h._node].strides == (0, 8)
    loss.backward()
    assert np.array_equal(x.grad.numpy(), np.ones((150, 150)) @ w.numpy().T @ v.numpy().T)
    assert np.array_equal(v.grad.numpy(), x.numpy().T @ (np.ones((150, 150)) @ w.numpy().T))


def test_second_derivatives_go_through_repeated_gradients():
    w = ag.tensor(whole(150, 150) / 8, requires_grad=True)
    (first,) = grad(((w @ w) @ w).sum(), [w], create_graph=True)
    (second,) = grad((first * first).sum(), [w])
    x = ag.tensor(w.numpy().copy(), requires_grad=True)
    ones = ag.tensor(np.ones((150, 150)))
    by_hand = ones @ (x @ x).T + x.T @ ones @ x.T + (x @ x).T @ ones
    (expected,) = grad((by_hand * by_hand).sum(), [x])
    assert np.allclose(second.numpy(), expected.numpy())
