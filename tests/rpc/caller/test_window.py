"""The window of calls under way to a peer: later ones wait, and nested ones never deadlock."""

from __future__ import annotations

import asyncio
import math

import pytest

from aiograd.errors import Overloaded
from aiograd.rpc.agent import current_agent
from aiograd.rpc.api import inline, rpc_async, rpc_stream, rpc_sync
from aiograd.rpc.options import Options
from tests.support.waiting import until

ONE = Options(max_inflight=1, timeout=20.0)


def other():
    return "worker1" if current_agent().name == "worker0" else "worker0"


async def bounce(depth):
    return 0 if not depth else 1 + await rpc_async(other(), bounce, (depth - 1,))


def bounce_in_threads(depth):
    return 0 if not depth else 1 + rpc_sync(other(), bounce_in_threads, (depth - 1,))


@inline
def bounce_inline(depth):
    return rpc_async(other(), bounce, (depth - 1,))


async def bounce_in_streams(depth):
    if depth:
        async for each in rpc_stream(other(), bounce_in_streams, (depth - 1,)):
            yield each
    yield depth


async def fan_out(width, depth):
    """Several nested calls at once, each of which does the same."""
    if not depth:
        return 1
    calls = [rpc_async(other(), fan_out, (width, depth - 1)) for _ in range(width)]
    return sum(await asyncio.gather(*calls))


@pytest.mark.parametrize("function", [bounce, bounce_in_threads], ids=["tasks", "threads"])
@pytest.mark.parametrize("timeout", [20.0, math.inf])
async def test_calls_back_and_forth_fit_into_any_window(agents, function, timeout):
    async with agents(2, options=ONE):
        assert await rpc_async("worker1", function, (7,), timeout=timeout) == 7
        several = [rpc_async("worker1", function, (5,), timeout=timeout) for _ in range(4)]
        assert await asyncio.gather(*several) == [5] * 4


async def test_so_do_calls_of_inline_functions_and_streams(agents):
    async with agents(2, options=ONE):
        assert await rpc_async("worker1", bounce_inline, (6,)) == 5
        assert [x async for x in rpc_stream("worker1", bounce_in_streams, (5,))] == list(range(6))


@pytest.mark.parametrize("window", [1, 2, 5])
async def test_so_do_calls_that_fan_out_at_every_level(agents, window):
    async with agents(2, options=Options(max_inflight=window, timeout=25.0)):
        calls = [rpc_async("worker1", fan_out, (3, 4)) for _ in range(3)]
        assert await asyncio.gather(*calls) == [81] * 3


async def test_calls_to_oneself_fit_too(agents):
    async with agents(1, options=ONE):

        async def deeper(depth):
            return 0 if not depth else 1 + await rpc_async("worker0", deeper, (depth - 1,))

        assert await rpc_async("worker0", deeper, (5,)) == 5


class Gauge:
    """How many calls run at once."""

    def __init__(self):
        self.now = self.most = 0

    async def run(self, ready):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1


GAUGE = Gauge()


async def measured():
    await GAUGE.run(None)


async def call_back_often(count):
    await asyncio.gather(*[rpc_async(other(), measured) for _ in range(count)])


async def test_one_call_of_each_parent_goes_beyond_the_window_and_no_more(agents):
    async with agents(2, options=Options(max_inflight=4)):
        GAUGE.__init__()
        calls = [rpc_async("worker1", call_back_often, (50,)) for _ in range(3)]
        await asyncio.gather(*calls)
        assert 4 <= GAUGE.most <= 4 + 3


async def stuck():
    await asyncio.get_running_loop().create_future()


async def test_a_call_that_waited_until_its_deadline_says_so(agents):
    async with agents(2, options=ONE) as (a, _):
        first = rpc_async("worker1", stuck)
        with pytest.raises(Overloaded, match="under way") as caught:
            await rpc_async("worker1", bounce, (0,), timeout=0.1)
        assert caught.value.worker == "worker1"
        assert a.limits["window"] == 1
        first.cancel()
        assert await rpc_async("worker1", bounce, (1,)) == 1


async def start_and_forget():
    """Nested calls that outlive the one that made them."""
    calls = [rpc_async(other(), measured) for _ in range(5)]
    calls[3].cancel()
    return len(calls)


async def test_nothing_is_left_of_calls_that_waited(agents):
    async with agents(2, options=ONE) as (a, b):
        assert await rpc_async("worker1", start_and_forget) == 5
        await until(lambda: not any(each.links.counters()["pending_calls"] for each in (a, b)))
        for agent in (a, b):
            for link in agent.links.table.values():
                assert not link.caller.window
                assert not link.caller.window.families


async def test_calls_that_wait_are_lost_with_the_peer(agents):
    async with agents(2, options=ONE) as (_, b):
        calls = [rpc_async("worker1", stuck) for _ in range(3)]
        while not b.links.counters()["running_calls"]:
            await asyncio.sleep(0)
        await b.close()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [each.executed for each in ends] == ["unknown", "no", "no"]
