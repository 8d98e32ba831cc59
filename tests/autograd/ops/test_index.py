"""Picking elements, where a method is written otherwise than the function."""

from __future__ import annotations

import numpy as np

import aiograd as ag


def test_compress_as_a_method_takes_the_condition_as_ndarray_does() -> None:
    x = np.arange(6.0).reshape(3, 2)
    for axis in (0, None):
        condition = [True, False, True]
        assert np.array_equal(ag.tensor(x).compress(condition, axis), x.compress(condition, axis))
    assert np.array_equal(ag.tensor(x).compress([False, True], axis=1), x[:, 1:])
