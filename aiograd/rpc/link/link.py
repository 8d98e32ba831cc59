"""A link: everything between this worker and one peer.

It is dialled when first needed, and batches what is sent in one tick. A connection that breaks is
made again within `Options.resume` seconds, and nobody notices; else the peer is lost, and every
call under way fails with `WorkerLost`. A peer that is only silent is *suspect*: its process may be
stopped or its loop blocked, and it resumes unharmed when it wakes.

A link is one session. A lost one stays lost; if the peer lives on, another link with a new session
takes its place (see `Links`), and shares nothing with it.

What comes over it is sorted by `Receiving`; calls are the `Caller`'s and `Callee`'s business.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aiograd.errors import WorkerClosed, WorkerLost
from aiograd.rpc.affinity import descriptor
from aiograd.rpc.callee.dispatch import Callee
from aiograd.rpc.callee.functions import TABLE, Shipment
from aiograd.rpc.caller.calls import Caller
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import run_undo
from aiograd.rpc.future import Future
from aiograd.rpc.link.receive import Connection, Receiving
from aiograd.rpc.link.send import Outbox
from aiograd.rpc.link.shared_memory import Shared, shared_memory
from aiograd.wire.codec import Payload
from aiograd.wire.framing import SMALL, FrameReader
from aiograd.wire.messages import (
    DEFINE,
    FORGET,
    GOODBYE,
    LARGE,
    NUMBERED,
    POST,
    SHARED,
    SHM_RELEASE,
)
from aiograd.wire.session import ACCEPTED, LOOK, Offer, Session

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.link.links import Loss

_log = logging.getLogger("aiograd.link")


class Link:
    """One peer. States: new → dialling → open ⇄ away → lost (or closed by us)."""

    def __init__(self, agent: Agent, peer: PeerInfo, after: Loss | None = None) -> None:
        self.agent, self.peer = agent, peer
        self.after = after  # the loss before this session, until it has begun
        self.state = "new"
        self.quick = False  # open and unhindered: small messages may go straight to the outbox
        self.error: Exception | None = None  # why it is lost or closed
        self.suspect = False
        self.connection: Connection | None = None
        self.address = ""  # where it was dialled
        self.host = ""  # from where the peer speaks
        limit = agent.options.outbound_buffer if agent.options.resume else 0
        self.session = Session(limit, after.fence if after is not None else 0)
        self._reader: FrameReader | None = None
        self._comeback: asyncio.Task[None] | None = None  # while away
        self.outbox = Outbox(agent.loop, self.session, self._large_sent)
        self.caller = Caller(self)
        self.callee = Callee(self)
        self.numbers: OrderedDict[Shipment, int] = OrderedDict()  # functions the peer knows
        self._next_number = 0
        self.restricted = agent.restricts(peer)  # plain data only, functions by name only
        self.receiving = Receiving(self)
        self._silent = 0  # heartbeats without a byte from the peer
        self._last_read = 0
        self.max_message = agent.options.max_message  # the smaller one of both sides
        self.shared: Shared | None = None  # memory that the peer can see, too

    # ── connecting ──────────────────────────────────────────────────────────────────────────────

    @property
    def is_dialing(self) -> bool:
        """Whether this side makes the first connection of the session."""
        return self.state == "dialling"

    @property
    def is_away(self) -> bool:
        """Whether the connection broke and the session may be resumed."""
        return self.state == "away"

    @property
    def wants_connection(self) -> bool:
        """Whether there was no connection so far."""
        return self.state in ("new", "dialling")

    @property
    def follows_loss(self) -> bool:
        """Whether the peer was lost before this session, which has not begun so far."""
        return self.after is not None

    @property
    def had_session(self) -> bool:
        """Whether there was a session with the peer before: then the two do share a secret."""
        return self.after is not None and self.after.met

    def agree(self, max_message: int, max_inflight: int) -> None:
        """Keep to the limits of the peer, too: nobody sends more than the other side takes."""
        self.max_message = min(self.max_message, max_message)
        self.caller.agree(max_inflight)

    def opened(self, transport: Any, received: int = 0) -> None:
        """A proven connection to the peer, which has so much of what was sent; go on from there."""
        if self._reader is None:
            self._reader = self._begin_reading(transport)
        self._stop_coming_back()
        self.state = "open"
        if self.after is not None:  # before anything of the new session is delivered
            self.after = None
            self.agent.links.returned(self.peer)
        if self.error is not None:  # a callback ended it
            transport.abort()
            return
        self.quick = True
        self._silent, self.suspect = 0, False
        self.connection = Connection(self, transport, self._reader, self.session)
        transport.set_protocol(self.connection)
        if not transport.is_reading():
            transport.resume_reading()
        self.outbox.open(transport, self.session.rest(received))

    def _begin_reading(self, transport: Any) -> FrameReader:
        """Over the first connection: what reads its bytes, and those of all later ones."""
        if not self.restricted:
            self._share(transport)
        agent = self.agent
        shared = self.shared.arrived if self.shared is not None else None
        return FrameReader(
            agent.options.max_message,
            agent.budget.reserve,
            agent.memory,
            shared,
            agent.budget.unavailable,
        )

    def offer(self) -> Offer:
        """What to say to the peer in a handshake that we began."""
        if self.state in ("dialling", "away"):
            return self.session.offer(self.agent.links.next_dial())
        return Offer(LOOK)

    def answer(self, offer: Offer) -> tuple[int, int]:
        """What becomes of a connection that the peer has dialled, and how much came before it."""
        first = self.agent.incarnation < self.peer.incarnation
        status = self.session.answer(offer, dialling=self.state == "dialling", first=first)
        if self.state == "open":
            if status == ACCEPTED:  # it broke, and the peer has noticed before us
                self._detach()
            elif self.session.nudged(offer):
                self.cut("the other side has lost it")
        return status, self.session.received

    def _share(self, transport: Any) -> None:
        """Let large messages pass through memory, if the peer is a process of ours."""
        room = self.agent.options.outbound_buffer * 3 // 4
        copy = self.agent.copier.copy
        self.shared = shared = shared_memory(transport, room, self._put_shared, copy)
        if shared is not None:
            self.outbox.lend = shared.place_chunk
            self.caller.leave_room(room)  # what is lent waits for the peer, too
            self.callee.leave_room(room)
            self.receiving.share(shared)

    def broken(self, error: Exception) -> None:
        """The peer broke the protocol: end the connection."""
        self.agent.limits.reached("protocol")
        _log.error("%s: closing the connection to %s: %s", self.agent.name, self.peer.name, error)
        self.abort(WorkerLost(self.peer.name, why=str(error)))

    def disconnected(self, connection: Connection, exc: Exception | None) -> None:
        if connection is not self.connection or self.state != "open":
            return
        why = "it was shut down" if self.receiving.goodbye else str(exc or "connection closed")
        # A kernel that acknowledged nothing for seconds was given its time already.
        late = isinstance(exc, OSError) and exc.errno in _GIVEN_UP
        if self.receiving.goodbye or late or not self.agent.options.resume:
            self.lose(WorkerLost(self.peer.name, why=why), final=self.receiving.goodbye)
        else:
            self.cut(why)

    def cut(self, why: str) -> None:
        """The connection broke: the session goes on when there is another one."""
        silent = self._silent * self.agent.options.heartbeat
        self._detach()
        self.state, self.quick, self.suspect = "away", False, True
        self.session.own()
        self._comeback = self.agent.links.reconnect(self, silent, why)

    def _detach(self) -> None:
        connection, self.connection = self.connection, None
        assert connection is not None
        connection.mute()
        connection.transport.abort()
        self.outbox.detach()

    def _stop_coming_back(self) -> None:
        comeback, self._comeback = self._comeback, None
        if comeback is not None and comeback is not asyncio.current_task():
            comeback.cancel()

    def lose(self, error: Exception, *, final: bool = False) -> None:
        """The peer is gone, or was never there. `final`: this start of it will not come back."""
        if self.error is None:
            self.state = "lost"
            self._end(error)
            self.agent.links.lost(self, error, final=final)

    def abort(self, error: Exception, *, final: bool = False) -> None:
        """Lose the peer, and end the connection to it."""
        if self.connection is not None:
            self.connection.transport.abort()
        self.lose(error, final=final)

    def as_lost(self) -> Exception:
        """A fresh error for a message that cannot be sent any more."""
        error = self.error
        if isinstance(error, WorkerClosed):
            return WorkerClosed(str(error), self.agent.name)
        return WorkerLost(self.peer.name, "no", getattr(error, "why", "") or str(error))

    @property
    def settled(self) -> bool:
        """Lost, and nothing that the peer called here is still running."""
        return self.error is not None and not (self.callee.running or self.callee.abandoned)

    def close(self) -> None:
        """We leave: say so, end everything."""
        if self.error is not None:
            return
        if self.state == "open":
            self.outbox.put(GOODBYE, 0, 0, 0.0, 0, b"")
            self.outbox.flush()
        self.state = "closed"
        self._end(WorkerClosed(f"{self.agent.name} was shut down", self.agent.name))
        if self.connection is not None:
            self.connection.transport.close()

    def _end(self, error: Exception) -> None:
        self.error, self.quick, self.suspect = error, False, False
        self._stop_coming_back()
        unsent = self.outbox.unsent() if self.session.role else None
        self.outbox.close()
        self.session.kept.clear()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.abandon(self.agent.budget.release)
        if self.connection is not None:
            self.connection.mute()
        self.caller.lose(error, unsent)
        self.callee.close()
        self.receiving.close()
        if self.shared is not None:
            self.shared.close()

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send(
        self,
        kind: int,
        flags: int,
        id: int,
        budget: float,
        target: int,
        payload: Payload,
        name: str,
        undo: list[Any] | None = None,
        future: Future[Any] | None = None,
    ) -> bool:
        """Queue a message, unless somebody wants it to fail; False if it will not be sent."""
        if self.state == "new":
            self.agent.links.dial(self)
        if self.error is not None:
            run_undo(undo)
            return False
        if self.agent.fault_injector is None:
            self._put(kind, flags, id, budget, target, payload)
            return True
        verdict = self.agent.fault_injector.on_send(name, self.peer.name)
        put = functools.partial(self._put, kind, flags, id, budget, target, payload)
        if verdict.action == "delay":
            late = functools.partial(self._put_late, kind, flags, id, budget, target, payload)
            self.agent.loop.call_later(verdict.seconds, late)
        elif verdict.action == "fail":
            run_undo(undo)
            if future is not None:
                why = WorkerLost(self.peer.name, "no", "a failure was injected")
                self.caller.refused(future, why)
            return False
        elif verdict.action != "drop":
            put()
            if verdict.action == "duplicate":
                put()
        return True

    def post(
        self, shipment: Shipment, flags: int, payload: Payload, undo: list[Any] | None
    ) -> None:
        """Send a message that nobody answers. Raises if it cannot be sent any more.

        A post that is queued when the peer is lost fails with it: whoever depends on posts must
        listen to `agent.lost`, too.
        """
        if self.error is not None:
            run_undo(undo)
            raise self.as_lost()
        number = self.numbers.get(shipment) or self.number(shipment)
        self.caller.last_id += 1
        id, name = self.caller.last_id, shipment.name
        if not self.send(POST, flags, id, _NEVER, number, payload, name, undo):
            if self.error is not None:
                raise self.as_lost()
            raise WorkerLost(self.peer.name, "no", "a failure was injected")

    def post_small(self, shipment: Shipment, flags: int, data: bytes) -> bool:
        """The usual case in one step, as `Caller.begin_small`; False if it is another one."""
        number = self.numbers.get(shipment)
        if (
            number is None
            or not self.quick
            or self.agent.fault_injector is not None
            or len(data) > SMALL
        ):
            return False
        self.caller.last_id = id = self.caller.last_id + 1
        self.outbox.put_first(POST, flags, id, _NEVER, number, data)
        return True

    def number(self, shipment: Shipment) -> int:
        """The number under which the peer knows a function; it is told first if it does not."""
        number = self.numbers.get(shipment)
        if number is None:
            if len(self.numbers) >= TABLE:
                _, old = self.numbers.popitem(last=False)
                self.outbox.put(FORGET, 0, 0, 0.0, old, b"")
            self._next_number += 1
            number = self.numbers[shipment] = self._next_number
            assert shipment.data is not None
            self.outbox.put(DEFINE, shipment.flags, 0, 0.0, number, shipment.data)
        return number

    def put_small(self, kind: int, id: int, target: int = 0) -> None:
        if self.error is None:
            self.outbox.put(kind, 0, id, 0.0, target, b"")

    def _put(
        self, kind: int, flags: int, id: int, budget: float, target: int, payload: Payload
    ) -> None:
        data, buffers, _ = payload
        if not buffers and len(data) <= SMALL:
            put = self.outbox.put_first if kind == POST else self.outbox.put
            put(kind, flags, id, budget, target, data)
            return
        segments = [memoryview(segment).cast("B") for segment in (data, *buffers)]
        if self.shared is not None and self.shared.back:
            self.shared.give_back()  # before the peer needs room for its answer
        if self.shared is not None and (place := self.shared.place(segments)) is not None:
            self.outbox.put_now(kind, flags | LARGE | SHARED, id, budget, target, place)
        else:
            self.outbox.put_large(kind, flags, id, budget, target, segments)

    def _put_shared(self, kind: int, target: int, body: bytes) -> None:
        lazy = kind == SHM_RELEASE and not target
        put = self.outbox.put_lazy if lazy else self.outbox.put
        put(kind, 0, 0, 0.0, target, body)

    def _put_late(
        self, kind: int, flags: int, id: int, budget: float, target: int, payload: Payload
    ) -> None:
        if self.error is None:
            if kind in NUMBERED:  # others have taken later numbers meanwhile
                id = self.caller.renumber(id)
            self._put(kind, flags, id, budget, target, payload)

    def _large_sent(self) -> None:
        self.caller.proceed()
        self.callee.proceed()

    def descriptors(self) -> Iterator[int]:
        """What is open here for this peer."""
        if self.connection is not None:
            yield descriptor(self.connection.transport)

    def beat(self) -> None:
        """Once per heartbeat: say that we live, and notice when the peer does not."""
        if self.state != "open":
            return
        if self.outbox.empty:
            self.outbox.acknowledge()
        # Counted in beats of ours, not by the clock: a blocked loop here proves nothing about them.
        received = self.session.received
        self._silent = 0 if received != self._last_read else self._silent + 1
        self._last_read = received
        silence = self._silent * self.agent.options.heartbeat
        if self.shared is not None:
            self.shared.beat()
        self.suspect = silence >= self.agent.options.silence
        if self.suspect:
            self.caller.silent(silence)


# How TCP says that its time is up: with the last reason it heard of, if there was one.
_GIVEN_UP = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
_NEVER = float("inf")  # a post has no deadline
