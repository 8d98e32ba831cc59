"""The lag of event loops."""

from __future__ import annotations

import asyncio
import time

from aiograd.rpc.api import inline, rpc_async
from aiograd.rpc.observe.metrics import EVERY, measure_lag, metrics
from tests.support.waiting import until


@inline
def hold_the_loop(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def sampled(more_than):
    """Wait until the timer has come that often."""
    while (found := await rpc_async("worker1", metrics))["loop_lag_samples"] <= more_than:
        await asyncio.sleep(0)
    return found


async def test_the_lag_is_measured_only_when_asked_for(agents):
    async with agents(2) as (_, other):
        assert await rpc_async("worker1", metrics) == {}
        await rpc_async("worker1", measure_lag)
        found = await sampled(1)
        assert 0 <= found["loop_lag_mean"] <= found["loop_lag_max"]
        assert metrics() == {}  # the other workers go on as before
        await rpc_async("worker1", measure_lag, (False,))
        assert await rpc_async("worker1", metrics) == {}
        assert all(other.links.counters()[each] == 0 for each in other.links.counters())


async def test_who_holds_the_loop_is_seen(agents):
    async with agents(2):
        await rpc_async("worker1", measure_lag)
        held = 3 * EVERY
        await rpc_async("worker1", hold_the_loop, (held,))
        found = await sampled(0)
        assert found["loop_lag_max"] >= held - EVERY - 0.001


async def test_it_can_be_switched_from_a_thread(agents):
    async with agents(2):
        assert metrics() == {}
        await asyncio.to_thread(measure_lag)
        await until(lambda: metrics().get("loop_lag_samples"))
        await asyncio.to_thread(measure_lag, False)
        await until(lambda: metrics() == {})
