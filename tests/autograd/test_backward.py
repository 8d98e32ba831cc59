"""The local backward pass and derivatives: what is asked, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.autograd.backward import entries
from aiograd.errors import GradError


def leaf(*values: float) -> ag.Tensor:
    return ag.tensor(values or (1.0, 2.0, 3.0), requires_grad=True)


def test_gradients_add_up_in_grad():
    x = leaf()
    (x * x).sum().backward()
    assert x.grad.tolist() == [2, 4, 6]
    (x * x).sum().backward()
    assert x.grad.tolist() == [4, 8, 12]


def test_a_leaf_that_is_its_own_root_gets_its_gradient():
    x = ag.tensor(3.0, requires_grad=True)
    x.backward()
    assert x.grad.item() == 1.0


def test_only_leaves_that_require_grad_get_one():
    x, w = leaf(), ag.ones(3)
    y = x * w
    y.sum().backward()
    assert w.grad is None
    assert y.grad is None


def test_several_roots_in_one_pass():
    x = leaf()
    ag.backward([x.sum(), (x * x).sum()])
    assert x.grad.tolist() == [3, 5, 7]
    ag.backward([x * 2], [np.array([1.0, 0, 0])])
    assert x.grad.tolist() == [5, 5, 7]


@pytest.mark.parametrize(
    ("roots", "gradient", "reason"),
    [
        (lambda x: x * 2, None, "not_scalar"),
        (lambda x: ag.ones(()), None, "no_requires_grad"),
        (lambda x: x.detach().sum(), None, "no_requires_grad"),
        (lambda x: [], None, "no_roots"),
        (lambda x: x * 2, np.ones(2), "shape"),
        (lambda x: [x.sum(), x.sum()], [None], "shape"),
    ],
)
def test_what_cannot_be_played_back_is_refused_with_a_reason(roots, gradient, reason):
    with pytest.raises(GradError) as caught:
        ag.backward(roots(leaf()), gradient)
    assert caught.value.reason == reason


@pytest.mark.parametrize("root", [None, 1.0, np.ones(1), [None], "loss"])
def test_roots_must_be_tensors(root: object):
    with pytest.raises((TypeError, GradError)):
        ag.backward(root)  # type: ignore[arg-type]


def test_nothing_recorded_under_no_grad_can_be_played_back():
    x = leaf()
    with ag.no_grad():
        y = (x * x).sum()
    with pytest.raises(GradError) as caught:
        y.backward()
    assert "no_grad" in str(caught.value)


def test_one_element_of_any_shape_is_a_scalar():
    x = leaf(2.0)
    (x * x).backward()
    assert x.grad.tolist() == [4.0]


def test_a_leaf_is_its_own_root_only_where_that_is_allowed():
    x = leaf(2.0)
    ((node, gradient),) = entries(x)
    assert node is x.accumulator()
    assert gradient.tolist() == [1.0]
    for roots in (x, [x]):
        with pytest.raises(GradError) as caught:
            entries(roots, allow_leaf=False)
        assert caught.value.reason == "no_grad_fn"
    with pytest.raises(GradError) as caught:
        entries(leaf(), allow_leaf=False)
    assert caught.value.reason == "not_scalar"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_root_starts_with_an_array_of_its_shape_and_dtype(shape: tuple[int, ...]):
    x = ag.ones(*shape, dtype=np.float32, requires_grad=True)
    ((_, gradient),) = entries(x * x)
    assert type(gradient) is np.ndarray
    assert (gradient.shape, gradient.dtype) == (shape, np.float32)


# ── derivatives ─────────────────────────────────────────────────────────────────────────────────


def test_grad_returns_a_tuple_and_touches_no_grad():
    x, y = leaf(), leaf(4.0, 5.0, 6.0)
    gx, gy = ag.grad((x * y).sum(), (x, y))
    assert gx.tolist() == [4, 5, 6]
    assert gy.tolist() == [1, 2, 3]
    assert x.grad is None
    (only,) = ag.grad(x.sum(), x)
    assert only.tolist() == [1, 1, 1]


def test_derivatives_are_arrays_of_ones_own():
    x = ag.tensor(np.arange(200.0), requires_grad=True)
    h = x * 2.0
    k = h + 0.0
    given = ag.tensor(np.ones(200))
    found = ag.grad(k, (k, h, x), grad_outputs=given)
    for derivative in found:
        derivative += 1.0
    assert [float(derivative.numpy()[0]) for derivative in found] == [2.0, 2.0, 3.0]
    assert given.numpy()[0] == 1.0


def test_derivatives_behind_a_sum_can_be_written_to():
    h = ag.tensor(np.ones((200, 200)), requires_grad=True) * 1.0
    (derivative,) = ag.grad(h.sum(), [h])
    derivative[0, 0] = 5.0
    assert derivative.numpy().sum() == 200 * 200 + 4


def test_grad_by_results_and_roots():
    x = leaf()
    h = x * 2
    loss = (h * h).sum()
    gh, gl = ag.grad(loss, [h, loss])
    assert gh.tolist() == [4, 8, 12]
    assert gl.item() == 1.0


def test_grad_takes_weights_for_outputs():
    x = leaf()
    (g,) = ag.grad([x * 2, x * 3], x, [np.array([1.0, 0, 0]), ag.tensor([0.0, 1, 0])])
    assert g.tolist() == [2, 3, 0]


def test_an_unused_input_is_an_error_or_none():
    x, other = leaf(), leaf()
    with pytest.raises(GradError) as caught:
        ag.grad(x.sum(), other)
    assert caught.value.reason == "unused"
    assert ag.grad(x.sum(), [x, other], allow_unused=True)[1] is None


def test_inputs_must_be_tensors_that_require_grad():
    x = leaf()
    with pytest.raises(GradError) as caught:
        ag.grad(x.sum(), ag.ones(3))
    assert caught.value.reason == "no_requires_grad"
    with pytest.raises(TypeError):
        ag.grad(x.sum(), [np.ones(3)])


def test_derivatives_of_any_order():
    x = ag.tensor(0.7, requires_grad=True)
    value = ag.sin(x)
    for expected in (np.cos, lambda v: -np.sin(v), lambda v: -np.cos(v), np.sin, np.cos):
        (value,) = ag.grad(value, x, create_graph=True)
        assert value.item() == pytest.approx(expected(0.7))


def test_create_graph_into_grad_can_be_differentiated_again():
    x = leaf()
    (x**3).sum().backward(create_graph=True)
    assert x.grad.requires_grad
    (g,) = ag.grad(x.grad.sum(), x)
    assert g.tolist() == [6, 12, 18]


def test_retain_graph_of_grad_follows_create_graph_unless_told():
    x = leaf()
    y = (x * x).sum()
    ag.grad(y, x, create_graph=True)
    ag.grad(y, x, retain_graph=True)
    ag.grad(y, x)
    with pytest.raises(GradError) as caught:
        ag.grad(y, x)
    assert caught.value.reason == "freed"


def test_the_hook_of_a_leaf_changes_its_derivative_too():
    x = leaf()
    x.register_hook(lambda g: g * 10)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [20, 20, 20]


# ── complex numbers, precision, awkward shapes ──────────────────────────────────────────────────


def test_complex_gradients_follow_the_conjugate_convention():
    z = ag.tensor(3.0 + 4.0j, requires_grad=True)
    (z * z.conj()).real.backward()
    assert z.grad.item() == pytest.approx(6 + 8j)


def test_a_real_leaf_in_complex_company_has_a_real_gradient():
    x = leaf(2.0)
    (x * (1 + 2j)).real.sum().backward()
    assert x.grad.dtype == np.float64
    assert x.grad.tolist() == [1.0]


def test_single_and_double_mix_as_in_numpy_and_gradients_keep_their_own():
    a = ag.ones(2, dtype=np.float32, requires_grad=True)
    b = ag.ones(2, requires_grad=True)
    y = a * b * 2.0
    assert y.dtype == np.float64
    y.sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (np.float32, np.float64)
    assert (a * 2.0).dtype == np.float32


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1)])
def test_empty_and_single_shapes(shape):
    x = ag.zeros(shape, requires_grad=True)
    (x * 2 + x).sum().backward()
    assert x.grad.shape == shape
    assert (x.grad.data == 3).all()


def test_broadcasting_is_undone_for_every_pattern():
    for left, right in [
        ((2, 3), (3,)),
        ((2, 1), (1, 3)),
        ((), (2, 2)),
        ((4, 1, 2), (3, 1)),
        ((1,), (5,)),
    ]:
        a, b = ag.ones(left, requires_grad=True), ag.ones(right, requires_grad=True)
        (a * b).sum().backward()
        total = np.broadcast_shapes(left, right)
        assert a.grad.shape == left
        assert b.grad.shape == right
        assert a.grad.data.sum() == np.prod(total)


def test_mismatched_shapes_are_a_value_error_as_in_numpy():
    with pytest.raises(ValueError, match="shapes"):
        ag.ones(2) + ag.ones(3)
    with pytest.raises(ValueError, match="matmul"):
        ag.ones(2, 3) @ ag.ones(2, 3)
    with pytest.raises(ValueError, match="reshape"):
        ag.ones(4).reshape(3)
    with pytest.raises(IndexError):
        ag.ones(2)[5]


def test_every_leaf_gets_memory_of_its_own_also_with_create_graph():
    x, y, given = leaf(), leaf(), ag.ones(3)
    (x + y).backward(given, create_graph=True)
    assert x.grad is not y.grad
    with ag.no_grad():
        x.grad[0] = 7.0
    assert y.grad.tolist() == given.tolist() == [1, 1, 1]


def test_gradients_add_up_after_create_graph():
    x, y, given = leaf(), leaf(), ag.ones(3)
    for _ in range(3):
        (x + y).backward(given, create_graph=True)
    x.sum().backward(create_graph=True)  # whose gradient is a broadcast one, read-only
    x.sum().backward()
    assert given.tolist() == [1, 1, 1]
    assert y.grad.tolist() == [3, 3, 3]
    assert x.grad.tolist() == [5, 5, 5]


def test_a_recorded_gradient_can_be_differentiated_by_the_gradient_given():
    x, y, given = leaf(), leaf(), leaf()
    (x + y).backward(given, create_graph=True)
    seen = []
    x.grad.register_hook(lambda g: seen.append(g.tolist()))
    (y.grad * y.grad).sum().backward()
    assert given.grad.tolist() == [2, 4, 6]
    assert not seen  # it is another tensor's


@pytest.mark.parametrize("create_graph", [False, True])
def test_derivatives_have_memory_of_their_own(create_graph: bool):
    x, given = leaf(), ag.ones(3)
    y = x * 1.0
    found = ag.grad(y + x, [y, x, x], given, create_graph=create_graph)
    with ag.no_grad():
        for i, derivative in enumerate(found):
            derivative[...] = i
    assert given.tolist() == [1, 1, 1]
    assert [derivative.tolist() for derivative in found] == [[0] * 3, [1] * 3, [2] * 3]


def test_a_sparse_leaf_gets_a_sparse_gradient_of_its_own_with_create_graph():
    x = ag.sparse.coo_tensor([[0, 2]], [1.0, 2.0], (4,), requires_grad=True)
    y = ag.sparse.coo_tensor([[0, 2]], [3.0, 4.0], (4,), requires_grad=True)
    ag.sparse.sum(x + y).backward(create_graph=True)
    assert x.grad.is_sparse
    assert not np.shares_memory(x.grad.data.values, y.grad.data.values)
