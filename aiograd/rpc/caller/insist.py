"""Requests that are sent again until they are answered.

For the library's own idempotent messages only: a user's call runs at most once. Ends with the first
answer, at the deadline, or when the session is lost: in another one the peer may be told the same
thing after it was taken back. There are many, and nearly all are answered the first time, so this
is a timer and callbacks, not a task.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, WorkerLost
from aiograd.rpc.future import Future, fail

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.link.link import Link

_FIRST, _LONGEST = 0.2, 2.0  # seconds between attempts: doubled each time


def insist(
    agent: Agent,
    future: Future[Any],
    link: Link,
    service: str,
    args: tuple[Any, ...],
    deadline: float,
    carry: bool,
) -> None:
    """Answer `future` with the first answer to as many requests as it takes."""
    context = agent.context.copy()  # not the caller's: its deadline is not that of one attempt
    efforts = _Efforts(agent, future, link, service, args, deadline, carry, context)
    if asyncio._get_running_loop() is agent.loop:
        context.run(efforts.start)
    else:
        agent.from_thread(context.run, efforts.start)


class _Efforts:
    """All attempts at one request."""

    __slots__ = (
        "_agent",
        "_args",
        "_attempts",
        "_carry",
        "_context",
        "_deadline",
        "_future",
        "_link",
        "_pause",
        "_peer",
        "_service",
        "_timer",
    )

    def __init__(
        self,
        agent: Agent,
        future: Future[Any],
        link: Link,
        service: str,
        args: tuple[Any, ...],
        deadline: float,
        carry: bool,
        context: contextvars.Context,
    ) -> None:
        self._agent, self._future = agent, future
        self._link, self._peer = link, link.peer
        self._service, self._args, self._carry = service, args, carry
        self._deadline, self._context = deadline, context
        self._pause = _FIRST
        self._attempts: dict[Future[Any], None] = {}  # sent, and not answered so far, in order
        self._timer: asyncio.TimerHandle | None = None  # of the next attempt

    def start(self) -> None:
        self._future.add_done_callback(self._finish, context=self._context)
        self._try()

    def _try(self) -> None:
        if self._future.done():
            return
        loop = self._agent.loop
        left = self._deadline - loop.time() if self._deadline != math.inf else math.inf
        if left <= 0:
            fail(
                self._future,
                DeadlineExceeded(self._peer.name, self._service, self._future._seconds),
            )
            return
        if (now := self._agent.directory.get(self._peer.name)) is not self._peer and (
            now is None or now.incarnation != self._peer.incarnation
        ):
            fail(self._future, WorkerLost(self._peer.name, why="it left, or was restarted"))
            return
        if not self._still_there():
            fail(self._future, WorkerLost(self._peer.name, why="the session with it was lost"))
            return
        try:
            attempt = self._agent.request(
                self._peer, self._service, *self._args, timeout=math.inf, carry=self._carry
            )
        except Exception as error:
            fail(self._future, error)
            return
        self._attempts[attempt] = None
        attempt.add_done_callback(self._ended, context=self._context)
        pause = min(self._pause, left)
        self._timer = loop.call_later(pause, self._try, context=self._context)
        self._pause = min(self._pause * 2, _LONGEST)

    def _ended(self, attempt: Future[Any]) -> None:
        """An attempt was answered or failed; one that never left is no answer."""
        self._attempts.pop(attempt, None)
        if attempt.cancelled():
            return
        error = attempt.exception()
        if error is None:
            if not self._future.done():
                self._future.set_result(attempt.result())
        elif not (isinstance(error, WorkerLost) and self._still_there()):
            fail(self._future, error)

    def _still_there(self) -> bool:
        return not self._agent.closed and self._link.error is None

    def _finish(self, future: Future[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for attempt in list(self._attempts):
            attempt.cancel()
