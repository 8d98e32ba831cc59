"""Futures that know the reference they are about.

    OwnerFuture    the answer of an owner to a fetch, a method call, or another question
    CreateFuture   the answer to a creation, and to the fetch that piggybacks on it
    LocalWait      the outcome of a value that is made on this worker

They override `set_result`, `set_exception` and `cancel` instead of adding callbacks and tasks,
because references are made and fetched by the thousand. For the same reason the code that makes
one sets its slots: an `__init__` of our own would cost as much as the future itself.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from aiograd.errors import DeadlineExceeded, RRefExpired, WorkerLost
from aiograd.rpc.api import Latch
from aiograd.rpc.caller.replies import NO_VALUE
from aiograd.rpc.future import CallInfo, Future
from aiograd.rref.refcount.records import (
    OwnerRecord,
    Record,
    UserRecord,
    fresh_copy,
    with_callback,
)
from aiograd.rref.services import owner_lost

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.runtime.deadlines import Bucket


class Reference(Protocol):
    """What the library uses of an `RRef`: modules below `rref` do not know the class."""

    record: Record
    released: bool  # by user code
    type_future: Future[type] | None  # the type of the value, once somebody has asked for it

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""


class Registry(Protocol):
    """What a `CreateFuture` needs of the references of its worker."""

    @property
    def agent(self) -> Agent:
        """The worker."""

    def creation_ended(self, record: Record, error: Exception | None) -> None:
        """Take note that the owner has answered a creation, or never will."""

    def fetch_separately(self, answer: CreateFuture) -> None:
        """Fetch a value that the answer to its creation did not bring."""


def block_on(agent: Agent, future: asyncio.Future[Any]) -> Any:
    """Wait, in a thread, for a future of the loop; an interrupt does not cancel it."""
    # The latch waits for a future of its own. It must be attached before the loop can end what it
    # waits for, and `future` may be ending right now.
    outer: asyncio.Future[Any] = agent.loop.create_future()
    latch = Latch(outer)
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
    """Return a callback that ends a future without a result, unless it has ended."""

    def happened() -> None:
        if not future.done():
            future.set_result(None)

    return happened


# Bound once: `super().set_result` builds an object per call, and this is called by the thousand.
_end = asyncio.Future.set_result


class OwnerFuture(Future[Any]):
    """The answer of the owner of a reference.

    Keeps the reference until it ends: a release must not overtake the question.
    """

    __slots__ = ("rref",)
    rref: Reference | None  # set by the code that makes it; None again when it has ended

    def follow(self, record: UserRecord) -> None:
        """Fail with the creation: the owner may never hear of that, and wait for it for ever."""
        if record.unanswered:
            failed = functools.partial(self._creation_failed, record)
            record.on_failed = with_callback(record.on_failed, failed)

    def _creation_failed(self, record: UserRecord) -> None:
        if not self.done():
            # In the next tick: if the owner is lost, its link fails this future too, in this tick,
            # and with an error that says more.
            assert record.error is not None
            self.get_loop().call_soon(self._abandon, record.error)

    def _abandon(self, error: Exception) -> None:
        if not self.done():
            caller = self.info.caller
            self.set_exception(fresh_copy(error))
            if caller is not None:
                caller.cancelled(self)  # the owner stops waiting, too

    def set_result(self, result: Any) -> None:
        """End with the answer; drop the reference."""
        _end(self, result)
        self.rref = None

    def set_exception(self, exception: Any) -> None:
        """Fail; drop the reference. The loss of its owner becomes OwnerLost."""
        if (rref := self.rref) is not None:
            self.rref = None
            if rref.type_future is self:
                # An awaited error holds frames that hold the reference, which must not hold it.
                rref.type_future = None
            record = rref.record
            if isinstance(record, UserRecord):
                if getattr(exception, "worker", None) == record.owner.name:
                    exception = owner_lost(exception)
                if isinstance(exception, RRefExpired):
                    # Final: later uses fail at once, without asking the owner.
                    record.error = fresh_copy(exception)
        super().set_exception(exception)


class CreateFuture(OwnerFuture):
    """The answer to a creation, and to the fetch that piggybacks on it.

    Without a fetch it never fails: the registry gets the outcome of the creation. With a fetch
    (then `rref` is set) it is what `to_here` returned, and ends with the value or with an error.
    """

    __slots__ = ("deadline", "inherited", "limited", "record", "registry", "subject")

    info: CallInfo
    rref: Reference | None

    registry: Registry
    record: Record | None  # of the new reference; None: answered, and the value is fetched alone
    subject: Reference | None  # kept until the answer: the value whose method makes this one
    limited: bool  # by a timeout of its own
    inherited: float  # the deadline of the call that makes it
    deadline: float  # of the fetch, in loop time; set together with `rref`

    def set_result(self, result: Any) -> None:
        """Take the answer to the creation, or to the separate fetch that followed it."""
        if (record := self.record) is None:
            return super().set_result(result)
        self.subject = self.record = self.info.carried = None
        self.registry.creation_ended(record, None)
        if self.rref is None:
            _end(self, None)
        elif result is NO_VALUE:
            # The value cannot be sent, or its function failed: a separate fetch gets the error.
            # This future stays open and becomes the future of that fetch.
            self.registry.fetch_separately(self)
        else:
            self.rref = None
            _end(self, result)

    def set_exception(self, exception: Any) -> None:
        """Take the failure of the creation, or of the separate fetch that followed it."""
        if (record := self.record) is None:
            return super().set_exception(exception)
        self.subject = self.record = self.info.carried = None
        self.registry.creation_ended(record, exception)
        if self.rref is None:
            _end(self, None)  # nobody awaits it; an error would be logged as never retrieved
        else:
            super().set_exception(self._fetch_error(exception))

    def _fetch_error(self, error: Exception) -> Exception:
        """Return what the failure of the creation means for the fetch."""
        assert self.rref is not None
        record = self.rref.record
        assert isinstance(record, UserRecord)
        if isinstance(error, DeadlineExceeded) and not self.limited:
            # Both ended with the deadline they share; a separate fetch would have said this.
            return DeadlineExceeded(record.owner.name, "rref.fetch", self.info.seconds)
        if isinstance(error, WorkerLost):
            return owner_lost(error)  # type: ignore[no-any-return]
        # A record without error was released already, because this worker shuts down. Then the
        # creation has no outcome, and only `error` says what happened.
        return error if record.error is None else fresh_copy(record.error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the fetch. The creation goes on: other workers may refer to the value."""
        caller = self.info.caller
        piggybacked = self.record is not None and self.rref is not None
        # In another thread `super().cancel` only schedules this method on the loop.
        if caller is not None and piggybacked and _on_thread_of(self.registry.agent):
            caller.replace(self, self._without_fetch())
            # The other future has the call now: this one is no more than a cancelled fetch.
            self.info = CallInfo(self.info.name)
            self.rref = self.record = None
        return super().cancel(msg)

    def _without_fetch(self) -> CreateFuture:
        """Return the future that takes the answer to the creation in place of this one."""
        other = CreateFuture(loop=self.get_loop())
        other.info, other.rref = self.info, None
        other.registry, other.record, other.subject = self.registry, self.record, self.subject
        other.limited, other.inherited = self.limited, self.inherited
        return other


def _on_thread_of(agent: Agent) -> bool:
    return threading.get_ident() == agent.thread


class LocalWait(Future[Any]):
    """The outcome of a value that is made on this worker."""

    __slots__ = ("_owner", "_record")

    info: CallInfo

    def __init__(self, loop: asyncio.AbstractEventLoop, record: OwnerRecord, owner: str) -> None:
        super().__init__(loop=loop)
        self.info = CallInfo()
        self._record, self._owner = record, owner

    def begin(self, bucket: Bucket | None) -> None:
        """Wait for the outcome, until the deadline of `bucket`. On the loop."""
        # From a thread this comes a tick later: the value may be there, or the wait cancelled.
        if self._record.ready:
            self.end()
        elif not self.done():
            self._record.waiters[self] = self.end
            if bucket is not None:
                self.info.bucket = bucket
                bucket[self] = None

    def end(self) -> None:
        """Take the outcome; the record is ready."""
        self._leave()
        record = self._record
        if not self.done():
            # First: the record was abandoned because of it, and its own error says less.
            if record.creator_error is not None:
                self.set_exception(fresh_copy(record.creator_error))
            elif record.error is not None:
                self.set_exception(fresh_copy(record.error, record.traceback))
            else:
                self.set_result(record.value)

    def expire(self) -> None:
        """Fail because the deadline has come (called by `Deadlines`)."""
        self._leave()
        if not self.done():
            self.set_exception(DeadlineExceeded(self._owner, self.info.name, self.info.seconds))

    def cancel(self, msg: Any | None = None) -> bool:
        """Stop waiting; the function that makes the value goes on."""
        self._leave()
        return super().cancel(msg)

    def _leave(self) -> None:
        # A waiter that stays behind would keep an abandoned record in the owner's table.
        self._record.waiters.pop(self, None)
        if self.info.bucket is not None:
            self.info.bucket.pop(self, None)
            self.info.bucket = None
