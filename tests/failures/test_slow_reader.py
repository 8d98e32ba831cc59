"""F4: a worker that does not read. Others are served, memory is bounded, deadlines hold."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import DeadlineExceeded, Overloaded
from tests.failures.work import echo, stopped

MIB = 1 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def latencies(name: str, count: int) -> list[float]:
    found = []
    for i in range(count):
        began = time.perf_counter()
        assert await ag.rpc_async(name, echo, (i,)) == i
        found.append(time.perf_counter() - began)
        await asyncio.sleep(0)
    return sorted(found)


async def make_many(name: str, count: int) -> list[ag.Future]:
    """Make tiny calls, 500 per iteration, so that the loop also reads replies."""
    made: list[ag.Future] = []
    while len(made) < count:
        made += [ag.rpc_async(name, echo, (i,)) for i in range(500)]
        await asyncio.sleep(0)
    return made


@pytest.mark.deadline(60)
async def test_f4_a_worker_that_does_not_read_does_not_slow_calls_to_others(cluster, figure):
    async with cluster(2) as c:
        await latencies("worker0", 1)
        idle = await latencies("worker1", 300)
        array = np.zeros(16 * MIB, np.uint8)
        with stopped(c, "worker0"):
            before, began = resident(), time.monotonic()
            large = [ag.rpc_async("worker0", echo, (array,), timeout=2.0) for _ in range(64)]
            ended = asyncio.gather(*large, return_exceptions=True)
            ends: list[float] = []
            ended.add_done_callback(lambda _: ends.append(time.monotonic()))
            tiny = await make_many("worker0", 50_000)
            busy = await latencies("worker1", 300)
            grown = max(0, resident() - before)
            errors = await ended
            late = ends[0] - began - 2.0
            assert not any(call.done() for call in tiny)
            for call in tiny:
                call.cancel()
        for error in errors:
            assert isinstance(error, DeadlineExceeded | Overloaded)
            assert error.worker == "worker0"
        what = "1 GiB and 50,000 calls to a stopped worker: memory"
        figure("F4", what, 65.0, grown / MIB, "MiB")
        figure("F4", "… large calls past their deadline", 0.25, max(0.0, late))
        idle = max(idle, await latencies("worker1", 300), key=_slow)
        # A thousandth of a second apart, ratios say nothing.
        ratio = (_slow(busy) + 1e-3) / (_slow(idle) + 1e-3)
        figure("F4", "… 99 % of calls to others, against an idle time", 2.0, ratio, "×")
        assert await ag.rpc_async("worker0", echo, (7,)) == 7


def _slow(times: list[float]) -> float:
    return times[int(0.99 * len(times))]
