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


# ── complex numbers ─────────────────────────────────────────────────────────────────────────────


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
