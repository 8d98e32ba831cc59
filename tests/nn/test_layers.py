"""Layers compute what they say, and start as they should."""

from __future__ import annotations

import math
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


def test_first_values_are_those_of_torch_and_can_be_repeated() -> None:
    layer = ag.nn.Linear(100, 400, generator=rng(3))
    again = ag.nn.Linear(100, 400, generator=rng(3))
    np.testing.assert_array_equal(layer.weight.numpy(), again.weight.numpy())
    np.testing.assert_array_equal(layer.bias.numpy(), again.bias.numpy())
    for values in (layer.weight.numpy(), layer.bias.numpy()):
        assert np.abs(values).max() <= 0.1
        assert np.abs(values).max() > 0.09
    conv = ag.nn.Conv2d(4, 8, 5, generator=rng(3))
    assert np.abs(conv.weight.numpy()).max() <= 1 / math.sqrt(100)
    assert ag.nn.Linear(2, 2, dtype=np.float32).weight.dtype == np.float32
    assert not np.array_equal(ag.nn.Linear(2, 2).weight.numpy(), ag.nn.Linear(2, 2).weight.numpy())


def test_initialisers_fill_in_place() -> None:
    init, t = ag.nn.init, ag.zeros(200, 300)
    assert init.zeros(init.ones(t)) is t
    assert (init.constant(t, 3.0).numpy() == 3).all()
    assert np.abs(init.xavier_uniform(t, generator=rng()).numpy()).max() <= math.sqrt(6 / 500)
    assert init.kaiming_normal(t, generator=rng()).numpy().std() == pytest.approx(
        math.sqrt(2 / 300), rel=0.02
    )
    assert init.normal(t, 5.0, 0.1, generator=rng()).numpy().mean() == pytest.approx(5, abs=0.01)
    with pytest.raises(ValueError, match="fan"):
        init.kaiming_uniform(ag.zeros(3))


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


def test_pooling_reduces_windows() -> None:
    x = rng().normal(size=(2, 3, 4, 6))
    windows = x.reshape(2, 3, 2, 2, 3, 2)
    np.testing.assert_allclose(ag.nn.MaxPool2d(2)(x).numpy(), windows.max(axis=(3, 5)))
    np.testing.assert_allclose(ag.nn.AvgPool2d(2)(x).numpy(), windows.mean(axis=(3, 5)))


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
