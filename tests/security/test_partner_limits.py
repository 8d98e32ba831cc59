"""One partner at its limits: it is refused, and nobody else is."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import WorkerLost
from aiograd.rpc.link.inbox import Inbox
from aiograd.rref.refcount.records import UNKNOWN_SITE, pack_creation, pack_fork, stamp_of
from aiograd.rref.registry import RRefs
from aiograd.wire.handshake import make_incarnation
from aiograd.wire.messages import CALL, CANCEL, FAULT, KEEP, POST, REPLY, REQUEST
from aiograd.wire.session import LOOK, RESUME, Offer
from tests.security import partner_functions as offer
from tests.security.rogue import (
    PLAIN,
    Rogue,
    define,
    exposed,
    frame,
    large,
    service,
    with_token,
)
from tests.support.agents import SECRET
from tests.support.waiting import until

MIB = 1 << 20


@pytest.fixture
async def worker(workers: Any, caplog: pytest.LogCaptureFixture) -> Any:
    """A worker with little room for partners; worker0 is an honest one, and current."""
    caplog.set_level(logging.CRITICAL, "aiograd")
    limits = {"partner_memory": 4 * MIB, "inbound_budget": 16 * MIB, "partner_links": 3}
    async with workers("restricted", "restricted", max_inflight=8, threads=2, **limits) as (_, w):
        yield w.agent


async def rogue_of(agent: Any, name: str = "clinic", number: int = 0) -> Rogue:
    token = number.to_bytes(16, "big")
    found = await Rogue.connect(
        agent.runtime.network.memory,
        "memory:1",
        SECRET,
        name=name,
        incarnation=make_incarnation(name, token),
    )
    found.send(define(1, exposed("add")), define(6, exposed("hold")), define(7, exposed("wait")))
    return found


async def honest() -> None:
    assert await ag.rpc_async("worker1", offer.add, (1,), timeout=10) == 2
    data = b"x" * (2 * MIB)
    assert await ag.rpc_async("worker1", offer.echo, (data,), timeout=10) == [[data], {}]


def arguments(*values: Any) -> bytes:
    return PLAIN.encode((values, None), None).data


async def test_one_name_has_few_links_however_many_incarnations_it_makes(worker):
    rogues = [await rogue_of(worker, number=n) for n in range(3)]
    with pytest.raises(ConnectionError):
        await rogue_of(worker, number=3)
    assert worker.limits["partner_links"] >= 1
    other = await rogue_of(worker, "lab")  # another name has links of its own
    await honest()
    for rogue in (*rogues, other):
        await rogue.close()


async def test_a_partner_that_announces_and_sends_nothing_occupies_only_its_share(worker):
    rogue = await rogue_of(worker)
    announced = large(CALL, 1, [bytes(3 * MIB)], id=1, to=1)[0]
    second = large(CALL, 2, [bytes(3 * MIB)], id=2, to=1)[0]
    rogue.send(announced, second)
    await until(lambda: worker.limits["partner_memory"] >= 1)
    assert worker.budget.used <= 4 * MIB
    await honest()
    await rogue.close()


async def test_a_large_message_that_comes_too_slowly_is_refused_and_the_link_goes_on(
    workers, caplog, monkeypatch
):
    caplog.set_level(logging.CRITICAL, "aiograd")
    monkeypatch.setattr("aiograd.rpc.link.transfer_watch.PATIENCE", 0.3)
    async with workers("restricted", "restricted", heartbeat=0.05) as (_, w):
        worker = w.agent
        rogue = await rogue_of(worker)
        announced, *chunks = large(CALL, 1, [bytes(MIB), bytes(MIB)], id=1, to=1)
        body = PLAIN.encode((1,), None).data
        behind = frame(REQUEST, body, id=2, to=2)
        rogue.send(announced, service(2, "context.known"), behind)
        account = worker.accounts.of("clinic")
        await until(lambda: account.used > 2 * MIB)
        async with asyncio.timeout(5):
            refused, served = [await rogue.answers.get() for _ in range(2)]
        assert (refused[0], refused[2]) == (FAULT, 1)
        assert (served[0], served[2]) == (REPLY, 2)  # it waited behind the large message
        assert worker.limits["partner_rate"] == 1
        assert account.used == 0
        rogue.send(*chunks)  # late, and dropped
        rogue.send(frame(CALL, arguments(1), id=3, to=1))
        async with asyncio.timeout(5):
            answer = await rogue.answers.get()
        assert (answer[0], answer[2]) == (REPLY, 3)
        await rogue.close()


async def test_a_partner_that_comes_and_goes_begins_few_sessions(worker):
    for number in range(4 * 3):  # four for each of its links
        rogue = await rogue_of(worker, number=number)
        link = worker.links.get(rogue.incarnation)
        await rogue.close()
        link.abort(WorkerLost("clinic"))
    with pytest.raises(ConnectionError):
        await rogue_of(worker, number=99)
    assert worker.limits["partner_sessions"] >= 1
    await (await rogue_of(worker, "lab")).close()
    await honest()


async def test_calls_of_all_links_of_a_name_count_together(worker):
    rogues = [await rogue_of(worker, number=n) for n in range(3)]
    for rogue in rogues:
        rogue.send(*[frame(CALL, arguments(1), id=n, to=6) for n in range(1, 5)])
    await until(lambda: worker.limits["max_inflight"] == 4)
    running = [worker.links.get(rogue.incarnation).callee.execution.running for rogue in rogues]
    assert sum(map(len, running)) == 8
    await honest()
    for rogue in rogues:
        await rogue.close()


async def test_functions_of_a_partner_that_block_keep_no_thread_from_others(worker):
    offer.WAITING.clear()
    rogue = await rogue_of(worker)
    rogue.send(*[frame(CALL, arguments(60.0), id=n, to=7) for n in range(1, 9)])
    execution = worker.links.get(rogue.incarnation).callee.execution
    await until(lambda: len(execution.running) == 8)
    begin = time.monotonic()
    for _ in range(20):
        await honest()
    assert time.monotonic() - begin < 10
    assert len(execution.running) == 8  # still there
    offer.WAITING.set()
    await until(lambda: not execution.running)
    await rogue.close()


async def test_arguments_stay_counted_while_they_live_on_in_a_value(worker):
    rogue = await rogue_of(worker)
    stamp = stamp_of(rogue.incarnation)
    token = pack_creation((9, stamp, 0), b"x" * 10_000 + b":1")
    body = with_token(token, arguments("x" * 50_000))
    rogue.send(define(8, exposed("make")), frame(CALL, body, flags=KEEP, id=1, to=8))
    async with asyncio.timeout(5):
        assert (await rogue.answers.get())[0] == REPLY
    account = worker.accounts.of("clinic")
    assert account.used >= 50_000
    (record,) = worker.parts[RRefs].protocol.owner_table.records.values()
    assert record.call_site == UNKNOWN_SITE  # text of the partner's choice is not kept
    del record
    forks = PLAIN.encode((pack_fork((9, stamp, 0), (9, stamp, 1), 0),), None).data
    rogue.send(service(9, "rref.release"), frame(REQUEST, forks, id=2, to=9))
    async with asyncio.timeout(5):
        assert (await rogue.answers.get())[0] == REPLY
    await until(lambda: account.as_dict()["partner_memory"] == 0)
    await rogue.close()


async def test_arguments_of_calls_that_run_count_for_their_partner(worker):
    rogue = await rogue_of(worker)
    text = "\U0001f600" + "a" * 60_000  # four bytes for each of these
    calls = [frame(CALL, arguments(text), id=n, to=6) for n in range(1, 9)]
    rogue.send(*calls)
    account = worker.accounts.of("clinic")
    await until(lambda: account.used >= 8 * 240_000)
    assert worker.budget.used >= account.used  # the share is a part of the whole
    rogue.send(*[frame(CANCEL, id=n) for n in range(1, 9)])
    await until(lambda: account.used == 0)
    await honest()
    await rogue.close()


async def test_arguments_beyond_the_share_of_a_partner_are_refused(worker):
    rogue = await rogue_of(worker)
    worker.accounts.of("clinic").reserve(4 * MIB - 1000)
    rogue.send(frame(CALL, arguments("x" * 10_000), id=1, to=6))
    async with asyncio.timeout(5):
        assert (await rogue.answers.get())[0] == FAULT
    assert worker.limits["partner_memory"] == 1
    await honest()
    worker.accounts.of("clinic").release(4 * MIB - 1000)
    await rogue.close()


async def test_calls_that_a_partner_abandoned_count_while_they_run(worker):
    offer.WAITING.clear()  # an earlier test of this process may have set it
    rogue = await rogue_of(worker)
    link = worker.links.get(rogue.incarnation)
    execution = link.callee.execution
    sent = 0
    for _ in range(4):
        rogue.send(*[frame(CALL, arguments(30.0), id=sent + n, to=7) for n in range(1, 5)])
        rogue.send(*[frame(CANCEL, id=sent + n) for n in range(1, 5)])
        sent += 4
        await asyncio.sleep(0)
    await until(lambda: worker.limits["max_inflight"] > 0)
    assert execution.abandoned <= 16
    # Those that wait for a thread have dropped their arguments.
    assert worker.accounts.of("clinic").used < 16 * 1000
    offer.WAITING.set()
    await until(lambda: execution.abandoned == 0)
    await rogue.close()


async def test_log_lines_of_a_partner_are_few_over_all_its_links_and_escaped(worker, caplog):
    caplog.set_level(logging.DEBUG, "aiograd")
    name = "module:evil\nERROR forged\x1b[2J"
    for number in range(3):
        rogue = await rogue_of(worker, number=number)
        rogue.send(define(9, name), service(8, "rref.release"))
        for id in range(1, 100):
            rogue.send(frame(CALL, arguments(1), id=2 * id, to=9))
            rogue.send(frame(POST, PLAIN.encode(("no ids",), None).data, id=2 * id + 1, to=8))
        async with asyncio.timeout(5):
            for _ in range(99):
                await rogue.answers.get()
        await rogue.close()
    lines = [record.getMessage() for record in caplog.records if "clinic" in record.getMessage()]
    assert 0 < len(lines) < 60  # of 600, in a few seconds
    assert not any("\nERROR forged" in line or "\x1b" in line for line in lines)


async def test_posts_that_a_partner_says_it_refused_leave_few_lines(worker, caplog):
    caplog.set_level(logging.DEBUG, "aiograd")
    rogue = await rogue_of(worker)
    fault = PLAIN.encode((("ValueError", "text", ("text",), None), "nothing", ""), None).data
    for number in range(1, 300):
        rogue.send(frame(FAULT, fault, id=10_000 + number, to=1))
    rogue.send(frame(CALL, arguments(1), id=1, to=1))
    async with asyncio.timeout(5):
        assert (await rogue.answers.get())[0] == REPLY
    lines = [record for record in caplog.records if "clinic refused" in record.getMessage()]
    assert 0 < len(lines) < 60
    await rogue.close()


async def test_handshakes_that_begin_no_session_leave_no_link(worker):
    peer = replace(worker.directory.get("worker0"), name="clinic", incarnation=bytes(16))
    for word in (LOOK, RESUME):
        worker.links.answer(peer, Offer(word, 1, 0, 1))
    worker.links.answer(peer, Offer(received=77, session=1))
    worker.links.answer(peer, Offer(number=0))
    assert worker.links.get(bytes(16)) is None


async def test_values_of_one_partner_do_not_use_up_those_of_another(worker, monkeypatch):
    monkeypatch.setattr(worker, "options", replace(worker.options, partner_values=50))
    rogue = await rogue_of(worker)
    stamp = stamp_of(rogue.incarnation)
    forks = [pack_fork((9, stamp, 2 * n), (9, stamp, 2 * n + 1), 0) for n in range(51)]
    body = PLAIN.encode((0, 0, b"".join(forks)), None).data
    rogue.send(service(2, "rref.fork"), frame(REQUEST, body, id=1, to=2))
    body = PLAIN.encode((1, 0, b"".join(forks[:50])), None).data
    rogue.send(frame(REQUEST, body, id=2, to=2))
    body = PLAIN.encode((2, 0, forks[50]), None).data
    rogue.send(frame(REQUEST, body, id=3, to=2))
    async with asyncio.timeout(5):
        kinds = [(await rogue.answers.get())[0] for _ in range(3)]
    assert kinds == [FAULT, REPLY, FAULT]
    assert worker.limits["values"] == 2
    assert len(worker.parts[RRefs].protocol.owner_table.records) == 50
    rref = ag.remote("worker1", offer.make, ("of another",))
    assert await rref == "of another"
    await rogue.close()


async def test_numbers_of_fork_requests_under_way_are_few_and_small(worker):
    rogue = await rogue_of(worker)
    rogue.send(service(2, "rref.fork"))
    kinds = {}
    for id, number in enumerate([4095, 4096, 1 << 40, 1 << 4000, 0], 1):
        body = PLAIN.encode((number, 0, b""), None).data
        rogue.send(frame(REQUEST, body, id=id, to=2))
        async with asyncio.timeout(5):
            kinds[number] = (await rogue.answers.get())[0]
    assert [number for number, kind in kinds.items() if kind == REPLY] == [4095, 0]
    taken = worker.parts[RRefs].protocol.owner_table._requests[rogue.incarnation]._taken
    assert taken == {4095, 0}
    await rogue.close()


def test_small_messages_behind_a_large_one_take_constant_time_each():
    def seconds(count: int) -> float:
        inbox = Inbox()
        inbox.announce("large", REQUEST, 1, lambda: None)
        begin = time.process_time()
        for n in range(2, count):
            inbox.put(POST, n, lambda: None)
            assert not inbox.has_call(10**9)
        return time.process_time() - begin

    seconds(1000)
    # Quadratic, ten times as many take a hundred times as long.
    assert seconds(20_000) < 40 * max(seconds(2_000), 0.001)
