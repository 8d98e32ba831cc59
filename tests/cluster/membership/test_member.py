"""A member's copy of the roster, over the wire: missed and repeated updates, losses."""

from __future__ import annotations

import logging

import pytest

from aiograd.cluster.api import all_gather, current_worker
from aiograd.errors import RpcError, UnknownWorker, WorkerLost
from aiograd.testing.fault_injection import Faults
from tests.support.waiting import until


async def test_a_member_that_missed_an_update_asks_for_the_roster(world):
    a, b = await world.open("a", "b")
    a.agent.fault_injector = Faults(fail={}, drop={"cluster.change": 1})
    for name, rank in (("c", 2), ("d", 3)):
        await world.worker(name, rank).start()
    assert [info.name for info in b.workers()] == ["a", "b", "c", "d"]


async def test_a_repeated_update_changes_nothing(world):
    a, b = await world.open("a", "b")
    a.agent.fault_injector = Faults(fail={}, duplicate=["cluster.change"])
    for name, rank in (("c", 2), ("d", 3)):
        await world.worker(name, rank).start()
    assert [info.name for info in b.workers()] == ["a", "b", "c", "d"]


async def test_the_latest_lost_workers_are_known_as_lost(world, monkeypatch):
    monkeypatch.setattr("aiograd.cluster.membership.member.LOST_PEERS", 3)
    a, b = await world.open("a", "b")
    for rank in range(2, 8):
        worker = await world.worker(f"w{rank}", rank).start()
        await worker.close(graceful=False)
        await a.member.wait_gone(f"w{rank}")
    for rank in (2, 4):
        with pytest.raises(UnknownWorker):
            a.agent.link(f"w{rank}")
    for rank in (5, 7):
        assert isinstance(a.agent.link(f"w{rank}").error, WorkerLost)
    await world.worker("w2", 2).start()
    assert [info.name for info in b.workers()] == ["a", "b", "w2"]


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


async def test_members_that_lost_each_other_stay_members_and_reconnect(world):
    a, b, c = workers = await world.static("a", "b", "c")
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

    assert await world.everyone(workers, run) == [["a", "b", "c"]] * 3


async def test_a_member_that_the_coordinator_lost_is_lost_to_all_for_good(world):
    a, b, c = await world.static("a", "b", "c")
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


# ── what is logged ──────────────────────────────────────────────────────────────────────────────


async def test_joins_leaves_and_losses_are_logged_with_the_peer_and_its_address(world, caplog):
    caplog.set_level(logging.INFO, "aiograd.cluster")
    a, b = await world.open("a", "b")
    address = b.agent.info.addresses[0]
    await b.close()
    await a.member.wait_gone("b")
    c = await world.worker("c", 2).start()
    await c.close(graceful=False)
    await a.member.wait_gone("c")
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("INFO", "b joined as rank 1; 2 members, coordinator: a") in lines
    assert ("INFO", f"a: b (rank 1, {address}) joined") in lines
    assert ("INFO", f"a: b (rank 1, {address}) left") in lines
    (loss,) = [text for level, text in lines if level == "WARNING"]
    assert loss.startswith("a: lost c (rank 2, memory:")


async def test_the_loss_of_the_coordinator_is_logged(world, caplog):
    caplog.set_level(logging.INFO, "aiograd.cluster")
    a, b = await world.open("a", "b")
    await a.close(graceful=False)
    await b.member.dismissed
    assert "b: lost the coordinator a (rank 0, memory:" in caplog.text


async def test_a_member_refuses_the_services_of_the_coordinator(world):
    a, b = await world.open("a", "b")
    for service in ("cluster.place", "cluster.roster", "cluster.leave"):
        with pytest.raises(RpcError, match="b is not the coordinator of this cluster"):
            await a.agent.request("b", service, timeout=5)
    with pytest.raises(RpcError, match="b is not the coordinator"):
        await a.agent.request("b", "cluster.report", 0, 0, timeout=5)
    with pytest.raises(RpcError, match="b is not the coordinator"):
        b.coordinator  # noqa: B018
