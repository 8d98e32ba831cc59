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


@pytest.mark.deadline(60)
async def test_f4_a_slow_worker_costs_others_nothing(cluster, figure):
    async with cluster(2) as c:
        await latencies("worker0", 100)
        await latencies("worker1", 1)
        idle = await latencies("worker1", 200)
        array = np.zeros(16 * MIB, np.uint8)
        with stopped(c, "worker0"):
            before, began = resident(), time.monotonic()
            large = [ag.rpc_async("worker0", echo, (array,), timeout=2.0) for _ in range(64)]
            tiny = [ag.rpc_async("worker0", echo, (i,), timeout=2.0) for i in range(50_000)]
            made = time.monotonic() - began
            await asyncio.sleep(0)  # what can be sent is sent
            busy = await latencies("worker1", 200)
            grown = max(0, resident() - before)
            ends = await asyncio.gather(*large, return_exceptions=True)
            late = time.monotonic() - began - made - 2.0
            ends += await asyncio.gather(*tiny, return_exceptions=True)
        for error in ends:
            assert isinstance(error, DeadlineExceeded | Overloaded)
            assert error.worker == "worker0"
        assert {type(error) for error in ends} == {DeadlineExceeded, Overloaded}
        figure(
            "F4",
            "1 GiB and 50,000 calls to a stopped worker: memory",
            65.0,
            max(0.0, grown / MIB),
            "MiB",
        )
        figure("F4", "… past its deadline", 0.25, max(0.0, late))
        # A thousandth of a second apart, ratios say nothing.
        ratio = (busy[-3] + 1e-3) / (idle[-3] + 1e-3)
        figure("F4", "… 99 % of calls to others, against an idle time", 2.0, ratio, "×")
        assert await ag.rpc_async("worker0", echo, (7,)) == 7
