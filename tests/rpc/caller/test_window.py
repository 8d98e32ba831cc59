"""The window of calls under way to a peer: later ones wait, and nested ones never deadlock."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest

from aiograd.errors import Overloaded
from aiograd.rpc.agent import current_agent
from aiograd.rpc.api import inline, rpc_async, rpc_stream, rpc_sync
from aiograd.rpc.options import Options
from aiograd.rpc.scope import SCOPE
from aiograd.wire.messages import CALL
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


async def double(x):
    return 2 * x


async def double_many(name, count):
    return sum(await asyncio.gather(*[rpc_async(name, double, (i,)) for i in range(count)]))


def count_frames(agent, peer):
    """Count the frames with calls that arrive at `agent` from `peer`, and the calls in them."""
    receiver = agent.links.get(peer.incarnation).receiver
    frames, receive = [], receiver.receive

    def counted(batch):
        batch = list(batch)
        frames.extend(frame for frame in batch if frame.kind == CALL)
        return receive(batch)

    agent.links.get(peer.incarnation).connection._receive = counted
    return frames


@pytest.mark.parametrize("timeout", [20.0, math.inf])
async def test_calls_that_waited_share_frames_as_others_do(agents, timeout):
    async with agents(2, options=Options(max_inflight=64)) as (a, b):
        assert await rpc_async("worker1", double, (1,)) == 2
        frames = count_frames(b, a)
        calls = [rpc_async("worker1", double, (i,), timeout=timeout) for i in range(640)]
        assert await asyncio.gather(*calls) == [2 * i for i in range(640)]
        assert len(frames) <= 640 / 8


async def test_so_do_nested_calls_that_waited(agents):
    async with agents(2, options=Options(max_inflight=8)):
        assert await double_many("worker1", 3) == 6
        # Made by a call that runs here, so that one of them goes beyond the window.
        assert await rpc_async("worker1", double_many, ("worker0", 100)) == 9900
        assert await rpc_async("worker1", double_many, ("worker0", 100)) == 9900


async def test_the_budget_of_a_call_that_waited_is_what_is_left(agents):
    async with agents(2, options=ONE):
        assert await rpc_async("worker1", double, (1,)) == 2
        assert await rpc_async("worker1", time_left) > 19
        first = rpc_async("worker1", asyncio.sleep, (0.3,))
        waited = rpc_async("worker1", time_left, timeout=10.0)
        await first
        assert 9.0 < await waited <= 9.75


async def time_left():
    return SCOPE.get().deadline - asyncio.get_running_loop().time()


async def test_fault_injection_sees_calls_that_waited_one_by_one(agents):
    async with agents(2, options=Options(max_inflight=4)) as (a, _):
        assert await rpc_async("worker1", double, (1,)) == 2
        calls = [rpc_async("worker1", double, (i,)) for i in range(20)]
        seen = []

        class Watch:
            def on_send(self, name, peer):
                seen.append(name)
                return SimpleNamespace(action="send", seconds=0.0)

        a.fault_injector = Watch()
        assert await asyncio.gather(*calls) == [2 * i for i in range(20)]
        assert len(seen) == 16


def triple(x):
    return 3 * x


async def test_calls_that_waited_keep_their_order_budgets_and_functions(agents):
    """A run ends where the next call has another function, deadline or fate."""
    async with agents(2, options=Options(max_inflight=8, timeout=20.0)) as (a, b):
        for function in (double, triple, time_left):
            await rpc_async("worker1", function, (1,) if function is not time_left else ())
        order = []
        receive = b.link("worker0").receiver._once.fresh

        def fresh(number):
            order.append(number)
            return receive(number)

        b.link("worker0").receiver._once.fresh = fresh
        calls, expected, budgets, abandoned = [], [], [], []
        for i in range(200):
            match i % 5:
                case 0 | 1:
                    calls.append(rpc_async("worker1", double, (i,)))
                    expected.append(2 * i)
                case 2:
                    calls.append(rpc_async("worker1", triple, (i,)))
                    expected.append(3 * i)
                case 3:
                    budgets.append((rpc_async("worker1", time_left, timeout=5.0 + i), 5.0 + i))
                case 4:
                    abandoned.append(rpc_async("worker1", double, (i,)))
        for call in abandoned:
            call.cancel()
        assert await asyncio.gather(*calls) == expected
        for call, budget in budgets:
            assert budget - 5.0 < await call <= budget
        assert order == sorted(order)
        assert not a.link("worker1").caller.pending
        assert not a.link("worker1").caller.window
