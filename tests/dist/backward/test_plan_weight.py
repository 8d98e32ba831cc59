"""Which sweeps may run on the loop: by the work they mean, not by the size of what comes out."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd.op import parent_of
from aiograd.autograd.sweep import contributions
from aiograd.dist.backward.plan import LONG, weigh


def leaf(*shape, dtype=np.float32):
    return ag.tensor(np.zeros(shape, dtype), requires_grad=True)


def heavy(result):
    return weigh(contributions([parent_of(result)])) > LONG


class Own(ag.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize(
    "result",
    [
        leaf(256, 256) @ leaf(256, 256),  # a millisecond
        leaf(64, 784, dtype=np.float64) @ leaf(784, 10, dtype=np.float64),
        leaf(300_000) * 2.0,
        leaf(500_000).sum(),
    ],
)
def test_a_few_milliseconds_of_work_stay_on_the_loop(result):
    assert not heavy(result)


@pytest.mark.parametrize(
    "result",
    [
        leaf(1024, 1024) @ leaf(1024, 1024),
        leaf(100, 10_000, dtype=np.float64) @ leaf(10_000, 100, dtype=np.float64),  # small result
        ag.zeros(100, 10_000) @ leaf(10_000, 100, dtype=np.float64),
        (leaf(5_000_000) * 2.0).sum(),
        ag.linalg.inv(ag.eye(1000) + leaf(1000, 1000)),
    ],
)
def test_much_work_leaves_the_loop_even_if_its_result_is_small(result):
    assert heavy(result)


def test_many_small_nodes_are_much_work_too():
    x = leaf(3)
    for _ in range(3000):
        x = x + 1.0
    assert heavy(x)


def test_code_of_users_leaves_the_loop():
    assert heavy(Own.apply(leaf(3)))
    hooked = leaf(3)
    hooked.register_hook(lambda gradient: None)
    assert heavy(hooked * 2.0)
    middle = leaf(3) * 2.0
    middle.register_hook(lambda gradient: None)
    assert heavy(middle * 2.0)
