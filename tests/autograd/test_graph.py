"""The tape as a user can look at it."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.autograd.graph import Accumulate, Joint, Node, Part


def leaf() -> ag.Tensor:
    return ag.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)


def test_nodes_are_named_after_their_operation():
    x = leaf()
    assert (x + 1).grad_fn.name == "add"
    assert ag.mul(x, 2).grad_fn.name == "multiply"
    assert x.sum().grad_fn.name == "sum"
    assert repr(ag.exp(x).grad_fn) == "<exp>"
    assert x.grad_fn is None


def test_next_nodes_lead_back_to_the_leaves():
    x, y = leaf(), leaf()
    total = (x * y + 3).sum()
    (added,) = [node for node, _ in total.grad_fn.next_nodes]
    (product,) = [node for node, _ in added.next_nodes]
    ends = [node for node, _ in product.next_nodes]
    assert [added.name, product.name] == ["add", "multiply"]
    assert [end.name for end in ends] == ["AccumulateGrad"] * 2
    assert [end.variable for end in ends] == [x, y]
    assert ends[0].next_nodes == ()


def test_a_leaf_has_one_accumulate_node_while_anybody_uses_it():
    x = leaf()
    y, z = x * 2, x * 3
    assert y.grad_fn.next_nodes[0][0] is z.grad_fn.next_nodes[0][0]


def test_outputs_of_one_operation_share_its_node():
    first, second = ag.split(leaf(), 2)
    assert first.grad_fn is second.grad_fn
    assert isinstance(first.grad_fn, Joint)
    assert isinstance(first._node, Part)
    assert (first + second).grad_fn.next_nodes == ((first.grad_fn, 0), (first.grad_fn, 1))


def test_only_what_the_rules_read_is_kept():
    x = leaf()
    assert x.sum().grad_fn.saved[1].shape == (2, 2)  # the shape, not the array
    assert not isinstance(x.sum().grad_fn.saved[1], ag.Tensor)
    kept = ag.exp(x).grad_fn.saved
    assert kept[0] is not None
    assert kept[1] is None
    left = (x * ag.ones(2, 2)).grad_fn.saved
    assert left[1] is None  # the gradient by x only reads the other factor
    assert left[2] is not None


def test_plain_nodes_do_not_pass_gradients_on():
    with pytest.raises(AssertionError):
        Node().run(np.ones(1), False, False)
    node = leaf().accumulator()
    assert isinstance(node, Accumulate)
    with pytest.raises(AssertionError):
        node.run(np.ones(1), False, False)
