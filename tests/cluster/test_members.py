"""News about who is there."""

from __future__ import annotations

import asyncio

from aiograd.cluster.worker import all_gather, current_worker
from aiograd.testing.faults import Faults


async def test_a_member_that_missed_news_catches_up(meeting):
    a, b = await meeting.open("a", "b")
    a.agent.faults = Faults(fail={}, drop={"cluster.change": 1})
    for name, rank in (("c", 2), ("d", 3)):
        await meeting.worker(name, rank).start()
    assert [info.name for info in b.workers()] == ["a", "b", "c", "d"]


async def test_news_that_come_twice_change_nothing(meeting):
    a, b = await meeting.open("a", "b")
    a.agent.faults = Faults(fail={}, duplicate=["cluster.change"])
    for name, rank in (("c", 2), ("d", 3)):
        await meeting.worker(name, rank).start()
    assert [info.name for info in b.workers()] == ["a", "b", "c", "d"]


async def test_many_join_at_once_and_all_know_all(meeting):
    (first,) = await meeting.open("w0")
    others = [meeting.worker(f"w{rank}", rank) for rank in range(1, 12)]
    await asyncio.gather(*(worker.start() for worker in others))
    for worker in (first, *others):
        assert [info.rank for info in worker.workers()] == list(range(12))

    async def run():
        return len(await all_gather(current_worker().rank))

    assert await meeting.everyone([first, *others], run) == [12] * 12
