"""Polling for a moment after traffic, and not a moment longer."""

from __future__ import annotations

from aiograd.rpc.api import rpc_async
from tests.support.waiting import until


def add(x, y):
    return x + y


async def test_a_loop_polls_after_traffic_and_then_sleeps(agents):
    async with agents(2) as (a, b):
        now = 5.0
        a.runtime.time, a.runtime.spin = lambda: now, 0.01  # shared by both
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert a.polling.awake
        now += 0.011
        await until(lambda: not a.polling.awake and not b.polling.awake)


async def test_polling_in_vain_is_given_up_for_a_while(agents):
    async with agents(2) as (a, b):
        a.runtime.spin = 1e-6
        for _ in range(50):
            assert await rpc_async("worker1", add, (1, 2)) == 3
            await until(lambda: not a.polling.awake and not b.polling.awake)
        assert a.polling.rest or b.polling.rest


async def test_a_loop_whose_core_somebody_takes_goes_to_sleep_at_once(agents):
    async with agents(2) as (a, b):
        now = 5.0
        a.runtime.time, a.runtime.spin = lambda: now, 3600.0  # shared by both

        def compute() -> None:
            nonlocal now
            now += 0.003

        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert a.polling.awake
        a.runtime.give_way, a.runtime.crowded = compute, True
        await until(lambda: not a.polling.awake and not b.polling.awake)


async def test_loops_that_only_look_around_share_a_core(agents):
    async with agents(2) as (a, _):
        now, rounds = 5.0, 0
        a.runtime.time, a.runtime.spin = lambda: now, 3600.0  # shared by both

        def look_around() -> None:
            nonlocal now, rounds
            now, rounds = now + 20e-6, rounds + 1

        a.runtime.give_way, a.runtime.crowded = look_around, True
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await until(lambda: rounds > 100)
        assert a.polling.awake


CLOCK = [5.0]  # the time of a test; its workers share this process


def compute(seconds):
    CLOCK[0] += seconds


async def test_a_loop_polls_after_a_function_only_if_that_was_quick(agents):
    async with agents(2) as (a, b):
        a.runtime.time, a.runtime.spin = lambda: CLOCK[0], 3600.0  # shared by both
        await rpc_async("worker1", compute, (1.0,))
        assert b.polling.awake
        await rpc_async("worker1", compute, (4000.0,))
        await until(lambda: not b.polling.awake)  # who computes does not talk much


async def test_without_spin_nothing_polls(agents):
    async with agents(2) as (a, _):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert not a.polling.awake
