"""Dialling, and connections that break: those that are resumed, and those that are not."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import struct
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aiograd.errors import AuthError, DeadlineExceeded, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.api import rpc_async, rpc_stream
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.testing.chaos_proxy import Proxy
from aiograd.wire.framing import HEADER_SIZE
from aiograd.wire.handshake import HELLO_SIZE, PROOF_SIZE, Handshake, Identity
from aiograd.wire.session import NUDGE, RESUME, Offer
from tests.support.agents import SECRET, crash
from tests.support.waiting import until

RUNS: Counter[int] = Counter()
GATES: dict[int, asyncio.Event] = {}


def add(x, y=0):
    return x + y


async def forever():
    await asyncio.Event().wait()


async def at_the_gate(i):
    RUNS[i] += 1
    await GATES.setdefault(i, asyncio.Event()).wait()
    return i


async def count_at_the_gate(i, numbers):
    for number in range(numbers):
        if number == numbers // 2:
            await GATES.setdefault(i, asyncio.Event()).wait()
        yield number


@pytest.fixture(autouse=True)
def fresh():
    RUNS.clear()
    GATES.clear()


@pytest.fixture(params=["memory:{}", "unix:{tmp}/{}", "tcp:127.0.0.1:0"])
def address(request, tmp_path):
    return request.param.replace("{tmp}", str(tmp_path)).format


@asynccontextmanager
async def behind_a_proxy(agents, tmp_path, kind="unix", **settings):
    """worker0 dials worker1 through a proxy."""
    where = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/{{}}"
    async with AsyncExitStack() as stack:
        a, b = await stack.enter_async_context(agents(2, address=where.format, **settings))
        at = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/proxy"
        proxy = await stack.enter_async_context(Proxy(at, b.info.addresses[0]))
        a.directory.add(replace(b.info, addresses=(proxy.address,)))
        assert await rpc_async("worker1", add, (1, 2)) == 3
        yield a, b, proxy


def is_lost(agent, peer):
    return (peer.name, peer.incarnation) in agent.links.losses


def sever(agent, name):
    agent.link(name).connection.transport.abort()


def lose_what_is_written(link):
    class Hole:
        def write(self, data):
            pass

        def get_write_buffer_size(self):
            return 0

    link.outbox._transport = Hole()


async def resumed(a, b, number):
    """Wait until both are open again, over a later connection."""
    first, second = a.link("worker1"), b.link("worker0")
    await until(lambda: first.is_open and second.is_open and first.session.number > number)


# ── dialling ────────────────────────────────────────────────────────────────────────────────────


async def test_a_rendezvous_is_dialled_by_its_address_alone(agents, address):
    async with agents(1, address=address) as (a,):
        newcomer = Agent("late", 7, secret=SECRET, runtime=a.runtime)
        await newcomer.start()
        a.services["hello"] = lambda sender: (sender.name, sender.rank)
        peer = await newcomer.connect(a.info.addresses[0])
        assert (peer.name, peer.incarnation) == ("worker0", a.incarnation)
        assert await newcomer.request(peer, "hello") == ("late", 7)
        newcomer.services["back"] = lambda sender: sender.name
        a.directory.add(PeerInfo("late", 7, newcomer.incarnation))
        assert await a.request("late", "back") == "worker0"  # over the connection that is there
        await newcomer.close()


async def test_another_incarnation_at_the_address_is_a_lost_worker(agents):
    async with agents(2) as (a, b):
        a.directory.add(PeerInfo("worker1", 1, b"o" * 16, b.info.addresses))
        with pytest.raises(WorkerLost) as caught:
            await rpc_async("worker1", add, (1, 2))
        assert caught.value.executed == "no"
        a.directory.add(b.info)
        assert await rpc_async("worker1", add, (1, 2)) == 3


@pytest.mark.parametrize("cuts", [1, 2, 4])
async def test_a_first_handshake_that_is_cut_is_tried_again(agents, tmp_path, cuts):
    where = f"unix:{tmp_path}/{{}}".format
    async with agents(2, address=where) as (a, b), Proxy(where("proxy"), where(1)) as proxy:
        budgets = iter([2 * HELLO_SIZE + 3] * cuts)  # both hellos, and a little of a proof
        proxy.budget = lambda: next(budgets, None)
        a.directory.add(replace(b.info, addresses=(proxy.address,)))
        assert await a.call("worker1", add, (1, 2)) == 3
        assert proxy.cuts == cuts


async def test_a_reset_of_the_first_handshake_is_tried_again_until_the_handshake_timeout(agents):
    resets = 0

    def reset(reader, writer):
        nonlocal resets
        resets += 1
        linger = struct.pack("ii", 1, 0)  # closing sends a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    try:
        async with agents(1, options=Options(handshake_timeout=0.6)) as (a,):
            start = time.monotonic()
            with pytest.raises(ConnectionResetError):
                await a.connect(f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}")
            # Not the whole time: a pause that would end too late is not begun.
            assert time.monotonic() - start >= 0.3
            assert resets > 1
    finally:
        server.close()
        await server.wait_closed()


async def test_connecting_cutting_resuming_and_losing_leave_a_line_each(agents, tmp_path, caplog):
    caplog.set_level(logging.INFO, "aiograd.link")

    def lines(*words):
        return [text for text in caplog.messages if all(word in text for word in words)]

    where = f"unix:{tmp_path}/{{}}".format
    async with agents(2, address=where) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert len(lines("worker0 connected to worker1", where(1))) == 1
        assert len(lines("worker1: worker0 connected from")) == 1
        sever(a, "worker1")
        await resumed(a, b, 1)
        assert len(lines("worker0: the connection to worker1 at", where(1), "broke")) == 1
        assert len(lines("worker0 resumes its session with worker1", where(1))) == 1
        assert len(lines("worker1: worker0 resumes its session from")) == 1
        crash(b)
        await until(lambda: is_lost(a, b))
        assert len(lines("worker0 lost worker1", where(1))) == 1


# ── resuming ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("who", ["the one who dialled", "the other one"])
async def test_a_call_under_way_does_not_notice_a_cut(agents, address, who):
    async with agents(2, address=address) as (a, b):
        lost: list[str] = []
        a.lost.append(lambda peer, error: lost.append(peer.name))
        b.lost.append(lambda peer, error: lost.append(peer.name))
        call = rpc_async("worker1", at_the_gate, (1,))
        await until(lambda: RUNS[1])
        for _ in range(5):
            number = a.link("worker1").session.number
            sever(*((a, "worker1") if who == "the one who dialled" else (b, "worker0")))
            await resumed(a, b, number)
        assert not call.done()
        GATES[1].set()
        assert await call == 1
        assert RUNS == {1: 1}
        assert lost == []


async def test_calls_made_during_a_cut_wait_for_the_next_connection(agents, address):
    async with agents(2, address=address) as (a, _):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        a.link("worker1").cut("on purpose")
        assert a.links.suspects() == ["worker1"]
        big = np.arange(1 << 20, dtype=np.float64)
        calls = [rpc_async("worker1", add, (i, i)) for i in range(100)]
        large = rpc_async("worker1", add, (big, 1))
        assert await asyncio.gather(*calls) == [2 * i for i in range(100)]
        assert np.array_equal(await large, big + 1)
        assert a.links.suspects() == []


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_large_messages_of_both_directions_survive_cuts(agents, tmp_path, kind):
    async with behind_a_proxy(agents, tmp_path, kind) as (a, b, proxy):
        arrays = [np.arange(1 << 19, dtype=np.float64) + i for i in range(4)]
        calls = asyncio.gather(*(rpc_async("worker1", add, (array, 1)) for array in arrays))
        for _ in range(4):
            position = a.link("worker1").session.received
            await until(lambda p=position: a.link("worker1").session.received > p or calls.done())
            proxy.cut()
        for array, result in zip(arrays, await calls, strict=True):
            assert np.array_equal(result, array + 1)
        assert a.budget.used == b.budget.used == 0


async def test_a_stream_goes_on_after_a_cut(agents, address):
    async with agents(2, address=address) as (a, b):
        got = []
        async for number in rpc_stream("worker1", count_at_the_gate, (1, 40)):
            got.append(number)
            if number == 19:
                sever(a, "worker1")
                await resumed(a, b, 1)
                GATES[1].set()
        assert got == list(range(40))


async def test_a_cut_that_only_one_side_notices_is_told_to_the_other(agents, tmp_path):
    async with agents(2, address=f"unix:{tmp_path}/{{}}".format) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        a.link("worker1").connection.transport.pause_reading()  # it will not see the end
        call = rpc_async("worker1", add, (3, 4))
        b.link("worker0").cut("on purpose")
        assert await call == 7
        assert a.link("worker1").session.number == 2


async def test_a_cut_that_the_dialling_side_notices_first_replaces_the_old_connection(
    agents, tmp_path
):
    async with agents(2, address=f"unix:{tmp_path}/{{}}".format) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        b.link("worker0").connection.transport.pause_reading()
        a.link("worker1").cut("on purpose")
        assert await rpc_async("worker1", add, (3, 4)) == 7
        assert b.link("worker0").is_open


async def test_a_cancel_during_a_cut_arrives_after_it(agents, address):
    async with agents(2, address=address) as (a, b):
        call = rpc_async("worker1", at_the_gate, (1,))
        await until(lambda: RUNS[1])
        a.link("worker1").cut("on purpose")
        call.cancel()
        await until(lambda: not b.links.counters()["running_calls"])
        assert a.link("worker1").is_open


async def test_a_deadline_during_a_cut_is_kept(agents, tmp_path):
    async with behind_a_proxy(agents, tmp_path) as (_, b, proxy):
        proxy.silent = True
        call = rpc_async("worker1", at_the_gate, (1,), timeout=0.3)
        proxy.cut()
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await call
        assert time.monotonic() - start < 4 * 0.55
        proxy.silent = False
        proxy.cut()
        await until(lambda: b.link("worker0").is_open)
        await until(lambda: not b.links.counters()["running_calls"])
        assert RUNS[1] <= 1


async def test_a_connection_cut_again_and_again_during_its_handshake_comes_back(agents, tmp_path):
    async with behind_a_proxy(agents, tmp_path) as (a, b, proxy):
        cuts = [1, HELLO_SIZE, HELLO_SIZE + 1, 2 * HELLO_SIZE, 2 * HELLO_SIZE + 1]
        cuts += [2 * HELLO_SIZE + PROOF_SIZE, 2 * HELLO_SIZE + 2 * PROOF_SIZE - 1]
        cuts += [2 * HELLO_SIZE + 2 * PROOF_SIZE, 2 * HELLO_SIZE + 2 * PROOF_SIZE + 5]
        proxy.budget = lambda: cuts.pop(0) if cuts else None
        call = rpc_async("worker1", at_the_gate, (1,))
        await until(lambda: RUNS[1])
        proxy.cut()
        await until(lambda: not cuts and a.link("worker1").is_open)
        GATES[1].set()
        assert await call == 1
        assert RUNS == {1: 1}
        assert b.link("worker0").is_open


# ── what is kept ────────────────────────────────────────────────────────────────────────────────


async def test_a_session_keeps_little_of_much_that_was_sent(agents):
    options = Options(heartbeat=0.05)
    where = "tcp:127.0.0.1:0".format
    async with agents(2, address=where, options=options) as (a, b):
        ours, theirs = a.link("worker1").session, b.link("worker0").session
        array = np.zeros(1 << 20)
        for _ in range(8):
            assert await rpc_async("worker1", len, (array,)) == 1 << 20
            assert sum(map(len, ours.kept)) < 1 << 16  # the reply says that the arguments came
        b.services["note"] = lambda sender, text: None
        for _ in range(40):
            for _ in range(100):
                a.post("worker1", "note", "x" * 1000)  # never answered
            await rpc_async("worker1", add, (1, 2))
            assert sum(map(len, ours.kept)) < 2 << 20
        await until(lambda: sum(map(len, (*ours.kept, *theirs.kept))) < 10 * HEADER_SIZE)


async def test_memory_of_a_call_is_free_when_it_is_done(agents):
    async with agents(2, address="tcp:127.0.0.1:0".format):
        data = bytearray(1 << 20)
        assert await rpc_async("worker1", len, (data,)) == 1 << 20
        data += b"it may be resized"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_an_array_that_is_changed_after_a_cut_arrives_as_it_was(agents, tmp_path, kind):
    async with behind_a_proxy(agents, tmp_path, kind) as (a, _, _):
        link, array = a.link("worker1"), np.ones(1 << 14)
        lose_what_is_written(link)
        call = rpc_async("worker1", add, (array, 1))
        await until(lambda: link.outbox.empty)
        link.cut("on purpose")
        array[:] = 7
        assert np.array_equal(await call, np.full(1 << 14, 2.0))


async def test_a_cut_that_lost_more_than_was_kept_is_a_lost_worker(agents, tmp_path):
    options = Options(outbound_buffer=1 << 10)
    async with behind_a_proxy(agents, tmp_path, options=options) as (a, b, proxy):
        link = a.link("worker1")
        lose_what_is_written(link)
        call = rpc_async("worker1", at_the_gate, (1,))
        more = [rpc_async("worker1", add, ("x" * 1000, "")) for _ in range(5)]
        await until(lambda: link.outbox.empty)
        proxy.cut()
        for future in (call, *more):
            with pytest.raises(WorkerLost) as caught:
                await future
            assert caught.value.executed == "unknown"
        await until(lambda: is_lost(b, a))
        assert RUNS[1] == 0


# ── losing ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("who", ["the one who dialled", "the other one"])
async def test_a_worker_that_ended_is_lost_at_once(agents, address, who):
    async with agents(2, address=address) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        if who == "the other one":
            call, left, ended = a.call("worker1", forever), a, b
        else:
            call, left, ended = b.call("worker0", forever), b, a
        await until(lambda: ended.links.counters()["running_calls"])
        start = time.monotonic()
        crash(ended)
        with pytest.raises(WorkerLost) as caught:
            await call
        assert time.monotonic() - start < 0.5
        assert caught.value.executed == "unknown"
        assert left.links.suspects() == [ended.name]  # nobody has declared it lost so far
        left.links.declare_lost(ended.info, "its process ended")
        assert left.links.suspects() == []


async def test_a_worker_that_says_goodbye_is_not_waited_for(agents, address):
    async with agents(2, address=address) as (a, b):
        call = a.call("worker1", forever)
        await until(lambda: b.links.counters()["running_calls"])
        await b.close()
        with pytest.raises(WorkerLost, match="shut down"):
            await call


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_network_that_stays_away_is_a_lost_worker_on_both_sides(agents, tmp_path, kind):
    options = Options(resume=0.3, handshake_timeout=0.3)
    async with behind_a_proxy(agents, tmp_path, kind, options=options) as (a, b, proxy):
        b.directory.add(replace(a.info, addresses=(proxy.address,)))
        call = rpc_async("worker1", at_the_gate, (1,))
        await until(lambda: RUNS[1])
        proxy.silent = True
        start = time.monotonic()
        proxy.cut()
        await until(lambda: a.link("worker1").is_away)
        later = rpc_async("worker1", add, (1, 2))
        for future, executed in ((call, "unknown"), (later, "no")):
            with pytest.raises(WorkerLost) as caught:
                await future
            assert (caught.value.worker, caught.value.executed) == ("worker1", executed)
        await until(lambda: not b.links.counters()["running_calls"])
        assert is_lost(b, a)
        assert time.monotonic() - start < 4 * 1.1


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH])
async def test_a_connection_that_tcp_gave_up_is_not_resumed(agents, address, number):
    async with agents(2, address=address) as (a, _):
        await rpc_async("worker1", add, (1, 2))
        link = a.link("worker1")
        connection = link.connection
        link.disconnected(connection, OSError(number, "nothing was acknowledged"))
        assert isinstance(link.error, WorkerLost)
        connection.transport.abort()


async def test_no_connection_is_resumed_with_resume_0(agents, address):
    async with agents(2, address=address, options=Options(resume=0)) as (a, _):
        call = rpc_async("worker1", forever)
        await until(lambda: a.link("worker1").is_open)
        sever(a, "worker1")
        with pytest.raises(WorkerLost):
            await call


async def test_a_restarted_worker_at_the_same_address_does_not_resume_the_session(agents, tmp_path):
    async with behind_a_proxy(agents, tmp_path) as (_, b, proxy):
        other = Agent("worker1", 1, secret=SECRET, runtime=b.runtime)
        await other.start(f"unix:{tmp_path}/other")
        call = rpc_async("worker1", forever)
        await until(lambda: b.links.counters()["running_calls"])
        proxy.target = other.info.addresses[0]
        start = time.monotonic()
        proxy.cut()
        with pytest.raises(WorkerLost, match="anew"):
            await call
        assert time.monotonic() - start < 0.5 * 4
        await other.close()


async def test_a_worker_that_was_declared_lost_is_told_so_when_it_reconnects(agents, address):
    async with agents(2, address=address) as (a, b):
        call = a.call("worker1", forever)
        await until(lambda: b.links.counters()["running_calls"])
        start = time.monotonic()
        b.links.declare_lost(a.info, "on purpose")
        with pytest.raises(WorkerLost, match="took this worker for lost"):
            await call
        assert time.monotonic() - start < 0.5 * 4


async def test_memory_reserved_for_a_message_that_never_comes_is_released(agents, tmp_path):
    options = Options(resume=0.1, handshake_timeout=0.2)
    async with behind_a_proxy(agents, tmp_path, options=options) as (_, b, proxy):
        proxy.budget = lambda: 3 << 20
        proxy.cut()
        call = rpc_async("worker1", len, (np.zeros(64 << 20, np.uint8),))
        await until(lambda: b.budget.used)
        proxy.silent = True
        with pytest.raises(WorkerLost) as caught:
            await call
        assert caught.value.executed == "no"  # it never got all of it
        await until(lambda: not b.budget.used)


async def test_two_workers_without_addresses_of_each_other_wait_for_resume_seconds(
    agents, tmp_path
):
    options = Options(resume=0.2)
    async with behind_a_proxy(agents, tmp_path, options=options) as (a, b, proxy):
        b.directory.add(replace(a.info, addresses=()))
        b.link("worker0")
        proxy.cut()
        await resumed(a, b, a.link("worker1").session.number)
        proxy.close()
        proxy.cut()
        await until(lambda: is_lost(a, b) and is_lost(b, a))
        for agent, other in ((a, "worker1"), (b, "worker0")):
            with pytest.raises(WorkerLost, match=other):
                await agent.call(other, add, (1, 2))


# ── attackers ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("word", [RESUME, NUDGE])
async def test_a_client_without_the_secret_cannot_touch_a_session(agents, tmp_path, word):
    async with agents(2, address=f"unix:{tmp_path}/{{}}".format) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        for agent, claimed in ((b, a), (a, b)):
            link = agent.link(claimed.name)
            before = link.connection
            me = Identity(claimed.name, claimed.rank, claimed.incarnation)
            offer = Offer(word, 99 if word == RESUME else link.session.number, 0)
            hand = Handshake(me, b"x" * 32, b"n" * 32, client=True, offer=lambda _, o=offer: o)
            path = agent.info.addresses[0].partition(":")[2]
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(hand.start())
            with pytest.raises(AuthError):
                hand.receive(await reader.readexactly(HELLO_SIZE))
            writer.write(bytes(PROOF_SIZE))
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            assert link.connection is before
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_a_call_without_deadline_survives_a_cut(agents, address):
    async with agents(2, address=address) as (a, _):
        call: Any = rpc_async("worker1", at_the_gate, (1,), timeout=math.inf)
        await until(lambda: RUNS[1])
        a.link("worker1").cut("on purpose")
        GATES[1].set()
        assert await call == 1
