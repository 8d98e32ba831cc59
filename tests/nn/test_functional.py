"""Neural functions that are declared in `functional.py` itself."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (3,)])
def test_linear_has_the_gradient_of_its_formula(shape: tuple[int, ...]) -> None:
    layer = ag.nn.Linear(3, 2)
    x = ag.tensor(rng().normal(size=shape), requires_grad=True)
    leaves = [x, layer.weight, layer.bias]
    first = ag.autograd.grad((layer(x) ** 3).sum(), leaves, create_graph=True)
    formula = ((x @ layer.weight.T + layer.bias) ** 3).sum()
    expected = ag.autograd.grad(formula, leaves, create_graph=True)
    second = ag.autograd.grad(sum((g * g).sum() for g in first), leaves)
    expected_second = ag.autograd.grad(sum((g * g).sum() for g in expected), leaves)
    for a, b in zip((*first, *second), (*expected, *expected_second), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9)
    assert first[1].numpy().flags.c_contiguous  # in the layout of the weight


def test_linear_promotes_as_numpy_does() -> None:
    weight, bias = ag.ones(2, 3, dtype=np.float32), ag.ones(2)
    linear = ag.nn.functional.linear
    assert linear(np.ones((1, 3), np.float32), weight).dtype == np.float32
    assert linear(np.ones((1, 3), np.float32), weight, bias).dtype == np.float64


def test_attention_looks_where_it_may() -> None:
    q, k, v = (rng(i).normal(size=(2, 5, 4)) for i in range(3))
    attention = ag.nn.functional.scaled_dot_product_attention
    scores = q @ k.swapaxes(-1, -2) / 2
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(attention(q, k, v).numpy(), weights @ v)
    seen = np.exp(scores) * np.tri(5)
    causal = attention(q, k, v, is_causal=True).numpy()
    np.testing.assert_allclose(causal, seen / seen.sum(-1, keepdims=True) @ v)
    added = attention(q, k, v, attn_mask=np.where(np.tri(5) > 0, 0.0, -1e30)).numpy()
    np.testing.assert_allclose(added, causal)
    with pytest.raises(ValueError, match="either"):
        attention(q, k, v, attn_mask=np.tri(5) > 0, is_causal=True)
