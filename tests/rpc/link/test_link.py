"""Links: loss, silence, and messages that go astray on purpose."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

from aiograd.errors import DeadlineExceeded, WorkerLost, WorkerUnresponsive
from aiograd.rpc.agent import Agent
from aiograd.rpc.api import rpc_async
from aiograd.rpc.extension import DROP, DUPLICATE, FAIL, SEND, FaultAction
from aiograd.rpc.link.link import Link
from aiograd.rpc.options import Options
from aiograd.wire.framing import HEADER_SIZE, pack_header
from aiograd.wire.messages import CHUNK
from tests.support.agents import SECRET, crash
from tests.support.waiting import until


def add(x, y=0):
    return x + y


async def forever():
    await asyncio.Event().wait()


QUICK = Options(heartbeat=0.02, silence=0.1)


async def test_bytes_that_cannot_be_read_lose_the_peer_and_are_not_asked_for_again(agents, caplog):
    """A connection that is made again would only bring them again, and again."""
    async with agents(2) as (_, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3

        def advance(count):
            raise MemoryError("no room for a frame")

        b.link("worker0").connection._reader.advance = advance
        with pytest.raises(WorkerLost, match="worker1"):
            await rpc_async("worker1", add, (1, 2))
        assert "no room for a frame" in caplog.text


# ── loss ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["memory:{}", "unix:{tmp}/{}", "tcp:127.0.0.1:0"])
def address(request, tmp_path):
    return request.param.replace("{tmp}", str(tmp_path)).format


async def test_exc_dead_peer(agents, address):
    async with agents(2, address=address) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        future = rpc_async("worker1", forever)
        await until(lambda: b.links.counters()["running_calls"])
        start = time.monotonic()
        crash(b)
        with pytest.raises(WorkerLost) as caught:
            await future
        assert time.monotonic() - start < 0.5
        assert (caught.value.worker, caught.value.executed) == ("worker1", "unknown")
        with pytest.raises(WorkerLost) as caught:
            await rpc_async("worker1", add, (1, 2))
        assert caught.value.executed == "no"
        assert not any(a.links.counters().values())


async def test_nobody_at_the_address_is_a_lost_worker(agents, address):
    async with agents(2, address=address) as (a, b):
        lost: list[str] = []
        a.lost.append(lambda peer, error: lost.append(peer.name))
        await b.close()
        with pytest.raises(WorkerLost) as caught:
            await rpc_async("worker1", add, (1, 2))
        assert caught.value.executed == "no"
        assert lost == ["worker1"]


async def beats(agent, count):
    """Wait until an agent has looked after its links so many more times."""
    for _ in range(count):
        heart = agent.links._heart
        await until(lambda heart=heart: agent.links._heart is not heart)


def is_lost(agent, peer):
    return (peer.name, peer.incarnation) in agent.links.losses


async def buried(agent, peer):
    """Wait until little is left of a lost peer."""
    await until(lambda: (peer.name, peer.incarnation) in agent.links.losses)
    await until(lambda: not agent.links._ending)


async def test_a_long_life_keeps_little_of_those_who_died_in_it(agents, monkeypatch):
    monkeypatch.setattr("aiograd.rpc.link.links.LOST_PEERS", 5)
    async with agents(1, options=QUICK) as (a,):
        links = []
        for _ in range(10):
            b = Agent("worker1", 1, secret=SECRET, options=QUICK, runtime=a.runtime)
            await b.start("memory:1")
            a.directory.add(b.info)
            assert await rpc_async("worker1", add, (1, 2)) == 3
            links.append(weakref.ref(a.link("worker1")))
            crash(b)
            await buried(a, b)
            await b.close()
        assert a.links.table == {}
        assert len(a.links.losses) == 5
        del b
        gc.collect()
        assert [link() for link in links if link() is not None] == []


async def test_who_is_lost_stays_lost_when_little_is_left_of_it(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        a.links.declare_lost(b.info, "somebody said so")
        await buried(a, b)
        for to in ("worker1", b.info, 1):
            with pytest.raises(WorkerLost, match="somebody said so") as caught:
                await rpc_async(to, add, (1, 2))
            assert caught.value.executed == "no"
        with pytest.raises(WorkerLost):  # nor may it come back
            await b.call("worker0", add, (1, 2))
        assert b.info.incarnation not in a.links.table
        assert not any(a.links.counters().values())


async def test_who_came_under_the_incarnation_of_another_does_not_lock_it_out(agents):
    async with agents(2, options=QUICK) as (a, b):
        stolen = replace(b.info, name="impostor")
        a.links.declare_lost(stolen, "it broke the protocol")
        await buried(a, stolen)
        assert await b.call("worker0", add, (1, 2)) == 3
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_a_restarted_worker_is_not_taken_for_the_one_that_is_lost(agents):
    async with agents(2, options=QUICK) as (a, old):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        crash(old)
        await buried(a, old)
        new = Agent("worker1", 1, secret=SECRET, runtime=a.runtime)
        await new.start("memory:2")
        a.directory.add(new.info)
        assert await rpc_async("worker1", add, (1, 2)) == 3
        with pytest.raises(WorkerLost):
            await rpc_async(old.info, add, (1, 2))
        await new.close()


async def test_threads_of_a_lost_caller_are_counted_until_they_end(agents):
    gate = threading.Event()
    async with agents(2, options=QUICK) as (a, b):
        WAITING[0] = gate
        rpc_async("worker1", wait_in_a_thread).add_done_callback(lambda f: f.exception())
        await until(lambda: b.links.counters()["running_calls"])
        crash(a)
        await until(lambda: b.links.counters()["abandoned_calls"])
        await beats(b, 5)
        assert b.links.counters()["abandoned_calls"] == 1
        assert len(b.links._ending) == 1
        gate.set()
        await buried(b, a)
        assert not any(b.links.counters().values())


WAITING: dict[int, threading.Event] = {}


def wait_in_a_thread():
    WAITING[0].wait()


async def test_work_for_a_lost_caller_is_cancelled(agents):
    async with agents(2) as (a, b):
        rpc_async("worker1", forever).add_done_callback(lambda f: f.exception())
        await until(lambda: b.links.counters()["running_calls"])
        crash(a)
        await until(lambda: not b.links.counters()["running_calls"])
        assert not any(b.links.counters().values())
        assert is_lost(b, a)


async def test_a_call_never_handed_to_the_socket_did_not_run(agents):
    async with agents(2) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        link = a.link("worker1")
        link.outbox.pause()
        held = rpc_async("worker1", add, (1, 2))
        large = rpc_async("worker1", add, (np.zeros(1 << 20), 2))
        await asyncio.sleep(0)
        crash(b)
        for future in (held, large):
            with pytest.raises(WorkerLost) as caught:
                await future
            assert caught.value.executed == "no"


async def test_bytes_that_are_no_frames_end_only_that_link(agents):
    async with agents(3) as (a, b, c):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert await c.call("worker1", add, (1, 2)) == 3
        a.link("worker1").connection.transport.write(b"garbage that is longer than a header")
        await until(lambda: is_lost(b, a))
        assert await c.call("worker1", add, (1, 2)) == 3


async def test_chunks_of_nothing_end_the_link(agents):
    async with agents(2) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        a.link("worker1").connection.transport.write(
            pack_header(CHUNK, 0, 5, 0, 0.0, 77) + b"12345"
        )
        await until(lambda: is_lost(b, a))


# ── silence ─────────────────────────────────────────────────────────────────────────────────────


class Mute:
    """Drops everything a worker sends, so that it seems to be stopped."""

    def __init__(self, agent):
        for link in agent.links.table.values():
            link.outbox.pause()
            link.outbox.resume = lambda: None


async def test_a_silent_peer_is_suspect_and_recovers(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        link = b.link("worker0")
        link.outbox.pause()
        future = rpc_async("worker1", add, (1, 2))
        await until(lambda: a.links.suspects() == ["worker1"])
        link.outbox.resume()
        assert await future == 3
        await until(lambda: a.links.suspects() == [])


async def test_a_link_on_which_an_answer_is_awaited_is_kept_alive_by_pings(agents):
    async with agents(2, options=QUICK) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        call = rpc_async("worker1", forever)
        session = a.link("worker1").session
        received = session.received
        await until(lambda: session.received > received + 10 * HEADER_SIZE)
        assert a.links.suspects() == b.links.suspects() == []
        call.cancel()


async def test_a_silent_peer_is_not_waited_for_without_a_deadline(agents, monkeypatch):
    monkeypatch.setattr("aiograd.rpc.caller.calls.UNRESPONSIVE", 0.3)
    async with agents(2, options=QUICK) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        Mute(b)
        endless = rpc_async("worker1", add, (1, 2), timeout=math.inf)
        limited = rpc_async("worker1", add, (1, 2), timeout=2.0)
        with pytest.raises(WorkerUnresponsive):
            await endless
        assert not limited.done()
        with pytest.raises(DeadlineExceeded):
            await limited
        assert a.link("worker1").is_open  # suspect, not dead


async def test_a_blocked_loop_suspects_nobody(agents, monkeypatch):
    beat, suspected = Link.beat, []

    def beat_and_note(link):
        beat(link)
        suspected.append(link.suspect)

    async with agents(2, options=QUICK) as (a, b):
        waiting = [a.call("worker1", forever), b.call("worker0", forever)]
        await beats(a, 1)
        await beats(b, 1)
        monkeypatch.setattr(Link, "beat", beat_and_note)
        time.sleep(0.5)  # a cell that blocks  # noqa: ASYNC251
        await beats(a, 3)
        await beats(b, 3)
        assert len(suspected) >= 6
        assert not any(suspected)
        for call in waiting:
            call.cancel()
        assert await rpc_async("worker1", add, (1, 2)) == 3


# ── faults on purpose ───────────────────────────────────────────────────────────────────────────


class Plan:
    def __init__(self, **actions):
        self.actions, self.seen = actions, []

    def on_send(self, kind, to):
        self.seen.append((kind, to))
        found = self.actions.get(kind, SEND)
        return found.pop(0) if isinstance(found, list) else found


RUNS: list[int] = []


def run_once(x):
    RUNS.append(x)
    return x


async def test_a_duplicate_does_not_run_twice(agents):
    async with agents(2) as (a, b):
        RUNS.clear()
        a.fault_injector, b.fault_injector = Plan(call=DUPLICATE), Plan(reply=DUPLICATE)
        for i in range(20):
            assert await rpc_async("worker1", run_once, (i,)) == i
        assert await rpc_async("worker1", len, (np.zeros(1 << 20, np.uint8),)) == 1 << 20
        assert list(range(20)) == RUNS


def run_large_once(x):
    RUNS.append(len(x))


@pytest.mark.parametrize("kind", ["memory", "unix"])  # in chunks, and in shared memory
async def test_a_copy_of_a_large_message_is_noticed(agents, tmp_path, kind):
    address = f"unix:{tmp_path}/{{}}" if kind == "unix" else "memory:{}"
    async with agents(2, address=address.format) as (a, b):
        RUNS.clear()
        got: list[int] = []
        b.services["note"] = lambda sender, x: got.append(len(x))
        a.fault_injector = Plan(call=DUPLICATE, note=DUPLICATE)
        sizes = [1 << 20, 3 << 20, 5 << 20]
        for size in sizes:
            await rpc_async("worker1", run_large_once, (np.zeros(size, np.uint8),))
            a.post("worker1", "note", np.zeros(size, np.uint8))
        assert await rpc_async("worker1", run_once, (7,)) == 7  # behind the last copy of a post
        assert [*sizes, 7] == RUNS
        assert got == sizes
        assert b.budget.used == 0


async def test_a_failed_send_says_that_nothing_ran(agents):
    async with agents(2) as (a, _):
        a.fault_injector = Plan(call=[FAIL, SEND])
        with pytest.raises(WorkerLost) as caught:
            await rpc_async("worker1", add, (1, 2))
        assert caught.value.executed == "no"
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_a_dropped_call_or_reply_ends_at_the_deadline(agents):
    async with agents(2) as (a, b):
        a.fault_injector = Plan(call=[DROP, SEND])
        with pytest.raises(DeadlineExceeded):
            await rpc_async("worker1", add, (1, 2), timeout=0.05)
        a.fault_injector, b.fault_injector = None, Plan(reply=[DROP, SEND])
        with pytest.raises(DeadlineExceeded):
            await rpc_async("worker1", add, (1, 2), timeout=0.05)
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_a_delayed_call_is_overtaken_but_runs(agents):
    async with agents(2) as (a, _):
        a.fault_injector = Plan(call=[FaultAction("delay", 0.1), SEND, SEND])
        late = rpc_async("worker1", add, (1, 2))
        assert await rpc_async("worker1", add, (3, 4)) == 7
        assert not late.done()
        assert await late == 3


async def wait_and_tell(x):
    RUNS.append(1)
    try:
        await asyncio.Event().wait()
    finally:
        RUNS.append(2)


async def test_a_delayed_call_can_be_cancelled_when_it_has_left(agents):
    async with agents(2) as (a, _):
        RUNS.clear()
        a.fault_injector = Plan(call=[FaultAction("delay", 0.01), SEND])
        late = rpc_async("worker1", wait_and_tell, (0,))
        assert await rpc_async("worker1", add, (3, 4)) == 7
        await until(lambda: RUNS == [1])
        late.cancel()
        await until(lambda: RUNS == [1, 2])
        assert not any(a.links.counters().values())


async def test_a_delayed_post_and_a_delayed_large_call_come_after_thousands(agents):
    async with agents(2) as (a, b):
        got: list[int] = []
        b.services["note"] = lambda sender, x: got.append(x)
        b.services["count"] = lambda sender, x: x
        a.fault_injector = Plan(call=[FaultAction("delay", 0.2)], note=[FaultAction("delay", 0.2)])
        late = rpc_async("worker1", len, (np.zeros(3 << 20, np.uint8),))
        a.post("worker1", "note", 1)
        numbers = [a.request("worker1", "count", i) for i in range(5000)]
        assert await asyncio.gather(*numbers) == list(range(5000))
        assert await late == 3 << 20
        await until(lambda: got == [1])


async def test_what_a_traveller_did_is_undone_when_the_message_never_leaves(agents):
    class Thing:
        pass

    class Traveller:
        tag = "thing"

        def depart(self, value, departure):
            departed.append(departure.kind)
            departure.undo.append(lambda: undone.append(departure.kind))
            return None

        def arrive(self, data, arrival):
            return Thing()

    departed: list[str] = []
    undone: list[str] = []
    async with agents(2) as (a, b):
        for agent in (a, b):
            agent.travellers.add(Thing, Traveller())
        await rpc_async("worker1", add, ([Thing()], []))
        assert undone == []
        departed.clear()
        a.fault_injector = Plan(call=FAIL)
        with pytest.raises(WorkerLost):
            await rpc_async("worker1", add, ([Thing()], []))
        assert undone == ["call"]
        a.fault_injector = None
        with pytest.raises(TypeError):
            rpc_async("worker1", add, (Thing(), iter_forever()))
        assert undone == departed  # looking for the culprit departs again, and is undone too
        await b.close()
        with pytest.raises(WorkerLost):
            await rpc_async("worker1", add, (Thing(),))
        assert undone == departed


def iter_forever():
    yield
