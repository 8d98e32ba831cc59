"""Messages for which there is no memory are refused one by one; the link goes on."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from aiograd.errors import Overloaded
from aiograd.rpc.api import inline, rpc_async, rpc_stream
from tests.support.waiting import until

MIB = 1 << 20
BIG = 3 * MIB


@pytest.fixture(params=["inbound_budget", "allocation"])
def starve(request, monkeypatch):
    """`starve(agent)` leaves a worker no memory for large messages, by one limit or the other."""

    def no_memory(size):
        raise MemoryError(f"{size} bytes")

    def run(agent):
        if request.param == "inbound_budget":
            agent.budget.reserve(agent.options.inbound_budget - MIB)
        else:
            monkeypatch.setattr(agent.memory, "take", no_memory)
        return request.param

    return run


def big():
    return np.ones(BIG, np.uint8)


@inline
def echo(x):
    return x


async def make(size):
    return np.ones(size, np.uint8)


async def generate(sizes):
    for size in sizes:
        yield np.ones(size, np.uint8)


def fail_at_length(size):
    raise ValueError("x" * size)


async def connected(a, b):
    """Let the two agents meet; their link as `a` sees it."""
    assert await rpc_async("worker1", echo, (1,)) == 1
    return a.link("worker1")


async def test_a_call_is_refused_and_others_go_on(agents, starve):
    async with agents(2) as (a, b):
        link, limit = await connected(a, b), starve(b)
        large, small = rpc_async("worker1", len, (big(),)), rpc_async("worker1", echo, (2,))
        with pytest.raises(Overloaded, match=limit) as caught:
            await large
        assert caught.value.worker == "worker1"
        assert await small == 2
        assert b.limits[limit] == 1
        assert a.link("worker1") is link
        assert link.is_open


async def test_a_request_is_refused(agents, starve):
    async with agents(2) as (a, b):
        await connected(a, b)
        limit = starve(b)
        b.services["length"] = lambda sender, x: len(x)
        with pytest.raises(Overloaded, match=limit) as caught:
            await a.request("worker1", "length", big())
        assert caught.value.worker == "worker1"
        assert await a.request("worker1", "length", b"abc") == 3


async def test_a_result_is_refused_by_who_waits_for_it(agents, starve):
    async with agents(2) as (a, b):
        await connected(a, b)
        limit = starve(a)
        with pytest.raises(Overloaded, match=limit) as caught:
            await rpc_async("worker1", make, (BIG,))
        assert caught.value.worker == "worker0"
        assert a.limits[limit] == 1
        assert await rpc_async("worker1", echo, (2,)) == 2


async def test_an_error_as_large_as_a_book_is_refused_by_who_waits_for_it(agents, starve, caplog):
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with agents(2) as (a, b):
        await connected(a, b)
        limit = starve(a)
        with pytest.raises(Overloaded, match=limit) as caught:
            await rpc_async("worker1", fail_at_length, (BIG,))
        assert caught.value.worker == "worker0"
        assert await rpc_async("worker1", echo, (2,)) == 2


async def test_an_item_is_refused_and_its_stream_ends_over_there(agents, starve):
    async with agents(2) as (a, b):
        await connected(a, b)
        limit = starve(a)
        async with rpc_stream("worker1", generate, ([10, 20, BIG] + [30] * 100,)) as stream:
            assert [len(await anext(stream)) for _ in range(2)] == [10, 20]
            with pytest.raises(Overloaded, match=limit):
                await anext(stream)
        await until(lambda: not b.links.counters()["running_calls"])
        assert await rpc_async("worker1", echo, (2,)) == 2


@pytest.mark.parametrize("plain", [False, True])
async def test_whoever_depends_on_a_refused_post_is_told(agents, starve, plain, caplog):
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with agents(2) as (a, b):
        await connected(a, b)
        limit, got, refused = starve(b), [], asyncio.Queue()
        b.services["note"] = lambda sender, x: got.append(x)
        a.post_refused["note"] = lambda peer, error: refused.put_nowait((peer, error))
        a.post("worker1", "note", "before")
        if plain:
            assert a.post_plain(a.link("worker1"), "note", ("x" * BIG,), [])
        else:
            a.post("worker1", "note", big())
        a.post("worker1", "note", "after")
        peer, error = await refused.get()
        assert peer == a.link("worker1").peer
        assert isinstance(error, Overloaded)
        assert error.worker == "worker1"
        assert limit in str(error)
        await until(lambda: got == ["before", "after"])
        assert refused.empty()


async def test_a_refused_post_that_nobody_depends_on_is_logged_by_its_sender(
    agents, starve, caplog
):
    async with agents(2) as (a, b):
        await connected(a, b)
        starve(b)
        b.services["note"] = lambda sender, x: None
        a.post("worker1", "note", big())
        await until(lambda: "worker0: worker1 refused 'note'" in caplog.text)
        assert await rpc_async("worker1", echo, (2,)) == 2


async def test_a_callback_that_fails_harms_nobody(agents, starve, caplog):
    async with agents(2) as (a, b):
        await connected(a, b)
        starve(b)
        b.services["note"] = lambda sender, x: None
        a.post_refused["note"] = lambda peer, error: 1 / 0
        a.post("worker1", "note", big())
        await until(lambda: "callback for a refused 'note' failed" in caplog.text)
        assert a.link("worker1").is_open


async def test_a_post_whose_handler_fails_is_not_a_refused_one(agents, caplog):
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with agents(2) as (a, b):
        await connected(a, b)
        told = []
        b.services["note"] = lambda sender, x: 1 / x
        b.services["look"] = lambda sender: None
        a.post_refused["note"] = lambda *each: told.append(each)
        a.post("worker1", "note", 0)
        await a.request("worker1", "look")  # its answer would come behind that of the post
        assert told == []


async def test_small_messages_behind_a_large_one_are_refused_one_by_one(agents):
    async with agents(2) as (a, b):
        link = await connected(a, b)
        b.services["note"] = lambda sender, x: len(x)
        b.budget.reserve(b.options.inbound_budget - BIG - MIB)
        large = rpc_async("worker1", len, (big(),))
        requests = [a.request("worker1", "note", "x" * 60_000) for _ in range(40)]
        found = await asyncio.gather(*requests, return_exceptions=True)
        assert found[:17] == [60_000] * 17
        assert all(isinstance(each, Overloaded) for each in found[17:])
        assert {each.worker for each in found[17:]} == {"worker1"}
        assert await large == BIG
        assert a.link("worker1") is link
        assert b.budget.used == b.options.inbound_budget - BIG - MIB


async def test_small_results_behind_a_large_one_are_refused_one_by_one(agents):
    async with agents(2) as (a, b):
        link = await connected(a, b)
        a.budget.reserve(a.options.inbound_budget - BIG - 1000)
        large = rpc_async("worker1", make, (BIG,))
        small = rpc_async("worker1", make, (50_000,))  # its result is right behind the other one
        with pytest.raises(Overloaded, match="inbound_budget") as caught:
            await small
        assert caught.value.worker == "worker0"
        assert len(await large) == BIG
        assert a.link("worker1") is link


# ── decoding ────────────────────────────────────────────────────────────────────────────────────


def too_much():
    raise MemoryError("too much")


class Hungry:
    """Cannot be rebuilt where it arrives."""

    def __reduce__(self):
        return too_much, ()


async def make_hungry():
    return Hungry()


async def generate_hungry():
    yield 1
    yield Hungry()


async def test_arguments_that_cannot_be_decoded_for_want_of_memory_fail_their_call_alone(agents):
    async with agents(2) as (a, b):
        link = await connected(a, b)
        b.services["note"] = lambda sender, x: None
        for call in (
            rpc_async("worker1", echo, (Hungry(),)),
            rpc_async("worker1", make, (Hungry(),)),
            rpc_async("worker1", make, (Hungry(), big())),
            a.request("worker1", "note", Hungry()),
        ):
            with pytest.raises(Overloaded, match="too much") as caught:
                await call
            assert caught.value.worker == "worker1"
        assert b.limits["allocation"] == 4
        assert await rpc_async("worker1", echo, (2,)) == 2
        assert a.link("worker1") is link


async def test_a_post_that_cannot_be_decoded_is_told_to_its_sender(agents, caplog):
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with agents(2) as (a, b):
        await connected(a, b)
        b.services["note"] = lambda sender, x: None
        refused: asyncio.Queue[Exception] = asyncio.Queue()
        a.post_refused["note"] = lambda peer, error: refused.put_nowait(error)
        a.post("worker1", "note", Hungry())
        assert isinstance(await refused.get(), Overloaded)
        a.post("worker1", "nobody", 1)
        a.post_refused["nobody"] = lambda peer, error: refused.put_nowait(error)
        assert "no service 'nobody'" in str(await refused.get())


async def test_results_and_items_that_cannot_be_decoded_fail_their_call_alone(agents):
    async with agents(2) as (a, b):
        await connected(a, b)
        with pytest.raises(Overloaded, match="too much") as caught:
            await rpc_async("worker1", make_hungry)
        assert caught.value.worker == "worker0"
        with pytest.raises(Overloaded, match="too much"):
            async for _ in rpc_stream("worker1", generate_hungry):
                pass
        assert a.limits["allocation"] == 2
        assert await rpc_async("worker1", echo, (2,)) == 2


@pytest.mark.parametrize("behind", [False, True])
async def test_memory_that_is_missing_anywhere_else_fails_one_call(agents, monkeypatch, behind):
    async with agents(2) as (a, b):
        link = await connected(a, b)
        there = b.link("worker0")
        large = rpc_async("worker1", len, (big(),)) if behind else None
        monkeypatch.setattr(there.callee.responses, "_succeed", lambda *args: too_much())
        with pytest.raises(MemoryError, match="too much"):
            await rpc_async("worker1", echo, ("x" * 2000,))
        monkeypatch.undo()
        assert b.limits["allocation"] == 1
        assert large is None or await large == BIG
        assert await rpc_async("worker1", echo, (2,)) == 2
        assert a.link("worker1") is link
