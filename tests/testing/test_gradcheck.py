"""The gradient check itself: it must fail when a gradient is wrong."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd
import aiograd.autograd as ag
from aiograd.errors import GradError
from aiograd.testing import gradcheck, gradgradcheck


def leaf(*values: float) -> ag.Tensor:
    return ag.tensor(values or (0.5, 1.0, 2.0), requires_grad=True)


right = ag.op("right", lambda a: a**3, lambda g, y, a: g * 3 * a**2)
wrong = ag.op("wrong", lambda a: a**3, lambda g, y, a: g * 2 * a**2)
half = ag.op(
    "half", lambda a: a**3, lambda g, y, a: g * (3 * np.asarray(a) ** 2)
)  # first order only


def test_a_right_gradient_passes():
    assert gradcheck(right, (leaf(),)) is True
    assert gradcheck(right, leaf()) is True
    assert gradgradcheck(right, (leaf(),)) is True


def test_a_wrong_gradient_is_shown_beside_the_differences():
    with pytest.raises(GradError, match="by differences") as caught:
        gradcheck(wrong, (leaf(),))
    assert caught.value.reason == "gradcheck"
    assert gradcheck(wrong, (leaf(),), raise_exception=False) is False


def test_a_rule_that_cannot_be_differentiated_fails_the_second_check():
    assert gradcheck(half, (leaf(),))
    assert gradgradcheck(half, (leaf(),), raise_exception=False) is False


def test_tolerances_are_respected():
    slightly = ag.op("slightly", lambda a: a * 1.0, lambda g, y, a: g * 1.01)
    assert gradcheck(slightly, (leaf(),), raise_exception=False) is False
    assert gradcheck(slightly, (leaf(),), rtol=0.1)


def test_complex_functions_are_checked_as_pairs():
    z = ag.tensor([1.0 + 2.0j, 0.5 - 1.0j], requires_grad=True)
    assert gradcheck(lambda z: z * z, (z,))
    assert gradcheck(np.absolute, (z,))
    assert gradgradcheck(lambda z: z * z.conj(), (z,))
    without = ag.op("without", lambda a: a * a, lambda g, y, a: g * 2 * a)  # no conjugate
    assert gradcheck(without, (z,), raise_exception=False) is False


def test_several_inputs_and_outputs_and_other_arguments():
    def func(a: ag.Tensor, b: ag.Tensor, power: int) -> tuple[ag.Tensor, ag.Tensor]:
        return a * b, a**power

    assert gradcheck(func, (leaf(), leaf(1.5, 2.5, 3.5), 2))
    assert gradgradcheck(func, (leaf(), ag.ones(3), 3))


def test_inputs_are_not_touched():
    x = leaf()
    before = x.data.copy()
    gradcheck(right, (x,))
    np.testing.assert_array_equal(x.data, before)
    assert x.grad is None


def test_what_cannot_be_checked_is_a_value_error():
    with pytest.raises(ValueError, match="requires grad"):
        gradcheck(right, (ag.ones(2),))
    with pytest.raises(ValueError, match="floating point"):
        gradcheck(np.argmax, (leaf(),))


async def test_an_awaitable_function_is_checked_with_an_awaitable_derivative():
    asked = []

    async def func(x: ag.Tensor) -> ag.Tensor:
        return right(x)

    async def bad(x: ag.Tensor) -> ag.Tensor:
        return wrong(x)

    async def derivative(*args: object, **options: object) -> object:
        asked.append(options)
        return ag.grad(*args, **options)  # type: ignore[arg-type]

    assert await gradcheck(func, (leaf(),), derivative=derivative)
    assert await gradgradcheck(func, (leaf(),), derivative=derivative)
    assert any(options["create_graph"] for options in asked)
    assert await gradcheck(bad, (leaf(),), derivative=derivative, raise_exception=False) is False
    with pytest.raises(GradError):
        await gradcheck(bad, (leaf(),), derivative=derivative)


async def test_without_workers_the_distributed_derivative_is_the_local_one():
    async def func(x: ag.Tensor) -> ag.Tensor:
        return right(x)

    assert await gradcheck(func, (leaf(),))


async def test_calls_to_workers_are_checked_also_where_no_context_is_open(cluster):
    async with cluster(1):

        def call(x: ag.Tensor) -> aiograd.Future[ag.Tensor]:
            return aiograd.rpc_async("worker0", ag.tanh, (x,))

        assert await gradcheck(call, (leaf(),))
        assert await gradgradcheck(call, (leaf(),))
        assert aiograd.debug_info()["contexts"] == 0
        async with aiograd.context() as context:
            assert await gradcheck(call, (leaf(),))
            assert context.known_workers == {"worker0"}
