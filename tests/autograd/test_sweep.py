"""The reverse pass as a state machine: feeding, draining, order, buffers."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.autograd.sweep import Sweep
from aiograd.errors import GradError


def leaf(*values: float) -> ag.Tensor:
    return ag.tensor(values or (1.0, 2.0, 3.0), requires_grad=True)


def played(*roots: ag.Tensor, **options: object) -> Sweep:
    return Sweep([root._node for root in roots], **options)  # type: ignore[arg-type]


def test_a_sweep_waits_for_every_entry():
    x = leaf()
    y, z = x * 2, x * 3
    sweep = played(y, z)
    sweep.feed(y._node, np.ones(3))
    assert sweep.drain() == []
    assert not sweep.complete
    assert [count for _, count in sweep.waiting] == [1, 1]  # z itself, and x for z
    sweep.feed(z._node, np.ones(3))
    ((sink, grad),) = sweep.drain()
    assert sink.variable is x
    assert grad.tolist() == [5, 5, 5]
    assert sweep.complete


def test_none_passes_through_without_computing():
    x, w = leaf(), leaf()
    y = ag.exp(x * w)
    sweep = played(y)
    sweep.feed(y._node, None)
    assert dict(sweep.drain()) == {x.accumulator(): None, w.accumulator(): None}
    assert sweep.complete


def test_none_and_a_gradient_add_up_to_the_gradient():
    x = leaf()
    y, z = ag.exp(x), x * 2
    sweep = played(y, z)
    sweep.feed(y._node, None)
    sweep.feed(z._node, np.ones(3))
    ((_, grad),) = sweep.drain()
    assert grad.tolist() == [2, 2, 2]


def test_order_of_feeding_does_not_matter():
    results = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        x = leaf()
        h = ag.tanh(x)
        roots = [h * 2, h.sum(), x * h]
        sweep = played(*roots)
        found = []
        for i in order:
            sweep.feed(roots[i]._node, np.ones(roots[i].shape))
            found += sweep.drain()
        results.append(found[0][1])
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-15)


def test_an_entry_inside_the_graph_of_another_is_run_once():
    x = leaf()
    h = x * 2
    y = h * 3
    calls = []
    h.register_hook(lambda g: calls.append(g.tolist()))
    sweep = played(y, h)
    sweep.feed(h._node, np.ones(3))
    sweep.feed(y._node, np.ones(3))
    ((_, grad),) = sweep.drain()
    assert grad.tolist() == [8, 8, 8]
    assert calls == [[4, 4, 4]]


def test_what_a_sink_lets_somebody_feed_runs_in_the_same_drain():
    x, w = leaf(), leaf()
    first, second = x * 2, w * 3
    sweep = played(first, second)

    def feed_the_next(node, grad):
        if node.variable is not x:
            return grad
        sweep.feed(second._node, grad)
        return None

    sweep.feed(first._node, np.ones(3))
    found = {node.variable: grad for node, grad in sweep.drain(feed_the_next)}
    assert found[x] is None
    assert found[w].tolist() == [6, 6, 6]
    assert sweep.complete


def test_capture_gives_gradients_of_inner_nodes():
    x = leaf()
    h = x * 2
    sweep = played((h * h), capture=[h._node])
    sweep.feed(next(iter(sweep._need)), np.ones(3))
    sweep.drain()
    assert sweep.captured[h._node].tolist() == [4, 8, 12]


def test_a_second_pass_over_a_freed_graph_names_the_operation():
    x = leaf()
    y = ag.exp(x).sum()
    y.backward()
    with pytest.raises(GradError) as caught:
        y.backward()
    assert caught.value.reason == "freed"
    assert "exp" in str(caught.value)
    assert "retain_graph=True" in str(caught.value)


def test_retain_graph_allows_another_pass():
    x = leaf()
    y = ag.exp(x).sum()
    y.backward(retain_graph=True)
    first = x.grad.data.copy()
    y.backward()
    np.testing.assert_allclose(x.grad.data, 2 * first)


def test_arguments_that_want_no_gradient_are_not_saved_for():
    x = leaf()
    first = ag.op("first", lambda a, b: a + 0 * b, lambda g, y, a, b: g, lambda g, y, a, b: g * a)
    total = first(x, 2.0).sum()
    total.backward()
    total.backward()  # only the gradient by the other argument would have needed values
    assert x.grad.tolist() == [2, 2, 2]


def test_a_graph_that_saved_nothing_can_be_played_again():
    x = leaf()
    y = (x + x).sum()
    y.backward()
    y.backward()
    assert x.grad.tolist() == [4, 4, 4]


def test_a_very_deep_graph_is_played_without_recursion():
    x = leaf(1.0)
    y = x
    for _ in range(100_000):
        y = y + 1.0
    y.sum().backward()
    assert x.grad.tolist() == [1.0]
    del y  # freeing it must not recurse either


def test_a_wide_graph_sums_every_branch():
    x = leaf(1.0)
    total = ag.stack([x * i for i in range(500)]).sum()
    total.backward()
    assert x.grad.item() == sum(range(500))


def test_shapes_that_do_not_fit_name_the_operation():
    wrong = ag.op(
        "wrong", lambda a: a * 2, lambda g, y, a: g[:1].reshape(1, 1, 1) * np.ones((2, 1, 1))
    )
    x = leaf()
    with pytest.raises(GradError) as caught:
        wrong(x).sum().backward()
    assert caught.value.reason == "shape"
    assert "wrong" in str(caught.value)


def test_integer_gradients_are_brought_to_the_dtype_of_the_leaf():
    x = ag.ones(3, dtype=np.float32, requires_grad=True)
    integers = ag.op("integers", lambda a: a * 1, lambda g, y, a: np.ones(3, np.int64))
    integers(x).sum().backward()
    assert x.grad.dtype == np.float32


# ── whose array is it? ──────────────────────────────────────────────────────────────────────────


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def giving(grad: np.ndarray, seen: list[int]) -> ag.Tensor:
    """An operation whose gradient is a fresh copy in a known place."""

    def rule(g, y, a):
        fresh = grad.copy()
        seen.append(address(fresh))
        return fresh

    return ag.op("giving", lambda a: a * 1, rule)


def test_buf_no_copy_single_use_is_stored_as_it_is():
    x, seen = leaf(), []
    giving(np.ones(3), seen)(x).sum().backward()
    assert address(x.grad.data) == seen[0]


def test_buf_no_copy_derivatives_asked_for_are_given_as_they_are():
    x, seen = leaf(), []
    (slope,) = ag.grad(giving(np.ones(3), seen)(x).sum(), x)
    assert address(slope.data) == seen[0]


def test_buf_no_copy_expanded_gradients_are_copied():
    x = leaf()
    x.sum().backward()  # the gradient of a sum is one number seen three times
    assert x.grad.raw.flags.owndata
    assert x.grad.data.strides == (8,)
    with ag.no_grad():
        x.grad += 1
    assert x.grad.tolist() == [2, 2, 2]


def test_buf_no_copy_non_contiguous_gradients_are_copied():
    x = ag.ones(2, 3, requires_grad=True)
    strided = ag.op("strided", lambda a: a * 1, lambda g, y, a: np.ones((2, 6))[:, ::2])
    strided(x).sum().backward()
    assert x.grad.data.flags.forc


def test_buf_no_copy_one_gradient_for_two_leaves_is_two_arrays():
    x, y = leaf(), leaf()
    (x + y).sum().backward()
    assert not np.shares_memory(x.grad.data, y.grad.data)
    with ag.no_grad():
        x.grad += 5
    assert y.grad.tolist() == [1, 1, 1]


def test_buf_no_copy_the_given_gradient_stays_the_callers():
    x, seed = leaf(), np.ones(3)
    (x + 0).backward(seed)
    assert not np.shares_memory(x.grad.data, seed)
    with ag.no_grad():
        x.grad += 5
    assert seed.tolist() == [1, 1, 1]


def test_buf_no_copy_further_passes_add_in_place():
    x = leaf()
    x.sum().backward()
    held = x.grad
    for _ in range(10):
        (x * 2).sum().backward()
    assert x.grad is held
    assert held.tolist() == [21, 21, 21]


def test_a_gradient_kept_by_a_hook_is_not_changed_later():
    x, kept = leaf(), []
    h = x * 2
    h.register_hook(lambda g: kept.append(g))
    (h + h).sum().backward()
    x.grad.data += 100
    assert kept[0].tolist() == [2, 2, 2]
