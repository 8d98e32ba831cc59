"""Counters of limits, and the lag of event loops."""

from __future__ import annotations

import asyncio
import time

from aiograd.rpc.api import inline, rpc_async
from aiograd.rpc.observe.metrics import EVERY, NAMES, Limits, measure_lag, metrics
from tests.support.waiting import until


@inline
def hold_the_loop(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def sampled(more_than):
    """Wait until the lag was sampled more often than that."""
    found = {}

    async def enough():
        found.update(await rpc_async("worker1", metrics))
        return found["loop_lag_samples"] > more_than

    await until(enough)
    return found


async def test_numbers_are_there_at_any_time(agents):
    async with agents(2) as (agent, _):
        await rpc_async("worker1", abs, (-1,))
        found = metrics()
        assert found["calls_started"] == 1
        assert (found["pending_calls"], found["links_open"]) == (0, 1)
        assert 0 < found["bytes_sent"] < found["memory_bytes"]
        there = await rpc_async("worker1", metrics)
        assert there["bytes_received"] >= found["bytes_sent"]
        assert there["pending_calls"] == there["running_calls"] == there["calls_started"] == 0
        agent.limits.reached("window")
        assert metrics()["limit_reached_window"] == 1


async def test_the_lag_is_measured_only_when_asked_for(agents):
    async with agents(2) as (_, other):
        assert "loop_lag_samples" not in await rpc_async("worker1", metrics)
        await rpc_async("worker1", measure_lag)
        found = await sampled(1)
        assert 0 <= found["loop_lag_mean"] <= found["loop_lag_max"]
        assert "loop_lag_samples" not in metrics()  # the other workers go on as before
        await rpc_async("worker1", measure_lag, (False,))
        assert "loop_lag_samples" not in await rpc_async("worker1", metrics)
        assert all(other.links.counters()[each] == 0 for each in other.links.counters())


async def test_a_function_that_holds_the_loop_shows_in_the_lag(agents):
    async with agents(2):
        await rpc_async("worker1", measure_lag)
        held = 3 * EVERY
        await rpc_async("worker1", hold_the_loop, (held,))
        found = await sampled(0)
        assert found["loop_lag_max"] >= held - EVERY - 0.001


async def test_the_measurement_can_be_switched_from_a_thread(agents):
    async with agents(2):
        assert "loop_lag_samples" not in metrics()
        await asyncio.to_thread(measure_lag)
        await until(lambda: metrics().get("loop_lag_samples"))
        await asyncio.to_thread(measure_lag, False)
        await until(lambda: "loop_lag_samples" not in metrics())


def test_limits_count_from_zero_and_show_what_was_reached():
    limits = Limits()
    assert limits.as_dict() == dict.fromkeys(NAMES, 0)
    limits.reached("window")
    assert limits["window"] == 1
    assert repr(limits) == "Limits(window 1)"
