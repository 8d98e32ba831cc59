"""Peers that do not read, or only send: the memory they can occupy is bounded."""

from __future__ import annotations

import asyncio
import logging
import os

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import DeadlineExceeded, Overloaded
from aiograd.rpc.agent import Agent
from aiograd.rref.refcount.records import pack_fork
from aiograd.wire.framing import announce
from aiograd.wire.messages import CALL, LARGE, REQUEST
from tests.security import partner_functions as offer
from tests.security.rogue import PLAIN, Rogue, define, exposed, frame, service
from tests.support.agents import SECRET
from tests.support.waiting import until, until_not

MIB = 1 << 20


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
async def flooded(workers, caplog):
    """A worker with small limits, and a rogue that is connected to it and does not read."""
    caplog.set_level(logging.CRITICAL, "aiograd")
    limits = {"outbound_buffer": 4 * MIB, "inbound_budget": 8 * MIB}
    async with workers("restricted", "restricted", "restricted", **limits) as (_, worker, _):
        rogue = await Rogue.connect(worker.agent.runtime.network.memory, "memory:1", SECRET)
        rogue.send(define(1, exposed("block")), service(2, "rref.fetch"), define(3, exposed("add")))
        yield worker.agent, rogue
        rogue.transport.resume_reading()
        await rogue.close()
        await until_not(lambda: worker.agent.budget.used)


async def flood(agent: Agent, rogue: Rogue, message: bytes, count: int) -> None:
    """Send copies of a message with fresh numbers, until all are sent or the session has ended."""
    first = rogue.sent = rogue.sent + 1000
    for id in range(first, first + count):
        if rogue.ended.done():
            return
        rogue.send(message[:8] + id.to_bytes(8, "little") + message[16:])
        if id % 20 == 0:
            await asyncio.sleep(0)  # they arrive,
            await until(lambda: not agent.pool.busy)  # and are answered, or held back


async def test_replies_to_a_peer_that_does_not_read_are_bounded(flooded):
    agent, rogue = flooded
    rogue.transport.pause_reading()
    call = frame(CALL, PLAIN.encode(((60_000,), None), None).data, to=1)
    await flood(agent, rogue, call, 3000)  # 180 MB of answers, if it could
    assert agent.links.counters()["buffered_bytes"] <= 4 * MIB + 2 * MIB + 1024 * 61_000
    assert agent.limits["outbound_buffer"] > 0
    assert await ag.rpc_async("worker1", offer.add, (1,)) == 2


async def test_held_calls_are_answered_when_the_peer_reads_again(flooded):
    agent, rogue = flooded
    rogue.transport.pause_reading()
    call = frame(CALL, PLAIN.encode(((60_000,), None), None).data, to=1)
    await flood(agent, rogue, call, 400)
    assert agent.limits["outbound_buffer"] > 0
    rogue.transport.resume_reading()
    seen = {(await rogue.answers.get())[2] for _ in range(400)}
    assert len(seen) == 400


async def test_a_peer_that_floods_and_never_reads_is_disconnected(flooded):
    agent, rogue = flooded
    rogue.transport.pause_reading()
    await flood(agent, rogue, frame(CALL, PLAIN.encode(((60_000,), None), None).data, to=1), 300)
    assert agent.limits["outbound_buffer"] > 0
    missing = PLAIN.encode((pack_fork((1, 2, 3), (1, 2, 4), 1), "x" * 60_000), None).data
    await flood(agent, rogue, frame(REQUEST, missing, to=2), 1000)
    await until(lambda: agent.limits["protocol"])
    assert agent.limits["inbound_budget"] >= 1
    assert agent.budget.used <= 8 * MIB
    assert await ag.rpc_async("worker1", offer.add, (1,)) == 2


async def test_a_stopped_peer_costs_its_caller_no_memory(workers):
    async with workers("trusted", "trusted", outbound_buffer=16 * MIB) as (caller, _):
        stopped = caller.agent.link("worker1")
        await ag.rpc_async("worker1", offer.add, (1,))
        stopped.connection.transport._other.pause_reading()
        array = np.zeros(8 * MIB, np.uint8)
        before = memory()
        first = ag.rpc_async("worker1", offer.add, (array,), timeout=0.2)
        calls = [ag.rpc_async("worker1", offer.add, (array,), timeout=0.6) for _ in range(127)]
        tiny = [ag.rpc_async("worker1", offer.add, (i,), timeout=0.6) for i in range(2000)]
        with pytest.raises(DeadlineExceeded):
            await first  # and the others have not given up yet
        assert sum(not call.done() for call in calls) > 100
        assert memory() - before < 64 * MIB
        assert stopped.outbox.waiting <= 16 * MIB + 8 * MIB
        for outcome in await asyncio.gather(*calls, *tiny, return_exceptions=True):
            assert isinstance(outcome, DeadlineExceeded | Overloaded)
        stopped.connection.transport._other.resume_reading()
        assert await ag.rpc_async("worker1", offer.add, (1,)) == 2


async def test_others_are_served_while_one_does_not_read(workers):
    async with workers("trusted", "trusted", "trusted", outbound_buffer=4 * MIB) as (caller, _, _):
        await ag.rpc_async("worker1", offer.add, (1,))
        stopped = caller.agent.link("worker1").connection.transport._other
        stopped.pause_reading()
        array = np.zeros(8 * MIB, np.uint8)
        calls = [ag.rpc_async("worker1", offer.add, (array,), timeout=30.0) for _ in range(20)]
        loop = asyncio.get_running_loop()
        slowest = 0.0
        for i in range(200):
            began = loop.time()
            assert await ag.rpc_async("worker2", offer.add, (i,)) == i + 1
            slowest = max(slowest, loop.time() - began)
        assert slowest < 1.0
        for call in calls:
            call.cancel()
        stopped.resume_reading()


async def test_a_peer_that_floods_behind_a_large_message_is_disconnected(flooded):
    agent, rogue = flooded
    rogue.transport.pause_reading()
    rogue.send(
        frame(CALL, announce(1, 1, [8 * MIB - 5000]), flags=LARGE, id=1)
    )  # and never the rest
    request = frame(REQUEST, PLAIN.encode(("x" * 1000,), None).data, to=2)
    for id in range(2, 100_000):
        if rogue.ended.done():
            break
        rogue.send(request[:8] + id.to_bytes(8, "little") + request[16:])
        if id % 20 == 0:
            await asyncio.sleep(0)
    await until(lambda: agent.limits["protocol"])
    assert 4000 < agent.limits["inbound_budget"] < 5000  # so many were refused before
    await until(lambda: not agent.budget.used)
    assert await ag.rpc_async("worker1", offer.add, (1,)) == 2
