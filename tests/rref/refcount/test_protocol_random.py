"""Any interleaving, loss, copy and death: no living holder's value is freed, nothing is left.

A world of workers and a bag of messages, driven by hypothesis. Calls are carried once or thrown
away on arrival; control messages are repeated until answered, so any number of copies may arrive in
any order, also after the answer. `AIOGRAD_EXAMPLES` sets the number of runs.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiograd.errors import AiogradError, OwnerLost, RRefError, RRefExpired
from aiograd.rpc.directory import PeerInfo
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import (
    UNKNOWN_SITE,
    OwnerRecord,
    RefId,
    Use,
    UserRecord,
    stamp_of,
)

WORKERS = 4


@dataclass(eq=False)
class Message:  # compared by identity, like every message under way
    """One thing under way. Control messages stay in the bag until their answer came."""

    kind: str
    source: Node
    to: Node
    body: Any = None
    answered: bool = False  # the sender has its answer; what is left are copies
    number: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class Node:
    """One start of one worker, with what its user code holds."""

    protocol: Protocol
    alive: bool = True
    refs: list[OwnerRecord | UserRecord] = field(default_factory=list)  # in the hands of user code
    arriving: list[UserRecord] = field(default_factory=list)  # not confirmed, so not visible yet
    losses: dict[int, PeerInfo] = field(default_factory=dict)  # whose leases are not over

    @property
    def me(self) -> PeerInfo:
        return self.protocol.me


class World:
    """Workers, and the messages between them."""

    def __init__(self) -> None:
        self.starts = 0
        self.nodes: list[Node] = []  # every start ever
        self.bag: list[Message] = []
        # Creating functions; None: the session in which they were called is lost.
        self.running: list[tuple[Node | None, Node, UserRecord | OwnerRecord]] = []
        self.excused: set[RefId] = set()  # references hit by an expiry or a given-up creation

    def start(self, rank: int) -> Node:
        self.starts += 1
        incarnation = self.starts.to_bytes(8, "big") + bytes(8)
        node = Node(Protocol(PeerInfo(f"worker{rank}", rank, incarnation)))
        self.nodes.append(node)
        return node

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def node_of(self, incarnation: bytes) -> Node:
        return next(node for node in self.nodes if node.me.incarnation == incarnation)

    def send(self, kind: str, source: Node, to: Node, body: Any = None) -> None:
        self.meet(source, to)
        self.bag.append(Message(kind, source, to, body))

    def meet(self, one: Node, two: Node) -> None:
        """Begin a new session, if the one before was lost."""
        for node, other in ((one, two), (two, one)):
            if other.alive and node.alive:
                number = node.protocol.returned(other.me.incarnation)
                if number is not None:
                    other.protocol.session_begun(node.me, number)

    # ── user code ───────────────────────────────────────────────────────────────────────────

    def remote(self, creator: Node, owner: Node) -> None:
        protocol = creator.protocol
        ref: OwnerRecord | UserRecord = (
            protocol.create_here() if creator is owner else protocol.create(owner.me)
        )
        creator.refs.append(ref)
        self.send("creation", creator, owner, ref)

    def share(self, source: Node, ref: OwnerRecord | UserRecord, to: Node) -> None:
        try:
            data = source.protocol.depart(ref, to.me)
        except AiogradError:
            return  # a use that must fail; whether it may is checked elsewhere
        self.send("call", source, to, data)

    def drop(self, node: Node, ref: OwnerRecord | UserRecord) -> None:
        node.refs.remove(ref)
        if isinstance(ref, UserRecord):
            node.protocol.user_table.drop(ref)
        elif ref.local_refs:
            node.protocol.owner_table.drop(ref)

    def give_up_creation(self, node: Node, ref: OwnerRecord | UserRecord) -> None:
        error = RRefError("RRef creation timed out")
        if isinstance(ref, UserRecord):
            if ref.use is Use.CREATING:
                self.excused.add(ref.id)
                node.protocol.user_table.answered(ref, error)
        elif ref.creator_error is None and ref.id in ref.forks:
            self.excused.add(ref.id)
            node.protocol.created_here(ref, error)

    # ── the network ─────────────────────────────────────────────────────────────────────────

    def flush(self, node: Node) -> None:
        for batch in node.protocol.user_table.take():
            to = self.node_of(batch.to.incarnation)
            for kind in ("forks", "accepts", "releases"):
                if body := getattr(batch, kind):
                    message = Message(kind, node, to, body)
                    if kind == "forks":
                        body[:] = [held for held in body if held.use is Use.CONFIRMING]
                        message.number = node.protocol.user_table.number(to.me)
                        self.meet(node, to)
                    if to.alive and to.me.incarnation not in node.protocol.unreachable:
                        self.bag.append(message)
                    else:
                        self.failed(message)

    def failed(self, message: Message) -> None:
        """The receiver is gone, as far as the sender knows."""
        user_table = message.source.protocol.user_table
        message.answered = True
        if message.kind == "forks":
            user_table.close(message.to.me, message.number[0])
            for held in message.body:
                user_table.answered(held, OwnerLost(message.to.me.name))
        elif message.kind == "releases":
            for held in message.body:
                user_table.released(held)

    def deliver(self, message: Message, keep: bool) -> None:
        """Let a message arrive. `keep` leaves a copy, where the shell would repeat it."""
        control = message.kind in ("forks", "accepts", "releases")
        if not keep or not control:
            self.bag.remove(message)
        if not message.to.alive:
            return
        getattr(self, f"on_{message.kind}")(message)
        if control and not keep and not message.answered and message not in self.bag:
            self.bag.append(message)  # repeated until answered

    def on_creation(self, message: Message) -> None:
        ref = message.body
        fork = ref.fork if isinstance(ref, UserRecord) else ref.id
        source = message.source.me.incarnation
        message.to.protocol.owner_table.expect(source, ref.id, fork, UNKNOWN_SITE)
        self.running.append((message.source, message.to, ref))

    def finish(self, source: Node | None, owner: Node, ref: OwnerRecord | UserRecord) -> None:
        if owner.alive:
            owner.protocol.owner_table.settle(ref.id, ("value", ref.id))
            if source is not None:
                self.send("created", owner, source, ref)

    def on_created(self, message: Message) -> None:
        protocol, ref = message.to.protocol, message.body
        if isinstance(ref, UserRecord):
            protocol.user_table.answered(ref)
        elif ref.creator_error is None:
            protocol.created_here(ref)

    def on_call(self, message: Message) -> None:
        ref = message.to.protocol.arrive(message.body, message.source.me)
        if isinstance(ref, UserRecord) and ref.use is Use.CONFIRMING:
            message.to.arriving.append(ref)
        else:
            message.to.refs.append(ref)

    def on_forks(self, message: Message) -> None:
        forks = [(held.id, held.fork, held.claim) for held in message.body]
        answer = message.to.protocol.requested(message.source.me, *message.number, forks)
        if not message.answered:
            self.send("answer", message.to, message.source, (message, answer))

    def on_accepts(self, message: Message) -> None:
        message.to.protocol.accepted(message.body)
        self.send("answer", message.to, message.source, (message, None))

    def on_releases(self, message: Message) -> None:
        message.to.protocol.released(
            [(held.id, held.fork, held.never_created) for held in message.body]
        )
        self.send("answer", message.to, message.source, (message, None))

    def on_answer(self, message: Message) -> None:
        asked, answer = message.body
        user_table = asked.source.protocol.user_table
        if asked.answered:
            return
        asked.answered = True
        if asked.kind == "forks":
            user_table.close(asked.to.me, asked.number[0])
            for held, counts in zip(asked.body, answer, strict=True):
                assert counts or held.id in self.excused, "a fork of a living reference was refused"
                user_table.answered(held, None if counts else RRefExpired("expired"))
        elif asked.kind == "releases":
            for held in asked.body:
                user_table.released(held)

    # ── misfortune ──────────────────────────────────────────────────────────────────────────

    def kill(self, node: Node) -> None:
        node.alive = False
        node.refs.clear()
        node.arriving.clear()
        for other in self.alive:
            self.lose(other, node)
        self.bag = [m for m in self.bag if node not in (m.source, m.to)]

    def lose(self, node: Node, gone: Node) -> None:
        """`node` loses `gone`, which is dead or loses it, too."""
        user_table = node.protocol.user_table
        for held in list(user_table.records.values()):
            if held.owner == gone.me and held.use is Use.CREATING:
                user_table.answered(held, OwnerLost(gone.me.name))
        node.losses[node.protocol.lost(gone.me)] = gone.me
        for message in self.bag:
            control = message.kind in ("forks", "accepts", "releases")
            if control and (message.source, message.to) == (node, gone) and not message.answered:
                self.failed(message)

    def lose_session(self, one: Node, two: Node) -> None:
        """Two living workers lose each other; nothing that is under way between them arrives."""
        self.lose(one, two)
        self.lose(two, one)
        pair = {one, two}
        lost = [message for message in self.bag if {message.source, message.to} == pair]
        self.excused.update(m.body.id for m in lost if m.kind == "creation")
        self.bag = [message for message in self.bag if message not in lost]
        self.running = [
            (None if {source, owner} == pair else source, owner, ref)
            for source, owner, ref in self.running
        ]

    def end_lease(self, node: Node, number: int) -> None:
        gone = node.losses.pop(number)
        _, sent = node.protocol._leases.get(number, (None, []))
        if self.node_of(gone.incarnation).alive:
            # Others to whom it passed a reference have one lease to tell the owner, and those to
            # whom it passed one that it was about to create; here it took longer.
            self.excused.update(
                owned.id
                for owned in node.protocol.owner_table.records.values()
                if gone.incarnation in {who[:16] for who in owned.forks.values()}
                or owned.id[1] == stamp_of(gone.incarnation)
            )
            children = node.protocol.user_table.children
            self.excused.update(children[fork].id for fork in sent if fork in children)
        # A child whose parent is gone has one lease to tell the owner; here it took longer.
        self.excused.update(
            held.id for other in self.alive for held in other.arriving if held.parent == gone
        )
        node.protocol.lease_over(number)

    def audit(self, node: Node, at_shutdown: bool) -> None:
        for holder, forks in node.protocol.audit.round(at_shutdown):
            to = self.node_of(holder.incarnation)
            if to.alive and holder.incarnation not in node.protocol.unreachable:
                node.protocol.take_audit(forks, to.protocol.report_forks(forks), at_shutdown)

    # ── the end ─────────────────────────────────────────────────────────────────────────────

    def run_dry(self, random: random.Random) -> None:
        """Carry everything until nothing moves."""
        for _ in range(100_000):
            for node in self.alive:
                self.flush(node)
                self.show(node)
            self.bag = [m for m in self.bag if not m.answered]
            if self.running:
                self.finish(*self.running.pop())
            elif self.bag:
                self.deliver(random.choice(self.bag), keep=False)
            else:
                return
        raise AssertionError("the workers never stop talking")

    def show(self, node: Node) -> None:
        """What was confirmed becomes visible to user code; what failed does not."""
        for held in [held for held in node.arriving if not held.unanswered]:
            node.arriving.remove(held)
            if held.use is Use.CONFIRMED:
                node.refs.append(held)
            else:
                node.protocol.user_table.drop(held)


USER = {"remote": 6, "own": 2, "share": 14, "drop": 8, "finish": 8, "flush": 12, "deliver": 40}
ROUGH = USER | {"lose_answer_or_copy": 4, "throw_away": 2, "audit": 2, "give_up_creation": 2}
PROFILES = {
    "calm": USER,
    "rough": ROUGH,
    "deaths": ROUGH | {"kill": 1, "restart": 2, "end_lease": 2},
    "partitions": ROUGH | {"kill": 1, "restart": 2, "lose_session": 2, "end_lease": 2},
}


class Play:
    """Chosen moves of one world, against a simple model: what user code holds, its owner has."""

    def __init__(self, chance: random.Random) -> None:
        self.world = World()
        self.chance = chance
        for rank in range(WORKERS):
            self.world.start(rank)

    def move(self, name: str) -> None:
        getattr(self, name)()
        for node in self.world.alive:
            self.world.show(node)
            for ref in node.refs:
                if isinstance(ref, UserRecord) and ref.use is Use.CONFIRMED:
                    self.expect_value(node, ref)

    def expect_value(self, node: Node, held: UserRecord) -> None:
        owner = self.world.node_of(held.owner.incarnation)
        if owner.alive and held.id not in self.world.excused:
            owned = owner.protocol.owner_table.records.get(held.id)
            assert owned is not None, "a value was freed under a living holder"
            assert owned.forks.get(held.fork) == node.me.incarnation

    def worker(self) -> Node:
        return self.chance.choice(self.world.alive)

    def a_ref(self) -> tuple[Node, OwnerRecord | UserRecord] | None:
        found = [(node, ref) for node in self.world.alive for ref in node.refs]
        return self.chance.choice(found) if found else None

    def remote(self) -> None:
        self.world.remote(self.worker(), self.worker())

    def own(self) -> None:
        node = self.worker()
        node.refs.append(node.protocol.own("local"))

    def share(self) -> None:
        if found := self.a_ref():
            self.world.share(*found, self.worker())

    def drop(self) -> None:
        if found := self.a_ref():
            self.world.drop(*found)

    def give_up_creation(self) -> None:
        if found := self.a_ref():
            self.world.give_up_creation(*found)

    def flush(self) -> None:
        self.world.flush(self.worker())

    def deliver(self) -> None:
        if self.world.bag:
            self.world.deliver(self.chance.choice(self.world.bag), self.chance.random() < 0.3)

    def lose_answer_or_copy(self) -> None:
        lossy = [m for m in self.world.bag if m.kind == "answer" or m.answered]
        if lossy:
            self.world.bag.remove(self.chance.choice(lossy))

    def throw_away(self) -> None:
        calls = [m for m in self.world.bag if m.kind == "call"]
        if calls:
            self.world.bag.remove(self.chance.choice(calls))

    def finish(self) -> None:
        if running := self.world.running:
            self.world.finish(*running.pop(self.chance.randrange(len(running))))

    def kill(self) -> None:
        if len(self.world.alive) > 2:
            self.world.kill(self.worker())

    def restart(self) -> None:
        alive = {node.me.rank for node in self.world.alive}
        if dead := sorted({node.me.rank for node in self.world.nodes} - alive):
            self.world.start(self.chance.choice(dead))

    def lose_session(self) -> None:
        node, other = self.worker(), self.worker()
        if node is not other:
            self.world.lose_session(node, other)

    def end_lease(self) -> None:
        node = self.worker()
        if node.losses:
            self.world.end_lease(node, self.chance.choice(sorted(node.losses)))

    def audit(self) -> None:
        node = self.worker()
        if not any(m.kind == "call" and m.source is node for m in self.world.bag):
            self.world.audit(node, at_shutdown=False)

    def end(self) -> None:
        """Everybody lets go of everything; then nothing may be left anywhere."""
        world = self.world
        world.run_dry(self.chance)
        for node in world.alive:
            for ref in list(node.refs):
                world.drop(node, ref)
        for _ in range(3):
            world.run_dry(self.chance)
            for node in world.alive:
                world.audit(node, at_shutdown=True)
        world.run_dry(self.chance)
        for node in world.alive:
            for number in list(node.losses):
                world.end_lease(node, number)
        world.run_dry(self.chance)
        for node in world.alive:
            left = node.protocol
            assert not left.owner_table.records, (
                f"{node.me.name} still owns {left.owner_table.records}"
            )
            assert not left.user_table.records, (
                f"{node.me.name} still uses {left.user_table.records}"
            )
            assert not left.user_table.children
            assert not left.audit
            assert not left._shared


@settings(
    max_examples=int(os.environ.get("AIOGRAD_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    profile=st.sampled_from(sorted(PROFILES)),
    steps=st.integers(20, 250),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_living_holder_loses_its_value_and_all_tables_end_empty(
    profile: str, steps: int, seed: int
) -> None:
    play = Play(random.Random(seed))
    weights = PROFILES[profile]
    for move in random.Random(~seed).choices(list(weights), list(weights.values()), k=steps):
        play.move(move)
    play.end()
