"""Nodes that crash, vanish, pause and restart, as the library sees them."""

from __future__ import annotations

import asyncio
import inspect

import pytest

import aiograd as ag
from aiograd.testing import simulate
from aiograd.testing.simulator import Fault
from aiograd.testing.simulator.world import here


def double(x):
    return 2 * x


async def hang():
    await asyncio.sleep(10_000)


def test_a_crash_whose_connections_stay_open_fails_calls_when_its_end_is_announced():
    async def program(world):
        loop = asyncio.get_running_loop()
        waiting = ag.rpc_async("worker0", asyncio.sleep, (30,))
        await asyncio.sleep(1)
        world.crash("worker0", told=0.2)
        later = ag.rpc_async("worker0", here)  # its listener accepts, and nobody answers
        began = loop.time()
        with pytest.raises(ag.errors.WorkerLost, match="its process ended"):
            await waiting
        assert loop.time() - began == pytest.approx(0.2, abs=0.01)
        with pytest.raises(ag.errors.WorkerLost):
            await later
        return loop.time() - began

    assert simulate(program, workers=1) == pytest.approx(0.2, abs=0.01)


def test_a_crash_is_an_error_at_once():
    async def program(world) -> float:
        call = ag.rpc_async("worker0", hang)
        await asyncio.sleep(1)
        world.crash("worker0")
        with pytest.raises(ag.errors.WorkerLost):
            await call
        return asyncio.get_running_loop().time()

    assert simulate(program) < 1.1


def test_a_host_without_power_is_noticed_within_six_seconds():
    async def program(world) -> float:
        await ag.rpc_async("worker0", double, args=(1,))
        call = ag.rpc_async("worker0", hang)
        world.crash("worker0", silent=True)
        with pytest.raises(ag.errors.WorkerLost):
            await call
        return asyncio.get_running_loop().time()

    assert 4 < simulate(program) < 6.5


def test_a_paused_worker_goes_on_where_it_was():
    async def program(world) -> int:
        await ag.rpc_async("worker0", double, args=(1,))
        world.pause("worker0", 20.0)
        return await ag.rpc_async("worker0", double, args=(4,))

    assert simulate(program) == 8


def test_a_restarted_worker_is_another_incarnation():
    async def program(world) -> int:
        rref = ag.remote("worker0", double, args=(4,))
        assert await rref == 8
        world.crash("worker0")
        await world.restart("worker0")
        await asyncio.sleep(1)
        with pytest.raises(ag.errors.OwnerLost):
            await rref
        return await ag.rpc_async("worker0", double, args=(5,))

    assert simulate(program) == 10


@ag.inline
def promise_and_crash():
    """Return a coroutine, which the worker does not live long enough to start."""
    node = here()
    node.world.crash(node.name)
    node.world.promised = promised = never_begun()
    return promised


async def never_begun():
    raise AssertionError("its worker has crashed")


def test_a_coroutine_that_a_crash_kept_from_starting_is_closed_silently():
    async def program(world):
        with pytest.raises(ag.errors.WorkerLost):
            await ag.rpc_async("worker0", promise_and_crash)
        assert inspect.getcoroutinestate(world.promised) == inspect.CORO_CREATED
        return world.promised

    assert inspect.getcoroutinestate(simulate(program)) == inspect.CORO_CLOSED


async def start_number():
    return here().start_number


def test_a_replaced_worker_is_another_start_of_the_same_name():
    async def program(world) -> tuple[int, bool]:
        old = world.nodes["worker0"]
        await asyncio.sleep(2.0)
        return await ag.rpc_async("worker0", start_number), old.alive

    assert simulate(program, faults=[Fault(1.0, "replace", "worker0")]) == (1, False)
