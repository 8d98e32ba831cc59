"""What is whose: a partner neither reads, changes nor ends what another one holds, and its requests
have the form that the library gives them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cluster.membership.roster import Update
from aiograd.dist.travellers import TensorTraveller
from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rpc.callee.exposure import find_exposed
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Arrival
from aiograd.rpc.link.ledger import SHARES
from aiograd.rref.refcount.records import pack_fork, pack_ids, stamp_of
from aiograd.rref.registry import RRefs
from aiograd.wire.handshake import make_incarnation
from aiograd.wire.messages import FAULT, REPLY, REQUEST
from aiograd.wire.names import RANKS
from aiograd.wire.safecodec import DECODED
from tests.security import partner_functions as offer
from tests.security.rogue import PLAIN, Rogue, frame, service
from tests.support.agents import SECRET
from tests.support.waiting import until


@pytest.fixture
async def registry(workers: Any, caplog: pytest.LogCaptureFixture) -> AsyncIterator[ag.Worker]:
    """A coordinator that takes everybody for a partner, with one member, lab (worker1)."""
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with workers("restricted", "restricted") as (first, lab):
        lab.make_current()
        yield first


async def clinic(worker: ag.Worker, **terms: Any) -> Rogue:
    """A partner that sends what it likes."""
    network = worker.agent.runtime.network.memory
    return await Rogue.connect(network, "memory:0", SECRET, name="clinic", rank=7, **terms)


async def ask(rogue: Rogue, name: str, *args: Any) -> int:
    """The kind of the answer of a service."""
    rogue.sent += 1
    body = PLAIN.encode(args, None).data
    rogue.send(service(rogue.sent, name), frame(REQUEST, body, id=rogue.sent, to=rogue.sent))
    async with asyncio.timeout(5):
        return (await rogue.answers.get())[0]


def lab_of(worker: ag.Worker) -> PeerInfo:
    found = worker.agent.directory.get("worker1")
    assert found is not None
    return found


# ── incarnations ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [8, 16])
async def test_nobody_comes_with_the_incarnation_of_another_worker(registry, size):
    own = make_incarnation("clinic", bytes(range(16)))
    for other in (lab_of(registry), registry.agent.info):
        with pytest.raises(ConnectionError):
            await clinic(registry, incarnation=other.incarnation[:size] + own[size:])
    await (await clinic(registry, incarnation=own)).close()


# ── references ──────────────────────────────────────────────────────────────────────────────────


async def test_references_are_not_released_before_their_creator_made_them(registry):
    rogue, lab = await clinic(registry), lab_of(registry)
    stamp = stamp_of(lab.incarnation)
    ahead = [((1, stamp, n), (1, stamp, n + 1), 1) for n in range(100)]
    forks = b"".join(pack_fork(*each) for each in ahead)
    assert await ask(rogue, "rref.release", forks) == FAULT
    rref = ag.remote("worker0", offer.make, ("of lab",))
    assert await rref == "of lab"
    await rogue.close()


async def test_references_that_this_worker_makes_are_not_released_in_advance(registry):
    rogue = await clinic(registry)
    own = stamp_of(registry.agent.incarnation)
    forks = b"".join(pack_fork((0, own, n), (0, own, n), 1) for n in range(100))
    assert await ask(rogue, "rref.release", forks) == FAULT
    registry.make_current()
    assert await ag.remote("worker0", offer.make, ("ours",)) == "ours"
    await rogue.close()


async def test_values_of_others_are_neither_fetched_nor_claimed_nor_created_ahead(registry):
    rogue, lab = await clinic(registry), lab_of(registry)
    rref = ag.remote("worker0", offer.make, (["of lab"],))
    await rref.future()
    record = rref.record
    held = pack_fork(record.id, record.fork, 1)
    mine = pack_fork(record.id, (7, stamp_of(rogue.incarnation), 1), 0)
    for name in ("fetch", "created", "type"):
        assert await ask(rogue, f"rref.{name}", held) == FAULT
        assert await ask(rogue, f"rref.{name}", mine) == FAULT
    for fork in (held, mine):
        assert await ask(rogue, "rref.fork", 0, 0, fork) == FAULT
        assert await ask(rogue, "rref.release", held) == FAULT
    table = registry.agent.parts[RRefs].protocol.owner_table
    assert list(table.records[record.id].forks.values()) == [lab.incarnation]
    assert await rref == ["of lab"]
    await rogue.close()


async def test_what_is_refused_is_counted_and_logged_once_with_the_name_of_its_sender(
    registry, caplog
):
    caplog.set_level(logging.WARNING, "aiograd")
    rogue = await clinic(registry)
    assert await ask(rogue, "rref.release", b"no ids") == FAULT
    assert await ask(rogue, "cluster.dismiss", True, None) == FAULT
    assert registry.agent.limits["refused"] == 2
    lines = [record for record in caplog.records if record.name == "aiograd.security"]
    assert len(lines) == 2
    assert "refused 'rref.release' of clinic" in lines[0].getMessage()
    await rogue.close()


async def test_malformed_questions_about_a_value_of_its_own_are_refused(registry):
    rogue = await clinic(registry)
    own = pack_fork((7, stamp_of(rogue.incarnation), 1), (7, stamp_of(rogue.incarnation), 2), 0)
    for name in (None, 7, b"deposit", ["deposit"]):
        assert await ask(rogue, "rref.has", own, name) == FAULT
    for retain in (None, 1, "yes", np.ones(2)):
        assert await ask(rogue, "rref.backward", own, 5, retain) == FAULT
    await rogue.close()


async def test_an_audit_tells_a_partner_nothing_of_forks_that_it_did_not_send(registry):
    rogue, lab = await clinic(registry), lab_of(registry)
    stamp = stamp_of(rogue.incarnation)
    assert await ask(rogue, "rref.audit", pack_ids([(7, stamp, 1)])) == REPLY
    assert await ask(rogue, "rref.audit", pack_ids([(1, stamp_of(lab.incarnation), 1)])) == FAULT
    await rogue.close()


BROKEN_IDS = [None, 7, "text", b"1", b"x" * 50, [b""], {"a": 1}]


@pytest.mark.parametrize("data", BROKEN_IDS, ids=repr)
async def test_malformed_messages_about_references_are_refused(registry, data):
    rogue = await clinic(registry)
    for name in ("rref.accept", "rref.release", "rref.audit", "rref.fetch"):
        assert await ask(rogue, name, data) == FAULT
    assert await ask(rogue, "rref.fork", 0, 0, data) == FAULT
    assert await ask(rogue, "rref.fork", 1 << 4000, 0, b"") == FAULT
    assert await ask(rogue, "rref.fork", 0, -1, b"") == FAULT
    assert await ask(rogue, "rref.session", 1 << 4000) == FAULT
    await rogue.close()


# ── the cluster ─────────────────────────────────────────────────────────────────────────────────


def own_info(rogue: Rogue, **other: Any) -> tuple[Any, ...]:
    facts = {"name": "clinic", "rank": 7, "incarnation": rogue.incarnation, "addresses": ()}
    facts |= {"restricted": True, "exceptions": (), "host": "", "locality": "", "labels": ()}
    facts |= other
    return tuple(facts.values())


def join_frame(rogue: Rogue, facts: tuple[Any, ...], world_size: Any) -> bytes:
    body = PLAIN.encode((facts, world_size, ()), None).data
    # A PeerInfo travels as a traveller "peer" around the tuple of its fields.
    inner = PLAIN.encode(facts, None).data
    tagged = b"T" + len(b"peer").to_bytes(4, "little") + b"peer" + inner
    return body.replace(inner, tagged, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 1 << 200},
        {"rank": 1 << 16},
        {"rank": -1},
        {"rank": 8},  # not the one of the handshake
        {"name": "a b/../c"},
        {"incarnation": b"short"},
        {"addresses": ("memory:x",) * 1000},
        {"addresses": ("x" * 2000,)},
        {"host": "x" * 2000},
        {"labels": ("no value",)},
        {"labels": ("a=b",) * 1000},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_a_malformed_member_does_not_join_and_others_still_can(registry, workers, other):
    rogue = await clinic(registry)
    rogue.sent += 1
    body = join_frame(rogue, own_info(rogue, **other), None)
    rogue.send(service(1, "cluster.join"), frame(REQUEST, body, id=1, to=1))
    async with asyncio.timeout(5):
        assert (await rogue.answers.get())[0] == FAULT
    assert await ask(rogue, "cluster.place", True, "") == REPLY
    assert [info.name for info in registry.workers()] == ["worker0", "worker1"]
    await rogue.close()


async def test_refused_joins_of_a_partner_leave_few_lines(registry, caplog):
    caplog.set_level(logging.INFO, "aiograd")
    rogue = await clinic(registry)
    body = join_frame(rogue, own_info(rogue), 5)  # another world size than ours
    rogue.send(service(1, "cluster.join"))
    for number in range(1, 201):
        rogue.send(frame(REQUEST, body, id=number, to=1))
        async with asyncio.timeout(5):
            assert (await rogue.answers.get())[0] == FAULT
    lines = [record for record in caplog.records if "refused clinic" in record.getMessage()]
    assert 0 < len(lines) < 60  # of 200, in a few seconds
    await rogue.close()


async def test_one_name_uses_one_rank_however_often_it_asks(registry):
    rogue = await clinic(registry)
    for _ in range(100):
        assert await ask(rogue, "cluster.place", True, "") == REPLY
    assert registry.coordinator._membership.next_rank("next") == 3
    await rogue.close()


async def test_a_partner_that_wants_new_names_gets_the_rank_of_its_own(registry):
    rogue = await clinic(registry)
    for _ in range(100):
        assert await ask(rogue, "cluster.place", False, "") == REPLY
    assert registry.coordinator._membership.next_rank("next") == 3
    await rogue.close()


async def test_a_partner_does_not_take_the_place_of_a_worker_of_an_engine(registry):
    rogue = await clinic(registry)
    registry.coordinator.assign = lambda key: ("worker9", 9)
    assert await ask(rogue, "cluster.place", True, "tcp://10.0.0.1:40000") == FAULT
    await rogue.close()


async def test_a_partner_does_not_put_its_link_to_sleep(workers):
    """Nobody would notice that it is gone, and what it holds would stay."""
    async with workers("restricted", "trusted") as (first, second):
        links = [
            here.agent.links.get(there.agent.incarnation)
            for here, there in ((first, second), (second, first))
        ]
        for link in links:
            assert link.restricted
            connection = link.connection
            link.sleep_received(link.session.received, link.session.number & 0xFFFFFFFF)
            await asyncio.sleep(0)
            assert link.connection is connection


async def test_a_partner_that_joins_with_the_last_rank_leaves_the_others(registry):
    network = registry.agent.runtime.network.memory
    rogue = await Rogue.connect(network, "memory:0", SECRET, name="clinic", rank=RANKS - 1)
    rogue.sent += 1
    body = join_frame(rogue, own_info(rogue, rank=RANKS - 1), None)
    rogue.send(service(1, "cluster.join"), frame(REQUEST, body, id=1, to=1))
    await until(lambda: len(registry.workers()) == 3)
    assert registry.coordinator._membership.next_rank("next") == 2
    await rogue.close()


async def test_a_malformed_group_of_a_gather_is_refused_and_losses_are_announced(registry):
    rogue = await clinic(registry)
    own = (registry.agent.name, registry.agent.incarnation)
    me = ("clinic", rogue.incarnation)
    for group in (
        (own, me, ("lab", np.ones(3))),
        (own, me, (np.ones(3), bytes(16))),
        [own, me],
        (own, me, me),
        (me, own),  # led elsewhere
        (me,),
        (),
        None,
    ):
        assert await ask(rogue, "cluster.gather", group, 1) == FAULT
    assert list(registry.member.collectives._pending) == []
    await rogue.close()


async def test_a_partner_waits_in_a_bounded_number_of_gathers(registry, monkeypatch):
    monkeypatch.setitem(SHARES, "gathers", lambda options: 3)
    rogue = await clinic(registry)
    own, me = (registry.agent.name, registry.agent.incarnation), ("clinic", rogue.incarnation)
    body = PLAIN.encode(((own, me), "value"), None).data
    rogue.send(service(1, "cluster.gather"))
    rogue.send(*[frame(REQUEST, body, id=n, to=1) for n in range(1, 5)])
    async with asyncio.timeout(5):
        assert (await rogue.answers.get())[0] == FAULT
    assert registry.agent.limits["gathers"] == 1
    await rogue.close()


async def test_a_failure_of_the_coordinator_does_not_stop_its_announcements(workers, monkeypatch):
    async with workers("trusted", "trusted", "trusted") as (first, second, third):

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(first.member.collectives, "gone", fail)
        await third.close(graceful=False)
        await until(lambda: len(second.workers()) == 2)
        assert [each.name for each in second.workers()] == ["worker0", "worker1"]


async def test_a_malformed_change_of_the_roster_changes_nothing(registry):
    lab = ag.workers()
    member = registry.member
    good = PeerInfo("clinic", 7, bytes(16))
    for bad in (
        "no peer",
        PeerInfo("clinic", 1 << 20, bytes(16)),
        PeerInfo("c l", 7, bytes(16)),
        PeerInfo("clinic", 7, b"short"),
    ):
        for update in (
            Update(9, joined=(good, bad)),
            Update(9, left=(bad,)),
            Update(9, lost=((bad, "why"),)),
        ):
            member.coordinator = lab_of(registry)
            with pytest.raises(ProtocolError):
                member._on_change(lab_of(registry), update)
    member.coordinator = None
    assert ag.workers() == lab


# ── objects and models ──────────────────────────────────────────────────────────────────────────


class Vault(ag.Tensor):
    """A class that nobody makes without its constructor."""


@pytest.mark.parametrize("restricted", [True, False])
def test_a_tensor_of_a_partner_is_a_plain_one(restricted):
    arrival = Arrival(PeerInfo("peer", 1, bytes(16)), "call", restricted)
    arrived = TensorTraveller().arrive((np.ones(2), 0, Vault, None), arrival)
    assert type(arrived) is (ag.Tensor if restricted else Vault)


@pytest.mark.parametrize("name", ["c32", "<c32", "<f16", "g", "O", "V99", "<M8", 7, None.__class__])
def test_a_tensor_does_not_grow_by_its_dtype(name):
    arrival = Arrival(PeerInfo("peer", 1, bytes(16)), "call", True)
    with pytest.raises(ProtocolError, match="dtype"):
        TensorTraveller().arrive((np.ones(2), 0, None, name), arrival)


def test_a_tensor_that_a_hook_narrowed_counts_as_it_is_here():
    arrival = Arrival(PeerInfo("peer", 1, bytes(16)), "call", True)
    arrived = TensorTraveller().arrive((np.ones(1000, np.int8), 0, None, "<f8"), arrival)
    assert arrived.raw.nbytes == 8000
    value = PLAIN.encode([1, 2], None)
    PLAIN.decode(value.data, (), False, arrival)
    assert arrival.scratch[DECODED] >= 7000


def test_an_exposed_method_is_not_found_by_its_name_alone():
    account = f"{offer.__name__}:Account"
    assert find_exposed(account) is offer.Account
    for method in ("deposit", "later", "named"):
        assert find_exposed(f"{account}.{method}") is None
    assert find_exposed(f"{account}.double") is offer.Account.double  # static: it has no self


async def test_a_partner_learns_nothing_of_the_graph_behind_its_edges(workers):
    async with workers("restricted", "restricted") as (first, _):
        first.make_current()
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            graph = await ctx.graph()
            there = [node for node in graph.nodes if node.worker == "worker1"]
            assert {node.kind for node in there} <= {"send", "recv"}
            assert await first.agent.request("worker1", "context.known", ctx.id)
            assert not await first.agent.request("worker1", "context.known", 5)
            await ctx.backward(y.sum())


async def test_what_is_not_allowed_is_told_by_its_own_error(workers):
    async with workers("restricted", "restricted") as (first, _):
        with pytest.raises(NotAllowed):
            await first.agent.request("worker1", "rref.audit", pack_ids([(1, 2, 3)]))
