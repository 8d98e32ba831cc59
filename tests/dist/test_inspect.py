"""What a backward pass waits for, as its workers tell it."""

from __future__ import annotations

import asyncio
import contextlib

import aiograd as ag
from aiograd.testing import Faults
from tests.support.waiting import until

def double(x):
    return x * 2.0


async def double_twice(x):
    return await ag.rpc_async("worker1", double, args=(x * 2.0,))


def lose_gradients():
    """Let no gradient leave the worker on which this is called."""
    ag.current_worker().faults = Faults(fail={}, drop=["gradients"])


async def passes(worker):
    return (await ag.rpc_async(worker, ag.debug_info))["backward_passes"]


@contextlib.asynccontextmanager
async def under_way(work):
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_pass_in_flight_can_tell_who_waits_for_whom(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        assert await ctx.explain() == "no backward pass is under way"
        y = await ag.rpc_async("worker0", double_twice, args=(x,))
        await ag.rpc_async("worker0", lose_gradients)
        async with under_way(ctx.backward(y.sum())):
            await until(lambda: passes("worker0"))
            told = await ctx.explain()
            assert "driver waits for 1 edges of worker0" in told
            assert "worker0 waits for 1 edges of worker1" in told  # the driver knew of worker0 only
        assert await ctx.explain() == "no backward pass is under way"


async def test_a_worker_that_does_not_answer_is_part_of_the_explanation(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(1) as cluster, ag.context() as ctx:
        y = await ag.rpc_async("worker0", double, args=(x,))
        cluster.driver.faults = Faults(fail=["gradients.waits"], drop=["gradients"])
        async with under_way(ctx.backward(y.sum())):
            await until(lambda: passes("driver"))
            told = await ctx.explain()
            assert "driver waits for 1 edges of worker0" in told
            assert "worker0 does not answer" in told
