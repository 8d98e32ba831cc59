"""Agents that call each other: the mechanics, in one loop."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest

from aiograd.errors import DeadlineExceeded, UnknownWorker, WorkerClosed, WorkerLost

ADDRESSES = ["memory", "unix", "tcp"]


@pytest.fixture(params=ADDRESSES)
def address(request, tmp_path):
    return {
        "memory": "memory:{}".format,
        "unix": f"unix:{tmp_path}/{{}}.sock".format,
        "tcp": "tcp:127.0.0.1:0".format,
    }[request.param]


async def add_later(x, y):
    await asyncio.sleep(0)
    return x + y


def add(x, y=0):
    return x + y


async def test_functions_of_all_kinds_are_called(agents, address):
    async with agents(2, address=address) as (a, _):
        assert await a.call("worker1", math.sqrt, (16,)) == 4.0
        assert await a.call("worker1", add, (1,), {"y": 2}) == 3
        assert await a.call("worker1", add_later, (1, 2)) == 3
        assert await a.call("worker1", lambda x: x * 3, (5,)) == 15
        assert await a.call("worker1", [1, 2, 3].index, (2,)) == 1


async def test_large_arrays_come_back_writable(agents, address):
    async with agents(2, address=address) as (a, _):
        x = np.random.default_rng(0).normal(size=(700, 900))
        y = await a.call("worker1", add, (x, 1.0))
        assert (y == x + 1).all()
        y += 1


@pytest.mark.parametrize("args", [(1, 2), (np.ones(2000), 1)], ids=["in a row", "alone"])
async def test_a_call_leaves_at_once_if_no_other_is_under_way(agents, args):
    async with agents(2) as (a, _):
        await a.call("worker1", add_later, args)
        session = a.link("worker1").session
        before = session.sent
        first = a.call("worker1", add_later, args)
        left = session.sent
        others = [a.call("worker1", add_later, args) for _ in range(10)]
        assert session.sent == left > before, "those of a burst share a write"
        await asyncio.gather(first, *others)


async def test_address_forms(agents):
    async with agents(2) as (a, b):
        for to in ("worker1", 1, b, b.info, b.info.info):
            assert await a.call(to, add, (1, 1)) == 2
        for to in (2, -1, "nobody"):
            with pytest.raises(UnknownWorker):
                a.call(to, add, (1, 1))
        for to in (0.5, True):
            with pytest.raises(ValueError, match="no rank"):
                a.call(to, add, (1, 1))
        with pytest.raises(TypeError):
            a.call(None, add, (1, 1))


async def test_exceptions_arrive_as_themselves_with_a_note(agents):
    async with agents(2) as (a, _):
        with pytest.raises(ZeroDivisionError) as caught:
            await a.call("worker1", lambda: 1 / 0)
        assert "on worker1" in caught.value.__notes__[0]


async def test_a_deadline_ends_the_call_on_both_sides(agents):
    ended = asyncio.Event()
    agent_b: Any = None

    async def wait(sender):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with agents(2) as (a, b):
        b.services["wait"] = wait
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await a.request("worker1", "wait", timeout=0.1)
        assert time.monotonic() - start < 0.35
        await ended.wait()
        agent_b = b
    assert agent_b.closed


async def test_cancelling_reaches_the_other_side(agents):
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(sender):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with agents(2) as (a, b):
        b.services["wait"] = wait
        future = a.request("worker1", "wait")
        await started.wait()
        future.cancel()
        await ended.wait()
        assert a.links.counters() == b.links.counters() == dict.fromkeys(a.links.counters(), 0)


async def test_services_requests_and_posts(agents):
    async with agents(2) as (a, b):
        got: list[Any] = []
        b.services["note"] = lambda sender, x: got.append((sender.name, x))
        b.services["sum"] = lambda sender, *xs: sum(xs)
        for i in range(3):
            a.post("worker1", "note", i)
        assert await a.request("worker1", "sum", 1, 2, 3) == 6
        assert got == [("worker0", i) for i in range(3)]


class Box:
    def __init__(self, value):
        self.value = value


class BoxTraveller:
    tag = "box"

    def depart(self, value, departure):
        departure.scratch.setdefault("boxes", []).append(value)
        return value.value

    def arrive(self, data, arrival):
        box = Box((data, arrival.sender.name, arrival.kind))
        arrival.scratch.setdefault("boxes", []).append(box)
        return box


def open_box(holder):
    return holder["box"][0].value


async def test_travellers_are_found_at_depth(agents):
    async with agents(2) as (a, b):
        for agent in (a, b):
            agent.travellers.add(Box, BoxTraveller())
        value = await a.call("worker1", open_box, ({"box": [Box(7)]},))
        assert value == (7, "worker0", "call")
        back = await a.call("worker1", Box, (7,))
        assert back.value == (7, "worker1", "reply")


class Luggage:
    def __init__(self):
        self.log = []
        self.now = None

    def current(self):
        return self.now

    def enter(self, held):
        self.log.append(("enter", held))

    def depart(self, held, departure):
        return 7, held, departure.kind == "reply"

    def arrive(self, data, arrival):
        self.log.append(("arrive", data))
        return data[1]


async def test_baggage_rides_along_and_comes_back_with_the_reply(agents):
    async with agents(2) as (a, b):
        a.baggage, b.baggage = Luggage(), Luggage()
        a.baggage.now = 42
        assert await a.call("worker1", add, (1, 2)) == 3
        assert b.baggage.log == [("arrive", (7, 42, 0)), ("enter", 42)]
        assert a.baggage.log == [("arrive", (7, 42, 1))]


class Shelf:
    def __init__(self):
        self.log = []

    def expect(self, sender, token):
        self.log.append(("expect", sender.name, token))

    def keep(self, sender, token, value):
        self.log.append(("keep", token, value))

    def fail(self, sender, token, error):
        self.log.append(("fail", token, type(error)))

    def made(self, sender, token, value):
        self.log.append(("made", sender.name, token, value))


async def test_results_are_kept_at_the_callee(agents):
    async with agents(2) as (a, b):
        b.result_store = Shelf()
        assert await a.call("worker1", add, (1, 2), keep=b"t1") is None
        assert await a.call("worker1", add, (1, "x"), keep=b"t2") is None
        assert b.result_store.log == [
            ("expect", "worker0", b"t1"),
            ("keep", b"t1", 3),
            ("expect", "worker0", b"t2"),
            ("fail", b"t2", TypeError),
        ]


async def test_the_result_of_an_op_is_made_and_kept_at_once(agents):
    def plus(a, b):
        return a + b

    plus.op_name = "plus"
    async with agents(2) as (a, b):
        b.result_store, b.ops = Shelf(), {"plus": plus}
        assert await a.call("worker1", plus, (1, 2), keep=b"t1") is None
        assert await a.call("worker1", plus, (1, "x"), keep=b"t2") is None
        assert b.result_store.log == [
            ("made", "worker0", b"t1", 3),
            ("expect", "worker0", b"t2"),
            ("fail", b"t2", TypeError),
        ]


async def test_a_copy_of_what_is_kept_comes_along_if_it_is_wanted_in_time(agents):
    async with agents(2) as (a, b):
        b.result_store = Shelf()
        assert await a.call("worker1", add, (1, 2)) == 3
        caller = a.link("worker1").caller

        call = a.call("worker1", add, (3, 4), keep=b"t1")
        assert caller.piggyback(call)
        assert not caller.piggyback(call)  # alone under way, it has left with that
        assert await call == 7
        late = a.call("worker1", add, (3, 4), keep=b"t2")
        await asyncio.sleep(0)
        assert not caller.piggyback(late)
        assert await late is None
        early = a.call("worker1", add, (3, 4), keep=b"t3")
        other = a.call("worker1", add, (1, 1))
        assert not caller.piggyback(early)  # what was called since might change it
        assert await early is None
        assert await other == 2


async def test_a_closed_peer_is_lost(agents):
    async with agents(2) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        told: list[Any] = []
        a.lost.append(lambda peer, error: told.append((peer.name, error)))
        b.services["wait"] = lambda sender: asyncio.get_running_loop().create_future()
        future = a.request("worker1", "wait")
        await asyncio.sleep(0)
        await b.close()
        with pytest.raises(WorkerLost):
            await future
        with pytest.raises(WorkerLost) as caught:
            await a.call("worker1", add, (1, 2))
        assert caught.value.executed == "no"
        assert told[0][0] == "worker1"


async def test_closing_ends_local_waiters(agents):
    async with agents(2) as (a, b):
        b.services["wait"] = lambda sender: asyncio.get_running_loop().create_future()
        future = a.request("worker1", "wait")
        await a.close()
        with pytest.raises(WorkerClosed):
            await future
        with pytest.raises(WorkerClosed):
            a.call("worker1", add, (1, 2))


async def test_both_dial_at_once_and_one_connection_remains(agents, address):
    async with agents(2, address=address) as (a, b):
        results = await asyncio.gather(
            *(
                x.call(y, add, (i, 1))
                for i in range(20)
                for x, y in ((a, "worker1"), (b, "worker0"))
            )
        )
        assert results == [i + 1 for i in range(20) for _ in (a, b)]
