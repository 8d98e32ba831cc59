"""Layers without parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_pooling_reduces_windows() -> None:
    x = rng().normal(size=(2, 3, 4, 6))
    windows = x.reshape(2, 3, 2, 2, 3, 2)
    np.testing.assert_allclose(ag.nn.MaxPool2d(2)(x).numpy(), windows.max(axis=(3, 5)))
    np.testing.assert_allclose(ag.nn.AvgPool2d(2)(x).numpy(), windows.mean(axis=(3, 5)))


def test_dropout_scales_what_is_left() -> None:
    layer = ag.nn.Dropout(0.25, generator=rng(1))
    y = layer(ag.ones(10_000)).numpy()
    assert set(np.unique(y)) == {0.0, 1 / 0.75}
    assert y.mean() == pytest.approx(1, abs=0.03)
    with pytest.raises(ValueError, match="between"):
        ag.nn.Dropout(1.5)


@pytest.mark.parametrize(
    ("layer", "formula"),
    [
        (ag.nn.ReLU(), lambda x: np.maximum(x, 0)),
        (ag.nn.Sigmoid(), lambda x: 1 / (1 + np.exp(-x))),
        (ag.nn.Tanh(), np.tanh),
        (ag.nn.SiLU(), lambda x: x / (1 + np.exp(-x))),
        (ag.nn.LeakyReLU(0.1), lambda x: np.where(x > 0, x, 0.1 * x)),
        (ag.nn.Softplus(), lambda x: np.log1p(np.exp(x))),
        (ag.nn.GELU(), lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2),
        (ag.nn.Softmax(), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
        (ag.nn.LogSoftmax(0), lambda x: x - np.log(np.exp(x).sum(0, keepdims=True))),
        (ag.nn.Identity(), lambda x: x),
        (ag.nn.Flatten(), lambda x: x.reshape(4, -1)),
    ],
    ids=lambda part: type(part).__name__ if isinstance(part, ag.nn.Module) else "",
)
def test_activations_follow_their_formulas(layer: Any, formula: Any) -> None:
    x = rng().normal(size=(4, 3, 2))
    np.testing.assert_allclose(np.asarray(layer(x)), formula(x), rtol=1e-7, atol=1e-12)
