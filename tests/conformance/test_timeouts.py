"""Timeouts of calls."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest

import aiograd as ag
from aiograd.errors import DeadlineExceeded
from tests.conformance.forms import plus
from tests.support.waiting import until

OPENED = threading.Event()
SHORT = 0.5  # seconds; as a default, it also has to do for starting the cluster
LATE = 0.25 * 4  # seconds; a deadline is promised to be kept within 0.25


@pytest.fixture(autouse=True)
def _everything_ends():
    OPENED.clear()
    yield
    OPENED.set()


async def never() -> None:
    await asyncio.Event().wait()


async def until_opened() -> str:
    await until(OPENED.is_set)
    return "opened"


async def test_to_default(workers):
    async with workers(2, timeout=SHORT) as cluster:
        assert cluster.driver.options.timeout == SHORT
        calls = [ag.rpc_async("worker1", never) for _ in range(10)]
        began = time.monotonic()
        for each in calls:
            with pytest.raises(DeadlineExceeded) as caught:
                await each
            assert isinstance(caught.value, TimeoutError)
            assert (caught.value.worker, caught.value.function) == ("worker1", "never")
            assert caught.value.seconds == pytest.approx(SHORT)
        assert time.monotonic() - began < SHORT + LATE
        # Infinity is none at all.
        patient = ag.rpc_async("worker1", until_opened, timeout=math.inf)
        with pytest.raises(DeadlineExceeded):
            await ag.rpc_async("worker1", never)
        assert not patient.done()
        OPENED.set()
        assert await patient == "opened"


@pytest.mark.parametrize("form", ["async", "sync"])
async def test_to_per_call(workers, form):
    async def run(func: object, timeout: float, *args: object) -> object:
        if form == "async":
            return await ag.rpc_async("worker1", func, args=args, timeout=timeout)
        return await asyncio.to_thread(ag.rpc_sync, "worker1", func, args, timeout=timeout)

    async with workers(2):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            await run(never, 0.1)
        assert 0.1 <= time.monotonic() - began < 0.1 + LATE
        assert caught.value.seconds == pytest.approx(0.1)
        assert await run(plus, math.inf, 1, 2) == 3
        for wrong in (0, -1, -0.5, math.nan):
            with pytest.raises(ValueError, match="timeout"):
                await run(plus, wrong, 1, 2)


async def test_to_per_call_beats_a_short_default(workers):
    async with workers(2, timeout=SHORT):
        waiting = ag.rpc_async("worker1", until_opened, timeout=10.0)
        with pytest.raises(DeadlineExceeded):
            await ag.rpc_async("worker1", never)
        OPENED.set()
        assert await waiting == "opened"
