"""Reductions beyond their gradients, which `test_ops.py` checks for all tables."""

from __future__ import annotations

import numpy as np

import aiograd.autograd as ag


def test_logsumexp_of_infinities():
    assert ag.logsumexp([-np.inf, -np.inf]).item() == -np.inf
    assert ag.logsumexp([np.inf, 0.0]).item() == np.inf
    assert ag.logsumexp([-np.inf, 0.0]).item() == 0.0
    x = ag.tensor([-np.inf, 0.0], requires_grad=True)
    ag.logsumexp(x).backward()
    assert x.grad.tolist() == [0, 1]
