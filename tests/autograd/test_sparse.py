"""Sparse tensors and their gradients."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest

import aiograd as ag


def sample(requires_grad: bool = True, dtype: Any = None) -> Any:
    return ag.sparse.coo_tensor(
        [[0, 1, 1], [2, 0, 2]], [3.2, 4.1, 5.3], (3, 3), requires_grad, dtype
    )


def other() -> Any:
    return ag.sparse.coo_tensor([[1, 2, 1], [0, 2, 1]], [2.0, 7.0, 3.0], (3, 3), True)


def test_a_sparse_tensor_knows_its_entries() -> None:
    t = sample()
    assert t.is_sparse
    assert t.requires_grad
    assert (t.shape, t.dtype) == ((3, 3), np.float64)
    assert ag.sparse.indices(t).tolist() == [[0, 1, 1], [2, 0, 2]]
    assert ag.sparse.values(t).tolist() == [3.2, 4.1, 5.3]
    np.testing.assert_array_equal(t.numpy(), [[0, 0, 3.2], [4.1, 0, 5.3], [0, 0, 0]])
    assert "coo" in repr(t)


def test_positions_given_twice_add_up() -> None:
    t = ag.sparse.coo_tensor([[1, 0, 1]], [1.0, 2.0, 4.0], (3,))
    assert t.numpy().tolist() == [2.0, 5.0, 0.0]
    whole = ag.sparse.coalesce(t)
    assert ag.sparse.indices(whole).tolist() == [[0, 1]]
    assert ag.sparse.values(whole).tolist() == [2.0, 5.0]


@pytest.mark.parametrize(
    ("indices", "values", "shape"),
    [
        ([[0, 1]], [1.0], (3,)),
        ([[0, 3]], [1.0, 2.0], (3,)),
        ([[0, -1]], [1.0, 2.0], (3,)),
        ([[0.5, 1]], [1.0, 2.0], (3,)),
        ([[0, 1]], [1.0, 2.0], (3, 3)),
        ([[0, 1]], [[1.0], [2.0]], (3, 2)),
    ],
)
def test_entries_that_do_not_fit_are_refused(indices: Any, values: Any, shape: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  each has its own words
        ag.sparse.coo_tensor(indices, values, shape)


def test_a_shape_can_be_left_out_and_entries_too() -> None:
    assert ag.sparse.coo_tensor([[0, 4], [1, 1]], [1.0, 2.0]).shape == (5, 2)
    assert ag.sparse.coo_tensor([[], []], [], (2, 3)).numpy().tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: 3 * a + b / 2,
        lambda a, b: np.float64(3) * a - b * ag.tensor(0.5),
        lambda a, b: -a * (a + b),
        lambda a, b: ag.add(a, b) * ag.mul(a, b),
    ],
)
def test_results_stay_sparse_and_gradients_too(combine: Any) -> None:
    a, b = sample(), other()
    y = combine(a, b)
    assert y.is_sparse
    ag.sparse.sum(y).backward()
    x, z = (ag.tensor(t.numpy(), requires_grad=True) for t in (a, b))
    dense = combine(x, z)
    np.testing.assert_allclose(y.numpy(), dense.numpy())
    dense.sum().backward()
    for sparse, full in ((a, x), (b, z)):
        assert sparse.grad.is_sparse
        assert sparse.grad.shape == (3, 3)
        stored = sparse.numpy() != 0  # elsewhere a sparse gradient may leave things out
        np.testing.assert_allclose(sparse.grad.numpy()[stored], full.grad.numpy()[stored])


def test_the_gradient_of_a_sum_has_one_entry_per_position() -> None:
    a, b = sample(), sample()
    ag.sparse.sum(a + b).backward()
    assert ag.sparse.values(a.grad).tolist() == [1.0, 1.0, 1.0]
    np.testing.assert_array_equal(a.grad.numpy(), (a.numpy() != 0).astype(float))


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1), -1])
def test_sums_along_an_axis(axis: Any) -> None:
    t = sample()
    total = ag.sparse.sum(t, axis=axis)
    np.testing.assert_allclose(total.numpy(), t.numpy().sum(axis=axis))
    weights = ag.tensor(np.arange(1.0, 4.0)[: max(total.size, 1)].reshape(total.shape))
    loss = ag.sparse.sum(total * weights) if total.is_sparse else (total * weights).sum()
    loss.backward()
    full = weights.numpy() if axis is None else np.expand_dims(weights.numpy(), axis)
    np.testing.assert_allclose(t.grad.numpy(), np.broadcast_to(full, (3, 3)) * (t.numpy() != 0))


def test_the_ordinary_sum_and_mean_work_too() -> None:
    t = sample()
    (t.sum() + t.mean()).backward()
    assert t.grad.is_sparse
    np.testing.assert_allclose(t.grad.numpy(), (t.numpy() != 0) * (1 + 1 / 9))


def test_to_dense_gives_the_gradient_back_at_the_stored_positions() -> None:
    t = sample()
    weights = np.arange(9.0).reshape(3, 3)
    (t.to_dense() * weights).sum().backward()
    assert t.grad.is_sparse
    np.testing.assert_array_equal(t.grad.numpy(), weights * (t.numpy() != 0))


def test_values_and_coo_tensor_are_differentiable() -> None:
    values = ag.tensor([1.0, 2.0, 3.0], requires_grad=True)
    t = ag.sparse.coo_tensor([[0, 1, 1]], values, (3,))
    assert t.grad_fn is not None
    ag.sparse.sum(t * ag.sparse.coo_tensor([[0, 1]], [10.0, 20.0], (3,))).backward()
    assert values.grad.tolist() == [10.0, 20.0, 20.0]
    s = sample()
    (ag.sparse.values(s) * np.array([1.0, 2.0, 3.0])).sum().backward()
    assert ag.sparse.values(s.grad).tolist() == [1.0, 2.0, 3.0]


def test_stacks_stay_sparse() -> None:
    tensors = [sample(requires_grad=i % 2 == 0) for i in range(10)]
    for stack in (ag.stack, ag.sparse.stack):
        y = stack(tensors)
        assert y.is_sparse
        np.testing.assert_array_equal(y.numpy(), np.stack([t.numpy() for t in tensors]))
        ag.sparse.sum(y * y).backward()
    assert all(t.grad.is_sparse for t in tensors[::2])
    assert all(t.grad is None for t in tensors[1::2])
    np.testing.assert_allclose(tensors[0].grad.numpy(), 4 * tensors[0].numpy())


def test_many_operations_in_a_row_equal_the_dense_ones() -> None:
    def model(t1: Any, t2: Any, t3: Any, t4: Any, t5: Any) -> Any:
        value = ag.mul(t3, ag.add(t1, t2))
        value = ag.mul(ag.stack((t4, value)), ag.stack((t5, value)))
        return ag.mul(value, value)

    sparse = [sample(i < 3) for i in range(5)]
    dense = [ag.tensor(t.numpy(), requires_grad=t.requires_grad) for t in sparse]
    ag.sparse.sum(model(*sparse)).backward()
    model(*dense).sum().backward()
    for s, d in zip(sparse[:3], dense[:3], strict=True):
        np.testing.assert_allclose(s.grad.numpy(), d.grad.numpy() * (s.numpy() != 0))
    assert sparse[3].grad is None


def test_each_leaf_gets_a_gradient_of_its_own_dtype() -> None:
    a, b = sample(dtype=np.float32), sample(dtype=np.float64)
    ag.sparse.sum(a + b).backward()
    assert (a.grad.dtype, b.grad.dtype) == (np.float32, np.float64)


def test_gradients_of_leaves_add_up_over_passes() -> None:
    t = sample()
    y = ag.sparse.sum(t * 2)
    for _ in range(10):
        y.backward(retain_graph=True)
    assert t.grad.is_sparse
    np.testing.assert_array_equal(t.grad.numpy(), 20.0 * (t.numpy() != 0))


def test_second_derivatives_exist() -> None:
    t = sample()
    (first,) = ag.autograd.grad(ag.sparse.sum(t * t * t), t, create_graph=True)
    (second,) = ag.autograd.grad(ag.sparse.sum(first), t)
    assert second.is_sparse
    np.testing.assert_allclose(second.numpy(), 6 * t.numpy())
    (first,) = ag.autograd.grad((t.to_dense() ** 3).sum(), t, create_graph=True)
    (second,) = ag.autograd.grad(first.sum(), t)
    np.testing.assert_allclose(second.numpy(), 6 * t.numpy())


def test_a_sparse_tensor_survives_pickle() -> None:
    t = pickle.loads(pickle.dumps(sample()))
    assert t.is_sparse
    assert t.requires_grad
    np.testing.assert_array_equal(t.numpy(), sample().numpy())


def test_dense_tensors_are_refused_where_a_sparse_one_is_needed() -> None:
    with pytest.raises(TypeError, match="sparse"):
        ag.sparse.sum(ag.ones(3))
    assert ag.sparse.to_sparse(ag.tensor([0.0, 2.0])).numpy().tolist() == [0.0, 2.0]


def test_sparse_and_dense_can_be_combined() -> None:
    t, d = sample(), ag.tensor(np.arange(9.0).reshape(3, 3), requires_grad=True)
    product = t * d
    assert product.is_sparse
    total = t + d
    assert not total.is_sparse
    (ag.sparse.sum(product) + (total * total).sum()).backward()
    assert t.grad.is_sparse
    assert not d.grad.is_sparse
    stored = t.numpy() != 0
    np.testing.assert_allclose(d.grad.numpy(), t.numpy() + 2 * (t.numpy() + d.numpy()))
    expected = d.numpy() + 2 * (t.numpy() + d.numpy())
    np.testing.assert_allclose(t.grad.numpy(), expected * stored)


def test_a_scalar_factor_gets_its_gradient() -> None:
    t, factor = sample(), ag.tensor(2.0, requires_grad=True)
    ag.sparse.sum(t * factor).backward()
    assert factor.grad.item() == pytest.approx(t.numpy().sum())
    np.testing.assert_allclose(t.grad.numpy(), 2 * (t.numpy() != 0))


class ScipyMatrix:
    """As much of a scipy sparse array as we look at."""

    def __init__(self, entries: Any, shape: Any) -> None:
        self.data, (self.row, self.col) = entries
        self.shape = shape

    def tocoo(self) -> ScipyMatrix:
        return self


def test_scipy_is_met_only_where_it_is_already_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "scipy.sparse", raising=False)
    with pytest.raises(ImportError, match=r"scipy\.sparse"):
        ag.sparse.to_scipy(sample())
    module = types.SimpleNamespace(
        coo_array=ScipyMatrix, issparse=lambda value: isinstance(value, ScipyMatrix)
    )
    monkeypatch.setitem(sys.modules, "scipy.sparse", module)
    matrix = ag.sparse.to_scipy(sample())
    assert isinstance(matrix, ScipyMatrix)
    np.testing.assert_array_equal(ag.sparse.to_sparse(matrix).numpy(), sample().numpy())


# ── rows of embeddings ──────────────────────────────────────────────────────────────────────────

INPUT, OFFSETS = np.array([1, 2, 4, 5, 4, 3, 2, 9]), np.array([0, 4])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_give_sparse_gradients_that_equal_the_dense_ones(mode: str) -> None:
    weight = np.random.default_rng(0).normal(size=(10, 3))
    grads = []
    for sparse in (True, False):
        leaf = ag.tensor(weight, requires_grad=True)
        y = ag.nn.functional.embedding_bag(INPUT, leaf, OFFSETS, mode=mode, sparse=sparse)
        (y * y).sum().backward()
        assert leaf.grad.is_sparse == sparse
        grads.append(leaf.grad.numpy())
    np.testing.assert_allclose(*grads)


def test_a_sparse_gradient_and_a_dense_one_add_up() -> None:
    leaf = ag.tensor(np.ones((10, 3)), requires_grad=True)
    y = ag.nn.functional.embedding(INPUT, leaf, sparse=True).sum() + (2 * leaf).sum()
    y.backward()
    assert not leaf.grad.is_sparse
    np.testing.assert_array_equal(leaf.grad.numpy()[:, 0], 2 + np.bincount(INPUT, minlength=10))


def pointer(tensor: Any) -> int:
    address: int = tensor.data.values.__array_interface__["data"][0]
    return address


class Through(ag.Function):
    seen: int = 0

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        Through.seen = pointer(grad)
        return grad


class NotContiguous(ag.Function):
    seen: int = 0

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        values = np.broadcast_to(np.random.default_rng(0).random((1, 3)), (8, 3))
        indices = np.broadcast_to(np.ones((1, 1), np.int64), (1, 8))
        made = ag.Tensor(ag.sparse.Coo(indices, values, (10, 3)))
        NotContiguous.seen = pointer(made)
        return made, made


def test_a_sparse_gradient_that_nobody_else_holds_is_stored_without_a_copy() -> None:
    leaf = ag.tensor(np.ones((10, 3)), requires_grad=True)
    table = Through.apply(leaf)
    y = ag.nn.functional.embedding_bag(INPUT, table, OFFSETS, mode="sum", sparse=True).sum()
    y.backward(retain_graph=True)
    assert pointer(leaf.grad) == Through.seen
    held = leaf.grad.data.indices  # a view that the user holds changes nothing
    for _ in range(10):
        y.backward(retain_graph=True)
    np.testing.assert_array_equal(leaf.grad.numpy()[:, 0], 11 * np.bincount(INPUT, minlength=10))
    assert held.shape == (1, 8)


def test_a_sparse_gradient_of_two_leaves_is_copied_for_each() -> None:
    a, b = (ag.tensor(np.ones((10, 3)), requires_grad=True) for _ in range(2))
    table = NotContiguous.apply(a, b)
    y = ag.nn.functional.embedding_bag(INPUT, table, OFFSETS, mode="sum", sparse=True).sum()
    y.backward(retain_graph=True)
    assert len({pointer(a.grad), pointer(b.grad), NotContiguous.seen}) == 3
    assert a.grad.data.contiguous
    assert b.grad.data.contiguous
    for _ in range(10):
        y.backward(retain_graph=True)
    row = np.random.default_rng(0).random((1, 3))[0]
    np.testing.assert_allclose(a.grad.numpy()[1], 11 * 8 * row)
