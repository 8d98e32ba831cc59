"""Threads of simulated nodes: they take simulated time, and end with their node."""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag
from aiograd.dist.registry import context
from aiograd.errors import BackwardFailed
from aiograd.rpc.api import rpc_async
from aiograd.testing import simulate
from aiograd.testing.simulator.workload.gradients import heavy
from aiograd.testing.simulator.world import World


async def weighty(x, seconds):
    return heavy(x, seconds)


def test_a_heavy_gradient_takes_simulated_time_while_the_loop_goes_on():
    async def program() -> tuple[float, int]:
        loop, ticks = asyncio.get_running_loop(), 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.1)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        x = ag.ones(2, requires_grad=True)
        async with context() as ctx:
            loss = (await rpc_async("worker0", weighty, (x, 2.0))).sum()
            begin = loop.time()
            await ctx.backward(loss)
            assert ctx.gradients[x].tolist() == [1.0, 1.0]
        ticking.cancel()
        return loop.time() - begin, ticks

    seconds, ticks = simulate(program)
    assert 2.0 <= seconds < 2.2
    assert 19 <= ticks <= 22


def test_the_thread_of_a_crashed_worker_never_goes_on():
    async def program(world: World) -> None:
        x = ag.ones(2, requires_grad=True)
        async with context() as ctx:
            loss = (await rpc_async("worker0", weighty, (x, 2.0))).sum()
            world.loop.call_later(1.0, world.crash, "worker0", context=world.context)
            with pytest.raises(BackwardFailed) as caught:
                await ctx.backward(loss)
        assert caught.value.worker == "worker0"
        assert 1.0 <= world.loop.time() < 2.0

    simulate(program)
