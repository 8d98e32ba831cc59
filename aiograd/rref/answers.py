"""Futures that know the reference they are about.

They act when they end, without callbacks and tasks of their own, because references are made and
fetched by the thousand.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, RRefExpired
from aiograd.rpc import calls
from aiograd.rpc.future import Future
from aiograd.rref.control import owner_lost
from aiograd.rref.records import Held, Owned, again

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.deadlines import Bucket
    from aiograd.rref.rref import RRef


def block_on(agent: Agent, future: asyncio.Future[Any]) -> Any:
    """Wait, in a thread, for a future of the loop."""
    outer: asyncio.Future[Any] = agent.loop.create_future()
    latch = calls._Latch(outer)
    agent.from_thread(future.add_done_callback, functools.partial(_hand_on, outer))
    try:
        return latch.wait(agent)
    finally:  # an error's traceback holds this frame, which must not hold the error in turn
        del outer, latch, future


def _hand_on(outer: asyncio.Future[Any], future: asyncio.Future[Any]) -> None:
    if outer.done():
        return
    if future.cancelled():
        outer.cancel()
    elif (error := future.exception()) is not None:
        outer.set_exception(error)
    else:
        outer.set_result(future.result())


def wake(future: asyncio.Future[None]) -> Callable[[], None]:
    """Return what ends a future that only waits for something to happen."""

    def happened() -> None:
        if not future.done():
            future.set_result(None)

    return happened


class Creation(Future[Any]):
    """The answer to a creation. Never fails itself: what came of it is told to `ended`."""

    __slots__ = ("_ended", "_subject")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Exception | None], None],
        subject: RRef | None,
    ) -> None:
        super().__init__(loop=loop)
        self._ended = ended
        self._subject = subject  # kept until then

    def set_result(self, result: Any) -> None:
        self._subject = None
        super().set_result(None)
        self._ended(None)

    def set_exception(self, exception: Any) -> None:
        self._subject = None
        super().set_result(None)
        self._ended(exception)


class Answer(Future[Any]):
    """What the owner of a reference says. It keeps the reference, so that no release overtakes."""

    __slots__ = ("_rref",)

    def __init__(self, loop: asyncio.AbstractEventLoop, rref: RRef | None) -> None:
        super().__init__(loop=loop)
        self._rref = rref

    def follow(self, held: Held) -> None:
        """End with the creation if that fails: the owner may never hear of it, and would wait."""
        if held.unanswered:
            held.on_confirmed.append(functools.partial(self._created, held))

    def _created(self, held: Held) -> None:
        if held.error is not None and not self.done():
            # In the next tick: if the owner is lost, that ends this answer too, and says more.
            self.get_loop().call_soon(self._give_up, held.error)

    def _give_up(self, error: Exception) -> None:
        if not self.done():
            caller = self._caller
            self.set_exception(again(error))
            if caller is not None:
                caller.cancelled(self)

    def set_result(self, result: Any) -> None:
        super().set_result(result)
        self._rref = None

    def set_exception(self, exception: Any) -> None:
        if (rref := self._rref) is not None:
            self._rref = None
            if rref._type is self:  # an awaited error holds frames that hold the reference
                rref._type = None
            held = rref._ref
            if isinstance(held, Held):
                if getattr(exception, "worker", None) == held.owner.name:
                    exception = owner_lost(exception)
                if isinstance(exception, RRefExpired):
                    held.error = again(exception)
        super().set_exception(exception)


class Wait(Future[Any]):
    """The outcome of a value that is made here."""

    __slots__ = ("_owned", "_owner")

    def __init__(self, loop: asyncio.AbstractEventLoop, owned: Owned, owner: str) -> None:
        super().__init__(loop=loop)
        self._owned, self._owner = owned, owner

    def begin(self, bucket: Bucket | None) -> None:
        """Wait for the outcome; `bucket` tells when the time is over."""
        if self._owned.ready:
            self.end()
        elif not self.done():
            self._owned.waiters[self] = self.end
            if bucket is not None:
                self._bucket = bucket
                bucket[self] = None

    def end(self) -> None:
        """Take the outcome, which is there now."""
        self._leave()
        owned = self._owned
        if not self.done():
            if owned.error is not None:
                self.set_exception(again(owned.error, owned.trace))
            else:
                self.set_result(owned.value)

    def expire(self) -> None:
        self._leave()
        if not self.done():
            self.set_exception(DeadlineExceeded(self._owner, self._function, self._seconds))

    def cancel(self, msg: Any | None = None) -> bool:
        self._leave()
        return super().cancel(msg)

    def _leave(self) -> None:
        self._owned.waiters.pop(self, None)
        if self._bucket is not None:
            self._bucket.pop(self, None)
            self._bucket = None
