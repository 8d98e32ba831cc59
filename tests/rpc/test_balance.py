"""`Group.map`: the next item goes to whoever is free."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest

from aiograd.errors import SerializationError, UnknownWorker, WorkerLost
from aiograd.rpc.agent import current_agent
from aiograd.rpc.api import Group, inline, run_sync
from aiograd.rpc.balance import COROUTINES, MOST
from tests.support.waiting import until

GATES: dict[str, threading.Event] = {}
RUNNING: Counter[str] = Counter()
MOST_SEEN: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    GATES.clear()
    RUNNING.clear()
    MOST_SEEN.clear()
    yield
    for gate in GATES.values():
        gate.set()


def blocks_on_worker1(item: int) -> str:
    name: str = current_agent().name
    if name == "worker1":
        GATES["worker1"].wait(20)
    return name


def test_a_plain_function_and_a_coroutine_have_different_room():
    assert 1 < COROUTINES <= MOST


async def test_a_slow_member_does_not_hold_up_the_items_of_others(agents):
    async with agents(3):
        GATES["worker1"] = threading.Event()
        work = Group(["worker1", "worker2"]).map(blocks_on_worker1, range(40))
        await until(lambda: len(_open(work)) == 1)
        GATES["worker1"].set()
        assert Counter(await work) == {"worker1": 1, "worker2": 39}


def _open(work: Any) -> Any:
    """The calls under way, by the calling agent's own count."""
    return [f for link in current_agent().links.all() for f in link.caller.pending.values()]


def counted(item: int) -> int:
    name = current_agent().name
    RUNNING[name] += 1
    MOST_SEEN[name] = max(MOST_SEEN[name], RUNNING[name])
    GATES["all"].wait(0.01)
    RUNNING[name] -= 1
    return item


async def test_long_calls_run_one_at_a_time_on_each_member(agents):
    async with agents(3):
        GATES["all"] = threading.Event()
        assert await Group(["worker1", "worker2"]).map(counted, range(20)) == list(range(20))
        assert MOST_SEEN == {"worker1": 1, "worker2": 1}


async def test_concurrency_says_how_many_run_at_once(agents):
    async with agents(2):
        GATES["all"] = threading.Event()
        await Group(["worker1"]).map(counted, range(20), concurrency=4)
        assert 1 < MOST_SEEN["worker1"] <= 4
        with pytest.raises(ValueError, match="at least 1"):
            Group(["worker1"]).map(counted, [1], concurrency=0)


async def meet(item: int) -> int:
    RUNNING["here"] += 1
    while RUNNING["here"] < 10:  # only if all ten run at once
        await asyncio.sleep(0.001)
    return item


async def test_coroutines_of_one_member_run_at_once(agents):
    async with agents(2):
        assert await Group(["worker1"]).map(meet, range(10)) == list(range(10))


@inline
def short(item: int) -> int:
    pending = len(_open(None))
    MOST_SEEN["short"] = max(MOST_SEEN["short"], pending)
    return item


async def test_very_short_calls_are_sent_several_at_once(agents):
    async with agents(2) as (a, _):
        seen = 0

        def look() -> None:
            nonlocal seen
            pending = [f for link in a.links.all() for f in link.caller.pending.values()]
            seen = max(seen, len(pending))
            if not work.done():
                a.loop.call_soon(look)

        work = Group(["worker1"]).map(short, range(500))
        look()
        assert await work == list(range(500))
        assert 2 < seen <= MOST


def refuse_seven(item: int) -> int:
    if item == 7:
        raise ValueError("seven")
    return item


async def test_errors_are_raised_or_returned_in_place(agents):
    async with agents(3):
        group = Group(["worker1", "worker2"])
        with pytest.raises(ValueError, match="seven"):
            await group.map(refuse_seven, range(20))
        found = await group.map(refuse_seven, range(20), return_exceptions=True)
        assert isinstance(found[7], ValueError)
        assert found[:7] + found[8:] == [*range(7), *range(8, 20)]


async def test_an_item_that_cannot_travel_is_named(agents):
    async with agents(2):
        group, items = Group(["worker1"]), [1, threading.Lock(), 3]
        with pytest.raises(SerializationError):
            await group.map(refuse_seven, items)
        found = await group.map(refuse_seven, items, return_exceptions=True)
        assert found[::2] == [1, 3]
        assert isinstance(found[1], SerializationError)


async def test_an_unknown_member_is_raised_by_the_call_itself(agents):
    async with agents(2):
        with pytest.raises(UnknownWorker):
            Group(["worker1", "nobody"]).map(refuse_seven, range(5))


async def test_a_lost_member_gets_no_further_items(agents):
    async with agents(3) as (_, b, _c):
        GATES["worker1"] = threading.Event()
        group = Group(["worker1", "worker2"])
        work = group.map(blocks_on_worker1, range(40), return_exceptions=True)
        await until(lambda: len(_open(work)) == 1)
        GATES["worker1"].set()
        closing = asyncio.ensure_future(b.close())
        found = await group.map(blocks_on_worker1, range(40), return_exceptions=True)
        await closing
        lost = [each for each in found if isinstance(each, WorkerLost)]
        assert len(lost) <= MOST
        assert set(map(type, found)) <= {str, WorkerLost}
        assert found.count("worker2") >= 20
        await work


async def test_without_any_member_left_the_rest_fails_as_well(agents):
    async with agents(2) as (_, b):
        await b.close()
        found = await Group(["worker1"]).map(refuse_seven, range(5), return_exceptions=True)
        assert [type(each) for each in found] == [WorkerLost] * 5


async def test_cancelling_the_map_cancels_its_calls(agents):
    async with agents(2) as everyone:
        work = Group(["worker1"]).map(asyncio.sleep, [60] * 5)
        await asyncio.sleep(0)
        assert work.cancel()
        await until(lambda: not any(a.links.counters()["pending_calls"] for a in everyone))


async def test_a_thread_may_map_too(agents):
    async with agents(2):
        group = Group(["worker1"])
        found = await asyncio.to_thread(lambda: run_sync(group.map(refuse_seven, [1, 2])))
        assert found == [1, 2]
        with pytest.raises(UnknownWorker):
            await asyncio.to_thread(lambda: run_sync(Group(["nobody"]).map(refuse_seven, [1])))
