"""References when messages and workers are lost, and at shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from typing import Any

import pytest

from aiograd.errors import (
    DeadlineExceeded,
    OwnerLost,
    RemoteError,
    RRefError,
    RRefExpired,
    RRefLeak,
    RRefReleased,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.api import rpc_async
from aiograd.rpc.extension import SEND, Departure, FaultAction
from aiograd.rpc.options import Options
from aiograd.rref import RRef, attach, remote
from aiograd.rref.refcount.records import UserRecord

CONTROL = ("rref.fork", "rref.accept", "rref.release")


class Injector:
    """Does one thing to the first `times` messages of the given kinds, per receiver."""

    def __init__(self, action: str, *kinds: str, times: int = 10**9, seconds: float = 0.0) -> None:
        self.action = FaultAction(action, seconds)
        self.kinds, self.times = kinds, times
        self.seen: Counter[tuple[str, str]] = Counter()

    def on_send(self, kind: str, to: str) -> FaultAction:
        if kind in self.kinds:
            self.seen[kind, to] += 1
            if self.seen[kind, to] <= self.times:
                return self.action
        return SEND


def add(a: Any, b: Any = 1) -> Any:
    return a + b


async def fetch(rref: RRef) -> Any:
    return await rref


KEPT: list[RRef] = []


def keep_it(rref: RRef) -> None:
    KEPT.append(rref)


@pytest.fixture(autouse=True)
def _nothing_kept() -> Any:
    yield
    KEPT.clear()


# ── messages ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("action", ["fail", "drop", "duplicate"])
async def test_fi_control_retry(workers: Any, action: str) -> None:
    async with workers(3) as w:
        for agent in w.agents:
            agent.fault_injector = Injector(action, *CONTROL, times=3)
        rref = remote("worker1", add, args=(1,))
        assert await rpc_async("worker2", fetch, args=(rref,)) == 2
        assert await rref == 2
        del rref
        await w.at_rest()


@pytest.mark.parametrize("to", ["worker0", "worker1"])
async def test_fi_remote_dropped(workers: Any, to: str) -> None:
    async with workers(2) as w:
        w.agents[0].fault_injector = Injector("drop", "remote")
        rref = remote(to, add, args=(1,), timeout=0.05)
        with pytest.raises(DeadlineExceeded):
            await rref.future()
        with pytest.raises(RRefError, match="RRef creation"):
            await rref.to_here()
        w.agents[0].fault_injector = Injector("fail", "remote")
        failed = remote(to, add, args=(1,))
        with pytest.raises(OwnerLost):
            await failed.future()
        with pytest.raises(RRefError, match="RRef creation"):
            await failed.to_here()
        del rref, failed
        await w.at_rest()


@pytest.mark.parametrize("to", ["worker0", "worker1"])
async def test_fi_remote_dropped_fork(workers: Any, to: str) -> None:
    async with workers(2) as w:
        w.agents[0].fault_injector = Injector("drop", "remote")
        rref = remote(to, add, args=(1,), timeout=0.05)
        with pytest.raises(DeadlineExceeded):
            await rref.future()
        with pytest.raises(RRefError, match="RRef creation"):
            rpc_async("worker1", fetch, args=(rref,))
        with pytest.raises(RRefError, match="RRef creation"):
            remote("worker1", fetch, args=(rref,))
        del rref
        await w.at_rest()


@pytest.mark.parametrize("to", ["worker0", "worker1"])
async def test_fi_remote_delayed(workers: Any, to: str) -> None:
    async with workers(2) as w:
        w.agents[0].fault_injector = Injector("delay", "remote", seconds=0.3)
        rrefs = [remote(to, add, args=(1,), timeout=0.1) for _ in range(2)]
        early = rrefs[0].to_here(timeout=0.01)
        with pytest.raises(DeadlineExceeded):
            await early
        for rref in rrefs:
            with pytest.raises(DeadlineExceeded):
                await rref.future()
            with pytest.raises(RRefError, match="RRef creation"):
                await rref.to_here()
        del rrefs, rref, early
        await w.at_rest()
        # The creations come after all, are refused for want of time, and leave nothing.
        w.agents[0].fault_injector = None
        assert await remote(to, add, args=(1,)) == 2
        await w.at_rest()


async def test_a_creation_that_comes_late_but_in_time_is_waited_for(workers: Any) -> None:
    async with workers(3) as w:
        w.agents[0].fault_injector = Injector("delay", "remote", seconds=0.1)
        rref = remote("worker1", add, args=(1,))
        early = rref.to_here()  # overtakes the creation
        shared = rpc_async("worker2", fetch, args=(rref,))  # so does its fork
        back = rpc_async("worker1", fetch, args=(rref,))  # and the reference itself
        assert await asyncio.gather(early, shared, back) == [2, 2, 2]
        del rref
        await w.at_rest()


async def test_a_reference_dropped_before_its_late_creation_leaves_nothing(workers: Any) -> None:
    async with workers(2) as w:
        w.agents[0].fault_injector = Injector("delay", "remote", seconds=0.1)
        MADE.clear()
        remote("worker1", make, args=(1,))
        assert MADE == []
        await w.until(lambda: MADE == [1])
        await w.at_rest()
        assert w.counters() == [(0, 0), (0, 0)]


MADE: list[int] = []  # by all workers of a test, which live in one process


def make(number: int) -> int:
    MADE.append(number)
    return number


async def test_fi_fetch_delayed(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", add, args=(1,))
        await rref.future()
        w.agents[0].fault_injector = Injector("delay", "rref.fetch", seconds=0.1)
        with pytest.raises(DeadlineExceeded):
            await rref.to_here(timeout=0.01)
        assert await rref.to_here() == 2
        late = rref.to_here()
        del rref  # the release must not overtake the fetch
        assert await late == 2
        del late
        await w.at_rest()


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


def fail_in_a_thread(rref: RRef) -> None:
    raise ValueError("no")


async def fail_on_the_loop(rref: RRef) -> None:
    await rref
    raise ValueError("no")


async def fail_with_it(rref: RRef) -> None:
    raise ValueError("no", rref)


class Failing:
    def method(self, rref: RRef) -> None:
        raise ValueError("no")

    def __getattr__(self, name: str) -> Any:
        if name == "odd":
            raise ValueError("no")
        raise AttributeError(name)


@pytest.fixture
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("function", [fail_in_a_thread, fail_on_the_loop, fail_with_it])
@pytest.mark.parametrize("to", ["worker1", "worker2"])
async def test_a_failed_call_lets_go_of_its_references(
    workers: Any, function: Any, to: str
) -> None:
    async with workers(3) as w:
        rref = remote("worker1", add, args=(1,))
        with pytest.raises((ValueError, RemoteError)):
            await rpc_async(to, function, args=(rref,))
        kept = remote(to, function, args=(rref,))
        with pytest.raises((ValueError, RemoteError)):
            await kept
        with pytest.raises((ValueError, RemoteError)):
            await kept.future()
        del rref, kept
        await w.at_rest()


@pytest.mark.usefixtures("no_collector")
async def test_failed_proxy_calls_let_go_of_their_references(workers: Any) -> None:
    async with workers(2) as w:
        rref, argument = remote("worker1", Failing), RRef(1)
        with pytest.raises(ValueError, match="no"):
            await rref.rpc_async().method(argument)
        with pytest.raises(ValueError, match="no"):
            await rref.remote().method(argument)
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(rref.rpc_sync().method, argument)
        with pytest.raises(AttributeError):
            await rref.remote().nothing(argument)
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(rref.remote().odd, argument)
        del rref, argument
        await w.at_rest()


# ── death ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_dead_owner_is_named_at_every_use(workers: Any) -> None:
    async with workers(3) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        pending = rref.rpc_async().anything_slow
        await w.agents[1].close()
        with pytest.raises(OwnerLost) as caught:
            await rref
        assert caught.value.worker == "worker1"
        for use in (
            lambda: rpc_async("worker2", fetch, args=(rref,)),
            lambda: remote("worker2", fetch, args=(rref,)),
            lambda: pending(),
            lambda: rref.remote().anything(),
        ):
            with pytest.raises(OwnerLost):
                use()
        await rref.release()
        assert w[0].counters() == {"owner_rrefs": 0, "user_rrefs": 0}


async def test_a_creation_under_way_ends_when_its_owner_dies(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", forever)
        fetched = rref.to_here()
        created = rref.future()
        await w.until(lambda: w[1].counters()["owner_rrefs"] == 1)
        await w.agents[1].close()
        for future in (fetched, created, rref.to_here()):
            with pytest.raises(OwnerLost):
                await future


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_call_whose_reference_lost_its_owner_fails_with_that(workers: Any) -> None:
    """The receiver finds out, because the sender could not know."""
    async with workers(3) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        w.agents[1].fault_injector = None
        w.agents[2].directory.remove("worker1")  # worker2 has heard of the death already
        with pytest.raises(OwnerLost):
            await rpc_async("worker2", fetch, args=(rref,))
        del rref
        gc.collect()
        await w[0].messenger.rest()
        await w[2].messenger.rest()


async def test_the_references_of_a_dead_user_are_reclaimed_after_the_lease(workers: Any) -> None:
    async with workers(3, options=Options(lease=0.05)) as w:
        rref = remote("worker1", add, args=(1,))
        await rpc_async("worker2", keep_it, args=(rref,))
        await rref.release()
        assert w[1].counters()["owner_rrefs"] == 1
        await w.agents[2].close()
        assert w[1].counters()["owner_rrefs"] == 1  # the lease has begun
        await w[1].messenger.rest()


async def test_a_parent_does_not_wait_for_ever_for_a_dead_child(workers: Any) -> None:
    async with workers(3, options=Options(lease=0.05)) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        w.agents[0].fault_injector = Injector("drop", "call")
        call = rpc_async("worker2", fetch, args=(rref,))
        del rref
        await asyncio.sleep(0)
        assert w[0].counters()["user_rrefs"] == 1
        await w.agents[2].close()
        assert await asyncio.gather(call, return_exceptions=True)
        await w[0].messenger.rest()
        await w[1].messenger.rest()


async def test_a_returning_user_is_told_that_its_reference_expired(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        protocol = w[1].protocol
        user = w[0].protocol.me
        protocol.lease_over(protocol.lost(user))  # it seemed to be gone
        with pytest.raises(RRefExpired, match="worker1"):
            await rref
        with pytest.raises(RRefExpired):
            rpc_async("worker1", fetch, args=(rref,))
        assert await remote("worker1", add, args=(2,)) == 3
        del rref
        await w.at_rest()


async def test_a_restarted_owner_is_not_taken_for_the_old_one(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        await w[1].close()
        await w.agents[1].close()
        agent = Agent(
            "worker1", 1, secret=b"a secret for tests, 32 bytes lo.", runtime=w.agents[0].runtime
        )
        attach(agent)
        try:
            await agent.start("memory:again")
            agent.directory.add(w.agents[0].info)
            w.agents[0].directory.add(agent.info)
            assert await rpc_async("worker1", add, args=(1,)) == 2  # the name works again
            with pytest.raises(OwnerLost, match="worker1"):
                await rref
            with pytest.raises(OwnerLost):
                rpc_async("worker1", fetch, args=(rref,))
        finally:
            await agent.close()


async def test_a_fork_that_was_thrown_away_on_arrival_is_given_up(workers: Any) -> None:
    async with workers(2, options=Options(lease=0.05)) as w:
        rref = RRef("x")
        w[0].depart(rref, Departure(w.agents[1].info, "call"))  # lost on arrival
        assert w[0].counters()["owner_rrefs"] == 1
        await w[0].messenger.rest()


# ── shutdown ────────────────────────────────────────────────────────────────────────────────────


async def settle_all(w: Any, seconds: float = 2.0) -> list[Any]:
    deadline = asyncio.get_running_loop().time() + seconds
    return await asyncio.gather(
        *[part.settle(deadline) for part in w.parts], return_exceptions=True
    )


async def test_rref_after_shutdown(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        assert await settle_all(w) == [None, None]
        assert w.counters() == [(0, 0), (0, 0)]
        for part in w.parts:
            await part.close()
        with pytest.raises(RRefReleased, match="after deletion"):
            await rref
        with pytest.raises(RRefReleased, match="after deletion"):
            rpc_async("worker1", fetch, args=(rref,))
        for agent in w.agents:
            await agent.close()
        with pytest.raises(RRefReleased, match="after deletion"):
            await rref


async def test_rref_cycle_at_shutdown(workers: Any) -> None:
    async with workers(2, options=Options(strict_leaks=True)) as w:
        cycle: list[Any] = [remote("worker1", add, args=(1,))]
        cycle.append(cycle)
        await cycle[0]
        del cycle
        assert await settle_all(w) == [None, None]
        assert w.counters() == [(0, 0), (0, 0)]


@pytest.mark.parametrize("strict", [True, False])
async def test_rref_leak_check(workers: Any, strict: bool, caplog: Any) -> None:
    async with workers(2, options=Options(strict_leaks=strict)) as w:
        rref = RRef("kept by worker1")
        await rpc_async("worker1", keep_it, args=(rref,))
        deadline = asyncio.get_running_loop().time() + 0.1
        with caplog.at_level(logging.WARNING, "aiograd"):
            if strict:
                with pytest.raises(RRefLeak, match=r"Leaking RRef.*test_services_failures\.py:"):
                    await w[0].settle(deadline)  # worker1 does not give back
            else:
                await w[0].settle(deadline)
                assert any("test_services_failures.py:" in message for message in caplog.messages)


async def test_a_creation_is_blamed_on_the_line_of_its_creator(workers: Any) -> None:
    async with workers(2, options=Options(strict_leaks=True)) as w:
        rref = remote("worker1", add, args=(1,))
        await rref
        with pytest.raises(RRefLeak, match=r"test_services_failures\.py:"):
            await w[1].settle(asyncio.get_running_loop().time() + 0.1)
        del rref


async def test_what_a_dead_worker_held_is_not_our_leak(workers: Any) -> None:
    async with workers(2, options=Options(strict_leaks=True)) as w:
        rref = RRef("x")
        await rpc_async("worker1", keep_it, args=(rref,))
        await w.agents[1].close()
        await w.until(lambda: bool(w[0].protocol.unreachable))
        await w[0].settle(asyncio.get_running_loop().time() + 2.0)
        assert w[0].counters()["owner_rrefs"] == 0


async def test_shutdown_does_not_wait_for_a_message_thrown_away(workers: Any) -> None:
    async with workers(2, options=Options(strict_leaks=True)) as w:
        w[0].depart(RRef("x"), Departure(w.agents[1].info, "call"))
        assert await settle_all(w) == [None, None]


async def test_shutdown_gives_back_what_is_still_being_created(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", forever)
        await w.until(lambda: w[1].counters()["owner_rrefs"] == 1)
        deadline = asyncio.get_running_loop().time() + 2.0
        await w[0].settle(deadline)
        assert w[0].counters() == {"owner_rrefs": 0, "user_rrefs": 0}
        assert isinstance(rref.record, UserRecord)
