"""The links of one worker: one for each start of a peer, and what became of those that are lost.

A loss that only this pair of workers saw need not be the end: the network may have been away for
longer than `Options.resume`. So while the peer is a member, the next use of it dials again, and the
two begin a new session. Dials that fail are followed by a pause, in which every use fails at once.

    open ──lost──▶ next use dials ─┬─ accepted ──▶ `agent.returned`, a new session
                        ▲          └─ failed ──▶ pause (doubled each time, at most 2 s) ─┐
                        └────────────────────────────────────────────────────────────────┘

A loss is final if the peer said goodbye, or if others declared it lost (`declare_lost`: the
coordinator's announcement). Then nobody comes back in as that incarnation.

What is under way over all links is counted here, too: a worker is at rest when that is nothing.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import AuthError, WorkerClosed, WorkerLost
from aiograd.rpc.directory import LOST_PEERS, PeerInfo, forget_one
from aiograd.rpc.link.dialer import Dialer
from aiograd.rpc.link.link import Link, LinkState
from aiograd.rpc.retry import RetryPolicy
from aiograd.wire.messages import CALL
from aiograd.wire.session import ACCEPTED, DIAL, DUPLICATE, LOOK, LOST, Offer

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

_log = logging.getLogger("aiograd.link")
# Seconds in which something of what waits in a socket is read, if anything does; and how often.
_READ_OUT, _READ_OUT_ROUNDS = 0.05, 10
# First dials of a worker at once. Where many workers meet all others, the handshakes of all dials
# would begin at once and each take as long as all together: longer than `Options.handshake_timeout`
# from about 100 workers on two cores.
DIALS: Final = 8
# Seconds between two looks at memory and idle connections while nothing is in use. An idle worker
# wakes up for nothing else.
_SLOW: Final = 5.0
_TURN: Final = 1.0  # seconds after which a dial does not keep others waiting any more
_CALLS = frozenset({"call", "op", "remote"})  # kinds of messages that are the user's
_LOOKS = ("look", "inspect")  # with which the labels of those begin that only look
# Dials of a lost peer: 0.1 to 0.2 s after the first one that failed, at last 1 to 2 s. Calls shall
# work again within 10 s of the network's return: the longest pause and a handshake fit into that.
_REDIAL: Final = RetryPolicy(attempts=math.inf, first_pause=0.15, longest_pause=1.5, jitter=1 / 3)


@dataclass(slots=True)
class Loss:
    """What is kept of a lost peer: many may be lost in the life of a worker."""

    error: Exception
    final: bool  # this incarnation never comes back
    fence: int  # dials of the peer up to this number are out of date
    met: bool  # there was a session with it, so both know the secret they share
    attempts: int = 0  # dials that failed, one after the other
    retry_at: float = 0.0  # loop time before which no dial is worth it
    refusal: Link | None = None  # a link that fails every call, made when first needed


class Links:
    """Finds, makes and forgets the links of one agent, and keeps them alive."""

    def __init__(self, agent: Agent, dialer: Dialer) -> None:
        self._agent, self._dialer = agent, dialer
        self.table: dict[bytes, Link] = {}  # by incarnation
        # By name and incarnation: somebody else may have come under that incarnation.
        self.losses: dict[tuple[str, bytes], Loss] = {}
        self._ending: list[Link] = []  # lost, but something that the peer called still runs here
        self.routes: dict[str, Link] = {}  # by name, until the directory changes
        agent.directory.changed = self.routes.clear
        self.dials: int = 0  # so far; the number of the latest
        self._turns: dict[Link, None] = {}  # new links that wait for their turn to be dialled
        self._dialling = 0  # first dials that have a turn
        self._beating: dict[Link, None] = {}  # links that have heartbeats: in use, or just before
        self._heart: asyncio.TimerHandle | None = None  # while there are any
        self._slow: asyncio.TimerHandle | None = None  # from the first connection on
        self._slow_pause = min(_SLOW, agent.options.idle / 2)
        self._resting = False  # no link has heartbeats
        self.on_rest: Callable[[bool], None] = _ignore  # told when that begins and ends
        # By name: how often something is awaited from a peer that is no answer to a call.
        self._expected: Counter[str] = Counter()
        self._watched: frozenset[bytes] = frozenset()  # as other layers said at `_watched_at`
        self._watched_at = -math.inf  # loop time

    # ── finding ─────────────────────────────────────────────────────────────────────────────────

    def find(self, to: Any) -> Link:
        """The link to the worker that `to` means; UnknownWorker, TypeError, ValueError."""
        agent = self._agent
        if agent.closed:
            raise WorkerClosed(f"{agent.name} was shut down", agent.name)
        if type(to) is PeerInfo and (met := self.table.get(to.incarnation)) is not None:
            return met  # at a rendezvous, or it was replaced meanwhile
        if (
            type(to) is PeerInfo
            and (to.name, to.incarnation) in self.losses
            and not self._is_member(to.name, to.incarnation)  # who knows where it listens
        ):
            return self.of(to)
        peer = agent.directory.find(to)
        if type(to) is PeerInfo and to.incarnation != peer.incarnation:
            # A caller that names an incarnation means no other one, least of all its successor.
            raise WorkerLost(to.name, "no", "it was restarted, and its old start is gone")
        link = self.of(peer)
        if type(to) is str and link.error is None:
            self.routes[to] = link
        return link

    def exactly(self, name: str, incarnation: bytes) -> Link:
        """The link to this very start of a worker; WorkerLost if it is lost, or was replaced."""
        link = self.table.get(incarnation)
        if link is None:
            peer = self._agent.directory.members.get(name)
            if peer is None or peer.incarnation != incarnation:
                raise WorkerLost(name, "no", "this start of it has ended")
            link = self.of(peer)
        if link.error is not None:
            raise link.as_lost()
        return link

    def of(self, peer: PeerInfo) -> Link:
        """The link to one start of a peer; made if there is none.

        A lost one is given a new link if a dial is worth it now, else one that fails every call."""
        link = self.table.get(peer.incarnation)
        if link is not None and link.peer.name != peer.name:
            self.forget(link.peer)  # it came as this one, before we knew whose incarnation that is
            link = None
        if link is None:
            loss = self.losses.get((peer.name, peer.incarnation))
            if loss is not None and not self._worth_a_dial(peer, loss):
                return self._refusal(peer, loss)
            link = self._make(peer, loss)
        elif link.peer.addresses != peer.addresses:
            was = link.peer
            link.peer = replace(peer, restricted=was.restricted, exceptions=was.exceptions)
        return link

    def _make(self, peer: PeerInfo, loss: Loss | None) -> Link:
        agent = self._agent
        # Two threads may want the first.
        return self.table.setdefault(peer.incarnation, Link(agent, peer, loss))

    def _worth_a_dial(self, peer: PeerInfo, loss: Loss) -> bool:
        if loss.final or self._agent.loop.time() < loss.retry_at:
            return False
        return self._is_member(peer.name, peer.incarnation)

    def _is_member(self, name: str, incarnation: bytes) -> bool:
        member = self._agent.directory.get(name)
        return member is not None and member.incarnation == incarnation

    def _refusal(self, peer: PeerInfo, loss: Loss) -> Link:
        """Made once for all calls: there may be thousands before the next dial."""
        link = loss.refusal
        if link is None:
            link = loss.refusal = Link(self._agent, peer)
            link.refuse_all(loss.error)
        return link

    def get(self, incarnation: bytes) -> Link | None:
        """Return the link to this start of a peer, connected or not; None if there is none."""
        return self.table.get(incarnation)

    def all(self) -> Collection[Link]:
        """List all links, with those that are lost while a call of the peer still runs here."""
        return [*self.table.values(), *self._ending]

    def suspects(self) -> list[str]:
        """Names of peers that are silent, whose connection is being made again, or that are lost
        to this worker while they are members."""
        silent = [link.peer.name for link in self.table.values() if link.suspect]
        return silent + [
            name
            for (name, incarnation), loss in self.losses.items()
            if not loss.final and self._is_member(name, incarnation)
        ]

    # ── what is under way over them ─────────────────────────────────────────────────────────────

    def outstanding(self) -> int:
        """Calls made here that have not ended."""
        return sum(
            future.info.label in _CALLS
            for link in self.all()
            for future in (*link.caller.pending.values(), *link.caller.window)
        )

    def counters(self) -> dict[str, int]:
        """For `debug_info`; all 0 at rest."""
        links = self.all()
        return {
            "pending_calls": sum(
                not future.info.label.startswith(_LOOKS)
                for link in links
                for future in (*link.caller.pending.values(), *link.caller.window)
            ),
            "running_calls": sum(
                invocation.kind == CALL and not invocation.target.quiet
                for link in links
                for invocation in link.callee.execution.running.values()
            ),
            "abandoned_calls": sum(link.callee.execution.abandoned for link in links),
            "buffered_bytes": sum(link.outbox.size for link in links),
        }

    async def drain(self, deadline: float) -> bool:
        """Wait until no call of ours is under way and none is running here; False if time is up.

        `deadline` is loop time."""
        while self.outstanding() or self.counters()["running_calls"]:
            left = deadline - self._agent.loop.time()
            if left <= 0:
                return False
            await asyncio.sleep(min(0.005, left))
        return True

    # ── connecting ──────────────────────────────────────────────────────────────────────────────

    def dial(self, link: Link) -> None:
        """Connect a link that is new or asleep, because there is something to send."""
        if link.peer.incarnation == self._agent.incarnation:
            self._dialer.dial_self(link)
            return
        if self._dialling < DIALS:
            self._dial_now(link)
        else:
            # It stays as it is until its turn: a dial of the peer that comes meanwhile is taken at
            # once.
            self._turns[link] = None

    def _dial_now(self, link: Link) -> None:
        self._dialling += 1
        turn = self._agent.loop.call_later(_TURN, self._next_turn)
        if link.is_asleep:
            task = link.wake()
        else:
            link.dial()
            task = self._agent.spawn(self._dialer.dial(link))
        task.add_done_callback(lambda _: self._turn_over(turn))

    def _turn_over(self, turn: asyncio.TimerHandle) -> None:
        """A dial has ended: the next one may begin, unless it has already."""
        if not turn.cancelled() and turn.when() > self._agent.loop.time():
            turn.cancel()
            self._next_turn()

    def _next_turn(self) -> None:
        self._dialling -= 1
        while self._turns and self._dialling < DIALS and not self._agent.closed:
            link = next(iter(self._turns))
            del self._turns[link]
            # Neither lost nor connected by the peer meanwhile.
            if link.state is LinkState.NEW or link.is_asleep:
                self._dial_now(link)

    def next_dial(self) -> int:
        """The number of the next connection that is dialled."""
        self.dials += 1
        return self.dials

    def answer(self, peer: PeerInfo, offer: Offer) -> tuple[int, int]:
        """Answer the dial of a peer: the word, and how many bytes of the session have come."""
        link = self.table.get(peer.incarnation)
        if link is not None and link.session.replaced_by(offer):
            # The old session is lost on both sides before the new one begins.
            why = "it had lost this worker, and began a new session"
            link.abort(WorkerLost(peer.name, why=why))
            link = None
        if link is None:
            if offer.word != DIAL:
                return (DUPLICATE if offer.word == LOOK else LOST), 0
            loss = self.losses.get((peer.name, peer.incarnation))
            if loss is not None and not loss.final and offer.number <= loss.fence:
                return DUPLICATE, 0  # it was given up over there, and comes late
            self._check_room(peer)
            link = self.admit(peer)
            if link is None:
                return LOST, 0
            answer = link.answer(offer)
            # A link is made for a session that begins, and for nothing else: no connection would
            # ever end this one.
            if answer[0] != ACCEPTED:
                del self.table[peer.incarnation]
            return answer
        return link.answer(offer)

    def _check_room(self, peer: PeerInfo) -> None:
        """AuthError if a partner has too many links: it can make any number of incarnations."""
        agent, name = self._agent, peer.name
        if not agent.restricts(peer):
            return
        if not agent.accounts.of(name).may_begin():
            raise AuthError(f"{name} begins new sessions too fast", name)
        links = [link for link in self.table.values() if link.peer.name == name]
        if len(links) < agent.options.partner_links:
            return
        agent.limits.reached("partner_links")
        # The new start of a partner is more likely to be there than one whose connection broke.
        away = next((link for link in links if not link.is_open), None)
        if away is None:
            raise AuthError(f"{name} has {len(links)} connections already", name)
        away.abort(WorkerLost(name, why="it was started again, more often than is kept here"))

    def admit(self, peer: PeerInfo) -> Link | None:
        """The link for a session that a peer begins, or lets us begin; None: it is fenced off.

        Neither a pause between our own dials nor the directory counts: the peer is there."""
        link = self.table.get(peer.incarnation)
        if link is None:
            loss = self.losses.get((peer.name, peer.incarnation))
            if loss is None or not loss.final:
                link = self._make(peer, loss)
        return link

    def reconnect(self, link: Link, silent: float, why: str) -> asyncio.Task[None]:
        """Connect a link again whose connection broke, from a peer silent for `silent` seconds.

        `why` it broke; "" if it was asleep."""
        return self._agent.spawn(self._dialer.reconnect(link, silent, why))

    # ── living and ending ───────────────────────────────────────────────────────────────────────

    def stirred(self, link: Link) -> None:
        """Let a link have heartbeats: it is in use, or has a new connection."""
        if self._agent.closed:
            return
        if not self._beating and self._resting:
            self._resting = False
            self.on_rest(False)
        self._beating[link] = None
        self._keep_beating()
        if self._slow is None:
            self._slow = self._agent.loop.call_later(self._slow_pause, self._beat_slowly)

    def _keep_beating(self) -> None:
        if self._heart is None:
            self._heart = self._agent.loop.call_later(self._agent.options.heartbeat, self._beat)

    def _beat(self) -> None:
        agent, self._heart = self._agent, None
        if self._ending:
            self._ending = [link for link in self._ending if not link.settled]
        for link in list(self._beating):
            link.beat()
            if link.resting or not link.is_open:
                self._beating.pop(link, None)
        agent.memory.trim()
        agent.accounts.settle()
        if self._beating or self._ending:
            self._keep_beating()
        elif not self._resting:
            self._resting = True
            self.on_rest(True)

    def _beat_slowly(self) -> None:
        """Every few seconds, also at rest: free memory, and close connections that nobody uses."""
        agent = self._agent
        agent.listener.check_descriptors()
        self._slow = agent.loop.call_later(self._slow_pause, self._beat_slowly)
        if self._heart is None:
            agent.memory.trim()
            agent.accounts.settle()
        now, idle = agent.loop.time(), agent.options.idle
        # The next attempt comes as late as the first, and not before an answer to the last one.
        again = max(idle, agent.options.handshake_timeout)
        for link in list(self.table.values()):
            if link.resting and now - link.used_at >= idle and now - link.proposed_at >= again:
                link.proposed_at = now
                link.propose_sleep()

    def expect(self, names: Iterable[str], count: int = 1) -> None:
        """Judge the silence of peers, as while a call to them is under way; -1 to end that.

        For what is awaited from a peer without a call to it. On the loop."""
        for name in names:
            self._expected[name] += count
            link = self.routes.get(name) or self._known(name)
            if count > 0 and link is not None:
                link.stir()
                if link.is_asleep:
                    self.dial(link)
        self._expected = +self._expected  # without those that nobody expects any more

    def expects(self, link: Link) -> bool:
        """Whether something is awaited from its peer that is no answer to a call."""
        return link.peer.name in self._expected

    def _known(self, name: str) -> Link | None:
        peer = self._agent.directory.get(name)
        return self.table.get(peer.incarnation) if peer is not None else None

    def lets_sleep(self, link: Link) -> bool:
        """Whether no other layer has to hear at once of the loss of the peer of a quiet link."""
        agent, now = self._agent, self._agent.loop.time()
        idle = agent.options.idle
        if idle == math.inf or not (link.address or self._dialer.addresses_of(link)):
            return False  # nobody could wake it up from here
        # Layers look through all they have, so they are asked once for many links. What they need
        # a peer for comes over its link: what they said since its last message still holds, except
        # that they may need it no more.
        age = now - self._watched_at
        if self._watched_at < link.used_at or age >= idle:
            self._watched = frozenset(peer for layer in agent.watched for peer in layer())
            self._watched_at = now
        return link.peer.incarnation not in self._watched

    def declare_lost(self, peer: PeerInfo, why: str, cause: BaseException | None = None) -> None:
        """Others know that a peer is gone: end everything with it, and let nobody back in as it."""
        link, error = self.table.get(peer.incarnation), WorkerLost(peer.name, why=why)
        error.__cause__ = cause
        loss = self.losses.get((peer.name, peer.incarnation))
        if loss is not None:
            loss.error, loss.final, loss.refusal = error, True, None
        if link is None and loss is None:
            link = self._make(peer, None)
        if link is not None and link.peer.name == peer.name:
            link.abort(error, final=True)

    async def read_out(self, peer: PeerInfo) -> None:
        """Read what a peer sent before its process ended; it is in the kernel's buffers by now.

        Bounded, because somebody else may hold the connection open, and even write to it.
        """
        link = self.table.get(peer.incarnation)
        for _ in range(_READ_OUT_ROUNDS):
            if link is None or not link.is_open:
                return
            before = link.session.received
            await asyncio.sleep(_READ_OUT)
            if link.session.received == before:
                return

    def lost(self, link: Link, error: Exception, *, final: bool) -> None:
        """A link has lost its peer: remember that, and run the callbacks of `agent.lost`."""
        agent, peer = self._agent, link.peer
        if agent.closed:
            return
        if self.table.get(peer.incarnation) is link:
            del self.table[peer.incarnation]
        self._beating.pop(link, None)
        self.routes.clear()
        if not link.settled:
            self._ending.append(link)
            self._keep_beating()
        if peer.incarnation == agent.incarnation:
            return
        self._remember(link, error, final)
        where = link.address or link.host or "no address"
        if link.may_log():
            _log.info("%s lost %s (%s): %s", agent.name, peer.name, where, error)
        _call_all(agent, agent.lost, "loss", peer, error)

    def _remember(self, link: Link, error: Exception, final: bool) -> None:
        peer = link.peer
        before = self.losses.pop((peer.name, peer.incarnation), None)
        met = bool(link.session.role)
        loss = Loss(copy.copy(error), final, link.session.fence, met)  # without its traceback
        if before is not None:
            loss.final, loss.met = final or before.final, met or before.met
        if not met:  # a dial that failed
            loss.attempts = 1 if before is None else before.attempts + 1
            pause = _REDIAL.delay(loss.attempts - 1, self._agent.runtime.random)
            loss.retry_at = self._agent.loop.time() + pause
        self.losses[peer.name, peer.incarnation] = loss
        if len(self.losses) > LOST_PEERS:  # its session could not go on here in any case
            forget_one(self.losses, lambda key: key[0])

    def returned(self, peer: PeerInfo) -> None:
        """A new session with a peer begins that was lost before."""
        self.losses.pop((peer.name, peer.incarnation), None)
        _log.info("%s: %s is back, in a new session", self._agent.name, peer.name)
        _call_all(self._agent, self._agent.returned, "return", peer)

    def forget(self, peer: PeerInfo) -> None:
        """Drop the link of a peer, as if there had been none."""
        link = self.table.pop(peer.incarnation, None)
        self.routes.clear()
        if link is not None:
            link.lose(WorkerLost(peer.name, why="it left the cluster"))
            if link.connection is not None:
                link.connection.transport.abort()

    def close(self) -> list[Link]:
        """No more heartbeats, and no more links; those that there are."""
        self.routes.clear()
        for timer in (self._heart, self._slow):
            if timer is not None:
                timer.cancel()
        return list(self.all())


def _ignore(resting: bool) -> None:
    """Do nothing when a rest begins or ends."""


def _call_all(agent: Agent, callbacks: list[Any], event: str, peer: PeerInfo, *args: Any) -> None:
    """Tell other layers of an event; the failure of one is nothing to the others."""
    for callback in list(callbacks):
        try:
            callback(peer, *args)
        except Exception:
            _log.exception("%s: a callback for the %s of %s failed", agent.name, event, peer.name)
