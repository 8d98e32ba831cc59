"""A member with the secret that breaks the protocol.

Its session ends or its call is refused, and other members are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.rpc.link.link import Link
from aiograd.rref.refcount.records import pack_creation, pack_fork
from aiograd.rref.registry import RRefs
from aiograd.wire.framing import HEADER, HEADER_SIZE, pack_header
from aiograd.wire.messages import (
    CALL,
    CANCEL,
    CHUNK,
    CREDIT,
    DEFINE,
    FAULT,
    FORGET,
    GOODBYE,
    ITEM,
    KEEP,
    KINDS,
    NESTED,
    OP,
    PING,
    POST,
    REPLY,
    REQUEST,
    STREAM,
    TRAVELLED,
)
from tests.security import partner_functions as offer
from tests.security.rogue import PLAIN, Rogue, define, exposed, frame, large, service
from tests.support.agents import SECRET
from tests.support.waiting import until, until_not

FRAMES = int(os.environ.get("AIOGRAD_HOSTILE", "5000"))
PATIENCE = max(90, FRAMES * 0.018)  # seconds
BATCH = 25  # frames per session
SERVICES = [
    "rref.fetch",
    "rref.fork",
    "rref.accept",
    "rref.release",
    "rref.audit",
    "rref.type",
    "rref.created",
    "rref.has",
    "rref.backward",
    "gradients",
    "gradients.failed",
    "gradients.abort",
    "gradients.waits",
    "context.release",
    "context.known",
    "context.graph",
    "cluster.place",
    "cluster.join",
    "cluster.welcome",
    "cluster.change",
    "cluster.roster",
    "cluster.leave",
    "cluster.dismiss",
    "cluster.report",
    "cluster.coordinator",
    "cluster.elect",
    "cluster.term",
    "cluster.confirmed",
    "cluster.succeed",
    "cluster.gather",
    "no.such.service",
]
DEFINITIONS = [
    define(1, exposed("add")),
    define(2, exposed("echo")),
    define(3, exposed("count")),
    define(4, exposed("lend")),
    define(5, exposed("hidden")),
    *[service(10 + i, name) for i, name in enumerate(SERVICES)],
]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any plain data."""
    simple = [
        None,
        True,
        rng.getrandbits(8),
        rng.getrandbits(64),
        -rng.getrandbits(70),
        rng.random(),
        "worker0",
        "x" * rng.randrange(9),
        rng.randbytes(rng.choice([0, 8, 16, 41, 82])),
        np.ones(rng.randrange(4)),
    ]
    if depth < 3 and rng.random() < 0.4:
        items = [value(rng, depth + 1) for _ in range(rng.randrange(6))]
        return rng.choice([items, tuple(items), {str(i): each for i, each in enumerate(items)}])
    return rng.choice(simple)


def encoded(data: Any) -> bytes:
    return PLAIN.encode(data, None).data


def messages(rng: random.Random, number: int) -> list[bytes]:
    """One message of any kind, mostly of the right form."""
    id = rng.choice([number, number, number, 1, 0, 1 << 63])
    match rng.randrange(14):
        case 0 | 1:
            to, flags = rng.choice([1, 2, 4, 5, 0, 77]), rng.choice([0, 0, TRAVELLED, OP, STREAM])
            body = encoded((tuple(value(rng) for _ in range(rng.randrange(3))), None))
            budget = rng.choice([5.0, 0.0, -1.0, float("nan"), float("inf"), 3e38])
            return [frame(CALL, body, flags=flags, id=id, to=to, budget=budget)]
        case 2:
            return [frame(CALL, encoded(((5,), None)), flags=STREAM, id=id, to=3)]
        case 3 | 4 | 5 | 6:
            to = 10 + rng.randrange(len(SERVICES))
            args = tuple(value(rng) for _ in range(rng.randrange(7)))
            if rng.random() < 0.3:
                args = (rng.getrandbits(16), rng.getrandbits(20), 1, 0, [], None, None)
            return [frame(rng.choice([REQUEST, POST]), encoded(args), id=id, to=to)]
        case 7:
            body = encoded((("ValueError", "x", ("x",), None), "f", ""))
            return [frame(rng.choice([REPLY, FAULT, ITEM]), body, id=rng.randrange(5))]
        case 8:
            return [frame(rng.choice([CANCEL, CREDIT]), id=rng.randrange(1, number + 1), to=9)]
        case 9:
            return [frame(rng.choice([FORGET, DEFINE]), rng.randbytes(9), to=rng.randrange(40))]
        case 10:
            body = encoded(((rng.randbytes(70_000),), None))
            parts = large(CALL, number, [body], id=id, to=2)
            return parts[: rng.randrange(1, len(parts) + 1)]
        case 11:
            kind = rng.choice([*KINDS])
            return large(kind, number, [rng.randbytes(100), rng.randbytes(50)], id=id, to=10)
        case 12:
            tag = b"T" + struct.pack("<I", 4) + rng.choice([b"rref", b"coo_", b"peer"])
            forged = tag + encoded(value(rng))
            body = b"t" + struct.pack("<I", 2) + b"t" + struct.pack("<I", 1) + forged + b"0"
            return [frame(CALL, body, flags=TRAVELLED, id=id, to=2)]
        case _:
            return [frame(rng.choice([PING, GOODBYE]))]


def spoil(rng: random.Random, data: bytes) -> bytes:
    """Change a field of the pack_header, or a byte of the body."""
    whole = bytearray(data)
    if rng.random() < 0.5 or len(whole) == HEADER_SIZE:
        fields = list(HEADER.unpack_from(whole))
        which = rng.randrange(len(fields))
        limits = [8, 8, 16, 20, 64, 0, 32]
        fields[which] = float("nan") if which == 5 else rng.getrandbits(limits[which])
        HEADER.pack_into(whole, 0, *fields)
    else:
        whole[rng.randrange(HEADER_SIZE, len(whole))] ^= 1 << rng.randrange(8)
    return bytes(whole)


async def ended(link: Link) -> None:
    await until(lambda: link.error)


@pytest.mark.deadline(PATIENCE)
async def test_mutated_frames_do_not_affect_other_members(workers, lookups, caplog):
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with workers("restricted", "restricted") as (_, worker):
        agent = worker.agent
        hub = agent.runtime.network.memory
        kept = ag.remote("worker1", offer.make, ("kept",))
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            await kept.future()
            lookups.clear()
            for session in range(FRAMES // BATCH):
                rng = random.Random(session)
                # One name begins few sessions in a while, so it takes many.
                name, rank = f"rogue{session // 8}", rng.choice([0, 1, 99])
                rogue = await Rogue.connect(hub, "memory:1", SECRET, name=name, rank=rank)
                link = agent.links.table[rogue.incarnation]
                rogue.send(*DEFINITIONS)
                for number in range(1, BATCH + 1):
                    for each in messages(rng, number):
                        rogue.send(spoil(rng, each) if rng.random() < 0.3 else each)
                if session % 10 == 0:
                    assert await ag.rpc_async("worker1", offer.add, (session,)) == session + 1
                await rogue.close()
                await ended(link)
            assert lookups == []
            await ctx.backward(y.sum())
            np.testing.assert_allclose(ctx.gradients[x].numpy(), np.ones((1, 3)))
            assert await kept == "kept"
        await kept.release()
        assert worker.debug_info()["workers"] == 2
        await until_not(lambda: agent.links.counters()["running_calls"] or agent.budget.used)
        assert agent.limits["protocol"] > 10
        await until_not(lambda: agent.links.counters()["buffered_bytes"])


@pytest.mark.deadline(PATIENCE)
async def test_mutated_headers_do_not_affect_other_members_in_trusted_mode(workers, caplog):
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with workers("trusted", "trusted") as (_, worker):
        agent = worker.agent
        hub = agent.runtime.network.memory
        for session in range(FRAMES // BATCH // 4):
            rng = random.Random(session)
            rogue = await Rogue.connect(hub, "memory:1", SECRET, restricted=False)
            link = agent.links.table[rogue.incarnation]
            rogue.send(*DEFINITIONS)
            for number in range(1, BATCH + 1):
                kind = rng.choice([k for k in KINDS if k != CALL])
                body = b"N." if kind in (REPLY, ITEM) else rng.randbytes(rng.randrange(30))
                rogue.send(spoil(rng, frame(kind, body, id=number, to=rng.randrange(40))))
            await rogue.close()
            await ended(link)
        assert await ag.rpc_async("worker1", offer.add, (1,)) == 2
        await until_not(lambda: agent.links.counters()["running_calls"] or agent.budget.used)


# ── single tricks ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def target(workers, caplog):
    """A restricted worker, and a rogue that is connected to it."""
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with workers("restricted", "restricted", max_inflight=8, inbound_budget=8 << 20) as (
        _,
        w,
    ):
        rogue = await Rogue.connect(w.agent.runtime.network.memory, "memory:1", SECRET)
        rogue.send(*DEFINITIONS)
        yield w.agent, rogue
        await rogue.close()


async def test_a_call_runs_once_however_often_it_is_sent(target):
    _, rogue = target
    call = frame(CALL, encoded(((1,), None)), id=1, to=1)
    rogue.send(call, call, call)
    rogue.send(frame(CALL, encoded(((10,), None)), id=2, to=1))
    assert [(await rogue.answers.get())[2] for _ in range(2)] == [1, 2]
    assert rogue.answers.empty()


async def test_more_calls_than_agreed_on_are_refused(target):
    agent, rogue = target
    rogue.send(define(6, exposed("forever")))
    rogue.send(*[frame(CALL, encoded(((), None)), id=i, to=6) for i in range(1, 12)])
    kinds = [(await rogue.answers.get())[0] for _ in range(3)]
    assert kinds == [FAULT] * 3
    assert agent.limits["max_inflight"] == 3
    assert agent.links.counters()["running_calls"] == 8


async def test_calls_that_claim_to_be_nested_are_bounded_too(target):
    agent, rogue = target
    rogue.send(define(6, exposed("forever")))
    call, most = encoded(((), None)), 8 * 2
    rogue.send(*[frame(CALL, call, flags=NESTED, id=i, to=6) for i in range(1, most + 4)])
    kinds = [(await rogue.answers.get())[0] for _ in range(3)]
    assert kinds == [FAULT] * 3
    assert agent.limits["max_inflight"] == 3
    assert agent.links.counters()["running_calls"] == most


async def test_a_function_is_not_named_before_it_is_defined(target):
    agent, rogue = target
    rogue.send(frame(CALL, encoded(((), None)), id=1, to=4000))
    await rogue.ended
    assert agent.limits["protocol"] == 1


async def test_a_large_message_without_memory_is_refused_and_thrown_away(target):
    agent, rogue = target
    body = encoded(((bytes(9 << 20),), None))
    pieces = [body[i : i + (1 << 20)] for i in range(0, len(body), 1 << 20)]
    first, *_ = large(CALL, 1, [body], id=1, to=2)
    rogue.send(first, *[pack_header(CHUNK, 0, len(p), 0, 0.0, 1) + p for p in pieces])
    kind, _, id, fault = await rogue.answers.get()
    assert (kind, id) == (FAULT, 1)
    assert b"Overloaded" in fault
    assert agent.limits["inbound_budget"] == 1
    assert agent.budget.used == 0


async def test_small_messages_behind_a_large_one_are_bounded(target):
    agent, rogue = target
    rogue.send(large(REQUEST, 1, [bytes(70_000)], id=1, to=10)[0])  # and never the rest
    body = encoded((bytes(60_000),))
    for i in range(2, 400):
        rogue.send(frame(REQUEST, body, id=i, to=10))
        await asyncio.sleep(0)
    first = 2 + (agent.options.inbound_budget - 70_000) // (len(body) + 512)
    for i in range(first, 400):  # what is too much is refused, and nothing else
        kind, _, id, fault = await rogue.answers.get()
        assert (kind, id) == (FAULT, i)
        assert b"Overloaded" in fault
    assert agent.limits["inbound_budget"] == 400 - first
    assert agent.budget.used <= agent.options.inbound_budget
    assert not rogue.ended.done()
    await rogue.close()
    await until(lambda: not agent.budget.used)


async def test_forged_stream_credit_yields_no_items(target):
    _, rogue = target
    rogue.send(frame(CALL, encoded(((100_000,), None)), flags=STREAM, id=1, to=3))
    rogue.send(frame(CREDIT, id=1, to=1 << 31))
    rogue.send(frame(CALL, encoded(((1,), None)), id=2, to=1))
    assert (await rogue.answers.get())[2] == 2
    rogue.send(frame(CANCEL, id=1))


async def test_malformed_budgets_are_refused_or_endless(target):
    _, rogue = target
    for id, budget in enumerate([float("nan"), -5.0, 0.0], 1):
        rogue.send(frame(CALL, encoded(((1,), None)), id=id, to=1, budget=budget))
        kind, _, _, fault = await rogue.answers.get()
        assert kind == FAULT
        assert b"DeadlineExceeded" in fault
    rogue.send(frame(CALL, encoded(((1,), None)), id=9, to=1, budget=3e38))
    assert (await rogue.answers.get())[0] == REPLY


async def test_pending_requests_are_bounded(target):
    agent, rogue = target
    stamp = int.from_bytes(rogue.incarnation[:8], "big")
    for i in range(1, 8 * 4 + 101):  # each waits for a creation that never comes
        own = pack_fork((99, stamp, i), (99, stamp, i), 0)
        rogue.send(frame(REQUEST, encoded((own,)), id=i, to=10, budget=float("inf")))
    for _ in range(100):
        kind, _, _, fault = await rogue.answers.get()
        assert kind == FAULT
        assert b"Overloaded" in fault
    assert agent.limits["max_inflight"] == 100


async def test_an_overlong_function_name_is_refused(target):
    agent, rogue = target
    rogue.send(define(50, "x" * 60_000))
    await rogue.ended
    assert agent.limits["protocol"] == 1


async def test_values_kept_for_partners_are_bounded(target, monkeypatch):
    agent, rogue = target
    monkeypatch.setattr(agent, "options", replace(agent.options, partner_values=5))
    stamp = int.from_bytes(rogue.incarnation[:8], "big")
    outcomes = []
    for i in range(1, 9):
        token = pack_creation((99, stamp, i), b"")
        body = len(token).to_bytes(2, "little") + token + encoded(((1,), None))
        rogue.send(frame(CALL, body, flags=KEEP, id=i, to=1))
        outcomes.append((await rogue.answers.get())[0])
    assert outcomes == [REPLY] * 5 + [FAULT] * 3
    assert agent.limits["values"] == 3
    assert len(agent.parts[RRefs].protocol.owner_table.records) == 5
