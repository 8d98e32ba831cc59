"""News about who is there."""

from __future__ import annotations

import asyncio

import pytest

from aiograd.cluster.current import all_gather, current_worker
from aiograd.errors import UnknownWorker, WorkerLost
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


async def test_the_lost_are_known_as_such_but_not_all_of_them_for_ever(meeting, monkeypatch):
    monkeypatch.setattr("aiograd.cluster.members.LOST_PEERS", 3)
    a, b = await meeting.open("a", "b")
    for rank in range(2, 8):
        worker = await meeting.worker(f"w{rank}", rank).start()
        await worker.close(graceful=False)
        await a.members.wait_gone(f"w{rank}")
    for rank in (2, 4):
        with pytest.raises(UnknownWorker):
            a.agent.link(f"w{rank}")
    for rank in (5, 7):
        assert isinstance(a.agent.link(f"w{rank}").error, WorkerLost)
    await meeting.worker("w2", 2).start()
    assert [info.name for info in b.workers()] == ["a", "b", "w2"]


async def test_many_join_at_once_and_all_know_all(meeting):
    (first,) = await meeting.open("w0")
    others = [meeting.worker(f"w{rank}", rank) for rank in range(1, 12)]
    await asyncio.gather(*(worker.start() for worker in others))
    for worker in (first, *others):
        assert [info.rank for info in worker.workers()] == list(range(12))

    async def run():
        return len(await all_gather(current_worker().rank))

    assert await meeting.everyone([first, *others], run) == [12] * 12


# ── a process that ended ────────────────────────────────────────────────────────────────────────


async def test_everyone_learns_from_the_end_of_a_process_that_its_worker_is_lost(meeting):
    a, b, c = await meeting.open("a", "b", "c")  # c lives: what follows is known from its end only
    calls = [worker.agent.call("c", asyncio.sleep, (60,)) for worker in (a, b)]
    await asyncio.gather(*(worker.agent.call("c", abs, (-1,)) for worker in (a, b)))
    a.members.process_ended(c.agent.info, "its process ended (SIGKILL)")
    for call in calls:
        with pytest.raises(WorkerLost, match="SIGKILL") as caught:
            await call
        assert caught.value.worker == "c"
    await b.members.wait_gone("c")
    assert [info.name for info in a.workers()] == [info.name for info in b.workers()] == ["a", "b"]


async def test_the_end_of_the_process_of_a_worker_that_has_left_is_no_loss(meeting):
    a, b = await meeting.open("a", "b")
    peer, losses = b.agent.info, []
    await b.close()
    a.agent.lost.append(lambda peer, error: losses.append(peer))
    a.members.process_ended(peer, "its process ended (exit code 0)")
    await asyncio.gather(*a.agent._tasks)
    assert losses == []
    with pytest.raises(UnknownWorker):
        a.agent.call("b", abs, (-1,))


async def test_the_end_of_a_process_says_nothing_of_its_successor(meeting):
    a, b = await meeting.open("a", "b")
    old = b.agent.info
    await b.close(graceful=False)
    await a.members.wait_gone("b")
    again = meeting.worker("b", 1)
    await again.start()
    a.members.process_ended(old, "its process ended (SIGKILL)")
    await asyncio.gather(*a.agent._tasks)
    assert await a.agent.call("b", abs, (-2,)) == 2


async def test_what_a_process_sent_before_its_end_is_read_before_its_worker_is_lost(
    meeting, monkeypatch
):
    monkeypatch.setattr("aiograd.rpc.links._READ_OUT", 0.3)  # a busy machine may be late
    a, b = await meeting.open("a", "b")
    answer = a.agent.call("b", _slow)
    a.members.process_ended(b.agent.info, "its process ended (exit code 0)")
    assert await answer == "in time"
    await a.members.wait_gone("b")


async def _slow() -> str:
    await asyncio.sleep(0.005)
    return "in time"
