"""The order in which messages of one peer take effect, and those that were cancelled meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiograd.rpc.api import inline, rpc_async
from tests.support.waiting import until


def add(x, y=0):
    return x + y


async def test_posts_stay_in_order_behind_large_messages(agents):
    async with agents(2) as (a, b):
        got: list[Any] = []
        b.services["note"] = lambda sender, x, *rest: got.append(x)
        big = np.ones(3 << 20, np.uint8)
        call = rpc_async("worker1", len, (big,))
        a.post("worker1", "note", 0)
        a.post("worker1", "note", 1, big)
        a.post("worker1", "note", 2)
        small = rpc_async("worker1", add, (1, 2))
        a.post("worker1", "note", 3)
        assert await small == 3
        assert got[:3] == [0, 1, 2]  # the call waited for the posts before it
        assert await call == 3 << 20
        await until(lambda: len(got) == 4)
        assert got == [0, 1, 2, 3]


async def test_a_small_call_overtakes_a_large_one(agents, tmp_path):
    async with agents(2, address=f"unix:{tmp_path}/{{}}".format):
        order: list[str] = []
        big = np.ones(64 << 20, np.uint8)
        assert await rpc_async("worker1", add, (1, 2)) == 3
        large = rpc_async("worker1", len, (big,))
        large.add_done_callback(lambda _: order.append("large"))
        small = rpc_async("worker1", add, (1, 2))
        small.add_done_callback(lambda _: order.append("small"))
        await asyncio.gather(large, small)
        assert order == ["small", "large"]


RAN: list[str] = []


@inline
def run_inline(x):
    RAN.append("inline")


def run_in_a_thread(x):
    RAN.append("thread")


async def run_as_a_task(x):
    RAN.append("task")


async def arriving(link):
    """Wait until a large message was announced and is not complete."""
    while not link.receiver._inbox.entries:
        await asyncio.sleep(0)


@pytest.mark.parametrize("function", [run_inline, run_in_a_thread, run_as_a_task])
async def test_a_call_cancelled_while_its_pieces_arrive_never_runs(agents, function):
    RAN.clear()
    async with agents(2) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        link = b.link("worker0")
        call = rpc_async("worker1", function, (np.ones(64 << 20, np.uint8),))
        await arriving(link)
        call.cancel()
        await until(lambda: not link.receiver._inbox.entries)
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await until(lambda: not any(b.links.counters().values()))
        assert RAN == []
        assert not link.receiver._cancelled
        assert a.budget.used == b.budget.used == 0


async def test_a_small_call_cancelled_while_it_waits_for_a_large_message_never_runs(agents):
    RAN.clear()
    async with agents(2) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        b.services["note"] = lambda sender, x: RAN.append("note")
        link = b.link("worker0")
        a.post("worker1", "note", np.ones(64 << 20, np.uint8))
        call, other = (rpc_async("worker1", run_as_a_task, (i,)) for i in range(2))
        await arriving(link)
        call.cancel()
        await other
        assert RAN == ["note", "task"]
        assert not link.receiver._cancelled


async def test_many_large_calls_share_the_link(agents, tmp_path):
    async with agents(2, address=f"unix:{tmp_path}/{{}}".format) as (a, b):
        arrays = [np.full(1 << 18, i, np.float64) for i in range(10)]
        results = await asyncio.gather(*(rpc_async("worker1", add, (x, 1)) for x in arrays))
        for i, result in enumerate(results):
            assert (result == i + 1).all()
        await until(
            lambda: not any(a.links.counters().values()) and not any(b.links.counters().values())
        )
        assert a.budget.used == b.budget.used == 0
