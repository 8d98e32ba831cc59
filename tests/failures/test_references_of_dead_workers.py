"""F9: the owner of references dies. F10: a user dies. F17: a worker is restarted."""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag
from aiograd.errors import OwnerLost, WorkerLost
from tests.failures.conftest import PACE
from tests.failures.work import echo, kill, linger, now, outcome
from tests.support.waiting import until_not

KEPT: list[object] = []


async def fetch(reference):
    return await reference.to_here()


def keep(reference):
    KEPT.append(reference)


async def use_kept():
    return await KEPT[0].to_here()


async def owned(name):
    return (await ag.rpc_async(name, ag.debug_info))["owner_rrefs"]


async def test_f9_every_use_of_a_dead_owners_reference_says_so(cluster, figure):
    async with cluster(3) as c:
        reference = ag.remote("worker1", float, (7,))
        creating = ag.remote("worker1", linger)
        assert await reference == 7.0
        await ag.rpc_async("worker0", keep, (reference,))
        assert await ag.rpc_async("worker0", use_kept) == 7.0
        waiting = asyncio.create_task(outcome(creating.to_here()))
        await asyncio.sleep(0)
        killed = kill(c, "worker1")
        error, when = await waiting
        assert isinstance(error, OwnerLost), repr(error)
        assert error.worker == "worker1"
        figure("F9", "an owner is killed: `OwnerLost` at uses under way", 0.5, when - killed)
        uses = [reference.to_here, lambda: ag.rpc_async("worker0", use_kept)]
        for use in uses:
            error, _ = await outcome(use())
            assert isinstance(error, OwnerLost)
            assert error.worker == "worker1"
        error, when = await outcome(ag.rpc_async("worker0", use_kept))
        assert isinstance(error, OwnerLost)
        with pytest.raises(OwnerLost):  # as an argument: here, before anything is sent
            ag.rpc_async("worker0", fetch, (reference,))
        await ag.rpc_async("worker0", KEPT.clear)


@pytest.mark.deadline(40)
async def test_f10_references_of_a_killed_user_are_freed(cluster, figure):
    async with cluster(2) as c:
        reference = ag.remote("worker0", float, (7,))
        await ag.rpc_async("worker1", keep, (reference,))
        await reference.release()
        assert await owned("worker0") == 1
        killed = kill(c, "worker1")
        await until_not(lambda: owned("worker0"), 60.0)
        figure("F10", "a user is killed: its references freed", 12.0 / PACE, now() - killed)


async def test_f17_a_restarted_worker_is_another_one(cluster, figure):
    async with cluster(2) as c:
        before = await ag.rpc_async("worker1", float, (1,))
        reference = ag.remote("worker1", float, (7,))
        assert await reference == 7.0
        x = ag.tensor([1.0], requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", lambda v: v * 2.0, (x,))
            kill(c, "worker1")
            began = now()
            await c.restart("worker1")
            assert await ag.rpc_async("worker1", echo, (before,)) == before
            figure("F17", "a worker is restarted: callable again", 3.0, now() - began)
            error, _ = await outcome(ctx.backward(y.sum()))
            assert error.worker == "worker1"
        error, _ = await outcome(reference.to_here())
        assert isinstance(error, OwnerLost)
        assert isinstance(error, WorkerLost)
        fresh = ag.remote("worker1", float, (8,))
        assert await fresh == 8.0
