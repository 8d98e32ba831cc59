"""Objects whose calls run one at a time; and methods that run where functions of their kind do."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import aiograd as ag
from aiograd.errors import DeadlineExceeded, RRefError
from aiograd.rref.registry import current_rrefs
from tests.support.waiting import until


@ag.serial
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value, self.inside, self.most, self.order = start, 0, 0, []
        self.gate = threading.Event()
        Counter.last = self  # the workers of these tests share a process

    last: Counter

    def add(self, amount: int) -> int:
        with self:
            value = self.value
            time.sleep(0)  # lets another thread in
            self.value = value + amount
            return self.value

    async def add_later(self, amount: int) -> int:
        with self:
            value = self.value
            await asyncio.sleep(0)
            self.value = value + amount
            return self.value

    @ag.inline
    def add_inline(self, amount: int) -> int:
        with self:
            self.value += amount
            return self.value

    async def wait(self, name: str) -> None:
        with self:
            self.order.append(name)
            await asyncio.Event().wait()

    def note(self, name: str, _: object = None) -> None:
        self.order.append(name)

    def wait_for_gate(self, name: str) -> None:
        with self:
            self.gate.wait(10)
            self.order.append(name)

    def call_myself(self, me: ag.RRef) -> int:
        return me.rpc_sync().add(1)

    def __enter__(self):
        self.inside += 1
        self.most = max(self.most, self.inside)
        return self

    def __exit__(self, *_):
        self.inside -= 1


class Plain(Counter):
    pass


class Free:
    def __init__(self):
        self.threads = []

    async def where(self):
        return threading.current_thread() is threading.main_thread()

    @ag.inline
    def inline_where(self):
        return threading.current_thread() is threading.main_thread()

    def plain_where(self):
        return threading.current_thread() is threading.main_thread()


@pytest.fixture
async def cluster():
    async with ag.LocalCluster(2, processes=False) as cluster:
        yield cluster


@pytest.mark.parametrize("to", ["worker0", "driver"])
async def test_calls_of_a_serial_object_run_one_at_a_time_in_order_of_arrival(cluster, to):
    counter = ag.remote(to, Plain)
    calls = counter.rpc_async()
    methods = [calls.add, calls.add_later, calls.add_inline]
    results = await asyncio.gather(*[methods[i % 3](1) for i in range(60)])
    assert results == list(range(1, 61))
    value = await ag.rpc_async(to, state, args=(counter,))
    assert value == (60, 1)


def state(rref):
    value = rref.local_value()
    return value.value, value.most


async def test_calls_that_overtake_the_creation_keep_their_order(cluster):
    counter = ag.remote("worker0", slow_counter)
    calls = [counter.rpc_async().note(str(i)) for i in range(5)]
    await asyncio.gather(*calls)
    assert await ag.rpc_async("worker0", order, args=(counter,)) == list("01234")


def slow_counter():
    time.sleep(0.02)
    return Counter()


def order(rref):
    return rref.local_value().order


async def test_two_references_to_one_object_share_its_turns(cluster):
    first = ag.remote("worker0", Counter)
    second = ag.remote("worker0", the_same, args=(first,))
    await asyncio.gather(*[rref.rpc_async().add(1) for rref in [first, second] * 50])
    assert await ag.rpc_async("worker0", state, args=(first,)) == (100, 1)


def the_same(rref):
    return rref.local_value()


async def test_a_cancelled_call_gives_its_turn_to_the_next(cluster):
    counter = ag.remote("worker0", Counter)
    running = counter.rpc_async().wait("running")
    waiting = counter.rpc_async().wait("waiting")
    last = counter.rpc_async().note("last")
    await counter.future()
    await until(lambda: Counter.last.order == ["running"])
    waiting.cancel()
    running.cancel()
    await last
    assert Counter.last.order == ["running", "last"]
    assert await ag.rpc_async("worker0", open_queues) == 0


async def test_a_thread_that_nobody_waits_for_keeps_its_turn_until_it_ends(cluster):
    counter = ag.remote("worker0", Counter)
    await counter.future()
    abandoned = counter.rpc_async().wait_for_gate("abandoned")
    last = counter.rpc_async().note("last")
    value = Counter.last
    await until(lambda: value.inside == 1)
    abandoned.cancel()
    with pytest.raises(DeadlineExceeded):  # waits behind the thread, too
        await counter.rpc_async(timeout=0.05).note("expired")
    assert not last.done()
    value.gate.set()
    await last
    assert value.order == ["abandoned", "last"]


async def test_a_call_that_cannot_be_decoded_gives_its_turn_to_the_next(cluster):
    counter = ag.remote("worker0", Counter)
    await counter.future()
    with pytest.raises(ZeroDivisionError):
        await counter.rpc_async().note("broken", Unreadable())
    await counter.rpc_async(timeout=5).note("last")
    assert Counter.last.order == ["last"]


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


async def test_a_serial_method_that_would_wait_for_itself_is_told_so(cluster):
    counter = ag.remote("worker0", Counter)
    with pytest.raises(RRefError, match="serial"):
        await counter.rpc_async().call_myself(counter)
    assert await counter.rpc_async().add(1) == 1


async def test_methods_run_where_functions_of_their_kind_run(cluster):
    free = ag.remote("worker0", Free)
    assert await free.rpc_async().where()
    assert await free.rpc_async().inline_where()
    assert not await free.rpc_async().plain_where()
    assert await free.remote().where()


async def test_a_coroutine_method_runs_while_all_threads_are_busy():
    options = ag.Options(threads=1)
    async with ag.LocalCluster(1, processes=False, options=options):
        counter, free = ag.remote("worker0", Blocking), ag.remote("worker0", Free)
        busy = [counter.rpc_async().block() for _ in range(8)]
        assert await free.rpc_async(timeout=5).where()
        assert await free.rpc_async(timeout=5).inline_where()
        Blocking.gate.set()
        await asyncio.gather(*busy)
        Blocking.gate.clear()


class Blocking:
    gate = threading.Event()

    def block(self):
        self.gate.wait(20)


def test_only_classes_are_serial():
    with pytest.raises(TypeError, match="class"):
        ag.serial(lambda: None)


def open_queues() -> int:
    return len(current_rrefs().turns)
