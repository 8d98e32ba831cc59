"""Polling for a moment after traffic, and not a moment longer."""

from __future__ import annotations

import asyncio

from aiograd.rpc.calls import rpc_async


def add(x, y):
    return x + y


async def test_a_loop_polls_after_traffic_and_then_sleeps(agents):
    async with agents(2) as (a, b):
        a.runtime.spin = 0.01  # shared by both
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert a.polling.awake
        async with asyncio.timeout(2):
            while a.polling.awake or b.polling.awake:
                await asyncio.sleep(0.002)


async def test_polling_in_vain_is_given_up_for_a_while(agents):
    async with agents(2) as (a, b):
        a.runtime.spin = 1e-6
        for _ in range(50):
            assert await rpc_async("worker1", add, (1, 2)) == 3
            await asyncio.sleep(0.001)
        assert a.polling.rest or b.polling.rest


async def test_without_spin_nothing_polls(agents):
    async with agents(2) as (a, _):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert not a.polling.awake
