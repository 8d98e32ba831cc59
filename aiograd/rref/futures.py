"""Futures that know the reference they are about.

They act when they end, without callbacks and tasks of their own, because references are made and
fetched by the thousand.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, RRefExpired, WorkerLost
from aiograd.rpc import api
from aiograd.rpc.caller.replies import NO_VALUE
from aiograd.rpc.future import CallInfo, Future
from aiograd.rref.refcount.records import OwnerRecord, UserRecord, fresh_copy, with_callback
from aiograd.rref.services import owner_lost

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.runtime.deadlines import Bucket
    from aiograd.rref.registry import RRefs
    from aiograd.rref.rref import RRef


def block_on(agent: Agent, future: asyncio.Future[Any]) -> Any:
    """Wait, in a thread, for a future of the loop."""
    outer: asyncio.Future[Any] = agent.loop.create_future()
    latch = api._Latch(outer)
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


_end = asyncio.Future.set_result  # without the detour of `super()`: it is done by the thousand


class OwnerFuture(Future[Any]):
    """What the owner of a reference says. It keeps the reference, so that no release overtakes."""

    __slots__ = ("_rref",)
    _rref: RRef | None  # set by who makes it

    def follow(self, held: UserRecord) -> None:
        """End with the creation if that fails: the owner may never hear of it, and would wait."""
        if held.unanswered:
            held.on_failed = with_callback(held.on_failed, functools.partial(self._failed, held))

    def _failed(self, held: UserRecord) -> None:
        if not self.done():
            # In the next tick: if the owner is lost, that ends this answer too, and says more.
            assert held.error is not None
            self.get_loop().call_soon(self._abandon, held.error)

    def _abandon(self, error: Exception) -> None:
        if not self.done():
            caller = self.info.caller
            self.set_exception(fresh_copy(error))
            if caller is not None:
                caller.cancelled(self)

    def set_result(self, result: Any) -> None:
        _end(self, result)
        self._rref = None

    def set_exception(self, exception: Any) -> None:
        if (rref := self._rref) is not None:
            self._rref = None
            if rref.type_future is self:  # an awaited error holds frames that hold the reference
                rref.type_future = None
            held = rref.record
            if isinstance(held, UserRecord):
                if getattr(exception, "worker", None) == held.owner.name:
                    exception = owner_lost(exception)
                if isinstance(exception, RRefExpired):
                    held.error = fresh_copy(exception)
        super().set_exception(exception)


class CreateFuture(OwnerFuture):
    """The answer to a creation, and to a fetch that comes along with it.

    By itself it never fails: what came of the creation is told to `_refs`. With a reference, it is
    what `to_here` gives, and ends with the value, or with what prevented it.
    """

    # Set by who makes it: an `__init__` of our own would cost as much as the future.
    __slots__ = ("_held", "_inherited", "_limited", "_made", "_refs", "_subject", "_until")
    _refs: RRefs
    # None: it was answered, and the value is asked for by itself
    _made: OwnerRecord | UserRecord | None
    _subject: RRef | None  # kept until then
    _held: Any  # the baggage it took along
    _limited: bool  # by a timeout of its own
    _inherited: float  # when the call that makes it must end
    _until: float  # loop time; set with `_rref`

    def set_result(self, result: Any) -> None:
        if (made := self._made) is None:
            return super().set_result(result)
        self._subject = self._held = self._made = None
        self._refs.creation_ended(made, None)
        if self._rref is None:
            _end(self, None)
        elif result is NO_VALUE:
            self._refs.fetch_separately(self, self._until)
        else:
            self._rref = None
            _end(self, result)

    def set_exception(self, exception: Any) -> None:
        if (made := self._made) is None:
            return super().set_exception(exception)
        self._subject = self._held = self._made = None
        self._refs.creation_ended(made, exception)
        if self._rref is None:
            _end(self, None)
        else:
            super().set_exception(self._fetch_error(exception))

    def _fetch_error(self, error: Exception) -> Exception:
        """What the end of a creation is to a fetch that should come along."""
        assert self._rref is not None
        held = self._rref.record
        assert isinstance(held, UserRecord)
        if isinstance(error, DeadlineExceeded) and not self._limited:
            return DeadlineExceeded(held.owner.name, "rref.fetch", self.info.seconds)
        if isinstance(error, WorkerLost):
            return owner_lost(error)  # type: ignore[no-any-return]
        # Given back already, because this worker shuts down: the creation itself has no outcome.
        return error if held.error is None else fresh_copy(held.error)

    def cancel(self, msg: Any | None = None) -> bool:
        caller = self.info.caller
        piggybacked = self._made is not None and self._rref is not None
        if caller is not None and piggybacked and _on_thread_of(self._refs.agent):
            caller.replace(self, self._without_fetch())
            # The other future has the call now: this one is no more than a cancelled fetch.
            self.info = CallInfo(self.info.name)
            self._rref = self._made = None
        return super().cancel(msg)

    def _without_fetch(self) -> CreateFuture:
        """Return what waits for the creation instead: only the fetch was cancelled."""
        other = CreateFuture(loop=self.get_loop())
        other.info, other._rref = self.info, None
        other._refs, other._made, other._subject = self._refs, self._made, self._subject
        other._held, other._limited, other._inherited = self._held, self._limited, self._inherited
        return other


def _on_thread_of(agent: Agent) -> bool:
    return threading.get_ident() == agent.thread


class LocalWait(Future[Any]):
    """The outcome of a value that is made here."""

    __slots__ = ("_owned", "_owner")

    def __init__(self, loop: asyncio.AbstractEventLoop, owned: OwnerRecord, owner: str) -> None:
        super().__init__(loop=loop)
        self.info = CallInfo()
        self._owned, self._owner = owned, owner

    def begin(self, bucket: Bucket | None) -> None:
        """Wait for the outcome; `bucket` tells when the time is over."""
        if self._owned.ready:
            self.end()
        elif not self.done():
            self._owned.waiters[self] = self.end
            if bucket is not None:
                self.info.bucket = bucket
                bucket[self] = None

    def end(self) -> None:
        """Take the outcome, which is there now."""
        self._leave()
        owned = self._owned
        if not self.done():
            if owned.creator_error is not None:  # it was given up because of that
                self.set_exception(fresh_copy(owned.creator_error))
            elif owned.error is not None:
                self.set_exception(fresh_copy(owned.error, owned.traceback))
            else:
                self.set_result(owned.value)

    def expire(self) -> None:
        self._leave()
        if not self.done():
            self.set_exception(DeadlineExceeded(self._owner, self.info.name, self.info.seconds))

    def cancel(self, msg: Any | None = None) -> bool:
        self._leave()
        return super().cancel(msg)

    def _leave(self) -> None:
        self._owned.waiters.pop(self, None)
        if self.info.bucket is not None:
            self.info.bucket.pop(self, None)
            self.info.bucket = None
