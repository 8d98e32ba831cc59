"""F11: shutdown while calls are pending and a peer does not answer."""

from __future__ import annotations

import asyncio

import aiograd as ag
from aiograd.errors import WorkerClosed, WorkerLost
from tests.failures.conftest import PACE
from tests.failures.work import echo, linger, now, outcome, stopped, told

GRACE = 5.0 / PACE


async def test_f11_leaving_ends_in_time_with_a_stopped_worker_and_work_that_never_ends(
    cluster, figure
):
    c = await cluster(3)
    await asyncio.gather(*(ag.rpc_async(worker, echo, (1,)) for worker in c))
    waiting = [
        asyncio.create_task(outcome(ag.rpc_async(name, linger))) for name in ("worker0", "worker1")
    ]
    await told("worker0", "started")
    await told("worker1", "started")
    with stopped(c, "worker1"):
        began = now()
        await c.close()
        figure("F11", "leaving with a stopped worker, beyond the grace", 1.0, now() - began - GRACE)
    for error, _ in await asyncio.gather(*waiting):
        assert isinstance(error, WorkerClosed | WorkerLost)
