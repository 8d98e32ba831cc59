"""A result that was received outside of a context: a local pass that ends in it says so."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GraphCutWarning


def predict(x, w):
    return ag.tanh(x @ w)


async def tokens(w):
    yield w * 2.0


def in_a_list(w):
    return [w * 2.0]


def line() -> int:
    return sys._getframe(1).f_lineno


@pytest.fixture
async def pair(workers):
    async with workers(1) as cluster:
        yield cluster


@pytest.fixture(params=["small", "large"])
def weights(request):
    # Small results come in batches, large ones alone, with their memory beside them.
    side = 4 if request.param == "small" else 200
    return ag.ones(side, side, requires_grad=True)


async def test_a_local_pass_that_ends_in_a_received_result_warns_with_the_line_and_the_cure(
    pair, weights
):
    called = line() + 1
    y = await ag.rpc_async("worker0", predict, args=(weights, weights))
    with pytest.warns(GraphCutWarning) as caught:
        passed = line() + 1
        y.sum().backward()
    text = str(caught[0].message)
    assert f"{__file__}:{called}" in text
    assert "predict" in text
    assert "ag.context()" in text and "ctx.backward" in text
    assert (caught[0].filename, caught[0].lineno) == (__file__, passed)
    assert weights.grad is None


async def test_the_warning_names_the_line_of_every_kind_of_call(pair):
    w = ag.ones(3, requires_grad=True)
    lines, results = [], []
    lines.append(line() + 1)
    results.append(await ag.rpc_async("worker0", ag.mul, args=(w, w)))
    lines.append(line() + 1)
    results.append((await ag.rpc_async("worker0", in_a_list, args=(w,)))[0])
    lines.append(line() + 1)
    async for item in ag.rpc_stream("worker0", tokens, args=(w,)):
        results.append(item)
    rref = ag.remote("worker0", ag.mul, args=(w, w))
    await rref.future()
    lines.append(line() + 1)
    results.append(await rref)
    lines.append(line() + 1)
    results.append(await rref.to_here())
    lines.append(line() + 1)
    results.append(await ag.remote("worker0", ag.mul, args=(w, w)))
    for number, result in zip(lines, results, strict=True):
        with pytest.warns(GraphCutWarning, match=f":{number}\\b"):
            result.sum().backward()


async def test_a_derivative_that_misses_what_a_result_was_computed_from_warns(pair):
    w = ag.ones(3, requires_grad=True)
    y = await ag.rpc_async("worker0", ag.mul, args=(w, w))
    with pytest.warns(GraphCutWarning):
        ag.autograd.grad((y * w).sum(), w)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ag.autograd.grad((y * y).sum(), y)  # asked for by name: no surprise


async def test_a_result_that_shall_be_a_leaf_says_so(pair):
    w = ag.ones(3, requires_grad=True)
    y = (await ag.rpc_async("worker0", ag.mul, args=(w, w))).requires_grad_()
    y.sum().backward()  # a warning would fail the test
    assert y.grad is not None


async def test_an_argument_is_a_leaf_of_the_called_function(pair):
    w = ag.ones(3, requires_grad=True)
    gradient = await ag.rpc_async("worker0", gradient_of, args=(w,))
    np.testing.assert_array_equal(gradient.numpy(), [2.0, 2.0, 2.0])


def gradient_of(w):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (w * 2.0).sum().backward()
    return w.grad


async def test_results_inside_a_context_do_not_warn(pair):
    w = ag.ones(3, requires_grad=True)
    async with ag.context() as ctx:
        y = await ag.rpc_async("worker0", ag.mul, args=(w, w))
        await ctx.backward(y.sum())
        np.testing.assert_array_equal(ctx.gradients[w].numpy(), [2.0, 2.0, 2.0])


async def test_a_received_result_that_requires_grad_still_says_so_with_a_bool(pair):
    y = await ag.rpc_async("worker0", ag.mul, args=(ag.ones(3, requires_grad=True), 2.0))
    assert y.requires_grad is True
    assert y.is_leaf
    y.requires_grad = False
    assert y.requires_grad is False
