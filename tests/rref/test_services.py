"""Audits of forks that were sent, and references when two workers begin a new session."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import OwnerLost, RRefError, WorkerLost
from aiograd.rpc.api import rpc_async
from aiograd.rpc.options import Options
from aiograd.rpc.scope import SCOPE, CallScope, inherited_deadline
from aiograd.rref import RRef, RRefs, remote
from aiograd.rref.refcount.records import BY_CREATOR, pack_fork
from aiograd.testing import simulate
from aiograd.testing.simulator import Fault

QUICK = Options(lease=0.2, resume=0.2)
KEPT: dict[str, Any] = {}


# ── audits ────────────────────────────────────────────────────────────────────────────────────────


async def test_questions_do_not_inherit_the_deadline_of_a_call(monkeypatch):
    options = ag.Options(lease=0.02)
    async with ag.Worker("alone", rank=0, world_size=1, options=options) as worker:
        loop = asyncio.get_running_loop()
        messenger = worker.agent.parts[RRefs].messenger
        asked = loop.create_future()

        def audit(at_shutdown: bool) -> list[asyncio.Future[None]]:
            if not asked.done():
                asked.set_result(inherited_deadline())
            return []

        monkeypatch.setattr(messenger, "audit", audit)
        SCOPE.set(CallScope(loop.time() + 0.001))
        messenger.schedule_audit()
        assert await asked == math.inf


async def nap(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def make(number: int) -> int:
    return number


async def look(rref: ag.RRef) -> int:
    return await rref


def test_a_fork_whose_call_waits_for_its_turn_is_not_given_up():
    async def program() -> int:
        rref = ag.remote("worker1", make, args=(4,))
        await rref
        first = ag.rpc_async("worker0", nap, args=(5.0,))
        second = ag.rpc_async("worker0", look, args=(rref,))  # leaves when the first has ended
        del rref
        await first
        return await second

    assert simulate(program, options=ag.Options(max_inflight=1, lease=0.5)) == 4


def test_a_question_is_answered_also_where_the_way_is_longer_than_the_lease():
    async def program() -> None:
        rref = ag.remote("worker0", make, args=(4,))
        await rref
        with pytest.raises(ag.errors.DeadlineExceeded):
            await ag.rpc_async("worker0", look, args=(rref,), timeout=1.0)  # is lost on its way
        await rref.release()

    far = Fault(0.0, "clog", "driver", "worker0", seconds=600.0, amount=0.2)
    lost = Fault(1, "drop", "driver", on="call")
    simulate(program, faults=[far, lost], options=ag.Options(lease=0.1), limit=60.0)


# ── new sessions ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def fresh() -> Any:
    KEPT.clear()
    yield
    KEPT.clear()


def add(x: int, y: int = 0) -> int:
    return x + y


async def keep(name: str, rref: RRef) -> None:
    KEPT[name] = rref


async def use(name: str) -> Any:
    return await KEPT[name]


async def pass_on(to: str, rref: RRef) -> Any:
    return await rpc_async(to, fetch, args=(rref,))


async def fetch(rref: RRef) -> Any:
    return await rref


def lose(w: Any, one: int = 0, two: int = 1) -> None:
    """The first gives the second up, which hears of it when the new session begins."""
    peer = w.agents[two]
    link = w.agents[one].links.get(peer.incarnation)
    link.abort(WorkerLost(peer.name, why="on purpose"))


async def test_old_references_stay_lost_and_new_ones_work(workers: Any) -> None:
    async with workers(2, options=QUICK) as w:
        old, lent = remote("worker1", add, args=(1, 2)), RRef("lent")
        assert await old == 3
        await rpc_async("worker1", keep, args=("lent", lent))
        lose(w)
        new = remote("worker1", add, args=(3, 4))  # makes the new session
        assert await new == 7
        for _ in range(2):
            with pytest.raises(OwnerLost, match="worker1"):
                await old
        with pytest.raises(OwnerLost, match="worker1"):
            await rpc_async("worker1", fetch, args=(old,))
        with pytest.raises(OwnerLost, match="worker0"):  # nor has the other side kept its own
            await rpc_async("worker1", use, args=("lent",))
        assert await rpc_async("worker1", fetch, args=(new,)) == 7
        assert await rpc_async("worker1", fetch, args=(lent,)) == "lent"
        await w.until(
            lambda: len(w[1].protocol.owner_table.records) == 1
        )  # the lease of the old one
        assert await new == 7
        await old.release()
        del old, new, lent
        KEPT.clear()
        await w.at_rest()
        assert all(not part.protocol._leases for part in w.parts)


async def test_nothing_about_old_references_is_said_in_the_new_session(workers: Any) -> None:
    async with workers(2, options=QUICK) as w:
        olds = [remote("worker1", add, args=(n,)) for n in range(5)]
        for n, old in enumerate(olds):
            assert await old == n
        lose(w)
        told: list[str] = []
        for name in ("rref.release", "rref.fork", "rref.accept", "rref.audit"):
            w.agents[1].services[name] = lambda sender, *args, name=name: told.append(name)
        olds.clear()
        assert await rpc_async("worker1", add, args=(1, 2)) == 3
        await w.until(lambda: not any(w[1].counters().values()))
        assert told == []
        assert w[0].counters()["user_rrefs"] == 0


async def test_dropping_what_is_lost_dials_nobody(workers: Any) -> None:
    async with workers(2, options=QUICK) as w:
        old = remote("worker1", add, args=(1, 2))
        assert await old == 3
        dials = w.agents[0].links.dials
        lose(w)
        await old.release()
        assert w[0].counters()["user_rrefs"] == 0
        assert w.agents[0].links.dials == dials
        assert w.agents[0].links.get(w.agents[1].incarnation) is None


async def test_a_reference_that_comes_while_its_owner_is_lost_brings_the_owner_back(
    workers: Any,
) -> None:
    async with workers(3, options=QUICK) as w:
        value = remote("worker2", add, args=(1, 2))
        assert await value == 3
        assert await rpc_async("worker1", pass_on, args=("worker2", value)) == 3
        lose(w, 1, 2)
        assert await rpc_async("worker1", fetch, args=(value,)) == 3
        del value
        await w.at_rest()


async def test_a_third_worker_keeps_what_it_was_given_in_time(workers: Any) -> None:
    async with workers(3, options=QUICK) as w:
        value = remote("worker2", add, args=(1, 2))
        await rpc_async("worker1", keep, args=("value", value))
        lose(w, 0, 2)
        assert await rpc_async("worker2", add, args=(1, 2)) == 3
        await w.until(lambda: not w[2].protocol._leases)  # the lease is over
        with pytest.raises(OwnerLost):
            await value
        assert await rpc_async("worker1", use, args=("value",)) == 3
        KEPT.clear()
        del value
        await w.at_rest()


async def test_who_waits_for_a_creation_of_a_lost_session_is_told_when_the_next_begins(
    workers: Any,
) -> None:
    async with workers(3, options=Options(lease=60.0, resume=0.2)) as w:
        assert await rpc_async("worker2", add, args=(1, 2)) == 3
        never = w[0].protocol.create(w[2].protocol.me)  # is never sent
        fork = pack_fork(never.id, never.fork, BY_CREATOR)
        waiting = w.agents[1].request("worker2", "rref.fetch", fork)
        await w.until(lambda: bool(w[2].protocol.owner_table.records))
        lose(w, 0, 2)
        assert await rpc_async("worker2", add, args=(1, 2)) == 3
        with pytest.raises(RRefError, match="never came"):
            await waiting
        w[0].protocol.discard_creation(never)


@pytest.mark.parametrize("number", [-1, "1", None])
async def test_an_id_that_is_none_begins_no_session(workers: Any, number: Any) -> None:
    async with workers(2, options=QUICK) as w:
        with pytest.raises(Exception, match=r"rref\.session"):
            await w.agents[0].request("worker1", "rref.session", number)
        assert not w[1].protocol.owner_table._expired
