"""Notifications: messages of the library that nobody waits for, and that must not get lost.

    something ends ──▶ `Coalescer.schedule` ──5 ms at most──▶ `Notifier.notify`, one per recipient
    (a dropped reference, a context that was left)

`Coalescer` decides when to send: the first notification at once, what follows in batches. A message
costs the same whether it carries one notification or a hundred, and they often come one per loop
iteration.

`Notifier` sends until acknowledged, at the price of an ordinary request:

    plain request ──answered──▶ ended          nearly always
          └──open for a whole sweep, or refused by the link──▶ `retry_request` ──▶ ended

Nearly every notification is answered the first time, so the first attempt has neither a task nor a
timer of its own. One timer for all of them finds those that are open for too long, and hands these
over to the retry driver.

A notification belongs to the session in which it was sent first: if that is lost, it has failed.
Repeated in the next session, it might name what was taken back meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Container
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import AiogradError, WorkerClosed, WorkerLost
from aiograd.rpc.directory import PeerInfo

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.link.link import Link

INTERVAL: Final = 0.005  # seconds between two sends of one coalescer
SWEEP: Final = 0.2  # seconds; an answer takes far less, and lost messages are rare

Ended = Callable[[Any, Any], None]
"""ended(answer, error): one of them is None. Runs on the loop."""

# Link of its session (None: there was none), recipient, callback, service and arguments.
_Notification = tuple["Link | None", PeerInfo, Ended, str, tuple[Any, ...]]


class Coalescer:
    """Calls `send` on the loop soon after `schedule`, at most once per INTERVAL.

    What is to be sent is kept by the caller; `send` takes all of it. It runs in `context`, not in
    that of the code that happened to schedule it, which may have a deadline of its own.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: Context, send: Callable[[], None]
    ) -> None:
        self._loop, self._context, self._send = loop, context, send
        self._scheduled = False  # `send` will be called
        self._not_before = 0.0  # loop time
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Let `send` be called soon. From any thread, finalizers included.

        RuntimeError if the loop is closed.
        """
        # No lock, because a finalizer may interrupt this very function: two threads that both see
        # False cost one more call of `send`, which finds nothing to do.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._run, context=self._context)

    def _run(self) -> None:
        if self._loop.time() < self._not_before:
            self._timer = self._loop.call_at(self._not_before, self._run, context=self._context)
            return
        # The flag first: a notification that comes up during `send` schedules another one.
        self._timer, self._scheduled = None, False
        self._not_before = self._loop.time() + INTERVAL
        self._send()

    def close(self) -> None:
        """Cancel a call of `send` that waits for its interval."""
        if self._timer is not None:
            self._timer.cancel()


class Notifier:
    """The notifications of one part of a worker that have no answer yet."""

    def __init__(self, agent: Agent, unreachable: Container[bytes], context: Context) -> None:
        self._agent = agent
        self._unreachable = unreachable  # incarnations; a live view, kept by the caller
        self._context = context  # in which callbacks run
        self._open: dict[asyncio.Future[Any], _Notification] = {}
        self._timer: asyncio.TimerHandle | None = None

    def notify(self, to: PeerInfo, ended: Ended, service: str, *args: Any, lazy: bool) -> None:
        """Send until answered; `ended` gets the answer, or the error if the session is lost.

        `lazy`: low priority, nobody waits for the answer. On the loop only. An error that is known
        before sending is given to `ended` at once.
        """
        try:
            name = self._address(to)
            future = self._agent.request(name, service, *args, timeout=math.inf, lazy=lazy)
        except AiogradError as error:
            ended(None, error)
            return
        # After the request, which makes the link if there is none.
        link = self._agent.links.get(to.incarnation)
        self._open[future] = (link, to, ended, service, args)
        future.add_done_callback(self._answered, context=self._context)
        if self._timer is None:
            self._timer = self._agent.loop.call_later(SWEEP, self._sweep, frozenset())

    def _address(self, to: PeerInfo) -> str:
        """Return the name of a worker if this very incarnation is still a member."""
        member = self._agent.directory.get(to.name)
        if member is None or member.incarnation != to.incarnation:
            raise WorkerLost(to.name, "no", "another worker has its name now" if member else "")
        return to.name

    def _answered(self, future: asyncio.Future[Any]) -> None:
        if (notification := self._open.pop(future, None)) is None:
            return  # `_sweep` cancelled it and sends it again
        error = WorkerClosed() if future.cancelled() else future.exception()
        _, to, ended, _, _ = notification
        if error is None:
            ended(future.result(), None)
        elif isinstance(error, WorkerLost) and to.incarnation not in self._unreachable:
            # The message was refused, for example by fault injection, but no session was lost.
            self._retry(*notification)
        else:
            ended(None, error)

    def _sweep(self, before: frozenset[asyncio.Future[Any]]) -> None:
        """Retry what was open at the last sweep already, so for SWEEP seconds at least."""
        self._timer = None
        for future in [future for future in self._open if future in before]:
            notification = self._open.pop(future)
            future.cancel()
            self._retry(*notification)
        if self._open:
            now = frozenset(self._open)
            self._timer = self._agent.loop.call_later(SWEEP, self._sweep, now)

    def _retry(
        self, link: Link | None, to: PeerInfo, ended: Ended, service: str, args: tuple[Any, ...]
    ) -> None:
        try:
            name = self._address(to)
            # Not in the next session: this may name what was taken back when the old one was lost.
            if link is None or link.error is not None:
                raise WorkerLost(to.name, why="the session with it was lost")
            future = self._agent.request(name, service, *args, timeout=math.inf, retry=True)
        except AiogradError as error:
            ended(None, error)
        else:
            future.add_done_callback(functools.partial(give_outcome, ended), context=self._context)

    def close(self) -> None:
        """Stop sweeping; open requests end with their links."""
        if self._timer is not None:
            self._timer.cancel()


def give_outcome(ended: Ended, future: asyncio.Future[Any]) -> None:
    """Call `ended` with the outcome of a future that is done."""
    if future.cancelled():
        ended(None, WorkerClosed())
    else:
        error = future.exception()
        ended(None if error else future.result(), error)
