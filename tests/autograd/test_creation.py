"""New tensors: from data, filled, counted, random."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd.autograd as ag


def test_tensor_copies_and_from_numpy_shares():
    array = np.ones(3, np.float32)
    copied, shared = ag.tensor(array), ag.from_numpy(array)
    array[0] = 5
    assert copied.tolist() == [1, 1, 1]
    assert shared.tolist() == [5, 1, 1]
    assert copied.dtype == shared.dtype == np.float32


def test_floats_default_to_double_and_integers_to_int64():
    assert ag.tensor([1.0]).dtype == np.float64
    assert ag.tensor([1]).dtype == np.int64
    assert ag.tensor([1], dtype=np.float32).dtype == np.float32


def test_from_numpy_refuses_lists():
    with pytest.raises(TypeError, match="list"):
        ag.from_numpy([1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("maker", "args"),
    [(ag.zeros, ()), (ag.ones, ()), (ag.empty, ()), (ag.rand, ()), (ag.randn, ())],
)
def test_makers_take_the_shape_as_numbers_or_one_tuple(maker, args):
    assert maker(2, 3).shape == maker((2, 3)).shape == maker([2, 3]).shape == (2, 3)
    assert maker(4).shape == (4,)
    assert maker().shape == ()
    assert maker(2).dtype == np.float64
    made = maker(2, dtype=np.float32, requires_grad=True)
    assert made.dtype == np.float32
    assert made.requires_grad


def test_makers_fill_count_and_draw():
    assert ag.full((2,), 7.0).tolist() == [7.0, 7.0]
    assert ag.eye(2).tolist() == [[1, 0], [0, 1]]
    assert ag.arange(3).tolist() == [0, 1, 2]
    assert ag.arange(1.0, 2.0, 0.5).tolist() == [1.0, 1.5]
    assert ag.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
    draws = [ag.randn(3, generator=np.random.default_rng(1)).tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    numbers = ag.randint(0, 5, (100,), generator=np.random.default_rng(1))
    assert set(numbers.tolist()) == {0, 1, 2, 3, 4}
    assert ag.randint(5, (2, 3)).shape == ag.randint(0, 5, 2, 3).shape == (2, 3)


def test_like_makers_follow_shape_and_dtype():
    other = ag.ones(2, 3, dtype=np.float32)
    for made in (
        ag.zeros_like(other), ag.ones_like(other), ag.empty_like(other), ag.rand_like(other),
        ag.randn_like(other), ag.full_like(other, 2), ag.randint_like(other, 5),
    ):  # fmt: skip
        assert made.shape == (2, 3)
        assert made.dtype == np.float32
    assert ag.zeros_like(np.ones(2), dtype=int).dtype == np.int64
