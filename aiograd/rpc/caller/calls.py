"""The caller's half of a link: how calls to one peer start, and how they end without an answer.

    Agent.call ─┬─ fast path ──▶ start_batched ─▶ [window] ─▶ outbox, in a batch with others
                └─ general ────▶ envelope ─▶ start ─▶ [window] ─▶ channel.send ─▶ outbox
    answers ─▶ `replies`

Calls beyond `max_inflight`, or while `outbound_buffer` bytes wait already, stay in the window until
others have ended. Every call ends exactly once: by reply, fault, deadline, cancellation, or loss of
the peer.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any, Final

from aiograd.errors import DeadlineExceeded, Overloaded, WorkerLost, WorkerUnresponsive
from aiograd.rpc.callee.functions import Shipment
from aiograd.rpc.caller.window import Window
from aiograd.rpc.channel import Channel, Host
from aiograd.rpc.extension import run_undo
from aiograd.rpc.future import Future, fail
from aiograd.rpc.link.send import NORMAL, NOW, OpenCall
from aiograd.rpc.scope import SCOPE
from aiograd.wire.codec import Payload
from aiograd.wire.fastcodec import NOT_BATCHABLE, encode_batch, encode_call_entry
from aiograd.wire.framing import Frame
from aiograd.wire.messages import BATCH, CALL, CANCEL, FAST, KEEP, NESTED, OP, REQUEST

UNRESPONSIVE: Final = 30.0  # seconds of silence after which calls without a deadline end


@dataclass(slots=True)
class WaitingCall:
    """A call of the general path that waits in the window; it is packed, and has no number."""

    flags: int
    shipment: Shipment | None  # None: the function is inside the payload
    payload: Payload


@dataclass(slots=True)
class WaitingEntry:
    """A call of the fast path that waits in the window; it joins a batch when it leaves."""

    flags: int
    shipment: Shipment
    entry: Any  # of a batch; with KEEP (token, entry)


# What is left of a deadline is rounded up to this when a call leaves the window late. Calls with
# one budget can share a frame; the caller's own deadlines are as coarse (`runtime.deadlines.STEP`).
_BUDGET_STEPS: Final = 50.0  # per second


class Caller:
    """All calls and requests to one peer that have not ended."""

    last_id: int
    window: Window

    def __init__(self, channel: Channel, host: Host) -> None:
        self._channel, self._host = channel, host
        self._outbox, self._deadlines = channel.outbox, host.deadlines
        self._limit = host.options.max_inflight
        self._bytes_limit = host.options.outbound_buffer
        self.pending: dict[int, Future[Any]] = {}  # sent, by number
        self.window = Window()  # not sent so far
        # The number of the latest call, request or post. Taken only by what is put into the outbox
        # next: the peer relies on numbers that rise (`link.inbox.Once`).
        self.last_id = 0

    def agree(self, most: int) -> None:
        """Have at most as many calls under way as the peer takes."""
        self._limit = max(1, min(self._limit, most))

    def reserve(self, size: int) -> None:
        """Take `size` bytes off the outbound limit: the shared-memory arena uses them."""
        self._bytes_limit -= size

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    def start_batched(
        self, future: Future[Any], shipment: Shipment, args: tuple[Any, ...], token: bytes | None
    ) -> bool:
        """Fast path for small plain arguments; False if the call has to take the general one.

        Calls that follow each other share a frame and one pickle: 256 calls in flight run 1.7 to 2
        times as fast as by the general path (`benchmarks/peers`, rpc.tput.256). On the loop only.
        """
        channel, info, pending = self._channel, future.info, self.pending
        number = channel.numbers.get(shipment)
        if (
            number is None  # the function must be defined first
            or not channel.ready  # nothing is connected: `channel.send` dials
            or self._host.fault_injector is not None  # wants to see messages one by one
        ):
            return False
        entry = encode_call_entry(args, channel.boxes)
        if entry is NOT_BATCHABLE:
            return False
        info.caller = self  # as in `start`
        if info.deadline != math.inf:
            info.bucket = bucket = self._deadlines.bucket(info.deadline, info.seconds)
            bucket[future] = None
        else:
            info.began = self._host.loop.time()
        flags = FAST | (shipment.flags & OP)
        if self.window or len(pending) >= self._limit:
            if token is not None:
                flags, entry = flags | KEEP, (token, entry)
            item = WaitingEntry(flags, shipment, entry)
            if info.parent is None:  # `_wait`, written out for a call that no other one makes
                self.window[future] = item
            else:
                self._wait(future, item)
            return True
        self.last_id = info.id = id = self.last_id + 1
        pending[id] = future
        if token is None:
            lane = NOW if len(pending) == 1 else NORMAL
            self._outbox.put_batched((CALL, flags, info.seconds, number), id, entry, lane)
        else:
            head = (CALL, flags | KEEP, info.seconds, number)
            info.queued = OpenCall(head, id, (token, entry))
            self._outbox.put_open(info.queued)
        return True

    def start(
        self,
        future: Future[Any],
        kind: int,
        flags: int,
        shipment: Shipment | None,
        payload: Payload,
    ) -> None:
        """Send a call or request, or let it wait until fewer are under way. On the loop only.

        `shipment` is None if the function is inside the payload."""
        info, error = future.info, self._channel.error
        if error is not None:
            run_undo(info.undo)
            self.end(future, lost(error, executed="no"))
            return
        info.caller = self  # from here on it ends by `cancel`, and at its deadline
        if info.deadline != math.inf:
            info.bucket = bucket = self._deadlines.bucket(info.deadline, info.seconds)
            bucket[future] = None
        else:
            info.began = self._host.loop.time()
        if kind == CALL and (
            self.window
            or len(self.pending) >= self._limit
            or self._outbox.waiting > self._bytes_limit
        ):
            self._wait(future, WaitingCall(flags, shipment, payload))
        else:
            self._send(future, kind, flags, shipment, payload, info.seconds)

    def start_from_thread(
        self,
        future: Future[Any],
        kind: int,
        flags: int,
        shipment: Shipment | None,
        payload: Payload,
    ) -> None:
        """`start` what another thread has packed, unless it was cancelled meanwhile."""
        if future.done():
            run_undo(future.info.undo)
        else:
            self.start(future, kind, flags, shipment, payload)

    def _wait(self, future: Future[Any], item: WaitingCall | WaitingEntry) -> None:
        """Let a call wait until fewer are under way."""
        self.window.enter(future, item, SCOPE.get().call)
        if self.window.families:
            self._start_beyond()

    def _full(self) -> bool:
        return len(self.pending) >= self._limit or self._outbox.waiting > self._bytes_limit

    def _send_late(self, future: Future[Any], item: WaitingCall | WaitingEntry, now: float) -> None:
        """Send what has waited in the window: its budget is what is left of it."""
        budget = future.info.deadline
        if budget != math.inf:
            budget = math.ceil((budget - now) * _BUDGET_STEPS) / _BUDGET_STEPS
        if isinstance(item, WaitingEntry):
            self._send_entry(future, item, budget)
        else:
            self._send(future, CALL, item.flags, item.shipment, item.payload, budget)

    def _send_entry(self, future: Future[Any], item: WaitingEntry, budget: float) -> None:
        """Put a call that has waited into a batch, as if there had been room at once.

        By the general path, with a frame for each, 20,000 calls at once take 1.4 times as long
        (`benchmarks/scaling`, inflight).
        """
        channel, info = self._channel, future.info
        flags, shipment, entry = item.flags, item.shipment, item.entry
        number = channel.numbers.get(shipment) or channel.number(shipment)
        self.last_id = info.id = id = self.last_id + 1
        self.pending[id] = future
        if self._host.fault_injector is not None:  # since it waits; see `start_batched`
            payload = Payload(encode_batch([entry]))
            frame = Frame(CALL, flags | BATCH, id, budget, number, payload)
            channel.send(frame, info.label, info.undo, future)
        elif flags & KEEP:
            info.queued = OpenCall((CALL, flags, budget, number), id, entry)
            self._outbox.put_open(info.queued)
        else:
            self._outbox.put_batched((CALL, flags, budget, number), id, entry)

    def _send(
        self,
        future: Future[Any],
        kind: int,
        flags: int,
        shipment: Shipment | None,
        payload: Payload,
        budget: float,
    ) -> None:
        channel, info = self._channel, future.info
        number = 0
        if shipment is not None:
            number = channel.numbers.get(shipment) or channel.number(shipment)
        self.last_id = info.id = id = self.last_id + 1
        self.pending[id] = future
        if flags & KEEP and channel.is_direct(payload):
            # Its reply may still be asked to bring a copy: see `piggyback`.
            info.queued = OpenCall((kind, flags, budget, number), id, payload.data)
            self._outbox.put_open(info.queued)
        else:
            frame = Frame(kind, flags, id, budget, number, payload)
            channel.send(frame, info.label, info.undo, future)

    def piggyback(self, future: Future[Any]) -> bool:
        """Let the reply bring a copy of a result that stays; False if the call has left."""
        queued = future.info.queued
        if queued is None or not self._outbox.piggyback(queued):
            return False
        if len(self.pending) == 1:  # nothing is to be added to it
            self._outbox.flush_early()
        return True

    def renumber(self, id: int) -> int:
        """Give a message that fault injection held back, and that leaves now, its new number."""
        self.last_id = now = self.last_id + 1
        if (future := self.pending.pop(id, None)) is not None:  # not a post, and still awaited
            future.info.id = now
            self.pending[now] = future
        return now

    def proceed(self) -> None:
        """Start calls that waited, as far as there is room."""
        window, now = self.window, self._host.loop.time()
        while window and not self._full():
            future, item = window.popitem(last=False)
            if future.done():
                continue
            if item.__class__ is WaitingEntry and not item.flags & KEEP:
                self._send_run(future, item, now)
            else:
                self._send_late(future, item, now)
        if window.families:
            self._start_beyond()

    def _send_run(self, future: Future[Any], item: WaitingEntry, now: float) -> None:
        """Send a call that has waited, and those behind it that may share its frame.

        One by one, 20,000 calls at once take 1.15 times as long (`benchmarks/scaling`, inflight).
        """
        info, pending, window = future.info, self.pending, self.window
        if self._host.fault_injector is not None:
            self._send_late(future, item, now)
            return
        shipment, flags = item.shipment, item.flags
        # Deadlines between these two have the same budget, which a frame has once for all calls.
        budget = latest = info.deadline
        earliest = -math.inf
        if budget != math.inf:
            budget = math.ceil((budget - now) * _BUDGET_STEPS) / _BUDGET_STEPS
            latest = now + budget
            earliest = latest - 1 / _BUDGET_STEPS
        entries: list[Any] = []
        room = self._limit - len(pending)
        first = id = self.last_id + 1
        while True:
            pending[id] = future
            future.info.id = id
            entries.append(item.entry)
            id += 1
            room -= 1
            if not room or not window:
                break
            future, item = window.popitem(last=False)
            if (
                item.__class__ is not WaitingEntry
                or item.shipment is not shipment
                or item.flags != flags
                or not earliest < future.info.deadline <= latest
                or future.done()
            ):
                window[future] = item
                window.move_to_end(future, last=False)
                break
        self.last_id = id - 1
        number = self._channel.numbers.get(shipment) or self._channel.number(shipment)
        self._outbox.put_run((CALL, flags, budget, number), first, entries)

    def _start_beyond(self) -> None:
        """Start nested calls that must not wait for others in the window."""
        window = self.window
        if self._outbox.waiting <= self._bytes_limit:
            now = self._host.loop.time()
            for parent, future, item in window.due(self.pending):
                if not future.done():
                    item.flags |= NESTED
                    self._send_late(future, item, now)
                    window.left(parent, future.info.id)
        if not window:
            window.tidy(self.pending)

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def forget(self, future: Future[Any]) -> None:
        """Stop tracking a call that has ended."""
        info = future.info
        info.caller = None
        if self.pending.pop(info.id, None) is None and self.window:
            self.window.pop(future, None)
        if info.bucket is not None:
            info.bucket.pop(future, None)
            info.bucket = None

    def replace(self, future: Future[Any], other: Future[Any]) -> None:
        """Let another future wait for the answer; the first one is tracked no more."""
        info = other.info
        self.pending[info.id] = other
        if info.bucket is not None:
            info.bucket[other] = None
            info.bucket.pop(future, None)

    def end(self, future: Future[Any], error: BaseException) -> None:
        """Fail a call."""
        self.forget(future)
        info = future.info
        if info.trace is not None:
            info.trace.end(future, error)
        if info.stream is not None:
            info.stream.ended(error)
        else:
            fail(future, error)

    def cancelled(self, future: Future[Any]) -> None:
        """Cancel the work at the callee: nobody waits for the answer any more."""
        info = future.info
        if info.id in self.pending:
            self._channel.send_control(CANCEL, info.id)
        else:
            run_undo(info.undo)
        self.forget(future)
        if info.trace is not None:
            info.trace.end(future, asyncio.CancelledError())
        self.proceed()

    def expired(self, future: Future[Any]) -> None:
        """End a call whose deadline has come."""
        info, peer = future.info, self._channel.peer.name
        info.bucket = None
        error: Exception
        if info.id in self.pending:
            self._channel.send_control(CANCEL, info.id)
            error = DeadlineExceeded(peer, info.name, info.seconds)
        else:
            run_undo(info.undo)
            self._host.limits.reached("window")
            why = f"{self._limit} calls or too many bytes were under way until the deadline"
            error = Overloaded(peer, why)
        self.end(future, error)
        self.proceed()

    def refused(self, future: Future[Any], error: Exception) -> None:
        """Fail a call that could not be sent; in the next tick, as any other failure."""
        self.forget(future)
        info, call_soon = future.info, self._host.loop.call_soon
        if info.trace is not None:
            info.trace.end(future, error)
        if info.stream is not None:
            call_soon(info.stream.ended, error)
        else:
            call_soon(fail, future, error)

    def silent(self, seconds: float) -> None:
        """End calls without a deadline if the peer is connected and has been silent for long."""
        if seconds < UNRESPONSIVE:
            return
        for future in list(self.pending.values()):
            if future.info.bucket is None:
                why = f"{seconds:g} s"
                self.end(future, WorkerUnresponsive(self._channel.peer.name, why=why))
        self.proceed()

    def lose(self, error: Exception, unsent: set[tuple[int, int]] | None) -> None:
        """End every call: the peer is gone.

        `unsent` are (kind, id) of messages that never left; None: nothing ever did."""
        waiting, self.window = self.window, Window()
        for future in waiting:
            run_undo(future.info.undo)
            self.end(future, lost(error, "no"))
        for id, future in list(self.pending.items()):
            never = unsent is None or (CALL, id) in unsent or (REQUEST, id) in unsent
            if never:
                run_undo(future.info.undo)
            self.end(future, lost(error, "no" if never else "unknown"))


def lost(error: Exception, executed: str) -> Exception:
    """Return the error of a lost link as it concerns one call."""
    if isinstance(error, WorkerLost):
        made = WorkerLost(error.worker, executed, error.why)
        made.__cause__ = error.__cause__  # what an engine says of the end of its process
        return made
    return error
