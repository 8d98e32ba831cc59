"""Coming back: what happens between the end of a connection and the next one.

The side that dialled dials again; the other one waits, and nudges it in case that it has not
noticed. A worker that is gone is told from a network that is away by its door: where a process
ended, nobody listens any more, and the connection is refused at once. Who is only slow to answer is
given the time of a handshake.

    connection ends ─┬─ goodbye, or nothing acknowledged for seconds ──────────────▶ lost
                     └─ knock ─┬─ accepted ──▶ the session goes on
                               ├─ refused, or somebody else is there now ──────────▶ lost
                               └─ nothing within `Options.resume` ─────────────────▶ lost

What goes on where is `wire.resume`'s knowledge.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from aiograd.errors import WorkerLost
from aiograd.rpc.transport.network import is_loopback, split, split_tcp
from aiograd.wire.session import ACCEPTED, LOST

if TYPE_CHECKING:
    from aiograd.rpc.link.greeting import Greeting
    from aiograd.rpc.link.link import Link
    from aiograd.rpc.link.listener import Doors

_log = logging.getLogger("aiograd")
_PAUSE: Final = 0.03  # seconds between two knocks, doubled each time
_LONGEST: Final = 0.3
_PATIENCE: Final = 0.5  # seconds to connect, doubled each time: a fresh SYN beats a late one
_LEAST: Final = 0.5  # seconds, also for a peer that was silent before


async def come_back(doors: Doors, link: Link, silent: float, why: str) -> None:
    """Connect a link again; it is open or lost afterwards.

    `silent`: seconds for which nothing had come when the connection broke."""
    await _Return(doors, link, silent, why).run()


class _Return:
    """One time that a link is away."""

    def __init__(self, doors: Doors, link: Link, silent: float, why: str) -> None:
        self._doors, self._link, self._why = doors, link, why
        self._agent = link.agent
        options = self._agent.options
        left = max(min(options.resume, options.silence + 1 - silent), _LEAST)
        self._limit = self._now() + left
        self._last = self._limit + options.handshake_timeout  # even for one that answers

    def _now(self) -> float:
        return self._agent.loop.time()

    async def run(self) -> None:
        link, random = self._link, self._agent.runtime.random
        pause, patience = _PAUSE, _PATIENCE
        name, own = link.peer.name, self._agent.name
        _log.info("%s: the connection to %s broke: %s", own, name, self._why)
        dials = link.session.role == "dials"
        while link.is_away:
            if dials:
                for address in self._addresses():
                    await self._knock(address, patience)
                patience *= 2
            dials = True  # the side that waits gives the other one a moment first
            if link.is_away:
                if self._now() >= self._limit:
                    self._give_up("it did not come back")
                    return
                left = self._limit - self._now()
                await asyncio.sleep(min(pause * random.uniform(0.5, 1.5), left))
                pause = min(pause * 2, _LONGEST)

    def _addresses(self) -> list[str]:
        peer, dialled = self._link.peer, self._link.address
        member = self._agent.directory.get(peer.name)  # who dialled us did not say where it listens
        if member is not None and member.incarnation == peer.incarnation:
            peer = member
        known = peer.addresses
        return [dialled, *(each for each in known if each != dialled)] if dialled else list(known)

    async def _knock(self, address: str, patience: float) -> None:
        """Try one address; afterwards the link is open, lost, or still away."""
        link = self._link
        if not link.is_away:
            return
        try:
            greeting = await self._doors.knock(address, lambda _: link.offer(), link.peer, patience)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            if self._is_its_door(address):
                self._give_up(f"it is gone: {error}")
            return
        except OSError:
            return
        if greeting.heard:  # it is there, and may only need time
            self._limit = min(max(self._limit, self._now() + _LEAST), self._last)
        if greeting.error is not None:
            if isinstance(greeting.error, WorkerLost):
                self._give_up(greeting.error.why)
        elif link.is_away and greeting.status == ACCEPTED:
            self._doors.take(link, greeting, address)
        else:
            greeting.transport.abort()
            if link.is_away:
                self._answered(greeting)

    def _answered(self, greeting: Greeting) -> None:
        if greeting.status == LOST:
            self._give_up("it took this worker for lost")

    def _is_its_door(self, address: str) -> bool:
        """Whether nobody at this address means that the worker has ended."""
        link = self._link
        if address == link.address or split(address)[0] != "tcp":
            return True
        host = split_tcp(address)[0]
        return host == link.host or (is_loopback(host) and is_loopback(link.host))

    def _give_up(self, why: str) -> None:
        self._link.lose(WorkerLost(self._link.peer.name, why=f"{self._why}; {why}"))
