"""Elementwise operations beyond their gradients, which `test_ops.py` checks for all tables."""

from __future__ import annotations

import math

import numpy as np

import aiograd.autograd as ag


def test_the_error_function_is_exact_to_the_last_digits():
    x = np.linspace(-7, 7, 2001)
    expected = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(ag.erf(x).data, expected, rtol=1e-15, atol=1e-300)
    assert math.isnan(ag.erf(float("nan")).item())
    assert ag.erf(np.float32(0.5)).dtype == np.float32
    assert ag.erf([np.inf, -np.inf]).tolist() == [1, -1]
