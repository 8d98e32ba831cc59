"""Public pickle gadgets, sent wherever a partner's bytes go: no decoder looks anything up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from typing import Any

import pytest

import aiograd as ag
from aiograd.wire.framing import HEADER_SIZE
from aiograd.wire.messages import (
    CALL,
    DEFINE,
    FAST,
    FAULT,
    ITEM,
    METADATA,
    POST,
    REPLY,
    REQUEST,
    STREAM,
    TRAVELLED,
)
from tests.security import partner_functions as offer
from tests.security.gadgets import CALLS, pickled
from tests.security.rogue import PLAIN, Rogue, define, exposed, frame, large, service
from tests.support.agents import SECRET

PROTOCOLS = (0, 2, 4, 5)
PAYLOADS = [pickled(*call, protocol) for call in CALLS for protocol in PROTOCOLS]


def test_unpickling_a_gadget_runs_it():
    """Otherwise the tests below would prove nothing."""
    assert len(CALLS) >= 60
    for protocol in PROTOCOLS:
        assert pickle.loads(pickled("builtins", "len", ("four",), protocol)) == 4


def places(gadget: bytes, number: int) -> list[bytes]:
    """The gadget wherever a partner could put it; `number` is a fresh call's."""
    in_front = len(gadget).to_bytes(4, "little") + gadget
    data = PLAIN.encode(((1,), None), None).data
    text = PLAIN.encode((gadget, gadget.decode("latin-1")), None).data
    return [
        frame(DEFINE, gadget, to=1000 + number),
        frame(CALL, data, id=number, to=1000 + number),
        frame(CALL, gadget, id=number + 1, to=1),
        frame(CALL, gadget, flags=TRAVELLED, id=number + 2, to=1),
        frame(CALL, in_front + data, flags=METADATA, id=number + 3, to=1),
        frame(CALL, gadget, flags=STREAM, id=number + 4, to=1),
        frame(CALL, gadget, id=number + 5, to=0),
        frame(CALL, text, id=number + 6, to=2),
        frame(REQUEST, gadget, id=number + 7, to=3),
        frame(POST, gadget, id=number + 8, to=3),
        *large(CALL, number, [gadget, gadget], id=number + 9, to=1),
        *[frame(kind, gadget, id=id) for kind in (REPLY, FAULT, ITEM) for id in range(1, 4)],
    ]


def endings(gadget: bytes, number: int) -> list[bytes]:
    """The same, where the session ends with it."""
    return [
        frame(CALL, gadget, flags=FAST, id=number, to=1),
        frame(REPLY, gadget, flags=FAST, id=1),
        frame(REQUEST, gadget, flags=FAST | METADATA, id=number, to=3),
    ]


@pytest.fixture
async def scene(workers, caplog, monkeypatch, tmp_path):
    """Two partners, and how to connect to one as a rogue; a file made here is a marker."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with workers("restricted", "restricted") as (_, worker):
        numbers = itertools.count()

        async def rogue() -> Rogue:
            hub, name = worker.agent.runtime.network.memory, f"rogue{next(numbers)}"
            # Each by another name: one begins few sessions in a while.
            found = await Rogue.connect(hub, "memory:1", SECRET, name=name)
            names = [define(1, exposed("add")), define(2, exposed("echo"))]
            found.send(*names, service(3, "rref.fetch"))
            return found

        yield worker.agent, rogue
    assert list(tmp_path.iterdir()) == []


async def test_a_trusted_worker_looks_gadgets_up(workers, lookups):
    """The ear hears what it should: so its silence below means something."""
    async with workers("trusted", "trusted") as (_, worker):
        hub = worker.agent.runtime.network.memory
        rogue = await Rogue.connect(hub, "memory:1", SECRET, restricted=False)
        lookups.clear()
        rogue.send(define(1, exposed("add")))
        rogue.send(frame(CALL, pickled("builtins", "len", ("four",), 4), id=1, to=1))
        assert (await rogue.answers.get())[2] == 1
        assert any("pickle.find_class" in each for each in lookups)
        await rogue.close()


@pytest.mark.deadline(60)
async def test_no_decoder_looks_up_a_gadget(scene, lookups):
    _, connect = scene
    rogue: Any = await connect()
    for at, gadget in enumerate(PAYLOADS):
        if rogue.ended.done():
            rogue = await connect()
        rogue.send(*places(gadget, 1 + at * 20))
        await asyncio.sleep(0)
    rogue.send(frame(CALL, PLAIN.encode(((1,), None), None).data, id=1 << 40, to=1))
    while (await rogue.answers.get())[2] != 1 << 40:
        pass
    await rogue.close()
    assert await ag.rpc_async("worker1", offer.add, (1,)) == 2
    assert lookups == []


@pytest.mark.deadline(60)
async def test_gadgets_in_fast_path_messages_end_the_session(scene, lookups):
    agent, connect = scene
    sessions = 0
    for gadget in PAYLOADS[:: len(PROTOCOLS)]:
        for each in endings(gadget, 1):
            assert len(each) > HEADER_SIZE
            rogue = await connect()
            rogue.send(each)
            await rogue.ended
            sessions += 1
    assert agent.limits["protocol"] == sessions
    assert await ag.rpc_async("worker1", offer.add, (1,)) == 2
    assert lookups == []


async def test_answers_with_gadgets_are_refused_by_the_caller(scene, lookups):
    """A rogue that is called answers with pickles."""
    agent, connect = scene
    for gadget in PAYLOADS[:: len(PROTOCOLS)]:
        rogue = await connect()
        rogue.send(frame(12))
        link = agent.links.table[rogue.incarnation]
        agent.directory.add(link.peer)
        calls = [agent.call(link.peer.name, offer.add, (1,), timeout=5.0) for _ in range(3)]
        rogue.send(frame(REPLY, gadget, id=1), frame(FAULT, gadget, id=2))
        rogue.send(frame(REPLY, gadget, flags=TRAVELLED | METADATA, id=3))
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, Exception)
        await rogue.close()
        agent.directory.remove(link.peer.name)
    assert lookups == []
