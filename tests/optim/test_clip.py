"""Limits on gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag


def with_grad(values: Any) -> Any:
    leaf = ag.zeros(*np.shape(values), requires_grad=True)
    leaf.grad = ag.tensor(values)
    return leaf


def test_all_gradients_are_scaled_together() -> None:
    a, b, idle = with_grad([3.0, 0.0]), with_grad([[4.0]]), ag.zeros(1, requires_grad=True)
    assert ag.optim.clip_grad_norm([a, b, idle], 1.0) == 5.0
    np.testing.assert_allclose(a.grad.numpy(), [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(b.grad.numpy(), [[0.8]], rtol=1e-6)
    assert idle.grad is None


def test_small_gradients_stay_as_they_are() -> None:
    a = with_grad([0.3, 0.4])
    assert ag.optim.clip_grad_norm(a, 1.0) == pytest.approx(0.5)
    assert a.grad.tolist() == [0.3, 0.4]


@pytest.mark.parametrize(("kind", "norm"), [(1.0, 7.0), (float("inf"), 4.0), (3.0, 91 ** (1 / 3))])
def test_other_norms(kind: float, norm: float) -> None:
    assert ag.optim.clip_grad_norm(with_grad([-3.0, 4.0]), 100.0, kind) == pytest.approx(norm)


def test_gradients_can_come_from_a_mapping() -> None:
    leaf = ag.zeros(2, requires_grad=True)
    grads = {leaf: ag.tensor([30.0, 40.0])}
    assert ag.optim.clip_grad_norm([leaf], 5.0, grads=grads) == 50.0
    np.testing.assert_allclose(grads[leaf].numpy(), [3.0, 4.0], rtol=1e-6)
    assert leaf.grad is None


def test_sparse_gradients_stay_sparse() -> None:
    leaf = ag.ones(4, 2, requires_grad=True)
    ag.nn.functional.embedding(np.array([1, 1, 3]), leaf, sparse=True).sum().backward()
    assert ag.optim.clip_grad_norm([leaf], 1.0) == pytest.approx(np.sqrt(10))
    assert leaf.grad.is_sparse
    assert np.linalg.norm(leaf.grad.numpy()) == pytest.approx(1.0, rel=1e-5)
    ag.optim.clip_grad_value(leaf, 0.5)
    assert leaf.grad.is_sparse
    assert leaf.grad.numpy().max() == 0.5


def test_values_are_cut() -> None:
    a = with_grad([-3.0, 0.5])
    ag.optim.clip_grad_value([a], 1.0)
    assert a.grad.tolist() == [-1.0, 0.5]
