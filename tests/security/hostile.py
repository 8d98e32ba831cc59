"""Partners that choose incarnations, ids and sizes at will, beside an honest one.

    registry (restricted, small limits)
       ├── lab       an honest partner: its values, contexts and calls go on as if it were alone
       ├── clinic    a mole: sends whatever may read, change, delay or destroy what others hold
       └── mill      another one

A trial is a number of rounds. In each, every mole does everything in `MOVES` once, in an order and
with numbers drawn from the seed, while lab works. Moles know all ids, but make no calls with that
of lab's context: it is a secret of 48 bits, and who calls with it takes part. `Broken` is raised if

    a mole reads something of lab's, or a refusal of an incarnation or a name fails
    lab gets another answer than it should, an error, or one that is late (`SLOW`)
    a table grows beyond the share of a name, or the log beyond its rate
    something of a mole is left when it is gone and its lease is over
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

import aiograd as ag
from aiograd.dist.registry import ContextRegistry
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.ledger import SESSIONS_PER_LINK, SHARES
from aiograd.rref.refcount.records import pack_creation, pack_fork, pack_ids, stamp_of
from aiograd.rref.registry import RRefs
from aiograd.wire.handshake import make_incarnation
from aiograd.wire.messages import (
    BAGGAGE,
    CALL,
    CANCEL,
    CREDIT,
    FAULT,
    FORGET,
    ITEM,
    KEEP,
    PING,
    POST,
    REPLY,
    REQUEST,
    TRAVELLED,
)
from aiograd.wire.names import RANKS
from tests.security import partner_functions as offer
from tests.security.conftest import workers_by_mode
from tests.security.rogue import (
    PLAIN,
    Rogue,
    define,
    exposed,
    frame,
    large,
    service,
    with_label,
    with_token,
)
from tests.support.agents import SECRET
from tests.support.waiting import until

MARK: Final = "a secret of lab's, which no other partner reads"
SLOW: Final = 5.0  # seconds for anything that lab does
LEASE: Final = 0.5
PATIENCE: Final = 0.4  # of `transfer_watch`
NAMES: Final = ("clinic", "mill")
LIMITS: Final[dict[str, Any]] = {
    "partner_memory": 2 << 20,
    "inbound_budget": 16 << 20,
    "partner_links": 3,
    "partner_values": 64,
    "partner_contexts": 4,
    "partner_rate": 64 << 10,
    "max_inflight": 16,
    "threads": 4,
    "heartbeat": 0.05,
    "resume": 0.1,
    "lease": LEASE,
}
LINES: Final = 60  # log lines of a trial for each second of it, about all partners


class Broken(AssertionError):
    """A partner has hurt another one, or this worker."""


def need(condition: Any, why: str) -> None:
    if not condition:
        raise Broken(why)


# ── the honest partner ──────────────────────────────────────────────────────────────────────────


class Lab:
    """Works with the registry, and notices whatever is not as it should be."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.worker.make_current()
        self.kept: Any = None
        self.account: Any = None
        self.balance = 0
        self.number = 0

    async def begin(self) -> None:
        self.kept = ag.remote("worker0", offer.make, ([MARK, 0],))
        self.account = ag.remote("worker0", offer.Account, (0,))
        await self.kept.future()
        await self.account.future()

    async def work(self) -> None:
        """Everything that a partner does, once."""
        for step in (self._call, self._values, self._object, self._train, self._gather):
            try:
                async with asyncio.timeout(SLOW):
                    await step()
            except TimeoutError:
                raise Broken(f"lab waited for longer than {SLOW} s in {step.__name__}") from None
            except ag.errors.AiogradError as error:
                raise Broken(f"lab was refused in {step.__name__}: {error!r}") from error

    async def _call(self) -> None:
        self.number += 1
        need(await ag.rpc_async("worker0", offer.add, (self.number,)) == self.number + 1, "a sum")
        data = bytes([self.number % 256]) * 200_000
        need(await ag.rpc_async("worker0", offer.echo, (data,)) == [[data], {}], "an echo")

    async def _values(self) -> None:
        need(await self.kept == [MARK, 0], "a value that lab keeps was changed")
        rref = ag.remote("worker0", offer.make, ([MARK, self.number],))
        await rref.future()  # else the reply to its creation brings the value
        need(await rref == [MARK, self.number], "a new value of lab's is not the one that it made")
        await rref.release()

    async def _object(self) -> None:
        self.balance += 1
        found = await self.account.rpc_async().deposit(1)
        need(found == self.balance, f"somebody else used lab's object: {found}, not {self.balance}")

    async def _train(self) -> None:
        x = ag.tensor(np.full((1, 3), float(self.number)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker0", offer.project, (x,))
            await self.meanwhile(ctx.id)
            await ctx.backward(y.sum())
            need((ctx.gradients[x].numpy() == 1.0).all(), "a gradient of lab's is wrong")

    async def _gather(self) -> None:
        names = ("worker0", "worker1")
        root = self.registry.member.collectives.gather(0, names, SLOW, "gather")
        both = await asyncio.gather(
            root, self.worker.member.collectives.gather(self.number, names, SLOW, "gather")
        )
        need(both[0] == {"worker0": 0, "worker1": self.number}, "a gather of lab's is wrong")

    async def meanwhile(self, context: int) -> None:
        """What others do while a context is open."""
        self.context = context
        for mole in self.moles:
            await touch_contexts_of_others(mole)
        if self.moles:
            await asyncio.sleep(0.001)

    registry: Any = None
    context = 0
    moles: list[Mole] = []  # noqa: RUF012


# ── a partner that is not ───────────────────────────────────────────────────────────────────────


class Mole:
    """One partner's name, and all that it sends."""

    def __init__(self, name: str, rng: random.Random, registry: Any, lab: Lab) -> None:
        self.name, self.rng, self.registry, self.lab = name, rng, registry, lab
        self.links: list[Rogue] = []
        self.contexts: list[int] = []  # that it has opened
        self.rank = 40 + NAMES.index(name)

    @property
    def hub(self) -> Any:
        return self.registry.agent.runtime.network.memory

    async def connect(self, incarnation: bytes | None = None) -> Rogue | None:
        token = self.rng.randbytes(16)
        try:
            link = await Rogue.connect(
                self.hub,
                "memory:0",
                SECRET,
                name=self.name,
                rank=self.rng.choice([0, 1, self.rank, RANKS - 1]),
                incarnation=incarnation or make_incarnation(self.name, token),
            )
        except ConnectionError:
            return None
        functions = ("add", "echo", "hold", "wait", "make", "lend", "project", "hidden", "count")
        link.send(*[define(n, exposed(name)) for n, name in enumerate(functions, 1)])
        link.send(*[service(n, name) for n, name in enumerate(SERVICES, 20)])
        self.links.append(link)
        return link

    async def link(self) -> Rogue:
        """An open link, if there can be one."""
        self.links = [link for link in self.links if not link.ended.done()]
        if not self.links:
            async with asyncio.timeout(SLOW):
                while await self.connect() is None:
                    await asyncio.sleep(0.05)
        return self.rng.choice(self.links)

    def stamp(self, link: Rogue) -> int:
        return stamp_of(link.incarnation)

    def post(self, link: Rogue, name: str, *args: Any, kind: int = REQUEST) -> None:
        """Ask a service, whatever it answers."""
        link.sent += 1
        body = PLAIN.encode(args, None).data
        target = 20 + SERVICES.index(name)
        link.send(frame(kind, body, id=link.sent, to=target, budget=1e9))

    def call(
        self,
        link: Rogue,
        function: int,
        *args: Any,
        head: Callable[[bytes], bytes] = bytes,
        flags: int = 0,
        budget: float = 1e9,
    ) -> None:
        link.sent += 1
        body = head(PLAIN.encode((args, None), None).data)
        link.send(frame(CALL, body, flags=flags, id=link.sent, to=function, budget=budget))

    async def relieve(self) -> None:
        """End what the last move began, so that the next one is not refused for that."""
        offer.WAITING.set()
        for link in self.links:
            link.send(*[frame(CANCEL, id=number) for number in range(1, link.sent + 1)])
            for context in self.contexts:
                self.post(link, "context.release", context)
        account = self.registry.agent.accounts.of(self.name)
        try:
            await until(lambda: not any(each.running for each in account.calls), SLOW)
        except AssertionError:
            raise Broken(f"cancelled calls of {self.name} run on") from None
        offer.WAITING.clear()

    async def pause(self) -> None:
        """Let calls end, so that the next ones are not refused for their number."""
        account = self.registry.agent.accounts.of(self.name)
        for _ in range(100):
            if sum(len(each.running) for each in account.calls) < 4:
                return
            await asyncio.sleep(0.002)

    def read(self) -> None:
        """What has come must not be lab's."""
        for link in self.links:
            while not link.answers.empty():
                body = link.answers.get_nowait()[3]
                need(MARK.encode() not in body, f"{self.name} reads what is lab's")


SERVICES: Final = [
    "rref.fork",
    "rref.accept",
    "rref.release",
    "rref.audit",
    "rref.session",
    "rref.fetch",
    "rref.type",
    "rref.created",
    "rref.has",
    "rref.backward",
    "gradients",
    "gradients.failed",
    "gradients.abort",
    "gradients.outcomes",
    "gradients.waits",
    "context.release",
    "context.lost",
    "context.known",
    "context.graph",
    "cluster.place",
    "cluster.join",
    "cluster.coordinator",
    "cluster.elect",
    "cluster.term",
    "cluster.confirmed",
    "cluster.succeed",
    "cluster.welcome",
    "cluster.change",
    "cluster.roster",
    "cluster.leave",
    "cluster.dismiss",
    "cluster.report",
    "cluster.gather",
    "inspect",
    "inspect.all",
    "inspect.host",
    "inspect.record",
    "inspect.record.all",
    "inspect.stacks",
    "inspect.stacks.all",
    "progress",
]


# Every move: on one link of the mole, a flood or a trick. None of them waits for an answer.


async def come_in_many_incarnations(mole: Mole) -> None:
    for _ in range(6):
        await mole.connect()


async def come_as_another(mole: Mole) -> None:
    """With an incarnation that is lab's, the registry's, or shares their first half."""
    own = make_incarnation(mole.name, mole.rng.randbytes(16))
    agents = (mole.lab.worker.agent, mole.registry.agent)
    for incarnation in [agent.incarnation for agent in agents]:
        for forged in (incarnation, incarnation[:8] + own[8:]):
            need(await mole.connect(forged) is None, f"{mole.name} came as another worker")


async def come_and_go(mole: Mole) -> None:
    for _ in range(40):
        link = await mole.connect()
        if link is not None:
            link.transport.abort()
        await asyncio.sleep(0)


async def call_on_and_on(mole: Mole) -> None:
    link = await mole.link()
    for _ in range(120):
        mole.call(link, 3, "x" * mole.rng.choice([1, 1000, 30_000]))  # hold


async def block_threads(mole: Mole) -> None:
    link = await mole.link()
    for _ in range(30):
        mole.call(link, 4, 60.0)  # wait


async def abandon(mole: Mole) -> None:
    link = await mole.link()
    for _ in range(30):
        mole.call(link, 4, 60.0)
        link.send(frame(CANCEL, id=link.sent))


async def announce_and_send_nothing(mole: Mole) -> None:
    link = await mole.link()
    for _ in range(4):
        link.sent += 1
        size = mole.rng.choice([100, 100_000, 1 << 20, 3 << 20])
        announced, *chunks = large(CALL, link.sent, [bytes(size)], id=link.sent, to=1)
        link.send(announced, *chunks[: mole.rng.randrange(2)])


async def make_values(mole: Mole) -> None:
    link = await mole.link()
    for number in range(200):
        if number % 10 == 0:
            await mole.pause()
        ref = (mole.rank, mole.stamp(link), 10 * number + mole.rng.randrange(10))
        token = pack_creation(ref, b"y" * mole.rng.choice([0, 4000]))
        data = "v" * mole.rng.choice([1, 2000])
        mole.call(link, 5, data, head=lambda body, t=token: with_token(t, body), flags=KEEP)


async def borrow_values(mole: Mole) -> None:
    link = await mole.link()
    for number in range(200):
        if number % 10 == 0:
            await mole.pause()
        mole.call(link, 6, number)  # lend


async def create_under_ids_of_others(mole: Mole) -> None:
    link = await mole.link()
    for agent in (mole.lab.worker.agent, mole.registry.agent):
        stamp, next_id = stamp_of(agent.incarnation), _next_id(agent)
        for number in range(next_id, next_id + 30):
            token = pack_creation((agent.rank, stamp, number), b"")
            mole.call(link, 5, "poison", head=lambda body, t=token: with_token(t, body), flags=KEEP)


async def release_what_others_hold(mole: Mole) -> None:
    link = await mole.link()
    for agent in (mole.lab.worker.agent, mole.registry.agent):
        stamp, next_id = stamp_of(agent.incarnation), _next_id(agent)
        for first in (max(next_id - 30, 0), next_id):
            for number in range(first, first + 30):
                for fork in (number, number + 1):
                    ids = (agent.rank, stamp, number), (agent.rank, stamp, fork)
                    mark = mole.rng.randrange(2)
                    mole.post(link, "rref.release", pack_fork(*ids, mark))


async def use_what_others_hold(mole: Mole) -> None:
    link = await mole.link()
    for record in (mole.lab.kept.record, mole.lab.account.record):
        own = (mole.rank, mole.stamp(link), mole.rng.getrandbits(20))
        for fork in (record.fork, own):
            for known in (0, 1, 2):
                held = pack_fork(record.id, fork, known)
                mole.post(link, "rref.fork", mole.rng.randrange(9), 0, held)
                for name in ("fetch", "type", "created"):
                    mole.post(link, f"rref.{name}", held)
                mole.post(link, "rref.has", held, "deposit")
                mole.post(link, "rref.backward", held, mole.lab.context, False)
        mole.post(link, "rref.accept", pack_ids([record.fork, record.id]))
        mole.post(link, "rref.audit", pack_ids([record.fork]))
        # As an argument, in the name of its owner, of lab, and of ours.
        for info in (mole.registry.agent.info, mole.lab.worker.agent.info):
            for known in (0, 1, 2):
                forged = (*info.identity, record.id, own, known)
                mole.call(link, 2, flags=TRAVELLED, head=_rref_argument(forged))


async def abandon_creations(mole: Mole) -> None:
    link = await mole.link()
    for number in range(300):
        ids = (mole.rank, mole.stamp(link), 5000 + 2 * number)
        fork = (*ids[:2], ids[2] + 1)
        mole.post(link, "rref.release", pack_fork(ids, fork, 1))


async def request_forks(mole: Mole) -> None:
    link = await mole.link()
    stamp = mole.stamp(link)
    for number in range(100):
        own = (mole.rank, stamp, 9000)
        fork = (mole.rank, stamp, 9001 + number)
        mole.post(link, "rref.fork", number, 0, pack_fork(own, fork, 0))
        mole.post(link, "rref.fork", mole.rng.getrandbits(62), 0, b"")
    mole.post(link, "rref.session", mole.rng.getrandbits(62))


async def send_references(mole: Mole) -> None:
    """References to values of its own, whose releases it never answers."""
    link = await mole.link()
    for number in range(100):
        if number % 10 == 0:
            await mole.pause()
        ids = (mole.rank, mole.stamp(link), 20_000 + number)
        own = (mole.name, mole.rank, link.incarnation, ids, ids, 2)
        mole.call(link, 2, flags=TRAVELLED, head=_rref_argument(own))


async def open_contexts(mole: Mole) -> None:
    link = await mole.link()
    for number in range(30):
        if number % 10 == 0:
            await mole.pause()
        _in_context(mole, link, mole.rank << 48 | mole.rng.getrandbits(40), number + 1)


async def open_and_leave_contexts(mole: Mole) -> None:
    link = await mole.link()
    for _ in range(30):
        id = mole.rank << 48 | mole.rng.getrandbits(40)
        _in_context(mole, link, id, 0)
        mole.post(link, "context.release", id)


async def fill_a_context(mole: Mole, link: Rogue | None = None) -> None:
    link = link or await mole.link()
    id = mole.rank << 48 | mole.rng.getrandbits(40)
    for edge in range(1, 150):
        if edge % 10 == 0:
            await mole.pause()
        _in_context(mole, link, id, edge)
    invitation = (mole.name, mole.rank, link.incarnation, True, False, True)
    for number in range(70):
        of_pass = link.rank << 48 | number
        gradient = np.ones(mole.rng.choice([1, 2000]))
        body = ([(number, [gradient], None)], None, (0, 0), 1)
        mole.post(link, "gradients", id, of_pass, None, body, kind=POST)  # never invited
        mole.post(link, "gradients", id, of_pass + 500, invitation, ([], [1, 2], (0, 0), 1))
        mole.post(link, "gradients.abort", id, of_pass + 1000, link.incarnation, _FAULT)
        mole.post(link, "gradients.abort", id, number, link.incarnation, _FAULT)
    report = (link.incarnation, mole.name, 1, 1, -1, (), tuple(range(3000)))
    mole.post(link, "gradients.outcomes", id, [report])


async def touch_contexts_of_others(mole: Mole) -> None:
    link, id = await mole.link(), mole.lab.context
    lab = mole.lab.worker.agent
    body = ([], None, (1, 0), 1)
    invitation = (lab.name, lab.rank, lab.incarnation, True, False, True)
    for name in ("release", "known", "graph"):
        mole.post(link, f"context.{name}", id)
    mole.post(link, "context.lost", lab.name, lab.incarnation, [id])
    for number in range(lab.rank << 48, (lab.rank << 48) + 3):
        mole.post(link, "gradients", id, number, invitation, body)
        mole.post(link, "gradients.abort", id, number, lab.incarnation, _FAULT)
        mole.post(link, "gradients.failed", id, number, lab.name, "", _FAULT)
        mole.post(link, "gradients.outcomes", id, [(lab.incarnation, lab.name, 9, 9, 9, (), ())])
    mole.post(link, "gradients.waits", id)


async def join(mole: Mole) -> None:
    """As a member like any other: then it may begin passes of its own."""
    link = await mole.link()
    peer = PeerInfo(mole.name, link.rank, link.incarnation, (), restricted=True)
    _post_with_peer(mole, link, "cluster.join", peer, None, ())
    await asyncio.sleep(0.01)
    await fill_a_context(mole, link)


def _post_with_peer(mole: Mole, link: Rogue, name: str, *args: Any) -> None:
    """Ask a service with the description of a worker among its arguments."""
    (peer,) = [each for each in args if isinstance(each, PeerInfo)]
    facts = tuple(getattr(peer, field.name) for field in dataclasses.fields(peer))
    inner = PLAIN.encode(facts, None).data
    tagged = b"T" + (4).to_bytes(4, "little") + b"peer" + inner
    plain = tuple(facts if each is peer else each for each in args)
    body = PLAIN.encode(plain, None).data.replace(inner, tagged, 1)
    link.sent += 1
    to = 20 + SERVICES.index(name)
    link.send(frame(REQUEST, body, flags=TRAVELLED, id=link.sent, to=to, budget=1e9))


async def disturb_the_cluster(mole: Mole) -> None:
    link = await mole.link()
    registry, lab = mole.registry.agent, mole.lab.worker.agent
    own, other = (registry.name, registry.incarnation), (lab.name, lab.incarnation)
    me = (mole.name, link.incarnation)
    for name in ("coordinator", "roster", "leave"):
        mole.post(link, f"cluster.{name}")
    for named in (True, False) * 20:
        mole.post(link, "cluster.place", named, mole.rng.choice(["", "key"]))
    term = mole.rng.choice([1, 1 << 31, 1 << 4000])
    for peer in (lab.info, registry.info):
        _post_with_peer(mole, link, "cluster.elect", term, 1 << 60, peer)
        mole.post(link, "cluster.succeed", (term << 32) + 1, [], [(tuple(peer.identity), "")])
    for name in ("", ".all", ".stacks", ".stacks.all"):
        mole.post(link, f"inspect{name}")
    mole.post(link, "inspect.host", [lab.incarnation.hex()])
    for name in ("record", "record.all"):
        mole.post(link, f"inspect.{name}", 60.0)
    mole.post(link, "progress", [(1, 1, "x" * 10_000, 1, 2)] * 20)
    mole.post(link, "cluster.welcome", 99, [], True, 65535)
    mole.post(link, "cluster.change", None)
    mole.post(link, "cluster.dismiss", True, 0.0)
    mole.post(link, "cluster.report", 0, 0)
    for peer in (lab.info, registry.info):
        mole.post(link, "cluster.join", tuple(peer.identity), None)
    for group in ((own, other), (own, me), (own, me, other), (own, me, ("lab", np.ones(2))), (me,)):
        for _ in range(30):
            mole.post(link, "cluster.gather", group, "x" * 100)


async def send_anything(mole: Mole) -> None:
    link = await mole.link()
    rng = mole.rng
    values = [None, -1, 1 << 70, "x", b"x" * 41, [], (), {"a": 1}, np.ones(2), float("nan")]
    for name in SERVICES:
        for _ in range(3):
            args = [rng.choice(values) for _ in range(rng.randrange(6))]
            mole.post(link, name, *args, kind=rng.choice([REQUEST, POST]))
    for kind in (REPLY, FAULT, ITEM):
        link.send(frame(kind, PLAIN.encode(None, None).data, id=rng.randrange(99)))
    link.send(frame(CREDIT, id=rng.randrange(99), to=1 << 31), frame(PING, id=0))
    for number in range(100, 100 + 50):
        link.send(define(number, f"module:{'n' * 900}{number}"))
    link.send(frame(FORGET, to=100))


async def break_the_protocol(mole: Mole) -> None:
    link = await mole.link()
    link.send(mole.rng.choice([b"\0" * 64, frame(CALL, id=0, to=77), frame(CALL, b"x", id=0)]))
    await asyncio.sleep(0)


async def fill_the_log(mole: Mole) -> None:
    link = await mole.link()
    for number in range(300):
        mole.call(link, 8, number)  # hidden: refused
        mole.post(link, "rref.release", "no ids", kind=POST)


MOVES: Final = [
    come_in_many_incarnations,
    come_as_another,
    come_and_go,
    call_on_and_on,
    block_threads,
    abandon,
    announce_and_send_nothing,
    make_values,
    borrow_values,
    create_under_ids_of_others,
    release_what_others_hold,
    use_what_others_hold,
    abandon_creations,
    request_forks,
    send_references,
    open_contexts,
    open_and_leave_contexts,
    fill_a_context,
    touch_contexts_of_others,
    join,
    disturb_the_cluster,
    send_anything,
    break_the_protocol,
    fill_the_log,
]
_FAULT: Final = ("ValueError", "x", None, None)


def _next_id(agent: Any) -> int:
    """The number of the next reference that a worker makes."""
    protocol = agent.parts[RRefs].protocol
    return int(protocol.new_id()[2]) + 1


def _rref_argument(data: Any) -> Callable[[bytes], bytes]:
    """The body of a call whose only argument is a reference."""
    inner = b"T" + (4).to_bytes(4, "little") + b"rref" + PLAIN.encode(data, None).data
    body = b"t" + (2).to_bytes(4, "little") + b"t" + (1).to_bytes(4, "little") + inner + b"0"
    return lambda _: body


def _in_context(mole: Mole, link: Rogue, context: int, edge: int) -> None:
    if context not in mole.contexts:
        mole.contexts.append(context)
    mole.call(
        link, 2, "x" * 100, head=lambda body: with_label(context, edge, 1, body), flags=BAGGAGE
    )


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def sizes(registry: Any, name: str) -> dict[str, tuple[int, int]]:
    """What one partner has in the tables of a worker, and how much of it there may be."""
    agent, options = registry.agent, registry.agent.options
    protocol = agent.parts[RRefs].protocol
    contexts = agent.parts[ContextRegistry]
    links = [link for link in agent.links.all() if link.peer.name == name]
    starts = {link.peer.incarnation for link in links} | protocol.leased(name)
    account = agent.accounts.of(name)
    executions = list(account.calls)
    open_contexts = [each for each in contexts.all() if each.brought_by == name]
    edges = sum(
        node.peer == name for context in contexts.all() for node in context.receives.values()
    )
    calls = sum(len(each.running) for each in executions)
    most = options.max_inflight
    share = agent.thread_shares.of(name)
    shares = {what: (account.counts[what], SHARES[what](options)) for what in SHARES}
    return shares | {
        "memory": (account.used, options.partner_memory),
        "links": (
            sum(link.peer.name == name for link in agent.links.table.values()),
            options.partner_links,
        ),
        "calls": (calls, most * (4 + 1)),  # requests of the library, and calls
        "abandoned": (sum(each.abandoned for each in executions), 2 * most),
        "threads": (share.running, options.threads // 2),
        "held back": (sum(len(link.callee.held) for link in links), options.partner_memory // 256),
        "values": (protocol.owner_table.kept_for(starts), options.partner_values),
        "contexts open": (len(open_contexts), options.partner_contexts),
        "edges in contexts": (edges, SHARES["edges"](options)),
        "references here": (
            sum(each.owner.name == name for each in protocol.user_table.records.values()),
            SHARES["references"](options),
        ),
        "fork requests": (
            sum(
                len(protocol.owner_table._requests[each]._taken)
                for each in starts
                if each in protocol.owner_table._requests
            ),
            4096 * options.partner_links,
        ),
        "functions": (
            max((len(link.receiver._targets) for link in links), default=0),
            4098,
        ),
        "gathers": (
            sum(each.name == name for each in registry.member.collectives._pending),
            64,
        ),
        "leases": (len(protocol.leased(name)), (SESSIONS_PER_LINK + 1) * options.partner_links),
        "losses": (sum(key[0] == name for key in agent.links.losses), 1000),
    }


def check_tables(registry: Any) -> None:
    agent = registry.agent
    for name in NAMES:
        for what, (size, most) in sizes(registry, name).items():
            need(size <= most, f"{name} has {size} {what}, more than {most}")
    used = sum(agent.accounts.of(name).used for name in (*NAMES, "worker1"))
    need(agent.budget.used <= used, "memory is used in nobody's name")


# ── a trial ─────────────────────────────────────────────────────────────────────────────────────


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.count: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.count[record.name] += 1


@contextlib.contextmanager
def _logged() -> Iterator[Counter[str]]:
    lines, log = _Lines(), logging.getLogger("aiograd")
    level, propagate = log.level, log.propagate
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield lines.count
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
        log.propagate = propagate


async def trial(seed: int, rounds: int = 1, moves: list[Any] = MOVES) -> dict[str, int]:
    """Let moles do their worst; raise Broken if that concerns anybody else. Returns the limits."""
    rng = random.Random(seed)
    offer.WAITING.clear()
    loop = asyncio.get_running_loop()
    with _logged() as lines:
        async with workers_by_mode("restricted", "restricted", **LIMITS) as (registry, worker):
            try:
                began = loop.time()
                untried = registry.agent.services.keys() - set(SERVICES)
                need(not untried, f"no mole tries {untried}")
                lab = Lab(worker)
                lab.registry = registry
                await lab.begin()
                await lab.work()
                moles = [Mole(name, rng, registry, lab) for name in NAMES]
                lab.moles = moles if touch_contexts_of_others in moves else []
                for _ in range(rounds):
                    for move in rng.sample(moves, len(moves)):
                        for mole in rng.sample(moles, len(moles)):
                            await move(mole)
                        await asyncio.sleep(0)
                        check_tables(registry)
                        await lab.work()
                        check_tables(registry)
                        for mole in moles:
                            mole.read()
                            if rng.random() < 0.7:
                                await mole.relieve()
                seconds = loop.time() - began
                written = sum(lines.values())
                need(written <= LINES * (seconds + 2), f"{written} log lines in {seconds:.1f} s")
                names = [info.name for info in registry.workers() if info.name not in NAMES]
                need(names == ["worker0", "worker1"], f"members are {names}")
                next_rank = registry.coordinator._membership.next_rank("newcomer")
                need(next_rank is not None and next_rank < 10, f"the next rank is {next_rank}")
                need(registry.member.coordinator is None, "another worker leads")
                need(worker.member.leader.name == "worker0", "lab follows another worker")
                await _slow_ones_are_refused(registry, moles)
                await _go(registry, moles)
                await lab.work()
                return dict(registry.agent.limits.as_dict())
            finally:
                offer.WAITING.set()


async def _slow_ones_are_refused(registry: Any, moles: list[Mole]) -> None:
    """A large message of which nothing comes is refused, and its memory is given back."""
    mole = moles[0]
    link = await mole.link()
    link.sent += 1
    link.send(large(CALL, link.sent, [bytes(70_000)], id=link.sent, to=1)[0])
    before = registry.agent.limits["partner_rate"]
    try:
        await until(lambda: registry.agent.limits["partner_rate"] > before, 10 * PATIENCE)
    except AssertionError:
        if not link.ended.done():
            raise Broken("a message that never comes occupies its memory for ever") from None


async def _go(registry: Any, moles: list[Mole]) -> None:
    """The moles leave, and nothing of theirs stays."""
    offer.WAITING.set()
    for mole in moles:
        for link in mole.links:
            if not link.ended.done():
                await link.close()
    left: dict[str, Any] = {}

    def over() -> bool:
        left.clear()
        gc.collect()
        for mole in moles:
            registry.agent.accounts.settle()
            found = sizes(registry, mole.name)
            # Losses are remembered, a bounded number of them.
            left.update(
                {f"{mole.name}: {k}": v[0] for k, v in found.items() if v[0] and k != "losses"}
            )
        return not left

    try:
        await until(over, 10 * LEASE + SLOW)
    except AssertionError:
        raise Broken(f"when the moles are gone, this is left: {left}") from None
