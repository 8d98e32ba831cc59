"""Convolution and pooling: shapes, ties, images without a batch."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd.autograd as ag


def leaf(*shape: int) -> ag.Tensor:
    return ag.randn(*shape, generator=np.random.default_rng(0), requires_grad=True)


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


def test_a_convolution_of_no_images_is_one():
    x, w = leaf(0, 1, 3, 3), leaf(2, 1, 2, 2)
    y = ag.conv2d(x, w)
    assert y.shape == (0, 2, 2, 2)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not w.grad.numpy().any()
