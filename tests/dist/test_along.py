"""Values that come along with their creation, inside a context: gradients cross all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag


def double(x: Any) -> Any:
    return x * 2.0


async def double_later(x: Any) -> Any:
    await asyncio.sleep(0)
    return x * 2.0


@pytest.mark.parametrize("function", [double, double_later, ag.square])
async def test_the_gradient_of_a_value_that_came_along(workers: Any, function: Any) -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    expected = 4 * x.data**3 if function is ag.square else 8 * x.data
    async with workers(2):
        caller = ag.current_worker().agent.link("worker1").caller
        asked = []
        for _ in range(2):  # the first time the function is not known there
            async with ag.context() as ctx:
                rref = ag.remote("worker1", function, args=(x,))
                before = caller.last_id
                fetch = rref.to_here()
                asked.append(caller.last_id - before)
                y = await fetch
                await rref.release()
                await ctx.backward((y * y).sum())
                np.testing.assert_allclose(ctx.gradients[x].numpy(), expected)
        assert asked == [0, 0]


async def test_a_fetch_in_another_context_is_asked_for(workers: Any) -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(2):
        await ag.rpc_async("worker1", double, args=(x,))
        outside = ag.remote("worker1", double, args=(x,))
        async with ag.context() as ctx:
            y = await outside
            await ctx.backward(y.sum())
            assert x not in ctx.gradients  # it was made outside: an independent leaf there
