"""Calls that are cancelled or fail: what they wait for ends, and what they held is freed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiograd.errors import DeadlineExceeded
from aiograd.rpc.api import rpc_async, rpc_stream, rpc_sync, run_sync
from tests.support.waiting import until

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


async def sleep_long(name: str) -> None:
    try:
        SEEN.append(f"{name} began")
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        SEEN.append(f"{name} was cancelled")
        raise


def call_on(name: str, *further: str) -> None:
    try:
        if further:
            rpc_sync(name, call_on, args=further)
        else:
            rpc_sync(name, sleep_long, args=(name,))
    except BaseException as error:
        SEEN.append(type(error))
        raise


async def test_cancelling_a_call_cancels_what_its_threads_wait_for(agents):
    async with agents(3) as (_, b, c):
        call = rpc_async("worker1", call_on, args=("worker2", "worker0"))
        await until(lambda: "worker0 began" in SEEN)
        call.cancel()
        await until(lambda: SEEN.count(asyncio.CancelledError) == 2)
        assert "worker0 was cancelled" in SEEN
        await until(lambda: not b.links.counters()["abandoned_calls"])
        await until(lambda: not c.links.counters()["abandoned_calls"])


def wait_twice() -> None:
    try:
        run_sync(sleep_long("first"))
    except asyncio.CancelledError:
        try:
            rpc_sync("worker0", SEEN.append, args=("second",))
        except asyncio.CancelledError:
            SEEN.append("no second wait")


async def test_the_thread_of_a_cancelled_call_cannot_wait_any_more(agents):
    async with agents(2):
        call = rpc_async("worker1", wait_twice)
        await until(lambda: "first began" in SEEN)
        call.cancel()
        await until(lambda: "no second wait" in SEEN)
        assert "first was cancelled" in SEEN
        assert "second" not in SEEN


def wait_in_another_thread() -> Any:
    return asyncio.to_thread(call_on, "worker0")


async def test_threads_of_a_cancelled_coroutine_do_not_wait_either(agents):
    async with agents(2):
        call = rpc_async("worker1", wait_in_another_thread)
        await until(lambda: "worker0 began" in SEEN)
        call.cancel()
        await until(lambda: asyncio.CancelledError in SEEN)
        assert "worker0 was cancelled" in SEEN


async def test_threads_see_the_deadline_of_their_call_and_not_a_cancellation(agents):
    async with agents(2):
        with pytest.raises(DeadlineExceeded):
            await rpc_async("worker1", call_on, args=("worker0",), timeout=0.1)
        await until(lambda: DeadlineExceeded in SEEN)
        assert asyncio.CancelledError not in SEEN


def run_long() -> None:
    run_sync(sleep_long("coroutine"))


async def test_a_coroutine_that_a_thread_waits_for_ends_with_the_time_of_its_call(agents):
    async with agents(2):
        with pytest.raises(DeadlineExceeded):
            await rpc_async("worker1", run_long, timeout=0.1)
        await until(lambda: "coroutine was cancelled" in SEEN)


# ── what is kept ────────────────────────────────────────────────────────────────────────────────


class Argument:
    """Something to look after."""


KEPT: list[weakref.ref[Argument]] = []


async def wait(argument: Argument) -> None:
    KEPT.append(weakref.ref(argument))
    await asyncio.sleep(60)


async def generate(argument: Argument) -> AsyncIterator[int]:
    KEPT.append(weakref.ref(argument))
    while True:
        yield 1
        await asyncio.sleep(0.01)


async def generate_one(argument: Argument) -> AsyncIterator[int]:
    KEPT.append(weakref.ref(argument))
    yield 1


def wait_in_thread(argument: Argument) -> None:
    KEPT.append(weakref.ref(argument))
    rpc_sync("worker0", asyncio.sleep, args=(60,))


def run_in_thread(argument: Argument) -> None:
    KEPT.append(weakref.ref(argument))
    run_sync(asyncio.sleep(60))


def fail_in_thread(argument: Argument) -> None:
    KEPT.append(weakref.ref(argument))
    rpc_sync("worker0", int, args=("no number",))


async def read(function: Any, argument: Argument) -> None:
    if function in (generate, generate_one):
        async for _ in rpc_stream("worker1", function, args=(argument,)):
            pass
    else:
        await rpc_async("worker1", function, args=(argument,))


FUNCTIONS = [wait, generate, generate_one, wait_in_thread, run_in_thread, fail_in_thread]


@pytest.mark.parametrize("function", FUNCTIONS)
async def test_arguments_of_a_call_are_freed_when_it_ends_without_a_collection(agents, function):
    KEPT.clear()
    async with agents(2):
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(TimeoutError, ValueError):
                async with asyncio.timeout(0.1):
                    await read(function, Argument())
            await until(lambda: KEPT and KEPT[0]() is None)
            assert len(KEPT) == 1
        finally:
            gc.enable()
