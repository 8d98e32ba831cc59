"""A link: everything between this worker and one peer, over one session.

It is dialled when first needed. A connection that breaks is made again within `Options.resume`
seconds, and nobody notices; else the peer is lost, and every call under way fails with
`WorkerLost`. A peer that is only silent is *suspect*: its process may be stopped or its loop
blocked, and it resumes unharmed when it wakes.

A link that is not in use sends nothing, no heartbeats either, and falls asleep after `Options.idle`
seconds: both sides close the connection and keep the session. The next message wakes it up.

A link is one session. A lost link stays lost; if the peer lives on, another link with a new session
takes its place (see `Links`), and shares nothing with it.

    Link ─┬─ caller, replies    calls made to the peer
          ├─ callee             calls of the peer
          ├─ outbox             what is sent          (`send`)
          └─ receiver           what comes            (`receive`)
"""

from __future__ import annotations

import asyncio
import enum
import errno
import functools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from aiograd.errors import ProtocolError, WorkerClosed, WorkerLost
from aiograd.rpc.affinity import descriptor
from aiograd.rpc.callee.dispatch import Callee, CalleeHost
from aiograd.rpc.callee.functions import TABLE, Shipment, Target, resolve
from aiograd.rpc.caller.calls import Caller
from aiograd.rpc.caller.replies import RefusedPosts, Replies
from aiograd.rpc.directory import Directory, PeerInfo
from aiograd.rpc.extension import run_undo
from aiograd.rpc.future import Future
from aiograd.rpc.link.connection import Connection, RestingConnection
from aiograd.rpc.link.inbound_budget import Budget
from aiograd.rpc.link.ledger import Account, Accounts
from aiograd.rpc.link.receive import Receiver
from aiograd.rpc.link.send import LAZY as LAZY_LANE
from aiograd.rpc.link.send import NORMAL, NOW, Outbox
from aiograd.rpc.link.shared_memory import SharedMemory, open_shared_memory
from aiograd.rpc.link.transfer_watch import TransferWatch
from aiograd.wire.codec import Codec, Payload
from aiograd.wire.fastcodec import Boxes
from aiograd.wire.framing import SMALL, Frame, FrameReader
from aiograd.wire.messages import (
    CALL,
    DEFINE,
    FORGET,
    GOODBYE,
    LARGE,
    LAZY,
    NUMBERED,
    POST,
    REPLY,
    REQUEST,
    SHARED,
    SHM_RELEASE,
)
from aiograd.wire.safecodec import DataCodec
from aiograd.wire.session import ACCEPTED, LOOK, Offer, Session

_log = logging.getLogger("aiograd.link")

# How TCP says that its time is up: with the last reason it heard of, if there was one.
_TIMED_OUT: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
_NEVER: Final = float("inf")  # a post has no deadline
_TRANSFERS: Final = 2048  # large messages of a partner under way at once, refused ones included
_TRANSFER: Final = 1024  # bytes that a large message of a partner counts for besides its own
_QUIET: Final = 2  # heartbeats without use, after which a link rests


class LinkState(enum.Enum):
    """Where a link is in its life."""

    NEW = "new"  # nothing was sent so far
    DIALING = "dialing"
    OPEN = "open"  # over a connection
    AWAY = "away"  # the connection broke, and is being made again
    ASLEEP = "asleep"  # both sides closed the connection, because nobody used it
    LOST = "lost"
    CLOSED = "closed"  # by this worker


class LinkEvent(enum.Enum):
    """What happens to a link."""

    DIAL = "dial"
    CONNECT = "connect"  # a proven connection is there, dialled by either side
    CUT = "cut"  # the connection broke
    SLEEP = "sleep"  # both sides agreed to close the connection
    WAKE = "wake"  # it is to be made again
    LOSE = "lose"
    CLOSE = "close"


_S, _E = LinkState, LinkEvent
_LIVING: Final = (_S.NEW, _S.DIALING, _S.OPEN, _S.AWAY, _S.ASLEEP)
LINK_TRANSITIONS: Final = {
    (_S.NEW, _E.DIAL): _S.DIALING,
    (_S.NEW, _E.CONNECT): _S.OPEN,  # the peer dialled first, or the link leads to ourselves
    (_S.DIALING, _E.CONNECT): _S.OPEN,
    (_S.OPEN, _E.CONNECT): _S.OPEN,  # the peer has noticed before us that the last one broke
    (_S.AWAY, _E.CONNECT): _S.OPEN,
    (_S.OPEN, _E.CUT): _S.AWAY,
    (_S.OPEN, _E.SLEEP): _S.ASLEEP,
    (_S.ASLEEP, _E.WAKE): _S.AWAY,
    (_S.ASLEEP, _E.CONNECT): _S.OPEN,  # the peer woke it up
    **{(state, _E.LOSE): _S.LOST for state in _LIVING},
    **{(state, _E.CLOSE): _S.CLOSED for state in _LIVING},
}


class Loss(Protocol):
    """The loss before a session, as far as the next one concerns it."""

    fence: int  # dials of the peer up to this number are out of date
    met: bool  # there was a session with the peer


class LinkTable(Protocol):
    """What has all the links of a worker."""

    def dial(self, link: Link) -> None:
        """Connect a link that has something to send."""

    def next_dial(self) -> int:
        """Return the number of the next connection that is dialled."""

    def reconnect(self, link: Link, silent: float, why: str) -> asyncio.Task[None]:
        """Connect a link again whose connection broke, or that was asleep (`why` is "")."""

    def stirred(self, link: Link) -> None:
        """Let a link have heartbeats."""

    def expects(self, link: Link) -> bool:
        """Whether something is awaited from its peer that is no answer to a call."""

    def lets_sleep(self, link: Link) -> bool:
        """Whether no other layer has to hear at once of the loss of its peer."""

    def lost(self, link: Link, error: Exception, *, final: bool) -> None:
        """Note that a link has lost its peer."""

    def returned(self, peer: PeerInfo) -> None:
        """Note that a new session with a peer begins that was lost before."""


class LinkHost(CalleeHost, RefusedPosts, Protocol):
    """What a link needs of the worker."""

    @property
    def links(self) -> LinkTable:
        """All links of the worker, which are told of losses and returns."""

    @property
    def incarnation(self) -> bytes:
        """What tells this start of the worker from any other of its name."""

    @property
    def memory(self) -> Any:
        """The buffers in which large messages arrive."""

    @property
    def accounts(self) -> Accounts:
        """The memory that each partner may use."""

    @property
    def copier(self) -> Any:
        """What copies large arrays."""

    @property
    def runtime(self) -> Any:
        """Clock and transports."""

    @property
    def directory(self) -> Directory:
        """The members, by name and rank."""

    @property
    def codec(self) -> Codec:
        """How what trusted peers send is read."""

    @property
    def refused(self) -> Target:
        """Stands for functions that the peer may not call."""

    @property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """The registered ops by name."""

    def codec_for(self, peer: PeerInfo) -> Codec | DataCodec:
        """Return how values for a peer are encoded."""


class Link:
    """One peer, and one session with it."""

    agent: LinkHost
    peer: PeerInfo
    ready: bool

    def __init__(self, agent: LinkHost, peer: PeerInfo, after: Loss | None = None) -> None:
        self.agent, self.peer = agent, peer
        self.after = after  # the loss before this session, until it has begun
        self.state: LinkState = LinkState.NEW
        self.ready = False  # open: small messages may go straight to the outbox
        self.error: Exception | None = None  # why it is lost or closed
        self.suspect: bool = False
        self.connection: Connection | None = None
        self.address: str = ""  # where it was dialled
        self.host: str = ""  # from where the peer speaks
        self.restricted: bool = agent.restricts(peer)  # plain data only, functions by name only
        limit = agent.options.outbound_buffer if agent.options.resume else 0
        if self.restricted:  # the name may have several
            limit //= agent.options.partner_links
        self.session: Session = Session(limit, after.fence if after is not None else 0)
        self._reader: FrameReader | None = None
        self._comeback: asyncio.Task[None] | None = None  # while away
        # While asleep: the last connection, until the peer closes it, and what does it otherwise.
        self._lingering: tuple[Any, asyncio.TimerHandle] | None = None
        self.codec: Codec | DataCodec = agent.codec_for(peer)
        # What the peer is known to take by the fast codec, and how that is learnt; see `Route`.
        self.boxes: Boxes = agent.travellers.common_boxes
        self.box_heard: tuple[Any, Any] | None = None
        self.box_told: bool = False
        self.max_message: int = agent.options.max_message  # the smaller one of both sides
        self.outbox: Outbox = Outbox(agent.loop, self.session, self._large_sent)
        # All links of a partner's name share one part of the memory; trusted peers share the rest.
        self.account: Account | None = agent.accounts.of(peer.name) if self.restricted else None
        self.budget: Budget = agent.budget if self.account is None else self.account
        self.caller: Caller = Caller(self, agent)
        self.replies: Replies = Replies(self, agent, self.caller, agent)
        self.callee: Callee = Callee(self, agent)
        self.numbers: OrderedDict[Shipment, int] = OrderedDict()  # functions the peer knows
        self._next_number = 0
        self.receiver: Receiver = Receiver(self, self.callee, self.replies, self.budget, agent.name)
        if agent.runtime.spin:
            self.receiver.after_batch = agent.polling.stay_awake
        self.receiver.allow_inside(agent.inside if agent.trusts(peer) else agent.refused)
        self.shared: SharedMemory | None = None  # memory that the peer can see, too
        rate = agent.options.partner_rate
        self._watch: TransferWatch | None = TransferWatch(rate) if self.restricted else None
        self._silent = 0  # heartbeats without a byte from the peer, while something is awaited
        self._awaited = False  # whether something was at the last heartbeat
        self._last_read = 0
        self._quiet = 0  # heartbeats without use
        self._said = self._heard = 0  # of the session, at the last heartbeat
        self._last_sent = 0  # position in the session up to which the peer has to acknowledge
        self.used_at: float = 0.0  # loop time of the last heartbeat that saw it in use
        self.proposed_at: float = (
            -math.inf
        )  # loop time at which this side would have liked it to sleep
        self.resting: bool = False  # open, but without heartbeats until anything is sent or comes
        self.asked: bool = False  # the peer wants a sign of life at the next heartbeat

    def _move(self, event: LinkEvent) -> None:
        self.state = LINK_TRANSITIONS[self.state, event]

    @property
    def peer_name(self) -> str:
        """The name of the peer."""
        return self.peer.name

    @property
    def is_dialing(self) -> bool:
        """Whether this worker makes the first connection."""
        return self.state is LinkState.DIALING

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self.state is LinkState.OPEN

    @property
    def is_away(self) -> bool:
        """Whether the connection broke and is being made again."""
        return self.state is LinkState.AWAY

    @property
    def is_asleep(self) -> bool:
        """Whether both sides closed the connection because nobody used it."""
        return self.state is LinkState.ASLEEP

    @property
    def wants_connection(self) -> bool:
        """Whether there was no connection so far."""
        return self.state in (LinkState.NEW, LinkState.DIALING)

    # ── connecting ──────────────────────────────────────────────────────────────────────────────

    def dial(self) -> None:
        """Note that the first connection is being made."""
        self._move(LinkEvent.DIAL)

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
        """Go on over a proven connection to the peer, which has `received` bytes of the session."""
        if self._reader is None:
            self._reader = self._begin_reading(transport)
        self._stop_coming_back()
        self._stop_lingering()
        self._move(LinkEvent.CONNECT)
        if self.after is not None:  # before anything of the new session is delivered
            self.after = None
            self.agent.links.returned(self.peer)
        if self.error is not None:  # a callback ended it
            transport.abort()
            return
        self.ready = True
        self._silent, self._quiet, self.suspect, self.resting = 0, 0, False, False
        self.connection = Connection(self, transport, self._reader, self.receiver.receive)
        transport.set_protocol(self.connection)
        if not transport.is_reading():
            transport.resume_reading()
        self.outbox.open(transport, self.session.unacknowledged(received))
        self.used_at, self.proposed_at = self.agent.loop.time(), -math.inf
        self.agent.links.stirred(self)

    def _begin_reading(self, transport: Any) -> FrameReader:
        """Make what reads the bytes of the first connection, and those of all later ones."""
        if not self.restricted:
            self._share(transport)
        agent = self.agent
        shared = self.shared.read if self.shared is not None else None
        return FrameReader(
            agent.options.max_message,
            self.budget.reserve,
            agent.memory,
            shared,
            self.budget.unavailable,
            _TRANSFER if self.restricted else 0,
            _TRANSFERS if self.restricted else None,
        )

    def offer(self) -> Offer:
        """Return what to say to the peer in a handshake that this side began."""
        if self.state in (LinkState.DIALING, LinkState.AWAY):
            return self.session.offer(self.agent.links.next_dial())
        return Offer(LOOK)

    def answer(self, offer: Offer) -> tuple[int, int]:
        """Decide about a connection that the peer has dialled; and how much came before it."""
        first = self.agent.incarnation < self.peer.incarnation
        status = self.session.answer(offer, dialling=self.is_dialing, first=first)
        if self.is_open:
            if status == ACCEPTED:  # it broke, and the peer has noticed before us
                self._detach()
            elif self.session.nudged(offer):
                self.cut("the other side has lost it")
        elif self.is_asleep and self.session.nudged(offer):
            self.agent.links.dial(self)  # the peer has something to send, and this side dials
        return status, self.session.received

    def _share(self, transport: Any) -> None:
        """Let large messages pass through memory, if the peer is a process of this user."""
        room = self.agent.options.outbound_buffer * 3 // 4
        copy = self.agent.copier.copy
        self.shared = shared = open_shared_memory(transport, room, self._put_shared, copy)
        if shared is not None:
            self.outbox.place = shared.write_chunk
            self.caller.reserve(room)  # what lies in shared memory waits for the peer, too
            self.callee.reserve(room)
            self.receiver.share(shared)

    # ── disconnecting ───────────────────────────────────────────────────────────────────────────

    def broken(self, error: Exception) -> None:
        """End the link: the peer broke the protocol."""
        self.agent.limits.reached("protocol")
        if self.may_log():
            me, peer = self.agent.name, self.peer.name
            _log.error("%s: closing the connection to %s (%s): %s", me, peer, self.host, error)
        self.abort(WorkerLost(self.peer.name, why=str(error)))

    def may_log(self) -> bool:
        """Whether a line about the peer may be written now: a partner causes a bounded number."""
        return self.account is None or self.account.log_rate.allows()

    def disconnected(self, connection: Connection, error: Exception | None) -> None:
        """Make the connection again that has ended, if the peer may still be there."""
        if connection is not self.connection or not self.is_open:
            return
        if isinstance(error, ProtocolError):  # somebody wrote to it who is not the peer
            return self.broken(error)
        goodbye = self.receiver.goodbye
        why = "it was shut down" if goodbye else str(error or "connection closed")
        # A kernel that acknowledged nothing for seconds was given its time already.
        late = isinstance(error, OSError) and error.errno in _TIMED_OUT
        if goodbye or late or not self.agent.options.resume:
            self.lose(WorkerLost(self.peer.name, why=why), final=goodbye)
        else:
            self.cut(why)

    def cut(self, why: str) -> None:
        """Leave a connection that broke; the session goes on when there is another one."""
        silent = self._silent * self.agent.options.heartbeat
        self._detach()
        self._move(LinkEvent.CUT)
        self.ready, self.suspect = False, True
        self.session.copy_kept()
        self._comeback = self.agent.links.reconnect(self, silent, why)

    def move(self, address: str) -> None:
        """Go on over a connection to another address of the peer; not if it has none now."""
        if self.connection is not None and self.session.role == "dials":
            self.address = address
            self.cut(f"the session moves on to {address}")

    def _detach(self, *, linger: bool = False) -> None:
        connection, self.connection = self.connection, None
        assert connection is not None
        connection.mute()
        if linger:
            later, seconds = self.agent.loop.call_later, self.agent.options.handshake_timeout
            self._lingering = connection.transport, later(seconds, connection.transport.abort)
        else:
            connection.transport.abort()
        self.outbox.detach()
        self.resting = False

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            transport, timer = self._lingering
            self._lingering = None
            timer.cancel()
            transport.abort()

    def _stop_coming_back(self) -> None:
        comeback, self._comeback = self._comeback, None
        if comeback is not None and comeback is not asyncio.current_task():
            comeback.cancel()

    def lose(self, error: Exception, *, final: bool = False) -> None:
        """End the link: the peer is gone, or was never there.

        `final`: this incarnation of it will not come back."""
        if self.error is None:
            self._move(LinkEvent.LOSE)
            self._end(error)
            self.agent.links.lost(self, error, final=final)

    def abort(self, error: Exception, *, final: bool = False) -> None:
        """Lose the peer, and end the connection to it."""
        if self.connection is not None:
            self.connection.transport.abort()
        self.lose(error, final=final)

    def refuse_all(self, error: Exception) -> None:
        """Make this a link that fails every call, without ever having connected."""
        self._move(LinkEvent.LOSE)
        self.error = error

    def as_lost(self) -> Exception:
        """Return a fresh error for a message that cannot be sent any more."""
        error = self.error
        if isinstance(error, WorkerClosed):
            return WorkerClosed(str(error), self.agent.name)
        made = WorkerLost(self.peer.name, "no", getattr(error, "why", "") or str(error))
        made.__cause__ = error.__cause__ if error is not None else None
        return made

    @property
    def settled(self) -> bool:
        """Whether it is lost, and nothing that the peer called here is still running."""
        execution = self.callee.execution
        return self.error is not None and not (execution.running or execution.abandoned)

    def close(self) -> None:
        """Leave: say so to the peer, and end everything."""
        if self.error is not None:
            return
        if self.is_open:
            self.outbox.put(Frame(GOODBYE, 0))
            self.outbox.flush()
        self._move(LinkEvent.CLOSE)
        self._end(WorkerClosed(f"{self.agent.name} was shut down", self.agent.name))
        if self.connection is not None:
            self.connection.transport.close()

    def _end(self, error: Exception) -> None:
        # The order matters. First nothing can be sent any more. Then what never left is asked of
        # the outbox, before it forgets. Callers fail before what the peer called is abandoned,
        # because an abandoned function may wait for one of these calls.
        self.error, self.ready, self.suspect = error, False, False
        self._stop_coming_back()
        self._stop_lingering()
        unsent = self.outbox.unsent() if self.session.role else None
        self.outbox.close()
        self.session.kept.clear()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.abandon(self.budget.release)
        if self.connection is not None:
            self.connection.mute()
        self.caller.lose(error, unsent)
        self.callee.close()
        self.receiver.close()
        if self.shared is not None:
            self.shared.close()

    # ── resting and sleeping ────────────────────────────────────────────────────────────────────

    @property
    def in_use(self) -> bool:
        """Whether a call of either side is under way, or anything waits to be sent or to arrive."""
        return bool(
            self.caller.pending
            or self.caller.window
            or self.callee.execution.running
            or self.callee.held
            or self.receiver.waiting
            or not self.outbox.empty
            or self.session.owes
            or self.agent.links.expects(self)
        )

    def _may_rest(self) -> bool:
        return (
            self._quiet >= _QUIET
            and not self.suspect
            and self.session.base >= self._last_sent  # the peer has told us that it has everything
            and (self.shared is None or self.shared.at_rest)  # else blocks are to be released
        )

    def _rest(self) -> None:
        """Do without heartbeats. Whatever is sent or comes calls `stir` first."""
        assert self.connection is not None
        self.resting = True
        self.outbox.detach(self.stir)
        self.connection.transport.set_protocol(RestingConnection(self.connection, self.stir))

    def stir(self) -> None:
        """End a rest: it is in use again."""
        if self.resting and self.connection is not None:
            self.resting, self._quiet = False, 0
            transport = self.connection.transport
            transport.set_protocol(self.connection)
            self.outbox.attach(transport)
            self.agent.links.stirred(self)

    def propose_sleep(self) -> None:
        """Ask the peer to close the connection, if this side may; the peer may have other plans."""
        if self.session.role == "dials" and self._may_sleep():
            self.outbox.sleep()

    def _may_sleep(self) -> bool:
        return (
            self.is_open
            and not self.in_use
            # A partner may be where it can dial us and we cannot dial it.
            and not self.restricted
            and self.peer.incarnation != self.agent.incarnation
            and bool(self.agent.options.resume)
            and (self.shared is None or self.shared.at_rest)
            and self.agent.links.lets_sleep(self)
        )

    def sleep_received(self, position: int, connection: int) -> None:
        """Take note that the peer needs no connection for now."""
        if self.restricted:
            # A partner is never asked for this. Asleep, its link would tell nobody that it is gone,
            # and what is kept for it would stay.
            return
        if self.session.role == "dials":
            self._follow_into_sleep(position, connection)
        else:
            # When everything was read that came with it: that may be another call.
            self.agent.loop.call_soon(self._consider_sleep, position, connection)

    def _consider_sleep(self, position: int, connection: int) -> None:
        # The side that waits agrees, or says nothing, and is asked again after `Options.idle`.
        if self.session.may_sleep(position, connection) and self._may_sleep():
            self.outbox.sleep()
            self.outbox.flush()
            self._fall_asleep(linger=True)

    def _follow_into_sleep(self, position: int, connection: int) -> None:
        # The answer to a proposal on a connection that has broken since is out of date.
        if not self.is_open or connection != self.session.number & 0xFFFFFFFF:
            return
        crossed = not self.session.may_sleep(position, connection)
        self._fall_asleep()
        if crossed or not self.outbox.empty:  # a message has crossed the answer
            self.agent.links.dial(self)

    def _fall_asleep(self, *, linger: bool = False) -> None:
        """Leave the connection; `linger`: until the peer closes it, which has to read our answer.

        If this side closed it, bytes that cross the answer would make the kernel reset it."""
        _log.debug("%s: the connection to %s sleeps", self.agent.name, self.peer.name)
        self._detach(linger=linger)
        self._move(LinkEvent.SLEEP)
        self.ready, self.suspect, self.asked = False, False, False
        self.session.copy_kept()
        self.outbox.detach(functools.partial(self.agent.links.dial, self))

    def wake(self) -> asyncio.Task[None]:
        """Make the connection again; returns what does it."""
        self._move(LinkEvent.WAKE)
        self.outbox.wake = None
        self._comeback = self.agent.links.reconnect(self, 0.0, "")
        return self._comeback

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def resolve(self, flags: int, data: bytes) -> Target:
        """Find the function that the peer defines."""
        return resolve(self.agent, flags, data, self.peer)

    def chunk_read(self) -> None:
        """Release shared memory that the peer waits for, as soon as it was read."""
        shared = self.shared
        if shared is not None and shared.urgent and shared.unused:
            shared.release_blocks()

    def acknowledge(self) -> None:
        """Tell the peer how much has come: it keeps everything until then."""
        self.outbox.acknowledge()

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send(
        self,
        frame: Frame,
        name: str,
        undo: list[Any] | None = None,
        future: Future[Any] | None = None,
    ) -> bool:
        """Queue a message whose body is a `Payload`; False if it will not be sent.

        Fault injection knows it by `name`. If it is not sent, `undo` is run, and `future` fails in
        the next tick."""
        payload = frame.body
        if (  # `is_direct`, written out: every message comes this way
            self.ready
            and self.agent.fault_injector is None
            and not payload.buffers
            and len(payload.data) <= SMALL
        ):
            kind = frame.kind
            lane = NORMAL if kind == REPLY else NOW if kind == POST else self._lane(frame)
            self.outbox.put(frame, lane)
            return True
        if self.state is LinkState.NEW:
            self.agent.links.dial(self)
        if self.error is not None:
            run_undo(undo)
            return False
        if self.agent.fault_injector is None:
            self._put(frame)
            return True
        return self._send_injected(frame, name, undo, future)

    def is_direct(self, payload: Payload) -> bool:
        """Whether a message goes straight to the outbox: connected, small, no fault injection."""
        return (
            self.ready
            and self.agent.fault_injector is None
            and not payload.buffers
            and len(payload.data) <= SMALL
        )

    def _lane(self, frame: Frame) -> int:
        """Return when a small message leaves."""
        kind = frame.kind
        if kind == CALL or (kind == REQUEST and not frame.flags & LAZY):
            # Somebody waits for a call that is alone under way. Those of a burst share a write.
            return NOW if len(self.caller.pending) == 1 else NORMAL
        if kind == REQUEST:
            return LAZY_LANE
        return NOW if kind == POST else NORMAL

    def _send_injected(
        self, frame: Frame, name: str, undo: list[Any] | None, future: Future[Any] | None
    ) -> bool:
        """Send a message, or let it fail, as fault injection wants it."""
        assert self.agent.fault_injector is not None
        action = self.agent.fault_injector.on_send(name, self.peer.name)
        if action.action == "delay":
            self.agent.loop.call_later(action.seconds, self._put_late, frame)
        elif action.action == "fail":
            run_undo(undo)
            if future is not None:
                why = WorkerLost(self.peer.name, "no", "a failure was injected")
                self.caller.refused(future, why)
            return False
        elif action.action != "drop":
            self._put(frame)
            if action.action == "duplicate":
                self._put(frame)
        return True

    def post(
        self, shipment: Shipment, flags: int, payload: Payload, undo: list[Any] | None
    ) -> None:
        """Send a message that nobody answers. Raises if it cannot be sent any more.

        A post that is queued when the peer is lost is lost with it: what depends on posts must
        listen to `agent.lost`, too.
        """
        if self.error is not None:
            run_undo(undo)
            raise self.as_lost()
        number = self.numbers.get(shipment) or self.number(shipment)
        self.caller.last_id = id = self.caller.last_id + 1
        frame = Frame(POST, flags, id, _NEVER, number, payload)
        if not self.send(frame, shipment.name, undo):
            if self.error is not None:
                raise self.as_lost()
            raise WorkerLost(self.peer.name, "no", "a failure was injected")

    def number(self, shipment: Shipment) -> int:
        """Return the number of a function at the peer; define it there first if it has none."""
        number = self.numbers.get(shipment)
        if number is None:
            if len(self.numbers) >= TABLE:
                _, old = self.numbers.popitem(last=False)
                self.outbox.put(Frame(FORGET, 0, target=old))
            self._next_number += 1
            number = self.numbers[shipment] = self._next_number
            assert shipment.data is not None
            self.outbox.put(Frame(DEFINE, shipment.flags, target=number, body=shipment.data))
        return number

    def send_control(self, kind: int, id: int, target: int = 0) -> None:
        """Queue a message without a body."""
        if self.error is None:
            self.outbox.put(Frame(kind, 0, id, target=target))

    def _put(self, frame: Frame) -> None:
        data, buffers = frame.body.data, frame.body.buffers
        if buffers or len(data) > SMALL:
            self._put_large(frame, [memoryview(part).cast("B") for part in (data, *buffers)])
        else:
            self.outbox.put(frame, self._lane(frame))

    def _put_large(self, frame: Frame, segments: list[memoryview]) -> None:
        shared = self.shared
        if shared is not None and shared.unused:
            shared.release_blocks()  # before the peer needs room for its answer
        if shared is None or (place := shared.write(segments)) is None:
            self.outbox.put_large(frame, segments)
            return
        flags = frame.flags | LARGE | SHARED
        self.outbox.put(replace(frame, flags=flags, body=place))
        if not self.outbox.corked:
            # The peer can read it while we go on: it costs more than the write.
            self.outbox.flush_early()

    def _put_shared(self, kind: int, target: int, body: bytes) -> None:
        lazy = kind == SHM_RELEASE and not target
        self.outbox.put(Frame(kind, 0, target=target, body=body), LAZY_LANE if lazy else NORMAL)

    def _put_late(self, frame: Frame) -> None:
        if self.error is None:
            if frame.kind in NUMBERED:  # others have taken later numbers meanwhile
                frame = replace(frame, id=self.caller.renumber(frame.id))
            self._put(frame)

    def _large_sent(self) -> None:
        if self.caller.window:
            self.caller.proceed()
        if self.callee.held:
            self.callee.proceed()

    # ── living ──────────────────────────────────────────────────────────────────────────────────

    def descriptors(self) -> Iterator[int]:
        """Give the file descriptors that are open for this peer."""
        if self.connection is not None:
            yield descriptor(self.connection.transport)

    def beat(self) -> None:
        """Once per heartbeat: give the signs of life that are due, and judge those of the peer.

        A side that awaits something asks for a sign of life each time. One that awaits nothing
        sends none and judges none: the kernel, or the other members, know when a host is gone.
        """
        if not self.is_open:
            return
        # First, because a ping that is about to be written changes these.
        said, heard = self.session.said, self.session.heard
        # A suspect stays one until it is heard of, also when nothing is awaited any more.
        awaiting = (
            bool(self.caller.pending or self.caller.window)
            or self.suspect
            or self.agent.links.expects(self)
        )
        if (awaiting or self.asked or self.session.owes) and self.outbox.empty:
            self.outbox.acknowledge(awaiting)
        self.asked = False
        # Counted in beats of ours, not by the clock: a blocked loop here proves nothing about them.
        received = self.session.received
        judged = awaiting and self._awaited and received == self._last_read
        self._silent = self._silent + 1 if judged else 0
        self._last_read, self._awaited = received, awaiting
        silence = self._silent * self.agent.options.heartbeat
        if self.shared is not None:
            self.shared.heartbeat()
        self.suspect = silence >= self.agent.options.silence
        if self.suspect:
            self.caller.silent(silence)
        if self._watch is not None:
            self._refuse_slow(self._watch)
        self._count_quiet(said, heard)

    def _refuse_slow(self, watch: TransferWatch) -> None:
        """Refuse large messages of a partner that come too slowly for the memory they occupy."""
        reader = self._reader
        assert reader is not None
        now, received = self.agent.loop.time(), self.session.received
        for number in watch.overdue(now, received, reader.under_way()):
            transfer = reader.drop(number, "partner_rate", self.budget.release)
            if transfer is not None:
                self.agent.limits.reached("partner_rate")
                if self.may_log():
                    me, peer = self.agent.name, self.peer.name
                    _log.warning("%s: refused a message of %s: too slow", me, peer)
                self.receiver.give_up(transfer)

    def _count_quiet(self, said: int, heard: int) -> None:
        """Rest when a few heartbeats have seen no use."""
        if said != self._said:  # else nothing but pings was sent, which nobody acknowledges
            self._last_sent = self.session.sent
        if (said, heard) != (self._said, self._heard) or self.in_use:
            self._said, self._heard = said, heard
            self._quiet, self.used_at = 0, self.agent.loop.time()
            return
        self._quiet += 1
        if self._may_rest():
            self._rest()
