"""News about who is there."""

from __future__ import annotations

import asyncio

import pytest

from aiograd.cluster.api import all_gather, current_worker
from aiograd.errors import UnknownWorker, WorkerLost
from aiograd.testing.fault_injection import Faults
from tests.support.waiting import until


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
    monkeypatch.setattr("aiograd.cluster.member.LOST_PEERS", 3)
    a, b = await meeting.open("a", "b")
    for rank in range(2, 8):
        worker = await meeting.worker(f"w{rank}", rank).start()
        await worker.close(graceful=False)
        await a.member.wait_gone(f"w{rank}")
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


async def test_a_loss_that_is_read_right_behind_a_barrier_ends_the_barrier(meeting):
    """Both messages may come in one read, and a coroutine begins only after it."""
    a, b, c = await meeting.open("a", "b", "c")
    members = [worker.agent.info for worker in (a, b, c)]
    group = tuple((peer.name, peer.incarnation) for peer in members)
    asked = a.agent.services["cluster.gather"](b.agent.info, group, None)
    a.member.collectives.gone(c.agent.info, WorkerLost("c"))
    with pytest.raises(WorkerLost) as caught:
        async with asyncio.timeout(5):
            await asked
    assert caught.value.worker == "c"


# ── a process that ended ────────────────────────────────────────────────────────────────────────


async def test_everyone_learns_from_the_end_of_a_process_that_its_worker_is_lost(meeting):
    a, b, c = await meeting.open("a", "b", "c")  # c lives: what follows is known from its end only
    calls = [worker.agent.call("c", asyncio.sleep, (60,)) for worker in (a, b)]
    await asyncio.gather(*(worker.agent.call("c", abs, (-1,)) for worker in (a, b)))
    a.coordinator.process_ended(c.agent.info, "its process ended (SIGKILL)")
    for call in calls:
        with pytest.raises(WorkerLost, match="SIGKILL") as caught:
            await call
        assert caught.value.worker == "c"
    await b.member.wait_gone("c")
    assert [info.name for info in a.workers()] == [info.name for info in b.workers()] == ["a", "b"]


async def test_the_end_of_the_process_of_a_worker_that_has_left_is_no_loss(meeting):
    a, b = await meeting.open("a", "b")
    peer, losses = b.agent.info, []
    await b.close()
    a.agent.lost.append(lambda peer, error: losses.append(peer))
    a.coordinator.process_ended(peer, "its process ended (exit code 0)")
    await asyncio.gather(*a.agent._tasks)
    assert losses == []
    with pytest.raises(UnknownWorker):
        a.agent.call("b", abs, (-1,))


async def test_the_end_of_a_process_says_nothing_of_its_successor(meeting):
    a, b = await meeting.open("a", "b")
    old = b.agent.info
    await b.close(graceful=False)
    await a.member.wait_gone("b")
    again = meeting.worker("b", 1)
    await again.start()
    a.coordinator.process_ended(old, "its process ended (SIGKILL)")
    await asyncio.gather(*a.agent._tasks)
    assert await a.agent.call("b", abs, (-2,)) == 2


async def test_what_a_process_sent_before_its_end_is_read_before_its_worker_is_lost(
    meeting, monkeypatch
):
    monkeypatch.setattr("aiograd.rpc.link.links._READ_OUT", 0.3)  # a busy machine may be late
    a, b = await meeting.open("a", "b")
    answer = a.agent.call("b", _slow)
    a.coordinator.process_ended(b.agent.info, "its process ended (exit code 0)")
    assert await answer == "in time"
    await a.member.wait_gone("b")


async def _slow() -> str:
    await asyncio.sleep(0.005)
    return "in time"


# ── losses that the coordinator does not see, and those that it does ────────────────────────────


def lose(worker, other):
    """Give a member up, as after a cut for longer than `Options.resume`."""
    link = worker.agent.links.of(other.agent.info)
    link.abort(WorkerLost(other.agent.name, why="on purpose"))


def lost(worker, other):
    info = other.agent.info
    return (info.name, info.incarnation) in worker.agent.links.losses


def seen(worker):
    return [(info.name, info.suspect) for info in worker.workers()]


def add(x, y):
    return x + y


async def test_members_that_lost_each_other_stay_members_and_meet_again(meeting):
    a, b, c = workers = await meeting.static("a", "b", "c")
    assert await b.agent.call("c", add, (1, 2)) == 3
    lose(b, c)
    await until(lambda: lost(c, b))
    assert seen(a) == [("a", False), ("b", False), ("c", False)]
    assert seen(b) == [("a", False), ("b", False), ("c", True)]
    assert seen(c) == [("a", False), ("b", True), ("c", False)]
    assert await c.agent.call("b", add, (1, 2)) == 3
    for worker in workers:
        assert seen(worker) == [("a", False), ("b", False), ("c", False)]

    async def run():
        return list(await all_gather(current_worker().rank))

    assert await meeting.everyone(workers, run) == [["a", "b", "c"]] * 3


async def test_a_member_that_the_coordinator_lost_is_lost_to_all_for_ever(meeting):
    a, b, c = await meeting.static("a", "b", "c")
    assert await b.agent.call("c", add, (1, 2)) == 3
    lose(a, c)
    await until(lambda: lost(b, c) and lost(c, b))
    for worker in (a, b):
        assert seen(worker) == [("a", False), ("b", False)]
        with pytest.raises(WorkerLost, match="on purpose"):
            await worker.agent.call("c", add, (1, 2))
    for name in ("a", "b"):
        with pytest.raises(WorkerLost, match="took this worker for lost"):
            await c.agent.call(name, add, (1, 2))
    assert c.member.dismissed.done()
