"""Tensors in numpy's own functions."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.autograd.ops.nondifferentiable import NOT_DIFFERENTIABLE
from aiograd.errors import GradError


def leaf() -> ag.Tensor:
    return ag.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)


def test_ufuncs_are_recorded():
    x = leaf()
    y = np.sin(x)
    assert isinstance(y, ag.Tensor)
    assert y.grad_fn.name == "sin"


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, t: a + t, lambda a, t: a - t, lambda a, t: a * t, lambda a, t: a / t,
        lambda a, t: a @ t.T, lambda a, t: a**t, lambda a, t: np.float64(2.0) * t,
        lambda a, t: 2 - t, lambda a, t: np.maximum(a, t), lambda a, t: np.hypot(a, t),
    ],
)  # fmt: skip
def test_an_array_on_the_left_gives_a_recorded_tensor(compute):
    x = leaf()
    y = compute(np.full((2, 3), 1.5), x)
    assert isinstance(y, ag.Tensor)
    y.sum().backward()
    assert x.grad is not None


def test_comparisons_with_arrays_give_tensors_without_gradient():
    y = np.ones((2, 3)) < leaf()
    assert isinstance(y, ag.Tensor)
    assert not y.requires_grad


def test_functions_of_several_tensors_are_recorded():
    x = leaf()
    for y in (
        np.concatenate([x, np.ones((1, 3))]), np.stack([x, x]), np.where(x > 2, x, 0),
        np.einsum("ij,ij->i", x, x), np.linalg.norm(x), np.tensordot(x, x.T, 1), np.mean(x, axis=0),
        np.sort(x), np.fft.fft(x), np.reshape(x, 6), np.clip(x, 2, 3),
    ):  # fmt: skip
        assert isinstance(y, ag.Tensor)
        assert y.requires_grad


def test_reductions_of_ufuncs_are_recorded():
    x = leaf()
    assert np.add.reduce(x).tolist() == [5, 7, 9]
    assert np.add.reduce(x, axis=None).item() == 21
    assert np.maximum.reduce(x, axis=1).requires_grad
    assert np.add.accumulate(x, axis=1)[0].tolist() == [1, 3, 6]
    assert np.multiply.reduce(x, axis=1).requires_grad


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: np.interp(x, [0.0, 9.0], [0.0, 1.0]), "interp"),
        (lambda x: np.convolve(x[0], x[1]), "convolve"),
        (lambda x: np.nextafter(x, 0.0), "nextafter"),
        (lambda x: np.linalg.eig(x[:, :2]), "linalg.eig"),
        (lambda x: np.multiply.outer(x, x), "multiply.outer"),
        (lambda x: np.unwrap(x), "unwrap"),
        (lambda x: np.bincount([0, 1, 0], weights=x[0]), "bincount"),
        (lambda x: np.unique(x), "unique"),
        (lambda x: np.histogram(x), "histogram"),
        (lambda x: np.linalg.cond(x), "linalg.cond"),
        (lambda x: np.full_like(x.detach(), x[0, 0]), "full_like"),
    ],
)
def test_a_function_without_a_rule_refuses_by_name_and_never_detaches(call, name):
    x = leaf()
    with pytest.raises(TypeError, match=name.replace(".", r"\.")):
        call(x)
    with ag.no_grad():
        assert call(x) is not None
    result = call(x.detach())
    assert isinstance(result if not isinstance(result, tuple) else result[0], ag.Tensor)


def test_functions_that_only_look_are_allowed():
    x = leaf()
    assert np.shape(x) == (2, 3)
    assert np.ndim(x) == 2
    assert np.size(x) == 6
    assert np.allclose(x, x)
    assert np.array_equal(x, x.data)
    assert np.argmax(x).item() == 5
    assert np.zeros_like(x).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert not np.zeros_like(x).requires_grad
    assert np.full_like(x, 7.0)[0].tolist() == [7, 7, 7]
    assert np.unique(x > 5).tolist() == [False, True]
    assert np.shape in NOT_DIFFERENTIABLE
    assert [part.tolist() for part in np.nonzero(x > 5)] == [[1], [2]]


def test_keywords_of_ufuncs():
    x = leaf()
    assert np.add(x, 1, dtype=np.complex128).dtype == np.complex128
    with pytest.raises(TypeError, match="where"):
        np.add(x, 1, where=np.array([True, False, True]))
    with pytest.raises(TypeError):
        np.add(x)


def test_out_writes_into_a_tensor_unless_a_gradient_would_be_lost():
    target = ag.zeros(2, 3)
    np.exp(leaf().detach(), out=target)
    np.testing.assert_allclose(target.data, np.exp(leaf().data))
    with pytest.raises(GradError) as caught:
        np.exp(leaf(), out=target)
    assert caught.value.reason == "inplace"


def test_a_tensor_becomes_an_array_only_when_asked():
    x = leaf()
    assert type(np.asarray(x)) is np.ndarray
    assert np.asarray(x, dtype=np.float32).dtype == np.float32
    assert np.array(x) is not x.data


def test_methods_take_what_ndarray_takes():
    x = leaf()
    assert x.sum(0).shape == (3,)
    assert x.sum(axis=(0, 1), keepdims=True).shape == (1, 1)
    assert x.reshape(3, 2).shape == x.reshape((3, 2)).shape == x.reshape([3, -1]).shape == (3, 2)
    assert x.transpose().shape == x.transpose(1, 0).shape == x.transpose((1, 0)).shape == (3, 2)
    assert x.max(axis=1).tolist() == [3, 6]
    assert x.argmax(axis=1).tolist() == [2, 2]
    assert x.astype(np.float32).dtype == np.float32
    assert x.flatten().shape == x.ravel().shape == (6,)
    assert x.clip(2, 3).min().item() == 2
    assert x.take([0, 5]).tolist() == [1, 6]
    assert x.round().requires_grad
    assert x.dot(x.T).shape == (2, 2)
    assert x.swapaxes(0, 1).shape == (3, 2)
    assert x.cumsum().tolist()[-1] == 21
    assert x.copy().requires_grad
    assert x.mean().item() == 3.5
    assert x.std(ddof=1).item() == pytest.approx(x.data.std(ddof=1))
    assert x.squeeze().shape == (2, 3)
    assert x.trace().item() == 6
    assert x.repeat(2).shape == (12,)
    assert x.conj().requires_grad
    assert x.all().item() is True


def test_indexing_with_tensors_and_everything_numpy_takes():
    x = leaf()
    rows = ag.tensor([1, 0, 1])
    assert x[rows].shape == (3, 3)
    assert x[rows, 0].tolist() == [4, 1, 4]
    assert x[x > 3].tolist() == [4, 5, 6]
    assert x[..., None].shape == (2, 3, 1)
    assert x[ag.tensor(1)].tolist() == [4, 5, 6]
    assert x[:, [0, 0]].shape == (2, 2)
    x[rows].sum().backward()
    assert x.grad.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_where_alone_gives_positions():
    rows, columns = np.where(leaf() > 4)
    assert rows.tolist() == [1, 1]
    assert columns.tolist() == [1, 2]


def test_functions_that_write_count_as_writes():
    w, x = ag.zeros(2, 3), leaf()
    total = (w * x).sum()
    np.copyto(w, np.ones((2, 3)))
    with pytest.raises(GradError) as caught:
        total.backward()
    assert caught.value.reason == "modified"
    np.add.at(w, ([0, 0], [1, 1]), 1.0)
    np.fill_diagonal(w, 7.0)
    assert w.tolist() == [[7, 3, 1], [1, 7, 1]]
    for write in (
        lambda: np.copyto(x, 0.0), lambda: np.copyto(w, x), lambda: np.add.at(x, [0], 1.0),
    ):  # fmt: skip
        with pytest.raises(GradError) as caught:
            write()
        assert caught.value.reason == "inplace"
    with pytest.raises(TypeError, match="copyto"):
        np.copyto(np.zeros((2, 3)), x)


def test_an_index_that_is_changed_afterwards_does_no_harm():
    x = leaf()
    for rows in (np.array([1, 1]), ag.tensor([1, 1])):
        x.grad = None
        y = x[rows].sum()
        rows[...] = 0
        y.backward()
        assert x.grad.tolist() == [[0, 0, 0], [2, 2, 2]]


def test_full_singular_vectors_have_no_gradient():
    with pytest.raises(TypeError, match="full_matrices"):
        np.linalg.svd(leaf())
    assert np.linalg.svd(leaf().detach())[2].shape == (3, 3)
    assert np.linalg.svd(leaf(), full_matrices=False).S.requires_grad
