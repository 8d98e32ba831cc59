"""The coordinator over the wire: many joins at once, and processes that ended."""

from __future__ import annotations

import asyncio

import pytest

from aiograd.cluster.api import all_gather, current_worker
from aiograd.cluster.membership import coordinator as coordinator_module
from aiograd.cluster.membership.coordinator import Coordinator
from aiograd.cluster.worker import Worker
from aiograd.errors import RpcError, UnknownWorker, WorkerLost
from tests.support.waiting import until


async def test_workers_that_join_at_once_know_each_other(world):
    (first,) = await world.open("w0")
    others = [world.worker(f"w{rank}", rank) for rank in range(1, 12)]
    await asyncio.gather(*(worker.start() for worker in others))
    for worker in (first, *others):
        assert [info.rank for info in worker.workers()] == list(range(12))

    async def run():
        return len(await all_gather(current_worker().rank))

    assert await world.everyone([first, *others], run) == [12] * 12


async def test_workers_that_join_at_once_are_announced_together(world):
    (first,) = await world.open("w0")
    updates = []
    request_each = Coordinator._request_each

    def counted(self, peers, service, *arguments):
        if service == "cluster.change" and peers:
            updates.append(arguments[0])
        return request_each(self, peers, service, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "_request_each", counted)
        others = [world.worker(f"w{rank}", rank) for rank in range(1, 33)]
        await asyncio.gather(*(worker.start() for worker in others))
    assert len(updates) <= 12
    assert max(len(update.joined) for update in updates) > 2
    assert len(first.workers()) == 33


async def test_a_worker_that_joins_a_large_cluster_at_rest_does_not_wait(world):
    first, *_ = await world.open(*[f"w{rank}" for rank in range(12)])
    coordinator = first._coordinator
    await until(lambda: asyncio.get_running_loop().time() > coordinator._next_admission)
    late = world.worker("late", 50)
    await late.start()
    assert coordinator._timer is None
    assert len(late.workers()) == 13


# ── a process that ended ────────────────────────────────────────────────────────────────────────


async def test_all_members_lose_a_worker_whose_process_has_ended(world):
    a, b, c = await world.open("a", "b", "c")  # c lives: what follows is known from its end only
    calls = [worker.agent.call("c", asyncio.sleep, (60,)) for worker in (a, b)]
    await asyncio.gather(*(worker.agent.call("c", abs, (-1,)) for worker in (a, b)))
    a.coordinator.process_ended(c.agent.info, "its process ended (SIGKILL)")
    for call in calls:
        with pytest.raises(WorkerLost, match="SIGKILL") as caught:
            await call
        assert caught.value.worker == "c"
    await b.member.wait_gone("c")
    assert [info.name for info in a.workers()] == [info.name for info in b.workers()] == ["a", "b"]


async def test_the_end_of_the_process_of_a_worker_that_has_left_is_no_loss(world):
    a, b = await world.open("a", "b")
    peer, losses = b.agent.info, []
    await b.close()
    a.agent.lost.append(lambda peer, error: losses.append(peer))
    a.coordinator.process_ended(peer, "its process ended (exit code 0)")
    await asyncio.gather(*a.agent._tasks)
    assert losses == []
    with pytest.raises(UnknownWorker):
        a.agent.call("b", abs, (-1,))


async def test_the_end_of_a_process_does_not_concern_its_restart(world):
    a, b = await world.open("a", "b")
    old = b.agent.info
    await b.close(graceful=False)
    await a.member.wait_gone("b")
    again = world.worker("b", 1)
    await again.start()
    a.coordinator.process_ended(old, "its process ended (SIGKILL)")
    await asyncio.gather(*a.agent._tasks)
    assert await a.agent.call("b", abs, (-2,)) == 2


async def test_replies_that_a_process_sent_before_its_end_are_read_first(world, monkeypatch):
    monkeypatch.setattr("aiograd.rpc.link.links._READ_OUT", 0.3)  # a busy machine may be late
    a, b = await world.open("a", "b")
    answer = a.agent.call("b", _slow)
    a.coordinator.process_ended(b.agent.info, "its process ended (exit code 0)")
    assert await answer == "in time"
    await a.member.wait_gone("b")


async def _slow() -> str:
    await asyncio.sleep(0.005)
    return "in time"


async def test_a_refused_worker_is_logged_with_the_reason(world, caplog):
    await world.open("a", "b")
    with pytest.raises(RpcError, match="worker names must be unique"):
        await world.worker("b", 2).start()
    (line,) = [text for text in caplog.messages if "refused" in text]
    assert line.startswith("a: refused b (rank 2): worker names must be unique")


def watched(worker: Worker) -> set[bytes]:
    """Those whose connections stay open, so that their end is noticed at once."""
    return {peer for layer in worker.agent.watched for peer in layer()}


async def test_the_coordinator_watches_all_members_of_a_static_world(world):
    a, *others = await world.static(*"abc")
    assert watched(a) >= {worker.agent.incarnation for worker in others}
    for worker in others:
        assert watched(worker) == {a.agent.incarnation}


async def test_a_successor_opens_a_connection_to_every_member_and_watches_it(world):
    a, b, *others = await world.open(*"abcde")

    def met() -> set[str]:
        return {link.peer.name for link in b.agent.links.all() if link.is_open}

    assert met() == {"a"}  # nobody else was called
    await a.close(graceful=False)
    await until(lambda: all(each.member.leader.name == "b" for each in others))
    await until(
        lambda: {link.peer.name for link in b.agent.links.all() if link.is_open} >= {*"cde"}
    )
    assert watched(b) >= {worker.agent.incarnation for worker in others}
    for worker in others:
        assert watched(worker) == {b.agent.incarnation}


async def test_losses_in_quick_succession_are_announced_together(world, monkeypatch):
    monkeypatch.setattr(coordinator_module, "_FEW", 0)
    monkeypatch.setattr(coordinator_module, "_LOSS_PAUSE", 0.1)
    a, *others = await world.open(*"abcdefg")
    before = a.member.roster.version
    for worker in others[:4]:
        a.coordinator.lose(worker.agent.info, "gone")
    await until(lambda: len(a.member.peers) == 3)
    assert a.member.roster.version == before + 2  # the first at once, the others together
    await until(lambda: all(len(each.member.peers) == 3 for each in others[4:]))
