"""Messages that are sent again until they are answered, at the price of an ordinary request.

A message belongs to the session in which it was sent first: if that is lost, it has failed. Said
again in the next one, it might name what was taken back meanwhile.

Nearly every message is answered the first time. So the first attempt is a plain request, and a look
at what is open, now and then, finds those that need patience; they are left to the agent's own way
of insisting.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Container
from contextvars import Context
from typing import TYPE_CHECKING, Any

from aiograd.errors import AiogradError, OwnerLost, WorkerClosed, WorkerLost
from aiograd.rpc.directory import PeerInfo

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.link.link import Link

Ended = Callable[[Any, Any], None]  # gets an answer, or an error

_PATIENCE = 0.2  # seconds; an answer takes far less, and lost messages are rare


# The link of its session (None: there was none), to whom, who waits for the end, and what it says.
_Message = tuple["Link | None", PeerInfo, Ended, str, tuple[Any, ...]]


class Telling:
    """What one worker has told others and has no answer to."""

    def __init__(self, agent: Agent, gone: Container[bytes], context: Context) -> None:
        self._agent = agent
        self._gone = gone  # incarnations that are out of reach
        self._context = context  # in which answers are taken
        self._open: dict[asyncio.Future[Any], _Message] = {}
        self._look: asyncio.TimerHandle | None = None

    def reach(self, party: PeerInfo) -> str:
        """How to address a worker, if this very start of it is still a member; else OwnerLost."""
        peer = self._agent.directory.get(party.name)
        if peer is None or peer.incarnation != party.incarnation:
            raise OwnerLost(party.name, "no", "another worker has its name now" if peer else "")
        return party.name

    def tell(
        self, to: PeerInfo, ended: Ended, service: str, *args: Any, lazy: bool = False
    ) -> None:
        """Send until answered; `ended` gets the answer, or the error if `to` is gone.

        `lazy`: nobody waits for that."""
        try:
            future = self._agent.request(
                self.reach(to), service, *args, timeout=math.inf, lazy=lazy
            )
        except AiogradError as error:
            ended(None, error)
            return
        link = self._agent.links.get(to.incarnation)
        self._open[future] = (link, to, ended, service, args)
        future.add_done_callback(self._answered, context=self._context)
        if self._look is None:
            self._look = self._agent.loop.call_later(_PATIENCE, self._look_around, frozenset())

    def _answered(self, future: asyncio.Future[Any]) -> None:
        if (message := self._open.pop(future, None)) is None:
            return  # it is being repeated
        link, to, ended, service, args = message
        error = WorkerClosed() if future.cancelled() else future.exception()
        if error is None:
            ended(future.result(), None)
        elif isinstance(error, WorkerLost) and to.incarnation not in self._gone:
            self._repeat(link, to, ended, service, args)
        else:
            ended(None, error)

    def _look_around(self, before: frozenset[asyncio.Future[Any]]) -> None:
        """Repeat what has been open for a whole round."""
        self._look = None
        for future in [future for future in self._open if future in before]:
            message = self._open.pop(future)
            future.cancel()
            self._repeat(*message)
        if self._open:
            again = frozenset(self._open)
            self._look = self._agent.loop.call_later(_PATIENCE, self._look_around, again)

    def _repeat(
        self, link: Link | None, to: PeerInfo, ended: Ended, service: str, args: tuple[Any, ...]
    ) -> None:
        try:
            name = self.reach(to)
            if link is None or link.error is not None:
                raise WorkerLost(to.name, why="the session with it was lost")
            future = self._agent.request(name, service, *args, timeout=math.inf, retry=True)
        except AiogradError as error:
            ended(None, error)
        else:
            future.add_done_callback(functools.partial(hand_over, ended), context=self._context)

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()


def hand_over(ended: Ended, future: asyncio.Future[Any]) -> None:
    """Give the outcome of a future to who waits for it."""
    if future.cancelled():
        ended(None, WorkerClosed())
    else:
        error = future.exception()
        ended(None if error else future.result(), error)
