"""Two workers that lost each other, and both live, begin a new session; others do not."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from aiograd.errors import AuthError, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.testing.chaos_proxy import Proxy
from tests.support.agents import crash
from tests.support.waiting import until

QUICK = Options(resume=0.2, handshake_timeout=0.3)
EVENTS: list[str] = []


def add(x, y=0):
    return x + y


async def forever():
    await asyncio.Event().wait()


async def note(what):
    EVENTS.append(what)


@pytest.fixture(autouse=True)
def fresh():
    EVENTS.clear()


def lose(agent, peer):
    """Give a peer up, as after a cut for longer than `resume`; the peer need not notice."""
    link = agent.links.get(peer.incarnation)
    link.abort(WorkerLost(peer.name, why="on purpose"))


def is_lost(agent, peer):
    return (peer.name, peer.incarnation) in agent.links.losses


def watch(agent):
    """Who was lost and who returned, in order."""
    seen: list[tuple[str, str]] = []
    agent.lost.append(lambda peer, error: seen.append(("lost", peer.name)))
    agent.returned.append(lambda peer: seen.append(("returned", peer.name)))
    return seen


def count_dials(agent):
    """Counts the connections that an agent makes, by address."""
    dials: Counter[str] = Counter()
    connect = agent.runtime.network.connect

    def counted(address, *args, **settings):
        dials[address] += 1
        return connect(address, *args, **settings)

    agent.runtime.network.connect = counted
    return dials


# ── losing and returning ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("who", ["the one who gave up", "the other one"])
async def test_calls_work_again_after_one_side_gave_the_other_up(agents, who):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        seen = [watch(a), watch(b)]
        pending = b.call("worker0", forever)
        await until(lambda: a.links.counters()["running_calls"])
        lose(a, b)
        if who == "the other one":
            await until(lambda: is_lost(b, a))
            assert await b.call("worker0", add, (1, 2)) == 3
        assert await a.call("worker1", add, (1, 2)) == 3
        assert await b.call("worker0", add, (1, 2)) == 3
        with pytest.raises(WorkerLost) as caught:
            await pending
        assert (caught.value.worker, caught.value.executed) == ("worker0", "unknown")
        assert seen[0] == [("lost", "worker1"), ("returned", "worker1")]
        assert seen[1] == [("lost", "worker0"), ("returned", "worker0")]
        assert a.links.suspects() == b.links.suspects() == []
        await until(lambda: not any(a.links.counters().values()))


async def test_the_other_side_loses_the_old_session_before_the_new_one_begins(agents):
    """It has not noticed anything: its connection is still there when the new one comes."""
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        old = b.links.get(a.incarnation)
        pending = b.call("worker0", forever)
        await until(lambda: a.links.counters()["running_calls"])
        link = a.links.get(b.incarnation)
        link.connection.mute()
        link.connection = None  # the network took it, and told nobody
        link.lose(WorkerLost("worker1", why="on purpose"))
        seen = watch(b)
        b.returned.append(lambda peer: EVENTS.append(f"{peer.name} is back"))
        assert old.is_open
        await a.call("worker1", note, ("the first message",))
        assert seen == [("lost", "worker0"), ("returned", "worker0")]
        assert EVENTS == ["worker0 is back", "the first message"]
        with pytest.raises(WorkerLost, match="began a new session") as caught:
            await pending
        assert caught.value.executed == "unknown"
        assert old.error is not None
        assert b.links.get(a.incarnation) is not old


async def test_two_workers_that_dial_each_other_at_once_begin_one_session(agents):
    async with agents(2, options=QUICK) as (a, b):
        for _ in range(20):
            assert await a.call("worker1", add, (1, 2)) == 3
            seen = [watch(a), watch(b)]
            lose(a, b)
            lose(b, a)
            calls = [a.call("worker1", add, (1, 2)), b.call("worker0", add, (3, 4))]
            assert await asyncio.gather(*calls) == [3, 7]
            for events in seen:
                assert [what for what, _ in events] == ["lost", "returned"]
            one, two = a.links.get(b.incarnation).session, b.links.get(a.incarnation).session
            assert (one.id, {one.role, two.role}) == (two.id, {"dials", "waits"})


async def test_calls_work_again_when_a_network_returns_after_the_peer_was_lost(agents, tmp_path):
    """A real socket: the old session is lost on both sides, and nobody can dial for a while."""
    async with AsyncExitStack() as stack:
        where = f"unix:{tmp_path}/{{}}".format
        a, b = await stack.enter_async_context(agents(2, address=where, options=QUICK))
        to0 = await stack.enter_async_context(Proxy(f"unix:{tmp_path}/to0", a.info.addresses[0]))
        to1 = await stack.enter_async_context(Proxy(f"unix:{tmp_path}/to1", b.info.addresses[0]))
        a.directory.add(replace(b.info, addresses=(to1.address,)))
        b.directory.add(replace(a.info, addresses=(to0.address,)))
        call = a.call("worker1", forever)
        await until(lambda: b.links.counters()["running_calls"])
        for proxy in (to0, to1):
            proxy.silent = True
            proxy.cut()
        with pytest.raises(WorkerLost) as caught:
            await call
        assert caught.value.executed == "unknown"
        await until(lambda: is_lost(b, a))
        for agent, other in ((a, "worker1"), (b, "worker0")):
            with pytest.raises(WorkerLost) as caught:
                await agent.call(other, add, (1, 2))
            assert caught.value.executed == "no"
            assert agent.links.suspects() == [other]
        for proxy in (to0, to1):
            proxy.silent = False
            proxy.cut()
        await until(lambda: goes_well(a, "worker1"), within=10)
        await until(lambda: goes_well(b, "worker0"), within=10)
        assert a.links.suspects() == b.links.suspects() == []


async def goes_well(agent, to):
    try:
        return await agent.call(to, add, (1, 2)) == 3
    except WorkerLost:
        return False


async def test_a_returned_callback_that_fails_does_not_stop_the_others(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3

        def fail(peer):
            raise RuntimeError("on purpose")

        a.returned.append(fail)
        seen = watch(a)
        lose(a, b)
        assert await a.call("worker1", add, (1, 2)) == 3
        assert seen == [("lost", "worker1"), ("returned", "worker1")]


async def test_a_returned_callback_may_send_and_may_end_the_session(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        b.services["greet"] = lambda sender, what: EVENTS.append(what)
        a.returned.append(lambda peer: a.post(peer, "greet", "hello again"))
        lose(a, b)
        assert await a.call("worker1", add, (1, 2)) == 3
        assert EVENTS == ["hello again"]
        a.returned.append(lambda peer: a.links.declare_lost(peer, "not wanted"))
        lose(a, b)
        with pytest.raises(WorkerLost, match="not wanted"):
            await a.call("worker1", add, (1, 2))


async def test_a_lost_peer_is_dialled_where_the_directory_says(agents):
    """Who dialled us did not say where it listens."""
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        lose(b, a)
        await until(lambda: is_lost(a, b))
        assert await b.call(replace(a.info, addresses=()), add, (1, 2)) == 3


# ── what is final ───────────────────────────────────────────────────────────────────────────────


async def test_a_worker_that_was_declared_lost_never_returns(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        lose(a, b)
        assert a.links.suspects() == ["worker1"]
        a.links.declare_lost(b.info, "the coordinator said so")
        assert a.links.suspects() == []
        seen = watch(a)
        with pytest.raises(WorkerLost, match="the coordinator said so"):
            await a.call("worker1", add, (1, 2))
        await until(lambda: is_lost(b, a))
        with pytest.raises(WorkerLost, match="took this worker for lost"):
            await b.call("worker0", add, (1, 2))
        assert seen == []
        assert a.links.table == {}


async def test_a_worker_that_said_goodbye_never_returns(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        await b.close()
        await until(lambda: is_lost(a, b))
        dials = count_dials(a)
        with pytest.raises(WorkerLost, match="shut down"):
            await a.call("worker1", add, (1, 2))
        assert not dials


async def test_a_worker_that_is_no_member_any_more_is_not_dialled(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        lose(a, b)
        a.directory.remove("worker1")
        dials = count_dials(a)
        with pytest.raises(WorkerLost):
            await a.call(b.info, add, (1, 2))
        assert not dials


# ── failing fast ────────────────────────────────────────────────────────────────────────────────


async def test_many_calls_to_an_unreachable_worker_make_few_dials(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        crash(b)
        await until(lambda: is_lost(a, b))
        dials, start, calls = count_dials(a), time.monotonic(), 0
        while time.monotonic() - start < 1.0:
            for call in [a.call("worker1", add, (1, 2)) for _ in range(50)]:
                with pytest.raises(WorkerLost) as caught:
                    await call
                assert caught.value.executed == "no"
                calls += 1
        # Pauses of at least 0.1, 0.2, 0.4 … seconds between them.
        assert sum(dials.values()) <= 6
        assert calls > 50 * sum(dials.values())


async def test_a_peer_that_dials_does_not_wait_for_our_own_pause(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        a.directory.add(replace(b.info, addresses=()))  # we cannot reach it, but it reaches us
        lose(a, b)
        for _ in range(3):
            with pytest.raises(WorkerLost):
                await a.call("worker1", add, (1, 2))
        await until(lambda: is_lost(b, a))
        assert await b.call("worker0", add, (1, 2)) == 3
        assert await a.call("worker1", add, (1, 2)) == 3


async def test_a_wrong_secret_stays_an_auth_error_at_every_dial(agents):
    async with agents(1, options=QUICK) as (a,):
        other = Agent("worker1", 1, secret=b"another secret, 32 bytes long ..", runtime=a.runtime)
        await other.start("memory:1")
        a.directory.add(other.info)
        for _ in range(2):
            with pytest.raises(AuthError):
                await a.call("worker1", add, (1, 2))
            await until(lambda: worth_a_dial(a, other))
        await other.close()


def worth_a_dial(agent, peer):
    return agent.loop.time() >= agent.links.losses[peer.name, peer.incarnation].retry_at


# ── what belongs to a session stays in it ───────────────────────────────────────────────────────


async def test_a_control_request_is_not_sent_again_in_the_next_session(agents):
    async with agents(2, options=QUICK) as (a, b):
        heard = asyncio.Event()

        async def listen(sender):
            EVENTS.append(sender.name)
            heard.set()
            await asyncio.Event().wait()

        b.services["listen"] = listen
        request = a.request("worker1", "listen", retry=True, timeout=20)
        await heard.wait()
        count = len(EVENTS)
        lose(a, b)
        with pytest.raises(WorkerLost):
            await request
        assert await a.call("worker1", add, (1, 2)) == 3
        assert len(EVENTS) == count


async def test_threads_that_work_for_a_lost_session_are_counted_beside_the_new_one(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await a.call("worker1", add, (1, 2)) == 3
        old = b.links.get(a.incarnation)
        old.callee.execution.abandoned = 1  # a thread that cannot be stopped
        lose(a, b)
        assert await a.call("worker1", add, (1, 2)) == 3
        assert b.links.counters()["abandoned_calls"] == 1
        old.callee.execution.abandoned = 0
        await until(lambda: not b.links._ending, within=20)
