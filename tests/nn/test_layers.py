"""Layers compute what they say, and start as they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_linear_is_a_matrix_product() -> None:
    layer = ag.nn.Linear(3, 2)
    x = rng().normal(size=(4, 5, 3))
    expected = x @ layer.weight.numpy().T + layer.bias.numpy()
    np.testing.assert_allclose(layer(x).numpy(), expected)
    np.testing.assert_allclose(layer(x[0, 0]).numpy(), expected[0, 0])
    bare = ag.nn.Linear(3, 2, bias=False)
    np.testing.assert_allclose(bare(x).numpy(), x @ bare.weight.numpy().T)
    with pytest.raises(ValueError, match="does not fit"):
        layer(np.ones((2, 4)))


def test_embedding_picks_rows() -> None:
    layer = ag.nn.Embedding(10, 3, padding_idx=2)
    rows = np.array([[1, 2], [2, 9]])
    np.testing.assert_array_equal(layer(rows).numpy(), layer.weight.numpy()[rows])
    assert (layer.weight.numpy()[2] == 0).all()
    layer(rows).sum().backward()
    assert layer.weight.grad.numpy()[:, 0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    sparse = ag.nn.Embedding(10, 3, sparse=True)
    sparse(rows).sum().backward()
    assert sparse.weight.grad.is_sparse
    assert sparse.weight.grad.numpy()[:, 0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_reduce_rows(mode: str) -> None:
    layer = ag.nn.EmbeddingBag(16, 4, mode=mode, sparse=True)
    rows, offsets = np.array([1, 2, 4, 5, 4, 3, 2, 9]), np.array([0, 4])
    reduce = getattr(np, mode)
    table = layer.weight.numpy()
    expected = np.stack([reduce(table[rows[:4]], axis=0), reduce(table[rows[4:]], axis=0)])
    np.testing.assert_allclose(layer(rows, offsets).numpy(), expected)
    np.testing.assert_allclose(layer(rows.reshape(2, 4)).numpy(), expected)
    with pytest.raises(ValueError, match="mode"):
        ag.nn.EmbeddingBag(2, 2, mode="median")


def test_bags_take_weights_per_sample() -> None:
    layer = ag.nn.EmbeddingBag(16, 16, mode="sum", sparse=True)
    rows, offsets = np.array([1, 2, 4, 5, 4, 3, 2, 9]), np.array([0, 4])
    weights = ag.rand(8, requires_grad=True)
    y = layer(rows, offsets, per_sample_weights=weights)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert layer.weight.grad.is_sparse
    np.testing.assert_allclose(weights.grad.numpy(), 2 * layer.weight.numpy()[rows].sum(axis=1))
    expected = 2 * np.bincount(rows, weights.numpy(), minlength=16)
    np.testing.assert_allclose(layer.weight.grad.numpy()[:, 0], expected)


def test_convolution_slides_kernels() -> None:
    layer = ag.nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=1)
    x = rng().normal(size=(2, 2, 5, 6))
    y = layer(x).numpy()
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    assert y.shape == (2, 3, 6, 3)
    window = padded[1, :, 2:4, 2:5]
    expected = (layer.weight.numpy()[2] * window).sum() + layer.bias.numpy()[2]
    assert y[1, 2, 2, 1] == pytest.approx(expected)
    with pytest.raises(ValueError, match="groups"):
        ag.nn.Conv2d(3, 4, 3, groups=2)


def test_layer_norm_standardises_each_sample() -> None:
    layer = ag.nn.LayerNorm((2, 3))
    y = layer(rng().normal(5, 3, size=(4, 2, 3))).numpy()
    np.testing.assert_allclose(y.mean(axis=(1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(y.std(axis=(1, 2)), 1, rtol=1e-4)
    assert len(list(layer.parameters())) == 2
    assert not list(ag.nn.LayerNorm(3, elementwise_affine=False).parameters())


@pytest.mark.parametrize(
    ("cls", "shape"),
    [
        (ag.nn.BatchNorm1d, (8, 3)),
        (ag.nn.BatchNorm1d, (8, 3, 5)),
        (ag.nn.BatchNorm2d, (8, 3, 4, 5)),
    ],
)
def test_batch_norm_standardises_each_channel_and_remembers(cls: Any, shape: Any) -> None:
    layer = cls(3)
    x = rng().normal(5, 3, size=shape)
    axes = tuple(i for i in range(len(shape)) if i != 1)
    y = layer(x).numpy()
    np.testing.assert_allclose(y.mean(axis=axes), 0, atol=1e-12)
    np.testing.assert_allclose(layer.running_mean.numpy(), 0.1 * x.mean(axis=axes))
    np.testing.assert_allclose(layer.running_var.numpy(), 0.9 + 0.1 * x.var(axis=axes, ddof=1))
    assert int(layer.num_batches_tracked) == 1
    layer.eval()
    column = (1, 3) + (1,) * (len(shape) - 2)
    mean, var = layer.running_mean.numpy(), layer.running_var.numpy()
    expected = (x - mean.reshape(column)) / np.sqrt(var.reshape(column) + 1e-5)
    np.testing.assert_allclose(layer(x).numpy(), expected)
    assert int(layer.num_batches_tracked) == 1
    assert "running_var" in layer.state_dict()
    with pytest.raises(ValueError, match="channels"):
        layer(np.ones((2, 4, *shape[2:])))
