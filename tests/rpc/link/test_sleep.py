"""Links that nobody uses: they rest without heartbeats, then both sides close their connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import math

import pytest

import aiograd as ag
from aiograd.autograd.op import OPS
from aiograd.dist import attach as attach_autograd
from aiograd.errors import Overloaded, WorkerLost
from aiograd.rpc.api import rpc_async
from aiograd.rpc.link.link import LINK_TRANSITIONS, LinkEvent, LinkState
from aiograd.rpc.options import Options
from aiograd.rref import attach as attach_references
from aiograd.wire.framing import HEADER_SIZE
from tests.support.agents import crash
from tests.support.waiting import until

SLEEPY = Options(heartbeat=0.01, silence=0.1, idle=0.05, handshake_timeout=0.5)


def add(x, y=0):
    return x + y


async def nothing():
    """Return at once."""


@pytest.fixture(params=["memory:{}", "unix:{tmp}/{}", "tcp:127.0.0.1:0"])
def address(request, tmp_path):
    return request.param.replace("{tmp}", str(tmp_path)).format


async def asleep(a, b):
    """Wait until the link between two workers sleeps, at both ends."""
    await until(lambda: a.link(b.name).is_asleep and b.link(a.name).is_asleep)


def events(agent):
    """Note losses and returns."""
    found = []
    agent.lost.append(lambda peer, error: found.append(f"lost {peer.name}"))
    agent.returned.append(lambda peer: found.append(f"returned {peer.name}"))
    return found


# ── resting ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_link_without_use_has_no_heartbeats(agents, address):
    async with agents(2, address=address, options=Options(heartbeat=0.01)) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        ends = [a.link("worker1"), b.link("worker0")]
        await until(lambda: all(link.resting for link in ends))
        before = [(link.session.sent, link.session.received) for link in ends]
        for agent in (a, b):
            assert agent.links._heart is None
        await asyncio.sleep(0.1)  # ten heartbeats, of which none may come
        assert [(link.session.sent, link.session.received) for link in ends] == before
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert not any(link.resting for link in ends)


async def test_what_was_sent_is_acknowledged_before_a_link_rests(agents):
    async with agents(2, options=Options(heartbeat=0.01)) as (a, b):
        b.services["note"] = lambda sender, data: None
        a.post("worker1", "note", b"x" * 5000)
        link = a.link("worker1")
        await until(lambda: link.resting and b.link("worker0").resting)
        assert sum(map(len, link.session.kept)) <= 4 * HEADER_SIZE


async def test_a_resting_worker_is_told_when_its_rest_begins_and_ends(agents):
    async with agents(2, options=Options(heartbeat=0.01)) as (_a, b):
        told = []
        b.links.on_rest = told.append
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await until(lambda: told == [True])
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert told == [True, False]


async def test_a_peer_that_stops_while_the_link_rests_is_suspect_when_it_is_called(agents):
    async with agents(2, options=Options(heartbeat=0.01, silence=0.1)) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await until(lambda: a.link("worker1").resting and b.link("worker0").resting)
        b.link("worker0").stir()
        b.link("worker0").outbox.pause()
        call = rpc_async("worker1", add, (1, 2))
        await until(lambda: a.links.suspects() == ["worker1"])
        b.link("worker0").outbox.resume()
        assert await call == 3
        await until(lambda: a.links.suspects() == [])


async def test_a_silent_peer_that_is_expected_to_call_is_suspect_without_a_call_to_it(agents):
    async with agents(2, options=Options(heartbeat=0.01, silence=0.1)) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await until(lambda: a.link("worker1").resting and b.link("worker0").resting)
        a.links.expect({"worker1"})
        await until(lambda: a.link("worker1").session.pings > 5)  # it is asked, and answers
        assert a.links.suspects() == []
        b.link("worker0").outbox.pause()
        await until(lambda: a.links.suspects() == ["worker1"])
        b.link("worker0").outbox.resume()
        a.links.expect({"worker1"}, -1)
        await until(lambda: a.links.suspects() == [] and a.link("worker1").resting)


# ── sleeping ────────────────────────────────────────────────────────────────────────────────────


async def test_an_idle_connection_is_closed_and_made_again_by_the_next_call(agents, address):
    async with agents(2, address=address, options=SLEEPY) as (a, b):
        seen = events(a), events(b)
        assert await rpc_async("worker1", add, (1, 2)) == 3
        link = a.link("worker1")
        await asleep(a, b)
        assert list(link.descriptors()) == list(b.link("worker0").descriptors()) == []
        assert await rpc_async("worker1", add, (1, 2)) == 3
        assert a.link("worker1") is link  # the same session
        await asleep(a, b)
        # From the side that was dialled: it nudges the other one.
        assert await b.call("worker0", add, (3, 4)) == 7
        assert a.links.suspects() == b.links.suspects() == []
        assert seen == ([], [])
        await asleep(a, b)
        # Both at once.
        assert await asyncio.gather(
            a.call("worker1", add, (1, 2)), b.call("worker0", add, (3,))
        ) == [
            3,
            3,
        ]
        assert seen == ([], [])


async def test_a_sleeping_link_can_be_closed_without_a_word(agents):
    async with agents(2, options=SLEEPY) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await asleep(a, b)
        link = a.link("worker1")
        await a.close()
        assert link.state is LinkState.CLOSED


@pytest.mark.parametrize("options", [Options(heartbeat=0.01, idle=math.inf)])
async def test_an_idle_time_of_infinity_keeps_connections(agents, options):
    async with agents(2, options=options) as (a, _b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await until(lambda: a.link("worker1").resting)
        a.links._beat_slowly()
        await asyncio.sleep(0.05)
        assert a.link("worker1").is_open


async def test_a_side_that_may_not_sleep_keeps_the_connection(agents):
    async with agents(2, options=SLEEPY) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        needed = [a.incarnation]
        b.watched.append(lambda: needed)
        link = a.link("worker1")
        await until(lambda: link.proposed_at > -math.inf)
        first = link.proposed_at
        await until(lambda: link.proposed_at > first)
        assert link.is_open
        needed.clear()
        await asleep(a, b)


async def test_a_reference_keeps_the_connection_and_its_end_lets_it_sleep(agents):
    async with agents(2, options=SLEEPY) as (a, b):
        parts = [attach(agent) for agent in (a, b) for attach in (attach_references,)]
        ref = ag.remote("worker1", add, (1, 2))
        assert await ref.to_here() == 3
        link = a.link("worker1")
        await until(lambda: link.proposed_at > -math.inf)
        first = link.proposed_at
        await until(lambda: link.proposed_at > first)
        assert link.is_open
        del ref
        await asleep(a, b)
        for part in parts:
            await part.close()


async def test_a_context_keeps_the_connection_and_leaving_it_lets_it_sleep(agents):
    async with agents(2, options=SLEEPY, ops=OPS) as (a, b):
        parts = [
            attach(agent) for agent in (a, b) for attach in (attach_references, attach_autograd)
        ]
        async with ag.context() as context:
            x = ag.ones(3, requires_grad=True)
            y = await ag.rpc_async("worker1", ag.mul, args=(x, 2.0))
            link = a.link("worker1")
            await until(lambda: link.proposed_at > -math.inf)
            first = link.proposed_at
            await until(lambda: link.proposed_at > first)
            assert link.is_open
            await context.backward(y.sum())
        await asleep(a, b)
        for part in reversed(parts):
            await part.close()


async def test_a_running_call_keeps_the_connection(agents):
    async with agents(2, options=SLEEPY) as (a, _b):
        call = rpc_async("worker1", asyncio.sleep, (0.4,))
        await call
        assert a.link("worker1").is_open


# ── crossing ────────────────────────────────────────────────────────────────────────────────────


async def test_a_call_that_crosses_the_agreement_arrives_once(agents, address):
    """The side that dials proposes and calls at once; the other side has closed by then, or not."""
    async with agents(2, address=address, options=SLEEPY) as (a, b):
        seen = events(a), events(b)
        assert await rpc_async("worker1", add, (1, 2)) == 3
        for turns in range(12):
            link, other = a.link("worker1"), b.link("worker0")
            await until(lambda link=link, other=other: link.resting and other.resting)
            link.propose_sleep()
            link.outbox.flush()
            for _ in range(turns):
                await asyncio.sleep(0)
            there, back = a.call("worker1", add, (turns,)), b.call("worker0", add, (turns,))
            assert await there == await back == turns
        assert seen == ([], [])


async def test_an_answer_that_a_message_has_crossed_is_followed_and_undone(agents):
    async with agents(2, options=Options(heartbeat=0.01)) as (a, _b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        link = a.link("worker1")
        position = link.session.sent  # of the answer: what follows is not covered by it
        call = a.call("worker1", add, (1, 2))
        link.outbox.flush()
        link.sleep_received(position, link.session.number)
        assert link.state is LinkState.AWAY
        assert await call == 3


async def test_an_answer_about_an_older_connection_is_out_of_date(agents):
    async with agents(2, options=Options(heartbeat=0.01)) as (a, _b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        link = a.link("worker1")
        link.sleep_received(link.session.sent, link.session.number - 1)
        assert link.is_open


# ── losses ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_death_of_a_sleeping_peer_is_noticed_by_the_next_call(agents, address):
    async with agents(2, address=address, options=SLEEPY) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await asleep(a, b)
        seen = events(a)
        crash(b)
        began = asyncio.get_running_loop().time()
        with pytest.raises(WorkerLost, match="worker1") as caught:
            await rpc_async("worker1", add, (1, 2))
        assert caught.value.executed == "no"
        assert asyncio.get_running_loop().time() - began < 1.0
        assert seen == ["lost worker1"]


async def test_the_announced_loss_of_a_sleeping_peer_is_final(agents):
    async with agents(2, options=SLEEPY) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await asleep(a, b)
        seen = events(a)
        a.links.declare_lost(b.info, "the coordinator says so")
        assert seen == ["lost worker1"]
        with pytest.raises(WorkerLost, match="the coordinator says so"):
            await rpc_async("worker1", add, (1, 2))


async def test_a_sleeping_peer_that_lost_us_begins_a_new_session(agents):
    async with agents(2, options=SLEEPY) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await asleep(a, b)
        seen = events(a)
        b.link("worker0").lose(WorkerLost("worker0", why="a cut"))
        assert await b.call("worker0", add, (1, 2)) == 3
        assert seen == ["lost worker1", "returned worker1"]
        assert await a.call("worker1", add, (1, 2)) == 3


async def test_a_sleeping_link_without_a_descriptor_to_wake_it_names_the_limit(agents):
    async with agents(2, options=SLEEPY) as (a, b):
        assert await rpc_async("worker1", add, (1, 2)) == 3
        await asleep(a, b)
        network = a.runtime.network
        connect = network.connect

        async def none_left(address, factory, *, tls=None):
            raise OSError(errno.EMFILE, "Too many open files")

        network.connect = none_left
        with pytest.raises(Overloaded, match="RLIMIT_NOFILE"):
            await rpc_async("worker1", add, (1, 2))
        network.connect = connect
        assert await rpc_async("worker1", add, (1, 2)) == 3


# ── the table ───────────────────────────────────────────────────────────────────────────────────


def test_a_link_wakes_up_only_from_sleep_and_sleeps_only_while_open():
    sleeps = {state for state, event in LINK_TRANSITIONS if event is LinkEvent.SLEEP}
    wakes = {state for state, event in LINK_TRANSITIONS if event is LinkEvent.WAKE}
    assert (sleeps, wakes) == ({LinkState.OPEN}, {LinkState.ASLEEP})
    assert LINK_TRANSITIONS[LinkState.ASLEEP, LinkEvent.LOSE] is LinkState.LOST


async def test_sleeping_is_not_worth_a_line_in_the_log(agents, caplog):
    with caplog.at_level(logging.INFO, logger="aiograd"):
        async with agents(2, options=SLEEPY) as (a, b):
            assert await rpc_async("worker1", add, (1, 2)) == 3
            await asleep(a, b)
            caplog.clear()
            assert await rpc_async("worker1", add, (1, 2)) == 3
            await asleep(a, b)
    assert not any("broke" in line for line in caplog.messages)
