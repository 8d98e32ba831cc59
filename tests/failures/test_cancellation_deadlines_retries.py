"""F14: a call is cancelled. F15: a deadline passes in a nested call. F16: a call is retried."""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag
from aiograd.errors import DeadlineExceeded
from tests.failures.work import (
    echo,
    kill,
    linger,
    linger_in_thread,
    linger_through,
    now,
    outcome,
    release_threads,
    told,
    until,
)


async def cancel_and_see(call, last: str) -> float:
    """Cancel a call that has reached a worker; how long until that worker saw it."""
    await told(last, "started")
    began = now()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert now() - began < 1.0
    return await told(last, "cancelled") - began


async def test_f14_cancelling_reaches_every_depth_and_threads_are_counted(cluster, figure):
    async with cluster(5):
        call = ag.rpc_async("worker0", linger)
        took = await cancel_and_see(call, "worker0")
        figure("F14", "a call is cancelled: seen by its coroutine", 0.1, took)
        names = [f"worker{i}" for i in range(1, 5)]
        call = ag.rpc_async(names[0], linger_through, (names[1:],))
        took = await cancel_and_see(call, names[-1])
        figure("F14", "… at depth 4", 0.5, took)
        thread = ag.rpc_async("worker0", linger_in_thread)
        await told("worker0", "in a thread")
        assert await abandoned("worker0") == 0
        thread.cancel()
        await until(lambda: abandoned("worker0"))
        assert await abandoned("worker0") == 1
        await ag.rpc_async("worker0", release_threads)
        await until(lambda: none_abandoned("worker0"))


async def abandoned(name: str) -> int:
    counters = await ag.rpc_async(name, ag.debug_info)
    return counters["abandoned_calls"]


async def none_abandoned(name: str) -> bool:
    return not await abandoned(name)


async def test_f15_no_hop_works_on_when_the_time_of_the_first_is_spent(cluster, figure):
    async with cluster(3) as c:
        await asyncio.gather(*(ag.rpc_async(worker, echo, (1,)) for worker in c))
        deadline = now() + 0.5
        call = ag.rpc_async("worker0", linger_through, (["worker1", "worker2"],), timeout=0.5)
        error, when = await outcome(call)
        assert isinstance(error, DeadlineExceeded)
        assert error.worker == "worker0"
        figure("F15", "time is up: `DeadlineExceeded` past the deadline", 0.25, when - deadline)
        ends = [await told(name, "cancelled") for name in ("worker0", "worker1", "worker2")]
        figure("F15", "… the last of three hops stops", 0.25, max(ends) - deadline)


@ag.idempotent
def answer(x):
    return x + 1


async def test_f16_an_idempotent_call_outlives_its_worker(cluster, figure):
    async with cluster(2) as c:
        assert await ag.rpc_async("worker1", answer, (1,)) == 2
        kill(c, "worker1")
        began = now()
        call = ag.rpc_async("worker1", answer, (2,))
        await c.restart("worker1")
        assert await call == 3
        figure(
            "F16", "an idempotent call to a killed worker: answered by the next", 3.0, now() - began
        )
        kill(c, "worker1")
        began = now()
        error, when = await outcome(ag.rpc_async("worker1", answer, (1,), timeout=0.4))
        assert error.worker == "worker1"
        figure("F16", "… never beyond its deadline", 0.4 + 0.25, when - began)
