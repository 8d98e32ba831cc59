"""The links of one worker: one for each start of a peer, and what became of those that are lost.

What is under way over all of them is counted here, too: a worker is at rest when that is nothing.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiograd.errors import WorkerClosed, WorkerLost
from aiograd.rpc.directory import LOST_PEERS, PeerInfo
from aiograd.rpc.link import Link
from aiograd.rpc.reconnect import come_back
from aiograd.wire.messages import CALL

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.doors import Doors

_log = logging.getLogger("aiograd")
# Seconds in which something of what waits in a socket is read, if anything does; and how often.
_READ_OUT, _READ_OUT_ROUNDS = 0.05, 10
_CALLS = frozenset({"call", "op", "remote"})  # kinds of messages that are the user's


class Links:
    """Finds, makes and forgets the links of one agent, and keeps them alive."""

    def __init__(self, agent: Agent, doors: Doors) -> None:
        self._agent, self._doors = agent, doors
        self.table: dict[bytes, Link] = {}  # by incarnation
        # Names and incarnations of lost peers, and why; somebody else may have come as one of them.
        self.buried: dict[tuple[str, bytes], Exception] = {}
        self.routes: dict[str, Link] = {}  # by name, until the directory changes
        agent.directory.changed = self.routes.clear
        self._dials = 0  # so far
        self._heart: asyncio.TimerHandle | None = None

    # ── finding ─────────────────────────────────────────────────────────────────────────────────

    def find(self, to: Any) -> Link:
        """The link to the worker that `to` means; UnknownWorker, TypeError, ValueError."""
        agent = self._agent
        if agent.closed:
            raise WorkerClosed(f"{agent.name} was shut down", agent.name)
        if type(to) is PeerInfo and (met := self.table.get(to.incarnation)) is not None:
            return met  # at a rendezvous, or it was replaced meanwhile
        if type(to) is PeerInfo and (to.name, to.incarnation) in self.buried:
            return self.of(to)
        peer = agent.directory.find(to)
        if type(to) is PeerInfo and to.incarnation != peer.incarnation:
            # Whoever names an incarnation means no other one, least of all its successor.
            raise WorkerLost(to.name, "no", "it was restarted, and its old start is gone")
        link = self.of(peer)
        if type(to) is str:
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
        """The link to one start of a peer; made if there is none."""
        agent = self._agent
        link = self.table.get(peer.incarnation)
        if link is not None and link.peer.name != peer.name:
            self.forget(link.peer)  # it came as this one, before we knew whose incarnation that is
            link = None
        if link is None:
            link = Link(agent, peer)
            if (error := self.buried.get((peer.name, peer.incarnation))) is not None:
                link.state, link.error = "lost", error
                return link
            link = self.table.setdefault(peer.incarnation, link)  # two threads may want the first
            if self._heart is None:
                if agent.here():
                    self._begin_to_beat()
                else:
                    agent.from_thread(self._begin_to_beat)
        elif link.peer.addresses != peer.addresses:
            was = link.peer
            link.peer = replace(peer, restricted=was.restricted, exceptions=was.exceptions)
        return link

    def get(self, incarnation: bytes) -> Link | None:
        return self.table.get(incarnation)

    def all(self) -> Collection[Link]:
        return self.table.values()

    def suspects(self) -> list[str]:
        """Names of peers that are silent, or whose connection is being made again."""
        return [link.peer.name for link in self.table.values() if link.suspect]

    # ── what is under way over them ─────────────────────────────────────────────────────────────

    def outstanding(self) -> int:
        """Calls made here that have not ended."""
        return sum(
            future._kind in _CALLS
            for link in self.all()
            for future in (*link.caller.pending.values(), *link.caller.waiting)
        )

    def counters(self) -> dict[str, int]:
        """For `debug_info`; all 0 at rest."""
        links = self.all()
        return {
            "pending_calls": sum(
                future._kind != "look"
                for link in links
                for future in (*link.caller.pending.values(), *link.caller.waiting)
            ),
            "running_calls": sum(
                incoming.kind == CALL and not incoming.target.quiet
                for link in links
                for incoming in link.callee.running.values()
            ),
            "abandoned_calls": sum(link.callee.abandoned for link in links),
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
        """Connect a link that has something to send."""
        if link.peer.incarnation == self._agent.incarnation:
            self._doors.open_self(link)
            return
        link.state = "dialling"
        self._agent.spawn(self._doors.dial(link))

    def next_dial(self) -> int:
        """The number of the next connection that is dialled."""
        self._dials += 1
        return self._dials

    def come_back(self, link: Link, silent: float, why: str) -> asyncio.Task[None]:
        """Connect a link again whose connection broke, from a peer silent for so many seconds."""
        return self._agent.spawn(come_back(self._doors, link, silent, why))

    # ── living and ending ───────────────────────────────────────────────────────────────────────

    def _begin_to_beat(self) -> None:
        if self._heart is None and not self._agent.closed:
            heartbeat = self._agent.options.heartbeat
            self._heart = self._agent.loop.call_later(heartbeat, self._beat)

    def _beat(self) -> None:
        agent = self._agent
        self._heart = agent.loop.call_later(agent.options.heartbeat, self._beat)
        for link in list(self.table.values()):
            if link.settled:
                self._bury(link)
            else:
                link.beat()
        agent.memory.trim()

    def declare_lost(self, peer: PeerInfo, why: str) -> None:
        """Others know that a peer is gone: end everything with it, and let nobody back in as it."""
        link = self.of(peer)
        if link.connection is not None:
            link.connection.transport.abort()
        link.lose(WorkerLost(peer.name, why=why))

    async def read_out(self, peer: PeerInfo) -> None:
        """Read what a peer sent before its process ended; it is in the kernel's buffers by now.

        Bounded, because somebody else may hold the connection open, and even write to it.
        """
        link = self.table.get(peer.incarnation)
        for _ in range(_READ_OUT_ROUNDS):
            if link is None or link.state != "open":
                return
            before = link.session.received
            await asyncio.sleep(_READ_OUT)
            if link.session.received == before:
                return

    def lost(self, peer: PeerInfo, error: Exception) -> None:
        """A link has lost its peer: tell whoever wants to know."""
        agent = self._agent
        if agent.closed or peer.incarnation == agent.incarnation:
            return
        for callback in list(agent.lost):
            try:
                callback(peer, error)
            except Exception:
                _log.exception("%s: a callback for the loss of %s failed", agent.name, peer.name)

    def forget(self, peer: PeerInfo) -> None:
        """Drop the link of a peer, as if there had been none."""
        link = self.table.pop(peer.incarnation, None)
        self.routes.clear()
        if link is not None:
            link.lose(WorkerLost(peer.name, why="it left the cluster"))
            if link.connection is not None:
                link.connection.transport.abort()

    def _bury(self, link: Link) -> None:
        """Keep of a lost peer only that it is: many may be lost in the life of a worker."""
        assert link.error is not None
        peer = link.peer
        del self.table[peer.incarnation]
        self.routes.clear()
        self.buried[peer.name, peer.incarnation] = copy.copy(link.error)  # without its traceback
        if len(self.buried) > LOST_PEERS:  # its session could not go on here in any case
            del self.buried[next(iter(self.buried))]

    def close(self) -> list[Link]:
        """No more heartbeats, and no more links; those that there are."""
        self.routes.clear()
        if self._heart is not None:
            self._heart.cancel()
        return list(self.table.values())
