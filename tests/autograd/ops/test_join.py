"""Joining many arrays: how much work the backward pass does, and second derivatives.

`test_ops.py` checks the gradients of all operations.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.autograd.graph import Node, Part


def leaves(count: int, *shape: int) -> list[ag.Tensor]:
    return [ag.tensor(np.full(shape, float(i)), requires_grad=True) for i in range(count)]


@pytest.mark.parametrize("name", ["stack", "concatenate"])
def test_the_rule_of_a_join_is_called_once_for_all_arrays(name, monkeypatch):
    op, calls = getattr(ag, name), []
    rule = op.joint
    monkeypatch.setattr(op, "joint", lambda *args, **kw: calls.append(1) or rule(*args, **kw))
    xs = leaves(50, 2)
    op(xs).sum().backward()
    assert len(calls) == 1
    assert all(x.grad.tolist() == [1, 1] for x in xs)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_each_array_of_a_stack_gets_its_layer(axis):
    xs = leaves(3, 2, 4)
    weights = np.arange(24.0).reshape(np.stack([x.data for x in xs], axis=axis).shape)
    (ag.stack(xs, axis=axis) * weights).sum().backward()
    for i, x in enumerate(xs):
        np.testing.assert_array_equal(x.grad.data, np.take(weights, i, axis=axis))


@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_each_array_of_a_concatenation_gets_its_slice(axis):
    xs = [*leaves(2, 2, 3), *leaves(1, 4)] if axis is None else leaves(3, 2, 3)
    joined = ag.concatenate(xs, axis=axis)
    weights = np.arange(float(joined.size)).reshape(joined.shape)
    (joined * weights).sum().backward()
    back = np.concatenate([x.grad.data for x in xs], axis=axis)
    np.testing.assert_array_equal(back, weights)


def test_an_array_that_wants_no_gradient_may_be_among_them():
    x, y = leaves(2, 2)
    (ag.concatenate([x, np.ones(3), y]) * np.arange(7.0)).sum().backward()
    assert x.grad.tolist() == [0, 1]
    assert y.grad.tolist() == [5, 6]


@pytest.mark.parametrize(
    "join", [ag.stack, ag.concatenate, lambda xs: ag.concatenate(xs, axis=None)]
)
def test_a_second_derivative_splits_the_gradient_by_one_operation(join):
    """A slice of its own per array would put zeros of the whole size around each of them."""
    xs = leaves(20, 2)
    first = ag.grad((join(xs) ** 3).sum(), xs, create_graph=True)
    second = ag.grad(sum(g.sum() for g in first), xs)
    for x, g in zip(xs, second, strict=True):
        np.testing.assert_allclose(g.data, 6 * x.data)
    names = Counter(node.name for node in reached(first[0]._node))
    assert names["split"] == 1
    assert "getitem" not in names


def reached(root: Node) -> set[Node]:
    found, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Part):
            node = node.joint
        if node not in found:
            found.add(node)
            waiting += [parent for parent in node.parents if parent is not None]
    return found
