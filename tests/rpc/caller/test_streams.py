"""Streams: all items in order, a reader that is slow or leaves, and generators that fail."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from aiograd.errors import DeadlineExceeded, RpcError, SerializationError
from aiograd.rpc.api import rpc_async, rpc_stream
from aiograd.rpc.caller.streams import WINDOW
from aiograd.rpc.options import Options
from tests.support.waiting import until

NOTES: dict[str, Any] = {}  # where generators of these tests, all in one process, leave things


@pytest.fixture(autouse=True)
def no_notes():
    NOTES.clear()
    yield
    NOTES.clear()


def add(x, y=0):
    return x + y


def at_rest(*agents):
    return not any(count for each in agents for count in each.links.counters().values())


async def count_to(n):
    try:
        for i in range(n):
            NOTES["made"] = i + 1
            yield i
    finally:
        NOTES["closed"].set()


def plain_count_to(n):
    try:
        for i in range(n):
            NOTES["made"] = i + 1
            yield i
    finally:
        NOTES["closed"].set()


@pytest.fixture(params=[count_to, plain_count_to], ids=["async", "plain"])
def generator(request):
    NOTES["closed"] = threading.Event()
    return request.param


async def closed():
    await until(NOTES["closed"].is_set)


async def test_streams_give_all_items_in_order(agents, generator):
    async with agents(2) as (a, b):
        assert [i async for i in rpc_stream("worker1", generator, (100,))] == list(range(100))
        await closed()
        assert at_rest(a, b)


async def test_a_slow_reader_holds_the_generator_back(agents, generator):
    async with agents(2):
        stream = rpc_stream("worker1", generator, (1000,))
        assert await anext(stream) == 0
        await until(lambda: NOTES["made"] > WINDOW)  # one more is made, and waits
        for _ in range(3):  # in the same loop and the same thread, so behind what it would make
            assert await rpc_async("worker1", add, (1, 2)) == 3
        assert NOTES["made"] == WINDOW + 1
        await stream.aclose()
        await closed()


async def test_leaving_the_loop_closes_the_generator(agents, generator):
    async with agents(2) as (a, b):
        async for i in rpc_stream("worker1", generator, (1000,)):
            if i == 3:
                break
        await closed()
        assert NOTES["made"] < 100
        await until(lambda: at_rest(a, b))


async def failing():
    yield 1
    raise ValueError("in the middle")


async def test_an_error_in_a_generator_arrives_after_its_items(agents):
    async with agents(2):
        stream = rpc_stream("worker1", failing)
        assert await anext(stream) == 1
        with pytest.raises(ValueError, match="in the middle"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def slow_items():
    yield 1
    await asyncio.sleep(60)
    yield 2


async def test_a_stream_ends_at_its_deadline(agents):
    async with agents(2):
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            async for _ in rpc_stream("worker1", slow_items, timeout=0.1):
                pass
        assert time.monotonic() - start < 0.4


async def test_without_a_deadline_each_item_has_the_default_time(agents):
    async with agents(2, options=Options(timeout=0.5)):
        await rpc_async("worker1", add, (1, 2), timeout=20.0)  # connects
        stream = rpc_stream("worker1", slow_items)
        assert await anext(stream) == 1
        with pytest.raises(DeadlineExceeded):
            await anext(stream)


async def test_a_cancelled_read_closes_the_generator_and_later_reads_say_so(agents):
    async with agents(2) as (a, b):
        stream = rpc_stream("worker1", slow_items)
        assert await anext(stream) == 1
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: at_rest(a, b))
        with pytest.raises(RpcError, match=r"slow_items\(\) was cancelled while it was read"):
            await anext(stream)


async def test_streaming_something_else_says_so(agents):
    async with agents(2):
        with pytest.raises(TypeError, match="generator function"):
            async for _ in rpc_stream("worker1", add, (1, 2)):
                pass


async def test_large_items_stream_too(agents):
    async with agents(2):
        total = 0.0
        async for item in rpc_stream("worker1", big_items, (5,)):
            total += item.sum()
        assert total == 5 * 200_000


async def big_items(count):
    for _ in range(count):
        yield np.ones(200_000)


async def texts(*sizes):
    for size in sizes:
        yield "x" * size


async def test_an_item_over_the_limit_ends_the_stream_and_says_where(agents):
    async with agents(2, options=Options(max_message=1 << 20)) as (a, b):
        items = rpc_stream("worker1", texts, (10, 2_000_000, 20))
        assert await anext(items) == "x" * 10
        with pytest.raises(SerializationError, match="max_message") as caught:
            await anext(items)
        assert caught.value.worker == "worker1"
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await until(lambda: at_rest(a, b))
