"""Functions that are run again in backward: the same gradients of any order, and no surprises."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd.backward import grad
from aiograd.errors import GradError
from aiograd.testing import gradcheck, gradgradcheck


def leaf(*values: float) -> ag.Tensor:
    return ag.tensor(values or (1.0, 2.0, 3.0), requires_grad=True)


def cube(a):
    return a * a * a


def test_gradients_are_those_of_the_plain_function():
    x, w = leaf(), leaf(0.5, -1.0, 2.0)

    def block(a, scale=None):
        return ag.tanh(a * w) * scale["by"], a.sum()

    for function in (block, ag.checkpoint(block)):
        y, total = function(x, scale={"by": w})
        ((y * y).sum() + total).backward()
    np.testing.assert_array_equal(x.grad.numpy() / 2, grad(_loss(block, x, w), x)[0].numpy())
    np.testing.assert_array_equal(w.grad.numpy() / 2, grad(_loss(block, x, w), w)[0].numpy())


def _loss(function, x, w):
    y, total = function(x, scale={"by": w})
    return (y * y).sum() + total


def test_derivatives_of_any_order_go_through_it():
    x, w = leaf(0.3, -0.7), leaf(1.5, 0.4)

    def block(a, b):
        return ag.tanh(a * b) * w

    assert gradcheck(ag.checkpoint(block), (x, w))
    assert gradgradcheck(ag.checkpoint(block), (x, w))


def test_the_third_derivative_is_exact():
    x = leaf(2.0)
    y = ag.checkpoint(ag.checkpoint(cube))(x).sum()
    for expected in (12.0, 12.0, 6.0):
        (y,) = grad(y, x, create_graph=True)
        assert y.item() == expected


def test_a_leaf_that_is_given_and_read_is_counted_once_with_create_graph():
    w = leaf(3.0)
    ag.checkpoint(lambda a: a * w)(w).sum().backward(create_graph=True)
    assert w.grad.tolist() == [6.0]


def test_an_argument_given_twice_gets_both_shares():
    x = leaf(3.0)
    ag.checkpoint(lambda a, b: a * b)(x, x).sum().backward()
    assert x.grad.tolist() == [6.0]


@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks_of_leaves_run_once(create_graph: bool):
    x, w, calls = leaf(), leaf(), []
    for name, tensor in {"x": x, "w": w}.items():
        tensor.register_hook(lambda g, name=name: calls.append(name))
    inner = ag.checkpoint(lambda a: a * w)
    y = ag.checkpoint(lambda a: inner(a) + w)(x) + x * w
    y.sum().backward(create_graph=create_graph)
    assert sorted(calls) == ["w", "x"]
    assert x.grad.tolist() == [2, 4, 6]
    assert w.grad.tolist() == [3, 5, 7]


@pytest.mark.parametrize("which", ["x", "constant", "w"])
def test_what_it_reads_must_not_be_written_before_it_is_run_again(which: str):
    tensors = {"x": leaf(), "constant": ag.ones(3), "w": leaf()}
    y = ag.checkpoint(lambda a, b: a * b * tensors["w"])(tensors["x"], tensors["constant"])
    with ag.no_grad():
        tensors[which][0] = 5.0
    with pytest.raises(GradError) as caught:
        y.sum().backward()
    assert caught.value.reason == "modified"


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_result_that_it_only_reads_may_be_used_outside_too(create_graph: bool):
    w, calls = leaf(1.0, 2.0), []
    h = w * w
    h.register_hook(lambda g: calls.append(g.tolist()))
    (ag.checkpoint(lambda a: a * h)(w) + h).sum().backward(create_graph=create_graph)
    assert w.grad.tolist() == [5.0, 16.0]  # 3w² + 2w
    assert calls == [[2.0, 3.0]]


def test_it_may_return_what_it_was_given_or_only_reads():
    x, w = leaf(2.0), leaf(3.0)
    h = w * w
    one, other = ag.checkpoint(lambda a: (a, h))(x)
    (one * other).sum().backward()
    assert x.grad.tolist() == [9.0]
    assert w.grad.tolist() == [12.0]


def test_what_it_puts_aside_does_not_disturb():
    x, kept = leaf(2.0), []

    def block(a):
        kept.append(a * a)
        return kept[-1] * a

    y = ag.checkpoint(block)(x)
    y.sum().backward()
    assert x.grad.tolist() == [12.0]
    kept[0].sum().backward()
    assert x.grad.tolist() == [16.0]


def test_its_graph_is_not_kept():
    inside = []

    def block(a):
        b = a * a
        inside.append(weakref.ref(b.grad_fn))
        return b * a

    y = ag.checkpoint(block)(leaf())
    assert inside[0]() is None
    y.sum().backward()
    gc.collect()
    assert inside[1]() is None


def test_a_second_pass_needs_the_graph_retained():
    x = leaf(2.0)
    y = ag.checkpoint(cube)(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [24.0]
    with pytest.raises(GradError) as caught:
        y.backward()
    assert caught.value.reason == "freed"
