"""The caller's side of a link: how calls begin, and how they end (by an answer: see `replies`).

Calls beyond `max_inflight`, or while `outbound_buffer` bytes wait already, stay here until others
have ended (see `waiting`). Every call ends exactly once: by reply, fault, deadline, cancellation,
or loss of the peer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

from aiograd.errors import (
    DeadlineExceeded,
    Overloaded,
    WorkerLost,
    WorkerUnresponsive,
)
from aiograd.rpc.callee.functions import Shipment
from aiograd.rpc.caller.replies import Replies
from aiograd.rpc.caller.window import Waiting
from aiograd.rpc.extension import run_undo
from aiograd.rpc.future import Future, fail
from aiograd.rpc.link.send import EARLY
from aiograd.rpc.scope import DEADLINE
from aiograd.wire.codec import Payload
from aiograd.wire.fastcodec import ALONE, call_entry
from aiograd.wire.framing import HEADER, MAGIC, SMALL
from aiograd.wire.messages import CALL, CANCEL, KEEP, LAZY, NESTED, OP, PIGGYBACK

if TYPE_CHECKING:
    from aiograd.rpc.link.link import Link

_log = logging.getLogger("aiograd")
UNRESPONSIVE = 30.0  # seconds of silence after which calls without a deadline end


class Caller(Replies):
    """All calls and requests to one peer that have not ended."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._limit = link.agent.options.max_inflight
        self._bytes_limit = link.agent.options.outbound_buffer
        self._outbox = link.outbox
        self._deadlines = link.agent.deadlines
        # Of calls, requests and posts. Taken only by what is put into the outbox next: the peer
        # relies on numbers that rise (`inbox.Once`).
        self.last_id = 0

    def agree(self, most: int) -> None:
        """The peer takes only so many calls at once."""
        self._limit = max(1, min(self._limit, most))

    def leave_room(self, size: int) -> None:
        """So many of the bytes that may wait for the peer wait elsewhere."""
        self._bytes_limit -= size

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    def begin_small(
        self,
        future: Future[Any],
        kind: int,
        flags: int,
        seconds: float,
        deadline: float,
        shipment: Shipment,
        data: bytes,
    ) -> None:
        """The usual case in one step: a small message, on the loop, over an open connection."""
        link, pending, outbox = self._link, self.pending, self._outbox
        number = link.numbers.get(shipment)
        if (
            number is None
            or not link.quick
            or (kind == CALL and (len(pending) >= self._limit or self.waiting))
            or self.agent.fault_injector is not None
            or len(data) > SMALL
        ):
            self.begin(future, kind, flags, deadline, shipment, Payload(data), False)
            return
        future._caller = self
        if deadline != math.inf:
            future._bucket = bucket = self._deadlines.bucket(deadline, seconds)
            bucket[future] = None
        self.last_id = future._id = id = self.last_id + 1
        pending[id] = future
        if outbox.row:
            outbox.end_batch()
        small = outbox.small
        if flags & KEEP:
            flags = self.copies.stays(future, id, flags)
        frame = HEADER.pack(MAGIC, kind, flags, len(data), id, seconds, number)
        if flags & (KEEP | PIGGYBACK) == KEEP:
            future._frame = (len(small), frame)
        small.append(frame)
        small.append(data)
        if flags & (KEEP | LAZY) == LAZY:
            outbox.linger(2)
        elif len(small) > EARLY and flags & (KEEP | PIGGYBACK) != KEEP:  # may still be asked for
            outbox.flush_early()
        elif not outbox.scheduled and not outbox.corked:
            if len(pending) == 1 and not flags & KEEP:  # the others of a burst share a write
                outbox.flush_early()
            else:
                outbox.schedule()

    def begin_batched(
        self,
        future: Future[Any],
        flags: int,
        seconds: float,
        deadline: float,
        shipment: Shipment,
        args: tuple[Any, ...],
        token: bytes | None,
    ) -> bool:
        """The same for a call that may share a frame with others; False if it may not."""
        link, pending = self._link, self.pending
        number = link.numbers.get(shipment)
        if (
            number is None
            or not link.quick
            or len(pending) >= self._limit
            or self.waiting
            or self.agent.fault_injector is not None
            # A copy of it may still be asked for.
            or (token is not None and not (self.copies.eager and flags & OP))
        ):
            return False
        entry = call_entry(args, self.agent.travellers.boxes)
        if entry is ALONE:
            return False
        future._caller = self
        if deadline != math.inf:
            future._bucket = bucket = self._deadlines.bucket(deadline, seconds)
            bucket[future] = None
        self.last_id = future._id = id = self.last_id + 1
        pending[id] = future
        if token is not None:
            flags = self.copies.stays(future, id, flags | KEEP)
            entry = (token, entry)
        self._outbox.put_batched(CALL, flags, id, seconds, number, entry, len(pending) == 1)
        return True

    def begin(
        self,
        future: Future[Any],
        kind: int,
        flags: int,
        deadline: float,
        shipment: Shipment,
        payload: Payload,
        embedded: bool,
    ) -> None:
        """Send a call or request, or let it wait until fewer are under way."""
        link = self._link
        if future.done():  # cancelled in another thread meanwhile
            run_undo(future._undo)
            return
        if link.error is not None:
            run_undo(future._undo)
            self._end(future, lost(link.error, executed="no"))
            return
        future._caller = self
        if deadline != math.inf:
            future._bucket = bucket = self._deadlines.bucket(deadline)
            bucket[future] = None
        if kind == CALL and (self._full() or self.waiting):
            start = (future, kind, flags, deadline, shipment, payload, embedded)
            self.waiting.enter(future, start, DEADLINE.get())
            if self.waiting.families:
                self._start_beyond()
        else:
            self._start(future, kind, flags, deadline, shipment, payload, embedded)

    def _full(self) -> bool:
        return len(self.pending) >= self._limit or self._outbox.waiting > self._bytes_limit

    def _start(
        self,
        future: Future[Any],
        kind: int,
        flags: int,
        deadline: float,
        shipment: Shipment,
        payload: Payload,
        embedded: bool,
    ) -> None:
        link = self._link
        number = 0 if embedded else link.number(shipment)
        self.last_id = future._id = id = self.last_id + 1
        self.pending[id] = future
        budget = deadline - self.agent.loop.time() if deadline != math.inf else math.inf
        link.send(kind, flags, id, budget, number, payload, future._kind, future._undo, future)

    def renumber(self, id: int) -> int:
        """A message that was carried back on purpose leaves now: its new number."""
        self.last_id = now = self.last_id + 1
        if (future := self.pending.pop(id, None)) is not None:  # not a post, and still awaited
            future._id = now
            self.pending[now] = future
        return now

    def proceed(self) -> None:
        """Start calls that waited, as far as there is room."""
        while self.waiting and not self._full():
            future, start = self.waiting.popitem(last=False)
            if not future.done():
                self._start(*start)
        if self.waiting.families:
            self._start_beyond()

    def _start_beyond(self) -> None:
        """Start nested calls for which others that wait must not be waited for."""
        waiting = self.waiting
        if self._outbox.waiting <= self._bytes_limit:
            for parent, (future, kind, flags, *rest) in waiting.due(self.pending):
                if not future.done():
                    self._start(future, kind, flags | NESTED, *rest)
                    waiting.left(parent, future._id)
        if not waiting:
            waiting.tidy(self.pending)

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def _forget(self, future: Future[Any]) -> None:
        future._caller = None
        if self.pending.pop(future._id, None) is None and self.waiting:
            self.waiting.pop(future, None)
        bucket = future._bucket
        if bucket is not None:
            bucket.pop(future, None)
            future._bucket = None

    def _end(self, future: Future[Any], error: BaseException) -> None:
        self._forget(future)
        if future._trace is not None:
            future._trace.end(future, error)
        if future._stream is not None:
            future._stream.ended(error)
        else:
            fail(future, error)

    def cancelled(self, future: Future[Any]) -> None:
        """The caller gave up."""
        if future._id in self.pending:
            self._link.put_small(CANCEL, future._id)
        else:
            run_undo(future._undo)
        self._forget(future)
        if future._trace is not None:
            future._trace.end(future, asyncio.CancelledError())
        self.proceed()

    def expired(self, future: Future[Any]) -> None:
        """The deadline of a call has come."""
        future._bucket = None
        error: Exception
        if future._id in self.pending:
            self._link.put_small(CANCEL, future._id)
            error = DeadlineExceeded(self._link.peer.name, future._function, future._seconds)
        else:
            run_undo(future._undo)
            self.agent.limits.reached("window")
            why = f"{self._limit} calls or too many bytes were under way until the deadline"
            error = Overloaded(self._link.peer.name, why)
        self._end(future, error)
        self.proceed()

    def refused(self, future: Future[Any], error: Exception) -> None:
        """It could not be sent; told in the next tick, as any other failure."""
        self._forget(future)
        if future._trace is not None:
            future._trace.end(future, error)
        if future._stream is not None:
            self.agent.loop.call_soon(future._stream.ended, error)
        else:
            self.agent.loop.call_soon(fail, future, error)

    def silent(self, seconds: float) -> None:
        """The peer is connected but says nothing."""
        if seconds < UNRESPONSIVE:
            return
        for future in list(self.pending.values()):
            if future._bucket is None:
                why = f"{seconds:g} s"
                self._end(future, WorkerUnresponsive(self._link.peer.name, why=why))
        self.proceed()

    def lose(self, error: Exception, unsent: set[tuple[int, int]] | None) -> None:
        """The peer is gone. `unsent` are (kind, id) that never left; None: nothing ever did."""
        waiting, self.waiting = self.waiting, Waiting()
        for future in waiting:
            run_undo(future._undo)
            self._end(future, lost(error, "no"))
        for id, future in list(self.pending.items()):
            never = unsent is None or (CALL, id) in unsent
            if never:
                run_undo(future._undo)
            self._end(future, lost(error, "no" if never else "unknown"))


def lost(error: Exception, executed: str) -> Exception:
    """The error of a lost link, as it concerns one call."""
    if isinstance(error, WorkerLost):
        return WorkerLost(error.worker, executed, error.why)
    return error
