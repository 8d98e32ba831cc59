"""Neural operations beyond their gradients: values, modes, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.nn.functional import linear
from aiograd.testing import gradcheck, gradgradcheck


def leaf(*shape: int) -> ag.Tensor:
    return ag.randn(*shape, generator=np.random.default_rng(0), requires_grad=True)


def test_the_error_function_is_exact_to_the_last_digits():
    x = np.linspace(-7, 7, 2001)
    expected = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(ag.erf(x).data, expected, rtol=1e-15, atol=1e-300)
    assert math.isnan(ag.erf(float("nan")).item())
    assert ag.erf(np.float32(0.5)).dtype == np.float32
    assert ag.erf([np.inf, -np.inf]).tolist() == [1, -1]


def test_activations_do_not_overflow():
    far = ag.tensor([-1e4, 1e4], requires_grad=True)
    for function, expected in [
        (ag.sigmoid, [0, 1]), (ag.softplus, [0, 1e4]), (ag.relu, [0, 1e4]), (ag.silu, [0, 1e4]),
        (ag.elu, [-1, 1e4]), (ag.gelu, [0, 1e4]), (ag.tanh, [-1, 1]),
    ]:  # fmt: skip
        far.grad = None
        y = function(far)
        np.testing.assert_allclose(y.data, expected, atol=1e-12)
        y.sum().backward()
        assert np.isfinite(far.grad.data).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("lay", [np.ascontiguousarray, np.asfortranarray, lambda a: a[::2, ::3]])
def test_relu_is_the_same_for_arrays_of_every_size_and_layout(dtype, lay):
    a = lay(np.random.default_rng(0).standard_normal((150, 151)).astype(dtype))
    a[0, :4] = np.nan, -np.inf, np.inf, -0.0
    x = ag.tensor(a, requires_grad=True)
    y = ag.relu(x)
    np.testing.assert_array_equal(y.data, np.maximum(a, 0))
    assert y.dtype == dtype
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.data, a > 0)


def test_softmax_rows_add_up_to_one_whatever_their_size():
    a = ag.tensor([[1e4, 1e4 + 1], [-1e4, 0.0]])
    np.testing.assert_allclose(ag.softmax(a).data.sum(axis=-1), 1)
    assert np.isfinite(ag.log_softmax(a).data).all()


def test_logsumexp_of_infinities():
    assert ag.logsumexp([-np.inf, -np.inf]).item() == -np.inf
    assert ag.logsumexp([np.inf, 0.0]).item() == np.inf
    assert ag.logsumexp([-np.inf, 0.0]).item() == 0.0
    x = ag.tensor([-np.inf, 0.0], requires_grad=True)
    ag.logsumexp(x).backward()
    assert x.grad.tolist() == [0, 1]


def test_dropout_keeps_the_mean_and_passes_gradients_where_it_keeps():
    x = ag.ones(10_000, requires_grad=True)
    y = ag.dropout(x, 0.3, generator=np.random.default_rng(0))
    assert abs(y.data.mean() - 1) < 0.05
    assert abs((y.data == 0).mean() - 0.3) < 0.05
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.data, y.data)
    assert ag.dropout(x, 0.3, training=False) is x
    assert not ag.dropout(x, 1.0).data.any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        ag.dropout(x, 1.5)


def test_equal_generators_drop_the_same():
    x = leaf(20)
    first, second = (ag.dropout(x, generator=np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(first.data, second.data)


def test_batch_norm_notes_running_statistics_in_training_only():
    x = leaf(8, 3)
    mean, var = ag.zeros(3), ag.ones(3)
    ag.batch_norm(x, mean, var, training=True, momentum=0.5)
    np.testing.assert_allclose(mean.data, 0.5 * x.data.mean(0))
    np.testing.assert_allclose(var.data, 0.5 + 0.5 * x.data.var(0, ddof=1))
    before = mean.data.copy()
    y = ag.batch_norm(x, mean, var)
    np.testing.assert_array_equal(mean.data, before)
    np.testing.assert_allclose(y.data, (x.data - mean.data) / np.sqrt(var.data + 1e-5))


def test_layer_norm_refuses_another_shape():
    with pytest.raises(ValueError, match="normalized shape"):
        ag.layer_norm(leaf(2, 3), 4)


# ── losses ──────────────────────────────────────────────────────────────────────────────────────


def test_cross_entropy_of_classes_equals_that_of_their_probabilities():
    x = leaf(4, 3)
    classes = np.array([0, 2, 1, 2])
    hard = ag.cross_entropy(x, classes)
    soft = ag.cross_entropy(x, np.eye(3)[classes])
    assert hard.item() == pytest.approx(soft.item())
    assert ag.cross_entropy(x, ag.tensor(classes), reduction="none").shape == (4,)


@pytest.mark.parametrize("target", [[0, 5], [-1, 0]])
def test_a_class_outside_the_range_is_an_index_error(target: list[int]):
    with pytest.raises(IndexError):
        ag.cross_entropy(leaf(2, 3), np.array(target))


def test_unknown_reductions_are_refused():
    for loss in (ag.mse_loss, ag.l1_loss, ag.binary_cross_entropy_with_logits):
        with pytest.raises(ValueError, match="reduction"):
            loss(leaf(2), np.ones(2), reduction="average")


def test_losses_refuse_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="shape"):
        ag.binary_cross_entropy_with_logits(leaf(2), np.ones(3))
    with pytest.raises(ValueError, match="shapes"):
        ag.mse_loss(leaf(2), np.ones(3))


# ── embeddings ──────────────────────────────────────────────────────────────────────────────────


def test_the_padding_row_is_read_but_gets_no_gradient():
    table = leaf(3, 2)
    y = ag.embedding(np.array([0, 1, 1]), table, padding_idx=1)
    np.testing.assert_array_equal(y.data[1], table.data[1])
    y.sum().backward()
    assert table.grad.tolist() == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("rows", [[0, 3], [-1]])
def test_rows_outside_the_table_are_an_index_error(rows: list[int]):
    with pytest.raises(IndexError):
        ag.embedding(np.array(rows), leaf(3, 2))


def test_rows_must_be_whole_numbers():
    with pytest.raises(TypeError, match="integers"):
        ag.embedding(np.array([0.5]), leaf(3, 2))


def test_repeated_rows_add_up_in_small_and_large_batches():
    for size in (5, 500):
        table = leaf(4, 2)
        rows = np.arange(size) % 4
        ag.embedding(rows, table).sum().backward()
        np.testing.assert_array_equal(table.grad.data[:, 0], np.bincount(rows, minlength=4))


def test_bags_may_be_empty():
    table = leaf(3, 2)
    for mode in ("sum", "mean", "max"):
        y = ag.embedding_bag(np.array([1, 2]), table, np.array([0, 0, 2]), mode=mode)
        assert y.shape == (3, 2)
        assert not y.data[0].any()
        assert not y.data[2].any()
    assert ag.embedding_bag(np.array([], int), table, np.array([0]), mode="max").shape == (1, 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "median"}, "mode"),
        ({"offsets": [1, 2]}, "offsets"),
        ({"offsets": [0, 9]}, "offsets"),
        ({"offsets": [0, 2, 1]}, "offsets"),
        ({"offsets": None}, "offsets"),
        ({"mode": "mean", "per_sample_weights": np.ones(3)}, "per_sample_weights"),
        ({"mode": "sum", "per_sample_weights": np.ones(2)}, "per_sample_weights"),
    ],
)
def test_bags_refuse_what_makes_no_sense(options: dict[str, object], error: str):
    given = {"offsets": [0, 1]} | options
    with pytest.raises(ValueError, match=error):
        ag.embedding_bag(np.array([0, 1, 2]), leaf(3, 2), **given)


# ── images ──────────────────────────────────────────────────────────────────────────────────────


def test_convolution_refuses_kernels_that_do_not_fit():
    with pytest.raises(ValueError, match="fit"):
        ag.conv2d(leaf(1, 3, 4, 4), leaf(2, 2, 3, 3))
    with pytest.raises(ValueError, match="fit"):
        ag.conv2d(leaf(1, 1, 2, 2), leaf(1, 1, 3, 3))
    with pytest.raises(ValueError, match="stride"):
        ag.conv2d(leaf(1, 1, 4, 4), leaf(1, 1, 3, 3), stride=(1, 1, 1))


def test_pooling_at_a_tie_gives_the_gradient_to_the_first():
    x = ag.ones(1, 1, 2, 2, requires_grad=True)
    ag.max_pool2d(x, 2).sum().backward()
    assert x.grad.tolist() == [[[[1, 0], [0, 0]]]]


def test_pooling_does_not_lose_what_is_not_a_number():
    x = ag.tensor([[[[1.0, np.nan, 5.0], [2.0, 3.0, 4.0], [7.0, 6.0, 8.0]]]], requires_grad=True)
    y = ag.max_pool2d(x, 2, stride=1)
    np.testing.assert_array_equal(y.numpy(), [[[[np.nan, np.nan], [7.0, 8.0]]]])
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [[[[0, 2, 0], [0, 0, 0], [1, 0, 1]]]])


def test_images_without_a_batch_are_taken_alone():
    x = leaf(1, 4, 4)
    assert ag.conv2d(x, leaf(2, 1, 3, 3)).shape == (2, 2, 2)
    assert ag.max_pool2d(x, 2).shape == ag.avg_pool2d(x, 2).shape == (1, 2, 2)


@pytest.mark.parametrize("stack", [(), (2,)])
def test_a_layer_of_complex_numbers_has_the_right_gradients(stack):
    rng = np.random.default_rng(0)
    x, w, b = (
        ag.tensor(rng.normal(size=shape) + 1j * rng.normal(size=shape), requires_grad=True)
        for shape in ((*stack, 3, 2), (4, 2), (4,))
    )
    assert gradcheck(linear, (x, w, b))
    assert gradgradcheck(linear, (x, w, b))


def test_silu_has_gradients_for_complex_numbers_which_torch_has_not():
    x = ag.tensor([0.3 - 0.2j, -1.1 + 0.7j], requires_grad=True)
    assert gradcheck(ag.silu, (x,))
    assert gradgradcheck(ag.silu, (x,))


@pytest.mark.parametrize(
    "function",
    [
        ag.erf,
        ag.gelu,
        lambda a: ag.gelu(a, approximate="tanh"),
        ag.elu,
        ag.softplus,
        ag.softmax,
        ag.log_softmax,
        lambda a: ag.layer_norm(a, 2),
        lambda a: ag.batch_norm(a, training=True),
        lambda a: ag.cross_entropy(a, np.array([0, 1])),
        lambda a: ag.cross_entropy(a, np.eye(2)),
        lambda a: ag.binary_cross_entropy_with_logits(a, np.eye(2)),
    ],
)
def test_what_is_made_for_real_numbers_refuses_complex_ones(function):
    with pytest.raises(TypeError):
        function(ag.tensor(np.eye(2) * 1j, requires_grad=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_over_ignored_classes_is_nan_with_slope_zero(smoothing):
    x = leaf(2, 3)
    loss = ag.cross_entropy(x, np.array([-100, -100]), label_smoothing=smoothing)
    loss.backward()
    assert math.isnan(loss.item())
    assert not x.grad.numpy().any()


def test_a_convolution_of_no_images_is_one():
    x, w = leaf(0, 1, 3, 3), leaf(2, 1, 2, 2)
    y = ag.conv2d(x, w)
    assert y.shape == (0, 2, 2, 2)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not w.grad.numpy().any()
