"""`Group.map`: many calls shared among several workers, the next one to the one that is free.

    items ──▶ member with room ──▶ call ──▶ its result in place ──▶ the next item to that member

A member has one call at first. Calls that take less than `SHORT` would then wait for messages more
than they compute, so while they are that short a member gets more of them at once, and fewer again
when they are not. Coroutine functions wait rather than compute, so a member gets `COROUTINES` of
them at once. All of this happens between awaits, on the loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

from aiograd.errors import UnknownWorker, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.future import Future

SHORT: Final = 0.002  # seconds: about ten round trips on one host
MOST: Final = 64  # calls at once of one member, however short they are
COROUTINES: Final = 64


class _Member:
    __slots__ = ("busy", "name", "room")

    def __init__(self, name: Any, room: int) -> None:
        self.name = name
        self.busy = 0  # calls under way
        self.room = room  # calls that may be


class BalancedMap:
    """One `Group.map`. `results` ends with the results in the order of items."""

    def __init__(
        self,
        agent: Agent,
        names: Sequence[Any],
        func: Callable[..., Any],
        items: Sequence[Any],
        *,
        timeout: float | None,
        return_exceptions: bool,
        concurrency: int | None,
        frame: FrameType,
    ) -> None:
        self._agent, self._func, self._timeout = agent, func, timeout
        self._return_exceptions = return_exceptions
        self._frame: FrameType | None = frame  # dropped at the end: it holds the caller's variables
        self._adapts = concurrency is None and not inspect.iscoroutinefunction(func)
        room = 1 if self._adapts else concurrency or COROUTINES
        self._members = [_Member(name, room) for name in names]
        self._waiting = deque(enumerate(items))
        self._found: list[Any] = [None] * len(items)
        self._open: set[Future[Any]] = set()
        self._left = len(items)
        self.results: asyncio.Future[list[Any]] = agent.loop.create_future()
        self.results.add_done_callback(self._ended)

    def start(self) -> None:
        """Give every member its first items; what is known before sending is raised here."""
        if not self._left:
            self.results.set_result([])
            return
        try:
            # In turns, so that fewer items than room are spread as well.
            while self._waiting and any(m.busy < m.room for m in self._members):
                for member in self._members:
                    if self._waiting and member.busy < member.room:
                        self._give(member)
        except BaseException:
            self._ended(None)  # the caller gets no future to cancel the rest by
            raise

    def start_or_fail(self) -> None:
        """Do the same for another thread, which finds the error in `results`."""
        try:
            self.start()
        except Exception as error:
            if not self.results.done():
                self.results.set_exception(error)

    def _give(self, member: _Member) -> None:
        index, item = self._waiting.popleft()
        future = self._agent.call(
            member.name, self._func, (item,), timeout=self._timeout, frame=self._frame
        )
        member.busy += 1
        self._open.add(future)
        begun = self._agent.loop.time()
        # The callback runs in the context in which `map` was called: later calls belong to the same
        # autograd context, deadline and recording as the first ones.
        future.add_done_callback(lambda done: self._done(member, index, begun, done))

    def _done(self, member: _Member, index: int, begun: float, future: asyncio.Future[Any]) -> None:
        assert isinstance(future, Future)
        self._open.discard(future)
        member.busy -= 1
        if self.results.done():
            if not future.cancelled():
                future.exception()  # retrieved: only the first failure is raised
            return
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if error is None:
            self._put(index, future.result())
        elif not self._return_exceptions:
            self._fail(error)
            return
        else:
            self._put(index, error)
            # A lost worker fails at once, so it would always be free and take all other items.
            if isinstance(error, WorkerLost | UnknownWorker):
                self._retire(member)
        if self._adapts:
            short = self._agent.loop.time() - begun < SHORT
            member.room = min(member.room + 1, MOST) if short else max(member.room - 1, 1)
        self._refill(member, error)

    def _refill(self, member: _Member, error: BaseException | None) -> None:
        """Give a member items as far as it has room; without members, fail what is left."""
        while self._waiting and not self.results.done():
            if not self._members:
                index, _ = self._waiting.popleft()
                self._put(index, error)
                continue
            if member not in self._members or member.busy >= member.room:
                return
            index = self._waiting[0][0]
            try:
                self._give(member)
            except Exception as refused:  # an item that cannot travel, or a member that has left
                if not self._return_exceptions:
                    self._fail(refused)
                    return
                if isinstance(refused, WorkerLost | UnknownWorker):
                    self._retire(member)
                    error = refused
                self._put(index, refused)

    def _retire(self, member: _Member) -> None:
        if member in self._members:
            self._members.remove(member)

    def _put(self, index: int, value: Any) -> None:
        self._found[index] = value
        self._left -= 1
        if not self._left and not self.results.done():
            self.results.set_result(self._found)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.results.cancel()
        else:
            self.results.set_exception(error)

    def _ended(self, _: object) -> None:
        self._frame = None
        self._waiting.clear()
        for future in list(self._open):
            future.cancel()
