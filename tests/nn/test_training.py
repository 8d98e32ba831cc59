"""Small models really learn: layers, losses and optimisers together."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiograd as ag


def fit(model: Any, optimizer: Any, x: Any, y: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ag.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_convolutional_net_learns_where_a_bright_spot_is() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 48)
    x = rng.normal(0, 0.3, size=(48, 1, 8, 8))
    for image, quarter in zip(x, y, strict=True):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        image[0, top : top + 4, left : left + 4] += 1
    model = ag.nn.Sequential(
        ag.nn.Conv2d(1, 4, 3, padding=1, generator=rng),
        ag.nn.BatchNorm2d(4),
        ag.nn.ReLU(),
        ag.nn.MaxPool2d(2),
        ag.nn.Conv2d(4, 8, 3, generator=rng),
        ag.nn.ReLU(),
        ag.nn.Flatten(),
        ag.nn.Linear(32, 4, generator=rng),
    )
    losses = fit(model, ag.optim.Adam(model.parameters(), lr=0.02), x, y, 25)
    assert losses[-1] < 0.05 < 1.0 < losses[0]
    with ag.no_grad():
        assert (model.eval()(x).numpy().argmax(axis=1) == y).all()


def test_sparse_and_dense_embeddings_learn_alike() -> None:
    words = np.random.default_rng(0).integers(0, 50, (32, 6))
    y = (words < 5).any(axis=1).astype(int)
    curves = []
    for sparse in (True, False):
        rng = np.random.default_rng(1)
        model = ag.nn.Sequential(
            ag.nn.EmbeddingBag(50, 8, mode="mean", sparse=sparse, generator=rng),
            ag.nn.Linear(8, 2, generator=rng),
        )
        curves.append(fit(model, ag.optim.Adagrad(model.parameters(), lr=0.3), words, y, 20))
        assert model[0].weight.grad.is_sparse == sparse
    np.testing.assert_allclose(*curves, rtol=1e-9)
    assert curves[0][-1] < curves[0][0] / 3
